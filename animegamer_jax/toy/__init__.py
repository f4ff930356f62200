"""The toy world: a procedural anime world whose true clips and states are known.

world               games: turns, their rules and splits (read first); scene, vocabulary
drawing/            a scene to frames
dataset, films      games as a dataset, and films to test the film pipeline with
command             `animegamer data toyworld`
evaluation, scoring/   the world as `animegamer evaluate` sees it
"""
