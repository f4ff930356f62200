"""Damaged files of a saved game: an error of one line names the file and what is wrong in it."""

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from saved_games import edit

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import Game

DAMAGE = {
    "no model": (lambda d, t: d.pop("model"), r"game\.json: model: missing"),
    "empty model": (lambda d, t: d.update(model=" "), r'model: expected a text, found " "'),
    "text seed": (lambda d, t: d.update(seed="1"), r'seed: expected a valid integer, found "1"'),
    "true seed": (lambda d, t: d.update(seed=True), r"seed: expected a valid integer, found true"),
    "window 0": (lambda d, t: d.update(window=0), r"window: expected .* equal to 1, found 0"),
    "steps": (lambda d, t: d.update(steps=1.5), r"steps: expected .*found 1\.5"),
    "version": (lambda d, t: d.update(format_version=2), r"format_version: expected 1, .*found 2"),
    "turns": (lambda d, t: d.update(turns={}), r"turns: expected a valid array, found {}"),
    "turn": (lambda d, t: t.__setitem__(1, 7), r"turns\[1\]: expected an object, found 7"),
    "order": (lambda d, t: t.reverse(), r"turns\[0\]\.turn: expected 1, .*found 4"),
    "gap": (lambda d, t: t.pop(1), r"turns\[1\]\.turn: expected 2, .*found 3"),
    "level": (
        lambda d, t: t[0].update(motion_level=0),
        r"turns\[0\]\.motion_level: expected a number .* equal to 1, found 0",
    ),
    "value": (lambda d, t: t[2].update(motion_value=None), r"turns\[2\]\.motion_value: expected"),
    "nan": (lambda d, t: t[2].update(motion_value=float("nan")), r"motion_value: .*found NaN"),
    "change": (lambda d, t: t[3].update(social="+1"), r"turns\[3\]\.social: expected"),
    "meter": (
        lambda d, t: t[1]["meters"].update(stamina=41),
        r"turns\[1\]\.meters\.stamina: expected 40 .*found 41",
    ),
    "turn's seed": (lambda d, t: t[1].update(seed=-1), r"turns\[1\]\.seed: expected .* to 0"),
    "huge seed": (lambda d, t: d.update(seed=10**30), r"seed: expected .* to 9223372036854775807"),
    "wide window": (lambda d, t: d.update(window=10**9), r"window: expected .* to 1000"),
    "many steps": (lambda d, t: t[0].update(steps=1001), r"turns\[0\]\.steps: expected .* to 1000"),
    "unknown": (lambda d, t: t[1].update(mood=1), r"turns\[1\]\.mood: unknown field"),
    "flag": (lambda d, t: t[1].update(chosen_level=1), r"\.chosen_level: expected a valid boolean"),
    "meters": (lambda d, t: t[1].update(meters=[]), r"turns\[1\]\.meters: expected an object"),
    "seconds": (
        lambda d, t: t[1]["seconds"].pop("total"),
        r"turns\[1\]\.seconds: expected the field total",
    ),
    "path": (lambda d, t: t[0].update(clip="../turn_001.mp4"), r"\.clip: expected the bare name"),
    "root": (lambda d, t: t[0].update(clip="/etc/turn.mp4"), r"\.clip: expected the bare name"),
    "windows": (lambda d, t: t[0].update(clip="..\\a.mp4"), r"\.clip: expected the bare name"),
    "kind": (lambda d, t: t[0].update(clip="turn_001.npz"), r"\.clip: expected the bare name"),
    "twice": (
        lambda d, t: t[1].update(clip="turn_001.mp4"),
        r"turns\[1\]\.clip: .* no other turn has",
    ),
    "other": (lambda d, t: t[1].update(clip="b.mp4"), r"b\.mp4: expected a video, found no such"),
}


PICTURE_DAMAGE = {
    "level": (lambda d: d["picture"].update(motion_level=0), r"picture\.motion_level: expected"),
    "text": (
        lambda d: d["picture"].update(instruction=" "),
        r"picture\.instruction: expected a te",
    ),
    "missing": (lambda d: d["picture"].pop("stamina"), r"game\.json: picture\.stamina: missing"),
    "kind": (lambda d: d.update(picture="x.png"), r"game\.json: picture: expected an object"),
}


