"""AnimeGamer (arXiv 2504.01014) in JAX and Flax: games of anime life, one instruction a turn.

Importing the package does nothing else: the networks are in `models`, the sampler in
`diffusion`, a turn in `rollout`, what a player holds in `game`, a model on disk in `bundle`.
"""

__version__ = "0.1.0"
