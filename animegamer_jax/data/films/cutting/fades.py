"""Finds fades, cross-fades and wipes in tiny frames: pictures that turn evenly into others.

A cut detector sees no sudden change in them. Halfway through a fade, the picture is the mean of the
pictures at both ends; halfway through a wipe, it is the one on one side of a straight line and the
other one on the other side. Both ends differ in what they show, not only in brightness, as when a
lamp is lit; and one is not the other one moved, as when the camera pans over something blurred or
zooms slowly.
"""

import bisect
import dataclasses
from collections.abc import Iterator

import cv2
import numpy as np
from jaxtyping import Float, UInt8

Thumb = Float[np.ndarray, "a b 3"]
Grey = UInt8[np.ndarray, "h w"]

_REACHES = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)  # seconds from a fade's middle to its ends
_BEND = 0.3  # largest distance of the middle from the ends' mean, as a share of the ends' distance
_ALIKE = 0.75  # least correlation of two pictures of the same thing in different light
_MOVED = 0.3  # largest error of a shift that explains the middle, as a share of the distance
_SHIFTS = 4, 8  # rows and columns of the largest shift that is tried
_FINE = 128, 72  # columns and rows of the pictures in which motion is searched
_FLOWS = 0.75  # largest error of half that motion, as a share of that of the mean
_FLAT = 3.0  # largest standard deviation of an empty picture
_WHOLE = 0.9  # least share of the whole change between the ends of a fade
_CLEARER = 0.5  # share of a fade's clarity below which one that overlaps it is part of it
_GAP = 0.25  # largest seconds between middles of one fade
_EARLY = 1e-3
_CLEARLY = 0.5  # least change of a pixel that counts in a wipe, as a share of the mean
_STAYS_CHANGED = 0.6  # least change at the largest distance, as a share of that at a wipe's ends
_SIDE = 0.25  # least share of such pixels, and of them on each side of the line
_STRAIGHT = 0.92  # least share of them that are on their side of the line


@dataclasses.dataclass(frozen=True)
class Fade:
    """A fade: seconds of its middle, seconds from there to both ends, and its clarity."""

    time: float
    reach: float
    clear: float

    @property
    def start(self) -> float:
        return self.time - self.reach

    @property
    def end(self) -> float:
        return self.time + self.reach

    def outshines(self, other: "Fade") -> bool:
        """Returns whether the other is only a part of this one, or of this one and what follows."""
        disjoint = other.end <= self.start or self.end <= other.start
        return not disjoint and other.clear < _CLEARER * self.clear


class FadeFinder:
    """Takes the frames of a film one by one, and keeps the last seconds of them.

    Args:
        least: Least mean change between the ends of a fade, 0 to 255.
    """

    def __init__(self, *, least: float):
        self._least = least
        self._times: list[float] = []
        self._thumbs: list[Thumb] = []
        self._greys: list[Grey] = []  # the same frames, a little larger
        self._next = 0  # index of the next frame to examine as a middle
        self._group: list[Fade] = []  # of one fade
        self._found: list[Fade] = []

    def add(self, time: float, thumb: Thumb, small: UInt8[np.ndarray, "h w 3"]) -> None:
        """Takes the next frame: tiny, and less tiny."""
        self._times.append(time)
        self._thumbs.append(thumb)
        fine = cv2.resize(small, _FINE, interpolation=cv2.INTER_AREA)
        self._greys.append(cv2.cvtColor(fine, cv2.COLOR_RGB2GRAY))
        while self._times[self._next] <= time - _REACHES[-1] - _EARLY:
            self._examine_next()
        old = bisect.bisect(self._times, self._times[self._next] - _REACHES[-1] - _GAP)
        del self._times[:old], self._thumbs[:old], self._greys[:old]
        self._next -= old

    def finish(self) -> list[Fade]:
        """Returns all fades of the film."""
        while self._next < len(self._times):
            self._examine_next()
        self._close()
        return [f for f in self._found if not any(other.outshines(f) for other in self._found)]

    def _examine_next(self) -> None:
        fade = self._fade_at(self._next)
        self._next += 1
        if fade is None:
            return
        if self._group and fade.time - self._group[-1].time > _GAP:
            self._close()
        self._group.append(fade)

    def _close(self) -> None:
        if self._group:
            self._found.append(max(self._group, key=lambda fade: fade.clear))
        self._group = []

    def _fade_at(self, index: int) -> Fade | None:
        """Returns the fade of which a frame is the middle, or None."""
        thumb, changes, clear, wipes = self._thumbs[index], {}, {}, set()
        for reach, *ends in self._ends(index):
            before, after = (self._thumbs[end] for end in ends)
            changes[reach] = change = _distance(before, after)
            error = blend = _distance(thumb, (before + after) / 2)
            if change >= self._least and blend > _BEND * change:
                error = min(blend, _wipe_error(before, thumb, after))
                wipes |= {reach} if error < blend else set()
            clear[reach] = change - error / _BEND
            if clear[reach] > 0 and (
                change < self._least
                or _alike(before, after)
                or _moved(before, thumb, after)
                or (
                    error == blend
                    and _flows(self._greys[ends[0]], self._greys[index], self._greys[ends[1]])
                )
            ):
                clear[reach] = 0.0
        for reach in wipes:  # what passed by is gone after a while, and the picture as before
            clear[reach] *= changes[max(changes)] >= _STAYS_CHANGED * changes[reach]
        if max(clear.values(), default=0.0) <= 0:
            return None
        whole = _WHOLE * max(changes.values())
        if clear[next(reach for reach in changes if changes[reach] >= whole)] <= 0:
            return None  # even in small steps only, as any motion is
        best = max(clear.values())
        reach = next(reach for reach in clear if clear[reach] >= _WHOLE * best)
        return Fade(self._times[index], reach, best)

    def _ends(self, index: int) -> Iterator[tuple[float, int, int]]:
        """Yields indices of the frames before and after one, at each distance with any."""
        time, seen = self._times[index], index
        for reach in _REACHES:
            before = bisect.bisect(self._times, time - reach + _EARLY) - 1
            after = bisect.bisect_left(self._times, time + reach - _EARLY)
            if before < 0 or after >= len(self._times):
                return
            if before != seen:
                yield reach, before, after
            seen = before


