"""Films of painted art with known cuts, motion, bars and flashes.

The art is of free games that Debian packages, so none is in this repository:

- `wesnoth`: landscapes and portraits of Battle for Wesnoth (GPL-2+), package wesnoth-1.16-data.
  What finds cuts and motion was calibrated on films of this art.
- `anime`: places and characters of Ren'Py's two example games (Expat), packages renpy-demo and
  renpy-thequestion. Held out: nothing was calibrated on it.

`make art` unpacks the packages into `out/art`; installed ones are found as well. To look at one:

    python tests/support/films/painted_film.py --seed 1 --out film.mp4
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import pytest
from tiny_films import write_frames

FPS = 24
STEP = FPS // 8  # frames between two of a clip
ROOTS = (Path(__file__).parents[3] / "out" / "art", Path("/"))
HOW = "no painted art: run `make art` (Debian), or install wesnoth-1.16-data, renpy-demo and "
HOW += "renpy-thequestion"
CORE = "usr/share/games/wesnoth/*/data/core/images"
DEMO, QUESTION = (f"usr/share/games/renpy/{n}/game/images" for n in ("demo", "the_question"))
PATTERNS = {
    "wesnoth": (
        (f"{CORE}/story/landscape-*", f"{CORE}/story/swamp-*"),
        (f"{CORE}/portraits/humans/*", f"{CORE}/portraits/drakes/*"),
    ),
    "anime": (
        (f"{DEMO}/bg cave*", f"{DEMO}/bg panorama*", f"{DEMO}/concert1*", f"{QUESTION}/bg *"),
        (f"{DEMO}/eileen *", f"{DEMO}/lucy *", f"{QUESTION}/sylvie *"),
    ),
}
LEVEL_SPEEDS = ((0.3, 0.65), (0.9, 3.1), (4.0, 11.0), (14.5, 27.0), (34.0, 55.0))
"""Least and largest speed of each motion level, in pixels per 1/8 s at 480 rows."""

Kind = Literal["pan", "sprite", "both", "zoom"]
Change = Literal["cut", "dissolve", "black", "wipe"]


@dataclasses.dataclass(frozen=True)
class Shot:
    """One shot.

    `start` is the first frame that shows anything of it, `overlap` the number of those that it
    shares with the shot before. `speed` is in pixels per 1/8 s at 480 rows.
    """

    art: str
    start: int
    frames: int
    kind: Kind
    level: int
    speed: float
    hold: int
    bars: int  # share of the height in 1/1000, each
    flash: tuple[int, int] | None  # first frame in the shot, and number of frames
    change: Change
    overlap: int
    ground: int
    sprite: int
    seed: int

    @property
    def end(self) -> int:
        return self.start + self.frames


@dataclasses.dataclass(frozen=True)
class PaintedFilm:
    """A film; `tail` is the number of frames of the fade to black at its end."""

    shots: tuple[Shot, ...]
    rows: int = 360
    columns: int = 640
    tail: int = 24
    black: int = 12

    @property
    def num_frames(self) -> int:
        return self.shots[-1].end + self.black

    def alone(self, shot: Shot) -> int:
        """Number of frames that show nothing of another shot, nor of the fade at the end."""
        following = self.shots[self.shots.index(shot) + 1 :]
        return shot.frames - shot.overlap - (following[0].overlap if following else self.tail)

    def bars(self, shot: Shot) -> int:
        """Black rows at the top, and at the bottom."""
        return shot.bars * self.rows // 1000 // 2 * 2

    def frames(self) -> Iterator[np.ndarray]:
        """Every frame, RGB."""
        following = iter([*self.shots[1:], None])
        now, later = None, self.shots[0]
        last = self.shots[-1]
        for number in range(last.end):
            if later and number == later.start + later.overlap:
                now, later = Painter(self, later), next(following)
                coming = Painter(self, later) if later and later.overlap else None
            elif now is None:
                raise AssertionError
            frame = now.frame(number - now.shot.start)
            if later and number >= later.start:
                assert coming
                share = (number - later.start + 1) / (later.overlap + 1)
                frame = mixed(frame, coming.frame(number - later.start), share, later)
            dark = (number - (last.end - self.tail) + 1) / self.tail
            yield frame if dark <= 0 else np.rint(frame * (1 - dark)).astype(np.uint8)
        for _ in range(self.black):
            yield np.zeros((self.rows, self.columns, 3), np.uint8)

    def truth(self) -> list[dict[str, object]]:
        """Of each shot what it does, and its motion value: pixels per 1/8 s at 480 rows."""
        return [
            {**dataclasses.asdict(s), "motion_value": Painter(self, s).motion_value()}
            for s in self.shots
        ]


def mixed(before: np.ndarray, after: np.ndarray, share: float, shot: Shot) -> np.ndarray:
    """A frame of the change from one shot to the next."""
    if shot.change == "wipe":
        rows, columns = before.shape[:2]
        x, y = np.linspace(0, 1, columns)[None], np.linspace(0, 1, rows)[:, None]
        place = ((x + 0 * y), (1 - x + 0 * y), (y + 0 * x), (x + y) / 2)[shot.seed % 4]
        return np.where((place < share)[..., None], after, before)
    if shot.change == "black":
        light = 2 * abs(share - 0.5)
        return np.rint((before if share < 0.5 else after) * light).astype(np.uint8)
    return np.rint(before * (1 - share) + after * share).astype(np.uint8)


class Painter:
    """Draws the frames of one shot."""

    def __init__(self, film: PaintedFilm, shot: Shot):
        self.film, self.shot = film, shot
        rng = np.random.default_rng(shot.seed)
        self.bar = film.bars(shot)
        self.rows, self.columns = film.rows - 2 * self.bar, film.columns
        grounds, sprites = load_art(shot.art)
        self.scale = self.rows / 480  # pixels of the film per pixel of a clip of 480 rows
        ground = grounds[shot.ground % len(grounds)]
        self.angle = rng.choice([0, 0, 0, np.pi, np.pi / 2, rng.uniform(0, 2 * np.pi)])
        self.ground = scaled(ground, self.rows * rng.uniform(1.15, 1.7))
        if rng.random() < 0.5:
            self.ground = self.ground[:, ::-1]
        sprite = sprites[shot.sprite % len(sprites)]
        self.sprite = scaled(sprite, self.rows * rng.uniform(0.4, 1.0))
        self.turn = rng.uniform(0, 1)
        self.ground_speed, self.sprite_speed = {
            "pan": (1.0, 1.0), "zoom": (0.0, 0.0), "sprite": (0.0, 1.0), "both": (1.0, 1.8),
        }[shot.kind]  # fmt: skip
        self.walk = rng.uniform(-0.15, 0.15)

    def drawn(self, frame: int) -> int:
        """The frame at which the drawing that is shown was drawn."""
        return frame // self.shot.hold * self.shot.hold

    def ground_place(self, frame: float) -> np.ndarray:
        moved = self.shot.speed * self.scale * self.ground_speed * frame / STEP
        room = np.array([self.ground.shape[1], self.ground.shape[0]]) - (self.columns, self.rows)
        heading = np.array([np.cos(self.angle), np.sin(self.angle)])
        return room * self.turn + heading * moved

    def sprite_place(self, frame: float) -> np.ndarray:
        """Its upper left corner. It turns round at the edges, and never stops."""
        width = max(1.0, self.columns - 0.6 * self.sprite.shape[1])
        moved = self.shot.speed * self.scale * self.sprite_speed * frame / STEP
        if self.shot.kind in ("pan", "zoom"):
            moved = 0.0
        x = (self.turn * width + moved * np.cos(self.walk)) % (2 * width)
        y = self.rows - 0.9 * self.sprite.shape[0]
        bounce = (moved * np.sin(self.walk) / 40 + 100) % 2
        return np.array([min(x, 2 * width - x) - 0.2 * self.sprite.shape[1],
                         y + 40 * (1 - abs(1 - bounce)) * np.sign(self.walk)])  # fmt: skip

    def zoom(self, frame: float) -> float:
        rate = self.shot.speed * self.scale / STEP / (0.33 * self.rows)  # mean length of the field
        return 1.0 + rate * frame if self.shot.kind == "zoom" else 1.0

    def frame(self, number: int) -> np.ndarray:
        if self.shot.flash:
            first, count = self.shot.flash
            if first <= number < first + count:
                return np.full((self.film.rows, self.film.columns, 3), 255, np.uint8)
        at = self.drawn(number)
        zoom, size = self.zoom(at), (self.columns, self.rows)
        middle = np.array(size) / 2
        ground = place(self.ground, -self.ground_place(at), zoom, middle, size, cv2.BORDER_REFLECT)
        if self.shot.kind != "zoom":
            sprite = self.sprite
            there = place(sprite, self.sprite_place(at), 1.0, middle, size, cv2.BORDER_CONSTANT)
            alpha = there[..., 3:].astype(np.float32) / 255
            ground = ground * (1 - alpha) + there[..., :3] * alpha
        whole = np.zeros((self.film.rows, self.film.columns, 3), np.uint8)
        whole[self.bar : self.film.rows - self.bar] = np.rint(ground)
        return whole

    def motion_value(self) -> float:
        """Mean length of the motion in what clips show of the shot, without 0.2 and less."""
        lengths = []
        size = (self.columns, self.rows)
        inner = slice(round((self.columns - 1.5 * self.rows) / 2), None)
        inner = slice(inner.start, self.columns - inner.start)
        for at in range(0, self.shot.frames - STEP, STEP):
            whole = np.linalg.norm(self.ground_place(at + STEP) - self.ground_place(at))
            field = np.full((self.rows, self.columns), whole)
            if self.shot.kind == "zoom":
                y, x = np.mgrid[: self.rows, : self.columns]
                away = np.hypot(x - size[0] / 2, y - size[1] / 2)
                field = away * (self.zoom(at + STEP) / self.zoom(at) - 1)
            else:
                there = self.sprite_place(at)
                step = np.linalg.norm(self.sprite_place(at + STEP) - there)
                alpha = place(self.sprite[..., 3], there, 1, 0, size, cv2.BORDER_CONSTANT) > 127
                field[alpha] = step
            lengths.append(field[:, inner][::2, ::2].ravel() / self.scale)
        found = np.concatenate(lengths)
        return float(found[found >= 0.2].mean()) if (found >= 0.2).any() else 0.0


def place(picture, where, zoom, middle, size, border) -> np.ndarray:
    """The picture with its corner at `where`, enlarged about the middle."""
    shift = zoom * np.asarray(where) + (1 - zoom) * np.asarray(middle)
    matrix = np.array([[zoom, 0, shift[0]], [0, zoom, shift[1]]])
    return cv2.warpAffine(picture, matrix, size, flags=cv2.INTER_LINEAR, borderMode=border)


def scaled(picture: np.ndarray, rows: float) -> np.ndarray:
    scale = rows / picture.shape[0]
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    return cv2.resize(picture, None, fx=scale, fy=scale, interpolation=how)


@functools.cache
def load_art(art: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Grounds (RGB) and sprites (RGBA); skips the test where there are none."""
    found = []
    for patterns in PATTERNS[art]:
        files = sorted({p for root in ROOTS for one in patterns for p in glob(root, one)})
        if not files:
            pytest.skip(HOW)
        found.append([cv2.imread(str(file), cv2.IMREAD_UNCHANGED) for file in files])
    grounds = [cv2.cvtColor(g[..., :3], cv2.COLOR_BGR2RGB) for g in found[0]]
    sprites = [cv2.cvtColor(s, cv2.COLOR_BGRA2RGBA) for s in found[1] if s.shape[-1] == 4]
    return grounds, [s[..., :4] for s in sprites]


