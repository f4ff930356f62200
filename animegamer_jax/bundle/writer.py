"""Writing a bundle: all of it or nothing, one parameter in memory at a time."""

import collections
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint import future

from animegamer_jax.bundle.config import (
    FORMAT_VERSION,
    BundleConfig,
    Placement,
    Weights,
    to_json,
    with_dtypes,
)
from animegamer_jax.bundle.networks import NetworkName, abstract_params
from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER, copy_tokenizer_folder
from animegamer_jax.configs import Dtype, ModelConfig, NetworkConfig
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol
from animegamer_jax.storage.paths import (
    absolute,
    move_into_place,
    one_host,
    refuse_existing,
    telling,
)
from animegamer_jax.storage.serialization import nested

_BATCH_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 26  # of an array on disk: what a write holds in memory beside the array

Packing = Literal["none", "bytes"]
_PACKED = {"id": "blosc", "cname": "zstd", "clevel": 9, "shuffle": 1}  # equal bytes side by side


@dataclasses.dataclass(frozen=True)
class _Promise:
    """Stands in Orbax's tree for an array that is made when its turn comes."""

    path: str


class _StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes arrays that an iterator makes, one at a time, chunk by chunk.

    Orbax's own handler wants all arrays at once, and starts all their writes together. This one
    has one array in memory, and one chunk of it on its way to the disk.
    """

    def __init__(self, leaves: Iterator[tuple[str, np.ndarray]], *, packing: Packing):
        super().__init__(deepcopy_host_arrays=False)
        self._leaves, self._packing = leaves, packing
        self._error: Exception | None = None

    async def _open_and_write(
        self, value: np.ndarray, tspec: dict[str, Any], ts_context: ts.Context
    ) -> None:
        # The batch runs to its end before an error leaves: what still runs when the event loop
        # closes prints a traceback of its own.
        try:
            await self._write(value, tspec, ts_context)
        except Exception as error:
            self._error = self._error or error

    async def _write(
        self, value: np.ndarray, tspec: dict[str, Any], ts_context: ts.Context
    ) -> None:
        if self._packing == "bytes":
            tspec = tspec | {"metadata": tspec["metadata"] | {"compressor": _PACKED}}
        store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        steps: Any = store.chunk_layout.write_chunk.shape or ()  # None for a scalar
        starts = (range(0, size, step) for size, step in zip(value.shape, steps, strict=True))
        for start in itertools.product(*starts):
            block = tuple(slice(i, i + step) for i, step in zip(start, steps, strict=True))
            inside = tuple(
                slice(b.start, min(b.stop, n)) for b, n in zip(block, value.shape, strict=True)
            )
            part = np.asarray(value[inside])
            await store[inside].write(part, can_reference_source_data_indefinitely=True)

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[future.Future]:
        # Here and not in a returned future: that one would run on in a thread after a Ctrl-C.
        args = args or [ocp.SaveArgs()] * len(values)
        places = {v.path: (i, a) for v, i, a in zip(values, infos, args, strict=True)}
        waiting: list[tuple[np.ndarray, ocp.type_handlers.ParamInfo, ocp.SaveArgs]] = []
        num_bytes = 0
        for path, array in self._leaves:
            waiting.append((array, *places.pop(path)))
            num_bytes += array.nbytes
            del array
            if num_bytes >= _BATCH_BYTES:  # small arrays go together: a commit has a fixed cost
                await self._write_batch(waiting)
                waiting.clear()
                num_bytes = 0
        if waiting:
            await self._write_batch(waiting)
        if places:
            raise ValueError(f"no values for {sorted(places)}")
        return []

    async def _write_batch(self, batch: Sequence[tuple[Any, ...]]) -> None:
        await self._background_serialize(*zip(*batch, strict=True))
        if self._error is not None:
            raise self._error


def _checked(
    name: str, leaves: Iterable[tuple[str, Any]], abstract: Mapping[str, Any], count: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Passes the arrays on, if they are the network's parameters; `count(path, array)` of each."""
    left = dict(abstract)
    for path, array in leaves:
        if path not in left:
            raise ValueError(f"{name}: parameter {path} is unknown or comes twice")
        if array.shape != left[path].shape:
            raise ValueError(
                f"{name}: parameter {path}: expected the shape {left[path].shape}, "
                f"found {array.shape}"
            )
        del left[path]
        array = np.asarray(array)
        count(path, array)
        yield path, array
        del array
    if left:
        raise ValueError(f"{name}: no values for {sorted(left)}")


