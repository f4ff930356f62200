"""A real Dask cluster of two workers over TCP, of which one is killed in the middle of its work."""

import functools

import pytest
import runner_work
from dask_cluster import dask_cluster

from animegamer_jax.data.films.runners import RunnerOptions, for_each

pytest.importorskip("distributed")

pytestmark = pytest.mark.scale


def test_a_killed_worker_loses_nothing(tmp_path):
    (notes := tmp_path / "notes").mkdir()
    with dask_cluster(tmp_path / "cluster") as (address, _):
        options = RunnerOptions(runner="dask", beam_options=(f"dask_client_address={address}",))
        assert options.is_on_this_machine
        work = functools.partial(runner_work.note_or_die, folder=notes)
        for_each(range(8), work, options=options, label="notes")
    killed = (notes / "killed").read_text()
    noted = {path.name: path.read_text() for path in notes.iterdir() if path.name != "killed"}
    assert sorted(noted) == list("01234567")
    assert noted["3"] != killed  # the other worker did it
