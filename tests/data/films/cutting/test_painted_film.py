"""A film of painted art is cut where it should be, and its motion has the true levels.

The second half of the film is of art on which nothing was calibrated. What it measures:

    PYTHONPATH=tests/support/films python tests/data/films/cutting/test_painted_film.py --seed 2
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from etils import epath
from painted_film import FPS, PATTERNS, PaintedFilm, Shot, make_film, write_film

from animegamer_jax.data.films.clips.store import ClipRow, FilmSettings, open_shots
from animegamer_jax.data.films.cutting.analysis import FilmAnalysis, analyze_film
from animegamer_jax.data.films.cutting.process_film import process_film
from animegamer_jax.media.motion import motion_level

SETTINGS = FilmSettings(height=240, width=360)
FRAME = 1.02 / FPS
ROOM = 60  # frames of a shot that certainly has room for a clip, which may begin a frame later


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found in a film, next to its truth."""

    film: PaintedFilm
    analysis: FilmAnalysis
    rows: list[ClipRow]

    def shot_of(self, row: ClipRow) -> Shot | None:
        """The shot that a clip shows, unless it shows some of another."""
        first, last = row.start * FPS, row.end * FPS - 3
        return next(
            (s for s in self.film.shots if s.start + s.overlap - 1 <= first and last <= s.end + 1),
            None,
        )

    def breaks(self) -> tuple[int, list[Shot | None], list[float]]:
        """Breaks that were found; shots whose start was missed, None for the end; false ones."""
        last = self.film.shots[-1].end
        spans = [(s, s.start, s.start + max(0, s.overlap - 1)) for s in self.film.shots[1:]]
        spans.append((None, last - self.film.tail, last))  # type: ignore
        rest, missed = [one.time for one in self.analysis.breaks], []
        for shot, first, end in spans:
            near = (t for t in rest if first / FPS - FRAME <= t <= end / FPS + FRAME)
            if (hit := next(near, None)) is None:
                missed.append(shot)
            else:
                rest.remove(hit)
        return len(spans) - len(missed), missed, rest

    def levels(self, shots: Iterable[Shot]) -> list[tuple[Shot, int, int, float]]:
        """Of each kept clip of these shots its shot, the true level, the found one, the value."""
        chosen = {shot: level for shot, level in self._true_levels() if shot in set(shots)}
        found = [(self.shot_of(row), row) for row in self.rows if row.dropped is None]
        return [
            (shot, chosen[shot], motion_level(row.motion_value), row.motion_value)
            for shot, row in found
            if shot in chosen
        ]

    def _true_levels(self) -> list[tuple[Shot, int]]:
        values = [float(str(one["motion_value"])) for one in self.film.truth()]
        return [(s, motion_level(v)) for s, v in zip(self.film.shots, values, strict=True)]

    def flashed(self) -> tuple[list[Shot], list[Shot]]:
        """Shots with a flash that have room for a clip; those of them that keep none."""
        room = [s for s in self.film.shots if s.flash and self.film.alone(s) >= ROOM]
        kept = {self.shot_of(row) for row in self.rows if row.dropped is None}
        return room, [shot for shot in room if shot not in kept]

    def bars(self) -> list[tuple[Shot, tuple[int, ...]]]:
        """The bars that were found of each shot that is a scene."""
        times = [0.0, *(one.end for one in self.analysis.breaks)]
        found = []
        for start, bars in zip(times, self.analysis.scene_bars, strict=True):
            late = (start + 1.0) * FPS
            shots = (s for s in self.film.shots if s.start + s.overlap <= late < s.end)
            if (shot := next(shots, None)) is not None:
                found.append((shot, bars))
        return found


def find(folder: Path, film: PaintedFilm, settings: FilmSettings = SETTINGS) -> Found:
    path = write_film(folder / "painted.mp4", film)
    shots = open_shots(folder / "shots", settings)
    process_film(epath.Path(path), shots)
    (name,) = shots.films()
    return Found(film, analyze_film(path, settings, name="painted"), shots.rows(name))


