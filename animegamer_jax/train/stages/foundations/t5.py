"""Toy foundations: T5's encoder learns to predict masked words (arXiv 1810.04805, section 3.1).

The paper takes T5-v1.1-XXL as it is. The toy's encoder reads motion texts, captions and
instructions from a small vocabulary; since it has no decoder, masked words are the
natural task.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, cast

import grain
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.samples import TextSample, text_samples, text_spec
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.train.stages.base import Scalars, Stage, StageNetworks
from animegamer_jax.train.stages.networks import load_or_make, matrix_size
from animegamer_jax.train.stages.recipe import Count, FixedRecipe, OptimizerConfig, Share

_PAD = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Recipe(FixedRecipe):
    """The recipe of T5's training.

    Attributes:
        length: Number of tokens to which texts are padded or cut.
        least_masked: Smallest share of a text's tokens to predict.
        most_masked: Largest share of a text's tokens to predict.
        shown: Share of the tokens to predict that stay visible in the text.
    """

    length: Count = 28
    least_masked: Share = 0.15
    most_masked: Share = 0.30
    shown: Share = 0.1


RECIPES = {
    "toy": T5Recipe(
        steps=600,
        batch_size=128,
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=100, decay="cosine", b2=0.98, weight_decay=0.01
        ),
        ema_decay=0.999,
    )
}


class Masked(NamedTuple):
    """Texts with masked tokens.

    Attributes:
        tokens: ids, some of them replaced by the mask.
        targets: Which tokens are to be predicted.
        valid: Which tokens are attended to.
    """

    tokens: Int[Array, "b n"]
    targets: Bool[Array, "b n"]
    valid: Bool[Array, "b n"]


def mask_tokens(
    tokens: Int[Array, "b n"], key: Key[Array, ""], *, recipe: T5Recipe, mask: int
) -> Masked:
    """Masks some of each text's tokens, at least one, none of them padding.

    In use the encoder attends to padding, whose amount depends on the length. So the number of
    visible padding tokens is drawn for each text.
    """
    b, n = tokens.shape
    real = tokens != _PAD
    count = real.sum(1, keepdims=True)
    order_key, rate_key, show_key, length_key = jax.random.split(key, 4)
    rate = jax.random.uniform(
        rate_key, (b, 1), minval=recipe.least_masked, maxval=recipe.most_masked
    )
    # Each token's position in a random order of the text's own tokens.
    place = jnp.where(real, jax.random.uniform(order_key, (b, n)), 2.0).argsort(1).argsort(1)
    targets = real & (place < jnp.maximum(jnp.round(rate * count), 1))
    hidden = targets & ~jax.random.bernoulli(show_key, recipe.shown, (b, n))
    seen = count + jnp.floor(jax.random.uniform(length_key, (b, 1)) * (n - count + 1))
    valid = jnp.arange(n)[None] < jnp.maximum(seen, 1)
    return Masked(jnp.where(hidden, mask, tokens), targets, valid)


def predict_tokens(t5: T5Encoder, masked: Masked) -> Float[Array, "b n v"]:
    """Returns the logits of each token, by the rows of the embedding; float32."""
    features = t5(masked.tokens, masked.valid).astype(jnp.float32)
    rows = t5.embedding[...].astype(jnp.float32)
    return jnp.einsum("bnd,vd->bnv", features * t5.config.d_model**-0.5, rows)


class T5Stage(Stage[T5Recipe]):
    """Train T5's encoder on the texts of the toy world."""

    recipes = RECIPES
    name: ClassVar[str] = "foundations-t5"
    changes: ClassVar[tuple[NetworkName, ...]] = ("t5",)
    unit: ClassVar[str] = "texts"

    @functools.cached_property
    def _mask(self) -> int:
        return self.tokenizer.id_of("<mask>")

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the bundle's encoder, or a new one with T5's initial scale of the queries."""
        t5 = load_or_make("t5", self, bundle, mesh=mesh)
        if bundle is None or not bundle.has("t5"):
            kernel = cast(Any, t5.layers.blocks).query.kernel
            kernel.set_value(kernel[...] * t5.config.d_kv**-0.5)
        return {"t5": t5}

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        return text_samples(
            open_games(path),
            split=split,
            tokenizer=self.tokenizer,
            length=self.recipe.length,
            seed=self.recipe.seed,
        )

    def sample_spec(self) -> TextSample:
        return text_spec(self.recipe.length)

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns the cross-entropy of the tokens to predict, first averaged over each text's."""
        tokens = jnp.asarray(cast(TextSample, batch).tokens)
        masked = mask_tokens(tokens, key, recipe=self.recipe, mask=self._mask)
        logits = predict_tokens(networks["t5"], masked)
        weight = masked.targets / jnp.maximum(masked.targets.sum(1, keepdims=True), 1)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        right = (logits.argmax(-1) == tokens).astype(jnp.float32)
        return (entropy * weight).sum(1).mean(), {"accuracy": (right * weight).sum(1).mean()}

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns 6 FLOPs a matrix weight and token, also of the embedding, and attention's."""
        t5 = networks["t5"]
        c, n = t5.config, self.recipe.length
        weights = matrix_size(t5) + t5.embedding[...].size
        return 6.0 * weights * n + 12.0 * n**2 * c.num_heads * c.d_kv * c.num_layers
