"""Finds where the scenes of a film begin: hard cuts, fades and cross-fades, in one pass.

PySceneDetect's `AdaptiveDetector` finds hard cuts, by comparing each change with the changes around
it; its `ThresholdDetector` finds fades through black. The library's own reader would decode the
film once more, so the detectors get small frames of our stream one by one, as from its
`SceneManager`: if no frame is skipped, the cuts are the library's. Two things of drawn films are
hidden from them:

- Drawings on twos and threes. Nothing changes between two equal frames, so next to them every step
  of a pan looks like a cut. A drawing held for up to `hold_seconds` is given once.
- Flashes. Frames after which the picture is as before are skipped, and no cut is at their end.

`fades` finds cross-fades.
"""

import array
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import cv2
import numpy as np
from jaxtyping import UInt8
from scenedetect import AdaptiveDetector, FrameTimecode, ThresholdDetector

from animegamer_jax.data.films.clips.records import FilmSettings
from animegamer_jax.data.films.cutting.fades import FadeFinder, Thumb

SMALL = 256  # pixels of the longer side of the frames to give, as in the library
_THUMB = 32, 18  # columns and rows of the frames in which flashes and fades are searched
_SAME = 0.6  # largest mean change between two frames of one drawing: noise of the codec
_FLASH = 20.0  # least mean change of a flash
_RETURN = 0.35  # largest change from before a flash to after it, as a share of the flash's
_BLACK = 12  # largest mean brightness of the black between two scenes
_LONG_BLACK = 1.0  # seconds from which black is a scene of its own
_LATE = 0.01  # seconds by which a time may exceed a limit
_RATE = 24.0  # frames per second for the library, which only counts them here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Break:
    """The place where one scene ends and the next begins.

    Attributes:
        time: Seconds of the new scene's first frame (cut), or of its middle (fade).
        start, end: Seconds of a fade's first and last frame; for a cut, `time`.
        kind: "cut" or "fade".
    """

    time: float
    start: float
    end: float
    kind: Literal["cut", "fade"]


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A small frame, and a tiny one made from it."""

    time: float
    small: UInt8[np.ndarray, "h w 3"]
    thumb: Thumb

    def differs(self, other: "_Seen") -> float:
        return float(np.abs(self.thumb - other.thumb).mean())


class CutFinder:
    """Takes the frames of a film one by one, and keeps the last few seconds of them.

    Attributes:
        flashes: Seconds of each flash's first frame, and of the first frame after it.
    """

    def __init__(self, settings: FilmSettings):
        self._settings = settings
        self.flashes: list[tuple[float, float]] = []
        self._waiting: list[_Seen] = []
        self._before: _Seen | None = None  # the last frame outside a flash
        self._given: _Seen | None = None  # the last frame given to the detectors
        self._times = array.array("d")  # of the frames given to the detectors
        self._found: list[Break] = []
        self._fades = FadeFinder(least=settings.min_fade)
        self._adaptive = AdaptiveDetector(
            adaptive_threshold=settings.adaptive_threshold,
            min_scene_len=0,
            window_width=settings.window,
            min_content_val=settings.min_content,
        )
        self._threshold = ThresholdDetector(threshold=_BLACK, min_scene_len=0)

    def add(self, time: float, small: UInt8[np.ndarray, "h w 3"]) -> None:
        """Takes the next frame.

        Args:
            time: Its seconds, later than the frame before.
            small: Its picture, at most `SMALL` pixels a side, always the same size.
        """
        thumb = cv2.resize(small, _THUMB, interpolation=cv2.INTER_AREA).astype(np.float32)
        self._waiting.append(_Seen(time, small, thumb))
        self._release(finished=False)

    def finish(self) -> list[Break]:
        """Returns all breaks of the film, in order."""
        self._release(finished=True)
        fades = [
            Break(time=fade.time, start=fade.start, end=fade.end, kind="fade")
            for fade in self._fades.finish()
        ]
        # After a flash the picture is as before, but what moves has moved on by several frames.
        after = {end for _, end in self.flashes}
        found = [one for one in self._found if one.kind == "fade" or one.time not in after]
        return list(merged(found + fades, gap=self._settings.min_scene_seconds))

    def _release(self, *, finished: bool) -> None:
        """Passes on the frames that are known to be outside flashes."""
        while self._waiting:
            head, before = self._waiting[0], self._before
            change = head.differs(before) if before else 0.0
            if before and change >= _FLASH:
                limit = head.time + self._settings.flash_seconds + _LATE
                back = self._end_of_flash(before, change=change, limit=limit)
                if back:
                    self.flashes.append((head.time, self._waiting[back].time))
                    del self._waiting[:back]
                    continue
                if not finished and self._waiting[-1].time <= limit:
                    return
            self._before = self._waiting.pop(0)
            self._give(head)

    def _end_of_flash(self, before: _Seen, *, change: float, limit: float) -> int:
        """Returns which waiting frame looks as before the first of them; 0 if none does."""
        for number, later in enumerate(self._waiting[1:], start=1):
            if later.time <= limit and later.differs(before) < _RETURN * change:
                return number
        return 0

    def _give(self, seen: _Seen) -> None:
        self._fades.add(seen.time, seen.thumb, seen.small)
        last, hold = self._given, self._settings.hold_seconds + _LATE
        if last and seen.time - last.time <= hold and seen.differs(last) <= _SAME:
            return
        self._given = seen
        code = FrameTimecode(len(self._times), fps=_RATE)
        self._times.append(seen.time)
        picture = cv2.cvtColor(seen.small, cv2.COLOR_RGB2BGR)
        for cut in self._adaptive.process_frame(code, picture):
            self._found.append(_at(self._times[cut.frame_num], kind="cut"))
        for middle in self._threshold.process_frame(code, picture):
            first = max(0, 2 * middle.frame_num - code.frame_num)
            self._found += _black(self._times[first], self._times[-1])


def _at(time: float, *, kind: Literal["cut", "fade"]) -> Break:
    return Break(time=time, start=time, end=time, kind=kind)


def _black(start: float, end: float) -> list[Break]:
    """Splits scenes at short black; long black is a scene of its own."""
    if end - start > _LONG_BLACK:
        ends = (start, end) if start else (end,)
        return [_at(time, kind="fade") for time in ends]
    return [Break(time=(start + end) / 2, start=start, end=end, kind="fade")]


def merged(breaks: Iterable[Break], *, gap: float) -> Iterator[Break]:
    """Merges breaks less than `gap` seconds apart: keeps the first cut, and unites fades."""
    group: list[Break] = []
    for one in sorted(breaks, key=lambda b: (b.start, b.end)):
        if group and one.start - _end(group) >= gap:
            yield _union(group)
            group = []
        group.append(one)
    if group:
        yield _union(group)


def _end(group: list[Break]) -> float:
    return max(one.end for one in group if one is group[0] or one.kind == "fade")


def _union(group: list[Break]) -> Break:
    if all(one.kind == "cut" for one in group):
        return group[0]
    cuts = [one.time for one in group if one.kind == "cut"]
    start, end = group[0].start, _end(group)
    return Break(time=cuts[0] if cuts else (start + end) / 2, start=start, end=end, kind="fade")
