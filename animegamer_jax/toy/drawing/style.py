"""What films add to scenes: transitions, held drawings, pans, flashes, bars."""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.media.video import FRAMES_PER_SECOND

Frames = UInt8[np.ndarray, "f h w 3"]


@runtime_checkable
class Transition(Protocol):
    """A transition from one shot to the next: for `overlap` frames both are on screen."""

    @property
    def name(self) -> str: ...

    @property
    def overlap(self) -> int: ...

    def join(self, before: Frames, after: Frames) -> Frames:
        """Returns `overlap` frames that show both shots, from as many frames of each."""
        ...


@dataclasses.dataclass(frozen=True)
class Cut:
    """A hard cut: no frame shows both shots."""

    name: str = "cut"
    overlap: int = 0

    def join(self, before: Frames, after: Frames) -> Frames:
        return after


@dataclasses.dataclass(frozen=True)
class CrossFade:
    """The shot before fades into the next."""

    overlap: int = 8
    name: str = "cross-fade"

    def join(self, before: Frames, after: Frames) -> Frames:
        shares = (np.arange(self.overlap) + 1) / (self.overlap + 1)
        return _mix(before, 1 - shares, after, shares)


@dataclasses.dataclass(frozen=True)
class FadeThroughBlack:
    """The shot before fades to black, and the next one from it."""

    overlap: int = 8
    name: str = "fade through black"

    def join(self, before: Frames, after: Frames) -> Frames:
        progress = (np.arange(self.overlap) + 0.5) / self.overlap
        old, new = np.clip(1 - 2 * progress, 0, 1), np.clip(2 * progress - 1, 0, 1)
        return _mix(before, old, after, new)


def _mix(
    first: Frames,
    share: Float[np.ndarray, " f"],
    second: Frames,
    second_share: Float[np.ndarray, " f"],
) -> Frames:
    shares = share[:, None, None, None], second_share[:, None, None, None]
    return np.rint(first * shares[0] + second * shares[1]).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Pan:
    """A fast move of the camera to the right, within a shot.

    Attributes:
        start: Index of the first shifted drawing in the shot.
        length: Number of drawings that the move takes.
        speed: Speed in pixels per drawing at 480 x 720.
    """

    start: int
    length: int
    speed: float

    def offsets(self, num_drawings: int) -> Float[np.ndarray, " n"]:
        """Returns the camera's offset at each drawing, in pixels at 480 x 720."""
        return self.speed * np.clip(np.arange(num_drawings) - self.start + 1, 0, self.length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmStyle:
    """Frame rate, held drawings, pans, flashes and bars of a film.

    Attributes:
        fps: Frames per second, a multiple of 8.
        hold: Number of frames that each drawing stays; with 24 frames per second, 3 shows scenes at
            their own speed, 2 and 1 show them faster.
        bars: Numbers of black rows and columns over the picture: top, bottom, left, right.
        pans: Share of the shots in which the camera moves fast.
        flashes: Share of the shots with a white flash.
        flash_frames: Number of frames of a flash.

    Raises:
        UserError: A number is out of range.
    """

    fps: int = FRAMES_PER_SECOND
    hold: int = 1
    bars: tuple[int, int, int, int] = (0, 0, 0, 0)
    pans: float = 0.0
    flashes: float = 0.0
    flash_frames: int = 1

    def __post_init__(self) -> None:
        if self.fps < 1 or self.fps % FRAMES_PER_SECOND:
            raise UserError(f"fps {self.fps}: expected a multiple of {FRAMES_PER_SECOND}")
        for name in ("hold", "flash_frames"):
            check_at_least(name, getattr(self, name), 1)

    @property
    def speed(self) -> float:
        """Returns the speed at which scenes play, relative to 8 drawings per second."""
        return self.fps / (self.hold * FRAMES_PER_SECOND)


PLAIN = FilmStyle()
