"""What a player gives: finished turns, and frames of those that are not; and what it takes back."""

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.turns import NewTurn


@typing.runtime_checkable
class SavedTurn(typing.Protocol):
    """What a window needs of a past turn."""

    @property
    def instruction(self) -> str: ...
    @property
    def representation(self) -> np.ndarray: ...  # [n, r]
    @property
    def states(self) -> Any: ...  # [4]
    @property
    def latents(self) -> np.ndarray | None: ...  # [h, w, c], if the decoder has a memory


def check_turn(
    name: str,
    turn: SavedTurn,
    *,
    representation: tuple[int, ...],
    latents: tuple[int, ...] | None,
) -> None:
    """Checks that a past turn fits a model.

    Args:
        name: Name of the turn or of its file.
        turn: The turn.
        representation: Shape of the model's shot representations.
        latents: Shape of the latents of a first frame; None: the decoder remembers none.

    Raises:
        UserError: A shape differs, or the latents are missing.
    """
    if turn.representation.shape != representation:
        raise UserError(
            f"{name}: expected a shot representation of shape {list(representation)}, found "
            f"{list(turn.representation.shape)}"
        )
    found = None if turn.latents is None else turn.latents.shape
    if latents is not None and found != latents:
        raise UserError(
            f"{name}: expected latents of its first frame of shape {list(latents)}, which the "
            f"model's decoder remembers, found {'none' if found is None else list(found)}"
        )


class Preview(NamedTuple):
    """Frames of a turn that is not finished.

    `frames` are those from number `first` on, [g f h w 3]. They are the clip's own if `is_final`,
    otherwise the picture that comes first (`steps` is 0), or a guess after `steps` denoising steps.
    """

    frames: np.ndarray
    first: int
    steps: int
    is_final: bool


OnFrames = Callable[[Preview], None]


class TurnOutput(NamedTuple):
    """A played turn on the host; the leading axis counts games.

    `representation` is the one that entered the window (`rollout.remember`); `latents` are those of
    the first frame (`rollout.first_latents`), if the decoder has a memory.
    """

    representation: np.ndarray
    states: np.ndarray
    motion_value: np.ndarray
    frames: np.ndarray
    seconds: dict[str, float]
    latents: np.ndarray | None = None

    def row(self, game: int) -> NewTurn:
        """Returns the turn of one game, as `Game.add` saves it."""
        return NewTurn(
            states=self.states[game],
            motion_value=float(self.motion_value[game]),
            representation=self.representation[game].astype(np.float32),
            frames=self.frames[game],
            seconds=self.seconds,
            latents=None if self.latents is None else self.latents[game],
        )
