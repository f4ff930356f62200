"""Many clients at once on one game, or on the last places of a server."""

import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_games import engine_of, new_game, seconds_of_a_turn
from fake_player import MODEL

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved import tree
from animegamer_jax.serve.games.archive import pack_game
from animegamer_jax.serve.games.game_store import GameStore


@pytest.fixture
def played(player, store) -> str:
    """A game of three turns."""
    with engine_of(player, store) as engine:
        game = new_game(store)
        for _ in range(3):
            seconds_of_a_turn(engine, game, "")
    return game


def test_downloads_at_once(store, played, tmp_path):
    def download(number: int) -> list[str]:
        path = tmp_path / f"{number}.zip"
        with store.copy(played) as copy:
            pack_game(copy, path)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            return sorted(archive.namelist())

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(download, range(12)))
    assert found == [found[0]] * 12
    assert {"game.json", "game.mp4", "turn_003.mp4"} <= set(found[0])
    assert not list(store.folder.glob(".copy-*"))
    assert not list((store.folder / played).glob("*.zip*"))


def test_undo_during_downloads(store, played, tmp_path, monkeypatch):
    """Each download is the game before or after an undo, whole, though its files are deleted."""
    monkeypatch.setattr(tree, "MAX_OTHERS", 0)
    count = 8
    together = threading.Barrier(count + 1)

    def download(number: int) -> int:
        path = tmp_path / f"{number}.zip"
        together.wait()
        with store.copy(played) as copy:
            pack_game(copy, path)
        with zipfile.ZipFile(path) as archive:
            turns = json.loads(archive.read("game.json"))["turns"]
            assert {turn["clip"] for turn in turns} <= set(archive.namelist())
            return len(turns)

    def undo() -> None:
        together.wait()
        for _ in range(2):
            with store.use(played) as game:
                game.set_aside()

    with ThreadPoolExecutor(count + 1) as pool:
        found = [pool.submit(download, number) for number in range(count)]
        pool.submit(undo).result()
        assert {future.result() for future in found} <= {1, 2, 3}
    assert len(store.get(played).turns) == 1


def test_no_more_games_than_places(store, played, tmp_path):
    path = tmp_path / "game.zip"
    with store.copy(played) as copy:
        pack_game(copy, path)
    small, refused = GameStore(tmp_path / "small", model=MODEL, max_games=4), []

    def add(number: int) -> str | None:
        try:
            return small.load(path) if number % 2 else new_game(small)
        except UserError as error:
            refused.append(str(error))
            return None

    with ThreadPoolExecutor(12) as pool:
        found = [name for name in pool.map(add, range(24)) if name]
    assert len(found) == len(small) == 4
    assert len(refused) == 20
    assert all("4 games are in play, the most that this server" in text for text in refused)
    (small.folder / "broken.zip").write_bytes(b"no zip")
    (tmp_path / "other").mkdir()
    other = GameStore(tmp_path / "other", model=MODEL, max_games=1)
    for _ in range(3):  # what failed takes no place
        with pytest.raises(UserError, match="damaged zip"):
            other.load(small.folder / "broken.zip")
    assert len(other) == 0


def test_a_game_is_read_once_by_many(store, played):
    again = GameStore(store.folder, model=MODEL)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: again.get(played), range(32)))
    assert {id(game) for game in found} == {id(found[0])}
