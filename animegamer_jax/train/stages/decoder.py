"""Warm-up and joint stage: shot encoder and decoder learn to make clips (paper, section 3.2).

The decoder D_a predicts v of the noised latents (`diffusion.py`) from E_a's representation and the
motion value; the loss is the released one, a plain mean squared error on v. The warm-up (paper,
section 4.1) is the joint stage with fewer trained weights: E_a and the decoder's motion layer learn
to work with the frozen decoder. The paper's ablation shows that the joint stage ends far worse
without it.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, cast

import grain
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt8

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import ModelConfig, VAEConfig
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.samples import TurnSample, turn_samples, turn_spec
from animegamer_jax.diffusion import KnownFrame
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import DiT, memory_rows
from animegamer_jax.models.latents import from_decoder, know_first, mode, sample, to_decoder
from animegamer_jax.models.vae import to_uint8
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import constrain
from animegamer_jax.train.stages.base import Evaluation, R, Scalars, Stage, StageNetworks
from animegamer_jax.train.stages.networks import load_or_make, matrix_size
from animegamer_jax.train.stages.recipe import (
    Count,
    CountOrZero,
    FixedRecipe,
    OptimizerConfig,
    Positive,
    Recipe,
    Share,
)

# Learning rate as reported in the paper's section 4.1; clipping, betas, epsilon and weight decay of
# the code base that the released decoder grew from.
DECODER_OPTIMIZER = OptimizerConfig(
    learning_rate=2e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-4, clip_norm=0.1
)
_CAPTION_LENGTH = 1  # tokens; captions are not used
_MAKERS: Mapping[NetworkName, str] = {
    "vae": "foundations --part vae",
    "dit": "foundations --part dit",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipRecipe(Recipe):
    """The recipe of a stage whose evaluation samples clips.

    Attributes:
        eval_clips: Number of held-out clips sampled in an evaluation; 0 samples none.
        eval_sampling_steps: Number of denoising steps of the clips sampled in an evaluation.
    """

    eval_clips: CountOrZero = 4
    eval_sampling_steps: Count = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnRecipe(Recipe):
    """How the decoder's samples are noised.

    Attributes:
        pictures: Number of times that each sample's first frame is noised and trained on, in place
            of its clip; 0 trains on clips.
        timestep_shift: Shift s of the drawn diffusion steps towards noise, of t / 1000 to
            s t / (1 + (s - 1) t) (Esser et al., 2024); 1 draws all equally often.
    """

    pictures: CountOrZero = 0
    timestep_shift: Positive = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionRecipe(DrawnRecipe):
    """How the decoder's conditions are used in the warm-up and the joint stage.

    The release sets the text features to zero with 0.10 and the image features with 0.05, each
    independently, so that both are zero in one sample of 200; and with 0.05 it replaces the text
    features by T5's features of "", which is not done here. `both_dropout` is ours: the
    unconditional row of guidance has neither.

    Attributes:
        both_dropout: Share of samples whose text and image features are both set to zero.
        text_dropout: Share of samples whose text features are set to zero, besides --both-dropout.
        image_dropout: Share of samples whose image features are set to zero, besides
            --both-dropout.
        motion: Motion value given to the decoder: the measured one, or always 0 (none), an ablation
            whose result also plays with 0.
    """

    both_dropout: Share = 0.05
    text_dropout: Share = 0.10
    image_dropout: Share = 0.05
    motion: Literal["measured", "none"] = "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupRecipe(FixedRecipe, ConditionRecipe):
    """The recipe of the warm-up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderRecipe(ConditionRecipe, ClipRecipe):
    """The recipe of the joint stage."""


_TOY: Mapping[str, Any] = {
    "batch_size": 8,
    "dtype": "bfloat16",
    "text_dropout": 0.0,
    "image_dropout": 0.0,
}
# Batch and average of the code base that the release grew from, which trains in float16, with "16
# or more" clips; bfloat16 is ours. Steps as reported in the paper's section 4.1.
_FULL: Mapping[str, Any] = {
    "batch_size": 16,
    "optimizer": DECODER_OPTIMIZER,
    "ema_decay": 0.9999,
    "dtype": "bfloat16",
    "remat": "full",
    "save_every": 1000,
    "eval_every": 2000,
}
WARMUP_RECIPES = {
    "toy": WarmupRecipe(
        steps=400,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, decay="cosine"),
        ema_decay=0.99,
        **_TOY,
    ),
    "full": WarmupRecipe(steps=10_000, **_FULL),
}
RECIPES = {
    "toy": DecoderRecipe(
        steps=8000,
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_steps=100, decay="cosine"),
        ema_decay=0.999,
        trained="all",
        **{**_TOY, "batch_size": 16},
    ),
    "full": DecoderRecipe(steps=80_000, **_FULL),
}


