"""The toy's foundations: the networks that the paper takes ready-made, each a stage of its own.

Order: CLIP and T5 need games only; the VAE needs CLIP; then features are made; the transformer
needs them, the VAE and T5. At full size there is nothing to train: released networks are converted.
"""

from collections.abc import Mapping
from typing import Any

from animegamer_jax.train import foundation_clip, foundation_dit, foundation_t5, foundation_vae
from animegamer_jax.train.recipe import Recipe
from animegamer_jax.train.stage import Stage

PARTS: Mapping[str, type[Stage[Any]]] = {
    "clip": foundation_clip.CLIPStage,
    "t5": foundation_t5.T5Stage,
    "vae": foundation_vae.VAEStage,
    "dit": foundation_dit.DiTStage,
}
RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "clip": foundation_clip.RECIPES,
    "t5": foundation_t5.RECIPES,
    "vae": foundation_vae.RECIPES,
    "dit": foundation_dit.RECIPES,
}
