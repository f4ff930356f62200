"""A player for `animegamer play` that needs no networks: its turns follow from seed and number."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import check_picture_text
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved.turns import NewPicture
from animegamer_jax.game.turn_output import TurnOutput
from animegamer_jax.media.pictures import fit_picture
from animegamer_jax.tokenizer import MAX_CHARACTERS

FRAMES, HEIGHT, WIDTH = 5, 16, 24
SHAPE = 16, 32  # of a representation, as in `helpers.tiny_config`


class _Tokenizer:
    def unknown_words(self, text: str) -> tuple[str, ...]:
        return ()


class StandInPlayer:
    """Plays turns of noise at once."""

    def __init__(self, bundle: Any, *, window: int | None, steps: int | None):
        self.protocol, self.tokenizer = bundle.protocol, _Tokenizer()
        self.window, self.steps = window or 3, steps or 2
        self.num_frames, self.height, self.width = FRAMES, HEIGHT, WIDTH
        self.networks, self.skipped = SimpleNamespace(vae=None), None

    def start(self, num_games: int) -> int:
        assert num_games == 1
        return 0

    @classmethod
    def from_bundle(cls, bundle: Any, *, window: Any, steps: Any, **_: Any) -> "StandInPlayer":
        return cls(bundle, window=window, steps=steps)

    def new_game(self, folder: Path, **options: Any) -> Any:
        return Player.new_game(cast(Player, self), folder, **options)

    def check_instruction(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"{len(text)} characters: expected at most {MAX_CHARACTERS}")

    def restore(self, games: Any) -> int:
        for turn in games[0]:
            assert turn.representation.shape == SHAPE
        return len(games[0])

    def play_turn(self, window: int, instructions: Any, *, seeds: Any, turn: int, **options: Any):
        rng = np.random.default_rng([seeds[0], turn])
        if on_progress := options.get("on_progress"):
            on_progress("mllm", 1, 1)
        return window, TurnOutput(
            rng.normal(size=(1, *SHAPE)).astype(np.float32),
            np.array([[1 + turn % 5, 1, 0, -1]], np.int32),
            np.array([turn / 2]),
            rng.integers(0, 256, (1, FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8),
            dict.fromkeys(("mllm", "decoder", "vae", "total"), 0.5),
        )


class StandInPictures:
    """Represents a picture by zeros."""

    def __init__(self, bundle: Any):
        pass

    def represent(self, picture: Any, text: str, *, name: str) -> NewPicture:
        return NewPicture(
            instruction=check_picture_text(text, name=name),
            representation=np.zeros(SHAPE, np.float32),
            states=np.array([1, 0, 0, 1], np.int32),
            pixels=fit_picture(picture, height=HEIGHT, width=WIDTH),
        )


def install() -> None:
    """Takes the place of the networks in this process."""
    from animegamer_jax.game import pictures, player

    player.Player.from_bundle = StandInPlayer.from_bundle  # pyright: ignore
    pictures.PictureEncoder = StandInPictures  # pyright: ignore
