"""Scores that the toy world's known truth allows.

benchmark           held-out games in the benchmarks' format, and back
classifiers         character, place and time read off a clip, checked on true clips
decoder_samples     clips of true shot representations, by the decoder alone
"""
