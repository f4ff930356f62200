"""From a film to clips: what is cut and dropped, and that it is the same every time."""

import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import cv2
import numpy as np
import pytest
from cut_films import CLIP, SETTINGS, cut, even_flow, id_of, process
from real_films import big_buck_bunny as big_buck_bunny
from tiny_films import moving, rolling, texture, write_frames

from animegamer_jax.data.films.clips.store import ShotsFolder, open_shots
from animegamer_jax.data.films.cutting.process_film import list_films
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import clip_motion
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.drawing.style import CrossFade, Cut, FadeThroughBlack, FilmStyle
from animegamer_jax.toy.films import Film, make_film, write_film

# A film with its truth


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> tuple[Path, Film]:
    path = tmp_path_factory.mktemp("films") / "A toy film.mp4"
    film = make_film(
        12,
        num_shots=7,
        height=96,
        width=144,
        transitions=(Cut(), Cut(), CrossFade(12), FadeThroughBlack(12)),
        style=FilmStyle(fps=24, hold=3),
    )
    write_film(path, film)
    return path, film


@pytest.fixture(scope="module")
def toy_shots(toy, tmp_path_factory) -> ShotsFolder:
    settings = dataclasses.replace(SETTINGS, height=96, width=144)
    folder = open_shots(tmp_path_factory.mktemp("shots") / "shots", settings)
    cut(toy[0], folder)
    return folder


def test_the_report_is_of_the_film(toy, toy_shots):
    (film,) = toy_shots.films()
    report = toy_shots.report(film)
    shots = toy[1].shots
    assert film == id_of(toy[0])
    assert film.startswith("a-toy-film-")
    assert (report.name, report.height, report.width) == ("A toy film.mp4", 96, 144)
    assert report.fps == pytest.approx(24, abs=0.01)
    assert report.seconds == pytest.approx(shots[-1].end / 24, abs=0.01)
    assert report.missing == 0
    assert report.bars == (0, 0, 0, 0)
    assert report.scenes == len(shots) == len(report.cuts) + 1
    rows = toy_shots.rows(film)
    assert len({row.scene for row in rows}) == report.scenes - report.short_scenes
    assert report.kept == len(rows) > 5
    assert report.dropped == {}


def test_clips_lie_within_scenes_side_by_side(toy, toy_shots):
    (film,) = toy_shots.films()
    rows, shots = toy_shots.rows(film), toy[1].shots
    for row in rows:
        shot = shots[row.scene]
        overlap = shot.transition.overlap if shot.transition else 0
        assert row.start * 24 >= shot.start + overlap - 2
        assert row.end * 24 <= shot.end + 1
        assert row.end - row.start == pytest.approx(CLIP / 8, abs=1e-3)
    for before, after in itertools.pairwise(rows):
        assert before.end <= after.start + 1e-3
    for scene, shot in enumerate(shots):
        overlap = shot.transition.overlap if shot.transition else 0
        room = (shot.end - shot.start - overlap) / 24 - 2 * SETTINGS.guard_seconds
        found = sum(row.scene == scene for row in rows)
        assert int((room - 0.5) * 8 / CLIP) <= found <= int((room + 0.2) * 8 / CLIP)


def test_a_clip_shows_the_frames_of_its_times(toy, toy_shots):
    (film,) = toy_shots.films()
    shown = list(toy[1].frames())
    with toy_shots.clips(film) as clips:
        for row in toy_shots.rows(film):
            frames = clips.frames(row.clip)
            assert frames.shape == (CLIP, 96, 144, 3)
            numbers = np.rint((row.start + np.arange(CLIP) / 8) * 24).astype(int)
            expected = np.stack([shown[number] for number in numbers])
            assert np.abs(frames.astype(int) - expected).mean() < 8  # compressed twice
            assert hashlib.sha256(clips.clip(row.clip)).hexdigest() == row.digest


def test_motion_is_that_of_the_scene(toy, toy_shots):
    (film,) = toy_shots.films()
    for row in toy_shots.rows(film):
        truth = clip_motion(render(toy[1].shots[row.scene].scene))
        assert row.motion_value == pytest.approx(truth.value, rel=0.5)  # another part of it
        assert len(row.flow) == CLIP - 1


