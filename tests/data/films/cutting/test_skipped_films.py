"""Films that cannot be used, or not whole: skipped with a reason, and tried again."""

import dataclasses
import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from cut_films import cut, even_flow, id_of, process
from tiny_films import moving, texture, write_frames, write_sound

from animegamer_jax.data.films.clips.store import SkippedFilm
from animegamer_jax.errors import UserError


def test_a_film_that_is_cut_off_is_used_as_far_as_it_goes(tmp_path, folder):
    whole = write_frames(tmp_path / "whole.mkv", moving(144, speed=3), options={}).read_bytes()
    path = tmp_path / "cut.mkv"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    report = cut(path, folder)
    assert report.kept >= 1
    assert report.seconds + report.missing == pytest.approx(6, abs=0.1)
    assert 1.5 < report.missing < 3
    path.write_bytes(whole[: len(whole) // 4])
    skipped = process(path, folder)
    assert isinstance(skipped, SkippedFilm)
    assert "expected at least 2.12 seconds, a clip's length" in skipped.reason
    assert "that can be read" in skipped.reason


def test_films_that_cannot_be_used_are_skipped_and_tried_again(tmp_path, folder):
    (tmp_path / "junk.mp4").write_bytes(b"no film" * 500)
    write_sound(tmp_path / "song.mp4", cover=True)
    write_frames(tmp_path / "slow.mp4", moving(30, speed=3), fps=1)
    write_frames(tmp_path / "six.mp4", moving(60, speed=3), fps=6)
    write_frames(tmp_path / "short.mp4", moving(12))
    write_frames(tmp_path / "one.mp4", moving(1))
    reasons = {
        "junk": r"expected a film, found: Invalid data",
        "song": "expected a film, found sound only",
        "slow": r"expected at least 8 frames per second, as clips have, found 1: ",
        "six": "expected at least 8 frames per second, as clips have, found 6: ",
        "short": r"expected at least 2\.12 seconds, a clip's length, found 0\.5: ",
        "one": "expected at least ",
        "missing": "cannot be read: No such file",
    }
    found = {name: process(tmp_path / f"{name}.mp4", folder) for name in reasons}
    for skipped, reason in zip(found.values(), reasons.values(), strict=True):
        assert isinstance(skipped, SkippedFilm)
        with pytest.raises(UserError, match=reason):
            raise UserError(skipped.reason)
        assert "\n" not in skipped.reason
        stored = json.loads((folder.path / "skipped" / f"{skipped.film}.json").read_text())
        assert stored == dataclasses.asdict(skipped)
    assert folder.films() == []
    assert len(folder.skipped_films()) == len(reasons)
    path = write_frames(tmp_path / "missing.mp4", moving(60, speed=3))
    assert cut(path, folder).kept == 1
    assert folder.films() == [id_of(path)]
    assert "missing.mp4" not in {failed.name for failed in folder.skipped_films()}


def test_a_folder_that_cannot_be_written_is_not_the_film_s_fault(tmp_path, folder):
    path = write_frames(tmp_path / "film.mp4", moving(60, speed=3))
    (folder.path / id_of(path)).write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        process(path, folder)
    assert folder.skipped_films() == []


@pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("no\nroom"), cv2.error("no")])
def test_what_goes_wrong_inside_is_the_film_s_fault(tmp_path, folder, error):
    path = write_frames(tmp_path / "film.mp4", moving(60, speed=3))

    def failing(frames: np.ndarray) -> np.ndarray:
        raise error

    skipped = process(path, folder, estimate=failing)
    assert isinstance(skipped, SkippedFilm)
    assert f"film.mp4: cannot be decoded ({type(error).__name__}: no" in skipped.reason
    assert "\n" not in skipped.reason
    assert folder.films() == []
    assert cut(path, folder, estimate=even_flow).kept == 1
    assert folder.skipped_films() == []


def test_a_film_that_is_repaired_is_no_longer_skipped(tmp_path, folder):
    path = write_frames(tmp_path / "film.mp4", moving(60, speed=3))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    skipped = process(path, folder)
    assert folder.skipped_films() == [skipped]
    path.write_bytes(whole)
    cut(path, folder, estimate=even_flow)
    assert folder.skipped_films() == []


def test_names_may_be_any_bytes(tmp_path, folder):
    path = tmp_path / os.fsdecode(b"M\xf6we\n1.mp4")
    path.write_bytes(b"no film" * 500)
    skipped = process(path, folder)
    assert isinstance(skipped, SkippedFilm)
    assert skipped.name == r"M\udcf6we\n1.mp4"
    assert f"{tmp_path}/{skipped.name}: expected a film, found: Invalid" in skipped.reason
    write_frames(tmp_path / "film.mp4", moving(60, speed=3)).rename(path)
    report = cut(path, folder, estimate=even_flow)
    assert report.name == skipped.name
    assert report.film.startswith("mwe-1-")
    assert folder.skipped_films() == []


def test_another_film_of_the_same_id_is_refused(tmp_path, folder):
    path = write_frames(tmp_path / "film.mp4", moving(60, speed=3))
    report = cut(path, folder, estimate=even_flow)
    file = Path(folder.path) / report.film / "film.json"
    text = file.read_text()
    assert text.count(report.content) == 1
    file.write_text(text.replace(report.content, report.content[:8] + "0" * 56))
    skipped = process(path, folder)
    assert isinstance(skipped, SkippedFilm)
    assert f"its id {report.film} is that of another film" in skipped.reason
    assert folder.films() == [report.film]


def test_damaged_places_are_counted(tmp_path, folder):
    frames = [np.roll(texture(48, 72, seed=k), k, axis=0) for k in range(80)]
    path = write_frames(tmp_path / "film.mp4", frames)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400] = bytes(400)
    path.write_bytes(data)
    report = cut(path, folder, estimate=even_flow)
    assert report.damaged + report.skipped > 0
    assert report.flow == "even_flow"
