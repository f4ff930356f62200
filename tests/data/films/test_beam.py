"""Work shared out by Apache Beam: all of it done, errors told in one line, here and in workers."""

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
import time

import beam_work
import pytest

from animegamer_jax.data.films import beam
from animegamer_jax.data.films.beam import Machines, for_each
from animegamer_jax.errors import UserError

pytest.importorskip("apache_beam")


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch):
    here = os.path.dirname(beam_work.__file__)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((here, os.environ.get("PYTHONPATH", ""))))


@pytest.mark.parametrize("workers", [1, 2])
def test_every_item_is_done(tmp_path, workers, capfd):
    told = []
    for_each(
        range(6),
        functools.partial(beam_work.note, folder=tmp_path),
        machines=Machines(workers=workers),
        label="note",
        done=lambda: len(list(tmp_path.iterdir())),
        on_progress=lambda *now: told.append(now),
    )
    processes = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(processes) == list("012345")
    assert len(set(processes.values())) == workers
    assert (os.getpid() in processes.values()) == (workers == 1)
    assert told[0] == ("note", 0, 6)
    assert told[-1] == ("note", 6, 6)
    within = {what for what, _, _ in told} - {"note"}
    assert within == ({f"item {number}" for number in range(6)} if workers == 1 else set())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_users_mistake_is_one_line(workers, capfd):
    with pytest.raises(UserError) as caught:
        for_each([3], beam_work.refuse, machines=Machines(workers=workers), label="refuse")
    assert str(caught.value) == "film 3: expected a film [of any kind], found none: check it"
    assert capfd.readouterr().err == ""


def test_a_mistake_of_ours_is_not_hidden():
    with pytest.raises(ArithmeticError, match="a mistake of ours with 3"):
        for_each([3], beam_work.fail, machines=Machines(), label="fail")


def test_nothing_to_do():
    for_each([], beam_work.fail, machines=Machines(runner="None"), label="nothing")


def test_what_the_runner_is_told():
    there = Machines(runner="DataflowRunner", beam_options=("project=mine", "region=europe-west4"))
    assert there.arguments() == [
        "--runner=DataflowRunner",
        "--project=mine",
        "--region=europe-west4",
    ]
    for name in ("DirectRunner", "directrunner", "Direct"):
        here = Machines(runner=name, workers=3).arguments()
        assert here[0].endswith(".FnApiRunner")
        assert here[1:] == ["--direct_running_mode=multi_processing", "--direct_num_workers=3"]


def test_this_machine_s_work_fetches_no_runner(tmp_path, monkeypatch):
    from apache_beam.runners.portability.prism_runner import PrismJobServer

    asked = []
    monkeypatch.setattr(PrismJobServer, "_get_executable_path", asked.append)
    work = functools.partial(beam_work.note, folder=tmp_path)
    for_each([1], work, machines=Machines(runner="directrunner"), label="note")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert asked == []


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_is_ended_ends_the_work(tmp_path, capfd):
    work = functools.partial(beam_work.die, folder=tmp_path)
    with pytest.raises(UserError, match=r"a worker was ended \(137: out of memory\?\): run again"):
        for_each(range(6), work, machines=Machines(workers=2), label="die")
    noted = [int(path.name) for path in tmp_path.iterdir() if path.name != "first"]
    assert len(noted) == 1
    assert not is_running(noted[0])
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_the_workers_quietly(tmp_path):
    code = (
        "import functools, pathlib, sys, beam_work\n"
        "from animegamer_jax.data.films.beam import Machines, for_each\n"
        "work = functools.partial(beam_work.wait, folder=pathlib.Path(sys.argv[1]))\n"
        "try:\n"
        "    for_each(range(6), work, machines=Machines(workers=2), label='wait')\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(noted := list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert told == (b"stopped\n", b"")
    assert [is_running(int(path.name)) for path in noted] == [False, False]


def test_progress_counts_what_was_done_before_and_survives_a_bucket_s_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(beam, "_LOOK_EVERY", 0.01)
    counts = iter([4])

    def done() -> int:
        for count in counts:
            return count
        raise OSError("the bucket is away")

    told = []
    for_each(
        range(6),
        functools.partial(beam_work.note, folder=tmp_path),
        machines=Machines(),
        label="note",
        done=done,
        on_progress=lambda *now: told.append(now),
    )
    assert [now for now in told if now[0] == "note"] == [("note", 4, 6), ("note", 6, 6)]


def test_machines_that_cannot_be():
    with pytest.raises(UserError, match="workers 0: expected 1 or more"):
        Machines(workers=0)
    with pytest.raises(UserError, match="Beam option '--project=mine': expected name=value"):
        Machines(beam_options=("--project=mine",))


@pytest.mark.parametrize(
    ("runner", "options", "message"),
    [
        ("Lathe", (), "runner 'Lathe': Unexpected pipeline runner"),
        ("DirectRunner", ("proyect=mine",), "option 'proyect': unknown .*: did you mean project?"),
        ("DataflowRunner", ("zzz=1",), "option 'zzz': unknown to runner DataflowRunner: leave it"),
        ("FlinkRunner", ("flink_mastr=x",), "'flink_mastr': unknown .* did you mean flink_master"),
        ("DataflowRunner", ("project=mine-1",), "'DataflowRunner': .*Missing required option: reg"),
        ("DataflowRunner", ("num_workers=x",), "argument --num_workers: invalid int value: 'x'"),
        ("PortableRunner", (), "runner 'PortableRunner': You must specify a --job_endpoint"),
    ],
)
def test_what_is_wrong_with_a_runner_is_one_line(runner, options, message, capfd):
    machines = Machines(runner=runner, beam_options=options)
    with pytest.raises(UserError, match=message) as caught:
        for_each([1], beam_work.fail, machines=machines, label="fail")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_runner_s_library_that_is_missing_is_named():
    with contextlib.suppress(ImportError):
        importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
        pytest.skip("the library is there")
    options = ("project=mine-1", "region=europe-west4", "temp_location=gs://bucket/tmp")
    machines = Machines(runner="DataflowRunner", beam_options=options)
    with pytest.raises(UserError, match=r"pip install 'animegamer-jax\[dataflow\]'"):
        for_each([1], beam_work.fail, machines=machines, label="fail")
