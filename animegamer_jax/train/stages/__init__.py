"""The training stages: a module each, and what they share.

base, recipe          what a stage is, and how it is trained
foundations/          the toy's foundations, which the paper takes ready-made
decoder               warm-up and joint stage of shot encoder and decoder
games                 what stages share that read a window of turns
mllm, caption_heads   the language model; heads that name captions while it is trained
adapt                 the decoder on the language model's predictions; a decoder of pictures
distill               a student of the decoder; its losses are in distillation
shown_clips           what a model shows, for histories as in play
packing, networks     packed sequences; networks, their sizes and FLOPs
"""