def spread_timesteps(
    key: Key[Array, ""], count: int, *, shift: float = 1.0
) -> Int[Array, " {count}"]:
    """Draws a diffusion step from each of `count` equal parts of 0..999, in order, then shifted.

    The release gives each rank a part; here each sample of the batch has its own.
    """
    total = diffusion.Schedule().num_train_steps
    place = (jnp.arange(count) + jax.random.uniform(key, (count,))) / count
    if shift != 1.0:
        place = shift * place / (1 + (shift - 1) * place)
    return jnp.minimum(place * total, total - 1).astype(jnp.int32)


def diffusion_loss(
    dit: DiT,
    latents: Float[Array, "b f h w c"],
    *,
    context: Float[Array, "b n d"],
    motion: Float[Array, " b"],
    noise: Float[Array, "b f h w c"],
    timestep: Int[Array, " b"],
    memory: Float[Array, "b m h w c"] | None = None,
    known: KnownFrame | None = None,
) -> Float[Array, " b"]:
    """Returns the decoder's loss of each sample: the mean squared error on v.

    Latents are scaled by the VAE's factor, motion values are in pixels a frame at 480 x 720, and
    diffusion steps run from 0 to 999. A known frame is seen without noise, and costs nothing.
    """
    schedule = diffusion.Schedule()
    noised, target = diffusion.add_noise(schedule, latents, noise, timestep)

    def predict_v(x: jax.Array, timestep: jax.Array) -> jax.Array:
        return dit(x, timestep=timestep, motion=motion, context=context, memory=memory)

    v = diffusion.hold(predict_v, known, schedule)(noised, timestep.astype(jnp.float32))
    return diffusion.v_loss(v, target)


def with_motion(
    dit: DiT, motion: Float[Array, " b"], memory: Float[Array, "b m h w c"] | None = None
) -> Callable[..., jax.Array]:
    """Returns the decoder for `diffusion.guide`: all rows of guidance get the motion values."""

    def predict_v(x: jax.Array, timestep: jax.Array, context: jax.Array) -> jax.Array:
        rows = len(x) // len(motion)
        options: Any = {"context": context, "memory": memory_rows(memory, rows)}
        return dit(x, timestep=timestep, motion=jnp.tile(motion, rows), **options)

    return predict_v


def drawn_loss(
    dit: DiT,
    moments: Float[Array, "b f h w mv"],
    key: Key[Array, ""],
    *,
    vae_config: VAEConfig,
    context: Float[Array, "b n d"],
    motion: Float[Array, " b"],
    memory: Float[Array, "b m h w c"] | None = None,
    draws: int = 1,
    timestep_shift: float = 1.0,
    first_known: bool = False,
) -> Float[Array, " b*{draws}"]:
    """Returns `diffusion_loss` with latents, noise and diffusion steps drawn from `key`.

    The latents follow the VAE's `moments`, means and log-variances. Each sample is drawn `draws`
    times, at diffusion steps far from one another. The first latent frame may be a known one.
    """
    latent, noise, step = jax.random.split(key, 3)
    given = moments, context, motion, memory
    moments, context, motion, memory = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), given)
    steps = spread_timesteps(step, moments.shape[0], shift=timestep_shift)
    steps = steps.reshape(draws, -1).T.ravel()
    drawn = sample(moments, key=latent)
    latents, count = to_decoder(drawn, vae_config), drawn.shape[1]
    known = know_first(drawn[:, :1], vae_config, num_frames=count) if first_known else None
    return diffusion_loss(
        dit,
        latents,
        known=known,
        context=context,
        memory=memory,
        motion=motion,
        noise=jax.random.normal(noise, latents.shape),
        timestep=steps,
    )


def drop_conditions(
    text: Float[Array, "b n d"],
    image: Float[Array, "b k e"],
    key: Key[Array, ""],
    *,
    recipe: ConditionRecipe,
) -> tuple[Float[Array, "b n d"], Float[Array, "b k e"]]:
    """Sets the features of some samples to zero, by the recipe's three rates."""
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
    """Sets the last motion layer to zero, so that the motion value has no effect yet."""
    for weight in (dit.motion_embed.output.kernel, dit.motion_embed.output.bias):
        assert weight is not None
        weight.set_value(jnp.zeros_like(weight[...]))


