"""Finds black bars around the picture of a film and of its scenes; fits frames to a clip's size."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import cv2
import numpy as np
from jaxtyping import UInt8

Bars = tuple[int, int, int, int]
"""Rows at the top and bottom, columns at the left and right."""

_BLACK = 20  # largest brightness of a bar's pixel
_STRAY = 0.02  # largest share of a bar's row that is brighter: noise, a channel's logo
_LIGHT = 0.2  # least share of a frame that is brighter: dark scenes do not show their bars
_RARE = 0.2  # largest share of frames with something over a bar, such as subtitles
_FEWEST = 3  # frames that must show bars
_LEAST_PICTURE = 1 / 3  # of the height and of the width, which bars cannot cover
_SHARP = 40  # least mean brightness of a row next to a scene's own bar
_STEADY = 1  # rows by which a scene's own bar may vary
_ENDS = 0.4  # seconds at both ends of a scene that may be of a fade
_EVEN = 0.1  # largest difference of a scene's own two bars, as a share of the larger
_CHANGE = 0.03  # least change of both bars of a pair, as a share of the height or width
_LONGEST_CHANGE = 1.0  # seconds


class BarFinder:
    """Finds bars from some of a film's frames, keeping a few numbers of each.

    Attributes:
        count: Number of frames so far.
    """

    def __init__(self):
        self.count = 0
        self._times: list[float] = []
        self._found: list[Bars] = []
        self._sharp: list[tuple[bool, bool]] = []  # the edges of top and bottom, of left and right

    def add(self, grey: UInt8[np.ndarray, "h w"], *, time: float = 0.0) -> None:
        """Takes one frame, with its seconds."""
        self.count += 1
        light = grey > _BLACK
        if light.mean() < _LIGHT:
            return
        rows = light.mean(axis=1)
        top, bottom = _ends(rows > _STRAY)
        columns = light[top : len(light) - bottom].mean(axis=0)
        left, right = _ends(columns > _STRAY)
        self._times.append(time)
        self._found.append((top, bottom, left, right))
        picture = grey[top : len(grey) - bottom, left : grey.shape[1] - right]
        self._sharp.append((_has_sharp_ends(picture, axis=1), _has_sharp_ends(picture, axis=0)))

    def bars(self, *, height: int, width: int) -> Bars:
        """Returns the bars of a film of this size.

        A dark picture makes bars look larger, subtitles over a bar make it look smaller: each bar
        has the largest size that four of five frames reach. One more row is removed, where the
        codec mixes bar and picture.
        """
        return _usual(self._found, height=height, width=width)

    def changes(self, *, height: int, width: int) -> list[tuple[float, float]]:
        """Returns where bars come, go or change for good, which only another shot's picture does.

        Before and after, some frames in a row show the same pair of equally wide, sharp bars or
        none. Subtitles over a bar and dark parts of a picture are not equally wide.

        Returns:
            Seconds of the last frame before a change, and of the first one after it.
        """
        found = []
        for pair, size in ((0, height), (1, width)):
            for before, after in itertools.pairwise(self._runs(pair)):
                span = self._times[before[-1]], self._times[after[0]]
                bars = _pair(self._found[before[0]], pair), _pair(self._found[after[0]], pair)
                differs = np.abs(np.subtract(*bars)) >= size * _CHANGE
                if differs.all() and span[1] - span[0] <= _LONGEST_CHANGE:
                    found.append(span)
        return sorted(found)

    def _runs(self, pair: int) -> Iterator[list[int]]:
        """Yields the frames, at least `_FEWEST` in a row, that show the same even pair of bars."""
        run: list[int] = []
        for k, bars in enumerate(self._found):
            own = _pair(bars, pair)
            if run and np.abs(np.subtract(_pair(self._found[run[0]], pair), own)).max() <= _STEADY:
                run.append(k)
                continue
            if len(run) >= _FEWEST:
                yield run
            visible = self._sharp[k][pair] or max(own) <= _STEADY
            run = [k] if _are_even(own) and visible else []
        if len(run) >= _FEWEST:
            yield run

    def scene_bars(self, start: float, end: float, *, height: int, width: int) -> Bars:
        """Returns the bars of a scene of a film of this size: the film's, unless it shows others.

        A pair of bars (top and bottom, or left and right) differs from the film's if both are
        smaller, as in a full picture in a film with bars; or if both are larger, equally wide, and
        sharp and the same in nearly all frames, which the dark parts of a picture are not. Frames
        near the ends of a scene, which may be of a fade, do not count if there are others.
        """
        film = self.bars(height=height, width=width)
        inside = [k for k, time in enumerate(self._times) if start <= time < end]
        middle = [k for k in inside if start + _ENDS <= self._times[k] < end - _ENDS]
        inside = middle if len(middle) >= _FEWEST else inside
        own = _usual([self._found[k] for k in inside], height=height, width=width)
        if len(inside) < _FEWEST:
            return film
        chosen: list[int] = []
        for pair in (0, 1):
            of_film, of_scene = _pair(film, pair), _pair(own, pair)
            sizes = np.array([_pair(self._found[k], pair) for k in inside])
            smaller = all(a < b - _STEADY for a, b in zip(of_scene, of_film, strict=True))
            larger = all(a > b + _STEADY for a, b in zip(of_scene, of_film, strict=True))
            steady = (np.abs(sizes - np.median(sizes, axis=0)) <= _STEADY).all(axis=1)
            larger &= bool(steady.mean() >= 1 - _RARE)
            larger &= _are_even(of_scene)
            sharp = np.array([self._sharp[k][pair] for k in inside])[steady]
            larger &= bool(sharp.size and sharp.mean() >= 1 - _RARE)
            chosen += of_scene if smaller or larger else of_film
        top, bottom, left, right = chosen
        return top, bottom, left, right


def _pair(bars: Bars, pair: int) -> tuple[int, int]:
    """Returns the bars at top and bottom (0), or at left and right (1)."""
    return (bars[0], bars[1]) if pair == 0 else (bars[2], bars[3])


def _are_even(pair: tuple[int, int]) -> bool:
    return abs(pair[0] - pair[1]) <= max(_STEADY, _EVEN * max(pair))


def _usual(found: Sequence[Bars], *, height: int, width: int) -> Bars:
    if len(found) < _FEWEST:
        return 0, 0, 0, 0
    sizes = np.quantile(found, _RARE, axis=0, method="lower").astype(int)
    top, bottom, left, right = (int(n) + int(n > 0) for n in sizes)
    if height - top - bottom < height * _LEAST_PICTURE:
        top = bottom = 0
    if width - left - right < width * _LEAST_PICTURE:
        left = right = 0
    return top, bottom, left, right


def _has_sharp_ends(picture: UInt8[np.ndarray, "h w"], *, axis: int) -> bool:
    """Returns whether a picture is light right next to its bars, not fading into the dark."""
    first, last = np.split(picture, [3], 1 - axis)[0], np.split(picture, [-3], 1 - axis)[1]
    return all(part.mean(axis=axis).max() >= _SHARP for part in (first, last))


def _ends(light: np.ndarray) -> tuple[int, int]:
    """Returns the number of black lines before the first light one, and after the last."""
    return int(light.argmax()), int(light[::-1].argmax())


def fitted(
    frame: UInt8[np.ndarray, "y x 3"],
    *,
    bars: Bars,
    height: int,
    width: int,
    fit: Literal["crop", "pad"],
) -> UInt8[np.ndarray, "h w 3"]:
    """Removes a frame's bars and scales it to a clip's size, keeping its proportions.

    "crop" cuts off what exceeds the clip, the same on both sides; "pad" shows everything and adds
    black.
    """
    top, bottom, left, right = bars
    frame = frame[top : len(frame) - bottom, left : frame.shape[1] - right]
    choose = max if fit == "crop" else min
    scale = choose(height / frame.shape[0], width / frame.shape[1])
    if fit == "crop":
        frame = _middle(frame, rows=height / scale, columns=width / scale)
        return _scaled(frame, height=height, width=width)
    rows = min(height, max(1, round(frame.shape[0] * scale)))
    columns = min(width, max(1, round(frame.shape[1] * scale)))
    whole = np.zeros((height, width, 3), np.uint8)
    y, x = (height - rows) // 2, (width - columns) // 2
    whole[y : y + rows, x : x + columns] = _scaled(frame, height=rows, width=columns)
    return whole


def _middle(
    frame: UInt8[np.ndarray, "y x 3"], *, rows: float, columns: float
) -> UInt8[np.ndarray, "b a 3"]:
    size = min(frame.shape[0], max(1, round(rows))), min(frame.shape[1], max(1, round(columns)))
    y, x = (frame.shape[0] - size[0]) // 2, (frame.shape[1] - size[1]) // 2
    return frame[y : y + size[0], x : x + size[1]]


def _scaled(
    frame: UInt8[np.ndarray, "y x 3"], *, height: int, width: int
) -> UInt8[np.ndarray, "h w 3"]:
    smaller = height < frame.shape[0]
    how = cv2.INTER_AREA if smaller else cv2.INTER_CUBIC
    return cv2.resize(frame, (width, height), interpolation=how)
