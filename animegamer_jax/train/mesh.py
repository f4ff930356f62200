"""How a stage lies on devices: the plan that is taken where none is told, and what must divide."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from animegamer_jax.errors import UserError
from animegamer_jax.train.stages.recipe import Recipe

if TYPE_CHECKING:
    from animegamer_jax.configs import ModelConfig
    from animegamer_jax.sharding import ShardingPlan

_WITHOUT_TRANSFORMER = ("mllm", "foundations-clip", "foundations-t5", "foundations-vae")
_ROOMY_GB = 30.0  # holds the frozen language model and what a step needs


def default_layout(
    stage: str, *, num_devices: int, memory_gb: float | None, trains_all: bool
) -> str:
    """The plan of `sharding.PLANS` for a stage (or the rollout) on so many devices.

    Play: a game on eight devices where there are so many. Training: the weights shared, but for the
    language model's low-rank updates where a device holds its frozen weights whole.

    Args:
        stage: its name, or "rollout".
        num_devices: of the slice.
        memory_gb: of a device, 10^9 bytes; None: unknown (not a TPU).
        trains_all: whether all weights are trained.
    """
    if stage == "rollout":
        return "latency" if num_devices % 8 == 0 else "throughput"
    roomy = memory_gb is not None and memory_gb >= _ROOMY_GB
    return "replicated" if stage == "mllm" and roomy and not trains_all else "sharded"


def mesh_shape(
    plan: "ShardingPlan", *, num_devices: int, fsdp: int | None, context: int, tensor: int
) -> dict[str, int]:
    """Sizes of the mesh axes for training; the rest of the devices goes to "data".

    Args:
        plan: says how many devices share the weights at most, where `fsdp` does not.
        num_devices: to be divided.
        fsdp: devices that share every weight.
        context: devices that share every sequence.
        tensor: devices that share every head and layer.

    Raises:
        UserError: the devices do not divide so.
    """
    inner = {"fsdp": fsdp, "context": context, "tensor": tensor}
    told = {name: size for name, size in inner.items() if size is not None}
    product = math.prod(told.values())
    if min(told.values()) < 1 or num_devices % product:
        words = " x ".join(f"--{name} {size}" for name, size in told.items())
        raise UserError(f"{words}: expected a divisor of the {num_devices} devices")
    left = num_devices // product
    if fsdp is None:
        fsdp = plan.sharers(left)
        left //= fsdp
    return {"data": left, "fsdp": fsdp, "context": context, "tensor": tensor}


def check_recipe(recipe: Recipe, *, batch_shards: int) -> None:
    """Makes sure that the numbers of a recipe fit each other and the mesh.

    Raises:
        UserError: one is below its least value, or the batch does not divide.
    """
    at_least_one = ("steps", "batch_size", "accumulate", "log_every", "save_every", "watch_every")
    for field in (*at_least_one, "keep_last", "watch_batches"):
        if getattr(recipe, field) < 1:
            option = field.replace("_", "-")
            raise UserError(f"--{option} {getattr(recipe, field)}: expected 1 or more")
    if recipe.ema_decay is not None and not 0 <= recipe.ema_decay < 1:
        raise UserError(f"--ema-decay {recipe.ema_decay}: expected None or 0 up to below 1")
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
    """Whether batch and heads divide by the mesh.

    Args:
        recipe: of the stage.
        shape: sizes of the mesh axes.
        config: of the networks.
        stage: its name.

    Raises:
        UserError: names what does not, and what would.
    """
    check_recipe(recipe, batch_shards=shape.get("data", 1) * shape.get("fsdp", 1))
    tensor = shape.get("tensor", 1)
    heads: dict[str, int] = {}
    if config.dit is not None and stage not in _WITHOUT_TRANSFORMER:
        heads["the transformer's heads"] = config.dit.num_attention_heads
    if config.mllm is not None and stage in ("mllm", "adapt"):
        heads["the language model's heads"] = config.mllm.mistral.num_attention_heads
        heads["its key and value heads"] = config.mllm.mistral.num_key_value_heads
    for what, count in heads.items():
        check_divides(f"tensor={tensor}", tensor, what=what, size=count)


def check_divides(told: str, parts: int, *, what: str, size: int) -> None:
    """Whether so many parts divide a dimension.

    Args:
        told: the option and its value.
        parts: of the dimension.
        what: it is the size of, in the plural.
        size: of the dimension.

    Raises:
        UserError: names what would.
    """
    if size % parts:
        good = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise UserError(f"{told}: {what} are {size}: expected one of {good}")
