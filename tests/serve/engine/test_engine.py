"""Turns of many players, played in batches by a player without networks."""

import io
import threading

import numpy as np
import pytest
from engine_games import new_game, play
from fake_player import HEIGHT, WIDTH
from PIL import Image
from waiting import wait_until

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media import video
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.engine.fair_queue import FairQueue


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


def test_the_queue_is_read_under_the_lock(player, store):
    """Read without it, a queue that another worker changes raises and ends the thread."""
    engine = Engine(player, store, workers=2)
    unlocked: list[str] = []

    class WatchedQueue(FairQueue):
        def __len__(self) -> int:
            if not engine._lock._is_owned():
                unlocked.append(threading.current_thread().name)
            return super().__len__()

    engine._waiting = WatchedQueue(lambda request: request.client)
    try:
        requests = [engine.submit(new_game(store), str(n)) for n in range(4)]
        assert all(request.wait(20.0) for request in requests)
        assert engine.health == "ready"
    finally:
        engine.close()
    assert unlocked == []


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


def test_a_student_warms_up_with_its_own_steps(player, store):
    player.protocol.student_timesteps = (999, 750, 500, 250)
    engine = Engine(player, store, batch_sizes=(1, 2))
    try:
        engine.warm_up(lambda size: None)
        assert [call["steps"] for call in player.calls] == [None, None]
        assert engine.compiled == 2
    finally:
        engine.close()
