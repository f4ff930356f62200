"""Writes a bundle completely or not at all, one parameter in memory at a time."""

import collections
import contextlib
import datetime
import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from animegamer_jax.bundle.arrays import (
    Packing,
    array_checksum,
    network_checksum,
    write_arrays,
)
from animegamer_jax.bundle.config import BundleConfig, Placement, Weights, with_dtypes
from animegamer_jax.bundle.networks import abstract_params
from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER, copy_tokenizer_folder
from animegamer_jax.configs import Dtype, ModelConfig, NetworkConfig, NetworkName
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol
from animegamer_jax.storage.paths import absolute, move_into_place, refuse_existing, user_errors
from animegamer_jax.storage.serialization import to_json


def _checked(
    name: str,
    leaves: Iterable[tuple[str, Any]],
    abstract: Mapping[str, Any],
    count: Callable[[str, np.ndarray], None],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays after a check that they are the network's parameters; counts each."""
    left = dict(abstract)
    for path, array in leaves:
        if path not in left:
            raise ValueError(f"{name}: parameter {path} is unknown or occurs twice")
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


class BundleWriter:
    """Writes a bundle completely or not at all.

    ```python
    with BundleWriter(path, name="mine", protocol=PAPER) as writer:
        writer.write_network("dit", config, param_leaves(dit))
        writer.write_tokenizer(folder)
    ```

    The folder appears at the end of the block. An exception or Ctrl-C inside the block leaves
    nothing behind and does not touch an earlier bundle at `path`. Only one of several hosts may
    write. `packing` "bytes" takes a quarter off bfloat16 weights on disk, at the cost of a second
    copy of the weights that are being written. `stages` are the completed training stages; None:
    not known.

    Raises:
        UserError: On entry, if `path` is taken and `overwrite` is not set, or if it is not a
            bundle.
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
        with self._writing():
            refuse_existing(self.path, overwrite=self.overwrite)
            if self.temporary.exists():
                self.temporary.rmtree()
            self.temporary.mkdir(parents=True)
        return self

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        hint = "free space there or choose another folder"
        return user_errors(self.path, "cannot be written", hint=hint)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._finish()
        finally:
            if self.temporary.exists():
                self.temporary.rmtree()

    def _finish(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        config = BundleConfig(
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
        """Writes one network with one of its parameters in memory at a time.

        The `param_dtype` of the stored configuration is the most frequent format of the scalars.

        Args:
            name: Name of the network and of its folder.
            config: Configuration of the network.
            leaves: Dotted path and array of every parameter, in any order.
            released: Place of the network in the released files, if it was converted.

        Raises:
            ValueError: The leaves are not the parameters of this network.
            UserError: The most frequent number format is none of `Dtype`.
        """
        dtypes: collections.Counter[str] = collections.Counter()
        checksums: dict[str, int] = {}
        num_bytes = 0

        def count(path: str, array: np.ndarray) -> None:
            nonlocal num_bytes
            dtypes[array.dtype.name] += array.size
            num_bytes += array.nbytes
            checksums[path] = array_checksum(array)

        abstract = abstract_params(name, config)
        with self._writing():
            write_arrays(
                self.temporary / name,
                abstract,
                _checked(name, leaves, abstract, count),
                packing=self.packing,
            )
        most = dtypes.most_common(1)[0][0]
        if most not in typing.get_args(Dtype):
            known = ", ".join(typing.get_args(Dtype))
            raise UserError(f"network {name}: its weights are {most}: expected one of {known}")
        self.networks[name] = with_dtypes(config, param_dtype=typing.cast(Dtype, most))
        weights = Weights(
            num_params=dtypes.total(),
            num_bytes=num_bytes,
            dtypes=dict(sorted(dtypes.items())),
            checksum=network_checksum(checksums),
        )
        self.weights[name] = weights
        if released is not None:
            self.released[name] = released
        return weights

    def write_tokenizer(self, folder: epath.PathLike, *, name: str = TOKENIZER_FOLDER) -> None:
        """Copies a tokenizer's files, and the `words.json` next to its folder if there is one.

        Args:
            folder: The tokenizer's files.
            name: Name of the folder in the bundle; T5's own has no `words.json`.

        Raises:
            UserError: The folder is missing or holds no file.
        """
        folder = epath.Path(folder)
        if not folder.is_dir() or not any(file.is_file() for file in folder.iterdir()):
            raise UserError(f"{folder}: expected a folder with the files of a tokenizer")
        with self._writing():
            target = self.temporary / name
            copy_tokenizer_folder(folder, target, words=name == TOKENIZER_FOLDER)
