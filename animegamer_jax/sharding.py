"""Sharding: logical axis names of parameters and activations, and the rules to mesh axes.

Parameters and activations have separate names, because one array may use a mesh axis only once. A
rules table maps logical names to mesh axes. Outside a mesh none of this has any effect.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from animegamer_jax.devices import find_chip

Rules = Mapping[str, str | tuple[str, ...] | None]

MESH_AXES = ("data", "fsdp", "context", "tensor")

# Every logical axis name: parameters first, then activations.
DEFAULT_RULES: Rules = {
    "layers": None,
    "parts": None,  # query, key and value of a fused projection
    "embed": "fsdp",
    "heads": "tensor",  # the features of all heads, concatenated
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "lora_rank": None,
    "norm": None,
    "time_embed": None,
    "modulation": ("fsdp", "tensor"),  # fully trained, so it has optimizer moments
    "features": None,  # input and output widths: pixels, latents, other networks' features
    "positions": None,
    "kernel": None,  # spatial size of a convolution
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
class ShardingPlan:
    """A named layout of programs over a mesh.

    Attributes:
        name: Name of the plan.
        rules: Rules of all networks that are not in `networks`.
        networks: Rules of single networks, by name.
        shape: Sizes of the inner mesh axes; all other devices go to "data".
        fsdp: Largest number of devices that share the weights, if `shape` does not set it.
    """

    name: str
    rules: Rules
    networks: Mapping[str, Rules] = dataclasses.field(default_factory=dict)
    shape: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fsdp: int = 1

    def of(self, network: str) -> Rules:
        """Returns the rules of a network."""
        return self.networks.get(network, self.rules)

    def sharers(self, num_devices: int) -> int:
        """Returns how many devices share the weights: the largest allowed divisor."""
        most = min(self.fsdp, num_devices)
        return max(n for n in range(1, most + 1) if num_devices % n == 0)

    def mesh_shape(self, num_devices: int) -> dict[str, int]:
        """Returns the sizes of the mesh axes for a number of devices.

        Raises:
            ValueError: The plan's inner axes do not divide the number of devices.
        """
        shape = dict(self.shape)
        if "fsdp" not in shape:
            inner = math.prod(shape.values())
            shape["fsdp"] = self.sharers(max(1, num_devices // inner))
        inner = math.prod(shape.values())
        if num_devices % inner:
            axes = " x ".join(f"{name} {size}" for name, size in shape.items() if size > 1)
            raise ValueError(
                f"plan {self.name}: {axes}: {num_devices} devices do not divide by {inner}: use "
                f"{max(1, num_devices // inner) * inner}"
            )
        return {"data": num_devices // inner, **shape}


_PARAMETERS = (
    "layers", "parts", "embed", "heads", "kv_heads", "mlp", "vocab", "lora_rank", "norm",
    "time_embed", "modulation", "features", "positions", "kernel", "conv_in", "conv_out", "buckets",
)  # fmt: skip
_REPLICATED = {**DEFAULT_RULES, **dict.fromkeys(_PARAMETERS)}
_EIGHT = ("fsdp", "context")  # the eight devices of a game

_LATENCY: Mapping[str, Rules] = {
    "dit": {**_REPLICATED, "act_batch": ("fsdp", "data")},
    "mllm": {
        **_REPLICATED,
        **dict.fromkeys(
            ("heads", "kv_heads", "mlp", "vocab", "act_heads", "act_mlp", "act_vocab"), _EIGHT
        ),
        "act_batch": "data",
        "act_length": None,
    },
    "vae": {**_REPLICATED, "act_batch": "data", "act_columns": "fsdp"},
    # One frame a game: each of its devices encodes all of it.
    **{name: {**_REPLICATED, "act_batch": "data"} for name in ("clip", "encoder")},
}

PLANS: Mapping[str, ShardingPlan] = {
    plan.name: plan
    for plan in (
        # Training: every weight sharded over up to 16 devices, the batch over all.
        ShardingPlan(name="sharded", rules=DEFAULT_RULES, fsdp=16),
        # Training: every weight on every device, the batch sharded over all.
        ShardingPlan(name="replicated", rules=_REPLICATED),
        # Play: a game on 8 devices. Guidance's two rows x four parts of the sequence, the language
        # model's heads over all eight, the clip's frames in 4 x 2 parts.
        ShardingPlan(
            name="latency",
            rules=_REPLICATED,
            networks=_LATENCY,
            shape={"fsdp": 2, "context": 4},
        ),
        # Play: one game or more on each device.
        ShardingPlan(name="throughput", rules=_REPLICATED),
    )
}

_ONE_ROW = dataclasses.replace(
    PLANS["latency"],
    name="latency, one row",
    networks={**_LATENCY, "dit": {**_REPLICATED, "act_batch": "data", "act_length": _EIGHT}},
)


def play_plan(layout: str, *, guided: bool) -> ShardingPlan:
    """Returns the plan of a layout for play.

    Without guidance there is one row, whose sequence the eight devices of `latency` share.
    """
    return _ONE_ROW if layout == "latency" and not guided else PLANS[layout]


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Applies `rules` to logical names within the block."""
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


