"""The shots folder is read as it was written, and nothing that is half counts."""

import dataclasses
import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from cut_films import id_of
from etils import epath

from animegamer_jax.data.films.clips.store import (
    ClipRow,
    FilmReport,
    FilmSettings,
    FilmWriter,
    ShotsFolder,
    SkippedFilm,
    open_shots,
    path_id,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media.video import decode_mp4, encode_mp4

SETTINGS = FilmSettings(height=16, width=24, num_frames=3)
FILM = "a-film-0123abcd"
CLIP = encode_mp4(np.random.default_rng(0).integers(0, 255, (3, 16, 24, 3), np.uint8))
ROW = ClipRow(
    clip=0,
    scene=0,
    start=0.25,
    end=2.375,
    dropped=None,
    motion_value=3.5,
    flow=(3.0, 4.0),
    digest="",
)
REPORT = FilmReport(
    film=FILM,
    name="A film.mp4",
    seconds=10.0,
    missing=0.0,
    fps=24.0,
    height=720,
    width=1280,
    bars=(0, 0, 0, 0),
    cuts=(4.5,),
    scenes=2,
    short_scenes=1,
    kept=1,
    dropped={"still": 1},
)


@pytest.fixture
def folder(tmp_path: Path) -> ShotsFolder:
    return open_shots(tmp_path / "shots", SETTINGS)


def write(folder: ShotsFolder, film: str = FILM) -> None:
    with folder.writing(film) as writer:
        writer.add(ROW, CLIP)
        writer.add(dataclasses.replace(ROW, clip=1, dropped="still", digest=""), b"a picture")
        writer.report = dataclasses.replace(REPORT, film=film)


def names(folder: ShotsFolder) -> list[str]:
    root = Path(folder.path)
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_a_film_is_read_as_it_was_written(folder):
    write(folder)
    again = open_shots(folder.path)
    assert again == folder
    assert again.settings == SETTINGS
    assert again.films() == [FILM]
    assert again.report(FILM) == REPORT
    kept, dropped = again.rows(FILM)
    assert kept == dataclasses.replace(ROW, digest=hashlib.sha256(CLIP).hexdigest())
    assert dropped == dataclasses.replace(ROW, clip=1, dropped="still")
    assert again.read_clip(FILM, 0) == CLIP
    assert again.read_picture(FILM, 1) == b"a picture"
    with again.clips(FILM) as clips:
        assert np.array_equal(clips.frames(0), decode_mp4(CLIP))
    assert np.array_equal(decode_mp4(again.read_clip(FILM, 0)), decode_mp4(CLIP))
    assert names(folder) == [f"{FILM}/{n}" for n in ("clips.jsonl", "clips.zip", "film.json")] + [
        "shots.json"
    ]


def test_the_same_clips_give_the_same_files(folder, tmp_path):
    other = open_shots(tmp_path / "other", SETTINGS)
    write(folder)
    write(other)
    for name in names(folder):
        assert (folder.path / name).read_bytes() == (other.path / name).read_bytes()


def interrupt(writer: FilmWriter) -> None:
    writer.add(ROW, CLIP)
    raise KeyboardInterrupt


def test_a_film_counts_only_when_it_is_finished(folder):
    with pytest.raises(KeyboardInterrupt), folder.writing(FILM) as writer:
        interrupt(writer)
    assert names(folder) == ["shots.json"]
    with pytest.raises(ValueError, match="without a report"), folder.writing(FILM) as writer:
        writer.add(ROW, CLIP)
    assert names(folder) == ["shots.json"]
    assert not folder.is_finished(FILM)
    for read in (folder.report, folder.rows, lambda film: folder.read_clip(film, 0)):
        with pytest.raises(UserError, match=f"{FILM}: not a finished film: run"):
            read(FILM)
    write(folder)
    assert folder.films() == [FILM]


def test_a_folder_is_tidied_of_old_halves_only(folder):
    write(folder)
    before = names(folder)
    parts = [folder.path / n for n in ("shots.json.part-a", f"{FILM}/clips.zip.part-b", "x.part-c")]
    for part in parts:
        part.write_text("half")
    for part in parts[:2]:
        os.utime(part, (0, 0))
    folder.tidy()
    assert names(folder) == sorted([*before, "x.part-c"])


def test_two_processes_may_write_the_same_film(folder):
    with folder.writing(FILM) as slow:
        slow.add(ROW, CLIP)
        write(folder)
        slow.add(dataclasses.replace(ROW, clip=1, dropped="still"), b"a picture")
        slow.report = REPORT
    assert folder.read_picture(FILM, 1) == b"a picture"
    assert len(folder.rows(FILM)) == 2


def test_clips_are_given_in_order(folder):
    with pytest.raises(ValueError, match="clip 1: expected number 0"), folder.writing(FILM) as w:
        w.add(dataclasses.replace(ROW, clip=1), CLIP)


def test_films_are_in_order_and_strangers_are_passed_over(folder):
    for film in ("b-00000000", "a-ffffffff", "a-00000000"):
        write(folder, film)
    (folder.path / "cache").mkdir()
    (folder.path / "unfinished-00000000").mkdir()
    assert folder.films() == ["a-00000000", "a-ffffffff", "b-00000000"]


def test_ids_are_safe_and_of_the_content(tmp_path):
    def made(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return id_of(path)

    one = made("Möwe -- [01] (1080p).mkv", b"one")
    assert one.startswith("mowe-01-1080p-")
    assert made("other/Möwe -- [01] (1080p).mkv", b"one") == one
    assert made("Möwe -- [01] (1080p).mkv", b"two") != one
    assert made("猫.mp4", b"").startswith("film-")
    assert made("...mp4", b"").startswith("film-")
    assert len(made("x" * 200 + ".mp4", b"x")) == 49
    big = bytearray(20 * 2**20)
    before = made("big.mp4", bytes(big))
    for place in (0, len(big) - 1, 2 * 2**18):  # samples leave gaps, but not at the ends
        big[place] ^= 1
    assert made("big.mp4", bytes(big)) != before
    assert made("big.mp4", bytes(big[:-1])) != before
    with pytest.raises(UserError, match=r"nothing\.mp4: cannot be read: No such file"):
        id_of(tmp_path / "nothing.mp4")
    paths = "/a/x.mp4", "/b/x.mp4", "/a/x\udcf6.mp4"
    assert len({path_id(epath.Path(path)) for path in paths}) == 3


@pytest.mark.parametrize("film", ["../../x-01234567", "x", "", "/x-01234567", "X-01234567"])
def test_no_other_ids_are_taken(folder, film):
    for use in (folder.report, lambda f: write(folder, f)):
        with pytest.raises(UserError, match="expected a film's id"):
            use(film)
    with pytest.raises(UserError, match="expected a film's id"):
        folder.skip(SkippedFilm(film=film, name="x", reason="y"))


def test_other_settings_and_other_folders_are_refused(folder, tmp_path):
    other = dataclasses.replace(SETTINGS, fps=4, min_content=9.0)
    with pytest.raises(
        UserError,
        match=r"other settings \(fps: there 8, asked for 4, min_content: there 15.0, asked for 9",
    ):
        open_shots(folder.path, other)
    with pytest.raises(UserError, match=r"nothing: no shots folder: expected shots\.json"):
        open_shots(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("mine")
    with pytest.raises(UserError, match=r"no shots folder.*: choose a new or an empty folder"):
        open_shots(tmp_path / "other", SETTINGS)
    text = (folder.path / "shots.json").read_text()
    (folder.path / "shots.json").write_text(text.replace('"layout": 1', '"layout": 2'))
    with pytest.raises(UserError, match="layout: expected 1, found 2"):
        open_shots(folder.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 47}, "height 47: expected an even number from 16"),
        ({"width": 8}, "width 8: expected an even number"),
        ({"num_frames": 1}, "num_frames 1: expected 2 or more"),
        ({"fps": 0}, "fps 0: expected 1 or more"),
        ({"min_content": -1.0}, "min_content -1.0: expected 0 or more"),
        ({"min_content": float("nan")}, "min_content nan: expected 0 or more"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(UserError, match=message):
        FilmSettings(**changes)


def damage(folder: ShotsFolder, name: str, old: bytes, new: bytes) -> None:
    path = folder.path / FILM / name
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("film.json", b'"kept": 1', b'"kept": "1"', r"film\.json: kept: expected a valid integer"),
        ("film.json", b'"kept": 1', b'"kept": 2', "expected 2 kept of 3 clips, .* found 1 of 2"),
        ("film.json", b"}", b"", r"film\.json: not valid JSON"),
        ("film.json", FILM.encode(), b"b-00000000", f"expected '{FILM}', found 'b-00000000'"),
        ("clips.jsonl", b'"clip": 0', b'"clip": 7', "numbered from 0 in order"),
        ("clips.jsonl", b"}\n{", b"\n{", r"clips\.jsonl, line 1: not valid JSON"),
        ("clips.jsonl", b'"still"', b'"dull"', r"line 2: dropped: expected 'black', 'still'"),
        ("clips.jsonl", b'"flow"', b'"flaw"', r"line 1: flow: missing"),
    ],
)
def test_damaged_files_are_reported_in_a_line(folder, name, old, new, message):
    write(folder)
    damage(folder, name, old, new)
    with pytest.raises(UserError, match=message) as error:
        folder.rows(FILM)
    assert "\n" not in str(error.value)


def test_a_cut_off_file_of_rows_is_refused(folder):
    write(folder)
    path = folder.path / FILM / "clips.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="expected a line break at the end"):
        folder.rows(FILM)


def test_damaged_archives_are_reported_in_a_line(folder):
    write(folder)
    with pytest.raises(UserError, match=r"clips\.zip: expected the kept clip 00001\.mp4, found"):
        folder.read_clip(FILM, 1)
    with pytest.raises(UserError, match=r"picture of a dropped clip dropped/00000\.jpg, found"):
        folder.read_picture(FILM, 0)
    damage(folder, "clips.zip", b"a picture", b"a pigture")
    with pytest.raises(UserError, match=r"clips\.zip: dropped/00001\.jpg is damaged"):
        folder.read_picture(FILM, 1)
    path = folder.path / FILM / "clips.zip"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"clips\.zip: no zip archive"):
        folder.read_clip(FILM, 0)
    path.unlink()
    with pytest.raises(UserError, match=r"clips\.zip: cannot be read: No such file"):
        folder.read_clip(FILM, 0)
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"clips\.zip: expected a film's clips, found a pipe"):
        folder.read_clip(FILM, 0)