def transformer_flops(
    dit: DiT, *, trained: Literal["recipe", "all"], pictures: int = 0, has_memory: bool = False
) -> float:
    """Returns the FLOPs of a sample's step: 4 a matrix weight and row, 6 if it is trained.

    To these come attention's two products, forward and backward. The modulation has one row a
    sample. With `pictures`, a sample is its first frame, drawn so often. It may come with the
    decoder's memory.
    """
    c = dit.config
    patches = c.num_patches * c.patch_frames // c.latent_frames if pictures else c.num_patches
    patches += c.num_memory_tokens if has_memory else 0
    tokens = c.num_context_tokens + patches
    modulation = matrix_size(cast(Any, dit.layers.blocks).modulation)
    matrices = (matrix_size(dit.layers) - modulation) * tokens
    ends = (matrix_size(dit.patch_in) + matrix_size(dit.patch_out)) * patches
    scores = 12.0 * tokens**2 * c.hidden_size * c.num_layers
    factor = 6.0 if trained == "all" else 4.0
    return (pictures or 1) * (factor * (matrices + ends) + scores + 6.0 * modulation)


class Conditions(NamedTuple):
    """What the decoder is given besides motion: a context, and a memory if it has one."""

    context: Float[Array, "b n d"]
    memory: Float[Array, "b m h w c"] | None = None


