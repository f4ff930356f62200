"""A model on disk: its configuration, its tokenizer, and the weights of each network.

A bundle is a folder, local or in a bucket:

    config.json   name, game protocol, configuration of every network, number formats and checksums
                  of the weights, place of each network in the released files, and completed stages
                  of training
    tokenizer/    files of the tokenizer
    t5_tokenizer/ optional: files of T5's own tokenizer, if it has another vocabulary
    words.json    optional: the words that the model's world understands
    mllm/ dit/ …  one ordinary Orbax checkpoint per network, a nested dictionary of arrays; or
                  safetensors files, the form in which models go to a hub

It is written under a temporary name in the same folder and renamed when it is complete.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from animegamer_jax.bundle.arrays import (
    BATCH_BYTES,
    StoredArrays,
    array_checksum,
    load_arrays,
    network_checksum,
    open_folder,
    read_checksums,
)
from animegamer_jax.bundle.config import BundleConfig, with_dtypes
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.bundle.hub import PREFIX, fetch
from animegamer_jax.bundle.networks import NETWORKS as NETWORKS
from animegamer_jax.bundle.networks import abstract_network as abstract_network
from animegamer_jax.bundle.networks import abstract_params as abstract_params
from animegamer_jax.bundle.networks import flat_params as flat_params
from animegamer_jax.bundle.networks import make_network as make_network
from animegamer_jax.bundle.networks import param_leaves as param_leaves
from animegamer_jax.bundle.publishing import save_model, upload
from animegamer_jax.bundle.vocabulary import (
    T5_TOKENIZER_FOLDER,
    TOKENIZER_FOLDER,
    Vocabulary,
    local_tokenizer,
    read_vocabulary,
)
from animegamer_jax.bundle.writer import BundleWriter as BundleWriter
from animegamer_jax.configs import Dtype, ModelConfig, NetworkConfig, Remat
from animegamer_jax.configs import NetworkName as NetworkName
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import Rules, param_shardings
from animegamer_jax.storage.paths import absolute, is_bucket, user_errors
from animegamer_jax.storage.serialization import read_json, to_json
from animegamer_jax.tokenizer import T5Tokenizer, Tokenizer

if TYPE_CHECKING:
    from animegamer_jax.models.clip import CLIP
    from animegamer_jax.models.dit import DiT
    from animegamer_jax.models.encoder import ShotEncoder
    from animegamer_jax.models.mllm import MLLM
    from animegamer_jax.models.t5 import T5Encoder
    from animegamer_jax.models.vae import VAE


_FREE_BYTES, _MAX_RATIO = 1 << 28, 100  # bytes of weights, by one on disk


class LoadOptions(TypedDict, total=False):
    """Options of `Bundle.load`.

    Attributes:
        mesh: Devices on which the weights are placed; None: the first device.
        rules: Mesh axes of the logical axes; the current rules if None.
        dtype: Number format of activations; the bundle's if None.
        param_dtype: Number format to which the weights are cast as they are read; that of the
            files if None.
        remat: What a backward pass computes again; the bundle's if None.
    """

    mesh: Mesh | None
    rules: Rules | None
    dtype: Dtype | None
    param_dtype: Dtype | None
    remat: Remat | None


def _reading(path: epath.Path) -> contextlib.AbstractContextManager[None]:
    return user_errors(path, "cannot be read", hint="convert again, or copy the bundle again")


class Bundle:
    """An opened bundle; only `load`, `leaves` and the `read` methods read weights."""

    def __init__(self, path: epath.Path, config: BundleConfig):
        self.path = path
        self.info = config

    @classmethod
    def open(cls, path: epath.PathLike) -> "Bundle":
        """Reads a bundle's configuration; the text `toy` stands for the embedded model.

        Raises:
            UserError: There is no bundle, or its configuration has another form.
        """
        path = absolute(model_folder(path) if isinstance(path, str) else path)
        file = path / "config.json"
        with _reading(file):
            found = file.exists()
        if not found:
            raise UserError(
                f"{path}: not a bundle: expected a folder with config.json, which "
                "`animegamer convert` writes"
            )
        hint = "convert again with this version, or update animegamer_jax"
        config = read_json(file, BundleConfig, hint=hint)
        for name, network in vars(config.networks).items():
            if network is not None and name not in config.weights:
                raise UserError(f"{file}: weights.{name}: missing: {hint}")
        return cls(path, config)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def protocol(self) -> Protocol:
        return self.info.protocol

    @property
    def config(self) -> ModelConfig:
        """Configuration of each network; None for a network that the bundle lacks."""
        return self.info.networks

    def has(self, name: NetworkName) -> bool:
        return getattr(self.config, name) is not None

    def digest(self, network: NetworkName | None = None) -> str:
        """Computes a digest of protocol, configurations, tokenizer and weights; reads all of them.

        It does not depend on name, date and layout of the files.

        Args:
            network: Network whose configuration and weights alone are digested; None: all.
        """
        content: dict[str, Any] = {"protocol": self.protocol, "networks": self.config}
        if network is not None:
            content = {network: self._network_config(network)}
        found = hashlib.sha256(json.dumps(to_json(content), sort_keys=True).encode())
        for folder in (TOKENIZER_FOLDER, T5_TOKENIZER_FOLDER) if network is None else ():
            if (self.path / folder).is_dir():
                for file in sorted((self.path / folder).iterdir()):
                    found.update(file.name.encode() + file.read_bytes())
        for name in filter(self.has, NETWORKS):
            if network not in (None, name):
                continue
            for path, array in self.read_in_order(name, sorted(self.leaves(name))):
                found.update(f"{name}.{path} {array.dtype} {array.shape}".encode())
                found.update(array.tobytes())
        return found.hexdigest()[:16]

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        revision: str | None = None,
        cache_dir: Path | None = None,
        offline: bool = False,
    ) -> "Bundle":
        """Opens a model of the Hugging Face hub, after downloading what is missing.

        ```python
        player = Player.from_bundle(Bundle.from_pretrained("OWNER/NAME"))
        ```

        Args:
            name: Name on the hub, OWNER/NAME.
            revision: Branch, tag or commit; the main branch if None.
            cache_dir: Folder for downloaded files; that of `huggingface_hub` if None.
            offline: Whether to use what was downloaded before, without asking the hub.

        Raises:
            UserError: There is no such model or revision, the hub cannot be reached, or the files
                are not those of a model.
        """
        folder = fetch(f"{PREFIX}{name}", cache=cache_dir, offline=offline, revision=revision)
        return cls.open(folder)

    def push_to_hub(
        self, name: str, *, licence: str, revision: str | None = None, private: bool = True
    ) -> str:
        """Uploads the model to the Hugging Face hub, as safetensors with a model card.

        Args:
            name: Name on the hub, OWNER/NAME; it is made if it is missing.
            licence: The hub's name of the licence, such as `apache-2.0`, or `other`.
            revision: Branch, made if it is missing; main if None.
            private: Whether a new repository is private.

        Returns:
            The address of the commit.

        Raises:
            UserError: A part of the bundle is damaged, or the hub refuses or cannot be reached.
        """
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            save_model(self, folder, licence=licence, repo=name)
            return upload(folder, name, revision=revision, private=private)

    def _network_config(self, name: NetworkName) -> NetworkConfig:
        config = getattr(self.config, name)
        if config is None:
            there = ", ".join(n for n in NETWORKS if self.has(n)) or "none"
            raise UserError(f"{self.path}: no network {name} in this bundle: it has {there}")
        return config

    @property
    def tokenizer_dir(self) -> Path:
        """The tokenizer's folder; a temporary copy of it if the bundle is in a bucket.

        Raises:
            UserError: The bundle has no tokenizer.
        """
        return local_tokenizer(self.path, hint="convert again with --tokenizer")

    def load_t5_tokenizer(self) -> Tokenizer | T5Tokenizer:
        """Loads the tokenizer of T5's texts: T5's own, or the bundle's if T5 shares its vocabulary.

        Raises:
            UserError: The bundle lacks T5, or a tokenizer with its vocabulary.
        """
        config: Any = self._network_config("t5")
        hint = "copy the folder of T5's own tokenizer there"
        if (self.path / T5_TOKENIZER_FOLDER).is_dir():
            folder = local_tokenizer(self.path, hint=hint, name=T5_TOKENIZER_FOLDER)
            return T5Tokenizer.load(folder, vocab_size=config.vocab_size)
        found = Tokenizer.load(self.tokenizer_dir, num_queries=1)  # no frame token is needed here
        if len(found) != config.vocab_size:
            raise UserError(
                f"{self.path}: no {T5_TOKENIZER_FOLDER}/ there, and the tokenizer has {len(found)} "
                f"entries, T5's embedding {config.vocab_size} rows: {hint}"
            )
        return found

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that the model's world understands; empty if the bundle does not list them.

        Raises:
            UserError: Its `words.json` is damaged.
        """
        return read_vocabulary(self.path)

    @overload
    def load(self, name: Literal["mllm"], **options: Unpack[LoadOptions]) -> "MLLM": ...
    @overload
    def load(self, name: Literal["encoder"], **options: Unpack[LoadOptions]) -> "ShotEncoder": ...
    @overload
    def load(self, name: Literal["dit", "picture"], **options: Unpack[LoadOptions]) -> "DiT": ...
    @overload
    def load(self, name: Literal["vae"], **options: Unpack[LoadOptions]) -> "VAE": ...
    @overload
    def load(self, name: Literal["clip"], **options: Unpack[LoadOptions]) -> "CLIP": ...
    @overload
    def load(self, name: Literal["t5"], **options: Unpack[LoadOptions]) -> "T5Encoder": ...
    @overload
    def load(self, name: NetworkName, **options: Unpack[LoadOptions]) -> Any: ...
    def load(
        self,
        name: NetworkName,
        *,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype | None = None,
        remat: Remat | None = None,
    ) -> Any:
        """Loads a network, each weight read straight to where the mesh needs it.

        Args:
            name: Name of the network in the bundle.
            mesh: Devices on which the weights are placed; None: the first device.
            rules: Mesh axes of the logical axes; the current rules if None.
            dtype: Number format of activations; the bundle's if None.
            param_dtype: Number format to which the weights are cast as they are read; that of the
                files if None.
            remat: What a backward pass computes again; the bundle's if None.

        Raises:
            UserError: The bundle lacks the network, or the weights differ from config.json, also
                from the checksum there.
        """
        config = with_dtypes(
            self._network_config(name), dtype=dtype, param_dtype=param_dtype, remat=remat
        )
        try:
            network = abstract_network(name, config)
        except UserError as error:
            raise UserError(f"{self.path / 'config.json'}: {error}: convert again") from error
        graphdef, params, rest = nnx.split(network, nnx.Param, ...)
        variables = flat_params(params)
        if mesh is None:
            shardings: Any = dict.fromkeys(variables, SingleDeviceSharding(jax.local_devices()[0]))
        else:
            specs = jax.tree.leaves(param_shardings(params, mesh, rules))
            shardings = dict(zip(variables, specs, strict=True))
        checksums: dict[str, int] = {}
        with self._weights(name) as weights:
            wanted = self._wanted(
                name, weights, variables, shardings=shardings, param_dtype=param_dtype
            )
            arrays = load_arrays(weights, wanted, checksums=checksums)
            sharded = [path for path in wanted if path not in checksums]
            if sharded and jax.process_index() == 0 and self._checksum(name) is not None:
                checksums |= read_checksums(weights, sharded)
        self._compare_checksums(name, checksums)
        for path, variable in variables.items():
            variable.set_value(arrays[path])
        return nnx.merge(graphdef, params, rest)

    @contextlib.contextmanager
    def _weights(self, name: NetworkName) -> Iterator[StoredArrays]:
        """Opens the stored weights of a network for as long as the block runs.

        Raises:
            UserError: They cannot be read.
        """
        with _reading(self.path / name), open_folder(self.path / name) as weights:
            yield weights

    def _wanted(
        self,
        name: NetworkName,
        weights: StoredArrays,
        variables: Mapping[str, nnx.Variable[Any]],
        *,
        shardings: Mapping[str, Any],
        param_dtype: Dtype | None,
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape, format and sharding of the arrays to load for a network's variables.

        Raises:
            UserError: The stored weights are not those of the network.
        """
        folder, stored = self.path / name, self._stored(name, weights)
        if stored.keys() != variables.keys():
            lacking, extra = set(variables) - set(stored), set(stored) - set(variables)
            raise UserError(
                f"{folder}: the weights are not those of config.json: missing "
                f"{sorted(lacking)[:3]}, unknown {sorted(extra)[:3]}: convert again"
            )
        wanted = {}
        for path, variable in variables.items():
            if stored[path].shape != variable.shape:
                raise UserError(
                    f"{folder}: parameter {path}: expected the shape {variable.shape}, "
                    f"found {stored[path].shape}: convert again"
                )
            wanted[path] = jax.ShapeDtypeStruct(
                variable.shape, param_dtype or stored[path].dtype, sharding=shardings[path]
            )
        self._check_size(name, stored)
        return wanted

    def _checksum(self, name: NetworkName) -> str | None:
        """Returns a network's checksum in config.json; bundles of earlier versions have none."""
        weights = self.info.weights.get(name)
        return None if weights is None else weights.checksum

    def _compare_checksums(self, name: NetworkName, found: Mapping[str, int]) -> None:
        """Raises UserError if these arrays are all of a network, but not those of config.json."""
        if self._checksum(name) in (None, network_checksum(found)):
            return
        if len(found) == len(self.leaves(name)):
            raise UserError(
                f"{self.path / name}: the weights differ from their checksum in config.json: a "
                "file there is damaged or was changed: copy the bundle again, or convert again"
            )

    def _check_size(self, name: NetworkName, stored: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Raises UserError for a small folder of weights that would fill the memory."""
        folder = self.path / name
        if is_bucket(folder):
            return
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in stored.values())
        files = (file for file in Path(folder).rglob("*") if file.is_file())
        if needed > max(_FREE_BYTES, _MAX_RATIO * sum(file.stat().st_size for file in files)):
            raise UserError(
                f"{folder}: expected files that hold the weights, found few bytes for "
                f"{needed:,}: copy the bundle again, or convert again"
            )

    def leaves(self, name: NetworkName) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and stored format of each parameter of a network by its dotted path.

        Raises:
            UserError: The bundle lacks the network, or its folder is missing or damaged.
        """
        self._network_config(name)
        with self._weights(name) as weights:
            return self._stored(name, weights)

    def _stored(self, name: NetworkName, weights: StoredArrays) -> dict[str, jax.ShapeDtypeStruct]:
        found = weights.shapes()
        if not found:
            raise UserError(
                f"{self.path / name}: holds no weights: the bundle is incomplete: convert again"
            )
        return found

    def read(self, name: NetworkName, path: str) -> np.ndarray:
        """Reads one parameter as it is stored, by its dotted path."""
        return self.read_together(name, [path])[path]

    def read_together(self, name: NetworkName, paths: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads parameters as they are stored; small ones are much faster together."""
        with self._weights(name) as weights:
            return weights.read(paths)

    def read_in_order(
        self, name: NetworkName, paths: Iterable[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields parameters as they are stored, with one large one or a batch in memory.

        Before the last of a whole network, all are compared with the checksum in config.json.

        Raises:
            UserError: They cannot be read, or differ.
        """
        stored, batch, num_bytes = self.leaves(name), [], 0
        checksums: dict[str, int] = {}

        def read_batch() -> Iterator[tuple[str, np.ndarray]]:
            arrays = self.read_together(name, batch) if batch else {}
            checksums.update((path, array_checksum(array)) for path, array in arrays.items())
            if len(checksums) == len(stored):
                self._compare_checksums(name, checksums)
            for path in batch:
                yield path, arrays.pop(path)

        for path in paths:
            batch.append(path)
            num_bytes += stored[path].size * stored[path].dtype.itemsize
            if num_bytes >= BATCH_BYTES:
                yield from read_batch()
                batch, num_bytes = [], 0
        yield from read_batch()
