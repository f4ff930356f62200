"""Finds clips that are useless for training: dark ones, duplicates, credits."""

import itertools
from collections.abc import Iterable

import cv2
import numpy as np
from jaxtyping import Bool, Float, UInt8

PerceptualHash = Float[np.ndarray, "5 16 24"]

_HASH_FRAMES = 5
_HASH_SIZE = 24, 16  # columns and rows
_HASH_CONTRAST = 4.0  # least deviation: below it there is only noise

_CREDITS_ROWS = 240  # height at which letters are searched
_PLAIN_SHARE = 0.6  # least share of the picture that is background
_PLAIN_RANGE = 14  # largest difference in brightness within the background
_INK = 60  # least difference in brightness of a letter from the background
_LETTER_ROWS = 3, 24  # least and largest height of a letter
_LETTER_COLUMNS = 60  # largest width of a letter, or of a word whose letters touch
_LETTER_SHARE = 0.5  # least share of letters in everything that is not background
_LINE = 4  # least number of letters in a line
_LINED = 0.7  # least share of the letters that are in lines
_ROLL = 24  # largest number of rows that credits move between two frames
_ROLL_SPREAD = 1  # rows by which their speed may vary
_ROLL_MATCH = 0.6  # least share of the ink that the motion explains


def brightness(frames: UInt8[np.ndarray, "f h w 3"]) -> float:
    """Returns the mean of red, green and blue over a clip, 0 to 255."""
    return float(frames.mean())


def perceptual_hash(frames: UInt8[np.ndarray, "f h w 3"]) -> PerceptualHash:
    """Returns five frames of a clip, tiny and grey, each with mean 0 and deviation 1.

    Size, compression and light hardly change it; a mouth that moves does.
    """
    picks = np.linspace(0, len(frames) - 1, _HASH_FRAMES).round().astype(int)
    return np.stack([_frame_hash(frames[pick]) for pick in picks])


def _frame_hash(frame: UInt8[np.ndarray, "h w 3"]) -> Float[np.ndarray, "16 24"]:
    grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY).astype(np.float32)
    tiny = cv2.resize(grey, _HASH_SIZE, interpolation=cv2.INTER_AREA)
    return (tiny - tiny.mean()) / max(float(tiny.std()), _HASH_CONTRAST)


def is_duplicate(
    clip: PerceptualHash, kept: Iterable[PerceptualHash], *, difference: float
) -> bool:
    """Returns whether a clip is within `difference` standard deviations of a kept one."""
    return any(float(np.abs(clip - other).max()) < difference for other in kept)


def is_credits(frames: UInt8[np.ndarray, "f h w 3"], *, letters: int) -> bool:
    """Returns whether a clip shows credits; a heuristic, for letters on a plain background.

    True if the first, the middle and the last frame have one brightness over most of the picture,
    and the rest is mostly small shapes in lines, at least `letters` of them, which stand still or
    roll at one speed. It misses credits over moving pictures, and a few large letters, as in
    titles.
    """
    inks = [_ink(frame) for frame in frames]
    shown = [inks[0], inks[len(inks) // 2], inks[-1]]
    return all(_letters(ink) >= letters for ink in shown) and _rolls_evenly(inks)


def _ink(frame: UInt8[np.ndarray, "h w 3"]) -> Bool[np.ndarray, "a b"]:
    """Returns what is not background; nothing if there is no plain background."""
    width = max(1, round(frame.shape[1] * _CREDITS_ROWS / frame.shape[0]))
    grey = cv2.resize(
        cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY),
        (width, _CREDITS_ROWS),
        interpolation=cv2.INTER_AREA if frame.shape[0] > _CREDITS_ROWS else cv2.INTER_LINEAR,
    ).astype(np.int16)
    away = np.abs(grey - np.median(grey))
    plain = float((away <= _PLAIN_RANGE).mean()) >= _PLAIN_SHARE
    return (away >= _INK) & plain


def _letters(ink: Bool[np.ndarray, "a b"]) -> int:
    """Returns the number of letter-like shapes; 0 if they are not in lines, or few among others."""
    _, _, stats, centres = cv2.connectedComponentsWithStats(ink.astype(np.uint8))
    stats, centres = stats[1:], centres[1:]
    rows, columns = stats[:, cv2.CC_STAT_HEIGHT], stats[:, cv2.CC_STAT_WIDTH]
    small = (rows >= _LETTER_ROWS[0]) & (rows <= _LETTER_ROWS[1]) & (columns <= _LETTER_COLUMNS)
    area = stats[:, cv2.CC_STAT_AREA]
    if not small.any() or area[small].sum() < _LETTER_SHARE * area.sum():
        return 0
    middles, size = centres[small, 1], np.median(rows[small])
    neighbours = (np.abs(middles[:, None] - middles) <= size / 2).sum(axis=1)
    lined = neighbours >= _LINE
    return int(small.sum()) if lined.mean() >= _LINED else 0


def _rolls_evenly(inks: list[Bool[np.ndarray, "a b"]]) -> bool:
    """Returns whether each frame is the frame before, moved by the same number of rows."""
    profiles = [ink.mean(axis=1) for ink in inks]
    rolls = [_roll(before, after) for before, after in itertools.pairwise(profiles)]
    even = np.abs(np.array(rolls) - np.median(rolls)) <= _ROLL_SPREAD
    pairs = zip(itertools.pairwise(inks), rolls, strict=True)
    matches = [_overlap(before, after, rows=rows) for (before, after), rows in pairs]
    return bool(even.mean() >= 0.9 and np.median(matches) >= _ROLL_MATCH)


def _roll(before: Float[np.ndarray, " a"], after: Float[np.ndarray, " a"]) -> int:
    """Returns the number of rows by which a profile moved down."""
    whole = np.pad(before, _ROLL)
    errors = {
        rows: np.abs(whole[_ROLL - rows : _ROLL - rows + len(after)] - after).sum()
        for rows in sorted(range(-_ROLL, _ROLL + 1), key=abs)
    }
    return min(errors, key=lambda rows: errors[rows])


def _overlap(
    before: Bool[np.ndarray, "a b"], after: Bool[np.ndarray, "a b"], *, rows: int
) -> float:
    """Returns the share of both frames' ink that coincides once the first is moved."""
    first, second = (before, after) if rows >= 0 else (after, before)
    step = abs(rows)
    first, second = first[: len(first) - step], second[step:]
    either = (first | second).sum()
    return float((first & second).sum() / either) if either else 0.0
