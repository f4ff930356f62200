"""Work shared out by Apache Beam: all of it done, errors told in one line, here and in workers."""

import functools
import os

import beam_work
import pytest

from animegamer_jax.data.beam import Machines, for_each
from animegamer_jax.errors import UserError

pytest.importorskip("apache_beam")


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch):
    here = os.path.dirname(__file__)
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
    here = Machines(workers=3).arguments()
    assert here[1:] == ["--direct_running_mode=multi_processing", "--direct_num_workers=3"]


def test_machines_that_cannot_be():
    with pytest.raises(UserError, match="workers 0: expected 1 or more"):
        Machines(workers=0)
    with pytest.raises(UserError, match="Beam option '--project=mine': expected name=value"):
        Machines(beam_options=("--project=mine",))
    with pytest.raises(UserError, match="runner 'Lathe': Unexpected pipeline runner"):
        for_each([1], beam_work.fail, machines=Machines(runner="Lathe"), label="fail")
