"""A model on disk: its configuration, its tokenizer, and the weights of each network.

A bundle is a folder, local or in a bucket:

    config.json   name, game protocol, every network's configuration, number formats of the
                  weights, and where each network lay in the released files
    tokenizer/    the tokenizer's files
    mllm/ dit/ …  one ordinary Orbax checkpoint a network, a nested dictionary of arrays

It is written to a temporary name beside its place and renamed when it is whole.
"""

import collections
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import os
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import future

from animegamer_jax.bundle_config import (
    FORMAT_VERSION,
    BundleConfig,
    Placement,
    Weights,
    from_json,
    to_json,
    with_dtypes,
)
from animegamer_jax.configs import Dtype, ModelConfig, NetworkConfig
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import Rules, param_shardings

NetworkName = Literal["mllm", "encoder", "dit", "vae", "clip", "t5"]
NETWORKS: Mapping[NetworkName, str] = {
    "mllm": "animegamer_jax.models.mllm:MLLM",
    "encoder": "animegamer_jax.models.encoder:ShotEncoder",
    "dit": "animegamer_jax.models.dit:DiT",
    "vae": "animegamer_jax.models.vae:VAE",
    "clip": "animegamer_jax.models.clip:CLIP",
    "t5": "animegamer_jax.models.t5:T5Encoder",
}
_BATCH_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 26  # of an array on disk: what a write holds in memory beside the array


