"""Work shared out by Apache Beam: all of it is done, and its errors are one line."""

import contextlib
import functools
import importlib
import os

import pytest
import runner_work
from etils import epath

from animegamer_jax.data.films.runners import RunnerOptions, for_each
from animegamer_jax.errors import UserError

beam = pytest.importorskip("animegamer_jax.data.films.beam", exc_type=ImportError)

# Beam's runner for this machine, which the command does not use, in place of a cluster.
IN_MEMORY = RunnerOptions(runner="apache_beam.runners.portability.fn_api_runner.FnApiRunner")
PROCESSES = RunnerOptions(
    runner=IN_MEMORY.runner,
    beam_options=("direct_running_mode=multi_processing", "direct_num_workers=2"),
)


def test_every_item_is_done(tmp_path, capfd):
    reported = []
    for_each(
        range(6),
        functools.partial(runner_work.note, folder=tmp_path),
        options=IN_MEMORY,
        label="notes",
        count_done=lambda: len(list(tmp_path.iterdir())),
        on_progress=lambda *now: reported.append(now),
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == list("012345")
    assert (reported[0], reported[-1]) == (("notes", 0, 6), ("notes", 6, 6))
    assert capfd.readouterr().err == ""


@pytest.fixture
def workers_find_the_tests(monkeypatch):
    support = os.path.dirname(runner_work.__file__)
    path = os.pathsep.join((support, os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.usefixtures("workers_find_the_tests")
def test_films_may_have_any_name(tmp_path):
    name = os.fsdecode(b"M\xf6we\n1.mp4")
    touch = functools.partial(runner_work.touch, folder=tmp_path)
    for_each([epath.Path(f"/films/{name}")], touch, options=PROCESSES, label="films")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.usefixtures("workers_find_the_tests")
def test_a_worker_s_user_error_comes_back():
    with pytest.raises(UserError) as caught:
        for_each([3], runner_work.refuse, options=PROCESSES, label="refuse")
    assert str(caught.value) == "film 3: expected a film [of any kind], found none: check it"


def test_a_mistake_of_ours_is_not_hidden():
    with pytest.raises(ArithmeticError, match="a mistake of ours with 3"):
        for_each([3], runner_work.fail, options=IN_MEMORY, label="fail")


def test_progress_counts_what_was_done_before_and_survives_a_bucket_s_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(beam, "_REPORT_EVERY", 0.01)
    counts = iter([4])

    def count_done() -> int:
        for count in counts:
            return count
        raise OSError("the bucket is away")

    reported = []
    for_each(
        range(6),
        functools.partial(runner_work.note, folder=tmp_path),
        options=IN_MEMORY,
        label="notes",
        count_done=count_done,
        on_progress=lambda *now: reported.append(now),
    )
    assert reported == [("notes", 4, 6), ("notes", 6, 6)]


@pytest.mark.parametrize(
    ("runner", "options", "message"),
    [
        ("Lathe", (), "runner 'Lathe': Unexpected pipeline runner"),
        ("Lathe", ("proyect=mine",), "option 'proyect': unknown .*: did you mean project?"),
        ("DataflowRunner", ("zzz=1",), "option 'zzz': unknown to runner DataflowRunner: leave it"),
        ("FlinkRunner", ("flink_mastr=x",), "'flink_mastr': unknown .* did you mean flink_master"),
        ("DataflowRunner", ("project=mine-1",), "'DataflowRunner': .*Missing required option: reg"),
        ("DataflowRunner", ("num_workers=x",), "argument --num_workers: invalid int value: 'x'"),
        ("PortableRunner", (), "runner 'PortableRunner': You must specify a --job_endpoint"),
    ],
)
def test_what_is_wrong_with_a_runner_is_one_line(runner, options, message, capfd):
    chosen = RunnerOptions(runner=runner, beam_options=options)
    with pytest.raises(UserError, match=message) as caught:
        for_each([1], runner_work.fail, options=chosen, label="fail")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_runner_s_library_that_is_missing_is_named():
    with contextlib.suppress(ImportError):
        importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
        pytest.skip("the library is there")
    options = ("project=mine-1", "region=europe-west4", "temp_location=gs://bucket/tmp")
    chosen = RunnerOptions(runner="DataflowRunner", beam_options=options)
    with pytest.raises(UserError, match=r"pip install -e '\.\[dataflow\]'"):
        for_each([1], runner_work.fail, options=chosen, label="fail")
