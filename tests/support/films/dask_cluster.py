"""A real Dask cluster of two workers over TCP, each a process that a test may kill."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import runner_work


@contextlib.contextmanager
def dask_cluster(
    folder: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a scheduler, and its two workers."""
    folder.mkdir()
    file = folder / "scheduler.json"
    support = os.path.dirname(runner_work.__file__)
    environment = {**environment, "PYTHONPATH": os.pathsep.join((support, *sys.path))}

    def start(module: str, *words: object) -> subprocess.Popen[bytes]:
        options = ("--no-dashboard", "--scheduler-file", str(file), *map(str, words))
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{module}", *options],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    one = ("--nworkers", 1, "--nthreads", 1, "--no-nanny", "--local-directory")
    scheduler = start("dask_scheduler", "--host", "127.0.0.1", "--port", 0)
    workers = [start("dask_worker", *one, folder / str(number)) for number in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield json.loads(file.read_text())["address"], workers
    finally:
        for process in (scheduler, *workers):
            process.kill()
            process.wait()