_PLAN: contextvars.ContextVar[ShardingPlan | None] = contextvars.ContextVar("plan", default=None)


@contextlib.contextmanager
def use_plan(plan: ShardingPlan) -> Iterator[None]:
    """Applies the plan's rules to logical names within the block (see also `network_rules`)."""
    token = _PLAN.set(plan)
    try:
        with use_rules(plan.rules):
            yield
    finally:
        _PLAN.reset(token)


@contextlib.contextmanager
def network_rules(network: str) -> Iterator[None]:
    """Applies the current plan's rules for one network within the block."""
    plan = _PLAN.get()
    with contextlib.nullcontext() if plan is None else use_rules(plan.of(network)):
        yield


def axes(*names: str | None) -> dict[str, Any]:
    """Returns parameter metadata: `nnx.Param(value, **axes("embed", "mlp"))`.

    These are names only: `jit`'s `out_shardings` decides the placement when a parameter is made.

    Raises:
        ValueError: A name is not in the rules table.
    """
    for name in names:
        if name is not None and name not in DEFAULT_RULES:
            raise ValueError(f"unknown logical axis {name!r}: add it to DEFAULT_RULES")
    return {"out_sharding": names, "eager_sharding": False}


def partition_spec(names: tuple[str | None, ...], rules: Rules | None = None) -> PartitionSpec:
    """Converts logical names to mesh axes by the current rules.

    Raises:
        ValueError: Two dimensions map to the same mesh axis.
    """
    rules = _RULES.get() if rules is None else rules
    entries = [rules[name] if name else None for name in names]
    used: dict[str, str | None] = {}
    for name, entry in zip(names, entries, strict=True):
        for mesh_axis in (entry,) if isinstance(entry, str) else entry or ():
            if mesh_axis in used:
                raise ValueError(
                    f"axes {used[mesh_axis]!r} and {name!r} of one array both map to the mesh "
                    f"axis {mesh_axis!r}: change the rule of one of them"
                )
            used[mesh_axis] = name
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains an activation's sharding by logical names; does nothing outside a mesh.

    Raises:
        ValueError: The number of names is not the number of dimensions.
    """
    if len(names) != x.ndim:
        raise ValueError(f"{len(names)} axis names for an array of shape {x.shape}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # inside `shard_map` an array belongs to one device
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names))


def shares(*names: str) -> int:
    """Returns how many devices share a dimension, or several together, by the current rules."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(parts_of(entry, mesh) for entry in partition_spec(names))


def parts_of(entry: Any, mesh: Mesh | jax.sharding.AbstractMesh) -> int:
    """Returns how many devices share the dimension of a partition spec's entry."""
    each = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh.shape[name] for name in each)


def platform() -> str:
    """Returns the platform that a computation will run on: the current mesh's, if there is one."""
    return getattr(_abstract_device(), "platform", None) or jax.default_backend()


def has_wide_unit() -> bool:
    """Returns whether the chips' matrix units are 256 wide, as on v6e, instead of 128."""
    chip = find_chip(getattr(_abstract_device(), "device_kind", "") or jax.devices()[0].device_kind)
    return chip is not None and chip.matrix_width > 128


