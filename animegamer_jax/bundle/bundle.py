"""A model on disk: its configuration, its tokenizer, and the weights of each network.

A bundle is a folder, local or in a bucket:

    config.json   name, game protocol, every network's configuration, number formats and checksums
                  of the weights, where each network lay in the released files, and which stages of
                  training the model has been through
    tokenizer/    the tokenizer's files
    words.json    optional: the words that the model's world understands
    mllm/ dit/ …  one ordinary Orbax checkpoint a network, a nested dictionary of arrays

It is written to a temporary name beside its place and renamed when it is whole.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from animegamer_jax.bundle.config import (
    FORMAT_VERSION,
    BundleConfig,
    from_json,
    to_json,
    with_dtypes,
)
from animegamer_jax.bundle.networks import NETWORKS as NETWORKS
from animegamer_jax.bundle.networks import NetworkName as NetworkName
from animegamer_jax.bundle.networks import abstract_network as abstract_network
from animegamer_jax.bundle.networks import abstract_params as abstract_params
from animegamer_jax.bundle.networks import flat_params as flat_params
from animegamer_jax.bundle.networks import make_network as make_network
from animegamer_jax.bundle.networks import param_leaves as param_leaves
from animegamer_jax.bundle.vocabulary import Vocabulary, local_tokenizer, read_vocabulary
from animegamer_jax.bundle.writer import BundleWriter as BundleWriter
from animegamer_jax.configs import Dtype, ModelConfig, NetworkConfig, Remat
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import Rules, param_shardings
from animegamer_jax.storage.paths import (
    absolute,
    no_late_answers,
    one_host,
    telling,
)
from animegamer_jax.storage.serialization import flattened, nested

_BATCH_BYTES = 1 << 24  # small parameters are read together


def _telling(path: epath.Path) -> contextlib.AbstractContextManager[None]:
    return telling(path, "cannot be read", mend="convert again, or copy the bundle anew")


@contextlib.contextmanager
def _reading(path: epath.Path) -> Iterator[Any]:
    """Reads on this host alone: every host reads its parts at its own time."""
    handler = ocp.PyTreeCheckpointHandler(**one_host())
    with no_late_answers(), _telling(path), ocp.Checkpointer(handler, **one_host()) as checkpointer:
        yield checkpointer


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
        with _telling(file):
            found = file.exists()
        if not found:
            raise UserError(
                f"{path}: no bundle: expected a folder with a config.json, as `animegamer convert` "
                "writes it"
            )
        try:
            with _telling(file):
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

    def digest(self, network: NetworkName | None = None) -> str:
        """Of protocol, configurations, tokenizer and weights as stored: the model by its content.

        Its name, its date and how its files are cut do not count. It reads every weight.

        Args:
            network: of this network's configuration and weights alone.
        """
        told: dict[str, Any] = {"protocol": self.protocol, "networks": self.config}
        if network is not None:
            told = {network: self._network_config(network)}
        found = hashlib.sha256(json.dumps(to_json(told), sort_keys=True).encode())
        if network is None and (self.path / "tokenizer").is_dir():
            for file in sorted((self.path / "tokenizer").iterdir()):
                found.update(file.name.encode() + file.read_bytes())
        for name in filter(self.has, NETWORKS):
            if network not in (None, name):
                continue
            for path, array in self.read_in_order(name, sorted(self.leaves(name))):
                found.update(f"{name}.{path} {array.dtype} {array.shape}".encode())
                found.update(array.tobytes())
        return found.hexdigest()[:16]

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
        return local_tokenizer(self.path, hint="convert again with --tokenizer")

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that the model's world understands; empty if the bundle does not list them.

        Raises:
            UserError: its `words.json` is damaged.
        """
        return read_vocabulary(self.path)

    def load(
        self,
        name: NetworkName,
        *,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype | None = None,
        remat: Remat | None = None,
    ) -> nnx.Module:
        """A network with its weights, read straight to where the mesh wants them.

        Args:
            name: which network.
            mesh: None: all on the first device.
            rules: logical axes to mesh axes; those in force if None.
            dtype: format of activations; as the bundle says if None.
            param_dtype: the weights are cast to it while they are read; as stored if None.
            remat: what a backward pass recomputes; as the bundle says if None.

        Raises:
            UserError: the bundle has no such network, or its weights are not what config.json says.
        """
        config = with_dtypes(
            self._network_config(name), dtype=dtype, param_dtype=param_dtype, remat=remat
        )
        try:
            network = abstract_network(name, config)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise UserError(
                f"{self.path / 'config.json'}: networks.{name}: no such network can be made "
                f"({str(error).splitlines()[0]}): convert again"
            ) from error
        graphdef, params, rest = nnx.split(network, nnx.Param, ...)
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
        arrays = dict(flattened(self._restore(name, nested(wanted), nested(arguments))))
        for path, variable in variables.items():
            variable.set_value(arrays[path])
        return nnx.merge(graphdef, params, rest)

    def _restore(self, name: str, item: Any, arguments: Any, *, partial: bool = False) -> Any:
        restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=partial)
        with _reading(self.path / name) as checkpointer:
            return checkpointer.restore(self.path / name, args=restore)

    def leaves(self, name: NetworkName) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and stored format of each parameter of a network, by its dotted path.

        Raises:
            UserError: the bundle has no such network, or its folder is missing.
        """
        self._network_config(name)
        folder = self.path / name
        with _telling(folder):
            found = (folder / "_METADATA").exists() and (folder / "manifest.ocdbt").exists()
        if not found:
            raise UserError(f"{folder}: no weights there: the bundle is not whole: convert again")
        try:
            with _reading(folder) as checkpointer:
                tree = checkpointer.metadata(folder).item_metadata.tree
        except (AttributeError, KeyError, TypeError, ValueError):  # Orbax on a damaged _METADATA
            raise UserError(
                f"{folder}: its _METADATA cannot be read: damaged: convert again"
            ) from None
        return {
            path: jax.ShapeDtypeStruct(meta.shape, meta.dtype) for path, meta in flattened(tree)
        }

    def read(self, name: NetworkName, path: str) -> np.ndarray:
        """One parameter as stored, by its dotted path."""
        return self.read_together(name, [path])[path]

    def read_together(self, name: NetworkName, paths: Sequence[str]) -> dict[str, np.ndarray]:
        """Some parameters as stored; together small ones are read much faster than singly."""
        item = nested(dict.fromkeys(paths, 0))
        arguments = nested(dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray)))
        return dict(flattened(self._restore(name, item, arguments, partial=True)))

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
