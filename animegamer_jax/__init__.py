"""AnimeGamer (arXiv 2504.01014) in JAX and Flax: games of anime life, one instruction a turn.

A turn of the game is `game.rollout.play_turn`: read that first. Importing the package does nothing.

Playing: `models` (networks), `diffusion` (sampler), `bundle` (weights), `game`, `play`, `serve`.
Making a model: `data` (films to features), `convert`, `train`, `evaluate`, `plan`, `bench`, `toy`.
"""

__version__ = "0.1.0"
