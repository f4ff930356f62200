"""Where the scenes of a film begin: hard cuts, fades and cross-fades, found in one pass.

Hard cuts are those of PySceneDetect's `AdaptiveDetector`, which compares each change with the
changes around it; fades through black also those of its `ThresholdDetector`. The library's own
reader would decode the film once more, from a local file, so the detectors are given small frames
of our stream one by one, which is what its `SceneManager` does: where no frame is left out, the
cuts are those that the library finds by itself. Two things of drawn films are kept from them:

- Drawings on twos and threes. Nothing changes between two equal frames, so that beside them every
  step of a pan stands out like a cut. A drawing that stays for `hold_seconds` is given once.
- Flashes. Frames after which the picture is as it was are left out.

Cross-fades are found by `fades`.
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

SMALL = 256  # pixels of the longer side of the frames to give, as the library has it
_THUMB = 32, 18  # columns and rows of the frames in which flashes and fades are sought
_SAME = 0.6  # mean change between two frames of one drawing: noise of the codec
_FLASH = 20.0  # least mean change of a flash
_RETURN = 0.35  # of a flash's change: how far the picture after it is from that before
_BLACK = 12  # mean brightness between two scenes
_LONG_BLACK = 1.0  # seconds
_LATE = 0.01  # seconds that a time may be beyond a limit
_RATE = 24.0  # frames a second for the library, which only counts them here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Break:
    """Where one scene ends and the next begins.

    Attributes:
        time: seconds; of a cut, those of the first frame of the new scene; of a fade, its middle.
        start, end: of a fade's first and last frame; of a cut, `time`.
        kind: "cut" or "fade".
    """

    time: float
    start: float
    end: float
    kind: Literal["cut", "fade"]


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A small frame, and a tiny one made of it."""

    time: float
    small: UInt8[np.ndarray, "h w 3"]
    thumb: Thumb

    def differs(self, other: "_Seen") -> float:
        return float(np.abs(self.thumb - other.thumb).mean())


class CutFinder:
    """Takes the frames of a film one by one; a few seconds of them are kept at a time.

    Attributes:
        flashes: seconds of each flash's first frame, and of the first after it.
    """

    def __init__(self, settings: FilmSettings):
        self._settings = settings
        self.flashes: list[tuple[float, float]] = []
        self._waiting: list[_Seen] = []
        self._before: _Seen | None = None  # the last frame that was no flash
        self._given: _Seen | None = None  # the last frame that the detectors saw
        self._times = array.array("d")  # of the frames that the detectors saw
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
            time: seconds, later than the frame before.
            small: of at most `SMALL` pixels a side, always the same size.
        """
        thumb = cv2.resize(small, _THUMB, interpolation=cv2.INTER_AREA).astype(np.float32)
        self._waiting.append(_Seen(time, small, thumb))
        self._release(finished=False)

    def finish(self) -> list[Break]:
        """All breaks of the film, in order."""
        self._release(finished=True)
        fades = [
            Break(time=fade.time, start=fade.start, end=fade.end, kind="fade")
            for fade in self._fades.finish()
        ]
        return list(_joined(self._found + fades, apart=self._settings.min_scene_seconds))

    def _release(self, *, finished: bool) -> None:
        """Hands on the frames of which it is known that they are no flash."""
        while self._waiting:
            head, before = self._waiting[0], self._before
            change = head.differs(before) if before else 0.0
            if before and change >= _FLASH:
                limit = head.time + self._settings.flash_seconds + _LATE
                back = self._back(before, change=change, limit=limit)
                if back:
                    self.flashes.append((head.time, self._waiting[back].time))
                    del self._waiting[:back]
                    continue
                if not finished and self._waiting[-1].time <= limit:
                    return
            self._before = self._waiting.pop(0)
            self._show(head)

    def _back(self, before: _Seen, *, change: float, limit: float) -> int:
        """Which of the waiting frames looks as before the first of them; 0: none."""
        for number, later in enumerate(self._waiting[1:], start=1):
            if later.time <= limit and later.differs(before) < _RETURN * change:
                return number
        return 0

    def _show(self, seen: _Seen) -> None:
        self._fades.add(seen.time, seen.thumb)
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
    """A short black is between two scenes, a long one is a scene."""
    if end - start > _LONG_BLACK:
        ends = (start, end) if start else (end,)
        return [_at(time, kind="fade") for time in ends]
    return [Break(time=(start + end) / 2, start=start, end=end, kind="fade")]


def _joined(breaks: Iterable[Break], *, apart: float) -> Iterator[Break]:
    """Breaks at least `apart` seconds apart: of nearer cuts the first counts, fades are united."""
    group: list[Break] = []
    for one in sorted(breaks, key=lambda b: (b.start, b.end)):
        if group and one.start - _end(group) >= apart:
            yield _united(group)
            group = []
        group.append(one)
    if group:
        yield _united(group)


def _end(group: list[Break]) -> float:
    return max(one.end for one in group if one is group[0] or one.kind == "fade")


def _united(group: list[Break]) -> Break:
    if all(one.kind == "cut" for one in group):
        return group[0]
    cuts = [one.time for one in group if one.kind == "cut"]
    start, end = group[0].start, _end(group)
    return Break(time=cuts[0] if cuts else (start + end) / 2, start=start, end=end, kind="fade")
