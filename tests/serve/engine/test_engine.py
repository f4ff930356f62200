"""Games of a server: kept by id, played in batches, packed and unpacked; no browser, no JAX."""

import io
import json
import re
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fake_player import FRAMES, HEIGHT, MODEL, WIDTH, FakePlayer
from PIL import Image
from waiting import wait_until

from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import compose_instruction
from animegamer_jax.game.saved import tree
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media import video
from animegamer_jax.media.pictures import Picture
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.games.archive import MOVIE_FILE, pack_game, unpack_game
from animegamer_jax.serve.games.game_store import GameStore
from animegamer_jax.serve.games.pictures import thumbnail


@pytest.fixture
def store(tmp_path) -> GameStore:
    return GameStore(tmp_path / "games", model=MODEL, max_games=12)


@pytest.fixture
def player() -> FakePlayer:
    return FakePlayer()


@pytest.fixture
def engine(player, store):
    found = Engine(player, store)
    yield found
    player.hold.set()
    found.close()


def new_game(store: GameStore, seed: int = 0) -> str:
    return store.new(seed=seed, window=3, steps=2)


def play(engine: Engine, game: str, text: str = "wave", **asked):
    request = engine.submit(game, text, **asked)
    assert request.wait(20.0)
    assert request.status == "done", request.error
    return request.turn


# --- the store ------------------------------------------------------------------------------


def test_ids_cannot_be_guessed_and_name_no_path(store):
    names = {new_game(store) for _ in range(5)}
    assert all(re.fullmatch("[0-9a-f]{24}", name) for name in names)
    (store.folder.parent / "secret").mkdir()
    (store.folder.parent / "secret" / "game.json").write_text("{}")
    for name in ("../secret", "", "0" * 24, "..", f"{next(iter(names))}/..", "a" * 10_000):
        with pytest.raises(UserError, match=r"no game .* here"):
            store.get(name)


def test_a_full_server_says_so_until_a_game_rests(tmp_path):
    store = GameStore(tmp_path / "games", model=MODEL, max_games=2, idle_seconds=0.2)
    first, second = new_game(store), new_game(store)
    with pytest.raises(UserError, match="2 games are in play, the most that this server allows"):
        new_game(store)
    assert len(list(store.folder.iterdir())) == 2
    time.sleep(0.25)
    store.get(second)
    third = new_game(store)  # in the place of the first
    assert len(store._open) == 2
    with pytest.raises(UserError, match="2 games are in play"):
        store.get(first)
    time.sleep(0.25)
    assert store.get(first).turns == []
    assert store.get(first) is store.get(first)
    assert third != first


def test_games_outlive_the_server(engine, store):
    game = new_game(store, seed=3)
    play(engine, game, "one")
    again = GameStore(store.folder, model=MODEL)
    assert [turn.instruction for turn in again.get(game).turns] == ["one"]
    other = GameStore(store.folder, model=MODEL._replace(name="large"))
    with pytest.raises(UserError, match="model: expected 'large', as on this server, found 'tiny'"):
        other.get(game)


def test_a_file_for_a_folder(tmp_path):
    (tmp_path / "games").write_text("")
    with pytest.raises(UserError, match="cannot hold the games: File exists: give another folder"):
        GameStore(tmp_path / "games", model=MODEL)


# --- the engine -----------------------------------------------------------------------------


def test_turns_that_wait_together_are_one_batch_filled_up(engine, store, player):
    player.hold.clear()
    first = engine.submit(new_game(store, 1), "first")
    wait_until(lambda: first.status == "playing")
    games = [new_game(store, seed) for seed in (5, 6, 7)]
    requests = [engine.submit(game, f"of {n}") for n, game in enumerate(games)]
    assert [engine.queue_position(request) for request in requests] == [0, 1, 2]
    assert engine.queue_position(first) == 0
    player.hold.set()
    for request in requests:
        assert request.wait(20.0)
    assert player.batches == [["first"], ["of 0", "of 1", "of 2", "of 0"]]
    for game, seed in zip(games, (5, 6, 7), strict=True):
        (turn,) = store.get(game).turns
        frames = video.read_mp4(store.folder / game / turn.clip)
        np.testing.assert_allclose(frames.mean(), seed, atol=2)


