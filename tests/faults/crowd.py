"""A crowd at the page: 50 players, one client that floods, one that hangs."""

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

import psutil
from crowd_server import ask, begin, fetch, served
from sandbox import Child
from table import REFUSED, RIGHT, WRONG, Verdict

PLAYERS, STREAMS, FLOOD = 50, 30, 200
_SECONDS, _IDLE = 600.0, 300.0


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
        self.seconds: list[float] = []  # of each turn
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
        p95 = statistics.quantiles(self.seconds, n=20)[-1] if len(self.seconds) > 1 else 0.0
        half = f"a turn: median {statistics.median(self.seconds or [0]):.2f} s, 95 % {p95:.2f} s"
        for reason in players:
            reasons = [*([reason] if reason else []), *ended]
            yield Verdict(
                number=next(numbers),
                kind="crowd: 50 players",
                change=f"{self.turns} turns; {half}",
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
        client = f"10.1.{number}.1"
        game = ask(self.address, "new_game", number, 0, 0, client=client)
        if isinstance(game, str):
            return game
        for turn in range(1, self.turns + 1):
            start = time.monotonic()
            found = ask(self.address, "play_turn", game["game"], "wave", 0, client=client)
            self.seconds.append(time.monotonic() - start)
            if isinstance(found, str) or found["turn"] != turn:
                return f"turn {turn}: {found}"
        shown = ask(self.address, "show", game["game"], client=client)
        saved = json.loads((self.folder / "games" / game["game"] / "game.json").read_text())
        if len(shown["turns"]) != self.turns or len(saved["turns"]) != self.turns:
            return f"{len(shown['turns'])} turns are shown, {len(saved['turns'])} saved"
        return ""

    def _hang(self, stack: contextlib.ExitStack) -> list[str]:
        """Opens streams that are never read."""
        found = []
        for number in range(STREAMS):
            connection = http.client.HTTPConnection(self.address, timeout=60)
            stack.callback(connection.close)
            headers = {"X-Forwarded-For": "10.2.1.1"}
            connection.request("GET", f"/gradio_api/heartbeat/{number}", headers=headers)
            answer = connection.getresponse()
            stack.callback(answer.close)
            found.append(_result_of(answer.status))
        return found

    def _flood(self) -> list[str]:
        """Asks for long turns as fast as it can, until the others have played."""
        client, found = "10.3.1.1", []
        while len(found) < FLOOD and not self.over.is_set():
            game = ask(self.address, "new_game", 0, 0, 1000, client=client)
            if isinstance(game, str):
                found.append(REFUSED)
                continue
            try:
                begin(self.address, "play_turn", game["game"], "more", 0, client=client)
            except AssertionError:  # its answer has another status than 200
                found.append(REFUSED)
            else:
                found.append(RIGHT)
        body = {"X_Forwarded_For": client}
        while len(found) < FLOOD:
            found.append(_result_of(fetch(self.address, "GET", "/config", **body)[0]))
        return found


def _result_of(status: int) -> str:
    return {200: RIGHT, 429: REFUSED}.get(status, WRONG)
