"""The adaptation stage: the decoder adapts to predicted representations (paper, section 3.4).

Inside the step, the frozen language model predicts the shot representation from the history;
the decoder is trained, with its own loss, to make the true clip from it. If the protocol says that
a picture comes first, the decoder is trained to draw the clip's first frame from the prediction,
and to continue that frame to the clip, from what E_a sees in it, or in the same frame as the
decoder draws it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import grain
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import DiTConfig, ModelConfig
from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.windows import AdaptSample, adapt_samples, adapt_spec
from animegamer_jax.diffusion import KnownFrame
from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import decode_picture, with_image
from animegamer_jax.models.dit import DiT, make_memory_positions
from animegamer_jax.models.latents import frame_to_decoder, know_first, mode, sample, to_decoder
from animegamer_jax.protocol import Protocol
from animegamer_jax.sharding import param_shardings
from animegamer_jax.train.stages.base import Scalars, StageNetworks
from animegamer_jax.train.stages.decoder import (
    DECODER_OPTIMIZER,
    ClipRecipe,
    ClipStage,
    Conditions,
    DrawnRecipe,
    drawn_loss,
    transformer_flops,
    with_motion,
)
from animegamer_jax.train.stages.games import GameRecipe, GameStage, lay_out
from animegamer_jax.train.stages.networks import matrix_size
from animegamer_jax.train.stages.recipe import (
    Count,
    CountOrZero,
    NotNegative,
    OptimizerConfig,
    Share,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionRecipe(GameRecipe, ClipRecipe):
    """The recipe of a stage whose decoder is given the language model's predictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRecipe(PredictionRecipe, DrawnRecipe):
    """The recipe of a stage whose decoder may remember past clips.

    Attributes:
        context_dropout: Share of samples trained without context and without memory, for guidance
            (not in the paper). In a model that draws a picture first it applies to pictures only.
        memory: Number of past clips whose first frames the decoder sees in addition to the
            prediction (not in the paper); 0 keeps the decoder's own number. In a model that draws a
            picture first, only the picture sees them.
        memory_noise: Largest noise added to a remembered frame, as a fraction of the frames'
            standard deviation; drawn uniformly from 0. It imitates the decoder's own frames in
            play.
        memory_own: Share of samples with a history in which the newest remembered frame is replaced
            by a later frame of the same clip, so that copying is learned sooner. Needs a VAE that
            encodes each frame by itself.
        memory_alone: Share of samples with a history trained without context but with the memory,
            so that the decoder learns to use it.
    """

    context_dropout: Share = 0.05
    memory: CountOrZero = 0
    memory_noise: NotNegative = 0.0
    memory_own: Share = 0.0
    memory_alone: Share = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptRecipe(MemoryRecipe):
    """The recipe of the adaptation.

    Attributes:
        first_pictures: Number of noise draws of each sample's first frame, trained in addition to
            its clip; only in models that draw a picture first.
        redrawn: Share of clips whose image tokens come from a first frame that the decoder redraws
            from heavy noise, as in play; the others use the true frame. Only in models that draw a
            picture first.
    """

    first_pictures: Count = 4
    redrawn: Share = 0.0


RECIPES = {
    "toy": AdaptRecipe(
        steps=2400,
        batch_size=8,
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=50, decay="cosine"),
        ema_decay=0.999,
        dtype="bfloat16",
        trained="all",
        context_dropout=0.15,
        first_pictures=8,
        redrawn=0.5,
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


PICTURE_RECIPES = {
    "toy": MemoryRecipe(
        steps=4000,
        batch_size=32,
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=50, decay="cosine"),
        ema_decay=0.999,
        dtype="bfloat16",
        trained="all",
        pictures=1,
        timestep_shift=2.0,
        context_dropout=0.15,
        memory=2,
        memory_noise=0.1,
        memory_own=0.3,
        memory_alone=0.2,
    )
}


# Steps of a frame that is drawn again. From the first, composition and colours are still the true
# ones, so that the frame fits the clip, and all else is the decoder's.
_REDRAWN_FROM = (750, 500, 250)

P = TypeVar("P", bound=PredictionRecipe)
M = TypeVar("M", bound=MemoryRecipe)


