"""Metrics of clips and states.

registry            every metric: unit, definition, the paper's score (read first)
details             whether a game keeps what no word says
formulas, scorers   their formulas; what computes a group of them for a turn
suite               the scorers that a benchmark and the files at hand allow
clip_embedder, openclip, lpips, dreamsim, video_distance   the networks that they need
"""
