"""Many clients at once: fair turns, limits, races on one game; a server seen over HTTP. No JAX."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crowd_server import ask, begin, fetch, result, served
from fake_player import MODEL, FakePlayer
from waiting import wait_until

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved import tree
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.engine.fair_queue import FairQueue
from animegamer_jax.serve.games.archive import pack_game
from animegamer_jax.serve.games.game_store import GameStore
from animegamer_jax.serve.guard.guard import Guard, hosts_of
from animegamer_jax.serve.guard.limits import FileWork, Limits, Logins, Rate, Uploads, client_of
from animegamer_jax.serve.guard.monitor import Monitor, endpoint_of


@pytest.fixture
def store(tmp_path) -> GameStore:
    return GameStore(tmp_path / "games", model=MODEL, max_games=64)


@pytest.fixture
def player() -> FakePlayer:
    return FakePlayer()


def new_game(store: GameStore, seed: int = 0, *, steps: int = 4, client: str = "") -> str:
    return store.new(seed=seed, window=3, steps=steps, client=client)


@contextlib.contextmanager
def engine_of(player: FakePlayer, store: GameStore, **options: Any) -> Iterator[Engine]:
    engine = Engine(player, store, **options)
    try:
        yield engine
    finally:
        player.hold.set()
        engine.close()


def seconds_of_a_turn(engine: Engine, game: str, client: str) -> float:
    start = time.monotonic()
    request = engine.submit(game, "wave", client=client)
    assert request.wait(60.0)
    assert request.status == "done", request.error
    return time.monotonic() - start


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


# --- races on one game ----------------------------------------------------------------------


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


def test_a_game_is_read_once_by_many(store, played):
    again = GameStore(store.folder, model=MODEL)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: again.get(played), range(32)))
    assert {id(game) for game in found} == {id(found[0])}


# --- limits ---------------------------------------------------------------------------------


def test_rates():
    rate = Rate(3, 0.3)
    assert [rate.take("a") for _ in range(3)] == [0.0, 0.0, 0.0]
    assert 0 < rate.take("a") <= 0.1
    assert rate.take("b") == 0.0
    time.sleep(0.11)
    assert rate.take("a") == 0.0
    assert rate.take("b", 5) > 0


def test_wrong_passwords_take_longer_each_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logins, waited = Logins(), []
    for _ in range(8):
        assert logins.wait("a") == 0.0
        waited.append(logins.wait("a"))
        now[0] += waited[-1]
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    assert logins.wait("b") == 0.0
    logins.succeeded("a")
    assert logins.wait("a") == 0.0


def test_clients_of_addresses():
    assert client_of("10.0.0.7") == "10.0.0.7"
    assert client_of("::ffff:10.0.0.7") == "10.0.0.7"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:2") == "2001:db8::/64"
    assert client_of("2001:db8:0:1::1") != client_of("2001:db8::1")
    assert client_of(None) == ""


def test_file_work_of_a_client():
    work = FileWork()
    with work.slot("a"), work.slot("a"):
        with pytest.raises(UserError, match="2 files of yours"), work.slot("a"):
            pass
        with work.slot("b"):
            pass
    with work.slot("a"):
        pass


def test_uploads_have_a_total_and_an_age(tmp_path):
    uploads = Uploads(tmp_path, max_bytes=1000, max_seconds=7200.0)

    def put(name: str, size: int, age: int) -> Path:
        path = tmp_path / name / "file"
        path.parent.mkdir()
        path.write_bytes(bytes(size))
        then = time.time() - age
        os.utime(path, (then, then))
        return path

    expired, resting, fresh = put("a", 300, 8000), put("b", 300, 4000), put("c", 300, 0)
    with uploads.room(300) as fits:
        assert fits
        assert (expired.exists(), resting.exists(), fresh.exists()) == (False, True, True)
        assert not expired.parent.exists()
        with uploads.room(200) as also:  # what is not fresh goes, if there is no room
            assert also
            assert (resting.exists(), fresh.exists()) == (False, True)
            with uploads.room(300) as too_much:
                assert not too_much
    with uploads.room(700) as fits:
        assert fits
    assert uploads.size == 300


def test_hosts():
    local = hosts_of("127.0.0.1", ("game.example",))
    for header in ("127.0.0.1:7860", "localhost", "LOCALHOST:80", "[::1]:7860", "game.example"):
        assert local.allow(header), header
    for header in ("", "evil.example", "10.0.0.1", "localhost.evil.example", "localhost:x", "[::"):
        assert not local.allow(header), header
    everywhere = hosts_of("0.0.0.0", ())
    assert everywhere.allow("10.0.0.1:7860")
    assert everywhere.allow("[2001:db8::1]")
    assert not everywhere.allow("evil.example")
    assert hosts_of("127.0.0.1", ("*",)).allow("any.example")


def test_paths_in_the_log_name_nothing_private():
    for path, endpoint in (
        ("/", "/"),
        ("/gradio_api/file=/tmp/secret.mp4", "/gradio_api/file"),
        ("/gradio_api/call/play_turn/0123", "/gradio_api/call"),
        ("/gradio_api/heartbeat/0123", "/gradio_api/heartbeat"),
        ("/assets/app.js", "/assets"),
        ("/assetsecret", "other"),
        ("/secret", "other"),
        ("/api/v1/games", "/api/v1/games"),
        ("/api/v1/games/0123", "/api/v1/games"),
        ("/api/v1/games/0123/clips/turn_001.mp4", "/api/v1/games/*/clips"),
        ("/api/v1/games/0123/film.mp4", "/api/v1/games/*/film"),
        ("/api/v1/games/0123/secret", "other"),
        ("/api/v1/games/picture", "/api/v1/games/picture"),
        ("/api/v1/secret", "other"),
        ("/api", "/api"),
    ):
        assert endpoint_of(path) == endpoint


def test_a_guard_delays_logins(tmp_path):
    """The page behind it answers 400 to a wrong password."""

    async def page(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["query_string"] == b"right" else 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(
        page,
        hosts=hosts_of("127.0.0.1", ()),
        limits=Limits(),
        uploads=Uploads(tmp_path, max_bytes=1, max_seconds=1.0),
        monitor=Monitor(),
    )

    def log_in(client: str, query: bytes = b"") -> int:
        sent: list[dict] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [(b"host", b"localhost"), (b"content-length", b"0")]
        scope = {
            "type": "http", "method": "POST", "path": "/login", "headers": headers,
            "query_string": query, "client": (client, 1),
        }  # fmt: skip
        asyncio.run(guard(scope, receive, send))
        return sent[0]["status"]

    assert [log_in("9.9.9.9") for _ in range(3)] == [400, 429, 429]
    assert [log_in("9.9.9.8", b"right") for _ in range(3)] == [200, 200, 200]


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
    written = log.read_text()
    assert "1.1.1.1 POST /gradio_api/call 200" in written
    assert "1.1.1.1 turn done: 4 steps" in written
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
