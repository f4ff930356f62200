"""Devices of a stage: the default layout, the mesh, and what the mesh must divide."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from animegamer_jax.errors import UserError
from animegamer_jax.train.stages.recipe import Recipe, check_numbers

if TYPE_CHECKING:
    from animegamer_jax.configs import ModelConfig
    from animegamer_jax.sharding import ShardingPlan

_WITHOUT_TRANSFORMER = ("mllm", "foundations-clip", "foundations-t5", "foundations-vae")
_ROOMY_GB = 30.0  # enough for the frozen language model and a step


def default_layout(
    stage: str, *, num_devices: int, memory_gb: float | None, trains_all: bool
) -> str:
    """Returns the default plan of `sharding.PLANS` for a stage or the rollout, by name.

    In play a game takes eight devices if their number is a multiple of eight. In training the
    weights are sharded, except for the language model's low-rank updates on devices that can hold
    its frozen weights.

    Args:
        stage: Name of the stage, or "rollout".
        num_devices: Number of devices.
        memory_gb: Memory of a device in 10^9 bytes; None if unknown (not a TPU).
        trains_all: Whether all weights are trained.
    """
    if stage == "rollout":
        return "latency" if num_devices % 8 == 0 else "throughput"
    roomy = memory_gb is not None and memory_gb >= _ROOMY_GB
    return "replicated" if stage == "mllm" and roomy and not trains_all else "sharded"


def mesh_shape(
    plan: "ShardingPlan",
    *,
    num_devices: int,
    fsdp: int | None,
    context: int,
    tensor: int,
    slices: int = 1,
) -> dict[str, int]:
    """Returns the sizes of the mesh axes for training; "data" gets the remaining devices.

    If `fsdp` is None, the layout `plan` decides how many devices share weights. Devices that share
    weights, sequences or heads are of one of the `slices`.

    Raises:
        UserError: The sizes do not divide the number of devices of a slice.
    """
    if slices < 1 or num_devices % slices:
        raise UserError(f"--slices {slices}: expected a divisor of the {num_devices} devices")
    num_devices //= slices
    inner = {"fsdp": fsdp, "context": context, "tensor": tensor}
    given = {name: size for name, size in inner.items() if size is not None}
    product = math.prod(given.values())
    if min(given.values()) < 1 or num_devices % product:
        words = " x ".join(f"--{name} {size}" for name, size in given.items())
        of = " of a slice" if slices > 1 else ""
        raise UserError(f"{words}: expected a divisor of the {num_devices} devices" + of)
    left = num_devices // product
    if fsdp is None:
        fsdp = plan.sharers(left)
        left //= fsdp
    return {"data": slices * left, "fsdp": fsdp, "context": context, "tensor": tensor}


def check_recipe(recipe: Recipe, *, batch_shards: int) -> None:
    """Checks that the numbers of a recipe fit each other and the mesh.

    Raises:
        UserError: A number is out of range, or the batch cannot be divided.
    """
    check_numbers(recipe)
    unit = recipe.accumulate * batch_shards
    if recipe.batch_size % unit:
        below = recipe.batch_size // unit * unit
        good = f"{below} or {below + unit}" if below else f"{unit}"
        raise UserError(
            f"--batch-size {recipe.batch_size}: expected a multiple of {unit} "
            f"(--accumulate {recipe.accumulate} x {batch_shards} devices that share the batch): "
            f"{good}"
        )


def check_mesh(recipe: Recipe, shape: Mapping[str, int], config: "ModelConfig", stage: str) -> None:
    """Checks that the mesh divides batch and heads.

    Raises:
        UserError: It does not; names sizes that would.
    """
    check_recipe(recipe, batch_shards=shape.get("data", 1) * shape.get("fsdp", 1))
    tensor = shape.get("tensor", 1)
    heads: dict[str, int] = {}
    if config.dit is not None and stage not in _WITHOUT_TRANSFORMER:
        heads["the transformer's heads"] = config.dit.num_attention_heads
    if config.mllm is not None and stage in ("mllm", "adapt", "picture", "distill"):
        heads["the language model's heads"] = config.mllm.mistral.num_attention_heads
        heads["its key and value heads"] = config.mllm.mistral.num_key_value_heads
    for what, count in heads.items():
        check_divides(f"tensor={tensor}", tensor, what=what, size=count)


def check_divides(option: str, parts: int, *, what: str, size: int) -> None:
    """Checks that a number of parts divides a dimension, which counts `what`, in the plural.

    `option` is the option that gives the number of parts, with its value.

    Raises:
        UserError: It does not; names numbers that would.
    """
    if size % parts:
        good = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise UserError(f"{option}: {what} are {size}: expected one of {good}")
