"""Work for many items on this machine: all of it is done, and its errors are one line."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runner_work

from animegamer_jax.data.films.runners import RunnerOptions, for_each
from animegamer_jax.errors import UserError
from animegamer_jax.progress import no_progress


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("workers", [1, 2])
def test_every_item_is_done(tmp_path, workers, capfd):
    reported = []
    for_each(
        range(6),
        functools.partial(runner_work.note, folder=tmp_path),
        options=RunnerOptions(workers=workers),
        label="notes",
        on_progress=lambda *now: reported.append(now),
    )
    processes = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(processes) == list("012345")
    assert len(set(processes.values())) == workers
    assert (os.getpid() in processes.values()) == (workers == 1)
    assert reported == [("notes", number, 6) for number in range(7)]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_users_mistake_is_one_line(workers, capfd):
    options = RunnerOptions(workers=workers)
    with pytest.raises(UserError) as caught:
        for_each([3], runner_work.refuse, options=options, label="refuse")
    assert str(caught.value) == "film 3: expected a film [of any kind], found none: check it"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_of_ours_is_not_hidden(workers):
    options = RunnerOptions(workers=workers)
    with pytest.raises(ArithmeticError, match="a mistake of ours with 3"):
        for_each([3], runner_work.fail, options=options, label="fail")


def test_nothing_to_do():
    for_each([], runner_work.fail, options=RunnerOptions(runner="None"), label="nothing")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (runner_work.refuse_next_to_others, "film 0: expected a film"),
        (runner_work.die, "a worker process died, probably out of memory: run the same"),
    ],
)
def test_the_first_error_ends_all_workers(tmp_path, work, message, capfd):
    with pytest.raises(UserError, match=message):
        for_each(
            range(6),
            functools.partial(work, folder=tmp_path),
            options=RunnerOptions(workers=2),
            label="work",
        )
    waiting = [int(path.name) for path in tmp_path.iterdir()]
    assert waiting
    assert not any(map(is_running, waiting))
    assert capfd.readouterr().err == ""


CODE = """
import functools, pathlib, sys, runner_work
from animegamer_jax.data.films.runners import RunnerOptions, for_each
work = functools.partial(runner_work.wait, folder=pathlib.Path(sys.argv[1]))
try:
    for_each(range(6), work, options=RunnerOptions(workers=2), label='wait')
except KeyboardInterrupt:
    print('stopped')
"""


def started(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    """A process with two workers that wait, and the workers' ids."""
    support = os.path.dirname(runner_work.__file__)
    path = os.pathsep.join((support, os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    deadline = time.monotonic() + 60
    while len(noted := list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, [int(path.name) for path in noted]


@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c_ends_the_workers_quietly(tmp_path, to_all):
    process, workers = started(tmp_path)
    try:
        if to_all:  # as a terminal does
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        reported = process.communicate(timeout=30)
    finally:
        process.kill()
    assert reported == (b"stopped\n", b"")
    assert len(workers) == 2
    assert not any(map(is_running, workers))


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    process, workers = started(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not any(map(is_running, workers))


def test_options_that_cannot_be():
    with pytest.raises(UserError, match="workers 0: expected 1 or more"):
        RunnerOptions(workers=0)
    with pytest.raises(UserError, match="Beam option '--project=mine': expected name=value"):
        RunnerOptions(runner="DataflowRunner", beam_options=("--project=mine",))
    with pytest.raises(UserError, match="'project=mine': runner local takes none: name a Beam run"):
        RunnerOptions(beam_options=("project=mine",))


def test_names_of_this_machine():
    for name in ("local", "DirectRunner", "directrunner", "Direct"):
        assert RunnerOptions(runner=name).reporting(print) is print
        assert RunnerOptions(runner=name, workers=2).is_local
        assert RunnerOptions(runner=name, workers=2).reporting(print) is no_progress
    assert not RunnerOptions(runner="FlinkRunner").is_local


def test_short_names_of_runners():
    names = ("dask", "DaskRunner", "Flink", "spark", "dataflow", "portable", "my.Runner", "Lathe")
    assert [RunnerOptions(runner=name).beam_runner for name in names] == [
        "DaskRunner", "DaskRunner", "FlinkRunner", "SparkRunner", "DataflowRunner",
        "PortableRunner", "my.Runner", "Lathe",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runner", "options", "is_here"),
    [
        ("local", (), True),
        ("dask", (), True),  # Dask starts workers on this machine
        ("DaskRunner", ("dask_client_address=tcp://127.0.0.1:8786",), True),
        ("dask", ("dask_client_address=tcp://10.0.0.1:8786",), False),
        ("dask", ("dask_scheduler_file=/shared/scheduler.json",), False),
        ("flink", ("flink_master=localhost:8081",), False),
    ],
)
def test_runners_whose_workers_are_on_this_machine(runner, options, is_here):
    assert RunnerOptions(runner=runner, beam_options=options).is_on_this_machine == is_here


def test_this_machine_needs_no_beam(tmp_path):
    code = (
        "import sys; sys.modules['apache_beam'] = None\n"
        "from animegamer_jax.cli import main\n"
        "sys.exit(main(['data', 'films', sys.argv[1], '--out', sys.argv[2], *sys.argv[3:]]))"
    )
    (tmp_path / "film.mp4").write_bytes(b"no film")
    words = [sys.executable, "-c", code, str(tmp_path / "film.mp4"), str(tmp_path / "shots")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, "1 films skipped" in done.stdout) == (2, True), done
    words += ["--runner", "FlinkRunner"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs apache_beam, which is not installed: pip install -e '.[beam]'" in done.stderr
