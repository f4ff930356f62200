"""Samples to batches: mixed by film, shuffled over everything, shared among hosts, resumable.

A data set is a `grain.MapDataset` of single samples (`data/turns.py`). Its place in the stream is
one number, so that a checkpoint restores it exactly, on the same or another number of hosts.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import grain
import jax
import numpy as np
from grain.experimental import ElasticIterator
from grain.sharding import ShardByJaxProcess
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from animegamer_jax.errors import UserError

T = TypeVar("T")
Batch = Any  # a pytree of numpy arrays, or of jax Arrays

_BATCH_AXES = ("data", "fsdp")


def mixture(
    datasets: Sequence[grain.MapDataset[T]], *, weights: Sequence[float]
) -> grain.MapDataset[T]:
    """Films mixed so that each gives its share of the samples, whatever their lengths.

    An epoch ends where the first film would have to repeat itself; the others go on where they
    were in the next one. Each is shuffled, so that a short epoch is no excerpt of a long film.

    Raises:
        UserError: a weight is not positive, or the number of weights is not that of the sets.
    """
    if len(weights) != len(datasets) or not datasets:
        raise UserError(
            f"{len(weights)} weights for {len(datasets)} data sets: expected one for each"
        )
    if bad := [weight for weight in weights if not 0 < weight < float("inf")]:
        raise UserError(f"weight {bad[0]} of a data set: expected a number above 0")
    if len(datasets) == 1:
        return datasets[0]
    shuffled = [dataset.shuffle(seed=number) for number, dataset in enumerate(datasets)]
    return grain.MapDataset.mix(shuffled, list(weights))


class BatchIterator:
    """Batches without end, the samples of this host; see `make_iterator`."""

    def __init__(self, iterator: grain.DatasetIterator[Batch]):
        self._iterator = iterator

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """The place in the stream after the last batch that was taken, as JSON takes it."""
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind the batch after which `state` was got, on any number of hosts."""
        self._iterator.set_state(state)

    def close(self) -> None:
        """Ends the reading threads."""
        self._iterator.close()


def make_iterator(
    dataset: grain.MapDataset[Any], *, batch_size: int, seed: int, num_threads: int = 2
) -> BatchIterator:
    """Batches of a data set, shuffled anew each epoch, without end.

    Args:
        dataset: single samples, each a pytree of arrays of fixed shapes.
        batch_size: over all hosts; the batches of a host have its part.
        seed: of the order.
        num_threads: that read; twice as many batches wait in memory at most.

    Raises:
        UserError: the data set is empty, or the hosts do not divide the batch.
    """
    hosts = jax.process_count()
    if len(dataset) == 0:
        raise UserError("the data set is empty: expected one sample or more")
    if batch_size < 1 or batch_size % hosts:
        raise UserError(
            f"a batch of {batch_size}: expected a positive multiple of the {hosts} hosts: change "
            "--batch-size"
        )
    # Not `shuffle(seed)`: there the second epoch of a seed is the first of the next seed.
    stream = dataset.seed(seed).shuffle().repeat(None)
    # Grain's defaults are for tiny records: they fill the memory with clips.
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * num_threads)
    shards = ShardByJaxProcess(drop_remainder=True)
    return BatchIterator(iter(ElasticIterator(stream, batch_size, shards, read_options=options)))


def on_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """The hosts' parts as one global batch, its rows over the mesh's "data" and "fsdp" axes.

    Raises:
        UserError: the mesh does not divide the batch, or hosts would have to hold the same rows.
    """
    sharding = NamedSharding(mesh, PartitionSpec(_BATCH_AXES))
    shards = mesh.shape["data"] * mesh.shape["fsdp"]

    def place(part: np.ndarray) -> jax.Array:
        rows = len(part) * jax.process_count()
        if rows % shards:
            raise UserError(
                f"a batch of {rows}: expected a multiple of {shards}, the devices on the mesh's "
                "data and fsdp axes: change --batch-size or the mesh"
            )
        shape = (rows, *part.shape[1:])
        spans = sharding.addressable_devices_indices_map(shape).values()
        held = {row for span in spans if span for row in range(*span[0].indices(rows))}
        if len(held) != len(part):
            raise UserError(
                f"mesh {dict(mesh.shape)}: several hosts would hold the same samples: let each "
                "host's devices share the context and tensor axes among themselves"
            )
        return jax.make_array_from_process_local_data(sharding, part, shape)

    return jax.tree.map(place, batch)
