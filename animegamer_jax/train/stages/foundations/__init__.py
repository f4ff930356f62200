"""The toy's foundations, which the paper takes ready-made: a stage for each network.

clip, t5, vae, dit    CLIP, T5's encoder, the VAE, the transformer from text to video
"""
