"""Games as zips: packed, loaded, and refused if damaged or hostile."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from engine_games import new_game, play
from fake_player import FRAMES
from PIL import Image

from animegamer_jax.errors import UserError
from animegamer_jax.media import video
from animegamer_jax.media.pictures import Picture
from animegamer_jax.serve.games.archive import MOVIE_FILE, pack_game, unpack_game


@pytest.fixture
def packed(engine, store, tmp_path) -> Path:
    game = new_game(store, seed=4)
    for text in ("one", "two"):
        play(engine, game, text)
    path = tmp_path / "game.zip"
    pack_game(store.get(game), path)
    return path


def test_a_game_packed_and_loaded(packed, store, engine):
    with zipfile.ZipFile(packed) as archive:
        names = set(archive.namelist())
        assert names == {
            *("game.json", "storyboard.png", MOVIE_FILE),
            *(f"turn_00{n}.{kind}" for n in (1, 2) for kind in ("mp4", "npz")),
        }
        film = video.decode_mp4(archive.read(MOVIE_FILE))
    assert len(film) == 2 * FRAMES
    name = store.load(packed)
    assert [turn.instruction for turn in store.get(name).turns] == ["one", "two"]
    assert play(engine, name, "three").turn == 3


def test_a_game_without_turns_is_not_packed(store, tmp_path):
    with pytest.raises(UserError, match="no turns yet"):
        pack_game(store.get(new_game(store)), tmp_path / "game.zip")


# --- a player's own picture -----------------------------------------------------------------


@pytest.fixture
def pictured(engine, store, player) -> str:
    """A game that began with a picture, and has a turn."""
    picture = player.represent(Picture(np.full((16, 24, 3), 77, np.uint8)), "Hana stands.")
    game = store.new(seed=4, window=3, steps=2, picture=picture)
    play(engine, game, "one")
    return game


def test_a_picture_counts_as_a_turn_of_the_window(engine, store, player, pictured):
    play(engine, pictured, "two")
    play(engine, pictured, "two", after=1)
    play(engine, pictured, "three")
    assert [call["window"] for call in player.calls] == [[1], [2], [2], [2]]
    assert [call["turn"] for call in player.calls] == [[1], [2], [2], [3]]
    assert store.get(pictured).meters.stamina == 35


def test_undo_and_branches_keep_the_picture(engine, store, player, pictured):
    store.get(pictured).set_aside()
    branch = store.branch(pictured, 0)
    for game in (pictured, branch):
        assert [record.instruction for record in store.get(game).history()] == ["Hana stands."]
        play(engine, game, "again")
        assert player.calls[-1]["window"] == [1]


def test_a_picture_is_packed_and_loaded(engine, store, player, pictured, tmp_path):
    path = tmp_path / "game.zip"
    pack_game(store.get(pictured), path)
    with zipfile.ZipFile(path) as archive:
        assert {"picture.png", "picture.npz"} <= set(archive.namelist())
    loaded = store.load(path)
    assert store.get(loaded).picture == store.get(pictured).picture
    for name in ("picture.png", "picture.npz"):
        files = [(store.folder / game / name).read_bytes() for game in (pictured, loaded)]
        assert files[0] == files[1]
    play(engine, loaded, "two")
    assert player.calls[-1]["window"] == [2]


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("picture.png", None, r"picture\.png: expected a picture .*, found no such file"),
        ("picture.png", b"x", r"picture\.png: expected a picture .*, found neither"),
        ("picture.png", (20, 20), r"picture\.png: expected 360 x 240 pixels, found 20 x 20"),
        ("picture.png", (20_000, 20_000), r"picture\.png: expected .* at most 50 million pixels"),
        ("picture.npz", None, r"picture\.npz: expected a float32 array"),
    ],
)
def test_a_bad_picture_in_an_archive(store, pictured, tmp_path, name, content, message):
    path = tmp_path / "game.zip"
    pack_game(store.get(pictured), path)

    def change(members):
        members.pop(name)
        if content is not None:
            members[name] = png(*content) if isinstance(content, tuple) else content

    before = sorted(store.folder.iterdir())
    with pytest.raises(UserError, match=message) as caught:
        store.load(rewrite(path, change))
    assert str(store.folder) not in str(caught.value)
    assert sorted(store.folder.iterdir()) == before


def test_a_picture_of_another_size_of_representation(store, pictured, tmp_path):
    path = tmp_path / "game.zip"
    pack_game(store.get(pictured), path)

    def change(members):
        members.update({"picture.npz": large_array(), "turn_001.npz": large_array()})

    with pytest.raises(UserError, match=r"expected a shot representation of shape \[6, 8\]"):
        store.load(rewrite(path, change))


# --- what is refused ------------------------------------------------------------------------


def rewrite(path: Path, change) -> Path:
    """The archive with its members changed: `change` gets and gives a dict of bytes."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members = change(members) or members
    new = path.with_name("changed.zip")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return new


