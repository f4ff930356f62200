"""A crowd at a server: 50 players, one client that floods, one that hangs.

Half of what they do is what the page does: a game is followed as server-sent events, a turn is
asked for and waited for there, its clip and picture are fetched. The other half goes through
Gradio's API, as programs of players do.
"""

import contextlib
import dataclasses
import http.client
import json
import signal
import statistics
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from crowd_server import ask, begin, call_api, fetch, served
from sandbox import Child
from table import REFUSED, RIGHT, WRONG, Verdict

PLAYERS, STREAMS, FLOOD = 50, 30, 200
_SECONDS, _IDLE = 600.0, 300.0
_PLAYERS = (f"crowd: {PLAYERS // 2} pages", f"crowd: {PLAYERS // 2} of Gradio's API")
_STATUSES = {200: RIGHT, 202: RIGHT, 422: REFUSED, 429: REFUSED}


class CrowdCases:
    """The players of one server, by number; then the flooder's requests and the open streams.

    Args:
        folder: Folder of the server.
        turns: Number of turns of each player.
    """

    def __init__(self, folder: Path, *, turns: int):
        self.folder, self.turns = folder, turns

    def select(self, *, only: int | None, skip: Collection[int]) -> None:
        """Chooses whether the crowd runs: it has no single cases."""
        self.skip = only is not None or len(skip) >= PLAYERS + STREAMS + FLOOD

    def check_sound(self, *, jobs: int) -> list[str]:
        """Nothing runs undisturbed here."""
        del jobs
        return []

    def run(self, *, jobs: int) -> Iterator[Verdict]:
        """Runs the crowd in a child, since it needs threads, and yields the verdicts."""
        del jobs
        if self.skip:
            return
        self.folder.mkdir(parents=True)
        file = self.folder / "verdicts.jsonl"

        def run() -> int:
            found = list(_Crowd(self.folder, self.turns).run())
            file.write_text("".join(json.dumps(dataclasses.asdict(v)) + "\n" for v in found))
            return 0

        outcome = Child(run, self.folder / ".log", seconds=_SECONDS, idle=_IDLE).wait()
        if outcome.status:
            reason = (outcome.out + outcome.err)[-1000:]
            yield Verdict(number=0, kind="crowd", change="", result=WRONG, reason=reason)
            return
        for line in file.read_text().splitlines():
            yield Verdict(**json.loads(line))


