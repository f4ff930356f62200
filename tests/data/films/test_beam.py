"""Work shared out by Apache Beam: all of it is done, and its errors are one line."""

import contextlib
import functools
import importlib
import os
import sys

import pytest
import runner_work
from etils import epath
from job_service import job_service

from animegamer_jax.data.films.runners import RunnerOptions, for_each
from animegamer_jax.errors import UserError

JavaJarServer = pytest.importorskip("apache_beam.utils.subprocess_server").JavaJarServer
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
        ("portable", (), "runner 'PortableRunner': You must specify a --job_endpoint"),
        (
            "Portable",
            ("job_endpoint=localhost:1", "job_server_timeout=1"),
            "'PortableRunner': no job server answers at localhost:1: start it, or check job_end",
        ),
        ("dask", ("dask_client_adress=x",), "'dask_client_adress': .*mean dask_client_address"),
        (
            "dask",
            ("dask_client_address=tcp://127.0.0.1:1", "dask_connection_timeout=1"),
            "runner 'DaskRunner': Timed out trying to connect to tcp://127.0.0.1:1",
        ),
        ("lathe.Runner", (), "runner 'lathe.Runner': No module named 'lathe': install what it ne"),
    ],
)
def test_what_is_wrong_with_a_runner_is_one_line(runner, options, message, capfd):
    chosen = RunnerOptions(runner=runner, beam_options=options)
    with pytest.raises(UserError, match=message) as caught:
        for_each([1], runner_work.fail, options=chosen, label="fail")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("runner", ["flink", "SparkRunner"])
def test_a_job_server_that_cannot_be_had_is_one_line(runner, monkeypatch):
    def local_jar(*_: object, **__: object) -> str:
        raise RuntimeError("Unable to fetch remote job server jar at https://x: <urlopen error>")

    monkeypatch.setattr(JavaJarServer, "local_jar", local_jar)
    with pytest.raises(UserError, match="--runner portable --beam-options job_endpoint=HOST:PORT"):
        for_each([1], runner_work.fail, options=RunnerOptions(runner=runner), label="fail")


def test_dask_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    with pytest.raises(UserError, match=r"pip install .*\[dask\]'"):
        for_each([1], runner_work.fail, options=RunnerOptions(runner="dask"), label="fail")


def test_a_job_server_that_answers(tmp_path):
    with job_service() as beam_options:
        options = RunnerOptions(runner="portable", beam_options=beam_options)
        note = functools.partial(runner_work.note, folder=tmp_path)
        for_each(range(3), note, options=options, label="notes")
        assert sorted(os.listdir(tmp_path)) == list("012")
        with pytest.raises(UserError, match=r"^film 3: expected a film .*, found none: check it$"):
            for_each([3], runner_work.refuse, options=options, label="refuse")


def test_a_runner_s_library_that_is_missing_is_named(monkeypatch):
    with contextlib.suppress(ImportError):
        importlib.import_module("apache_beam.runners.dataflow.internal.apiclient")
        pytest.skip("the library is there")
    options = ("project=mine-1", "region=europe-west4", "temp_location=gs://bucket/tmp")
    chosen = RunnerOptions(runner="DataflowRunner", beam_options=options)
    # It asks the bucket's server, and without a network again and again for five minutes.
    monkeypatch.setattr(
        "apache_beam.options.pipeline_options.GoogleCloudOptions"
        "._warn_if_soft_delete_policy_enabled",
        lambda *arguments: None,
    )
    with pytest.raises(UserError, match=r"pip install -e '\.\[dataflow\]'"):
        for_each([1], runner_work.fail, options=chosen, label="fail")