class DiffusionStage(Stage[R]):
    """A stage that trains a decoder to predict v of noised latents.

    Attributes:
        decoder: The network that is trained.
    """

    unit: ClassVar[str] = "clips"
    decoder: ClassVar[Literal["dit", "picture"]] = "dit"

    @property
    def pictures(self) -> int:
        """How often each sample's first frame is drawn in place of its clip; 0: the clip."""
        recipe = self.recipe
        return recipe.pictures if isinstance(recipe, DrawnRecipe) else 0

    @property
    def timestep_shift(self) -> float:
        """Shift of the drawn diffusion steps towards noise."""
        recipe = self.recipe
        return recipe.timestep_shift if isinstance(recipe, DrawnRecipe) else 1.0

    @abc.abstractmethod
    def conditions(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Conditions:
        """Returns what the decoder is given in training; `key` draws what is left out of it."""

    @abc.abstractmethod
    def motion(self, batch: Any) -> Float[Array, " b"]:
        """Returns the motion values that the decoder gets."""

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns the mean squared error on v."""
        drop, draw = jax.random.split(key)
        dit, pictures = networks[self.decoder], self.pictures
        losses = drawn_loss(
            dit,
            batch.moments[:, : dit.config.patch_frames] if pictures else batch.moments,
            draw,
            vae_config=self.vae_config,
            motion=self.motion(batch),
            draws=pictures or 1,
            timestep_shift=self.timestep_shift,
            **self.conditions(networks, batch, drop)._asdict(),
        )
        return losses.mean(), {}


class ClipStage(DiffusionStage[R]):
    """A stage of the decoder, whose evaluation samples clips if its recipe is a `ClipRecipe`."""

    @abc.abstractmethod
    def represent(self, networks: StageNetworks, batch: Any) -> Float[Array, "b n d"]:
        """Returns the shot representations of a batch."""

    def clip_conditions(self, networks: StageNetworks, batch: Any) -> Conditions:
        """Returns what the clips of an evaluation are made of."""
        return Conditions(self.represent(networks, batch))

    def known(self, batch: Any) -> KnownFrame | None:
        """Returns the first frames with which clips begin; None: the decoder makes them too."""
        del batch
        return None

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the encoder, the decoder, and the VAE for the evaluation's clips.

        Raises:
            UserError: The recipe trains low-rank updates and the decoder has none.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        recipe, config = self.recipe, getattr(self.config, self.decoder)
        if recipe.trained == "recipe" and (config is None or config.lora is None):
            raise UserError(
                f"stage {self.name}: --trained recipe trains the decoder's low-rank updates, but "
                "it has none: give --trained all"
            )
        start = self.decoder if bundle.has(self.decoder) else "dit"
        networks: StageNetworks = {
            "encoder": bundle.load("encoder", mesh=mesh, dtype=recipe.dtype),
            "vae": bundle.load("vae", mesh=mesh, dtype=recipe.dtype),
        }
        networks[self.decoder] = bundle.load(
            start, mesh=mesh, dtype=recipe.dtype, remat=recipe.remat
        )
        return networks

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        """Returns whether a parameter is trained, by default of the decoder only.

        Trained are low-rank updates, the layers' modulation and the motion layer (385 M, paper,
        section 4.1), a memory's positions, or everything, positions included.
        """
        return network == self.decoder and (
            self.recipe.trained == "all"
            or isinstance(variable, nnx.LoRAParam)
            or "modulation" in path
            or path[0] in ("motion_embed", "memory_positions")
        )

    @functools.cached_property
    def _sample_clips(self) -> Callable[..., UInt8[Array, "b s y x 3"]]:
        """Samples a batch's first clips as in play, including guidance by context.

        Where a picture comes first they are made of the true one, without guidance.
        """
        recipe, vae_config = self.recipe, self.vae_config
        assert isinstance(recipe, ClipRecipe)

        def sample(networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> jax.Array:
            first = jax.tree.map(lambda x: x[: recipe.eval_clips], batch)
            dit, encoder, decoder = networks[self.decoder], networks["encoder"], networks["vae"]
            true = mode(first.moments)
            schedule = diffusion.schedule_of(self.protocol)

            def noise(step: jax.Array) -> jax.Array:
                return jax.random.normal(jax.random.fold_in(key, step), true.shape)

            steps = len(schedule.student_timesteps) or recipe.eval_sampling_steps
            table = diffusion.make_sampler_table(schedule, steps).plain()
            context, memory = self.clip_conditions(networks, first)
            empty = encoder.unconditional() if self.protocol.guides_clips else None
            predict_v = with_motion(dit, self.motion(first), memory)
            guided = diffusion.guide(predict_v, context, empty)
            start = diffusion.start_sampler(noise(jnp.int32(steps)))
            start = start._replace(known=self.known(first))
            latents = diffusion.sample(guided, start, table, noise=noise).x
            made = from_decoder(latents, vae_config)
            clips = to_uint8(decoder.decode(jnp.concatenate([true, made])))
            pairs = jnp.concatenate(jnp.split(clips, 2), axis=3)
            return constrain(pairs, *(None,) * 5)

        return jax.jit(sample)

    def evaluate(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Evaluation:
        """Samples clips, each shown to the right of the true one (both decoded by the VAE)."""
        if not isinstance(self.recipe, ClipRecipe) or not self.recipe.eval_clips or self.pictures:
            return Evaluation({}, {})
        return Evaluation({}, {"true_and_sampled": self._sample_clips(networks, batch, key)})


class DecoderStage(ClipStage[ConditionRecipe]):
    """Train the shot encoder and the decoder together."""

    recipes = RECIPES
    name: ClassVar[str] = "decoder"
    needs: ClassVar[Mapping[NetworkName, str]] = {**_MAKERS, "encoder": "warmup"}
    changes: ClassVar[tuple[NetworkName, ...]] = ("encoder", "dit")

    def __init__(
        self, recipe: ConditionRecipe, config: ModelConfig, protocol: Protocol, **rest: Any
    ):
        if recipe.motion == "none":
            still = (0.0,) * len(protocol.motion_values)
            protocol = dataclasses.replace(protocol, motion_values=still)
        super().__init__(recipe, config, protocol, **rest)

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        if network == "encoder":
            return path[0] != "output_norm"  # not used
        return super().is_trained(network, path, variable)

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        return turn_samples(
            open_features(path),
            split=split,
            tokenizer=self.tokenizer,
            caption_length=_CAPTION_LENGTH,
            # The bundle may lack T5 and CLIP, which have made the features.
            config=dataclasses.replace(self.config, t5=None, clip=None),
        )

    def sample_spec(self) -> TurnSample:
        return turn_spec(self.config, caption_length=_CAPTION_LENGTH)

    def represent(self, networks: StageNetworks, batch: Any) -> Float[Array, "b n d"]:
        return networks["encoder"](batch.text, batch.image)

    def motion(self, batch: Any) -> Float[Array, " b"]:
        measured = jnp.asarray(batch.motion_value)
        return measured if self.recipe.motion == "measured" else jnp.zeros_like(measured)

    def conditions(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Conditions:
        text, image = drop_conditions(batch.text, batch.image, key, recipe=self.recipe)
        return Conditions(networks["encoder"](text, image))

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs from the matrices' sizes, see `transformer_flops`."""
        encoder, dit = networks["encoder"], networks["dit"]
        text = matrix_size(encoder.text) * encoder.config.num_text_tokens
        image = matrix_size(encoder.image) * encoder.config.num_image_tokens
        trained = self.recipe.trained
        decoder = transformer_flops(dit, trained=trained, pictures=self.pictures)
        return 6.0 * (text + image) + decoder


class WarmupStage(DecoderStage):
    """Train the shot encoder and the motion layer, with the rest of the decoder frozen."""

    recipes = WARMUP_RECIPES
    name: ClassVar[str] = "warmup"
    needs: ClassVar[Mapping[NetworkName, str]] = _MAKERS

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the decoder, and the encoder: the bundle's, or a new one."""
        assert bundle is not None, "the command has checked what the stage needs"
        recipe = self.recipe
        return {
            "encoder": load_or_make("encoder", self, bundle, mesh=mesh),
            "dit": bundle.load("dit", mesh=mesh, dtype=recipe.dtype, remat=recipe.remat),
        }

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        if network == "encoder":
            return super().is_trained(network, path, variable)
        return path[0] == "motion_embed"
