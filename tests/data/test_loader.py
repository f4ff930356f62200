"""Batches: everything once an epoch, films by weight, exact restoring, on hosts and meshes."""

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys

import grain
import jax
import numpy as np
import pytest
from flags import xla_flags
from numbered import Number, numbers, take
from tiny_sets import NUM_FRAMES, frames_of, make_tokenizer, turns_of, write_games

from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.loader import (
    make_iterator,
    mixture,
    on_mesh,
    rows_of_hosts,
)
from animegamer_jax.data.samples import caption_samples
from animegamer_jax.errors import UserError
from animegamer_jax.sharding import make_mesh


def same(first: list, second: list) -> bool:
    leaves = jax.tree.leaves(first), jax.tree.leaves(second)
    return all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    with contextlib.closing(make_iterator(numbers(24), batch_size=6, seed=3)) as batches:
        epochs = [np.concatenate([b.number for b in take(batches, 4)]) for _ in range(3)]
        assert next(batches).number.shape == (6,)
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(24))}) == 4
    with contextlib.closing(make_iterator(numbers(24), batch_size=6, seed=4)) as batches:
        other = np.concatenate([b.number for b in take(batches, 4)])
    assert tuple(other) not in {tuple(epoch) for epoch in epochs}


def test_what_is_random_is_drawn_again_each_epoch():
    with contextlib.closing(make_iterator(numbers(8), batch_size=8, seed=0)) as batches:
        drawn = [
            dict(zip(b.number.tolist(), b.drawn.tolist(), strict=True)) for b in take(batches, 3)
        ]
    assert len({d[5] for d in drawn}) == 3


@pytest.mark.parametrize("taken", [0, 1, 5, 11])
def test_restores_in_the_middle(taken):
    with contextlib.closing(make_iterator(numbers(10), batch_size=4, seed=1)) as batches:
        take(batches, taken)
        state = json.loads(json.dumps(batches.get_state()))
        expected = take(batches, 7)
        batches.set_state(state)
        assert same(take(batches, 7), expected)
    with contextlib.closing(
        make_iterator(numbers(10), batch_size=4, seed=1, num_threads=1)
    ) as fresh:
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert same(take(fresh, 7), expected)
    assert not same(expected[:1], expected[1:2])


def test_real_clips_restore_in_the_middle(tmp_path):
    games = open_games(write_games(tmp_path / "games", {"train": 2}))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    samples = caption_samples(games, split="train", tokenizer=tokenizer, length=6)
    with contextlib.closing(make_iterator(samples, batch_size=4, seed=1)) as batches:
        take(batches, 2)
        state = batches.get_state()
        expected = take(batches, 3)
        batches.set_state(state)
        assert same(take(batches, 3), expected)
    clips = [frames_of(turn) for turn in turns_of(2)]
    known = {clip[k].tobytes() for clip in clips for k in range(NUM_FRAMES)}
    assert all(frame.tobytes() in known for batch in expected for frame in batch.frame)


def test_films_are_mixed_by_weight():
    mixed = mixture([numbers(30, film=0), numbers(500, film=1)], weights=[1.0, 3.0])
    assert len(mixed) == 120
    seen = collections.defaultdict(set)
    with contextlib.closing(make_iterator(mixed, batch_size=40, seed=2)) as batches:
        counts = collections.Counter()
        for batch in take(batches, 30):
            counts.update(batch.film.tolist())
            for film, number in zip(batch.film.tolist(), batch.number.tolist(), strict=True):
                seen[film].add(number)
    assert counts == {0: 300, 1: 900}
    assert seen[0] == set(range(30))
    assert seen[1] == set(range(500))  # a long film continues where it was


def test_an_epoch_of_a_mixture_is_no_excerpt_of_a_long_film():
    mixed = mixture([numbers(10, film=0), numbers(1000, film=1)], weights=[1.0, 1.0])
    first = [int(mixed[k].number) for k in range(len(mixed)) if mixed[k].film == 1]
    assert len(first) == 10
    assert max(first) > 300


def test_one_film_stays_in_order():
    alone = mixture([numbers(4)], weights=[2.0])
    assert [int(alone[k].number) for k in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("count", "weights", "message"),
    [
        (2, [1.0], "1 weights for 2 datasets"),
        (0, [], "0 weights for 0 datasets"),
        (2, [1.0, 0.0], "weight 0.0 of a dataset: expected a number above 0"),
        (1, [-1.0], "weight -1.0"),
        (2, [1.0, float("nan")], "weight nan"),
    ],
)
def test_weights_that_cannot_be(count, weights, message):
    with pytest.raises(UserError, match=message):
        mixture([numbers(4)] * count, weights=weights)


@pytest.mark.parametrize("batch_size", [0, -2])
def test_batches_that_cannot_be(batch_size):
    with pytest.raises(UserError, match=f"a batch of {batch_size}: expected a positive multiple"):
        make_iterator(numbers(4), batch_size=batch_size, seed=0)


