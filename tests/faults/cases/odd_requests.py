"""Odd requests at a server: paths, methods, headers and bodies that no page sends.

Each request is answered by the server with a player without networks. Its description of itself
(OpenAPI, and Gradio's list of end points) says what can be asked; what is sent there is odd.
"""

import contextlib
import dataclasses
import json
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from crowd_server import call_api, fetch, served
from sandbox import Child
from table import REFUSED, RIGHT, WRONG, Verdict

SECONDS = 30.0  # of an answer; a turn of 1,000 steps takes 20
_STREAM = 0.5  # seconds of a stream of events that are read
_RUN, _IDLE = 3600.0, 300.0  # seconds of them all
_MOST = 1 << 20  # bytes of an answer that are read
_SECRET = "nobody may read this"
_API, _GRADIO, _FILES, _HTTP = "the API", "Gradio's API", "files", "HTTP"


class Request(NamedTuple):
    """A request: its group in the table, and what is sent."""

    group: str
    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def data(self, host: str, client: str) -> bytes:
        """Returns its bytes; its own headers come in place of the usual ones."""
        names = {name.lower() for name, _ in self.headers}
        usual = [(b"Host", host.encode()), (b"X-Forwarded-For", client.encode())]
        usual += [(b"Connection", b"close")]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            usual += [(b"Content-Length", b"%d" % len(self.body))]
            usual += [(b"Content-Type", b"application/json")]
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), self.target)]
        lines += [b": ".join(pair) for pair in usual if pair[0].lower() not in names]
        lines += [b": ".join(pair) for pair in self.headers]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body

    def name(self) -> str:
        shown = f"{self.method} {self.target[:80]!r} {self.headers!r:.120} {self.body[:80]!r}"
        return shown.encode("ascii", "backslashreplace").decode()


class Answer(NamedTuple):
    """What came back: 0 is the status of an empty or unreadable answer."""

    status: int
    headers: bytes
    body: bytes
    seconds: float


def judge(answer: Answer, *, host: str, private: Collection[str]) -> tuple[str, str]:
    """Returns the result of a request, and what is wrong.

    Args:
        answer: What came back.
        host: The server's own host and port, to which alone it may lead.
        private: Texts that no answer may have: paths of the server, the content of other files.
    """
    text = (answer.headers + b"\n" + answer.body).decode(errors="replace")
    if answer.seconds > SECONDS:
        return WRONG, f"took {answer.seconds:.0f} s"
    if not 200 <= answer.status < 500:
        return WRONG, f"status {answer.status}: {answer.body[:200]!r}"
    if "Traceback (most recent call last)" in text:
        return WRONG, f"traceback: {text[-300:]!r}"
    if found := next((each for each in private if each in text), None):
        return WRONG, f"says {found!r}: {text[:300]!r}"
    if (place := re.search(rb"(?im)^location: *(\S*)", answer.headers)) and not re.match(
        rb"/(?!/)|https?://%s(/|$)" % re.escape(host.encode()), place[1]
    ):
        return WRONG, f"led to {place[1]!r}"
    return (RIGHT if answer.status < 400 else REFUSED), ""


def send(address: str, request: Request, client: str) -> Answer:
    """Sends a request, and returns the answer; of a stream of events, its beginning."""
    host, port = address.rsplit(":", 1)
    start, found = time.monotonic(), b""
    until = start + SECONDS + 1
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as connection:
        connection.settimeout(SECONDS)
        with contextlib.suppress(OSError):  # it answered and hung up before the whole body
            connection.sendall(request.data(address, client))
        while len(found) < _MOST and time.monotonic() < until:
            connection.settimeout(max(0.01, until - time.monotonic()))
            if not (part := connection.recv(1 << 16)):
                break
            if not found.partition(b"\r\n\r\n")[2] and b"text/event-stream" in found + part:
                until = min(until, time.monotonic() + _STREAM)
            found += part
    seconds = time.monotonic() - start
    head, _, body = found.partition(b"\r\n\r\n")
    while re.match(rb"HTTP/1\.[01] 1", head):  # go on, before the answer
        head, _, body = body.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] (\d{3})", head)
    return Answer(int(status[1]) if status else 0, head, body, seconds)


# What is sent

