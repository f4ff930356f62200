"""Saved games of a few small turns, without a model."""

from pathlib import Path

import numpy as np

from animegamer_jax.game.saved.turns import NewTurn
from animegamer_jax.game.saved_game import Game

SECONDS = {"mllm": 0.1, "decoder": 0.2, "vae": 0.3, "total": 0.6}


def make_game(folder: Path, **fields) -> Game:
    defaults = {"model": "tiny", "seed": 0, "window": 3, "steps": 5, "protocol": "paper"}
    return Game.create(folder, **(defaults | fields))


def add_turn(game: Game, *, changes=(1, 0, -1), instruction: str = "", **options) -> None:
    number = len(game.turns) + 1
    turn = NewTurn(
        states=np.array([3, *changes], np.int32),
        motion_value=10.0,
        representation=np.full((6, 8), number, np.float32),
        frames=np.full((5, 16, 24, 3), number % 256, np.uint8),
        seconds=SECONDS,
    )
    game.add(turn, instruction or f"instruction {number}", **options)