def glob(root: Path, pattern: str) -> list[Path]:
    """Files in a folder, or in the packages that were unpacked side by side in it."""
    return [*root.glob(pattern), *(root.glob(f"*/{pattern}") if root != Path("/") else ())]


def make_film(
    seed: int, *, arts: Sequence[str] = tuple(PATTERNS), num_shots: int = 72, rows: int = 360
) -> PaintedFilm:
    """A film with all kinds of shots and changes, drawn by the seed; a part of each art."""
    rng = np.random.default_rng(seed)
    shots: list[Shot] = []
    kinds = ("pan", "sprite", "sprite", "both", "pan", "sprite", "zoom", "sprite")
    order = rng.permutation(num_shots)
    levels = rng.permutation(num_shots) % 5
    changes = dict.fromkeys(range(num_shots), "cut")
    for number, place_ in enumerate(rng.permutation(np.arange(1, num_shots))[: num_shots // 6]):
        changes[int(place_)] = ("dissolve", "black", "wipe")[number % 3]
    ground = 0
    for number in range(num_shots):
        kind = kinds[order[number] % len(kinds)]
        level = int(levels[number]) + 1
        low, high = LEVEL_SPEEDS[level - 1]
        speed = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        speed *= 1 if kind != "both" else 0.8
        speed = min(speed, 8.0) if kind == "zoom" else speed
        change = changes[number] if number else "cut"
        overlap = 0 if change == "cut" else int(rng.integers(10, 22))
        frames = int(rng.integers(66, 92)) + overlap
        flashing = number % 9 == 4
        ground += int(rng.integers(1, 5))
        start = shots[-1].end - overlap if shots else 0
        flash = (overlap + int(rng.integers(20, 40)), 1 + number // 9 % 3) if flashing else None
        bars = int(rng.choice([125, 90])) if number % 8 == 3 else 0
        shots.append(
            Shot(
                art=arts[number * len(arts) // num_shots],
                start=start,
                frames=frames,
                kind=kind,
                level=level,
                speed=speed,
                hold=int(rng.choice([1, 2, 3, 3, 3])),
                bars=bars,
                flash=flash,
                change=change,
                overlap=overlap,
                ground=ground,
                sprite=int(rng.integers(1000)),
                seed=int(rng.integers(2**31)),
            )
        )
    return PaintedFilm(tuple(shots), rows=rows, columns=rows * 16 // 9)


def write_film(path: Path, film: PaintedFilm) -> Path:
    return write_frames(path, film.frames(), fps=FPS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arts", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shots", type=int, default=72)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    made = make_film(chosen.seed, arts=chosen.arts, num_shots=chosen.shots)
    write_film(chosen.out, made)
    chosen.out.with_suffix(".json").write_text(json.dumps(made.truth(), indent=1))
