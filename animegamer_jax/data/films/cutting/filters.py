"""What makes a clip of a film useless for training: darkness, stillness, repetition, credits."""

import itertools

import cv2
import numpy as np
from jaxtyping import Bool, Float, UInt8

Look = Float[np.ndarray, "5 16 24"]

_LOOK_FRAMES = 5
_LOOK_SIZE = 24, 16  # columns and rows
_LOOK_CONTRAST = 4.0  # least deviation: below it there is nothing but noise

_CREDITS_ROWS = 240  # height at which letters are sought
_PLAIN_SHARE = 0.6  # of the picture: the ground
_PLAIN_RANGE = 14  # brightness around the ground's that counts as ground
_INK = 60  # least difference of a letter from the ground
_LETTER_ROWS = 3, 24  # height of a letter
_LETTER_COLUMNS = 60  # width of a letter, or of a word whose letters touch
_LETTER_SHARE = 0.5  # of everything that is no ground
_LINE = 4  # letters that make a line
_LINED = 0.7  # share of the letters that stand in lines
_ROLL = 24  # rows that credits may move between two frames
_ROLL_SPREAD = 1  # rows by which their speed may vary
_ROLL_MATCH = 0.6  # share of the ink that a roll must explain


def brightness(frames: UInt8[np.ndarray, "f h w 3"]) -> float:
    """Mean of red, green and blue over a clip, 0 to 255."""
    return float(frames.mean())


def clip_look(frames: UInt8[np.ndarray, "f h w 3"]) -> Look:
    """A clip's perceptual hash: five of its frames, tiny and grey, each of mean 0 and deviation 1.

    It is hardly changed by size, compression and light, but by a mouth that moves.
    """
    picks = np.linspace(0, len(frames) - 1, _LOOK_FRAMES).round().astype(int)
    return np.stack([_frame_look(frames[pick]) for pick in picks])


def _frame_look(frame: UInt8[np.ndarray, "h w 3"]) -> Float[np.ndarray, "16 24"]:
    grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY).astype(np.float32)
    tiny = cv2.resize(grey, _LOOK_SIZE, interpolation=cv2.INTER_AREA)
    return (tiny - tiny.mean()) / max(float(tiny.std()), _LOOK_CONTRAST)


class Repetitions:
    """The looks of a film's kept clips, 8 kilobytes each.

    Args:
        difference: two clips are the same if they nowhere differ by so much, in deviations.
    """

    def __init__(self, *, difference: float):
        self._difference = difference
        self._kept: list[Look] = []

    def has(self, look: Look) -> bool:
        """Whether a kept clip looks the same."""
        return any(float(np.abs(look - kept).max()) < self._difference for kept in self._kept)

    def keep(self, look: Look) -> None:
        self._kept.append(look)


def is_credits(frames: UInt8[np.ndarray, "f h w 3"], *, letters: int) -> bool:
    """Whether a clip shows credits; a heuristic, for letters on a plain ground.

    True if the first, the middle and the last frame have one brightness over most of the picture,
    and the rest of it is for the most part small shapes that stand in lines, `letters` of them or
    more, which are still or roll up or down at one speed. Credits over moving pictures pass, and
    so do a few large letters, as titles have them.
    """
    inks = [_ink(frame) for frame in frames]
    shown = [inks[0], inks[len(inks) // 2], inks[-1]]
    return all(_letters(ink) >= letters for ink in shown) and _rolls_evenly(inks)


def _ink(frame: UInt8[np.ndarray, "h w 3"]) -> Bool[np.ndarray, "a b"]:
    """What is not the ground; nothing at all where there is no plain ground."""
    width = max(1, round(frame.shape[1] * _CREDITS_ROWS / frame.shape[0]))
    grey = cv2.resize(
        cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY),
        (width, _CREDITS_ROWS),
        interpolation=cv2.INTER_AREA if frame.shape[0] > _CREDITS_ROWS else cv2.INTER_LINEAR,
    ).astype(np.int16)
    ground = np.median(grey)
    away = np.abs(grey - ground)
    plain = float((away <= _PLAIN_RANGE).mean()) >= _PLAIN_SHARE
    return (away >= _INK) & plain


def _letters(ink: Bool[np.ndarray, "a b"]) -> int:
    """How many shapes like letters there are; 0 if much else is there, or they are in no lines."""
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
    """Whether each frame is the one before, moved by the same number of rows."""
    profiles = [ink.mean(axis=1) for ink in inks]
    rolls = [_roll(before, after) for before, after in itertools.pairwise(profiles)]
    even = np.abs(np.array(rolls) - np.median(rolls)) <= _ROLL_SPREAD
    pairs = zip(itertools.pairwise(inks), rolls, strict=True)
    matches = [_overlap(before, after, rows=rows) for (before, after), rows in pairs]
    return bool(even.mean() >= 0.9 and np.median(matches) >= _ROLL_MATCH)


def _roll(before: Float[np.ndarray, " a"], after: Float[np.ndarray, " a"]) -> int:
    """Rows that a profile has moved down by."""
    whole = np.pad(before, _ROLL)
    errors = {
        rows: np.abs(whole[_ROLL - rows : _ROLL - rows + len(after)] - after).sum()
        for rows in sorted(range(-_ROLL, _ROLL + 1), key=abs)
    }
    return min(errors, key=lambda rows: errors[rows])


def _overlap(
    before: Bool[np.ndarray, "a b"], after: Bool[np.ndarray, "a b"], *, rows: int
) -> float:
    """Share of the ink in both frames that coincides once the first is moved."""
    first, second = (before, after) if rows >= 0 else (after, before)
    step = abs(rows)
    first, second = first[: len(first) - step], second[step:]
    either = (first | second).sum()
    return float((first & second).sum() / either) if either else 0.0
