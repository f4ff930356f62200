"""The adaptation stage: the decoder learns what the language model really says (PAPER section 3.4).

The frozen language model reads the true history and predicts the shot representation inside the
step; the decoder is trained, by its own loss, to make the true clip of that.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import grain
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, UInt8

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.samples import Starts, adapt_samples
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.mllm import MLLM
from animegamer_jax.protocol import Layout
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.stages.base import (
    DataSource,
    Networks,
    Scalars,
    Stage,
    Watched,
)
from animegamer_jax.train.stages.decoder import (
    DECODER_OPTIMIZER,
    ClipRecipe,
    check_low_rank,
    drawn_loss,
    make_clip_look,
    trains_transformer,
    transformer_flops,
    vae_config_of,
)
from animegamer_jax.train.stages.mllm import (
    check_protocol,
    lay_out,
    load_mllm_tokenizer,
    make_layout,
    make_windows,
)
from animegamer_jax.train.stages.networks import matrix_size, mixed_samples
from animegamer_jax.train.stages.recipe import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptRecipe(ClipRecipe):
    """What the adaptation needs to know beside.

    Attributes:
        context_dropout: share of samples whose context is that of guidance's unconditional row
            (ours).
        starts: which histories the language model sees, see `Windows`.
    """

    context_dropout: float = 0.05
    starts: Starts = "game"


RECIPES = {
    "toy": AdaptRecipe(
        steps=1200,
        batch_size=16,
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=50, decay="cosine"),
        ema_decay=0.999,
        dtype="bfloat16",
        remat="full",
        trained="all",
        context_dropout=0.0,
    ),
    # Steps and learning rate as they are reported of the paper's section 4.1; the optimizer's other
    # numbers, batch and average as in the joint stage. 1 to 5 turns, uniformly, of released files.
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


class AdaptStage(Stage[AdaptRecipe]):
    """Trains the decoder on the frozen language model's predictions."""

    name: ClassVar[str] = "adapt"
    needs: ClassVar[Mapping[NetworkName, str]] = {
        "vae": "foundations --part vae",
        "encoder": "warmup",
        "dit": "decoder",
        "mllm": "mllm",
    }
    changes: ClassVar[tuple[NetworkName, ...]] = ("dit",)
    unit: ClassVar[str] = "clips"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_mllm_tokenizer(self)

    @functools.cached_property
    def layout(self) -> Layout:
        return make_layout(self, self.tokenizer)

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> Networks:
        """The decoder, E_a and the language model.

        Raises:
            UserError: the recipe trains low-rank updates and the decoder has none, or the
                protocol is not one to train by.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        recipe = self.recipe
        check_protocol(self)
        check_low_rank(self)
        return {
            "dit": bundle.load("dit", mesh=mesh, dtype=recipe.dtype, remat=recipe.remat),
            "encoder": bundle.load("encoder", mesh=mesh, dtype=recipe.dtype),
            "mllm": bundle.load("mllm", mesh=mesh, dtype=recipe.dtype),
            "vae": bundle.load("vae", mesh=mesh, dtype=recipe.dtype),
        }

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        return network == "dit" and trains_transformer(self.recipe, path, variable)

    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        windows = make_windows(self, self.tokenizer, starts=self.recipe.starts)

        def make(path: str) -> grain.MapDataset:
            features = open_features(path)
            # Of T5 and CLIP, which made the features, the bundle need have none any more.
            reader = dataclasses.replace(self.config, t5=None, clip=None)
            return adapt_samples(features, split=split, windows=windows, config=reader)

        return mixed_samples(sources, make)

    def context(self, networks: Networks, batch: Any, key: Key[Array, ""]) -> Float[Array, "b n r"]:
        """What the language model predicts of `AdaptSample`s, or E_a of zeros; no gradients."""
        encoder = cast(ShotEncoder, networks["encoder"])
        predicted = self.predict(networks, batch)
        empty = encoder.unconditional().astype(jnp.float32)[None]
        dropped = jax.random.bernoulli(key, self.recipe.context_dropout, predicted.shape[:1])
        return jax.lax.stop_gradient(jnp.where(dropped[:, None, None], empty, predicted))

    def predict(self, networks: Networks, batch: Any) -> Float[Array, "b n r"]:
        """The language model's shot representations of `AdaptSample`s."""
        mllm, encoder = cast(MLLM, networks["mllm"]), cast(ShotEncoder, networks["encoder"])
        prompts = lay_out(encoder, batch.game, self.layout)
        return mllm.represent(prompts.prompt, prompts.history, self.layout)

    def motion(self, batch: Any) -> Float[Array, " b"]:
        """True motion values; a model that plays without is trained without."""
        return jnp.where(any(self.protocol.motion_values), batch.motion_value, 0.0)

    def loss(
        self, networks: Networks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """The decoder's loss on the latents of this turn, with its true motion value."""
        drop, draws = jax.random.split(key)
        loss = drawn_loss(
            cast(DiT, networks["dit"]),
            batch.moments,
            draws,
            vae_config=vae_config_of(self.config),
            context=self.context(networks, batch, drop),
            motion=self.motion(batch),
        )
        return loss.mean(), {}

    def sample_flops(self, networks: Networks) -> float:
        """By matrices and scores: the language model forward, the decoder forward and back."""
        mllm, dit = cast(MLLM, networks["mllm"]), cast(DiT, networks["dit"])
        c, length = mllm.config.mistral, self.layout.length
        matrices = 2.0 * matrix_size(mllm.mistral.layers) * length
        scores = 4.0 * length**2 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        return matrices + scores + transformer_flops(dit, trained=self.recipe.trained)

    @functools.cached_property
    def _look(self) -> Callable[..., UInt8[Array, "b s y x 3"]]:
        return make_clip_look(self, context=self.predict, motion=self.motion)

    def watch(self, networks: Networks, batch: Any, key: Key[Array, ""]) -> Watched:
        """Clips sampled from what the language model predicts, at the right of the true ones."""
        if not self.recipe.watch_clips:
            return Watched({}, {})
        return Watched({}, {"true_and_sampled": self._look(networks, batch, key)})


STAGE = AdaptStage