_NUMBERS = (0, -1, 1, 7, 2**31, 2**63, -(2**64), 10**400, 0.5, 1e308, -0.0)
_TEXTS = (
    *("", " ", "\0", "a\r\nb: c", "\x1b[31m", "\u202e", "../../../etc/passwd", "/etc/passwd"),
    *("%2e%2e%2f", "nul", "C:\\x", "<script>", "${x}", "{{7*7}}", "' or 1=1", "wave " * 500),
    *("\U0001f98a", "a" * 100_000, "undefined", "-1", "1e400", "\ufeff"),
)
_OTHERS = (None, True, [], {}, [[]], {"path": "/etc/passwd"}, {"__proto__": {}}, [None] * 1000)
_RAW = (
    *(b"", b"{", b"[]", b"null", b"NaN", b'{"a": NaN}', b'{"seed": Infinity}', b"\xff\xfe{}"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 5000 + b"}", b'"\\ud800"'),
    *(b'{"instruction": "\\ud800"}', b'{"a": 1, "a": 2}', b"\0" * 100, b"\x1f\x8b\x08\0\0"),
    *(b'--x\r\nContent-Disposition: form-data; name="picture"; filename="../../x"\r\n\r\n',),
)
_TYPES = (
    *(
        b"application/json",
        b"text/plain",
        b"multipart/form-data; boundary=x",
        b"multipart/form-data",
    ),
    *(b"application/x-www-form-urlencoded", b"application/json; charset=utf-16", b"\xff", b""),
)
_UPS = (
    "../",
    "..%2f",
    "%2e%2e/",
    "..%252f",
    "..\\",
    "....//",
    "./",
    "//",
    "%00",
    "..;/",
    "%c0%ae/",
)
_METHODS = (
    *("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"),
    *("get", "X" * 300, "A B"),
)
_HOSTS = (
    b"",
    b"evil.example",
    b"127.0.0.1:99999",
    b"[::1",
    b"a b",
    b"\xff",
    b"127.0.0.1@evil.example",
)
_HEADERS = (
    *(
        (b"Range", each)
        for each in (b"bytes=0-", b"bytes=-1", b"bytes=9-2", b"bytes=0-" + b"9" * 400)
    ),
    *((b"Range", each) for each in (b"bytes=" + b"0-0," * 500, b"lines=1", b"bytes=a-b")),
    *((b"Host", host) for host in _HOSTS),
    *(
        (b"X-Forwarded-Host", b"evil.example"),
        (b"X-Forwarded-Proto", b"javascript"),
        (b"X", b"y" * 60_000),
    ),
    *((b"X-Forwarded-For", b"' or 1"), (b"X-Forwarded-For", b"::ffff:1.2.3.4, " * 200)),
    *((b"Content-Length", each) for each in (b"-1", b"9" * 30, b"1e3", b"abc")),
    *((b"Transfer-Encoding", b"chunked"), (b"Expect", b"100-continue"), (b"Upgrade", b"websocket")),
    *(
        (b"Cookie", b"a" * 10_000),
        (b"Accept", b"text/event-stream"),
        (b"Accept-Encoding", b"gzip;q=x"),
    ),
    *((b"Authorization", b"Basic \xff"), (b"If-None-Match", b"*"), (b"Content-Encoding", b"gzip")),
    *((b"Origin", b"http://evil.example"), (b"Last-Event-ID", b"-1"), (b"Bad Header", b"x")),
)


