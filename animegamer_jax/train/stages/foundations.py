"""The toy's foundations: the networks that the paper takes ready-made, each a stage of its own.

Order: CLIP and T5 need games only; the VAE needs CLIP; then features are made; the transformer
needs them, the VAE and T5. At full size there is nothing to train: released networks are converted.
"""

from collections.abc import Mapping
from typing import Any

from animegamer_jax.train.stages import clip, dit, t5, vae
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.stages.recipe import Recipe

PARTS: Mapping[str, type[Stage[Any]]] = {
    "clip": clip.CLIPStage,
    "t5": t5.T5Stage,
    "vae": vae.VAEStage,
    "dit": dit.DiTStage,
}
RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "clip": clip.RECIPES,
    "t5": t5.RECIPES,
    "vae": vae.RECIPES,
    "dit": dit.RECIPES,
}
