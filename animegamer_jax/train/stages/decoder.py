"""The joint stage: shot encoder and decoder learn to make a shot's clip (PAPER section 3.2).

The decoder D_a answers v of the noised latents (`diffusion.py`) from E_a's representation and the
motion value; the loss is the released one, a plain mean squared error on v. The warm-up before it
(`train/stages/warmup.py`) is this stage with fewer trained weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import grain
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt8

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import ModelConfig, VAEConfig
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.samples import TurnSample, turn_samples
from animegamer_jax.errors import UserError
from animegamer_jax.models import vae
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import constrain
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.stages.base import (
    DataSource,
    Networks,
    Scalars,
    Stage,
    Watched,
)
from animegamer_jax.train.stages.networks import (
    load_tokenizer,
    matrix_size,
    mixed_samples,
)
from animegamer_jax.train.stages.recipe import OptimizerConfig, Recipe

# The learning rate as it is reported of the paper's section 4.1; clipping, betas, epsilon and
# weight decay of the code base that the released decoder grew from.
DECODER_OPTIMIZER = OptimizerConfig(
    learning_rate=2e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-4, clip_norm=0.1
)
_MAKERS: Mapping[NetworkName, str] = {
    "vae": "foundations --part vae",
    "dit": "foundations --part dit",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipRecipe(Recipe):
    """Of a stage whose looks sample clips.

    Attributes:
        watch_clips: held-out clips that are sampled at a look; 0 for none.
        watch_sampling_steps: denoising steps of those.
    """

    watch_clips: int = 4
    watch_sampling_steps: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionRecipe(Recipe):
    """What warm-up and joint stage need to know of the decoder's conditions.

    The release sets the text's features to zero with 0.10 and the image's with 0.05, each by
    itself, so that both are zero in one sample of 200; and with 0.05 it makes the text T5's answer
    to "", which is not done here. `both_dropout` is ours: guidance's unconditional row has neither.

    Attributes:
        both_dropout: share of samples that see neither text nor image.
        text_dropout, image_dropout: of the others, each by itself, features set to zero.
        motion: the value that the decoder is told: the measured one, or always 0 (an ablation; the
            result then also plays with 0).
    """

    both_dropout: float = 0.05
    text_dropout: float = 0.10
    image_dropout: float = 0.05
    motion: Literal["measured", "none"] = "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderRecipe(ConditionRecipe, ClipRecipe):
    """What the joint stage needs to know beside."""


RECIPES = {
    "toy": DecoderRecipe(
        steps=4800,
        batch_size=16,
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_steps=100, decay="cosine"),
        ema_decay=0.999,
        dtype="bfloat16",
        remat="full",
        trained="all",
        both_dropout=0.0,  # it plays without guidance
        text_dropout=0.0,
        image_dropout=0.0,
    ),
    # Steps as they are reported of the paper's section 4.1. Batch and average of the code base that
    # it grew from, which trains in float16, with "16 or more" clips; bfloat16 is ours.
    "full": DecoderRecipe(
        steps=80_000,
        batch_size=16,
        optimizer=DECODER_OPTIMIZER,
        ema_decay=0.9999,
        dtype="bfloat16",
        remat="full",
        save_every=1000,
        watch_every=2000,
    ),
}


def spread_timesteps(key: Key[Array, ""], count: int) -> Int[Array, " {count}"]:
    """Training steps 0..999, one drawn from each of `count` equal parts of them, in order.

    The release spreads its ranks over the parts; here every sample of the batch has its own.
    """
    total = diffusion.Schedule().num_train_steps
    place = (jnp.arange(count) + jax.random.uniform(key, (count,))) / count
    return jnp.minimum(place * total, total - 1).astype(jnp.int32)


def diffusion_loss(
    dit: DiT,
    latents: Float[Array, "b f h w c"],
    *,
    context: Float[Array, "b n d"],
    motion: Float[Array, " b"],
    noise: Float[Array, "b f h w c"],
    timestep: Int[Array, " b"],
) -> Float[Array, " b"]:
    """The decoder's loss, one value a sample: mean squared error on v.

    Args:
        dit: the decoder.
        latents: scaled by the VAE's factor.
        context: shot representations.
        motion: motion values, pixels a frame at 480 x 720.
        noise: Gaussian.
        timestep: training step, 0..999.
    """
    noised, target = diffusion.add_noise(diffusion.Schedule(), latents, noise, timestep)
    v = dit(noised, timestep=timestep.astype(jnp.float32), motion=motion, context=context)
    return diffusion.v_loss(v, target)


def drawn_loss(
    dit: DiT,
    moments: Float[Array, "b f h w m"],
    key: Key[Array, ""],
    *,
    vae_config: VAEConfig,
    context: Float[Array, "b n d"],
    motion: Float[Array, " b"],
) -> Float[Array, " b"]:
    """`diffusion_loss` of latents, noise and training steps that are drawn with `key`.

    `moments` and `vae_config` are the VAE's.
    """
    latent, noise, step = jax.random.split(key, 3)
    latents = vae.to_decoder(vae.sample(moments, key=latent), vae_config)
    return diffusion_loss(
        dit,
        latents,
        context=context,
        motion=motion,
        noise=jax.random.normal(noise, latents.shape),
        timestep=spread_timesteps(step, latents.shape[0]),
    )


def drop_conditions(
    text: Float[Array, "b n d"],
    image: Float[Array, "b k e"],
    key: Key[Array, ""],
    *,
    recipe: ConditionRecipe,
) -> tuple[Float[Array, "b n d"], Float[Array, "b k e"]]:
    """Features, those of some samples set to zero, by the recipe's three rates."""
    b = text.shape[0]
    both, no_text, no_image = (
        jax.random.bernoulli(k, rate, (b, 1, 1))
        for k, rate in zip(
            jax.random.split(key, 3),
            (recipe.both_dropout, recipe.text_dropout, recipe.image_dropout),
            strict=True,
        )
    )
    return jnp.where(both | no_text, 0.0, text), jnp.where(both | no_image, 0.0, image)


