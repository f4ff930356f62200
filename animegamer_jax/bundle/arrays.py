"""Named arrays in a folder, as Orbax stores a nested dictionary of arrays, or as safetensors files.

Orbax itself writes and reads all arrays of a checkpoint at once, which needs the memory of a whole
network. Here arrays are written one at a time, and read straight to the devices that need them:
Orbax writes the structure of the checkpoint with a scalar in place of each array, and tensorstore
replaces the scalars in Orbax's key-value store.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax.traverse_util import unflatten_dict

from animegamer_jax.bundle.safetensors_files import holds_safetensors, open_tensors
from animegamer_jax.storage.paths import is_bucket

BATCH_BYTES = 1 << 24  # small arrays go together: each commit has a fixed cost
_CHUNK_BYTES = 1 << 26  # size of a chunk on disk, of which a write holds one in memory
_CACHE_BYTES = 1 << 26  # memory of a reader: mostly the index of the store
_CHECKED_BYTES = 1 << 26  # bytes of an array that a checksum copies at a time
_READERS = 4  # arrays that are read to devices at the same time

Packing = Literal["none", "bytes"]
_COMPRESSORS: Mapping[Packing, Any] = {
    "none": None,
    "bytes": {"id": "blosc", "cname": "zstd", "clevel": 9, "shuffle": 1},  # groups equal bytes
}


def write_arrays(
    folder: epath.Path,
    names: Iterable[str],
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    packing: Packing = "none",
) -> None:
    """Writes arrays while holding one of them, or a batch of small ones, in memory.

    It waits for no other host: each host may write a folder of its own.

    Args:
        folder: Must not exist.
        names: Dotted paths of all arrays.
        arrays: Name and values of each, in any order.
        packing: "bytes" takes a quarter off bfloat16 weights on disk, at the cost of a second copy
            in memory of what is being written.
    """
    options: dict[str, Any] = {}
    if jax.process_count() > 1:
        host = jax.process_index()
        options["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
            primary_host=host, active_processes={host}, barrier_sync_key_prefix=f"host{host}"
        )
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler, **options) as checkpointer:
        scalars = unflatten_dict(dict.fromkeys(names, np.zeros(())), sep=".")
        checkpointer.save(folder, args=ocp.args.PyTreeSave(scalars))
    context, batch = ts.Context(), []
    for name, array in arrays:
        batch.append((name, array))
        del array
        if sum(array.nbytes for _, array in batch) >= BATCH_BYTES:
            _write_batch(folder, batch, _COMPRESSORS[packing], context)
            batch.clear()
    _write_batch(folder, batch, _COMPRESSORS[packing], context)


def _write_batch(
    folder: epath.Path, batch: Sequence[tuple[str, np.ndarray]], compressor: Any, context: Any
) -> None:
    stores = _results(
        _open(
            folder,
            name,
            context=context,
            metadata={"compressor": compressor},
            create=True,
            delete_existing=True,
            dtype=array.dtype,
            shape=array.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=_chunk_shape(array)),
        )
        for name, array in batch
    )
    writes = []
    for store, (_, array) in zip(stores, batch, strict=True):
        for box in _chunks(store):
            part = np.asarray(array[box])
            writes.append(store[box].write(part, can_reference_source_data_indefinitely=True))
            if array.nbytes > BATCH_BYTES:  # one chunk at a time
                _results(writes)
                writes.clear()
    _results(writes)


def _chunk_shape(array: np.ndarray) -> tuple[int, ...]:
    """Returns the array's shape, its largest dimensions halved until a chunk is small enough."""
    shape = [max(1, size) for size in array.shape]
    while math.prod(shape) * array.itemsize > max(_CHUNK_BYTES, array.itemsize):
        axis = shape.index(max(shape))
        shape[axis] = -(-shape[axis] // 2)
    return tuple(shape)


def _chunks(store: Any) -> Iterator[tuple[slice, ...]]:
    """Yields the chunks of a store, as indices into it."""
    steps = store.chunk_layout.write_chunk.shape or ()  # None for a scalar
    ranges = (range(0, n, step) for n, step in zip(store.shape, steps, strict=True))
    for start in itertools.product(*ranges):
        ends = (min(i + step, n) for i, step, n in zip(start, steps, store.shape, strict=True))
        yield tuple(map(slice, start, ends))


_Reader = Callable[[Any], np.ndarray]
"""Reads the part of an array with an index; `...` is all of it."""


@runtime_checkable
class StoredArrays(Protocol):
    """The arrays of a folder, not read yet."""

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and stored format of each array by its dotted path."""
        ...

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads arrays as they are stored; small ones together are much faster than one by one."""
        ...

    def readers(self, names: Iterable[str]) -> list[_Reader]:
        """Returns a function for each array that reads a part of it, by its index."""
        ...


@contextlib.contextmanager
def open_folder(folder: epath.Path) -> Iterator[StoredArrays]:
    """Opens a folder of arrays, in either form, for as long as the block runs.

    Raises:
        OSError: A file is damaged or cannot be read.
        UserError: The index of safetensors files is damaged.
    """
    if not holds_safetensors(folder):
        yield _OrbaxArrays(folder)
        return
    with open_tensors(folder) as tensors:
        yield tensors


class _OrbaxArrays:
    """The arrays of a folder that `write_arrays` or Orbax wrote."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._opened: dict[str, Any] = {}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        store = ts.KvStore.open(_kvstore(self._folder), context=self._context).result()
        keys = (key.decode() for key in store.list().result())
        names = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
        return {
            name: jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype)
            for name, store in zip(names, self._stores(names), strict=True)
        }

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        found = _results(store.read() for store in self._stores(names))
        return dict(zip(names, found, strict=True))

    def readers(self, names: Iterable[str]) -> list[_Reader]:
        stores = self._stores(names)
        return [lambda index, store=store: store[index].read().result() for store in stores]

    def _stores(self, names: Iterable[str]) -> list[Any]:
        """Returns the arrays' stores, each opened once."""
        names = list(names)
        new = [name for name in names if name not in self._opened]
        stores = _results(_open(self._folder, name, context=self._context) for name in new)
        self._opened.update(zip(new, stores, strict=True))
        return [self._opened[name] for name in names]


def array_checksum(array: np.ndarray) -> int:
    """Computes the CRC-32 of an array's values in C order, with one copied chunk in memory."""
    found, rows = 0, np.atleast_1d(array)
    step = max(1, _CHECKED_BYTES * len(rows) // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step])
        found = zlib.crc32(part.view(np.uint8).data, found)
    return found


def network_checksum(checksums: Mapping[str, int]) -> str:
    """Returns the checksum of a network: of names and checksums of its arrays."""
    content = json.dumps(sorted(checksums.items())).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def read_checksums(arrays: StoredArrays, names: Sequence[str]) -> dict[str, int]:
    """Reads arrays as they are stored and returns their checksums, with a few in memory."""
    with ThreadPoolExecutor(_READERS) as threads:
        found = threads.map(lambda read: array_checksum(read(...)), arrays.readers(names))
        return dict(zip(names, found, strict=True))


def load_arrays(
    arrays: StoredArrays,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    checksums: dict[str, int] | None = None,
) -> dict[str, jax.Array]:
    """Reads arrays straight to where the wanted shardings place them, in the wanted formats.

    Args:
        arrays: The stored arrays.
        wanted: Shape, format and sharding of each array.
        checksums: Gets the checksum of each array that is read as a whole, if given.
    """

    def load(name: str, read_part: _Reader, like: jax.ShapeDtypeStruct) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            found = read_part(index)
            if checksums is not None and name not in checksums and found.shape == like.shape:
                checksums[name] = array_checksum(found)
            return found.astype(like.dtype, copy=False)

        return jax.make_array_from_callback(like.shape, like.sharding, read)

    with ThreadPoolExecutor(_READERS) as threads:
        found = threads.map(load, wanted, arrays.readers(wanted), wanted.values())
        return dict(zip(wanted, found, strict=True))


def _kvstore(folder: epath.Path, name: str = "") -> dict[str, Any]:
    path = f"{os.fspath(folder)}/"
    base = path if is_bucket(folder) else {"driver": "file", "path": path}
    return {"driver": "ocdbt", "base": base, "path": name}


def _open(folder: epath.Path, name: str, *, metadata: Any = None, **options: Any) -> Any:
    """Opens one array's store; returns the future of it."""
    spec = {
        "driver": "zarr",
        "kvstore": _kvstore(folder, f"{name}/"),
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec | ({"metadata": metadata} if metadata else {}), **options)


def _results(futures: Iterable[Any]) -> list[Any]:
    """Returns the results of all futures; waits for all before it raises an error of one."""
    futures = list(futures)
    for future in futures:
        future.exception()
    return [future.result() for future in futures]
