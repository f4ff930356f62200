"""Saved games of a few small turns, without a model."""

import json
from pathlib import Path

import numpy as np

from animegamer_jax.game.saved.turns import NewPicture, NewTurn
from animegamer_jax.game.saved_game import Game

SECONDS = {"mllm": 0.1, "decoder": 0.2, "vae": 0.3, "total": 0.6}


def make_game(folder: Path, **fields) -> Game:
    defaults = {"model": "tiny", "seed": 0, "window": 3, "steps": 5, "protocol": "paper"}
    return Game.create(folder, **(defaults | fields))


def add_turn(
    game: Game, *, changes=(1, 0, -1), instruction: str = "", first_latents=None, **options
) -> None:
    number = len(game.turns) + 1
    turn = NewTurn(
        states=np.array([3, *changes], np.int32),
        motion_value=10.0,
        representation=np.full((6, 8), number, np.float32),
        frames=np.full((5, 16, 24, 3), number % 256, np.uint8),
        seconds=SECONDS,
        first_latents=first_latents,
    )
    game.add(turn, instruction or f"instruction {number}", **options)


def make_picture(*, size: tuple[int, int] = (16, 24)) -> NewPicture:
    return NewPicture(
        instruction="Hana stands.",
        representation=np.full((6, 8), 0.5, np.float32),
        states=np.array([1, 0, 0, 1], np.int32),
        pixels=np.full((*size, 3), 77, np.uint8),
    )


def edit(folder: Path, change) -> None:
    path = folder / "game.json"
    document = json.loads(path.read_text())
    change(document, document["turns"])
    path.write_text(json.dumps(document))
