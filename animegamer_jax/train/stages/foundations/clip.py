"""Toy foundations: CLIP's two towers learn by contrast (arXiv 2103.00020), from scratch.

The paper takes OpenCLIP as it is; a toy world needs its own. Its image tower gives the condition
f_v and the VAE's perceptual loss; evaluation compares clips and captions with both towers.

A large CLIP's tokens tell a decoder what each part of a picture looks like. A toy's do so only if
they are trained for it: a linear layer, discarded afterwards, recovers each patch's pixels.
"""

import dataclasses
from typing import Any, ClassVar, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import NetworkConfig
from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.samples import CaptionSample, Frame, caption_samples, caption_spec
from animegamer_jax.models.linear import Linear
from animegamer_jax.models.vae import signed
from animegamer_jax.train.stages.base import Scalars, Stage, StageNetworks
from animegamer_jax.train.stages.networks import load_or_make, matrix_size
from animegamer_jax.train.stages.recipe import FixedRecipe, NotNegative, OptimizerConfig

_GREATEST_SCALE = float(np.log(100.0))  # CLIP, section 2.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPRecipe(FixedRecipe):
    """The recipe of CLIP's training.

    Attributes:
        frame: Frame of each clip that is trained on.
        pixel_weight: Weight of the squared error, in pixels of deviation one, with which a linear
            layer recovers each patch from its token.
    """

    frame: Frame = "random"
    pixel_weight: NotNegative = 0.0


RECIPES = {
    "toy": CLIPRecipe(
        steps=2500,
        batch_size=128,
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=100, decay="cosine", b2=0.98, weight_decay=0.05
        ),
        ema_decay=0.999,
        dtype="bfloat16",
        frame="first",  # as features and the history of what was shown have it
        pixel_weight=30.0,
    )
}


def same_rows(tokens: Int[Array, "b n"]) -> Bool[Array, "b b"]:
    """Returns whether each pair of rows is equal."""
    return (tokens[:, None] == tokens[None]).all(axis=-1)


def contrastive_loss(
    images: Float[Array, "b e"],
    texts: Float[Array, "b e"],
    *,
    log_scale: Float[Array, ""],
    same: Bool[Array, "b b"],
) -> tuple[Float[Array, ""], Scalars]:
    """Returns the symmetric cross-entropy over the cosines of a batch (CLIP, figure 3), float32.

    Pairs of different samples with the same caption are left out: they are neither positives nor
    negatives. A caption that leaves out details may also be true of other images; these cannot be
    recognised and stay negatives. `same` are the pairs with the same caption; embeddings may have
    any norm, and the logarithm of the inverse temperature is capped at log(100).

    Returns:
        The loss, and the shares of images and texts whose nearest counterpart is right.
    """

    def unit(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-12)

    scale = jnp.exp(jnp.minimum(log_scale.astype(jnp.float32), _GREATEST_SCALE))
    cosines = unit(images) @ unit(texts).T
    own = jnp.eye(len(cosines), dtype=bool)
    logits = jnp.where(same & ~own, -jnp.inf, scale * cosines)

    def entropy(axis: int) -> jax.Array:
        return -jnp.diagonal(jax.nn.log_softmax(logits, axis=axis)).mean()

    def accuracy(axis: int) -> jax.Array:
        right = (logits.argmax(axis) == jnp.arange(len(logits))).mean()
        return right.astype(jnp.float32)

    parts = {"image_to_text": accuracy(1), "text_to_image": accuracy(0), "scale": scale}
    return (entropy(1) + entropy(0)) / 2, parts


def pixel_loss(
    found: Float[Array, "b n p"], pixels: Float[Array, "b h w c"], *, patch_size: int
) -> Float[Array, ""]:
    """Returns the mean squared error of patches of pixels, row by row, float32."""
    size = {"p": patch_size, "q": patch_size}
    patches = rearrange(pixels, "b (h p) (w q) c -> b (h w) (p q c)", **size)
    return jnp.square(found.astype(jnp.float32) - patches.astype(jnp.float32)).mean()


class CLIPStage(Stage[CLIPRecipe]):
    """Train CLIP's two towers on frames and captions of the toy world."""

    recipes = RECIPES
    name: ClassVar[str] = "foundations-clip"
    changes: ClassVar[tuple[NetworkName, ...]] = ("clip",)
    unit: ClassVar[str] = "frames"

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns CLIP, the bundle's or a new one, and the layer from tokens to pixels."""
        networks: StageNetworks = {"clip": load_or_make("clip", self, bundle, mesh=mesh)}
        if self.recipe.pixel_weight:
            c = networks["clip"].config
            networks["pixels"] = Linear(
                c.vision_width,
                c.patch_size**2 * 3,
                names=("embed", "features"),
                config=NetworkConfig(dtype=self.recipe.dtype),
                rngs=nnx.Rngs(self.recipe.seed),
            )
        return networks

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        return network in ("clip", "pixels")

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        assert self.config.clip is not None
        return caption_samples(
            open_games(path),
            split=split,
            tokenizer=self.tokenizer,
            length=self.config.clip.context_length,
            frame=self.recipe.frame,
            seed=self.recipe.seed,
        )

    def sample_spec(self) -> CaptionSample:
        return caption_spec(self.config)

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns `contrastive_loss` within the batch, or each part of an accumulated one.

        With `pixel_weight`, to it comes `pixel_loss`.
        """
        del key
        clip, sample = networks["clip"], cast(CaptionSample, batch)
        tokens = jnp.asarray(sample.tokens)
        pixels = clip.preprocess(signed(jnp.asarray(sample.frame)))
        loss, parts = contrastive_loss(
            clip.embed_image(pixels),
            clip.embed_text(tokens),
            log_scale=clip.logit_scale[...],
            same=same_rows(tokens),
        )
        if not self.recipe.pixel_weight:
            return loss, parts
        found = networks["pixels"](clip.image_features(pixels))
        error = pixel_loss(found, pixels, patch_size=clip.config.patch_size)
        return loss + self.recipe.pixel_weight * error, parts | {"pixels": error}

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns 6 FLOPs a matrix weight and token, and attention's products."""
        clip = networks["clip"]
        c = clip.config

        def tower(module: nnx.Module, *, tokens: int, width: int, layers: int) -> float:
            return 6.0 * matrix_size(module) * tokens + 12.0 * tokens**2 * width * layers

        patches = c.num_patches + 1
        found = tower(clip.image, tokens=patches, width=c.vision_width, layers=c.vision_layers)
        found += tower(clip.text, tokens=c.context_length, width=c.text_width, layers=c.text_layers)
        if "pixels" in networks:
            found += 6.0 * matrix_size(networks["pixels"]) * c.num_patches
        return found
