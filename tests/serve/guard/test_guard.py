"""What the guard refuses: hosts, logins, rates, uploads; and what the log names."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from h11 import LocalProtocolError

from animegamer_jax.errors import UserError
from animegamer_jax.serve.guard.guard import Guard, hosts_of
from animegamer_jax.serve.guard.limits import FileWork, Limits, Logins, Rate, Uploads, client_of
from animegamer_jax.serve.guard.monitor import Monitor, endpoint_of


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


def make_guard(page: Any, folder: Path) -> Guard:
    return Guard(
        page,
        hosts=hosts_of("127.0.0.1", ()),
        limits=Limits(),
        uploads=Uploads(folder, max_bytes=1, max_seconds=1.0),
        monitor=Monitor(),
    )


def test_an_answer_to_a_request_that_the_server_has_refused_is_dropped(tmp_path):
    """As after a body in chunks that are none: h11 has closed the connection."""
    tried = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        tried.append(message["type"])
        raise LocalProtocolError("the state is MUST_CLOSE")

    scope = {
        "type": "http", "method": "PROPFIND", "path": "/login", "client": ("9.9.9.7", 1),
        "headers": [(b"host", b"localhost")], "query_string": b"",
    }  # fmt: skip
    asyncio.run(make_guard(page, tmp_path)(scope, None, send))
    assert tried == ["http.response.start", "http.response.body"]


def test_a_guard_delays_logins(tmp_path):
    """The page behind it answers 400 to a wrong password."""

    async def page(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["query_string"] == b"right" else 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = make_guard(page, tmp_path)

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
