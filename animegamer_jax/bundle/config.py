"""What a bundle's `config.json` holds, as dataclasses, and the way to JSON and back.

Reading is strict: a missing or unknown field is an error, because a configuration that is half
understood makes a model that is silently another. Only what tells of a bundle's making may be
missing, in one that an earlier version wrote.
"""

import dataclasses
import itertools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from animegamer_jax.configs import Dtype, LoRAConfig, ModelConfig, NetworkConfig, Remat
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol

FORMAT_VERSION = 1
SIZES_FILE = "animegamer.json"
_MAY_BE_MISSING = "may be missing"


def _later() -> Any:
    """A field that bundles of earlier versions lack."""
    return dataclasses.field(default=None, metadata={_MAY_BE_MISSING: True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """What lies in a network's checkpoint.

    Attributes:
        num_params, num_bytes: scalars and bytes.
        dtypes: scalars of each number format.
        checksum: of names and values; None: an earlier version wrote it.
    """

    num_params: int
    num_bytes: int
    dtypes: dict[str, int]
    checksum: str | None = _later()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a network lay in the released files, so that an export can put it back.

    Attributes:
        file: path inside the released folder.
        key: entry of the file's dictionary that holds the tensors; None: the top.
        prefix: what the tensors' names start with there.
        merged_lora: the update that was folded into the weights; an export writes zeros for it.
    """

    file: str
    key: str | None = None
    prefix: str = ""
    merged_lora: LoRAConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """The content of `config.json`.

    Attributes:
        format_version: of this file.
        name, date: of the bundle.
        protocol: of the game.
        networks: each one's configuration.
        weights: what lies in each one's checkpoint.
        released: where those lay that were converted.
        stages: names of the training stages that it has been through, in order; None: not known.
    """

    format_version: int
    name: str
    date: str | None
    protocol: Protocol
    networks: ModelConfig
    weights: dict[str, Weights]
    released: dict[str, Placement]
    stages: tuple[str, ...] | None = _later()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What an exported folder tells of its files, in `SIZES_FILE`; released folders have none."""

    protocol: Protocol
    networks: ModelConfig


def to_json(value: Any) -> Any:
    """Dataclasses to dictionaries, tuples to lists; numbers, strings and None as they are."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


# Not inside `from_json`: type checks in tests would compile them anew at every call.


def _inside(where: str, name: str) -> str:
    return f"{where}: {name}" if where.endswith(".json") else f"{where}.{name}"


def _wrong(where: str, value: Any, expected: str) -> UserError:
    return UserError(f"{where}: expected {expected}, found {json.dumps(value)[:80]}")


def from_json(kind: Any, value: Any, where: str) -> Any:
    """The inverse of `to_json`, by the type that is expected; `where` names the place in messages.

    Raises:
        UserError: a field is missing or unknown, or a value has another type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [a for a in arguments if a is not type(None)]
        return from_json(inner, value, where)
    if origin is Literal:
        if value not in arguments:
            raise _wrong(where, value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        if arguments[-1] is not Ellipsis and len(arguments) != len(value):
            raise _wrong(where, value, f"a list of {len(arguments)}")
        inner = itertools.repeat(arguments[0]) if arguments[-1] is Ellipsis else arguments
        pairs = zip(inner, value, strict=False)
        return tuple(from_json(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(pairs))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        return {k: from_json(arguments[1], item, _inside(where, k)) for k, item in value.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        fields = [field.name for field in dataclasses.fields(kind)]
        free = {f.name for f in dataclasses.fields(kind) if f.metadata.get(_MAY_BE_MISSING)}
        missing = [name for name in fields if name not in value and name not in free]
        unknown = [name for name in value if name not in fields]
        if missing or unknown:
            raise UserError(
                f"{where}: "
                + "; ".join(
                    f"{what} {', '.join(names)}"
                    for what, names in (("missing", missing), ("unknown", unknown))
                    if names
                )
                + f": expected the fields {', '.join(fields)}"
            )
        hints = typing.get_type_hints(kind)
        make: Any = kind
        given = [name for name in fields if name in value]
        return make(**{n: from_json(hints[n], value[n], _inside(where, n)) for n in given})
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(where, value, f"a value of type {kind.__name__}")
    return value


def with_dtypes(
    config: NetworkConfig,
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    remat: Remat | None = None,
) -> NetworkConfig:
    """The configuration, and those nested in it, with other number formats and `remat`.

    None keeps.
    """
    changes: dict[str, Any] = {}
    if dtype is not None:
        changes["dtype"] = dtype
    if param_dtype is not None:
        changes["param_dtype"] = param_dtype
    if remat is not None:
        changes["remat"] = remat
    for field in dataclasses.fields(config):
        if isinstance(inner := getattr(config, field.name), NetworkConfig):
            changes[field.name] = with_dtypes(
                inner, dtype=dtype, param_dtype=param_dtype, remat=remat
            )
    return dataclasses.replace(config, **changes)