def test_no_samples():
    with pytest.raises(UserError, match="the dataset is empty"):
        make_iterator(numbers(0), batch_size=2, seed=0)


def test_a_bad_record_is_reported_by_the_iterator():
    def fail(number: int) -> np.ndarray:
        if number == 3:
            raise UserError("game 3: broken")
        return np.asarray(number)

    samples = grain.MapDataset.range(4).map(fail)
    with (
        contextlib.closing(make_iterator(samples, batch_size=2, seed=0)) as batches,
        pytest.raises(UserError, match="game 3: broken"),
    ):
        take(batches, 2)


# On a mesh


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_rows_are_shared_among_devices(shape):
    mesh = make_mesh(shape)
    batch = Number(*(np.arange(8, dtype=np.int32) + k for k in range(3)))
    placed = on_mesh(batch, mesh)
    assert same([placed], [batch])
    rows = 8 // (shape["data"] * shape.get("fsdp", 1))
    assert {s.data.shape for s in placed.number.addressable_shards} == {(rows,)}
    assert placed.number.sharding.is_equivalent_to(placed.film.sharding, 1)


def test_a_batch_that_the_mesh_does_not_divide():
    batch = np.zeros((6, 2), np.float32)
    with pytest.raises(UserError, match="a batch of 6: expected a multiple of 4, the devices on"):
        on_mesh(batch, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))


# On hosts


def test_rows_follow_the_meshs_order():
    """The hosts of a v5e:4x4 slice as a mesh of four times four has them."""
    owners = np.array([0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0])
    rows = rows_of_hosts(owners[:, None], batch_size=32)
    assert rows[0] == [0, 1, 2, 3, 12, 13, 30, 31]
    assert rows[3] == list(range(16, 24))
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(32))
    shared = rows_of_hosts(owners[::2].reshape(-1, 1).repeat(2, 1), batch_size=8)
    assert shared == [[0, 3], [1, 2], [6, 7], [4, 5]]
    with pytest.raises(UserError, match="2 devices share the context and tensor axes: several"):
        rows_of_hosts(owners.reshape(8, 2), batch_size=32)


HOST = """
import sys, json
import jax
port, host, taken = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, host)
import contextlib
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from animegamer_jax.data.loader import make_iterator, on_mesh
from animegamer_jax.errors import UserError
from animegamer_jax.sharding import MESH_AXES, make_mesh
from numbered import numbers, take
order = np.array(jax.devices())[[0, 2, 3, 1]]  # hosts 0 1 1 0, as a slice's links may have it
mesh = Mesh(order.reshape(2, 2, 1, 1), MESH_AXES)
with contextlib.closing(make_iterator(numbers(40), batch_size=8, seed=6, mesh=mesh)) as batches:
    first = on_mesh(next(batches), mesh)
    seen = multihost_utils.process_allgather(first, tiled=True)
with contextlib.closing(make_iterator(numbers(40), batch_size=8, seed=6)) as batches:
    mine = [np.stack(batch) for batch in take(batches, taken)]
    part = next(batches)
    whole = on_mesh(part, make_mesh({"data": 4}))
    sums = jax.jit(lambda batch: jax.tree.map(lambda x: x.sum(), batch))(whole)
    sums = [int(x) for x in sums]
    state = batches.get_state()
try:
    make_iterator(numbers(40), batch_size=7, seed=6)
    refused = ""
except UserError as error:
    refused = str(error)
try:
    on_mesh(part, make_mesh({"tensor": 4}))
    shared = ""
except UserError as error:
    shared = str(error)
seen = np.stack(seen).tolist()
parts = [np.stack(mine).tolist(), np.stack(part).tolist()]
print(json.dumps([*parts, sums, state, refused, shared, seen]))
"""


def test_two_hosts_share_what_one_goes_on_with():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["XLA_FLAGS"] = xla_flags(2)
    taken = 7
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, port, str(host), str(taken)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    outputs = [json.loads(host.communicate(timeout=120)[0].splitlines()[-1]) for host in hosts]
    assert outputs[0][2:5] == outputs[1][2:5]
    state, refused, shared, seen = outputs[0][3:]
    assert "a batch of 7: expected a positive multiple of the 2 hosts" in refused
    assert "several hosts would hold the same samples" in shared

    with contextlib.closing(make_iterator(numbers(40), batch_size=8, seed=6)) as batches:
        expected = take(batches, taken + 1)
        after = take(batches, 4)
        batches.set_state(state)  # of two hosts, on one
        assert same(take(batches, 4), after)
    parts = [np.array([*t[0], t[1]]) for t in outputs]  # a host: step, field, sample
    assert all(part.shape == (taken + 1, 3, 4) for part in parts)
    for step, batch in enumerate(expected):
        shared_out = np.concatenate([part[step] for part in parts], axis=1)
        np.testing.assert_array_equal(shared_out, np.stack(batch))
    assert outputs[0][2] == [int(field.sum()) for field in expected[-1]]
    np.testing.assert_array_equal(seen, np.stack(expected[0]))  # hosts' rows are no neighbours
