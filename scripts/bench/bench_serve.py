"""Measures the web server: several players at once, and a long game.

    python scripts/bench/bench_serve.py players             # eight games at once and in a row
    python scripts/bench/bench_serve.py page                # first visit, from a click to the clip
    python scripts/bench/bench_serve.py long --turns 200    # a long game: seconds a turn, memory
    python scripts/bench/bench_serve.py crowd               # a player, and one who floods
    python scripts/bench/bench_serve.py load                # 300 turns by 16 players: memory, p95
    python scripts/bench/bench_serve.py picture             # what a first picture of a turn costs

Each command but the last starts a server in a temporary folder and calls its API with
`gradio_client`. Other work on the machine changes the results, so compare only numbers of one run.
"""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gradio_client import Client
from gradio_client.exceptions import AppError
from tyro.extras import SubcommandApp

from animegamer_jax.bench.timing import read_status

app = SubcommandApp()
_COMPILED = "all batch sizes are compiled"
_LINES = (
    "Character: Mika; Motion: gently waving; Background: day town.",
    "Motion: quickly run.",
    "Now by night.",
    "Character: Ren; Motion: jump.",
    "Go on, faster.",
)


@contextlib.contextmanager
def _serving(model: str) -> Iterator[tuple[str, int]]:
    """Starts a server; yields its address and its process id."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "animegamer_jax.cli", "serve", "--model", model]
        command += ["--port", "0", "--games", str(Path(temporary) / "games")]
        command += ["--trusted-proxies", "127.0.0.1"]  # each player has an address of their own
        if model == "fake":
            program = Path(__file__).parents[2] / "tests/support/serving/fake_player.py"
            command = [sys.executable, str(program), str(Path(temporary) / "games"), "4", "0.02"]
        with (Path(temporary) / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            address = next(m[0] for line in process.stdout if (m := re.search(r"http://\S+", line)))
            # No turn is timed together with a compilation.
            next(line for line in process.stdout if model == "fake" or _COMPILED in line)
            yield address, process.pid
        finally:
            process.terminate()
            process.wait()


def _client(address: str, player: int) -> Client:
    return Client(address, verbose=False, headers={"X-Forwarded-For": f"192.0.2.{player}"})


def _play(address: str, lines: Sequence[str], seed: int, game: str | None = None) -> list[float]:
    """Plays a game; returns the seconds that its player waits for each turn."""
    client = _client(address, seed)
    game = game or client.predict(seed, 0, 0, api_name="/new_game")["game"]
    taken = []
    for line in lines:
        began = time.perf_counter()
        client.predict(game, line, 0, api_name="/play_turn")
        taken.append(time.perf_counter() - began)
    return taken


@app.command
def players(*, model: str = "toy", games: int = 8, turns: int = 5) -> None:
    """Play games one after the other, then the same games at once.

    Args:
        model: Model to play.
        games: Number of games.
        turns: Number of turns in each game.
    """
    lines = [_LINES[turn % len(_LINES)] for turn in range(turns)]
    with _serving(model) as (address, _):
        _play(address, lines[:1], 0)
        began = time.perf_counter()
        alone = [seconds for seed in range(games) for seconds in _play(address, lines, seed)]
        in_a_row = time.perf_counter() - began
        began = time.perf_counter()
        with ThreadPoolExecutor(games) as pool:
            found = pool.map(lambda seed: _play(address, lines, seed), range(games))
            together = [seconds for taken in found for seconds in taken]
        at_once = time.perf_counter() - began
    print(
        f"{games} games of {turns} turns: in a row {in_a_row:.1f} s, at once {at_once:.1f} s "
        f"({at_once / in_a_row:.2f} of it)"
    )
    for name, taken in (("alone", alone), (f"one of {games}", together)):
        p50, p95 = np.percentile(taken, (50, 95))
        print(f"a turn, {name}: p50 {p50:.2f} s, p95 {p95:.2f} s")
    ratio = np.percentile(together, 95) / np.median(alone)
    print(f"p95 of one of {games} / median alone: {ratio:.1f}")


@app.command
def page(*, model: str = "toy", turns: int = 9) -> None:
    """Measure the page in a browser: its first visit, and from a click to the clip that plays.

    Args:
        model: Model to play.
        turns: Number of turns, at most 9: the day ends with the tenth, and the first is prepared.
    """
    from playwright.sync_api import sync_playwright

    with _serving(model) as (address, _), sync_playwright() as api:
        browser = api.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page, sent = browser.new_page(), []
        page.on("requestfinished", lambda request: sent.append(request))
        began = time.perf_counter()
        page.goto(address)
        page.locator("#stage video.front").first.wait_for()
        seconds = time.perf_counter() - began
        page.wait_for_timeout(1000)
        found = [request.sizes() for request in sent if request.url.startswith("http")]
        size = sum(one["responseBodySize"] + one["responseHeadersSize"] for one in found)
        print(
            f"first visit: {len(found)} requests, {size / 1000:.0f} kB, a clip after "
            f"{seconds:.2f} s"
        )
        page.locator("#cards .card").first.click()
        page.locator("#cards .card").first.click()
        page.locator("#board .turn").first.wait_for()
        waited, own = [], []
        for number in range(turns):
            page.evaluate("performance.clearMarks()")
            page.fill("#line", _LINES[number % len(_LINES)])
            page.press("#line", "Enter")
            page.locator("#board .turn").nth(number + 1).wait_for(timeout=120_000)
            page.wait_for_timeout(700)
            marks = (
                "performance.getEntriesByType('mark').map(m => [m.name.slice(0, 4), m.startTime])"
            )
            times = dict(page.evaluate(marks))
            waited.append((times["play"] - times["sent"]) / 1000)
            state = "fetch('/api/v1/games/' + location.hash.slice(6)).then(a => a.json())"
            own.append(page.evaluate(state)["turns"][-1]["seconds"])
        browser.close()
    extra = np.subtract(waited, own)
    print(
        f"from click to clip: median {np.median(waited):.2f} s, the model's own time "
        f"{np.median(own):.2f} s, beyond it {np.median(extra):.2f} s"
    )


@app.command
def picture(*, model: str = "toy", turns: int = 8, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
    """Play turns with a first picture and without one by turns; compare the processor time.

    Args:
        model: Model to play.
        turns: Number of turns of each kind.
        sizes: Numbers of games that are played as one batch.
    """
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.bundle.embedded import model_folder
    from animegamer_jax.devices import keep_compiled_programs
    from animegamer_jax.game.player import Player
    from animegamer_jax.game.turn_output import Preview
    from animegamer_jax.media.sheets import encode_quick

    keep_compiled_programs()
    player = Player.from_bundle(Bundle.open(model_folder(model)))
    for size in sizes:

        def play(first_picture: bool, size: int = size) -> tuple[float, np.ndarray]:
            found: list[bytes] = []

            def encode(guess: Preview) -> None:
                found.extend(encode_quick(frames[0], rows=240) for frames in guess.frames)

            began = time.process_time()
            _, output = player.play_turn(
                player.start(size),
                [_LINES[0]] * size,
                seeds=range(size),
                turn=[1] * size,
                on_frames=encode if first_picture else None,
                by_chunk=False,
            )
            assert len(found) == size * first_picture
            return time.process_time() - began, output.frames

        play(True)
        plain, shown = zip(*((play(False), play(True)) for _ in range(turns)), strict=True)
        assert all((a[1] == b[1]).all() for a, b in zip(plain, shown, strict=True))
        without = np.median([seconds for seconds, _ in plain])
        extra = np.median([b[0] - a[0] for a, b in zip(plain, shown, strict=True)])
        print(
            f"{size} at once: {1000 * without:.0f} ms of processor time a batch, a first picture "
            f"{1000 * extra:.0f} ms more ({extra / without:.1%}); the same frames"
        )


@app.command
def long(*, model: str = "toy", turns: int = 200) -> None:
    """Play one long game.

    Args:
        model: Model to play.
        turns: Number of turns.
    """
    with _serving(model) as (address, process):
        client = _client(address, 0)
        game = client.predict(0, 0, 0, api_name="/new_game")["game"]
        taken, resident = [], []
        for turn in range(turns):
            began = time.perf_counter()
            client.predict(game, _LINES[turn % len(_LINES)], 0, api_name="/play_turn")
            taken.append(time.perf_counter() - began)
            resident.append(read_status("VmRSS", process) / 2**20)
        for name, part in (("5 to 24", slice(4, 24)), (f"last 20 of {turns}", slice(-20, None))):
            print(
                f"turns {name}: median {np.median(taken[part]):.2f} s, memory "
                f"{np.median(resident[part]):.0f} MB"
            )


@app.command
def crowd(*, model: str = "toy", turns: int = 20, games: int = 12, steps: int = 100) -> None:
    """Play turns alone, then next to a client with many long turns.

    Args:
        model: Model to play.
        turns: Number of turns of the player.
        games: Number of games of the other client, each always with a turn.
        steps: Denoising steps of its turns.
    """
    lines = [_LINES[turn % len(_LINES)] for turn in range(turns)]
    ended, flooded = threading.Event(), []

    def flood(address: str, number: int) -> int:
        client, played = _client(address, 255), 0
        game = client.predict(number, 0, steps, api_name="/new_game")["game"]
        flooded.append(game)
        while not ended.is_set():
            with contextlib.suppress(AppError):  # it has too many turns, or was stopped
                client.predict(game, _LINES[0], 0, api_name="/play_turn")
                played += 1
            time.sleep(0.05)
        return played

    with _serving(model) as (address, _), ThreadPoolExecutor(games) as pool:
        _play(address, lines[:2], 0)
        alone = _play(address, lines, 1)
        began = time.perf_counter()
        floods = [pool.submit(flood, address, number) for number in range(games)]
        time.sleep(5.0)
        crowded = _play(address, lines, 2)
        seconds = time.perf_counter() - began
        ended.set()
        for game in flooded:
            _client(address, 255).predict(game, api_name="/stop")
        played = sum(future.result() for future in floods)
    for name, taken in (("alone", alone), ("next to the other", crowded)):
        print(
            f"a turn, {name}: median {np.median(taken):.2f} s, p95 {np.percentile(taken, 95):.2f} s"
        )
    print(
        f"median next to it / alone: {np.median(crowded) / np.median(alone):.2f}; the other played "
        f"{played} turns of {steps} steps, which began in {seconds:.0f} s"
    )


@app.command
def load(*, model: str = "toy", turns: int = 300, players: int = 16) -> None:
    """Play many turns by many players; check that none is lost.

    Args:
        model: Model to play; `fake` for a player without networks, of 0.02 s a step.
        turns: Number of turns of all players together.
        players: Number of players.
    """
    with _serving(model) as (address, process), ThreadPoolExecutor(players) as pool:
        first = _client(address, 0)
        games = [
            _client(address, number).predict(number, 0, 0, api_name="/new_game")["game"]
            for number in range(players)
        ]
        counts = [len(range(number, turns, players)) for number in range(players)]

        def play(number: int) -> list[float]:
            lines = [_LINES[turn % len(_LINES)] for turn in range(counts[number])]
            return _play(address, lines, number, games[number])

        began, resident = time.perf_counter(), []
        found = [pool.submit(play, number) for number in range(players)]
        while not all(future.done() for future in found):
            resident.append(read_status("VmRSS", process) / 2**20)
            time.sleep(1.0)
        seconds = time.perf_counter() - began
        taken = [second for future in found for second in future.result()]
        saved = [len(first.predict(game, api_name="/show")["turns"]) for game in games]
    p50, p95 = np.percentile(taken, (50, 95))
    quarter = len(resident) // 4
    print(
        f"{turns} turns by {players} players in {seconds:.0f} s: p50 {p50:.2f} s, p95 {p95:.2f} s; "
        f"lost {turns - sum(saved)}"
    )
    print(
        f"memory: {resident[0]:.0f} MB at the start, median {np.median(resident[:quarter]):.0f} MB "
        f"in the first quarter, {np.median(resident[-quarter:]):.0f} MB in the last, at most "
        f"{max(resident):.0f} MB"
    )


if __name__ == "__main__":
    app.cli()