class Prediction(NamedTuple):
    """What is predicted and remembered of a turn, and its true representation.

    Attributes:
        representation: The language model's shot representation.
        memory: First latents of past clips; None if the decoder has no memory.
        true: E_a of the true turn.
    """

    representation: Float[Array, "b n r"]
    memory: Float[Array, "b m h w c"] | None
    true: Float[Array, "b n r"]

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.representation, self.memory)


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
            UserError: The recipe trains low-rank updates and the decoder has none, or a model
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
            memory=self.decoder_config.memory,
            shown=self.reads_shown(split),
        )

    def sample_spec(self) -> AdaptSample:
        memory = self.decoder_config.memory
        return adapt_spec(self.config, self.protocol, memory=memory, shown=self.reads_shown())

    @property
    def decoder_config(self) -> DiTConfig:
        """The configuration of the decoder that is trained."""
        config = getattr(self.config, self.decoder)
        assert config is not None, "the command has checked what the stage needs"
        return config

    def predict(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""] | None = None
    ) -> Prediction:
        """Returns what the decoder is given of `AdaptSample`s.

        The history is the true one; given a key, that of training.
        """
        mllm, encoder = networks["mllm"], networks["encoder"]
        prompts = lay_out(encoder, batch.game, self.layout)
        history = prompts.history
        if key is not None:
            history = self.history(encoder, batch.game, prompts, key)
        predicted = mllm.represent(prompts.prompt, history, self.layout)
        true = prompts.representations[:, -1]
        return jax.lax.stop_gradient(Prediction(predicted, self.memory_of(batch, key), true))

    def memory_of(self, batch: Any, key: Key[Array, ""] | None) -> Float[Array, "b m h w c"] | None:
        """Returns the decoder's memory of true first frames, with zeros for absent turns.

        None if the decoder has no memory. `key` draws what a stage changes in training.
        """
        del key
        if not (count := batch.past_moments.shape[1]):
            return None
        there = jnp.arange(count)[None] >= count - batch.game.num_history[:, None]
        frames = frame_to_decoder(mode(batch.past_moments), self.vae_config)
        return jnp.where(there[:, :, None, None, None], frames, 0.0)

    def represent(self, networks: StageNetworks, batch: Any) -> Float[Array, "b n r"]:
        return self.predict(networks, batch).representation

    def seen(
        self, networks: StageNetworks, batch: Any, predicted: Float[Array, "b n r"]
    ) -> Float[Array, "b n r"]:
        """Returns predictions with E_a's image tokens of the true first frames.

        This is what clips are made of where a picture comes first.
        """
        return with_image(predicted, networks["encoder"].image_tokens(batch.game.image[:, -1]))

    def clip_conditions(self, networks: StageNetworks, batch: Any) -> Conditions:
        prediction = self.predict(networks, batch)
        if self.protocol.picture_first:
            return Conditions(self.seen(networks, batch, prediction.representation))
        return prediction.conditions

    def known(self, batch: Any) -> KnownFrame | None:
        if not self.protocol.picture_first:
            return None
        true, count = mode(batch.moments), batch.moments.shape[1]
        return know_first(true[:, :1], self.vae_config, num_frames=count)

    def motion(self, batch: Any) -> Float[Array, " b"]:
        """Returns the true motion values, or zeros for a model that plays without them."""
        return jnp.where(any(self.protocol.motion_values), batch.motion_value, 0.0)

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs from the matrices' sizes and attention's products."""
        mllm, dit = networks["mllm"], networks[self.decoder]
        c, length = mllm.config.mistral, self.layout.length
        matrices = 2.0 * matrix_size(mllm.mistral.layers) * length
        scores = 4.0 * length**2 * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        trained, pictures = self.recipe.trained, self.pictures
        return matrices + scores + self.decoder_flops(dit, trained=trained, pictures=pictures)

    def decoder_flops(
        self, dit: DiT, *, trained: Literal["recipe", "all"], pictures: int = 0
    ) -> float:
        """Returns `transformer_flops`; where a picture comes first, clips have no memory."""
        has_memory = bool(pictures) or not self.protocol.picture_first
        return transformer_flops(dit, trained=trained, pictures=pictures, has_memory=has_memory)


class MemoryStage(PredictionStage[M]):
    """A stage that trains a decoder on predictions, and to remember past clips."""

    def __init__(self, recipe: M, config: ModelConfig, protocol: Protocol, **rest: Any):
        decoder = getattr(config, self.decoder)
        if recipe.memory and decoder is not None:
            if recipe.memory >= protocol.window:
                raise UserError(
                    f"--memory {recipe.memory}: expected fewer clips than the protocol's window of "
                    f"{protocol.window} turns: give at most {protocol.window - 1}"
                )
            if decoder.memory not in (0, recipe.memory):
                raise UserError(
                    f"--memory {recipe.memory}: expected {decoder.memory}, the number of clips "
                    "that this decoder remembers: give that number, or 0"
                )
            if decoder.patch_frames != 1:
                raise UserError(
                    f"--memory {recipe.memory}: expected a decoder whose patches have one frame, "
                    f"found {decoder.patch_frames}: give --memory 0"
                )
            decoder = dataclasses.replace(decoder, memory=recipe.memory)
            config = dataclasses.replace(config, **{self.decoder: decoder})
        super().__init__(recipe, config, protocol, **rest)

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the networks of a `PredictionStage`.

        A decoder without the recipe's memory gets one, with new positions.

        Raises:
            UserError: As in `PredictionStage.load`.
        """
        networks = super().load(bundle, mesh=mesh)
        add_memory(networks[self.decoder], self.decoder_config, mesh=mesh)
        return networks

    def memory_of(self, batch: Any, key: Key[Array, ""] | None) -> Float[Array, "b m h w c"] | None:
        """Returns the memory; given a key, with the recipe's later frames and noise."""
        memory = super().memory_of(batch, key)
        if key is None or memory is None:
            return memory
        choose, frame, draw, amount, noise = jax.random.split(jax.random.fold_in(key, 1), 5)
        recipe, b = self.recipe, len(memory)
        # A later frame of the clip, scaled as a frame by itself.
        moments = batch.moments
        later = jax.random.randint(frame, (b,), min(1, moments.shape[1] - 1), moments.shape[1])
        own = jnp.take_along_axis(moments, later[:, None, None, None, None], axis=1)
        own = frame_to_decoder(sample(own, key=draw)[:, 0], self.vae_config)
        is_own = jax.random.bernoulli(choose, recipe.memory_own, (b,))
        is_own = (is_own & (batch.game.num_history > 0))[:, None, None, None]
        memory = memory.at[:, -1].set(jnp.where(is_own, own, memory[:, -1]))
        there = memory.any(axis=(2, 3, 4), keepdims=True)
        scale = recipe.memory_noise * jax.random.uniform(amount, there.shape)
        scale = scale * jnp.std(memory, where=there)
        added = scale * jax.random.normal(noise, memory.shape)
        return jnp.where(there, memory + added, 0.0)

    def drop(
        self, networks: StageNetworks, conditions: Conditions, key: Key[Array, ""]
    ) -> Conditions:
        """Leaves conditions out of some samples: context and memory, or the context alone.

        The shares are `context_dropout` and `memory_alone`. A context that is left out is E_a of
        zeros, a memory zeros.
        """
        context, memory = conditions
        empty = networks["encoder"].unconditional().astype(jnp.float32)[None]
        dropped = jax.random.bernoulli(key, self.recipe.context_dropout, context.shape[:1])
        dropped = dropped[:, None, None]
        if memory is None:
            return Conditions(jnp.where(dropped, empty, context))
        alone = jax.random.bernoulli(
            jax.random.fold_in(key, 1), self.recipe.memory_alone, dropped.shape
        )
        alone &= memory.any(axis=(1, 2, 3, 4))[:, None, None]
        context = jnp.where(dropped | alone, empty, context)
        return Conditions(context, jnp.where(dropped[..., None, None], 0.0, memory))

    def conditions(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Conditions:
        """Returns the predictions and the memory of `AdaptSample`s, some of them left out (`drop`).

        No gradient reaches them.
        """
        drop, show = jax.random.split(key)
        found = self.drop(networks, self.predict(networks, batch, show).conditions, drop)
        return jax.lax.stop_gradient(found)


class AdaptStage(MemoryStage[AdaptRecipe]):
    """Train the decoder to make clips of predictions."""

    recipes = RECIPES
    name: ClassVar[str] = "adapt"

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the networks of a `MemoryStage`, and CLIP if first frames are redrawn.

        Raises:
            UserError: As in `PredictionStage.load`, or the bundle lacks CLIP, which encodes redrawn
                frames.
        """
        networks = super().load(bundle, mesh=mesh)
        if not self.redrawn:
            return networks
        assert bundle is not None, "the command has checked what the stage needs"
        if not bundle.has("clip"):
            raise UserError(
                f"{bundle.path}: no CLIP there, which looks at the first frames that the decoder "
                "draws: add it (`animegamer convert`), or give --redrawn 0"
            )
        return {**networks, "clip": bundle.load("clip", mesh=mesh, dtype=self.recipe.dtype)}

    @property
    def redrawn(self) -> float:
        """Share of clips whose image tokens come from a first frame that the decoder redraws."""
        return self.recipe.redrawn if self.first_pictures else 0.0

    @property
    def first_pictures(self) -> int:
        """Number of noise draws of each sample's first frame, in addition to its clip."""
        both = self.protocol.picture_first and not self.pictures
        return self.recipe.first_pictures if both else 0

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns the mean squared error on v; of pictures and clips, their sum and both."""
        if not self.first_pictures:
            return super().loss(networks, batch, key)
        drop, show, picture, clip = jax.random.split(key, 4)
        prediction = self.predict(networks, batch, show)
        seen = self.seen(networks, batch, prediction.representation)
        if self.redrawn:
            draw, choose = jax.random.split(jax.random.fold_in(key, _REDRAWN_FROM[0]))
            again = jax.random.bernoulli(choose, self.redrawn, (len(seen), 1, 1))
            seen = jnp.where(again, self.see_again(networks, batch, prediction, draw), seen)
        seen = jax.lax.stop_gradient(seen)
        dit, motion = networks["dit"], self.motion(batch)
        options: Any = {"motion": motion, "timestep_shift": self.timestep_shift}
        options |= {"vae_config": self.vae_config}
        pictures = drawn_loss(
            dit,
            batch.moments[:, : dit.config.patch_frames],
            picture,
            draws=self.first_pictures,
            **self.drop(networks, prediction.conditions, drop)._asdict(),
            **options,
        ).mean()
        clips = drawn_loss(
            dit, batch.moments, clip, context=seen, first_known=True, **options
        ).mean()
        return pictures + clips, {"pictures": pictures, "clips": clips}

    def see_again(
        self,
        networks: StageNetworks,
        batch: Any,
        prediction: Prediction,
        key: Key[Array, ""],
    ) -> Float[Array, "b n r"]:
        """Returns predictions with E_a's image tokens of first frames that the decoder redraws.

        The true frames are noised, and denoised with the guidance of play.
        """
        dit, clip, encoder = networks["dit"], networks["clip"], networks["encoder"]
        schedule = diffusion.schedule_of(self.protocol)
        path = dataclasses.replace(schedule, student_timesteps=_REDRAWN_FROM, motion_guidance=0.0)
        table = diffusion.make_sampler_table(path, len(_REDRAWN_FROM))
        table = table._replace(guidance=schedule.guidance(table.timestep).astype("float32"))
        first = batch.moments[:, : dit.config.patch_frames]
        clean = to_decoder(mode(first), self.vae_config)
        steps = jnp.full(len(clean), _REDRAWN_FROM[0])
        noised, _ = diffusion.add_noise(path, clean, jax.random.normal(key, clean.shape), steps)
        context, memory = prediction.conditions
        predict_v = with_motion(dit, self.motion(batch), memory)
        guided = diffusion.guide(predict_v, context, encoder.unconditional())
        start = diffusion.start_sampler(noised)
        drawn = diffusion.sample(guided, start, table, noise=lambda _: jnp.zeros_like(start.x)).x
        frames = decode_picture(networks["vae"], drawn)[:, 0]
        return with_image(prediction.representation, encoder.image_tokens(clip.see(frames)))

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs as of a `MemoryStage`, with those of pictures, drawn again or not.

        A frame that is drawn again takes two rows a step; CLIP's and the VAE's part is left out.
        """
        found, dit = super().sample_flops(networks), networks["dit"]
        trained = self.recipe.trained
        if not (count := self.first_pictures):
            return found
        found += self.decoder_flops(dit, trained=trained, pictures=count)
        if self.redrawn:
            rows = 2 * len(_REDRAWN_FROM)
            found += self.decoder_flops(dit, trained="all", pictures=rows) / 3
        return found


class PictureStage(MemoryStage[MemoryRecipe]):
    """Train a decoder of its own to draw the picture that comes first.

    It starts from the weights of the adapted decoder, which then only makes clips in play.
    """

    recipes = PICTURE_RECIPES
    name: ClassVar[str] = "picture"
    needs: ClassVar[Mapping[NetworkName, str]] = {**PredictionStage.needs, "dit": "adapt"}
    changes: ClassVar[tuple[NetworkName, ...]] = ("picture",)
    decoder: ClassVar[Literal["dit", "picture"]] = "picture"

    def __init__(self, recipe: MemoryRecipe, config: ModelConfig, protocol: Protocol, **rest: Any):
        if not protocol.picture_first:
            raise UserError(
                f"stage {self.name}: the model draws no picture first: give a model whose protocol "
                "does"
            )
        if not recipe.pictures:
            raise UserError(
                f"stage {self.name}: --pictures 0: it trains on first frames: give at least 1"
            )
        if config.picture is None:
            config = dataclasses.replace(config, picture=config.dit)
        super().__init__(recipe, config, protocol, **rest)


def add_memory(dit: DiT, config: DiTConfig, *, mesh: jax.sharding.Mesh) -> None:
    """Gives a decoder the memory of `config`, with new positions; it may already have it."""
    if dit.config.memory == config.memory:
        return
    dit.config = dataclasses.replace(dit.config, memory=config.memory)
    new = nnx.State(
        {"memory_positions": make_memory_positions(dit.config, dtype=dit.positions[...].dtype)}
    )
    dit.memory_positions = jax.device_put(new, param_shardings(new, mesh))["memory_positions"]
