"""Finds black bars around a film's picture, and fits frames to the size of clips."""

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


class BarFinder:
    """Finds a film's bars from some of its frames, keeping four numbers of each.

    Attributes:
        count: Number of frames so far.
    """

    def __init__(self):
        self.count = 0
        self._found: list[Bars] = []

    def add(self, grey: UInt8[np.ndarray, "h w"]) -> None:
        """Takes one frame."""
        self.count += 1
        light = grey > _BLACK
        if light.mean() < _LIGHT:
            return
        top, bottom = _ends(light.mean(axis=1) > _STRAY)
        left, right = _ends(light[top : len(light) - bottom].mean(axis=0) > _STRAY)
        self._found.append((top, bottom, left, right))

    def bars(self, *, height: int, width: int) -> Bars:
        """Returns the bars of a film of this size.

        A dark picture makes bars look larger, subtitles over a bar make it look smaller: each bar
        has the largest size that four of five frames reach. One more row is removed, where the
        codec mixes bar and picture.
        """
        if len(self._found) < _FEWEST:
            return 0, 0, 0, 0
        found = np.quantile(self._found, _RARE, axis=0, method="lower").astype(int)
        top, bottom, left, right = (int(n) + int(n > 0) for n in found)
        if height - top - bottom < height * _LEAST_PICTURE:
            top = bottom = 0
        if width - left - right < width * _LEAST_PICTURE:
            left = right = 0
        return top, bottom, left, right


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
