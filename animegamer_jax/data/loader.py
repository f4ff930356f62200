"""Samples to batches: mixed by film, shuffled over everything, shared among hosts, resumable.

A data set is a `grain.MapDataset` of single samples (`data/samples.py`). Its place in the stream is
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


def rows_of_hosts(owners: np.ndarray, *, batch_size: int) -> list[list[int]]:
    """Which rows of a batch lie on which host's devices, host by host, rising.

    A host's rows need not be neighbours: a mesh follows a slice's links and not its hosts.

    Args:
        owners: the hosts' numbers [parts of the batch, devices that share such a part].
        batch_size: over all hosts.

    Raises:
        UserError: the parts do not divide the batch, or hosts would have to hold the same rows.
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
    """The rows of a batch over all hosts that lie on this host's devices, rising.

    Raises:
        UserError: as `rows_of_hosts`.
    """
    return _rows(mesh, batch_size=batch_size)[jax.process_index()]


def make_iterator(
    dataset: grain.MapDataset[Any],
    *,
    batch_size: int,
    seed: int,
    num_threads: int = 2,
    mesh: Mesh | None = None,
) -> BatchIterator:
    """Batches of a data set, shuffled anew each epoch, without end.

    With a mesh the hosts' parts make the batch that one host would have, row by row.

    Args:
        dataset: single samples, each a pytree of arrays of fixed shapes.
        batch_size: over all hosts; the batches of a host have its part.
        seed: of the order.
        num_threads: that read; twice as many batches wait in memory at most.
        mesh: on whose devices the batches will lie; None: each host takes the next piece.

    Raises:
        UserError: the data set is empty, or the hosts or the mesh do not divide the batch.
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
    if hosts > 1:
        pieces = np.arange(batch_size).reshape(hosts, -1).tolist()
        rows = pieces if mesh is None else _rows(mesh, batch_size=batch_size)
        stream = _ByHost(stream, rows)
    return BatchIterator(iter(ElasticIterator(stream, batch_size, shards, read_options=options)))


class _ByHost(grain.MapDataset[Any]):
    """A stream in another order inside of each batch, for hosts that take every n-th sample.

    Each host so gets the rows of the batch that lie on its devices: the batch over all hosts has
    the order that it has on one, and with it the same noise for the same sample.
    """

    def __init__(self, stream: grain.MapDataset[Any], rows: Sequence[Sequence[int]]):
        super().__init__(stream)
        self._order = [row for column in zip(*rows, strict=True) for row in column]

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        batch, place = divmod(index, len(self._order))
        return self._parent[batch * len(self._order) + self._order[place]]


def on_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """The hosts' parts as one global batch, its rows over the mesh's "data" and "fsdp" axes.

    A part holds the rows of `rows_here`, in that order.

    Raises:
        UserError: the mesh does not divide the batch, or hosts would have to hold the same rows.
    """
    sharding = NamedSharding(mesh, PartitionSpec(_BATCH_AXES))
    num_rows = len(jax.tree.leaves(batch)[0]) * jax.process_count()
    place = {row: i for i, row in enumerate(rows_here(mesh, batch_size=num_rows))}

    def one(part: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, stop, _ = index[0].indices(num_rows)
            return part[place[first] : place[stop - 1] + 1]

        return jax.make_array_from_callback((num_rows, *part.shape[1:]), sharding, piece)

    return jax.tree.map(one, batch)