def test_no_batch_is_larger_than_the_largest(engine, store, player):
    player.hold.clear()
    first = engine.submit(new_game(store), "first")
    wait_until(lambda: first.status == "playing")
    requests = [engine.submit(new_game(store), str(n)) for n in range(10)]
    player.hold.set()
    assert all(request.wait(20.0) for request in requests)
    assert [len(batch) for batch in player.batches] == [1, 8, 2]


def test_workers_share_those_who_wait_and_play_side_by_side(player, store):
    engine = Engine(player, store, batch_sizes=(1, 2, 4), workers=2)
    player.hold.clear()
    requests = [engine.submit(new_game(store, seed), str(seed)) for seed in range(6)]
    wait_until(lambda: all(request.stage == "decoder" for request in requests))
    assert sorted(map(sorted, player.batches)) == [["0", "0", "1", "2"], ["3", "3", "4", "5"]]
    late = engine.submit(new_game(store, 6), "6")
    assert engine.queue_position(late) == 0
    assert engine.stop(requests[4].game)
    player.hold.set()
    assert all(request.wait(20.0) for request in (*requests, late))
    engine.close()
    assert [t.status for t in requests] == ["done"] * 4 + ["stopped", "done"]
    assert [t.turn.seed for t in (*requests, late) if t.turn] == [0, 1, 2, 3, 5, 6]


def test_other_steps_are_another_batch_and_nobody_is_overtaken(engine, store, player):
    player.hold.clear()
    first = engine.submit(new_game(store), "first")
    wait_until(lambda: first.status == "playing")
    requests = [
        engine.submit(new_game(store), text, steps=steps)
        for text, steps in (("a", 3), ("b", 2), ("c", 3))
    ]
    player.hold.set()
    assert all(request.wait(20.0) for request in requests)
    assert [(call["steps"], len(call["turn"])) for call in player.calls] == [(2, 1), (3, 2), (2, 1)]


def test_turns_of_a_game_follow_one_another(engine, store, player):
    game = new_game(store)
    for text in ("one", "two", "three", "four"):
        play(engine, game, text)
    assert [call["turn"] for call in player.calls] == [[1], [2], [3], [4]]
    assert engine.request_of(game) is None
    assert [call["window"] for call in player.calls] == [[0], [1], [2], [2]]
    play(engine, game, "five", window=5)
    assert player.calls[-1]["window"] == [4]
    assert store.get(game).turns[-1].window == 5


def test_a_turn_tried_again_sees_what_was_before_it(engine, store, player):
    game = new_game(store, seed=1)
    for text in ("one", "two"):
        play(engine, game, text)
    turn = play(engine, game, "two", after=1, seed=9, level=5)
    assert (turn.turn, turn.seed, turn.motion_level, turn.chosen_level) == (2, 9, 5, True)
    assert (player.calls[-1]["turn"], player.calls[-1]["window"]) == ([2], [1])
    assert player.calls[-1]["seeds"] == [9]
    assert len(store.get(game).turns) == 2


def test_a_stopped_turn_leaves_the_game_as_it_was(engine, store, player):
    game, other = new_game(store), new_game(store)
    play(engine, game, "one")
    player.hold.clear()
    playing = engine.submit(game, "two")
    wait_until(lambda: playing.status == "playing" and playing.stage == "decoder")
    waiting = engine.submit(other, "three")
    assert engine.stop(other)
    assert waiting.status == "stopped"
    assert engine.stop(game)
    assert playing.wait(20.0)
    assert playing.status == "stopped"
    assert len(store.get(game).turns) == 1
    assert not engine.stop(game)
    player.hold.set()
    play(engine, game, "two")


def test_one_of_a_batch_is_stopped_and_the_others_go_on(engine, store, player):
    player.hold.clear()
    first = engine.submit(new_game(store), "first")
    wait_until(lambda: first.status == "playing")
    requests = [engine.submit(new_game(store), str(n)) for n in range(2)]
    player.hold.set()
    assert first.wait(20.0)
    player.hold.clear()
    wait_until(lambda: requests[0].status == "playing")
    engine.stop(requests[0].game)
    player.hold.set()
    assert all(request.wait(20.0) for request in requests)
    assert [request.status for request in requests] == ["stopped", "done"]


