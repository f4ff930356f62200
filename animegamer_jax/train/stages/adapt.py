"""The adaptation stage: the decoder adapts to predicted representations (paper, section 3.4).

Inside the step, the frozen language model predicts the shot representation from the history;
the decoder is trained, with its own loss, to make the true clip from it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import grain
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.samples import AdaptSample, adapt_samples, adapt_spec
from animegamer_jax.train.stages.base import StageNetworks
from animegamer_jax.train.stages.decoder import (
    DECODER_OPTIMIZER,
    ClipRecipe,
    ClipStage,
    DrawnRecipe,
    transformer_flops,
)
from animegamer_jax.train.stages.mllm import GameRecipe, GameStage, lay_out
from animegamer_jax.train.stages.networks import matrix_size
from animegamer_jax.train.stages.recipe import OptimizerConfig, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionRecipe(GameRecipe, ClipRecipe):
    """The recipe of a stage whose decoder is given the language model's predictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptRecipe(PredictionRecipe, DrawnRecipe):
    """The recipe of the adaptation.

    Attributes:
        context_dropout: Share of samples whose context is the unconditional one of guidance (not in
            the paper).
    """

    context_dropout: Share = 0.05


RECIPES = {
    "toy": AdaptRecipe(
        steps=2400,
        batch_size=8,
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=50, decay="cosine"),
        ema_decay=0.999,
        dtype="bfloat16",
        trained="all",
        context_dropout=0.15,
    ),
    # Steps and learning rate as reported in the paper's section 4.1; the optimizer's other numbers,
    # batch and average as in the joint stage. 1 to 5 turns, uniformly, as in the released files.
    "full": AdaptRecipe(
        steps=10_000,
        batch_size=16,
        optimizer=dataclasses.replace(DECODER_OPTIMIZER, learning_rate=5e-5),
        ema_decay=0.9999,
        dtype="bfloat16",
        remat="full",
        starts="anywhere",
    ),
}


P = TypeVar("P", bound=PredictionRecipe)


class PredictionStage(ClipStage[P], GameStage[P]):
    """A stage that trains the decoder on the frozen language model's predictions."""

    needs: ClassVar[Mapping[NetworkName, str]] = {
        "vae": "foundations --part vae",
        "encoder": "warmup",
        "dit": "decoder",
        "mllm": "mllm",
    }
    changes: ClassVar[tuple[NetworkName, ...]] = ("dit",)

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the decoder, E_a, the language model, and the VAE for the evaluation's clips.

        Raises:
            UserError: the recipe trains low-rank updates and the decoder has none, or a model
                cannot be trained for the protocol.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        self.check_protocol()
        networks = super().load(bundle, mesh=mesh)
        return {**networks, "mllm": bundle.load("mllm", mesh=mesh, dtype=self.recipe.dtype)}

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        features = open_features(path)
        # The bundle may lack T5 and CLIP, which have made the features.
        reader = dataclasses.replace(self.config, t5=None, clip=None)
        return adapt_samples(
            features,
            split=split,
            windows=self.windows(),
            config=reader,
            shown=self.reads_shown(split),
        )

    def sample_spec(self) -> AdaptSample:
        return adapt_spec(self.config, self.protocol, shown=self.reads_shown())

    def represent(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""] | None = None
    ) -> Float[Array, "b n r"]:
        """Returns the language model's shot representations of `AdaptSample`s.

        The history is the true one; given a key, that of training.
        """
        mllm, encoder = networks["mllm"], networks["encoder"]
        prompts = lay_out(encoder, batch.game, self.layout)
        history = prompts.history
        if key is not None:
            history = self.history(encoder, batch.game, prompts, key)
        return mllm.represent(prompts.prompt, history, self.layout)

    def motion(self, batch: Any) -> Float[Array, " b"]:
        """Returns the true motion values, or zeros for a model that plays without them."""
        return jnp.where(any(self.protocol.motion_values), batch.motion_value, 0.0)

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs from the matrices' sizes and attention's products."""
        mllm, dit = networks["mllm"], networks["dit"]
        c, length = mllm.config.mistral, self.layout.length
        matrices = 2.0 * matrix_size(mllm.mistral.layers) * length
        scores = 4.0 * length**2 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        return (
            matrices
            + scores
            + transformer_flops(dit, trained=self.recipe.trained, pictures=self.pictures)
        )


class AdaptStage(PredictionStage[AdaptRecipe]):
    """Trains the decoder to make clips of predictions."""

    recipes = RECIPES
    name: ClassVar[str] = "adapt"

    def context(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> Float[Array, "b n r"]:
        """Returns predictions for `AdaptSample`s, or E_a of zeros; without gradients."""
        encoder = networks["encoder"]
        drop, show = jax.random.split(key)
        predicted = self.represent(networks, batch, show)
        empty = encoder.unconditional().astype(jnp.float32)[None]
        dropped = jax.random.bernoulli(drop, self.recipe.context_dropout, predicted.shape[:1])
        return jax.lax.stop_gradient(jnp.where(dropped[:, None, None], empty, predicted))