@pytest.mark.parametrize("name", PICTURE_DAMAGE)
def test_a_wrong_field_of_a_picture_is_named(pictured, name):
    change, message = PICTURE_DAMAGE[name]
    edit(pictured, lambda document, turns: change(document))
    with pytest.raises(UserError, match=message) as error:
        Game.load(pictured)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("picture.png", None, r"picture\.png: expected a picture .*, found no such file"),
        ("picture.png", b"", r"picture\.png: expected a picture .*, found neither"),
        ("picture.npz", None, r"picture\.npz: expected a float32 array .* found no such file"),
        ("picture.npz", b"PK", r"picture\.npz: expected a float32 array"),
    ],
)
def test_damaged_files_of_a_picture_are_named(pictured, name, content, message):
    (pictured / name).unlink()
    if content is not None:
        (pictured / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        Game.load(pictured)


def test_a_picture_of_another_model_is_refused(pictured):
    np.savez(pictured / "picture.npz", representation=np.zeros((7, 8), np.float32))
    with pytest.raises(UserError, match=r"turn_001\.npz: expected .*\[7, 8\], found .*\[6, 8\]"):
        Game.load(pictured)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_field_is_named(saved, name):
    change, message = DAMAGE[name]
    edit(saved, change)
    with pytest.raises(UserError, match=message) as error:
        Game.load(saved)
    assert "\n" not in str(error.value)
    assert str(saved) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"game\.json: not valid JSON: .* line 1 column 1"),
        (b'{"model": "tiny",', r"game\.json: not valid JSON: .*: restore the file"),
        (b"[]", r"game\.json: expected an object, found \[\]"),
        (b'{"model": "\xff"}', r"not valid JSON: byte 0xff at offset 11 is not UTF-8"),
        (b"[" * 100_000, r"game\.json: not valid JSON: it is nested too deeply"),
    ],
)
def test_a_corrupt_file_is_named(saved, content, message):
    (saved / "game.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        Game.load(saved)


def test_missing_and_damaged_parts_are_named(saved, tmp_path):
    def broken(name: str, content: bytes | None) -> Path:
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        return folder

    whole = (saved / "turn_002.npz").read_bytes()
    cases = [
        ("game.json", None, r"game\.json: no saved game: No such file or directory: restore"),
        ("turn_002.mp4", None, r"turn_002\.mp4: expected a video, found no such file"),
        ("turn_002.mp4", b"", r"turn_002\.mp4: expected a video, found"),
        ("turn_002.npz", None, r"turn_002\.npz: expected a float32 array .* found no such file"),
        ("turn_002.npz", b"", r"turn_002\.npz: expected a float32 array"),
        ("turn_002.npz", whole[: len(whole) // 2], r"turn_002\.npz: expected a float32 array"),
        ("turn_002.npz", whole[:60] + b"\0" * 40 + whole[100:], r"turn_002\.npz: expected"),
    ]
    for name, content, message in cases:
        with pytest.raises(UserError, match=message):
            Game.load(broken(name, content))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros((6, 8), np.float32)}, "representation"),
        ({"representation": np.zeros((6, 8))}, r"found float64 of shape \[6, 8\]"),
        ({"representation": np.zeros((6, 9), np.float32)}, r"shape \[6, 8\], found .*\[6, 9\]"),
        ({"representation": np.full((6, 8), np.nan, np.float32)}, "finite"),
        ({"representation": np.array([[object()]])}, "turn_003"),
    ],
)
def test_a_foreign_representation_is_refused(saved, arrays, message):
    np.savez(saved / "turn_003.npz", **arrays)
    with pytest.raises(UserError, match=message):
        Game.load(saved)


@pytest.mark.parametrize("name", ["turn_001.npz", "turn_003.npz"])
def test_a_giant_representation_is_refused_by_its_header(saved, name):
    """Nothing of it is unpacked: there is nothing but the header, and zeros cost no space."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"shape": (1 << 20, 1 << 12), "fortran_order": False, "descr": "<f4"}
    )
    with zipfile.ZipFile(saved / name, "w") as archive:
        archive.writestr("representation.npy", header.getvalue())
    with pytest.raises(UserError, match=rf"{name}: expected .* shape \[1048576, 4096\]"):
        Game.load(saved)
