"""A real Dask cluster of two workers over TCP, of which one is killed in the middle of its work."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import runner_work

from animegamer_jax.data.films.runners import RunnerOptions, for_each

pytest.importorskip("distributed")

pytestmark = pytest.mark.scale


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[RunnerOptions]:
    """A scheduler and two workers, each a process."""
    folder.mkdir()
    file = folder / "scheduler.json"
    support = os.path.dirname(runner_work.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((support, *sys.path))}

    def start(module: str, *words: object) -> subprocess.Popen[bytes]:
        options = ("--no-dashboard", "--scheduler-file", str(file), *map(str, words))
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{module}", *options],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    one = ("--nworkers", 1, "--nthreads", 1, "--no-nanny", "--local-directory")
    processes = [start("dask_scheduler", "--host", "127.0.0.1", "--port", 0)]
    processes += [start("dask_worker", *one, folder / str(number)) for number in range(2)]
    try:
        deadline = time.monotonic() + 120
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        yield RunnerOptions(runner="dask", beam_options=(f"dask_client_address={address}",))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_killed_worker_loses_nothing(tmp_path):
    (notes := tmp_path / "notes").mkdir()
    with cluster(tmp_path / "cluster") as options:
        assert options.is_on_this_machine
        work = functools.partial(runner_work.note_or_die, folder=notes)
        for_each(range(8), work, options=options, label="notes")
    killed = (notes / "killed").read_text()
    noted = {path.name: path.read_text() for path in notes.iterdir() if path.name != "killed"}
    assert sorted(noted) == list("01234567")
    assert noted["3"] != killed  # the other worker did it
