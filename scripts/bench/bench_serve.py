"""Measures the web server: several players at once, and a long game.

    python scripts/bench/bench_serve.py players             # eight games at once and in a row
    python scripts/bench/bench_serve.py long --turns 200    # a long game: seconds a turn, memory

Each command starts a server in a temporary folder and calls its API with `gradio_client`. Other
work on the machine changes the results, so compare only numbers of one run.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gradio_client import Client
from tyro.extras import SubcommandApp

from animegamer_jax.bench.timing import read_status

app = SubcommandApp()
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
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "animegamer_jax.cli", "serve", "--model", model]
        command += ["--port", "0", "--games", str(Path(place) / "games")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            address = next(m[0] for line in process.stdout if (m := re.search(r"http://\S+", line)))
            yield address, process.pid
        finally:
            process.terminate()
            process.wait()


def _play(address: str, lines: Sequence[str], seed: int) -> list[float]:
    """Plays a game; returns the seconds that its player waits for each turn."""
    client = Client(address, verbose=False)
    game = client.predict(seed, 0, 0, api_name="/new_game")["game"]
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


@app.command
def long(*, model: str = "toy", turns: int = 200) -> None:
    """Play one long game.

    Args:
        model: Model to play.
        turns: Number of turns.
    """
    with _serving(model) as (address, process):
        client = Client(address, verbose=False)
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


if __name__ == "__main__":
    app.cli()