def make_network(name: NetworkName, config: NetworkConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """A network of a bundle, by its name there."""
    module, class_name = NETWORKS[name].split(":")
    return getattr(importlib.import_module(module), class_name)(config, rngs=rngs)


def abstract_network(name: NetworkName, config: NetworkConfig) -> nnx.Module:
    """The same without any memory: its parameters are shapes."""
    return nnx.eval_shape(lambda: make_network(name, config, rngs=nnx.Rngs(0)))


def flat_params(state: nnx.State) -> dict[str, nnx.Variable]:
    """The parameters of a (possibly abstract) state by their dotted paths."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@functools.lru_cache(maxsize=32)
def abstract_params(name: NetworkName, config: NetworkConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and format of each parameter of a network, by its dotted path."""
    state = nnx.state(abstract_network(name, config), nnx.Param)
    shapes = {
        path: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in flat_params(state).items()
    }
    return types.MappingProxyType(shapes)


def param_leaves(module: nnx.Module) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of a module as `BundleWriter.write_network` takes them, one at a time."""
    for path, variable in flat_params(nnx.state(module, nnx.Param)).items():
        yield path, np.asarray(variable[...])


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclasses.dataclass(frozen=True)
class _Promise:
    """Stands in Orbax's tree for an array that is made when its turn comes."""

    path: str


class _StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes arrays that an iterator makes, one at a time, chunk by chunk.

    Orbax's own handler wants all arrays at once, and starts all their writes together. This one
    has one array in memory, and one chunk of it on its way to the disk.
    """

    def __init__(self, leaves: Iterator[tuple[str, np.ndarray]]):
        super().__init__(deepcopy_host_arrays=False)
        self._leaves = leaves

    async def _open_and_write(
        self, value: np.ndarray, tspec: dict[str, Any], ts_context: ts.Context
    ) -> None:
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
                await self._background_serialize(*zip(*waiting, strict=True))
                waiting.clear()
                num_bytes = 0
        if waiting:
            await self._background_serialize(*zip(*waiting, strict=True))
        if places:
            raise ValueError(f"no values for {sorted(places)}")
        return []


def _checked(
    name: str, leaves: Iterable[tuple[str, Any]], abstract: Mapping[str, Any], count: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Passes the arrays on, if they are the network's parameters; `count(dtype, size)` of each."""
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
        count(array.dtype, array.size)
        yield path, array
        del array
    if left:
        raise ValueError(f"{name}: no values for {sorted(left)}")


class BundleWriter:
    """Writes a bundle: all of it or nothing.

    ```python
    with BundleWriter(path, name="mine", protocol=PAPER) as writer:
        writer.write_network("dit", config, param_leaves(dit))
        writer.write_tokenizer(folder)
    ```

    The folder appears at the end of the block. After an exception or Ctrl-C inside it nothing is
    left, and what stood at `path` is untouched. For one process only.

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
    ):
        self.path = absolute(path)
        self.name, self.protocol, self.overwrite = name, protocol, overwrite
        self.temporary = self.path.parent / f"{self.path.name}.tmp-{os.getpid()}"
        self.networks: dict[str, Any] = {}
        self.weights: dict[str, Weights] = {}
        self.released: dict[str, Placement] = {}

    def __enter__(self) -> "BundleWriter":
        refuse_existing(self.path, overwrite=self.overwrite, marker="config.json")
        if self.temporary.exists():
            self.temporary.rmtree()
        self.temporary.mkdir(parents=True)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
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
        num_bytes = 0

        def count(dtype: np.dtype, size: int) -> None:
            nonlocal num_bytes
            dtypes[dtype.name] += size
            num_bytes += size * dtype.itemsize

        abstract = abstract_params(name, config)
        handler = _StreamHandler(_checked(name, leaves, abstract, count))
        registry = ocp.type_handlers.create_type_handler_registry(
            (_Promise, handler),
            (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused; without it Orbax warns
        )
        tree = _nested({path: _Promise(path) for path in abstract})
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        # Uncompressed: weights hardly shrink, and packing costs a second copy of a chunk.
        saver = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(saver) as checkpointer:
            arguments = ocp.args.PyTreeSave(tree, save_args=save_args)
            checkpointer.save(self.temporary / name, args=arguments)
        most = dtypes.most_common(1)[0][0]
        if most not in typing.get_args(Dtype):
            known = ", ".join(typing.get_args(Dtype))
            raise UserError(f"network {name}: its weights are {most}: expected one of {known}")
        self.networks[name] = with_dtypes(config, param_dtype=typing.cast(Dtype, most))
        weights = Weights(
            num_params=dtypes.total(), num_bytes=num_bytes, dtypes=dict(sorted(dtypes.items()))
        )
        self.weights[name] = weights
        if released is not None:
            self.released[name] = released
        return weights

    def write_tokenizer(self, folder: epath.PathLike) -> None:
        """Copies a tokenizer's files.

        Raises:
            UserError: the folder is missing or holds no file.
        """
        folder = epath.Path(folder)
        files = sorted(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
        if not files:
            raise UserError(f"{folder}: expected a folder with a tokenizer's files")
        target = self.temporary / "tokenizer"
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            (target / file.name).write_bytes(file.read_bytes())


def absolute(path: epath.PathLike) -> epath.Path:
    """An absolute local path, or an address in a bucket as it is; Orbax takes no relative ones."""
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


def refuse_existing(path: epath.Path, *, overwrite: bool, marker: str) -> None:
    """Makes sure that `path` may be written: it is free, or a folder of ours to be replaced.

    Raises:
        UserError: it is taken; with `overwrite`, only if the folder does not hold `marker`.
    """
    if not path.exists():
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{path}: already there: choose another folder, or pass --overwrite")
    if not (path / marker).exists():
        raise UserError(
            f"{path}: not overwritten, because it holds no {marker}: it is something else"
        )


def move_into_place(temporary: epath.Path, path: epath.Path) -> None:
    """Renames a finished folder; one that stood there is removed only after that."""
    if not path.exists():
        temporary.rename(path)
        return
    old = path.parent / f"{path.name}.old-{os.getpid()}"
    path.rename(old)
    temporary.rename(path)
    old.rmtree()


class Bundle:
    """An opened bundle. Weights are read on `load` and `read` only."""

    def __init__(self, path: epath.Path, config: BundleConfig):
        self.path = path
        self.info = config

    @classmethod
    def open(cls, path: epath.PathLike) -> "Bundle":
        """Reads a bundle's configuration.

        Raises:
            UserError: there is no bundle, or its configuration is not as this version writes it.
        """
        path = absolute(path)
        file = path / "config.json"
        if not file.exists():
            raise UserError(
                f"{path}: no bundle: expected a folder with a config.json, as `animegamer convert` "
                "writes it"
            )
        try:
            content = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(f"{file}: no JSON ({error}): write the bundle again") from None
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(
                f"{file}: format_version: expected {FORMAT_VERSION}, found {json.dumps(version)}: "
                "write the bundle again with this version, or update animegamer_jax"
            )
        return cls(path, from_json(BundleConfig, content, str(file)))

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def protocol(self) -> Protocol:
        return self.info.protocol

    @property
    def config(self) -> ModelConfig:
        """Each network's configuration, None where it is absent."""
        return self.info.networks

    def has(self, name: NetworkName) -> bool:
        return getattr(self.config, name) is not None

    def _network_config(self, name: NetworkName) -> NetworkConfig:
        config = getattr(self.config, name)
        if config is None:
            there = ", ".join(n for n in NETWORKS if self.has(n)) or "none"
            raise UserError(f"{self.path}: no network {name} in this bundle: it has {there}")
        return config

    @property
    def tokenizer_dir(self) -> Path:
        """The tokenizer's folder; from a bucket its files are copied to a temporary one.

        Raises:
            UserError: the bundle has no tokenizer.
        """
        folder = self.path / "tokenizer"
        if not folder.is_dir():
            raise UserError(f"{self.path}: no tokenizer/ in this bundle: convert with --tokenizer")
        if "://" not in str(folder):
            return Path(folder)
        local = Path(tempfile.mkdtemp(prefix="tokenizer-"))
        for file in folder.iterdir():
            (local / file.name).write_bytes(file.read_bytes())
        return local

    def load(
        self,
        name: NetworkName,
        *,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype | None = None,
    ) -> nnx.Module:
        """A network with its weights, read straight to where the mesh wants them.

        Args:
            name: which network.
            mesh: None: all on the first device.
            rules: logical axes to mesh axes; those in force if None.
            dtype: format of activations; as the bundle says if None.
            param_dtype: the weights are cast to it while they are read; as stored if None.

        Raises:
            UserError: the bundle has no such network, or its weights are not what config.json says.
        """
        config = with_dtypes(self._network_config(name), dtype=dtype, param_dtype=param_dtype)
        graphdef, params, rest = nnx.split(abstract_network(name, config), nnx.Param, ...)
        variables = flat_params(params)
        if mesh is None:
            shardings: Any = dict.fromkeys(variables, SingleDeviceSharding(jax.local_devices()[0]))
        else:
            specs = jax.tree.leaves(param_shardings(params, mesh, rules))
            shardings = dict(zip(variables, specs, strict=True))
        cast = None if param_dtype is None else jnp.dtype(param_dtype)
        stored = self.leaves(name)
        if stored.keys() != variables.keys():
            lacking, extra = set(variables) - set(stored), set(stored) - set(variables)
            raise UserError(
                f"{self.path / name}: the weights are not those of config.json: "
                f"missing {sorted(lacking)[:3]}, unknown {sorted(extra)[:3]}: convert again"
            )
        wanted, arguments = {}, {}
        for path, variable in variables.items():
            if stored[path].shape != variable.shape:
                raise UserError(
                    f"{self.path / name}: parameter {path}: expected the shape {variable.shape}, "
                    f"found {stored[path].shape}: convert again"
                )
            kind = cast or stored[path].dtype
            wanted[path] = jax.ShapeDtypeStruct(variable.shape, kind, sharding=shardings[path])
            arguments[path] = ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                sharding=shardings[path],
                global_shape=variable.shape,
                dtype=kind,
            )
        arrays = dict(_flattened(self._restore(name, _nested(wanted), _nested(arguments))))
        for path, variable in variables.items():
            variable.set_value(arrays[path])
        return nnx.merge(graphdef, params, rest)

    def _restore(self, name: str, item: Any, arguments: Any, *, partial: bool = False) -> Any:
        restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=partial)
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(self.path / name, args=restore)

    def leaves(self, name: NetworkName) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and stored format of each parameter of a network, by its dotted path.

        Raises:
            UserError: the bundle has no such network, or its folder is missing.
        """
        self._network_config(name)
        if not (self.path / name / "_METADATA").exists():
            raise UserError(f"{self.path / name}: no weights there: the bundle is not whole")
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(self.path / name).item_metadata.tree
        return {
            path: jax.ShapeDtypeStruct(meta.shape, meta.dtype) for path, meta in _flattened(tree)
        }

    def read(self, name: NetworkName, path: str) -> np.ndarray:
        """One parameter as stored, by its dotted path."""
        return self.read_together(name, [path])[path]

    def read_together(self, name: NetworkName, paths: Sequence[str]) -> dict[str, np.ndarray]:
        """Some parameters as stored; together small ones are read much faster than singly."""
        item = _nested(dict.fromkeys(paths, 0))
        arguments = _nested(dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray)))
        return dict(_flattened(self._restore(name, item, arguments, partial=True)))

    def read_in_order(
        self, name: NetworkName, paths: Iterable[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Parameters as stored, a batch of small ones or a large one in memory at a time."""
        stored, batch, num_bytes = self.leaves(name), [], 0

        def read_batch() -> Iterator[tuple[str, np.ndarray]]:
            arrays = self.read_together(name, batch) if batch else {}
            for path in batch:
                yield path, arrays.pop(path)

        for path in paths:
            batch.append(path)
            num_bytes += stored[path].size * stored[path].dtype.itemsize
            if num_bytes >= _BATCH_BYTES:
                yield from read_batch()
                batch, num_bytes = [], 0
        yield from read_batch()
