"""AnimeGamer (arXiv 2504.01014) in JAX and Flax: games of anime life, one instruction a turn.

A turn of the game is `game.rollout.play_turn`: read that first. The networks are in `models`, the
sampler in `diffusion`, a model on disk in `bundle`. Importing the package does nothing else.
"""

__version__ = "0.1.0"
