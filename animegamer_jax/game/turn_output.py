"""A player's results (finished turns, previews), and the past turns that restore a window."""

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.turns import NewTurn

_HINT = "continue the game with the model that played it"


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
    def first_latents(self) -> np.ndarray | None: ...  # [h, w, c], if the decoder has a memory


def check_turn(
    name: str,
    turn: SavedTurn,
    *,
    representation: tuple[int, ...],
    first_latents: tuple[int, ...] | None,
) -> None:
    """Checks that a past turn fits a model.

    Args:
        name: Name of the turn or of its file.
        turn: The turn.
        representation: Shape of the model's shot representations.
        first_latents: Shape of the latents of a first frame (`DiTConfig.first_shape`); None: the
            decoder has no memory of this turn.

    Raises:
        UserError: A shape differs, or the latents are missing.
    """
    if turn.representation.shape != representation:
        raise UserError(
            f"{name}: expected a shot representation of shape {list(representation)}, found "
            f"{list(turn.representation.shape)}: {_HINT}"
        )
    found = None if turn.first_latents is None else turn.first_latents.shape
    if first_latents is not None and found != first_latents:
        raise UserError(
            f"{name}: expected latents of its first frame of shape {list(first_latents)}, which "
            f"the model's decoder remembers, found {'none' if found is None else list(found)}: "
            f"{_HINT}"
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

    `representation` is the one that entered the window (`rollout.remember`); `first_latents` are
    the latents of the first frame (`rollout.first_latents`), if the decoder has a memory.
    """

    representation: np.ndarray
    states: np.ndarray
    motion_value: np.ndarray
    frames: np.ndarray
    seconds: dict[str, float]
    first_latents: np.ndarray | None = None

    def row(self, game: int) -> NewTurn:
        """Returns the turn of one game, as `Game.add` saves it."""
        return NewTurn(
            states=self.states[game],
            motion_value=float(self.motion_value[game]),
            representation=self.representation[game].astype(np.float32),
            frames=self.frames[game],
            seconds=self.seconds,
            first_latents=None if self.first_latents is None else self.first_latents[game],
        )