def test_a_game_has_one_turn_at_a_time(engine, store, player):
    game = new_game(store)
    player.hold.clear()
    request = engine.submit(game, "one")
    with pytest.raises(UserError, match="a turn of this game is being played"):
        engine.submit(game, "two")
    player.hold.set()
    assert request.wait(20.0)


def test_one_games_failure_is_not_the_others(engine, store, player, caplog):
    player.hold.clear()
    first = engine.submit(new_game(store), "first")
    wait_until(lambda: first.status == "playing")
    texts = ("good", "bad", "fine")
    requests = [engine.submit(new_game(store), text) for text in texts]
    player.hold.set()
    assert all(request.wait(20.0) for request in requests)
    assert [request.status for request in requests] == ["done", "failed", "done"]
    assert "try another seed" in requests[1].error
    broken = engine.submit(new_game(store), "defect")
    assert broken.wait(20.0)
    assert "an internal error" in broken.error
    assert "ZeroDivisionError" in caplog.text
    play(engine, requests[0].game, "and on")


def test_a_full_disk_is_reported(engine, store, monkeypatch):
    game = new_game(store)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(video, "write_mp4", full)
        request = engine.submit(game, "one")
        assert request.wait(20.0)
    assert request.error == "the turn could not be saved: No space left on device"
    play(engine, game, "one")


def test_what_cannot_be_played(engine, store):
    game = new_game(store)
    for text, message in (
        ("", "expected an instruction, found nothing"),
        (" \n ", "expected an instruction, found nothing"),
        ("x" * 10_000, "at most 500 characters, found 10000"),
        ("a\x00b", "a control character"),
        ("a\x1b[31m", "a control character"),
        ("word " * 60, "too many tokens"),
    ):
        with pytest.raises(UserError, match=message):
            engine.submit(game, text)
    for asked, message in (
        ({"level": 7}, "motion level 7"),
        ({"seed": -1}, "seed: expected a whole number"),
        ({"steps": 0}, "steps: expected"),
        ({"window": 6}, "window: expected a whole number, 1 to 5, found 6"),
        ({"after": 1}, "after turn 1: expected 0 to 0"),
    ):
        with pytest.raises(UserError, match=message):
            engine.submit(game, "wave", **asked)
    with pytest.raises(UserError, match="no game 'nowhere' here"):
        engine.submit("nowhere", "wave")


def test_a_closing_server_ends_its_turns(player, store):
    engine = Engine(player, store)
    games = new_game(store), new_game(store)
    player.hold.clear()
    playing = engine.submit(games[0], "one")
    wait_until(lambda: playing.stage == "decoder")
    waiting = engine.submit(games[1], "two", steps=3)
    engine.close()
    assert (playing.status, waiting.status) == ("stopped", "stopped")
    assert Game.load(store.folder / games[0]).turns == []
    with pytest.raises(UserError, match="the server is shutting down"):
        engine.submit(games[0], "one")


# --- archives -------------------------------------------------------------------------------


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


def test_a_branch_goes_its_own_way(engine, store):
    game = new_game(store)
    for text in ("one", "two", "three"):
        play(engine, game, text)
    branch = store.branch(game, 1)
    play(engine, branch, "other")
    assert [turn.instruction for turn in store.get(branch).turns] == ["one", "other"]
    assert len(store.get(game).turns) == 3


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
        ("picture.png", png(20, 20), r"picture\.png: expected 360 x 240 pixels, found 20 x 20"),
        (
            "picture.png",
            png(20_000, 20_000),
            r"picture\.png: expected .* at most 50 million pixels",
        ),
        ("picture.npz", None, r"picture\.npz: expected a float32 array"),
    ],
)
def test_a_bad_picture_in_an_archive(store, pictured, tmp_path, name, content, message):
    path = tmp_path / "game.zip"
    pack_game(store.get(pictured), path)

    def change(members):
        members.pop(name)
        if content is not None:
            members[name] = content

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


# --- words and pieces -----------------------------------------------------------------------


