"""The content of a bundle's `config.json` as dataclasses (`storage.serialization` reads them)."""

import dataclasses
from typing import Any, Literal

from animegamer_jax.configs import Dtype, LoRAConfig, ModelConfig, NetworkConfig, Remat
from animegamer_jax.protocol import Protocol

SIZES_FILE = "animegamer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights in a network's checkpoint.

    Attributes:
        num_params, num_bytes: Number of scalars and of bytes.
        dtypes: Number of scalars by number format.
        checksum: Checksum of names and values; None in bundles of earlier versions.
    """

    num_params: int
    num_bytes: int
    dtypes: dict[str, int]
    checksum: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a network in the released files, to which an export returns it.

    Attributes:
        file: Path inside the released folder.
        key: Entry of the file's dictionary that holds the tensors; None: the top level.
        prefix: Prefix of the tensors' names in that file.
        merged_lora: The low-rank update that was added to the weights, if any; an export writes
            zeros for it.
    """

    file: str
    key: str | None = None
    prefix: str = ""
    merged_lora: LoRAConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """The content of `config.json`.

    Attributes:
        format_version: Version of this file.
        name: Name of the bundle.
        date: Day on which the bundle was written.
        protocol: Game protocol that the weights were trained for.
        networks: Configuration of each network.
        weights: Number and formats of each network's weights.
        released: Place of each converted network in the released files.
        stages: Names of the completed training stages, in order; None: not known.
    """

    format_version: Literal[1] = 1
    name: str
    date: str | None
    protocol: Protocol
    networks: ModelConfig
    weights: dict[str, Weights]
    released: dict[str, Placement]
    stages: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The content of `SIZES_FILE` in an exported folder; released folders have no such file."""

    protocol: Protocol
    networks: ModelConfig


def with_dtypes(
    config: NetworkConfig,
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    remat: Remat | None = None,
) -> NetworkConfig:
    """Replaces number formats and `remat` in a configuration and those nested in it.

    None keeps a value.
    """
    given: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "remat": remat}
    changes = {name: value for name, value in given.items() if value is not None}
    for field in dataclasses.fields(config):
        if isinstance(inner := getattr(config, field.name), NetworkConfig):
            changes[field.name] = with_dtypes(inner, **given)
    return dataclasses.replace(config, **changes)