def _distance(first: Thumb, second: Thumb) -> float:
    return float(np.abs(first - second).mean())


def _wipe_error(before: Thumb, middle: Thumb, after: Thumb) -> float:
    """Returns how far the middle of a wipe is from its ends, each on its side; infinity if none."""
    change = np.abs(after - before).mean(axis=-1)
    from_before, from_after = (np.abs(middle - end).mean(axis=-1) for end in (before, after))
    clear, turned = change > _CLEARLY * change.mean(), from_after < from_before
    if clear.mean() < _SIDE or not _SIDE <= turned[clear].mean() <= 1 - _SIDE:
        return np.inf
    y, x = np.nonzero(clear)
    places = np.stack([x, y, np.ones_like(x)], axis=1).astype(float)
    sides = np.where(turned[clear], 1.0, -1.0)
    line = np.linalg.lstsq(places, sides, rcond=None)[0]
    if (np.sign(places @ line) == sides).mean() < _STRAIGHT:
        return np.inf
    return float(np.minimum(from_before, from_after).mean())


def _alike(first: Thumb, second: Thumb) -> bool:
    """Returns whether two pictures show the same thing, perhaps in different light."""
    one, other = (thumb.mean(axis=-1).ravel() for thumb in (first, second))
    if min(one.std(), other.std()) < _FLAT:
        return False
    return float(np.corrcoef(one, other)[0, 1]) > _ALIKE


def _moved(before: Thumb, middle: Thumb, after: Thumb) -> bool:
    """Returns whether the middle picture is the picture before, shifted."""
    rows, columns = _SHIFTS
    inner = slice(rows, -rows), slice(columns, -columns)
    errors = cv2.matchTemplate(before, middle[inner], cv2.TM_SQDIFF)
    change = np.square(after[inner] - before[inner]).sum()
    return float(errors.min()) < _MOVED**2 * float(change)


def _flows(before: Grey, middle: Grey, after: Grey) -> bool:
    """Returns whether half of the ends' motion explains the middle better than their mean.

    So it is in a slow zoom, whose edges move by less than a pixel of the tiny pictures.
    """
    dis = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    flow = dis.calc(before, after, np.zeros((*before.shape, 2), np.float32))
    first, half, last = (picture.astype(np.float32) for picture in (before, middle, after))
    y, x = np.mgrid[: before.shape[0], : before.shape[1]].astype(np.float32)
    place = x - flow[..., 0] / 2, y - flow[..., 1] / 2
    moved = cv2.remap(first, *place, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    error = float(np.abs(moved - half).mean())
    return error < _FLOWS * float(np.abs((first + last) / 2 - half).mean())