def files_of(folder: ShotsFolder) -> dict[str, bytes]:
    root = Path(folder.path)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_another_process_writes_the_same_bytes(toy, toy_shots, tmp_path):
    other = open_shots(tmp_path / "shots", toy_shots.settings)
    code = (
        "import sys; from animegamer_jax.data.films.cutting.process_film import process_film;"
        "from animegamer_jax.data.films.clips.store import open_shots; from etils import epath;"
        "process_film(epath.Path(sys.argv[1]), open_shots(sys.argv[2]), threads=2)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(toy[0]), str(other.path)],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert files_of(other) == files_of(toy_shots)


def test_a_finished_film_is_not_cut_again(toy, toy_shots, tmp_path):
    (film,) = toy_shots.films()
    before = {path: path.stat().st_mtime_ns for path in Path(toy_shots.path).rglob("*")}

    def no_flow(frames: np.ndarray) -> np.ndarray:
        raise AssertionError("a clip is measured again")

    assert process(toy[0], toy_shots, estimate=no_flow) == toy_shots.report(film)
    assert {path: path.stat().st_mtime_ns for path in Path(toy_shots.path).rglob("*")} == before


# What is dropped


def test_useless_clips_are_dropped_with_their_reason_and_a_picture(tmp_path):
    folder = open_shots(
        tmp_path / "shots", dataclasses.replace(SETTINGS, height=240, width=360, num_frames=9)
    )
    size = {"height": 240, "width": 360}
    first = moving(12, speed=4, seed=1, **size)
    flashing = moving(12, speed=4, seed=2, **size)
    flashing[6] = np.full_like(flashing[6], 255)
    scenes = {
        "black": [np.full((240, 360, 3), 4, np.uint8)] * 12,
        "kept": first,
        "still": [texture(240, 360, seed=3)] * 12,
        "flash": flashing,
        "credits": list(rolling(12, speed=3)),
        "kept too": moving(12, speed=4, seed=5, **size),
        "duplicate": first,
    }
    path = write_frames(tmp_path / "film.mp4", itertools.chain(*scenes.values()), fps=8)
    report = cut(path, folder)
    rows = folder.rows(report.film)
    expected = [name if "kept" not in name else None for name in scenes]
    assert [row.dropped for row in rows] == expected
    assert report.kept == 2
    assert report.dropped == dict.fromkeys(sorted(name for name in expected if name), 1)
    for row, frames in zip(rows, scenes.values(), strict=True):
        if row.dropped is None:
            assert decode_mp4(folder.read_clip(report.film, row.clip)).shape == (9, 240, 360, 3)
            continue
        assert row.digest == ""
        data = np.frombuffer(folder.read_picture(report.film, row.clip), np.uint8)
        picture = cv2.cvtColor(cv2.imdecode(data, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        assert picture.shape == (160, 240, 3)
        shown = cv2.resize(frames[1], (240, 160), interpolation=cv2.INTER_AREA)
        assert np.abs(picture.astype(int) - shown).mean() < 8


# Films of many kinds


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_clip_is_placed_around_flashes(tmp_path, folder, length):
    """In the middle of a scene of three seconds, which has room for one clip."""
    frames = moving(72, seed=1)
    frames[36 : 36 + length] = [np.full_like(frames[0], 255)] * length
    report = cut(write_frames(tmp_path / "film.mp4", frames), folder)
    (row,) = folder.rows(report.film)
    assert (row.dropped, report.kept) == (None, 1)
    clip = decode_mp4(folder.read_clip(report.film, row.clip))
    assert clip.mean(axis=(1, 2, 3)).max() < 215


def test_a_clip_begins_after_a_long_flash(tmp_path, folder):
    frames = moving(144, seed=1)
    frames[30:35] = [np.full_like(frames[0], 255)] * 5
    report = cut(write_frames(tmp_path / "film.mp4", frames), folder)
    kept = [row for row in folder.rows(report.film) if row.dropped is None]
    for row in kept:
        clip = decode_mp4(folder.read_clip(report.film, row.clip))
        assert clip.mean(axis=(1, 2, 3)).max() < 215
    assert (report.kept, report.dropped) == (2, {})


def test_frames_of_any_rate_are_taken_at_their_times(tmp_path, folder):
    rng = np.random.default_rng(0)
    times = np.concatenate([[0], np.cumsum(rng.choice([0.03, 0.05, 0.1], 60))])
    values = np.linspace(1.0, 0.3, len(times))
    frames = [(texture(48, 72) * value).astype(np.uint8) for value in values]
    shown_at = [float(time) for time in times]
    path = write_frames(tmp_path / "film.mkv", frames, times=shown_at, codec="ffv1")  # lossless
    report = cut(path, folder, estimate=even_flow)
    assert report.fps == pytest.approx(1 / np.diff(times).mean(), rel=0.01)
    row = folder.rows(report.film)[0]
    wanted = row.start + np.arange(CLIP) / 8
    nearest = values[np.abs(times[:, None] - wanted).argmin(axis=0)]
    found = (
        decode_mp4(folder.read_clip(report.film, 0)).mean(axis=(1, 2, 3)) / texture(48, 72).mean()
    )
    error = found - nearest
    assert np.abs(error - error.mean()).max() < 0.6 * (values[0] - values[1])


def test_turned_and_portrait_films_fill_the_clip(tmp_path, folder):
    upright = moving(60, height=96, width=54, speed=1)
    stored = [np.rot90(frame, -1) for frame in upright]
    report = cut(write_frames(tmp_path / "film.mp4", stored, rotation=90), folder)
    assert (report.height, report.width) == (96, 54)
    middle = upright[3][30:66]
    shown = decode_mp4(folder.read_clip(report.film, 0))[0]
    expected = cv2.resize(middle, (72, 48), interpolation=cv2.INTER_CUBIC)
    assert np.abs(shown.astype(int) - expected).mean() < 6
    padded = open_shots(tmp_path / "padded", dataclasses.replace(SETTINGS, fit="pad"))
    cut(tmp_path / "film.mp4", padded)
    shown = decode_mp4(padded.read_clip(report.film, 0))
    assert shown[:, :, :20].max() < 12
    assert shown[:, :, 24:48].mean() > 50


def test_holes_in_a_film_are_not_crossed(tmp_path, folder):
    times = [k / 24 for k in range(120) if not 50 <= k < 90]
    frames = moving(120, speed=1)
    kept = [frames[round(time * 24)] for time in times]
    report = cut(write_frames(tmp_path / "film.mkv", kept, times=times), folder)
    assert report.scenes == 2
    assert report.cuts == (pytest.approx(90 / 24, abs=0.01),)
    assert report.short_scenes == 2


def test_progress_is_counted_in_seconds(tmp_path, folder):
    path = write_frames(tmp_path / "film [1].mp4", moving(24 * 5, speed=3))
    reported = []
    cut(path, folder, estimate=even_flow, on_progress=lambda *now: reported.append(now))
    assert list(dict.fromkeys(reported)) == [
        *(("film [1].mp4: pass 1 of 2 (cuts), seconds of film", second, 5) for second in range(6)),
        *(
            ("film [1].mp4: pass 2 of 2 (clips), seconds of film", second, 5)
            for second in (2, 4, 5)
        ),
    ]


def test_an_interrupted_film_is_cut_again_in_whole(tmp_path, folder):
    path = write_frames(tmp_path / "film.mp4", moving(120, speed=3))
    calls = []

    def interrupting(frames: np.ndarray) -> np.ndarray:
        calls.append(len(frames))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return even_flow(frames)

    with pytest.raises(KeyboardInterrupt):
        process(path, folder, estimate=interrupting)
    assert folder.films() == []
    assert cut(path, folder, estimate=even_flow).kept == 2
    assert len(folder.rows(id_of(path))) == 2


def test_memory_does_not_grow_with_the_film(tmp_path):
    settings = dataclasses.replace(SETTINGS, height=16, width=24)
    folder = open_shots(tmp_path / "shots", settings)
    peaks = []
    for number, seconds in enumerate((6, 6, 36)):
        frames = itertools.islice(itertools.cycle(moving(24, speed=1, seed=number)), 8 * seconds)
        path = write_frames(tmp_path / f"{number}.mp4", frames, fps=8)
        tracemalloc.start()
        assert cut(path, folder, estimate=even_flow).seconds == pytest.approx(seconds, abs=0.1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    frame = 48 * 72 * 3
    assert peaks[2] < peaks[1] + 24 * frame  # of 240 frames more


def test_a_real_film(big_buck_bunny, tmp_path):
    settings = dataclasses.replace(SETTINGS, height=120, width=180)
    folder = open_shots(tmp_path / "shots", settings)
    report = cut(big_buck_bunny, folder)
    assert (report.height, report.width, report.scenes) == (720, 1280, 1)
    assert report.seconds == pytest.approx(5.28, abs=0.01)
    assert report.cuts == ()
    assert (report.kept, report.dropped) == (2, {})
    for row in folder.rows(report.film):
        assert 1 < row.motion_value < 8
        assert min(row.flow) > 0


# Paths


def test_folders_patterns_and_files_name_films(tmp_path):
    names = ("b.mkv", "a.mp4", "[x] c.webm", "notes.txt", ".hidden.mp4", "D.MP4")
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "inner.mp4").mkdir()
    (tmp_path / "inner.mp4" / "e.ts").write_bytes(b"x")

    def listed(*paths: str) -> list[str]:
        return [
            str(p.relative_to(tmp_path)) for p in list_films([f"{tmp_path}/{p}" for p in paths])
        ]

    assert listed("") == ["D.MP4", "[x] c.webm", "a.mp4", "b.mkv"]
    assert listed("b.mkv", "*.mp4", "b.mkv") == ["b.mkv", "a.mp4"]
    assert listed("[x] c.webm") == ["[x] c.webm"]
    assert listed("notes.txt") == ["notes.txt"]  # named outright, it is tried
    assert listed("inn*/?.ts") == ["inner.mp4/e.ts"]
    for paths, message in (
        (["nothing.mp4"], r"nothing\.mp4: expected films, found nothing there: check the path"),
        (["a.mp4", "*.avi"], r"\*\.avi: expected films, found nothing there"),
        (["**/e.ts"], r"expected a pattern without \*\*: name folders"),
    ):
        with pytest.raises(UserError, match=message):
            listed(*paths)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: expected films, found no film \(\.avi .*\) in it"):
        listed("empty")
    with pytest.raises(UserError, match="expected the path of a film or a folder, found none"):
        list_films([])
