"""Samples to batches: mixed by dataset, fully shuffled, shared among hosts, resumable.

A dataset is a `grain.MapDataset` of single samples (`data/samples.py`). The position in the stream
is one number, so that a checkpoint restores it exactly, on the same or another number of hosts.
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
    """Mixes datasets so that each gives its share of the samples, whatever their lengths.

    An epoch ends where the first dataset would have to repeat itself; the next epoch continues the
    others. Each is shuffled, so that a short epoch is not an excerpt of a long film.

    Raises:
        UserError: A weight is not positive, or the numbers of weights and datasets differ.
    """
    if len(weights) != len(datasets) or not datasets:
        raise UserError(
            f"{len(weights)} weights for {len(datasets)} datasets: expected one for each"
        )
    if bad := [weight for weight in weights if not 0 < weight < float("inf")]:
        raise UserError(f"weight {bad[0]} of a dataset: expected a number above 0")
    if len(datasets) == 1:
        return datasets[0]
    shuffled = [dataset.shuffle(seed=number) for number, dataset in enumerate(datasets)]
    return grain.MapDataset.mix(shuffled, list(weights))


def rows_of_hosts(owners: np.ndarray, *, batch_size: int) -> list[list[int]]:
    """Returns the rows of a batch that each host's devices hold, in ascending order.

    A host's rows need not be adjacent: a mesh follows a slice's interconnect, not its hosts.

    Args:
        owners: Index of the host of each device [parts of the batch, devices that share a part].
        batch_size: Number of samples over all hosts.

    Raises:
        UserError: The parts do not divide the batch, or hosts would have to hold the same rows.
    """
    parts = len(owners)
    if batch_size % parts:
        raise UserError(
            f"a batch of {batch_size}: expected a multiple of {parts}, the devices on the mesh's "
            "data and fsdp axes: change --batch-size or the mesh"
        )
    if (owners != owners[:, :1]).any():
        raise UserError(
            f"{owners.shape[1]} devices share the context and tensor axes: several hosts would "
            "hold the same samples: let each host's devices share them among themselves"
        )
    rows = np.arange(batch_size).reshape(parts, -1)
    return [rows[owners[:, 0] == host].ravel().tolist() for host in np.unique(owners)]


def _rows(mesh: Mesh, *, batch_size: int) -> list[list[int]]:
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    parts = mesh.shape["data"] * mesh.shape["fsdp"]  # the mesh's first two axes
    return rows_of_hosts(hosts.reshape(parts, -1), batch_size=batch_size)


def rows_here(mesh: Mesh, *, batch_size: int) -> list[int]:
    """Returns those rows of `rows_of_hosts` that this host's devices hold."""
    return _rows(mesh, batch_size=batch_size)[jax.process_index()]


def make_iterator(
    dataset: grain.MapDataset[Any],
    *,
    batch_size: int,
    seed: int,
    num_threads: int = 2,
    mesh: Mesh | None = None,
) -> grain.DatasetIterator[Batch]:
    """Returns an endless stream of this host's batches, shuffled again in each epoch.

    With a mesh, the hosts' parts form the batch that one host would have, row by row. A state of
    the iterator restores the position on any number of hosts; `close` ends its reading threads.

    Args:
        dataset: Single samples, each a pytree of arrays of fixed shapes.
        batch_size: Number of samples over all hosts; a host's batches hold its part.
        seed: Seed of the order.
        num_threads: Number of reading threads; at most twice as many batches wait in memory.
        mesh: Mesh on which the batches will be placed; None: each host takes the next piece.

    Raises:
        UserError: The dataset is empty, or the hosts or the mesh do not divide the batch.
    """
    hosts = jax.process_count()
    if len(dataset) == 0:
        raise UserError("the dataset is empty: expected one sample or more")
    if batch_size < 1 or batch_size % hosts:
        raise UserError(
            f"a batch of {batch_size}: expected a positive multiple of the {hosts} hosts: change "
            "--batch-size"
        )
    # Not `shuffle(seed)`: with that, the second epoch of a seed is the first of the next seed.
    stream = dataset.seed(seed).shuffle().repeat(None)
    # Grain's defaults suit tiny records; with clips they would fill the memory.
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * num_threads)
    shards = ShardByJaxProcess(drop_remainder=True)
    if hosts > 1:
        pieces = np.arange(batch_size).reshape(hosts, -1).tolist()
        rows = pieces if mesh is None else _rows(mesh, batch_size=batch_size)
        stream = _ByHost(stream, rows)
    return iter(ElasticIterator(stream, batch_size, shards, read_options=options))


class _ByHost(grain.MapDataset[Any]):
    """Reorders a stream within each batch, for hosts that take every n-th sample.

    Each host then gets the rows that its devices hold: the global batch has the same order as on
    one host, and so the same noise for the same sample.
    """

    def __init__(self, stream: grain.MapDataset[Any], rows: Sequence[Sequence[int]]):
        super().__init__(stream)
        self._order = [row for column in zip(*rows, strict=True) for row in column]

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        batch, row = divmod(index, len(self._order))
        return self._parent[batch * len(self._order) + self._order[row]]


def on_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the hosts' parts as one global batch, sharded over the axes "data" and "fsdp".

    A part holds the rows of `rows_here`, in that order.
    """
    sharding = NamedSharding(mesh, PartitionSpec(_BATCH_AXES))
    num_rows = len(jax.tree.leaves(batch)[0]) * jax.process_count()
    index_here = {row: i for i, row in enumerate(rows_here(mesh, batch_size=num_rows))}

    def one(part: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, stop, _ = index[0].indices(num_rows)
            return part[index_here[first] : index_here[stop - 1] + 1]

        return jax.make_array_from_callback((num_rows, *part.shape[1:]), sharding, piece)

    return jax.tree.map(one, batch)


class PrefetchedBatches:
    """Batches on a mesh, read one ahead.

    Attributes:
        batch: The batch that was read last; None before the first.
        position: State of the iterator before that batch; restoring it gives the batch again.
    """

    def __init__(self, iterator: grain.DatasetIterator[Batch], mesh: Mesh):
        self._iterator, self._mesh = iterator, mesh
        self.batch: Batch = None
        self.position = iterator.get_state()

    def restore(self, position: dict[str, Any]) -> None:
        """Makes the batch at `position` the next one to be read."""
        self._iterator.set_state(position)
        self.batch, self.position = None, position

    def advance(self) -> None:
        """Reads the next batch.

        Raises:
            UserError: A record cannot be read; `position` is the one before it.
        """
        self.position = self._iterator.get_state()
        self.batch = on_mesh(next(self._iterator), self._mesh)

    def close(self) -> None:
        """Ends the reading threads."""
        self._iterator.close()