def test_instructions_from_fields():
    parts = {"character": "Mika", "adverb": "gently", "motion": "waving", "time": "day"}
    assert compose_instruction(**parts, place="town") == (
        "Character: Mika; Motion: gently waving; Background: day town."
    )
    none = dict.fromkeys(("character", "adverb", "motion", "time", "place"), "")
    assert compose_instruction(**(none | {"motion": " wave "})) == "Motion: wave."
    assert compose_instruction(**(none | {"place": "beach"})) == "Background: beach."
    assert compose_instruction(**none) == ""


def test_small_pictures(engine, store, monkeypatch):
    """A name that is taken again, because its turn was dropped, has another picture."""
    monkeypatch.setattr(tree, "MAX_OTHERS", 0)
    game = new_game(store, seed=150)
    turn = play(engine, game)
    path = thumbnail(store.get(game), turn)
    assert path.stat().st_size < 5000
    before = path.read_bytes()
    store.get(game).set_aside()
    again = play(engine, game, seed=20)
    assert again.clip == turn.clip
    assert thumbnail(store.get(game), again).read_bytes() != before


def test_changes_of_a_turn_are_reported(engine, store, player):
    seen: list[tuple[str, str, int]] = []
    engine.on_change = lambda request: seen.append((request.status, request.stage, request.step))
    player.hold.clear()
    first = engine.submit(new_game(store), "first")
    wait_until(lambda: first.stage == "decoder")
    second = engine.submit(new_game(store), "second")
    player.hold.set()
    assert first.wait(20.0)
    assert second.wait(20.0)
    wait_until(lambda: seen.count(("done", "decoder", 1)) == 2)
    assert seen[0] == ("waiting", "", 0)
    assert ("playing", "mllm", 1) in seen


def test_each_player_of_a_batch_gets_a_first_picture_of_their_own(player, store):
    engine = Engine(player, store)
    try:
        player.hold.clear()
        busy = engine.submit(new_game(store), "busy")
        wait_until(lambda: busy.stage == "decoder")
        requests = [engine.submit(new_game(store, seed=20 * seed), "stay") for seed in range(8)]
        player.hold.set()
        wait_until(lambda: all(request.first_picture for request in requests))
        assert not any(request.ended for request in requests)
        player.hold.set()
        assert all(request.wait(20.0) for request in requests)
    finally:
        engine.close()
    assert player.batches[-1] == ["stay"] * 8
    for seed, request in enumerate(requests):
        assert (request.first_picture.step, request.first_picture.steps) == (1, 2)
        with Image.open(io.BytesIO(request.first_picture.jpeg)) as picture:
            assert picture.size == (WIDTH, HEIGHT)
            assert np.abs(np.asarray(picture).astype(int) - (50 + 20 * seed)).max() <= 1


def test_first_pictures_can_be_switched_off(player, store):
    engine = Engine(player, store, first_pictures=False)
    try:
        request = engine.submit(new_game(store), "wave")
        assert request.wait(20.0)
    finally:
        engine.close()
    assert (request.status, request.first_picture) == ("done", None)


def test_turns_are_played_while_larger_batches_compile(player, store):
    """The first size is enough; until then a turn waits, and health says so."""
    engine = Engine(player, store, batch_sizes=(1, 2, 4))
    sizes: list[int] = []
    reached, gone_on = threading.Event(), threading.Event()

    def on_progress(size: int) -> None:
        sizes.append(size)
        if size == 1:
            assert (engine.health, engine.compiled) == ("warming up", 0)
        if size == 2:
            reached.set()
            assert gone_on.wait(20.0)

    warming = threading.Thread(target=engine.warm_up, args=(on_progress,))
    warming.start()
    try:
        assert reached.wait(20.0)
        assert (engine.health, engine.compiled) == ("ready", 1)
        requests = [engine.submit(new_game(store), text) for text in ("a", "b")]
        assert all(request.wait(20.0) for request in requests)
        assert player.batches[-2:] == [["a"], ["b"]]
    finally:
        gone_on.set()
        warming.join()
        engine.close()
    assert (sizes, engine.compiled) == ([1, 2, 4], 4)