def test_skipped_films_are_listed_until_they_are_not(folder):
    assert folder.skipped_films() == []
    skipped = SkippedFilm(film=FILM, name="../A film.mp4", reason="it is no film")
    folder.skip(skipped)
    folder.skip(dataclasses.replace(skipped, film="z-00000000", name="z.mp4"))
    assert folder.skipped_films()[0] == skipped
    content = json.loads((folder.path / "skipped" / f"{FILM}.json").read_text())
    assert content == {"film": FILM, "name": "../A film.mp4", "reason": "it is no film"}
    assert folder.films() == []
    folder.unskip(FILM)
    folder.unskip(FILM)
    assert [failed.film for failed in folder.skipped_films()] == ["z-00000000"]


def test_a_folder_goes_to_other_processes(folder):
    write(folder)
    copy = pickle.loads(pickle.dumps(folder))
    assert copy.rows(FILM) == folder.rows(FILM)
    assert isinstance(copy.path, epath.Path)


def test_a_disk_that_refuses_is_reported_in_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"shots\.json: cannot be written: Not a dir"):
        open_shots(tmp_path / "file" / "shots", SETTINGS)
    folder = open_shots(tmp_path / "shots", SETTINGS)
    (folder.path / FILM).write_text("no folder")
    with pytest.raises(UserError, match=f"{FILM}: cannot be written: Not a dir"):
        write(folder)
