"""Toy foundations: the diffusion transformer learns text to video from scratch.

The paper starts from CogVideoX-2B, which was trained like this, and trains it further on WebVid
(section 4.1). Here T5's features of a whole caption take the place of the shot representation; the
layer that maps them is discarded afterwards, and the motion layer is not used.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import grain
import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import DiTConfig, NetworkConfig
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.samples import TurnSample, turn_samples, turn_spec
from animegamer_jax.models.dit import GATES, Block, DiT
from animegamer_jax.models.linear import Linear
from animegamer_jax.train.stages.base import StageNetworks
from animegamer_jax.train.stages.decoder import (
    Conditions,
    DiffusionStage,
    transformer_flops,
    zero_motion_layer,
)
from animegamer_jax.train.stages.networks import load_or_make, matrix_size
from animegamer_jax.train.stages.recipe import FixedRecipe, OptimizerConfig, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTRecipe(FixedRecipe):
    """The recipe of the transformer's pre-training.

    Attributes:
        context_dropout: Share of samples whose context is zero.
    """

    context_dropout: Share = 0.1


RECIPES = {
    "toy": DiTRecipe(
        steps=1500,
        batch_size=8,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100, decay="cosine"),
        ema_decay=0.999,
        dtype="bfloat16",
    )
}


def open_gates(dit: DiT) -> None:
    """Removes the effect of timestep and motion: no shift, no scale, every gate one.

    A new transformer learns faster as a plain one (docs/decisions/training-the-toy.md).
    """
    blocks = cast(Block, dit.layers.blocks)  # their parameters, stacked over the layers
    for modulation in (blocks.modulation, dit.output_modulation):
        modulation.kernel.set_value(jnp.zeros_like(modulation.kernel[...]))
    bias = blocks.modulation.bias
    assert bias is not None
    parts = jnp.zeros_like(rearrange(bias[...], "l (n d) -> l n d", n=12))
    parts = parts.at[:, GATES].set(1.0)
    bias.set_value(rearrange(parts, "l n d -> l (n d)"))


class DiTStage(DiffusionStage[DiTRecipe]):
    """Train the transformer to make clips from captions."""

    recipes = RECIPES
    name: ClassVar[str] = "foundations-dit"
    needs: ClassVar[Mapping[NetworkName, str]] = {
        "vae": "foundations --part vae",
        "t5": "foundations --part t5",
    }
    changes: ClassVar[tuple[NetworkName, ...]] = ("dit",)

    @property
    def _dit(self) -> DiTConfig:
        assert self.config.dit is not None
        return self.config.dit

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the transformer, the bundle's or a new one, T5, and its features' layer."""
        assert bundle is not None, "the command has checked what the stage needs"
        recipe = self.recipe
        dit = load_or_make("dit", self, bundle, mesh=mesh)
        if not bundle.has("dit"):
            zero_motion_layer(dit)
            open_gates(dit)
        t5 = bundle.load("t5", mesh=mesh, dtype=recipe.dtype)
        context = Linear(
            t5.config.d_model,
            dit.config.hidden_size,
            names=("features", "embed"),
            config=NetworkConfig(dtype=recipe.dtype),
            rngs=nnx.Rngs(recipe.seed),
        )
        return {"dit": dit, "t5": t5, "context": context}

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        if network == "dit":
            return path[0] != "motion_embed" and not isinstance(variable, nnx.LoRAParam)
        return network == "context"

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        return turn_samples(
            open_features(path),
            split=split,
            tokenizer=self.tokenizer,
            caption_length=self._dit.num_context_tokens,
            config=self.config,
        )

    def sample_spec(self) -> TurnSample:
        return turn_spec(self.config, caption_length=self._dit.num_context_tokens)

    def conditions(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Conditions:
        """Returns the captions' features as context; zeros for dropped samples."""
        t5, to_context = networks["t5"], networks["context"]
        context = to_context(jax.lax.stop_gradient(t5(jnp.asarray(batch.caption))))
        dropped = jax.random.bernoulli(key, self.recipe.context_dropout, (context.shape[0], 1, 1))
        return Conditions(jnp.where(dropped, 0.0, context).astype(context.dtype))

    def motion(self, batch: Any) -> Float[Array, " b"]:
        return jnp.zeros_like(batch.motion_value)

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs as in the joint stage, with T5's forward pass in the encoder's place."""
        tokens = self._dit.num_context_tokens
        t5 = 2.0 * matrix_size(networks["t5"]) + 6.0 * matrix_size(networks["context"])
        return t5 * tokens + transformer_flops(networks["dit"], trained="all")
