"""Many clients at once: fair turns, and a server seen over HTTP. No JAX."""

import functools
import http.client
import json
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engine_games
import pytest
from crowd_server import ask, begin, fetch, result, served
from engine_games import engine_of, seconds_of_a_turn
from waiting import wait_until

from animegamer_jax.errors import UserError
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.engine.fair_queue import FairQueue

new_game = functools.partial(engine_games.new_game, steps=4)


# --- fair turns -----------------------------------------------------------------------------


def test_clients_take_turns_in_the_queue():
    queue = FairQueue[str](lambda request: request[0])
    for request in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.append(request)
    assert list(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    queue.remove("a1")
    assert list(queue) == ["b1", "c1", "a2", "c2", "a3"]
    queue.append("b2")
    assert list(queue) == ["b1", "c1", "a2", "b2", "c2", "a3"]
    assert (len(queue), queue.count("c"), queue.count("d")) == (6, 2, 0)
    with pytest.raises(ValueError, match="not in list"):
        queue.remove("a1")


def test_a_player_next_to_a_flooder_gets_a_turn_in_three_times_the_time(player, store):
    player.step_seconds = 0.1
    with engine_of(player, store, batch_sizes=(1, 2, 4), workers=2) as engine:
        mine = new_game(store)
        alone = statistics.median(seconds_of_a_turn(engine, mine, "kind") for _ in range(5))
        flood = [
            engine.submit(new_game(store, seed), "more", steps=1000, client="flood")
            for seed in range(12)
        ]
        wait_until(lambda: sum(request.status == "playing" for request in flood) == 8)
        crowded = [seconds_of_a_turn(engine, mine, "kind") for _ in range(5)]
        assert not any(request.ended for request in flood)
        assert statistics.median(crowded) < 3 * alone, (crowded, alone)


def test_a_batch_that_gave_way_goes_on(player, store):
    """Its turns are what they would have been, though another client never pauses."""
    player.step_seconds = 0.01
    with engine_of(player, store, batch_sizes=(1, 2, 4)) as engine:
        flood = [
            engine.submit(new_game(store, seed), "more", steps=60, client="flood")
            for seed in (3, 4)
        ]
        wait_until(lambda: flood[0].step > 2)
        mine, turns = new_game(store), 0
        while not flood[0].ended:
            seconds_of_a_turn(engine, mine, "kind")
            turns += 1
            assert turns < 60
        assert turns > 1
        assert all(request.wait(30.0) for request in flood)
        assert [(r.status, r.turn.seed, r.turn.steps) for r in flood] == [
            ("done", 3, 60),
            ("done", 4, 60),
        ]


def test_no_batch_gives_way_to_a_longer_turn(player, store):
    player.step_seconds = 0.01
    with engine_of(player, store) as engine:
        short = engine.submit(new_game(store), "one", steps=30, client="a")
        wait_until(lambda: short.step > 1)
        long = engine.submit(new_game(store), "two", steps=100, client="b")
        assert short.wait(30.0)
        assert long.wait(30.0)
        assert long.started > short.ended_at


def test_an_error_of_a_turn_in_between_is_its_own(player, store):
    with engine_of(player, store) as engine:
        player.hold.clear()
        flood = [engine.submit(new_game(store), "more", client="flood") for _ in range(2)]
        wait_until(lambda: flood[0].stage == "decoder")
        broken = engine.submit(new_game(store), "defect", client="kind")
        player.hold.set()
        assert all(request.wait(30.0) for request in (*flood, broken))
        assert [request.status for request in flood] == ["done", "done"]
        assert "an internal error" in broken.error


def test_turns_of_a_client_are_bounded(player, store):
    with engine_of(player, store, client_turns=2) as engine:
        player.hold.clear()
        first = engine.submit(new_game(store), "one", client="a")
        wait_until(lambda: first.status == "playing")
        second = engine.submit(new_game(store), "two", client="a")
        with pytest.raises(UserError, match="2 of your turns are waiting or being played, the mo"):
            engine.submit(new_game(store), "three", client="a")
        other = engine.submit(new_game(store), "four", client="b")
        player.hold.set()
        assert all(request.wait(30.0) for request in (first, second, other))
        assert seconds_of_a_turn(engine, new_game(store), "a") > 0


def test_steps_are_bounded_and_old_games_play_with_fewer(player, store):
    with engine_of(player, store, max_steps=3) as engine:
        with pytest.raises(UserError, match="steps: expected a whole number, 1 to 3, found 4"):
            engine.check_settings(seed=0, window=1, steps=4)
        request = engine.submit(new_game(store, steps=900), "wave")
        assert request.wait(30.0)
        assert request.turn is not None
        assert request.turn.steps == 3


def test_a_stopping_server_ends_turns_in_play_and_notifies_the_others(player, store):
    player.step_seconds = 0.02
    engine = Engine(player, store, batch_sizes=(1,))
    playing = engine.submit(new_game(store), "one", steps=20)
    wait_until(lambda: playing.status == "playing")
    waiting = engine.submit(new_game(store), "two")
    engine.close(seconds=20.0)
    assert playing.status == "done"
    assert (waiting.status, engine.health) == ("stopped", "shutting down")
    assert waiting.error == "the server is shutting down: the game is saved, come back later"


def test_health(player, store):
    with engine_of(player, store) as engine:
        assert engine.health == "ready"
        for _ in range(3):
            request = engine.submit(new_game(store), "defect")
            assert request.wait(30.0)
            wait_until(lambda: engine.count_turns() == (0, 0))
        assert engine.health == "failing"
        seconds_of_a_turn(engine, new_game(store), "")
        wait_until(lambda: engine.health == "ready")


# --- a server over HTTP ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def served_once(tmp_path_factory) -> Iterator[tuple[str, subprocess.Popen, Path]]:
    with served(tmp_path_factory.mktemp("crowd")) as found:
        yield found


@pytest.fixture
def server(served_once) -> tuple[str, Path]:
    address, _, log = served_once
    return address, log


def test_headers_health_and_metrics(server):
    address, log = server
    status, headers, text = fetch(address, "GET", "/health")
    assert (status, json.loads(text)) == (200, {"status": "ready"})
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "SAMEORIGIN"
    assert "frame-ancestors 'self'" in headers["content-security-policy"]
    assert fetch(address, "GET", "/", Host="evil.example")[0] == 421
    game = ask(address, "new_game", 0, 0, 0)["game"]
    assert ask(address, "play_turn", game, "my private words", 0)["turn"] == 1
    _, headers, text = fetch(address, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    for line in (
        'animegamer_turns_total{status="done"} 1.0',
        "animegamer_ready 1.0",
        "animegamer_turn_seconds_count 1.0",
        'animegamer_refused_total{limit="host"} 1.0',
    ):
        assert line in text, text
    lines = ("1.1.1.1 POST /gradio_api/call 200", "1.1.1.1 turn done: 4 steps")
    wait_until(lambda: all(line in log.read_text() for line in lines))  # written after the answer
    written = log.read_text()
    assert "private" not in written
    assert game not in written


def test_wrong_types_are_one_clear_line(server):
    address, log = server
    game = ask(address, "new_game", 0, 0, 0)["game"]
    before = log.read_text().count("Traceback")
    for name, data, message in (
        ("new_game", ("x", 0, 0), 'seed: expected a whole number, found "x"'),
        ("new_game", ([1], 0, 0), "seed: expected a whole number, found [1]"),
        ("new_game", (True, 0, 0), "seed: expected a whole number, found true"),
        ("new_game", (float("nan"), 0, 0), "seed: expected a whole number, found NaN"),
        ("new_game", (10**400, 0, 0), "seed: expected a whole number, 0 to 2147483647"),
        ("new_game", (0, 0, 1001), "steps: expected a whole number, 1 to 1000"),
        ("play_turn", (game, [5], 0), "instruction: expected a text, found [5]"),
        ("play_turn", ({"a": 1}, "wave", 0), 'game: expected a text, found {"a": 1}'),
        ("play_turn", (game, "wave", "high"), 'level: expected a whole number, found "high"'),
        ("clip", (game, "x"), "clip: expected game, turn, found inputs that cannot be read"),
        ("clip", (game, None), "turn: expected a whole number, found null"),
        ("load", ("abc",), "load: expected archive, found inputs that cannot be read"),
        ("load", ({"path": "/etc/passwd"},), "load: expected archive, found inputs that cann"),
        ("load", (None,), "expected a downloaded game, found no file"),
    ):
        error = ask(address, name, *data)
        assert isinstance(error, str), (name, data, error)
        assert error.startswith(message), (name, data, error)
        assert "\n" not in error
    assert log.read_text().count("Traceback") == before


def upload(address: str, *sizes: int, client: str) -> tuple[int, str]:
    part = '--mark\r\ncontent-disposition: form-data; name="files"; filename="{}"\r\n\r\n'
    parts = [part.format(n).encode() + bytes(size) + b"\r\n" for n, size in enumerate(sizes)]
    status, _, text = fetch(
        address, "POST", "/gradio_api/upload", b"".join(parts) + b"--mark--\r\n",
        Content_Type="multipart/form-data; boundary=mark", X_Forwarded_For=client,
    )  # fmt: skip
    return status, text


def announce(address: str, path: str, client: str, **headers: str) -> tuple[int, str]:
    """Sends the headers of a request that is to be refused by them, and no body.

    A body that is sent anyway meets a connection that the server may have closed.
    """
    status, _, text = fetch(address, "POST", path, X_Forwarded_For=client, **headers)
    return status, text


def test_bodies_and_uploads_are_bounded(server):
    address, _ = server
    join = "/gradio_api/call/new_game"
    assert announce(address, join, "2.1.1.1", Content_Length=str((1 << 20) + 1))[0] == 413
    assert announce(address, join, "2.1.1.1", Transfer_Encoding="chunked")[0] == 411
    both = {"Content_Length": "2", "Transfer_Encoding": "chunked"}
    assert announce(address, join, "2.1.1.1", **both)[0] == 411  # no chunk has to come first
    status, text = upload(address, 10, 20, 30, 40, client="2.1.1.2")
    assert (status, len(json.loads(text))) == (200, 4)
    status, text = upload(address, *[10] * 5, client="2.1.1.2")
    assert (status, text) == (400, "expected at most 4 files in a request")
    big = 700_000
    assert upload(address, big, client="2.1.1.3")[0] == 200
    path = "/gradio_api/upload"
    status, text = announce(address, path, "2.1.1.3", Content_Length=str(big))
    assert (status, "more than 1 MB in an hour" in text) == (429, True)
    assert upload(address, big, client="2.1.1.4")[0] == 200


def test_one_that_floods_and_one_that_hangs_stop_nobody(server):
    address, _ = server
    kind = "3.1.1.1"
    game = ask(address, "new_game", 0, 0, 0, client=kind)["game"]

    def seconds() -> float:
        start = time.monotonic()
        assert "turn" in ask(address, "play_turn", game, "wave", 0, client=kind)
        return time.monotonic() - start

    alone = statistics.median(seconds() for _ in range(3))
    hanging = []
    try:
        for number in range(30):  # streams that are never read
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request(
                "GET", f"/gradio_api/heartbeat/{number}", headers={"X-Forwarded-For": "3.1.1.2"}
            )
            hanging.append((connection, connection.getresponse()))
        assert [answer.status for _, answer in hanging] == [200] * 20 + [429] * 10
        flood = "3.1.1.3"
        games = [ask(address, "new_game", 0, 0, 1000, client=flood)["game"] for _ in range(6)]
        paths = [begin(address, "play_turn", g, "more", 0, client=flood) for g in games]
        for path in paths[4:]:
            assert "4 of your turns are waiting" in result(address, path, flood)[1]["error"]
        wait_until(lambda: ask(address, "progress", games[0], client=flood)["status"] == "playing")
        crowded = statistics.median(seconds() for _ in range(3))
        assert crowded < 3 * alone, (crowded, alone)
        assert ask(address, "stop", games[0], client=flood) is True
        for game in games[1:4]:
            ask(address, "stop", game, client=flood)
        for path in paths[:4]:
            result(address, path, flood)
    finally:
        for connection, answer in hanging:
            answer.close()
            connection.close()


def test_a_signal_lets_turns_end_and_notifies_those_that_wait(served_once):
    """The last test of this server."""
    address, process, _ = served_once
    process.send_signal(signal.SIGUSR2)  # turns stay in a step
    games = [ask(address, "new_game", 0, 0, 4)["game"] for _ in range(3)]
    paths = []
    for game in games:  # one after the other: two keep both workers busy, the third waits
        paths.append(begin(address, "play_turn", game, "one", 0))
        expected = "playing" if len(paths) < 3 else "waiting"
        wait_until(lambda: ask(address, "progress", game)["status"] == expected)  # noqa: B023
    with ThreadPoolExecutor(3) as pool:
        *playing, waiting = [pool.submit(result, address, path) for path in paths]
        process.send_signal(signal.SIGTERM)
        kind, said = waiting.result()
        assert (kind, said["error"][:27]) == ("error", "the server is shutting down")
        assert not any(answer.done() for answer in playing)
        process.send_signal(signal.SIGUSR1)
        assert [answer.result()[0] for answer in playing] == ["complete", "complete"]
    assert process.wait(30) == 0
