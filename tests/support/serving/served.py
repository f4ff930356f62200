"""Servers for tests, each a process of its own: with the embedded model, or without networks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_player
import pytest
from flags import xla_flags


def serving(games: Path, *options: str, warm_up: bool = False) -> Any:
    """A server of the embedded model, as a user starts it: its address and its process."""
    command = [sys.executable, "-m", "animegamer_jax.cli", "serve", "--port", "0"]
    warm = [] if warm_up else ["--no-warm-up"]
    return started([*command, "--games", str(games), *warm, *options], games)


@contextlib.contextmanager
def started(command: list[str], games: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server, its address and its process."""
    environment = os.environ | {"XLA_FLAGS": xla_flags(), "PYTHONPATH": os.pathsep.join(sys.path)}
    log = games.with_suffix(".log")
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0], process
                break
        else:
            pytest.fail(log.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def serving_fake(games: Path, *options: Any) -> Any:
    """A server of a player without networks (`fake_player`): its address and its process."""
    command = [sys.executable, fake_player.__file__, str(games), *map(str, options)]
    return started(command, games)