def _checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's values in C order, which need not lie so; a chunk in memory at a time.

    2 GB/s: a small part of what writing takes.
    """
    found, rows = 0, np.atleast_1d(array)
    step = max(1, _CHUNK_BYTES * len(rows) // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step])
        found = zlib.crc32(part.view(np.uint8).data, found)
    return found


class BundleWriter:
    """Writes a bundle: all of it or nothing.

    ```python
    with BundleWriter(path, name="mine", protocol=PAPER) as writer:
        writer.write_network("dit", config, param_leaves(dit))
        writer.write_tokenizer(folder)
    ```

    The folder appears at the end of the block. After an exception or Ctrl-C inside it nothing is
    left, and what stood at `path` is untouched. Of several hosts one writes. `packing` "bytes"
    takes a quarter off bfloat16 weights on disk, at the cost of a second copy of what is being
    written. `stages` are those of its training, None where they are not known.

    Raises:
        UserError: on entering, `path` is taken and `overwrite` is not set, or holds something that
            is no bundle.
    """

    def __init__(
        self,
        path: epath.PathLike,
        *,
        name: str,
        protocol: Protocol,
        overwrite: bool = False,
        packing: Packing = "none",
        stages: Sequence[str] | None = None,
    ):
        self.path = absolute(path)
        self.name, self.protocol, self.overwrite = name, protocol, overwrite
        self.packing: Packing = packing
        self.stages = None if stages is None else tuple(stages)
        self.temporary = self.path.parent / f"{self.path.name}.tmp-{os.getpid()}"
        self.networks: dict[str, Any] = {}
        self.weights: dict[str, Weights] = {}
        self.released: dict[str, Placement] = {}

    def __enter__(self) -> "BundleWriter":
        with self._telling():
            refuse_existing(self.path, overwrite=self.overwrite, marker="config.json")
            if self.temporary.exists():
                self.temporary.rmtree()
            self.temporary.mkdir(parents=True)
        return self

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        return telling(
            self.path, "cannot be written", mend="make room there or choose another folder"
        )

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                with self._telling():
                    self._finish()
        finally:
            if self.temporary.exists():
                self.temporary.rmtree()

    def _finish(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        config = BundleConfig(
            format_version=FORMAT_VERSION,
            name=self.name,
            date=now.date().isoformat(),
            protocol=self.protocol,
            networks=ModelConfig(**self.networks),
            weights=self.weights,
            released=self.released,
            stages=self.stages,
        )
        text = json.dumps(to_json(config), indent=1, ensure_ascii=False)
        (self.temporary / "config.json").write_text(text + "\n")
        move_into_place(self.temporary, self.path)

    def write_network(
        self,
        name: NetworkName,
        config: NetworkConfig,
        leaves: Iterable[tuple[str, Any]],
        *,
        released: Placement | None = None,
    ) -> Weights:
        """Writes one network from its parameters, holding one of them at a time.

        The stored configuration's `param_dtype` is the format that most scalars have.

        Args:
            name: which network; also the name of its folder.
            config: its configuration.
            leaves: dotted path and array of every parameter, in any order.
            released: where it lay in released files, if it came from there.

        Raises:
            ValueError: the leaves are not the parameters of this network.
            UserError: most of them are in a number format that no network computes in.
        """
        dtypes: collections.Counter[str] = collections.Counter()
        checksums: dict[str, int] = {}
        num_bytes = 0

        def count(path: str, array: np.ndarray) -> None:
            nonlocal num_bytes
            dtypes[array.dtype.name] += array.size
            num_bytes += array.nbytes
            checksums[path] = _checksum(array)

        abstract = abstract_params(name, config)
        handler = _StreamHandler(_checked(name, leaves, abstract, count), packing=self.packing)
        registry = ocp.type_handlers.create_type_handler_registry(
            (_Promise, handler),
            (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused; without it Orbax warns
        )
        tree = nested({path: _Promise(path) for path in abstract})
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        # Orbax's own compression leaves the bytes of numbers mixed: weights hardly shrink.
        saver = ocp.PyTreeCheckpointHandler(
            use_compression=False, type_handler_registry=registry, **one_host()
        )
        with self._telling(), ocp.Checkpointer(saver, **one_host()) as checkpointer:
            arguments = ocp.args.PyTreeSave(tree, save_args=save_args)
            checkpointer.save(self.temporary / name, args=arguments)
        most = dtypes.most_common(1)[0][0]
        if most not in typing.get_args(Dtype):
            known = ", ".join(typing.get_args(Dtype))
            raise UserError(f"network {name}: its weights are {most}: expected one of {known}")
        self.networks[name] = with_dtypes(config, param_dtype=typing.cast(Dtype, most))
        of_all = json.dumps(sorted(checksums.items())).encode()
        weights = Weights(
            num_params=dtypes.total(),
            num_bytes=num_bytes,
            dtypes=dict(sorted(dtypes.items())),
            checksum=hashlib.sha256(of_all).hexdigest()[:16],
        )
        self.weights[name] = weights
        if released is not None:
            self.released[name] = released
        return weights

    def write_tokenizer(self, folder: epath.PathLike) -> None:
        """Copies a tokenizer's files, and the `words.json` beside its folder if there is one.

        Raises:
            UserError: the folder is missing or holds no file.
        """
        folder = epath.Path(folder)
        if not folder.is_dir() or not any(file.is_file() for file in folder.iterdir()):
            raise UserError(f"{folder}: expected a folder with a tokenizer's files")
        with self._telling():
            copy_tokenizer_folder(folder, self.temporary / TOKENIZER_FOLDER)