def overlapping_gathers(mesh: Mesh) -> dict[str, bool]:
    """Returns compiler options by which a mesh's gathers overlap the computation around them.

    On some chips the compiler waits for each gather, unless SparseCores carry it out and the
    scheduler may queue it for them.
    """
    chip = find_chip(mesh.devices.flat[0].device_kind)
    if mesh.size == 1 or chip is None or not chip.overlaps_by_sparse_cores:
        return {}
    return {
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,
    }


def cuda_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the GPU that a computation will run on, such as (8, 9).

    None: it runs on something else, or on another maker's GPU.
    """
    if platform() != "gpu":
        return None
    name = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "")
    major, _, minor = str(name).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _abstract_device() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


def count_slices(devices: Sequence[Any] | None = None) -> int:
    """Returns to how many TPU slices some devices belong (None: all devices); 1 if not to any."""
    devices = jax.devices() if devices is None else devices
    return len({getattr(device, "slice_index", 0) for device in devices})


def make_mesh(
    shape: Mapping[str, int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    slices: int | None = None,
) -> Mesh:
    """Makes a mesh. Axes not named in `shape` get size 1.

    With several slices, "data" is the axis between them: its first factor counts the slices, and
    the devices that share weights, sequences and heads are all of one slice. So only the sums of
    gradients cross the network between slices.

    Args:
        shape: Size of each axis; fastest if they match the torus. None: all devices on "data".
        devices: Devices of the mesh; None: all devices.
        slices: Number of slices; None: those of the devices. Devices that belong to no slice are
            taken as that many slices of equal size, in their order, to simulate some.

    Raises:
        ValueError: An axis is unknown, the product of `shape` is not the number of devices, or the
            slices do not divide "data".
    """
    devices = jax.devices() if devices is None else devices
    slices = count_slices(devices) if slices is None else slices
    shape = {"data": len(devices)} if shape is None else shape
    if unknown := set(shape) - set(MESH_AXES):
        raise ValueError(f"unknown mesh axes {sorted(unknown)}: expected some of {MESH_AXES}")
    sizes = tuple(shape.get(name, 1) for name in MESH_AXES)
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh {dict(shape)} needs {math.prod(sizes)} devices, found {len(devices)}"
        )
    types = (AxisType.Auto,) * len(MESH_AXES)
    if slices > 1:
        return Mesh(_over_slices(sizes, devices, slices=slices), MESH_AXES, axis_types=types)
    try:
        return jax.make_mesh(sizes, MESH_AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # such as 2 x 32 on a 4 x 4 x 4 torus: physical axes are split
        array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(array, MESH_AXES, axis_types=types)


def _over_slices(sizes: Sequence[int], devices: Sequence[Any], *, slices: int) -> np.ndarray:
    """Returns the devices of a mesh over slices, "data" between them."""
    if sizes[0] % slices:
        raise ValueError(f"data {sizes[0]}: expected a multiple of the {slices} slices")
    inner = (sizes[0] // slices, *sizes[1:])
    if count_slices(devices) == 1:  # simulated
        parts = np.split(np.array(devices), slices)
        meshes = [mesh_utils.create_device_mesh(inner, part.tolist()) for part in parts]
        return np.concatenate(meshes)
    return mesh_utils.create_hybrid_device_mesh(
        inner, (slices, *(1 for _ in inner[1:])), devices, allow_split_physical_axes=True
    )


def param_shardings(state: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """Returns a `NamedSharding` for each parameter of a (possibly abstract) state, by axis names.

    A dimension that its mesh axes do not divide is replicated: 32,284 vocabulary rows over 8 chips.
    """

    def fit(size: int, entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return None if size % parts_of(entry, mesh) else entry

    def one(variable: nnx.Variable) -> NamedSharding:
        names = tuple(variable.get_metadata().get("out_sharding") or ())
        spec = partition_spec(names, rules)
        return NamedSharding(mesh, PartitionSpec(*map(fit, variable.shape, spec)))

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