class Requests:
    """Odd requests, by number; the same number makes the same one for the same server.

    Args:
        spec: The API's description.
        calls: Names of Gradio's end points, each with its number of inputs.
        game: A game that is there.
        files: Paths on this machine that must not be read, relative ones included.
    """

    def __init__(
        self, spec: dict[str, Any], calls: dict[str, int], *, game: str, files: Collection[str]
    ):
        self.schemas = spec.get("components", {}).get("schemas", {})
        self.paths = [
            (path, method, what)
            for path, methods in sorted(spec["paths"].items())
            for method, what in sorted(methods.items())
        ]
        self.calls, self.game, self.files = sorted(calls.items()), game, sorted(files)

    def make(self, rng: random.Random) -> Request:
        """Returns a request."""
        groups = (self._of_api, self._of_gradio, self._of_file, self._of_http)
        request = rng.choices(groups, (5, 3, 3, 2))[0](rng)
        if rng.random() < 0.15:
            request = request._replace(headers=(*request.headers, rng.choice(_HEADERS)))
        if rng.random() < 0.05:
            request = request._replace(method=rng.choice(_METHODS))
        return request

    def _value(self, rng: random.Random) -> Any:
        return rng.choice(rng.choice((_NUMBERS, _TEXTS, _OTHERS)))

    def _text(self, rng: random.Random) -> str:
        value = rng.choice(
            (rng.choice(_TEXTS), rng.choice(_UPS) * 8 + "etc/passwd", self._value(rng))
        )
        return quote(str(value)[:5000], safe=rng.choice(("", "/.%", "/.%\\;")), errors="replace")

    def _of_api(self, rng: random.Random) -> Request:
        path, method, what = rng.choice(self.paths)
        sound = {"game": self.game, "turn": "1"}

        def fill(match: re.Match[str]) -> str:
            name = match[1].partition(":")[0]
            odd = rng.random() < 0.3 or name not in sound
            return self._text(rng) if odd else sound[name]

        target = re.sub(r"\{([^}]*)\}", fill, path)
        names = [one["name"] for one in what.get("parameters", ()) if one["in"] == "query"]
        if names or rng.random() < 0.1:
            given = rng.choices([*names, "x"], k=rng.randint(1, 3))
            target += "?" + "&".join(f"{name}={self._text(rng)}" for name in given)
        headers, body = [], b""
        if "requestBody" in what:
            body = self._body(what["requestBody"], rng)
            if rng.random() < 0.15:
                headers = [(b"Content-Type", rng.choice(_TYPES))]
        return Request(_API, method.upper(), target.encode(), tuple(headers), body)

    def _body(self, wanted: dict[str, Any], rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return rng.choice(_RAW)
        (kind, *_) = wanted["content"].values()
        schema = kind.get("schema", {})
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"].rpartition("/")[2]]
        names = [*schema.get("properties", {"a": {}})]
        given = {name: self._value(rng) for name in names if rng.random() < 0.6}
        if rng.random() < 0.1:
            given["unknown"] = self._value(rng)
        return json.dumps(given).encode()

    def _of_gradio(self, rng: random.Random) -> Request:
        name, size = rng.choice(self.calls)
        sound = {0: self.game, 1: "wave"}
        count = size if rng.random() < 0.8 else rng.randint(0, 9)
        data = [
            self._value(rng) if rng.random() < 0.4 or k not in sound else sound[k]
            for k in range(count)
        ]
        content = json.dumps({"data": data, "event_data": None}).encode()
        body = rng.choice(_RAW) if rng.random() < 0.15 else content
        ends = (
            ("POST", f"/gradio_api/call/{name}"),
            ("POST", f"/gradio_api/call/{name}"),
            ("POST", f"/gradio_api/call/{self._text(rng)}"),
            ("POST", "/gradio_api/queue/join"),
            ("POST", f"/gradio_api/run/{name}"),
            ("POST", "/gradio_api/upload"),
            ("POST", "/gradio_api/component_server"),
            ("POST", "/gradio_api/reset"),
            ("POST", "/gradio_api/cancel"),
            ("GET", f"/gradio_api/call/{name}/{self._text(rng)}"),
            ("GET", f"/gradio_api/queue/data?session_hash={self._text(rng)}"),
            ("GET", f"/gradio_api/heartbeat/{self._text(rng)}"),
            ("GET", f"/gradio_api/upload_progress?upload_id={self._text(rng)}"),
            ("GET", "/gradio_api/info"),
            ("GET", f"/config?x={self._text(rng)}"),
        )
        method, target = rng.choice(ends)
        headers = ((b"Content-Type", rng.choice(_TYPES)),) if rng.random() < 0.15 else ()
        return Request(_GRADIO, method, target.encode(), headers, body if method == "POST" else b"")

    def _of_file(self, rng: random.Random) -> Request:
        """Asks for a file that is none of the server's, by all of its ways to files."""
        file = rng.choice(self.files)
        up = rng.choice(_UPS) * rng.randint(1, 12)
        spelled = rng.choice(
            (file, file.lstrip("/"), up + file.lstrip("/"), quote(file, safe=""), f"file://{file}")
        )
        spelled = rng.choice(
            (spelled, spelled, quote(spelled), spelled + "%00.mp4", spelled + "/.")
        )
        ways = (
            *("/gradio_api/file=", "/file=", "/gradio_api/file/", "/gradio_api/proxy="),
            *("/gradio_api/stream/", "/static/", "/assets/", "/gradio_api/static/"),
            *("/gradio_api/custom_component/a/server/x/", "/theme.css?", "/", "/svelte/"),
            *(f"/api/v1/games/{self.game}/clips/", f"/api/v1/games/{self.game}/pictures/"),
            *("/api/v1/openings/clips/", "/api/v1/openings/places/", "/api/v1/games/"),
        )
        return Request(_FILES, "GET", (rng.choice(ways) + spelled).encode("utf-8", "replace"))

    def _of_http(self, rng: random.Random) -> Request:
        raw = bytes(rng.randrange(33, 256) for _ in range(rng.randint(1, 40)))
        targets = (
            *(
                b"/",
                b"/api",
                b"/health",
                b"/metrics",
                b"//evil.example/..",
                b"http://evil.example/",
            ),
            *(b"*", b"/" + raw, b"/api/v1/server", b"/?" + b"a=b&" * 5000, b"/" + b"a" * 70_000),
            *(b"/assets/start.js", b"/login", b"/logout", b"/api/v1/server/", b"/%ff%fe", b""),
        )
        headers = tuple(rng.choices(_HEADERS, k=rng.randint(0, 3)))
        body = rng.choice(_RAW) if rng.random() < 0.3 else b""
        method = rng.choice(_METHODS) if rng.random() < 0.4 else "GET"
        return Request(_HTTP, method, rng.choice(targets), headers, body)


# The part of the campaign


class RequestCases:
    """All odd requests, by number, at one server.

    Args:
        folder: Folder of the server.
        seed: Seed of all choices.
        count: Number of requests.
    """

    def __init__(self, folder: Path, *, seed: int, count: int):
        self.folder, self.seed, self.count = folder, seed, count

    def select(self, *, only: int | None, skip: Collection[int]) -> None:
        """Chooses which requests are sent: a single one, or all but some."""
        numbers = range(self.count) if only is None else [only]
        self.numbers = [number for number in numbers if number not in skip]

    def check_sound(self, *, jobs: int) -> list[str]:
        """Nothing runs undisturbed here."""
        del jobs
        return []

    def run(self, *, jobs: int) -> Iterator[Verdict]:
        """Sends them one by one, in a child, since the server is a process with threads."""
        del jobs
        if not self.numbers:
            return
        self.folder.mkdir(parents=True)
        file = self.folder / "verdicts.jsonl"

        def run() -> int:
            with file.open("w") as lines:
                for verdict in self._send_all():
                    lines.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
                    lines.flush()
            return 0

        outcome = Child(run, self.folder / ".log", seconds=_RUN, idle=_IDLE).wait()
        for line in file.read_text().splitlines():
            yield Verdict(**json.loads(line))
        if outcome.status:
            reason = (outcome.out + outcome.err)[-1000:]
            yield Verdict(
                number=self.count, kind="requests", change="", result=WRONG, reason=reason
            )

    def _send_all(self) -> Iterator[Verdict]:
        server = self.folder / "server"
        server.mkdir()
        secret = self.folder / "secret.txt"
        secret.write_text(_SECRET)
        (server / "secret.txt").write_text(_SECRET)
        files = [str(secret), str(server / "secret.txt"), str(server / "games"), "/etc/passwd"]
        files += [f"{server}/log", __file__, "/proc/self/environ", "secret.txt"]
        private = (_SECRET, str(self.folder), sys.prefix, "site-packages", "root:x:", "PYTHONPATH=")
        verdicts: list[Verdict] = []
        with served(server) as (address, process, log):
            requests = Requests(*_described(address), game=_game(address), files=files)
            before = _names(self.folder), _names(server)
            for number in self.numbers:
                request = requests.make(random.Random(f"requests {self.seed} {number}"))
                answer = send(address, request, f"10.{number // 200}.{number % 200}.1")
                asked = unquote(request.target.decode(errors="replace"))
                others = [text for text in private if text not in asked]  # it may be repeated
                result, reason = judge(answer, host=address, private=others)
                if process.poll() is not None:
                    result, reason = WRONG, f"the server ended with {process.returncode}"
                verdicts.append(
                    Verdict(
                        number=number,
                        kind=f"requests: {request.group}",
                        change=request.name(),
                        result=result,
                        reason=reason,
                        seconds=answer.seconds,
                    )
                )
                if process.poll() is not None:
                    break
            new = [*(_names(self.folder) - before[0]), *(_names(server) - before[1])]
            process.send_signal(signal.SIGTERM)
            ended = [f"wrote {name}" for name in new]
            ended += [f"the server ended with {code}"] if (code := process.wait(60)) else []
            if found := re.search(r"(?s)Traceback.*?(?=\n\S+ \S+ INFO |$)", log.read_text()):
                ended.append(f"in the log, the end of: {found[0][-2000:]}")
        yield from verdicts
        if ended:
            yield Verdict(
                number=self.count,
                kind="requests: the server",
                change="",
                result=WRONG,
                reason="; ".join(ended),
            )


def _described(address: str) -> tuple[dict[str, Any], dict[str, int]]:
    spec = json.loads(fetch(address, "GET", "/api/v1/openapi.json")[2])
    info = json.loads(fetch(address, "GET", "/gradio_api/info")[2])
    ends = info["named_endpoints"].items()
    return spec, {name.strip("/"): len(end["parameters"]) for name, end in ends}


def _game(address: str) -> str:
    """Starts a game and plays a turn, by the page's API."""
    client = "127.0.0.1"
    status, game = call_api(address, "POST", "games", client, seed=1)
    assert status in (200, 201), game
    place = f"games/{game['game']}"
    status, turn = call_api(address, "POST", f"{place}/turns", client, instruction="wave")
    assert status in (200, 201), turn
    return game["game"]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