def zero_motion_layer(dit: DiT) -> None:
    """Makes the motion value mean nothing yet: the last motion layer becomes zero."""
    for weight in (dit.motion_embed.output.kernel, dit.motion_embed.output.bias):
        assert weight is not None
        weight.set_value(jnp.zeros_like(weight[...]))


def vae_config_of(config: ModelConfig) -> VAEConfig:
    """That of the VAE, which tells how the decoder sees latents."""
    assert config.vae is not None, "the command has checked what the stage needs"
    return config.vae


def transformer_flops(dit: DiT, *, trained: Literal["recipe", "all"]) -> float:
    """Of a sample's step, by arithmetic: 4 a matrix weight and row, 6 where it is trained.

    And the attention's two products, forward and back. The modulation's rows are samples.
    """
    c = dit.config
    tokens = c.num_context_tokens + c.num_patches
    modulation = matrix_size(cast(Any, dit.layers.blocks).modulation)
    matrices = (matrix_size(dit.layers) - modulation) * tokens
    ends = (matrix_size(dit.patch_in) + matrix_size(dit.patch_out)) * c.num_patches
    scores = 12.0 * tokens**2 * c.hidden_size * c.num_layers
    return (6.0 if trained == "all" else 4.0) * (matrices + ends) + scores + 6.0 * modulation


def check_low_rank(stage: Stage[Any]) -> None:
    """Whether the decoder has what the stage's recipe trains of it.

    Raises:
        UserError: the recipe trains low-rank updates and the decoder has none.
    """
    dit = stage.config.dit
    if stage.recipe.trained == "recipe" and (dit is None or dit.lora is None):
        raise UserError(
            f"stage {stage.name}: --trained recipe trains the decoder's low-rank updates, but it "
            "has none: give --trained all"
        )


def trains_transformer(recipe: Recipe, path: tuple[str, ...], variable: nnx.Variable) -> bool:
    """Whether a parameter of the decoder's transformer is trained, jointly or in adaptation.

    Low-rank updates, the layers' modulation and the motion layer (385 M, PAPER section 4.1), or
    all but the constant positions.
    """
    if path[0] == "positions":
        return False
    return (
        recipe.trained == "all"
        or isinstance(variable, nnx.LoRAParam)
        or "modulation" in path
        or path[0] == "motion_embed"
    )


