"""Fades and cross-fades, from tiny frames: pictures that turn into others evenly.

A cut detector sees no sudden change in them. Halfway through one the picture is the mean of the
pictures at both ends. These differ in what they show, not only in their light, as when a lamp is
lit; and the one is not the other moved, as when the camera passes over something blurred.
"""

import bisect
import dataclasses
from collections.abc import Iterator

import cv2
import numpy as np
from jaxtyping import Float

Thumb = Float[np.ndarray, "a b 3"]

_REACHES = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)  # seconds from a fade's middle to its ends
_BEND = 0.3  # of the ends' distance: how far the middle may be from their mean
_ALIKE = 0.75  # correlation of two pictures of the same thing in another light
_MOVED = 0.3  # of the ends' distance: how well a shift tells the middle of a moving picture
_SHIFTS = 4, 8  # rows and columns up to which a shift is sought
_FLAT = 3.0  # standard deviation of a picture that shows nothing
_WHOLE = 0.9  # share of the whole change that the ends of a fade show
_CLEARER = 0.5  # share of a fade's clarity that another one has which overlaps it
_GAP = 0.25  # seconds between middles of one fade
_EARLY = 1e-3


@dataclasses.dataclass(frozen=True)
class Fade:
    """A fade: seconds of its middle, its first and its last frame, and how clearly it is one."""

    time: float
    start: float
    end: float
    clear: float

    def outshines(self, other: "Fade") -> bool:
        """Whether the other one is but a part of this one, or of this one and what follows."""
        apart = other.end <= self.start or self.end <= other.start
        return not apart and other.clear < _CLEARER * self.clear


@dataclasses.dataclass(frozen=True)
class _Middle:
    """What may be a fade's middle: how clearly it is one, and the seconds from it to its ends."""

    time: float
    clear: float
    reach: float


class FadeFinder:
    """Finds fades while a film passes, keeping the last seconds of it.

    Args:
        least: mean change between the ends of a fade, 0 to 255.
    """

    def __init__(self, *, least: float):
        self._least = least
        self._times: list[float] = []
        self._thumbs: list[Thumb] = []
        self._next = 0  # the frame to be looked at as a middle
        self._group: list[_Middle] = []
        self._found: list[Fade] = []

    def add(self, time: float, thumb: Thumb) -> None:
        """Takes the next frame."""
        self._times.append(time)
        self._thumbs.append(thumb)
        while self._times[self._next] <= time - _REACHES[-1] - _EARLY:
            self._look()
        old = bisect.bisect(self._times, self._times[self._next] - _REACHES[-1] - _GAP)
        del self._times[:old], self._thumbs[:old]
        self._next -= old

    def finish(self) -> list[Fade]:
        """All fades of the film."""
        while self._next < len(self._times):
            self._look()
        self._close()
        return [f for f in self._found if not any(other.outshines(f) for other in self._found)]

    def _look(self) -> None:
        middle = self._middle(self._next)
        self._next += 1
        if middle is None:
            return
        if self._group and middle.time - self._group[-1].time > _GAP:
            self._close()
        self._group.append(middle)

    def _close(self) -> None:
        if self._group:
            best = max(self._group, key=lambda middle: middle.clear)
            start, end = best.time - best.reach, best.time + best.reach
            self._found.append(Fade(best.time, start, end, best.clear))
        self._group = []

    def _middle(self, index: int) -> _Middle | None:
        """A frame as the middle of a fade, or None."""
        thumb, changes, clear = self._thumbs[index], {}, {}
        for reach, before, after in self._ends(index):
            changes[reach] = change = _distance(before, after)
            clear[reach] = change - _distance(thumb, (before + after) / 2) / _BEND
            if clear[reach] > 0 and (
                change < self._least or _alike(before, after) or _moved(before, thumb, after)
            ):
                clear[reach] = 0.0
        if max(clear.values(), default=0.0) <= 0:
            return None
        whole = _WHOLE * max(changes.values())
        if clear[next(reach for reach in changes if changes[reach] >= whole)] <= 0:
            return None  # straight only in its small steps, as any motion is
        best = max(clear.values())
        reach = next(reach for reach in clear if clear[reach] >= _WHOLE * best)
        return _Middle(self._times[index], best, reach)

    def _ends(self, index: int) -> Iterator[tuple[float, Thumb, Thumb]]:
        """The frames before and after one, at each reach for which there are such."""
        time, seen = self._times[index], index
        for reach in _REACHES:
            before = bisect.bisect(self._times, time - reach + _EARLY) - 1
            after = bisect.bisect_left(self._times, time + reach - _EARLY)
            if before < 0 or after >= len(self._times):
                return
            if before != seen:
                yield reach, self._thumbs[before], self._thumbs[after]
            seen = before


def _distance(first: Thumb, second: Thumb) -> float:
    return float(np.abs(first - second).mean())


def _alike(first: Thumb, second: Thumb) -> bool:
    """Whether two pictures show the same thing, be it in another light."""
    one, other = (thumb.mean(axis=-1).ravel() for thumb in (first, second))
    if min(one.std(), other.std()) < _FLAT:
        return False
    return float(np.corrcoef(one, other)[0, 1]) > _ALIKE


def _moved(before: Thumb, middle: Thumb, after: Thumb) -> bool:
    """Whether the middle picture is the one before, shifted."""
    rows, columns = _SHIFTS
    inner = slice(rows, -rows), slice(columns, -columns)
    errors = cv2.matchTemplate(before, middle[inner], cv2.TM_SQDIFF)
    change = np.square(after[inner] - before[inner]).sum()
    return float(errors.min()) < _MOVED**2 * float(change)
