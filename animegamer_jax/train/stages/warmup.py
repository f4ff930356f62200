"""The warm-up: the shot encoder learns the frozen decoder's language first (PAPER section 4.1).

Trained are E_a and the decoder's motion layer. Without it, the ablation says, the joint stage ends
far worse.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.train.stages.base import Networks, Watched
from animegamer_jax.train.stages.decoder import (
    DECODER_OPTIMIZER,
    ConditionRecipe,
    DecoderStage,
)
from animegamer_jax.train.stages.networks import load_or_make
from animegamer_jax.train.stages.recipe import FixedRecipe, OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupRecipe(FixedRecipe, ConditionRecipe):
    """What the warm-up needs to know beside."""


RECIPES = {
    "toy": WarmupRecipe(
        steps=300,
        batch_size=16,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, decay="cosine"),
        ema_decay=0.99,
        dtype="bfloat16",
        remat="full",
        both_dropout=0.0,  # it plays without guidance
        text_dropout=0.0,
        image_dropout=0.0,
    ),
    # Steps as they are reported of the paper's section 4.1, the rest as in the joint stage.
    "full": WarmupRecipe(
        steps=10_000,
        batch_size=16,
        optimizer=DECODER_OPTIMIZER,
        ema_decay=0.9999,
        dtype="bfloat16",
        remat="full",
        save_every=1000,
        watch_every=2000,
    ),
}


class WarmupStage(DecoderStage):
    """Trains the shot encoder and the motion layer, the rest of the decoder frozen."""

    name: ClassVar[str] = "warmup"
    needs: ClassVar[Mapping[NetworkName, str]] = {
        "vae": "foundations --part vae",
        "dit": "foundations --part dit",
    }

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> Networks:
        """The decoder, and the encoder: the bundle's, or a new one of the recipe's seed."""
        assert bundle is not None, "the command has checked what the stage needs"
        return {
            "encoder": load_or_make("encoder", self, bundle, mesh=mesh),
            "dit": load_or_make("dit", self, bundle, mesh=mesh),
        }

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        """The encoder and the motion layer."""
        if network == "encoder":
            return super().is_trained(network, path, variable)
        return path[0] == "motion_embed"

    def watch(self, networks: Networks, batch: Any, key: Key[Array, ""]) -> Watched:
        """Nothing beside the loss."""
        del networks, batch, key
        return Watched({}, {})


STAGE = WarmupStage
