"""Scores that the toy world's known truth allows.

benchmark           held-out games in the benchmarks' format, and back
attributes          what can be read off a clip, and the value of each attribute in a scene
classifier          the network that reads all attributes, with its weights in the package
decoder_samples     clips of true shot representations, by the decoder alone
"""