class _Crowd:
    def __init__(self, folder: Path, turns: int):
        self.folder, self.turns = folder, turns
        self.seconds: dict[str, list[float]] = {kind: [] for kind in _PLAYERS}  # of each turn
        self.over = threading.Event()

    def run(self) -> Iterator[Verdict]:
        with served(self.folder) as (address, process, log):
            self.address = address
            memory = psutil.Process(process.pid).memory_info
            start = memory().rss
            with ThreadPoolExecutor(PLAYERS + 2) as pool, contextlib.ExitStack() as open_streams:
                hanging = pool.submit(self._hang, open_streams)
                streams = hanging.result()
                flood = pool.submit(self._flood)
                players = list(pool.map(self._play, range(PLAYERS)))
                self.over.set()
                flooded = flood.result()
            grown = (memory().rss - start) / 2**20
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
            text = log.read_text()
        ended = [] if status == 0 else [f"the server ended with {status}"]
        ended += ["a traceback in the log"] if "Traceback" in text else []
        numbers = iter(range(PLAYERS + STREAMS + FLOOD))
        for number, reason in enumerate(players):
            kind = _PLAYERS[number % 2]
            reasons = [*([reason] if reason else []), *ended]
            yield Verdict(
                number=next(numbers),
                kind=kind,
                change=f"{self.turns} turns; {_describe(self.seconds[kind])}",
                result=WRONG if reasons else RIGHT,
                reason="; ".join(reasons),
                megabytes=grown,
            )
        for kind, results in (("one hangs", streams), ("one floods", flooded)):
            for result in results:
                yield Verdict(
                    number=next(numbers), kind=f"crowd: {kind}", change="", result=result, reason=""
                )

    def _play(self, number: int) -> str:
        """Plays a game; returns what is wrong, or ""."""
        client, kind = f"10.1.{number}.1", _PLAYERS[number % 2]
        play = (self._play_as_page, self._play_by_gradio)[number % 2]
        found = play(number, client, self.seconds[kind])
        if isinstance(found, str):
            return found
        saved = json.loads((self.folder / "games" / found["game"] / "game.json").read_text())
        if len(found["turns"]) != self.turns or len(saved["turns"]) != self.turns:
            return f"{len(found['turns'])} turns are shown, {len(saved['turns'])} saved"
        return ""

    def _play_by_gradio(self, seed: int, client: str, seconds: list[float]) -> Any:
        """Plays a game; returns its state, or what is wrong."""
        game = ask(self.address, "new_game", seed, 0, 0, client=client)
        if isinstance(game, str):
            return game
        for turn in range(1, self.turns + 1):
            start = time.monotonic()
            found = ask(self.address, "play_turn", game["game"], "wave", 0, client=client)
            seconds.append(time.monotonic() - start)
            if isinstance(found, str) or found["turn"] != turn:
                return f"turn {turn}: {found}"
        return ask(self.address, "show", game["game"], client=client)

    def _play_as_page(self, seed: int, client: str, seconds: list[float]) -> Any:
        """Plays a game; returns its state, or what is wrong."""
        status, game = call_api(self.address, "POST", "games", client, seed=seed)
        if status != 201:
            return f"a new game: {status} {game}"
        place = f"games/{game['game']}"
        with self._open(f"/api/v1/{place}/events", client) as stream:
            events = _events(stream)
            for turn in range(1, self.turns + 1):
                start, head = time.monotonic(), game["head"]
                line = {"instruction": "wave", "head": head}
                status, found = call_api(
                    self.address, "POST", f"{place}/turns?reply=accepted", client, **line
                )
                if status != 202:
                    return f"turn {turn}: {status} {found}"
                for kind, data in events:
                    if kind == "state" and data["head"] != head:
                        game = data
                        break
                    if data and data.get("error"):
                        return f"turn {turn}: {data['error']}"
                seconds.append(time.monotonic() - start)
                if len(game["turns"]) != turn:
                    return f"turn {turn}: the stream ended, or {len(game['turns'])} turns are there"
                last = game["turns"][-1]
                for address, mark in ((last["clip"], "ftyp"), (last["picture"], "WEBP")):
                    status, _, text = fetch(self.address, "GET", address, X_Forwarded_For=client)
                    if status != 200 or mark not in text[:20]:
                        return f"turn {turn}: {address}: {status} {text[:100]!r}"
        return call_api(self.address, "GET", place, client)[1]

    @contextlib.contextmanager
    def _open(self, path: str, client: str) -> Iterator[http.client.HTTPResponse]:
        """Opens a stream."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request("GET", path, headers={"X-Forwarded-For": client})
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()

    def _hang(self, stack: contextlib.ExitStack) -> list[str]:
        """Opens streams that are never read."""
        client, found = "10.2.1.1", []
        game = call_api(self.address, "POST", "games", client)[1]["game"]
        for number in range(STREAMS):
            paths = f"/api/v1/games/{game}/events", f"/gradio_api/heartbeat/{number}"
            answer = stack.enter_context(self._open(paths[number % 2], client))
            found.append(_result_of(answer.status))
        return found

    def _flood(self) -> list[str]:
        """Asks for long turns as fast as it can, until the others have played."""
        client, found = "10.3.1.1", []
        while len(found) < FLOOD and not self.over.is_set():
            flood = (self._flood_page, self._flood_gradio)[len(found) % 2]
            found.append(flood(client))
        while len(found) < FLOOD:
            found.append(
                _result_of(fetch(self.address, "GET", "/config", X_Forwarded_For=client)[0])
            )
        return found

    def _flood_page(self, client: str) -> str:
        status, game = call_api(self.address, "POST", "games", client, steps=1000)
        if status != 201:
            return _result_of(status)
        path = f"games/{game['game']}/turns?reply=accepted"
        return _result_of(call_api(self.address, "POST", path, client, instruction="more")[0])

    def _flood_gradio(self, client: str) -> str:
        try:
            game = ask(self.address, "new_game", 0, 0, 1000, client=client)
            if isinstance(game, str):
                return REFUSED
            begin(self.address, "play_turn", game["game"], "more", 0, client=client)
        except AssertionError:  # its answer has another status than 200
            return REFUSED
        return RIGHT


def _events(stream: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yields the kind and the data of each event of a stream."""
    kind = ""
    for line in stream:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value or "null")


def _describe(seconds: list[float]) -> str:
    p95 = statistics.quantiles(seconds, n=20)[-1] if len(seconds) > 1 else 0.0
    return f"a turn: median {statistics.median(seconds or [0]):.2f} s, 95 % {p95:.2f} s"


def _result_of(status: int) -> str:
    return _STATUSES.get(status, WRONG)
