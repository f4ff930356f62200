"""A table from PyTorch tensors to parameters for each network; strict, and used both ways.

mllm, dit, encoder, vae, clip, t5   the released files: `rules(config)` and `infer_config(shapes)`
mistral, cogvideox                  the pre-trained files that training starts from
lpips                               AlexNet, for a metric
layers                              rules of one layer, which the tables share
"""