def make_clip_look(
    stage: Stage[Any],
    *,
    context: Callable[[Networks, Any], Float[Array, "b n d"]],
    motion: Callable[[Any], Float[Array, " b"]],
) -> Callable[[Networks, Any, Key[Array, ""]], UInt8[Array, "b s y x 3"]]:
    """What a stage looks at, jitted: true clips through the VAE, sampled ones at their right.

    They are a batch's first; sampled as at play, guidance included. `context` gives a batch's shot
    representations and `motion` its motion values; the stage's recipe is a `ClipRecipe`.
    """
    recipe, vae_config = stage.recipe, vae_config_of(stage.config)

    def look(networks: Networks, batch: Any, key: Key[Array, ""]) -> jax.Array:
        first = jax.tree.map(lambda x: x[: recipe.watch_clips], batch)
        dit, encoder = cast(DiT, networks["dit"]), cast(ShotEncoder, networks["encoder"])
        decoder, motions = cast(vae.VAE, networks["vae"]), motion(first)
        true = vae.mode(first.moments)

        def predict_v(x: jax.Array, timestep: jax.Array, context: jax.Array) -> jax.Array:
            rows = jnp.tile(motions, len(x) // len(motions))
            return dit(x, timestep=timestep, motion=rows, context=context)

        def noise(step: jax.Array) -> jax.Array:
            return jax.random.normal(jax.random.fold_in(key, step), true.shape)

        steps = recipe.watch_sampling_steps
        table = diffusion.make_sampler_table(diffusion.schedule_of(stage.protocol), steps)
        empty = encoder.unconditional() if stage.protocol.guidance_scale else None
        guided = diffusion.guide(predict_v, context(networks, first), empty)
        start = diffusion.start_sampler(noise(jnp.int32(steps)))
        latents = diffusion.sample(guided, start, table, noise=noise).x
        made = vae.from_decoder(latents, vae_config)
        clips = vae.to_uint8(decoder.decode(jnp.concatenate([true, made])))
        pairs = jnp.concatenate(jnp.split(clips, 2), axis=3)
        return constrain(pairs, *(None,) * 5)

    return jax.jit(look)


class DecoderStage(Stage[ConditionRecipe]):
    """Trains the shot encoder and the decoder together."""

    name: ClassVar[str] = "decoder"
    needs: ClassVar[Mapping[NetworkName, str]] = {**_MAKERS, "encoder": "warmup"}
    changes: ClassVar[tuple[NetworkName, ...]] = ("encoder", "dit")
    unit: ClassVar[str] = "clips"

    def __init__(
        self, recipe: ConditionRecipe, config: ModelConfig, protocol: Protocol, **rest: Any
    ):
        if recipe.motion == "none":
            still = (0.0,) * len(protocol.motion_values)
            protocol = dataclasses.replace(protocol, motion_values=still)
        super().__init__(recipe, config, protocol, **rest)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self)

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> Networks:
        """Encoder, decoder, and to look at clips the VAE.

        Raises:
            UserError: the recipe trains low-rank updates and the decoder has none.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        recipe = self.recipe
        check_low_rank(self)
        return {
            "encoder": bundle.load("encoder", mesh=mesh, dtype=recipe.dtype),
            "dit": bundle.load("dit", mesh=mesh, dtype=recipe.dtype, remat=recipe.remat),
            "vae": bundle.load("vae", mesh=mesh, dtype=recipe.dtype),
        }

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        if network == "encoder":
            return path[0] != "output_norm"  # takes no part
        return network == "dit" and trains_transformer(self.recipe, path, variable)

    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        # Of T5 and CLIP, which made the features, the bundle need have none any more.
        reader = dataclasses.replace(self.config, t5=None, clip=None)

        def make(path: str) -> grain.MapDataset:
            return turn_samples(
                open_features(path),
                split=split,
                tokenizer=self.tokenizer,
                caption_length=1,  # captions are not read here
                config=reader,
            )

        return mixed_samples(sources, make)

    def motion(self, batch: TurnSample) -> Float[Array, " b"]:
        """What the decoder is told of the motion."""
        measured = jnp.asarray(batch.motion_value)
        return measured if self.recipe.motion == "measured" else jnp.zeros_like(measured)

    def loss(
        self, networks: Networks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Mean squared error on v."""
        drop, draw = jax.random.split(key)
        text, image = drop_conditions(batch.text, batch.image, drop, recipe=self.recipe)
        losses = drawn_loss(
            cast(DiT, networks["dit"]),
            batch.moments,
            draw,
            vae_config=vae_config_of(self.config),
            context=cast(ShotEncoder, networks["encoder"])(text, image),
            motion=self.motion(batch),
        )
        return losses.mean(), {}

    def sample_flops(self, networks: Networks) -> float:
        """By the matrices, see `transformer_flops`; the encoder's rows are its tokens."""
        encoder, dit = cast(ShotEncoder, networks["encoder"]), cast(DiT, networks["dit"])
        text = matrix_size(encoder.text) * encoder.config.num_text_tokens
        image = matrix_size(encoder.image) * encoder.config.num_image_tokens
        return 6.0 * (text + image) + transformer_flops(dit, trained=self.recipe.trained)

    @functools.cached_property
    def _look(self) -> Callable[..., UInt8[Array, "b s y x 3"]]:
        def context(networks: Networks, batch: Any) -> jax.Array:
            return cast(ShotEncoder, networks["encoder"])(batch.text, batch.image)

        return make_clip_look(self, context=context, motion=self.motion)

    def watch(self, networks: Networks, batch: Any, key: Key[Array, ""]) -> Watched:
        """Sampled clips, each at the right of its true one (both through the VAE)."""
        if not cast(DecoderRecipe, self.recipe).watch_clips:
            return Watched({}, {})
        return Watched({}, {"true_and_sampled": self._look(networks, batch, key)})


STAGE = DecoderStage
