"""The stages by name: `animegamer train STAGE [--part PART]`."""

import importlib
from typing import TYPE_CHECKING, Any

from animegamer_jax.configs import SIZES
from animegamer_jax.errors import UserError
from animegamer_jax.train.stages.recipe import Recipe

if TYPE_CHECKING:
    from animegamer_jax.train.stages.base import Stage

STAGES = ("foundations", "warmup", "decoder", "mllm", "adapt", "picture", "distill")
# The networks that the paper takes ready-made, trained for the toy only, each a stage of its own:
# CLIP and T5 need games, the VAE needs CLIP, the transformer needs features, made with these three.
PARTS = ("clip", "t5", "vae", "dit")
_CLASSES = {  # imported only when needed
    "clip": "foundations.clip:CLIPStage",
    "t5": "foundations.t5:T5Stage",
    "vae": "foundations.vae:VAEStage",
    "dit": "foundations.dit:DiTStage",
    "warmup": "decoder:WarmupStage",
    "decoder": "decoder:DecoderStage",
    "mllm": "mllm:MLLMStage",
    "adapt": "adapt:AdaptStage",
    "picture": "adapt:PictureStage",
    "distill": "distill:DistillStage",
}


def find_stage(
    name: str, *, part: str | None = None, size: str = "toy"
) -> tuple[type["Stage[Any]"], Recipe]:
    """Returns the class of a stage and its recipe of a size.

    Raises:
        UserError: There is no such stage, part, size or recipe.
    """
    if name not in STAGES:
        raise UserError(f"unknown stage {name!r}: expected one of {', '.join(STAGES)}")
    if name != "foundations" and part is not None:
        raise UserError(f"stage {name}: --part {part}: only foundations has parts: leave it out")
    if name == "foundations" and part is None:
        raise UserError(f"stage {name}: expected --part, one of {', '.join(PARTS)}, found none")
    if part is not None and part not in PARTS:
        raise UserError(f"--part {part}: expected one of {', '.join(PARTS)}")
    if size not in SIZES:
        raise UserError(f"--size {size}: expected one of {', '.join(SIZES)}")
    module, class_name = _CLASSES[part or name].split(":")
    stage: type[Stage[Any]] = getattr(
        importlib.import_module(f"animegamer_jax.train.stages.{module}"), class_name
    )
    if size not in stage.recipes:
        raise UserError(
            f"--size {size}: {stage.name} has recipes only for {', '.join(stage.recipes)}: convert "
            "the released networks instead (`animegamer initialise`)"
        )
    return stage, stage.recipes[size]
