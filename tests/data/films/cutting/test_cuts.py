"""Cuts and fades of drawn films are found where they are, and nowhere else.

The table of hits over many films (rows: what the films do), for tuning what `cuts` decides:

    export PYTHONPATH=tests/support:tests/support/films
    python tests/data/films/cutting/test_cuts.py --seeds 11 12 13 14 --size 96 144
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import scenedetect
from real_films import big_buck_bunny as big_buck_bunny
from real_films import bikes as bikes
from tiny_films import moving, texture

from animegamer_jax.data.films.clips.store import FilmSettings
from animegamer_jax.data.films.cutting.analysis import analyze_film
from animegamer_jax.data.films.cutting.cuts import Break, CutFinder
from animegamer_jax.toy.drawing.style import CrossFade, Cut, FadeThroughBlack, FilmStyle
from animegamer_jax.toy.films import Film, make_film, write_film

SETTINGS = FilmSettings()
CUT = (Cut(),)
KINDS = {
    "cuts at 8/s": (CUT, FilmStyle()),
    "on threes": (CUT, FilmStyle(fps=24, hold=3)),
    "on twos": (CUT, FilmStyle(fps=24, hold=2)),
    "on ones": (CUT, FilmStyle(fps=24)),
    "pans at 8/s": (CUT, FilmStyle(pans=1.0)),
    "pans on threes": (CUT, FilmStyle(fps=24, hold=3, pans=1.0)),
    "pans on twos": (CUT, FilmStyle(fps=24, hold=2, pans=1.0)),
    "flashes, 1 frame": (CUT, FilmStyle(fps=24, hold=3, flashes=1.0)),
    "flashes, 2 frames": (CUT, FilmStyle(fps=24, hold=2, flashes=1.0, flash_frames=2)),
    "flashes at 8/s": (CUT, FilmStyle(flashes=1.0)),
    "bars": (CUT, FilmStyle(fps=24, hold=3, bars=(12, 12, 0, 0))),
    "cross-fades, 0.5 s": ((CrossFade(12),), FilmStyle(fps=24, hold=3)),
    "cross-fades, 1 s": ((CrossFade(24),), FilmStyle(fps=24, hold=2)),
    "cross-fades at 8/s": ((CrossFade(6),), FilmStyle()),
    "black, 0.5 s": ((FadeThroughBlack(12),), FilmStyle(fps=24, hold=3)),
    "black, 1 s": ((FadeThroughBlack(24),), FilmStyle(fps=24, hold=3)),
    "black at 8/s": ((FadeThroughBlack(8),), FilmStyle()),
    "all": (
        (Cut(), Cut(), CrossFade(18), FadeThroughBlack(18)),
        FilmStyle(fps=24, hold=3, pans=0.3, flashes=0.3, flash_frames=2),
    ),
}


@dataclasses.dataclass(frozen=True)
class Hits:
    """Breaks that were found, missed, and found where there are none; seconds of the latter."""

    found: int = 0
    missed: tuple[float, ...] = ()
    false: tuple[float, ...] = ()

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.found + other.found, self.missed + other.missed, self.false + other.false)

    @property
    def f1(self) -> float:
        return 2 * self.found / (2 * self.found + len(self.missed) + len(self.false))


def compare(film: Film, breaks: list[Break]) -> Hits:
    """A break counts within one frame of a cut, or of the span of a fade."""
    frame = 1.02 / film.style.fps
    rest, missed = [one.time for one in breaks], []
    for shot in film.shots[1:]:
        assert shot.transition is not None
        first = shot.start / film.style.fps
        last = first + max(0, shot.transition.overlap - 1) / film.style.fps
        hit = next((t for t in rest if first - frame <= t <= last + frame), None)
        if hit is None:
            missed.append(first)
        else:
            rest.remove(hit)
    return Hits(len(film.shots) - 1 - len(missed), tuple(missed), tuple(rest))


def toy_film(kind: str, seed: int, *, num_shots: int, size: tuple[int, int]) -> Film:
    transitions, style = KINDS[kind]
    bars = style.bars
    if any(bars):
        style = dataclasses.replace(style, bars=(size[0] // 8, size[0] // 8, 0, 0))
    return make_film(
        seed,
        num_shots=num_shots,
        height=size[0],
        width=size[1],
        transitions=transitions,
        style=style,
    )


def find(film: Film, settings: FilmSettings = SETTINGS) -> CutFinder:
    """The frames as they are drawn, without a codec."""
    finder = CutFinder(settings)
    for number, frame in enumerate(film.frames()):
        finder.add(number / film.style.fps, frame)
    return finder


def measured(kind: str, settings: FilmSettings = SETTINGS, *, seed: int = 3) -> Hits:
    film = toy_film(kind, seed, num_shots=5, size=(48, 72))
    return compare(film, find(film, settings).finish())


@pytest.mark.parametrize("kind", KINDS)
def test_breaks_are_found_within_a_frame_and_no_others(kind):
    hits = measured(kind)
    assert hits.missed == hits.false == ()
    assert hits.found == 4


def test_films_in_files_are_as_good(tmp_path):
    film = toy_film("all", 5, num_shots=6, size=(96, 144))
    write_film(tmp_path / "film.mp4", film)
    analysis = analyze_film(tmp_path / "film.mp4", SETTINGS, name="film")
    assert compare(film, list(analysis.breaks)) == Hits(found=5)
    flashes = [s["flash"] for s in film.truth()["shots"] if s["flash"]]  # type: ignore
    assert flashes
    np.testing.assert_allclose(np.multiply(analysis.flashes, 24), flashes, atol=0.01)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("pans on threes", {"hold_seconds": 0.0}),
        ("flashes, 2 frames", {"flash_seconds": 0.0}),
        ("cross-fades, 0.5 s", {"min_fade": 255.0}),
    ],
)
def test_each_provision_is_needed(kind, change):
    assert measured(kind, dataclasses.replace(SETTINGS, **change)).f1 < 0.9


PLAIN = FilmSettings(hold_seconds=0.0, flash_seconds=0.0, min_fade=255.0, min_scene_seconds=0.0)


def cuts_of_library(path: Path, settings: FilmSettings) -> list[float]:
    detector = scenedetect.AdaptiveDetector(
        adaptive_threshold=settings.adaptive_threshold,
        min_scene_len=0,
        window_width=settings.window,
        min_content_val=settings.min_content,
    )
    scenes = scenedetect.detect(str(path), detector)
    return [start.seconds for start, _ in scenes[1:]]


@pytest.mark.parametrize("kind", ["cuts at 8/s", "pans on threes"])
def test_without_provisions_cuts_are_those_of_the_library(tmp_path, kind):
    write_film(tmp_path / "film.mp4", toy_film(kind, 4, num_shots=5, size=(48, 72)))
    analysis = analyze_film(tmp_path / "film.mp4", PLAIN, name="film")
    expected = cuts_of_library(tmp_path / "film.mp4", PLAIN)
    assert len(expected) >= 4
    np.testing.assert_allclose([one.time for one in analysis.breaks], expected, atol=1e-3)


def feed(frames: list[np.ndarray], *, fps: int = 24) -> list[Break]:
    finder = CutFinder(SETTINGS)
    for number, frame in enumerate(frames):
        finder.add(number / fps, frame)
    return finder.finish()


def test_of_cuts_that_are_near_the_first_counts():
    frames = [
        texture(48, 72, seed=seed)
        for seed, count in ((1, 30), (2, 8), (3, 30))
        for _ in range(count)
    ]
    found = feed(frames)
    assert [(one.time, one.kind) for one in found] == [(30 / 24, "cut")]
    assert found[0].start == found[0].end == found[0].time


def test_light_that_changes_is_no_fade():
    scene = texture(48, 72).astype(float)
    light = np.interp(np.arange(96), [30, 60], [1.0, 0.35])
    assert feed([(scene * share).astype(np.uint8) for share in light]) == []


@pytest.mark.parametrize("speed", [1, 3, 5])
def test_blurred_pictures_that_pass_are_no_fade(speed):
    for seed in range(4):
        assert feed(moving(72, speed=speed, seed=seed)) == []


def test_still_pictures_that_follow_each_other_are_scenes():
    frames = [texture(48, 72, seed=seed) for seed in range(5) for _ in range(20)]
    assert [one.time for one in feed(frames)] == [k * 20 / 24 for k in range(1, 5)]


def test_a_fade_says_where_it_starts_and_ends():
    first, second = texture(48, 72, seed=1).astype(float), texture(48, 72, seed=2)
    shares = np.clip((np.arange(96) - 36 + 1) / 25, 0, 1)
    (fade,) = feed([((1 - s) * first + s * second).astype(np.uint8) for s in shares])
    assert fade.kind == "fade"
    assert fade.time == pytest.approx(48 / 24, abs=0.1)
    assert fade.start == pytest.approx(36 / 24, abs=0.25)
    assert fade.end == pytest.approx(60 / 24, abs=0.25)


def wiped(share: float, first: np.ndarray, second: np.ndarray, *, slant: float) -> np.ndarray:
    """The first picture, and the second on its side of a line."""
    y, x = np.mgrid[: first.shape[0], : first.shape[1]]
    place = (1 - slant) * x / first.shape[1] + slant * y / first.shape[0]
    return np.where((place < share)[..., None], second, first)


@pytest.mark.parametrize("slant", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [8, 18])
def test_a_wipe_is_found(slant, length):
    first, second = (np.repeat(moving(12, seed=seed), 8, axis=0) for seed in (1, 2))
    shares = np.clip((np.arange(96) - 40 + 1) / length, 0, 1)
    frames = [wiped(s, a, b, slant=slant) for s, a, b in zip(shares, first, second, strict=True)]
    (wipe,) = feed(frames)
    assert wipe.kind == "fade"
    assert 40 / 24 <= wipe.time <= (40 + length) / 24


def test_something_large_that_passes_is_no_wipe():
    scene, wall = texture(48, 72, seed=1), texture(48, 30, seed=2)
    frames = [scene.copy() for _ in range(96)]
    for number, frame in enumerate(frames[20:76]):
        left, right = max(0, 72 - 3 * number), min(72, 102 - 3 * number)
        if left < right:
            frame[:, left:right] = wall[:, : right - left]
    assert feed(frames) == []


def zooming(num_frames: int, *, rate: float) -> list[np.ndarray]:
    """A street of hard edges that comes nearer."""
    rng = np.random.default_rng(3)
    street = np.kron(rng.integers(0, 255, (24, 36, 3)), np.ones((12, 12, 1))).astype(np.uint8)
    frames = []
    for number in range(num_frames):
        rows, columns = (round(side / (1 + rate * number)) // 2 * 2 for side in street.shape[:2])
        y, x = (street.shape[0] - rows) // 2, (street.shape[1] - columns) // 2
        part = street[y : y + rows, x : x + columns]
        frames.append(cv2.resize(part, (256, 170), interpolation=cv2.INTER_AREA))
    return frames


@pytest.mark.parametrize("rate", [0.001, 0.002, 0.004])
def test_a_slow_zoom_is_no_fade(rate):
    assert feed(zooming(72, rate=rate)) == []


def test_memory_does_not_grow_with_the_film():
    finder, kept = CutFinder(SETTINGS), []
    for number, frame in enumerate(moving(240, height=18, width=32)):
        finder.add(number / 24, frame)
        kept.append(len(finder._waiting) + len(finder._fades._thumbs))
    assert len(finder._times) > 200
    assert max(kept[120:]) <= max(kept[:120]) <= 70


def test_real_cuts(bikes):
    analysis = analyze_film(bikes, SETTINGS, name="bikes")
    assert [one.time for one in analysis.breaks] == pytest.approx([1.2, 3.04, 5.48, 7.48, 9.68])
    assert analysis.flashes == ()


def test_a_real_shot_of_an_animated_film_has_no_cut(big_buck_bunny):
    analysis = analyze_film(big_buck_bunny, SETTINGS, name="bunny")
    assert analysis.breaks == analysis.flashes == ()
    assert analysis.bars == (0, 0, 0, 0)
    assert (analysis.height, analysis.width, len(analysis.times)) == (720, 1280, 132)
    assert analysis.fps == pytest.approx(25, abs=0.01)


def test_a_film_of_one_frame_has_no_breaks():
    assert feed([texture(48, 72)]) == []
    assert feed([]) == []


def print_table(*, seeds: list[int], size: tuple[int, int], num_shots: int) -> None:
    print(f"{'films':20} found missed false F1")
    for kind in KINDS:
        hits = Hits()
        for seed in seeds:
            film = toy_film(kind, seed, num_shots=num_shots, size=size)
            with tempfile.TemporaryDirectory() as folder:
                write_film(Path(folder) / "film.mp4", film)
                analysis = analyze_film(Path(folder) / "film.mp4", SETTINGS, name=kind)
            hits += compare(film, list(analysis.breaks))
        counts = f"{hits.found:5} {len(hits.missed):6} {len(hits.false):5}"
        print(f"{kind:20} {counts} {hits.f1:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14])
    parser.add_argument("--size", type=int, nargs=2, default=[96, 144])
    parser.add_argument("--shots", type=int, default=10)
    chosen = parser.parse_args()
    height, width = chosen.size
    print_table(seeds=chosen.seeds, size=(height, width), num_shots=chosen.shots)
