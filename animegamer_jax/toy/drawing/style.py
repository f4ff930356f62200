"""What films do and the toy world does not: transitions, held drawings, pans, flashes, bars."""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.media.video import FRAMES_PER_SECOND

Frames = UInt8[np.ndarray, "f h w 3"]


@runtime_checkable
class Transition(Protocol):
    """How a shot follows the one before: for `overlap` frames both are on screen."""

    @property
    def name(self) -> str: ...

    @property
    def overlap(self) -> int: ...

    def join(self, before: Frames, after: Frames) -> Frames:
        """The frames that show both: `overlap` of each shot in, as many out."""
        ...


@dataclasses.dataclass(frozen=True)
class Cut:
    """A hard cut: no frame shows both."""

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
        return _mixed(before, 1 - shares, after, shares)


@dataclasses.dataclass(frozen=True)
class FadeThroughBlack:
    """The shot before fades to black, and the next one from it."""

    overlap: int = 8
    name: str = "fade through black"

    def join(self, before: Frames, after: Frames) -> Frames:
        places = (np.arange(self.overlap) + 0.5) / self.overlap
        return _mixed(before, np.clip(1 - 2 * places, 0, 1), after, np.clip(2 * places - 1, 0, 1))


def _mixed(
    first: Frames,
    share: Float[np.ndarray, " f"],
    second: Frames,
    second_share: Float[np.ndarray, " f"],
) -> Frames:
    shares = share[:, None, None, None], second_share[:, None, None, None]
    return np.rint(first * shares[0] + second * shares[1]).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Pan:
    """A fast move of the camera inside of a shot, to the right.

    Attributes:
        start: first drawing of the shot that is shifted.
        length: number of drawings that the move takes.
        speed: pixels a drawing at 480 x 720.
    """

    start: int
    length: int
    speed: float

    def offsets(self, num_drawings: int) -> Float[np.ndarray, " n"]:
        """How far the camera has moved at each drawing, in pixels at 480 x 720."""
        return self.speed * np.clip(np.arange(num_drawings) - self.start + 1, 0, self.length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmStyle:
    """What a film does with the drawings of its shots.

    Attributes:
        fps: frames a second of the film, a multiple of 8.
        hold: frames that each drawing stays; 3 at 24 frames a second shows scenes at their own
            speed, 2 and 1 show them faster.
        bars: black rows and columns over the picture: top, bottom, left, right.
        pans: share of the shots in which the camera moves fast.
        flashes: share of the shots with a white flash.
        flash_frames: frames of a flash.

    Raises:
        UserError: a number out of range.
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
        for name, least in (("hold", 1), ("flash_frames", 1)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"{name} {value}: expected {least} or more")

    @property
    def speed(self) -> float:
        """How much faster than at 8 drawings a second its scenes play."""
        return self.fps / (self.hold * FRAMES_PER_SECOND)


PLAIN = FilmStyle()
