"""The one place for axis names: logical axes of parameters and activations, and their mesh axes.

Parameters and activations have separate names, because one array may use a mesh axis once. A
rules table maps logical names to mesh axes; outside a mesh all of it does nothing.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from animegamer_jax.devices import find_chip

Rules = Mapping[str, str | tuple[str, ...] | None]

MESH_AXES = ("data", "fsdp", "context", "tensor")

# Every logical axis name of the project. Parameters first, then activations.
DEFAULT_RULES: Rules = {
    "layers": None,
    "parts": None,  # the three of a fused query-key-value projection
    "embed": "fsdp",
    "heads": "tensor",  # all heads' features side by side
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "lora_rank": None,
    "norm": None,
    "time_embed": None,
    "modulation": ("fsdp", "tensor"),  # trained whole, with its moments
    "features": None,  # widths at a network's border: pixels, latents, other networks' features
    "positions": None,
    "kernel": None,  # extent of a convolution
    "conv_in": None,
    "conv_out": "fsdp",
    "buckets": None,
    "act_batch": ("data", "fsdp"),
    "act_length": "context",
    "act_embed": None,
    "act_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
    "act_frames": None,
    "act_rows": "context",
    "act_columns": None,
}

_RULES: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=DEFAULT_RULES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A named way to lay programs over a mesh.

    Attributes:
        name: of the plan.
        about: what it is for, in a line.
        rules: of all networks but those of `networks`.
        networks: rules of a network by its name.
        shape: sizes of the inner mesh axes; all other devices go to "data".
        fsdp: devices that share the weights at most, where `shape` does not say.
    """

    name: str
    about: str
    rules: Rules
    networks: Mapping[str, Rules] = dataclasses.field(default_factory=dict)
    shape: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fsdp: int = 1

    def of(self, network: str) -> Rules:
        """The rules of a network."""
        return self.networks.get(network, self.rules)

    def sharers(self, num_devices: int) -> int:
        """How many of so many devices share the weights: the most that divide them."""
        most = min(self.fsdp, num_devices)
        return max(n for n in range(1, most + 1) if num_devices % n == 0)

    def mesh_shape(self, num_devices: int) -> dict[str, int]:
        """Sizes of the mesh axes for so many devices.

        Raises:
            ValueError: the plan's inner axes do not divide them.
        """
        shape = dict(self.shape)
        if "fsdp" not in shape:
            inner = math.prod(shape.values())
            shape["fsdp"] = self.sharers(max(1, num_devices // inner))
        inner = math.prod(shape.values())
        if num_devices % inner:
            told = " x ".join(f"{name} {size}" for name, size in shape.items() if size > 1)
            raise ValueError(
                f"plan {self.name}: {told}: {num_devices} devices do not divide by {inner}: take "
                f"{max(1, num_devices // inner) * inner}"
            )
        return {"data": num_devices // inner, **shape}


_PARAMETERS = (
    "layers", "parts", "embed", "heads", "kv_heads", "mlp", "vocab", "lora_rank", "norm",
    "time_embed", "modulation", "features", "positions", "kernel", "conv_in", "conv_out", "buckets",
)  # fmt: skip
_WHOLE = {**DEFAULT_RULES, **dict.fromkeys(_PARAMETERS)}
_EIGHT = ("fsdp", "context")  # of a game's eight chips

PLANS: Mapping[str, Plan] = {
    plan.name: plan
    for plan in (
        Plan(
            name="sharded",
            about="training: every weight shared by up to 16 devices, the batch by all",
            rules=DEFAULT_RULES,
            fsdp=16,
        ),
        Plan(
            name="whole",
            about="training: every weight whole on every device, the batch shared by all",
            rules=_WHOLE,
        ),
        Plan(
            name="latency",
            about="play: a game on 8 devices: guidance's two rows x four parts of the sequence, "
            "the language model's heads over all eight, the clip's frames in 4 x 2 parts",
            rules=_WHOLE,
            networks={
                "dit": {**_WHOLE, "act_batch": ("fsdp", "data")},
                "mllm": {
                    **_WHOLE,
                    **dict.fromkeys(
                        ("heads", "kv_heads", "mlp", "vocab", "act_heads", "act_mlp", "act_vocab"),
                        _EIGHT,
                    ),
                    "act_batch": "data",
                    "act_length": None,
                },
                "vae": {**_WHOLE, "act_batch": "data", "act_columns": "fsdp"},
            },
            shape={"fsdp": 2, "context": 4},
        ),
        Plan(
            name="throughput",
            about="play: a game or more on each device",
            rules=_WHOLE,
        ),
    )
}


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Within the block, logical names mean `rules`."""
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


_PLAN: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("plan", default=None)


@contextlib.contextmanager
def use_plan(plan: Plan) -> Iterator[None]:
    """Within the block, logical names mean the plan's rules (`network_rules`: of one network)."""
    token = _PLAN.set(plan)
    try:
        with use_rules(plan.rules):
            yield
    finally:
        _PLAN.reset(token)


@contextlib.contextmanager
def network_rules(network: str) -> Iterator[None]:
    """Within the block, the rules in force are those of a network, where a plan has such."""
    plan = _PLAN.get()
    with contextlib.nullcontext() if plan is None else use_rules(plan.of(network)):
        yield


def axes(*names: str | None) -> dict[str, Any]:
    """Parameter metadata: `nnx.Param(value, **axes("embed", "mlp"))`.

    Names only: where a parameter lies is decided where it is made, by `jit`'s `out_shardings`.

    Raises:
        ValueError: a name is not in the rules table.
    """
    for name in names:
        if name is not None and name not in DEFAULT_RULES:
            raise ValueError(f"unknown logical axis {name!r}: add it to DEFAULT_RULES")
    return {"out_sharding": names, "eager_sharding": False}


def partition_spec(names: tuple[str | None, ...], rules: Rules | None = None) -> PartitionSpec:
    """Logical names to mesh axes by the rules in force.

    Raises:
        ValueError: two dimensions land on one mesh axis.
    """
    rules = _RULES.get() if rules is None else rules
    entries = [rules[name] if name else None for name in names]
    used: dict[str, str | None] = {}
    for name, entry in zip(names, entries, strict=True):
        for mesh_axis in (entry,) if isinstance(entry, str) else entry or ():
            if mesh_axis in used:
                raise ValueError(
                    f"axes {used[mesh_axis]!r} and {name!r} of one array both lie on the mesh "
                    f"axis {mesh_axis!r}: change the rule of one of them"
                )
            used[mesh_axis] = name
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins an activation's layout by logical names; does nothing outside a mesh.

    Raises:
        ValueError: the number of names is not the number of dimensions.
    """
    if len(names) != x.ndim:
        raise ValueError(f"{len(names)} axis names for an array of shape {x.shape}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # inside `shard_map` an array is one device's already
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names))


def shares(*names: str) -> int:
    """Among how many devices the rules in force share a dimension, or several together."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(parts_of(entry, mesh) for entry in partition_spec(names))


def parts_of(entry: Any, mesh: jax.sharding.AbstractMesh) -> int:
    """Among how many devices an entry of a partition spec shares its dimension."""
    each = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh.shape[name] for name in each)


def platform() -> str:
    """What a computation will run on: the mesh in force may describe chips that are elsewhere."""
    return getattr(_abstract_device(), "platform", None) or jax.default_backend()


def has_wide_unit() -> bool:
    """Whether these chips multiply matrices in squares of 256, as v6e, not of 128."""
    chip = find_chip(getattr(_abstract_device(), "device_kind", "") or jax.devices()[0].device_kind)
    return chip is not None and chip.matrix_width > 128


def _abstract_device() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


def make_mesh(
    shape: Mapping[str, int] | None = None, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh; axes not named in `shape` get 1, and all devices go to "data" by default.

    Args:
        shape: size of each axis. Those that are whole axes of a torus are the fastest.
        devices: that it is made of; None: all there are.

    Raises:
        ValueError: an axis is unknown, or the product of `shape` is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = {"data": len(devices)} if shape is None else shape
    if unknown := set(shape) - set(MESH_AXES):
        raise ValueError(f"unknown mesh axes {sorted(unknown)}: expected some of {MESH_AXES}")
    sizes = tuple(shape.get(name, 1) for name in MESH_AXES)
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh {dict(shape)} needs {math.prod(sizes)} devices, found {len(devices)}"
        )
    types = (AxisType.Auto,) * len(MESH_AXES)
    try:
        return jax.make_mesh(sizes, MESH_AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # 2 x 32 over a torus of 4 x 4 x 4: its axes must be split
        places = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(places, MESH_AXES, axis_types=types)


def param_shardings(state: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """A `NamedSharding` for each parameter of a (possibly abstract) state, by its axis names.

    A dimension that its mesh axes do not divide stays whole: 32,284 vocabulary rows over 8 chips.
    """

    def fit(size: int, entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        mesh_axes = (entry,) if isinstance(entry, str) else entry or ()
        return None if size % math.prod(mesh.shape[axis] for axis in mesh_axes) else entry

    def one(variable: nnx.Variable) -> NamedSharding:
        names = tuple(variable.get_metadata().get("out_sharding") or ())
        spec = partition_spec(names, rules)
        return NamedSharding(mesh, PartitionSpec(*map(fit, variable.shape, spec)))

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
