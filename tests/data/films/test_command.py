"""`animegamer data films` as it is run: of good and bad films, by several workers, and killed."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_films import cut
from tiny_films import moving, write_frames, write_sound

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.configs import clip_size
from animegamer_jax.data.films.clips.store import open_shots

SIZE = ("--height", "48", "--width", "72")


def run(films: Path, out: Path, *options: str) -> int:
    return main(["data", "films", str(films), "--out", str(out), *SIZE, *options])


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def make_films(folder: Path, count: int) -> Path:
    folder.mkdir()
    for seed in range(count):
        write_frames(folder / f"film {seed}.mp4", moving(110, speed=3, seed=seed))
    return folder


def test_good_and_bad_films_in_one_folder(tmp_path, capsys):
    films, bad = tmp_path / "films", tmp_path / "bad"
    films.mkdir()
    bad.mkdir()
    write_frames(films / "good.mp4", moving(110, speed=3))
    (films / "junk.mp4").write_bytes(b"no film" * 500)
    (films / os.fsdecode(b"M\xf6we\n1.mp4")).write_bytes(b"")
    write_sound(films / "song.mp4", cover=False)
    write_frames(films / "short.mp4", moving(12))
    assert run(films, tmp_path / "shots") == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}/shots: 1 films, 2 clips kept, 0 dropped; 4 films skipped"
    assert sorted(line.partition(", found")[0] for line in others) == [
        f"  {films}/M\\udcf6we\\n1.mp4: expected a film",
        f"  {films}/junk.mp4: expected a film",
        f"  {films}/short.mp4: expected at least 2.12 seconds, a clip's length",
        f"  {films}/song.mp4: expected a film",
    ]
    (films / "good.mp4").unlink()
    assert run(films, tmp_path / "shots") == 2, "none of this run's films can be used"
    (films / "junk.mp4").rename(bad / "junk.mp4")
    assert run(bad, tmp_path / "others") == 2
    assert "0 films, 0 clips kept" in capsys.readouterr().out


def test_clips_have_the_size_of_a_model(tmp_path, tiny_bundle, capsys):
    films = tmp_path / "film.mp4"
    write_frames(films, moving(110, speed=3))
    words = ["data", "films", str(films), "--model", str(tiny_bundle)]
    assert main([*words, "--out", str(tmp_path / "shots")]) == 0
    settings, config = open_shots(tmp_path / "shots").settings, Bundle.open(tiny_bundle).config
    size = clip_size(config.dit, config.vae)
    assert (settings.num_frames, settings.height, settings.width) == size
    assert main([*words, "--out", str(tmp_path / "other"), "--height", "64"]) == 2
    message = f"--height 64: clips for --model {tiny_bundle} have {size[1]}: leave --height out"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_workers_write_the_bytes_of_one(tmp_path):
    films = make_films(tmp_path / "films", 4)
    for workers in "12":
        assert run(films, tmp_path / workers, "--workers", workers) == 0
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    assert len(open_shots(tmp_path / "1").films()) == 4


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path, capsys):
    films, out = make_films(tmp_path / "films", 6), tmp_path / "shots"
    command = [sys.executable, "-m", "animegamer_jax.cli", "data", "films", str(films)]
    process = subprocess.Popen([*command, "--out", str(out), *SIZE])
    deadline = time.monotonic() + 60
    while not list(out.glob("*/film.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*/film.json")}
    assert 1 <= len(finished) < 6
    for part in out.glob("**/*.part-*"):
        os.utime(part, (0, 0))
    assert run(films, out) == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert run(films, tmp_path / "at once") == 0
    assert files_of(out) == files_of(tmp_path / "at once")
    assert "6 films, 12 clips kept, 0 dropped; 0 films skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_long_film_takes_the_memory_of_a_short_one(tmp_path):
    peaks = []
    for minutes in (1, 10):
        films = tmp_path / f"{minutes} minutes"
        films.mkdir()
        frames = itertools.islice(itertools.cycle(moving(100, speed=3)), minutes * 60 * 8)
        write_frames(films / "film.mp4", frames, fps=8)
        took = cut(films, tmp_path / f"shots of {minutes}", *SIZE)
        peaks.append(took.peak)
    assert peaks[1] < 1500
    assert peaks[1] < peaks[0] + 25, "MB; nine minutes of frames are 45 MB, of clips 45 too"