def halves(film: PaintedFilm) -> dict[str, list[Shot]]:
    arts = dict.fromkeys(shot.art for shot in film.shots)
    return {art: [shot for shot in film.shots if shot.art == art] for art in arts}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    return find(tmp_path_factory.mktemp("painted"), make_film(2))


pytestmark = pytest.mark.slow


def test_the_film_shows_what_it_should(found):
    shots = found.film.shots
    assert len(shots) == 72
    assert {shot.change for shot in shots} == {"cut", "dissolve", "black", "wipe"}
    assert {shot.hold for shot in shots} == {1, 2, 3}
    assert {shot.level for shot in shots} == {1, 2, 3, 4, 5}
    assert sum(shot.bars > 0 for shot in shots) == sum(shot.flash is not None for shot in shots) + 1


def test_cuts(found):
    hits, missed, false = found.breaks()
    assert 2 * hits / (2 * hits + len(missed) + len(false)) >= 0.96, (missed, false)
    assert len(false) <= 2, false


def test_motion_levels_also_of_art_that_nothing_was_calibrated_on(found):
    for art, shots in halves(found.film).items():
        levels = found.levels(shots)
        wrong = [one for one in levels if one[1] != one[2]]
        assert len(levels) >= 25
        assert 1 - len(wrong) / len(levels) >= 0.85, (art, wrong)


def test_bars_are_removed_in_every_scene(found):
    checked = found.bars()
    assert sum(shot.bars > 0 for shot, _ in checked) >= 7
    wrong = []
    for shot, (top, bottom, left, right) in checked:
        expected = found.film.bars(shot)
        rows = top - expected, bottom - expected
        if not (0 <= min(rows) <= max(rows) <= 2 and left == right == 0):
            wrong.append(shot)
    assert not wrong


def test_no_shot_loses_its_clip_to_a_flash(found):
    flashed = [shot for shot in found.film.shots if shot.flash]
    assert len(flashed) == 8
    assert len(found.analysis.flashes) == 8
    assert {shot.flash[1] for shot in flashed if shot.flash} == {1, 2, 3}
    room, lost = found.flashed()
    assert room == flashed
    assert not lost
    assert not [row for row in found.rows if row.dropped == "flash"]


def print_results(seed: int, arts: list[str], settings: FilmSettings) -> None:
    with tempfile.TemporaryDirectory() as place:
        one = find(Path(place), make_film(seed, arts=arts), settings)
    hits, missed, false = one.breaks()
    f1 = 2 * hits / (2 * hits + len(missed) + len(false))
    print(f"breaks: {hits} found, {len(missed)} missed, {len(false)} false, F1 {f1:.3f}")
    for shot in missed:
        print("  missed:", shot)
    for art, shots in halves(one.film).items():
        levels = one.levels(shots)
        right = sum(true == level for _, true, level, _ in levels)
        print(f"motion levels of {art}: {right} of {len(levels)}")
        for shot, true, level, value in levels:
            if true != level:
                print(f"  {shot.kind}, level {true}: found {value:.2f}, level {level}: {shot}")
    wrong = [
        (shot, bars) for shot, bars in one.bars() if not 0 <= bars[0] - one.film.bars(shot) <= 2
    ]
    print(f"bars: {len(wrong)} of {len(one.bars())} scenes wrong", *wrong)
    dropped = [row.dropped for row in one.rows if row.dropped]
    flashes = f"{len(one.analysis.flashes)} of {sum(s.flash is not None for s in one.film.shots)}"
    room, lost = one.flashed()
    lengths = sorted(shot.flash[1] for shot in room if shot.flash)
    kept = f"{len(room) - len(lost)} of {len(room)} shots with room (frames of flash: {lengths})"
    print(f"flashes: {flashes}; a clip is kept of {kept}; dropped: {dropped}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--arts", nargs="+", default=list(PATTERNS))
    parser.add_argument("--detector", default="drawn")
    chosen = parser.parse_args()
    settings = dataclasses.replace(SETTINGS, detector=chosen.detector)
    print_results(chosen.seed, chosen.arts, settings)