def with_clip(members, frames):
    members["turn_001.mp4"] = video.encode_mp4(frames)


def edit(members, **fields):
    document = json.loads(members["game.json"])
    document["turns"][0] |= {k: v for k, v in fields.items() if k in document["turns"][0]}
    document |= {k: v for k, v in fields.items() if k in document and k != "turns"}
    members["game.json"] = json.dumps(document).encode()


def large_array() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, representation=np.zeros((7, 8), np.float32))
    return buffer.getvalue()


BAD = {
    "no game": (lambda m: m.pop("game.json") and None, "a zip without game.json"),
    "a path": (lambda m: m.update({"../../evil.mp4": b"x"}), "only the files of a game"),
    "absolute": (lambda m: m.update({"/etc/evil.mp4": b"x"}), "only the files of a game"),
    "foreign": (lambda m: m.update({"run.sh": b"x"}), "only the files of a game"),
    "a path inside": (lambda m: edit(m, clip="../../x.mp4"), "clip: expected the bare name"),
    "another model": (lambda m: edit(m, model="qiqi"), "model: expected 'tiny'"),
    "another protocol": (lambda m: edit(m, protocol="released"), "protocol: expected 'paper'"),
    "corrupt": (lambda m: m.update({"game.json": b"{"}), "not valid JSON"),
    "a meter": (lambda m: edit(m, stamina=4), "meters"),
    "no clip": (lambda m: m.pop("turn_001.mp4") and None, "turn_001.mp4: expected a video"),
    "no video": (lambda m: m.update({"turn_001.mp4": b"MZ"}), "turn_001.mp4: expected a video"),
    "a large clip": (
        lambda m: with_clip(m, np.zeros((2, 480, 720, 3), np.uint8)),
        "turn_001.mp4: expected 5 frames of 360 x 240, found 2 of 720 x 480",
    ),
    "a long clip": (
        lambda m: with_clip(m, np.zeros((30, 240, 360, 3), np.uint8)),
        "turn_001.mp4: expected 5 frames",
    ),
    "another size": (
        lambda m: m.update({"turn_001.npz": large_array(), "turn_002.npz": large_array()}),
        r"expected a shot representation of shape \[6, 8\], found \[7, 8\]",
    ),
    "a bomb": (
        lambda m: m.update({"turn_001.npz": bytes(65 << 20)}),
        "turn_001.npz: expected at most 64 MB",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_game_is_not_loaded(packed, store, name):
    change, message = BAD[name]
    before = sorted(store.folder.iterdir())
    with pytest.raises(UserError, match=message) as caught:
        store.load(rewrite(packed, change))
    assert str(store.folder) not in str(caught.value)
    assert sorted(store.folder.iterdir()) == before
    assert not list(store.folder.parent.rglob("evil*"))


def test_an_archive_that_is_wrong_about_a_size(packed, store):
    """A member with more bytes than its entry declares is not unpacked further."""
    data = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as archive:
        entry = archive.getinfo("turn_001.npz")
    reported = entry.file_size.to_bytes(4, "little")
    at = data.rindex(b"turn_001.npz") - 46 + 24  # of the central directory
    assert data[at : at + 4] == reported
    data[at : at + 4] = (7).to_bytes(4, "little")
    packed.write_bytes(data)
    with pytest.raises(UserError, match=r"damaged zip|more bytes|turn_001\.npz"):
        store.load(packed)


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip at all", b"\x00" * 1000])
def test_what_is_no_zip(store, tmp_path, content):
    path = tmp_path / "any.zip"
    path.write_bytes(content)
    with pytest.raises(UserError, match="found a damaged zip"):
        store.load(path)
    assert list(store.folder.iterdir()) == []


def test_an_archive_cut_short(packed, store):
    packed.write_bytes(packed.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"damaged zip|only the files of a game"):
        store.load(packed)


def test_two_files_of_one_name(packed, store, tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("turn_001.npz", b"other")
    with pytest.raises(UserError, match="two files of one name"):
        unpack_game(packed, tmp_path / "game", check=lambda game: None)
