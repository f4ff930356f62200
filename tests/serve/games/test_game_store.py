"""Games of a server: their ids, their places, and what outlives the server."""

import re
import time

import pytest
from engine_games import new_game, play
from fake_player import MODEL

from animegamer_jax.errors import UserError
from animegamer_jax.serve.games.game_store import GameStore


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


def test_a_branch_goes_its_own_way(engine, store):
    game = new_game(store)
    for text in ("one", "two", "three"):
        play(engine, game, text)
    branch = store.branch(game, 1)
    play(engine, branch, "other")
    assert [turn.instruction for turn in store.get(branch).turns] == ["one", "other"]
    assert len(store.get(game).turns) == 3


def test_a_client_gives_up_its_own_games(tmp_path):
    store = GameStore(tmp_path / "games", model=MODEL, max_games=3, client_games=2)
    first, second = (new_game(store, client="a") for _ in range(2))
    other = new_game(store, client="b")
    third = new_game(store, client="a")  # in the place of the first
    assert set(store._open) == {second, other, third}
    assert store.get(first, client="a").turns == []  # in the place of the second
    assert set(store._open) == {first, other, third}
    for game in (first, third):
        store.pin(game)
    with pytest.raises(UserError, match="2 of your games are in play"):
        new_game(store, client="a")
    store.unpin(first)
    assert new_game(store, client="c")  # who has none takes a place of who has most
    assert set(store._open) >= {other, third}
    with pytest.raises(UserError, match="3 games are in play"):
        new_game(store, client="d")
