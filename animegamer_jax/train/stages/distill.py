"""The distillation stage: a student of the adapted decoder makes a clip in a few steps.

The student, the network that follows its distribution and the frozen teacher all start as the
adapted decoder. Their conditions are the language model's predictions and E_a's representations of
true shots, with the true motion value; no clips are needed. If the protocol says that a picture
comes first, the student learns to draw it from the prediction, and to continue the true first
frame to a clip; a decoder of pictures (`PictureStage`) gets a student of its own. The losses are in
`distillation`. The result plays with the student's own steps and without guidance, which its
protocol says.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import DiTConfig, ModelConfig, NetworkConfig
from animegamer_jax.diffusion import KnownFrame
from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import latent_shape
from animegamer_jax.models.dit import DiT, memory_rows
from animegamer_jax.protocol import Protocol
from animegamer_jax.train.stages.adapt import PredictionRecipe, PredictionStage
from animegamer_jax.train.stages.base import Scalars, StageNetworks
from animegamer_jax.train.stages.decoder import Conditions
from animegamer_jax.train.stages.distillation import (
    Latents,
    Method,
    PredictV,
    distillation_losses,
    student_path,
)
from animegamer_jax.train.stages.recipe import NotNegative, OptimizerConfig, Positive, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillRecipe(PredictionRecipe):
    """The recipe of the distillation.

    Attributes:
        student_timesteps: Training steps at which the student denoises, from 999 down.
        method: Losses: trajectory distribution matching (tdm), or distribution matching over all
            noise levels (dmd).
        guidance: Guidance scale of the teacher, which the student learns without a second row; 1:
            no guidance. Where a picture comes first, only the picture is guided.
        fake_rate: Learning rate of the network that follows the student's distribution, as a
            multiple of the student's.
        true_share: Share of samples with the representation of the true shot as condition; the
            others have the language model's prediction. Where a picture comes first, all clips are
            made of what E_a sees in a frame, and all pictures of predictions.
    """

    student_timesteps: tuple[int, ...] = (999, 856, 665, 399)
    method: Method = "tdm"
    guidance: NotNegative = 1.0
    fake_rate: Positive = 5.0
    true_share: Share = 0.5


_OPTIMIZER = OptimizerConfig(
    learning_rate=1e-5, warmup_steps=50, b1=0.0, b2=0.95, weight_decay=0.0, clip_norm=1.0
)
RECIPES = {
    "toy": DistillRecipe(
        steps=1000,
        batch_size=16,
        optimizer=dataclasses.replace(_OPTIMIZER, learning_rate=5e-5),
        ema_decay=0.99,
        dtype="float32",
        trained="all",
        guidance=2.5,
        save_every=100,
        eval_every=100,
    ),
    # Optimizer and steps as others report for CogVideoX-2B (arXiv 2503.06674); the guidance is the
    # mean of the released schedule over 50 steps, which jumps from step to step.
    "full": DistillRecipe(
        steps=2_000,
        batch_size=64,
        optimizer=_OPTIMIZER,
        ema_decay=0.99,
        dtype="bfloat16",
        remat="full",
        starts="anywhere",
        guidance=3.8,
        save_every=100,
        eval_every=100,
    ),
}


class _Decoders(NamedTuple):
    student: DiT
    fake: DiT
    teacher: DiT


def _decoders(networks: StageNetworks, name: Literal["dit", "picture"]) -> _Decoders:
    if name == "dit":
        return _Decoders(networks["dit"], networks["fake"], networks["teacher"])
    return _Decoders(networks["picture"], networks["picture_fake"], networks["picture_teacher"])


class DistillStage(PredictionStage[DistillRecipe]):
    """Train a student of the decoder, and the network that follows its distribution."""

    recipes = RECIPES
    name: ClassVar[str] = "distill"
    needs: ClassVar[Mapping[NetworkName, str]] = {**PredictionStage.needs, "dit": "adapt"}

    def __init__(self, recipe: DistillRecipe, config: ModelConfig, protocol: Protocol, **rest: Any):
        self._motion_guidance = protocol.motion_guidance  # of the teacher
        protocol = dataclasses.replace(
            protocol,
            guidance_scale=0.0,
            motion_guidance=0.0,
            denoising_steps=len(recipe.student_timesteps),
            student_timesteps=recipe.student_timesteps,
        )
        self._schedule = diffusion.schedule_of(protocol)
        try:
            student_path(self._schedule)
        except ValueError as error:
            raise UserError(f"stage {self.name}: {error}") from error
        super().__init__(recipe, config, protocol, **rest)

    @property
    def drawer(self) -> Literal["dit", "picture"]:
        """The network whose student draws the picture that comes first."""
        return "dit" if self.config.picture is None else "picture"

    def configs(self) -> dict[NetworkName, NetworkConfig]:
        """Returns the configurations of the students, for the result's bundle."""
        found = super().configs()
        if self.config.picture is not None:
            found["picture"] = self.config.picture
        return found

    @property
    def decoder_config(self) -> DiTConfig:
        """The configuration of the decoder that sees the memory."""
        assert self.config.first_dit is not None, "the command has checked what the stage needs"
        return self.config.first_dit

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the networks of the adaptation, with two more copies of each decoder.

        Raises:
            UserError: The decoder is not adapted or is itself a student; as `PredictionStage.load`.
        """
        assert bundle is not None, "the command has checked what the stage needs"
        if bundle.protocol.student_timesteps:
            raise UserError(
                f"{bundle.path}: the decoder is itself a student, with "
                f"{len(bundle.protocol.student_timesteps)} steps: distill the adapted decoder that "
                "it came from"
            )
        if bundle.info.stages is not None and "adapt" not in bundle.info.stages:
            raise UserError(
                f"{bundle.path}: the decoder is not adapted to the language model: run `animegamer "
                "train adapt` first"
            )
        recipe = self.recipe
        networks = super().load(bundle, mesh=mesh)

        def copy(name: Literal["dit", "picture"]) -> DiT:
            return bundle.load(name, mesh=mesh, dtype=recipe.dtype, remat=recipe.remat)

        networks |= {"teacher": copy("dit"), "fake": copy("dit")}
        if self.drawer == "picture":
            networks |= {"picture": copy("picture")}
            networks |= {"picture_teacher": copy("picture"), "picture_fake": copy("picture")}
        return networks

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        """Returns whether a parameter is trained; the student and the fake train the same ones."""
        trained = network in ("dit", "fake", "picture", "picture_fake")
        return trained and super().is_trained("dit", path, variable)

    def rate_factors(self) -> Mapping[str, float]:
        factors = {"dit": 1.0, "fake": self.recipe.fake_rate}
        if self.drawer == "picture":
            factors |= {"picture": 1.0, "picture_fake": self.recipe.fake_rate}
        return factors

    def conditions(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Conditions:
        """Returns predictions for `AdaptSample`s, or E_a of the true turn; without gradients."""
        choose, show = jax.random.split(key)
        prediction = self.predict(networks, batch, show)
        predicted = prediction.representation
        is_true = jax.random.bernoulli(choose, self.recipe.true_share, (len(predicted), 1, 1))
        return Conditions(jnp.where(is_true, prediction.true, predicted), prediction.memory)

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns the sum of the student's and the fake network's loss, and both.

        Where a picture comes first, each is the sum of the losses of pictures and of clips.
        """
        which, clip, picture = jax.random.split(key, 3)
        decoders = _decoders(networks, "dit")
        shape, dit = latent_shape(decoders.student), decoders.student.config
        if not self.protocol.picture_first:
            given = self.conditions(networks, batch, which)
            options: Any = {"shape": shape, "guidance": self.recipe.guidance}
            student, fake = self._losses(networks, decoders, batch, given, clip, **options)
            return student + fake, {"student": student, "fake": fake}
        prediction = self.predict(networks, batch, which)
        drawer = _decoders(networks, self.drawer)
        seen = jax.lax.stop_gradient(self.seen(networks, batch, prediction.representation))
        one = (dit.patch_frames, *shape[1:])
        guided = self._guide_motion(networks, batch, seen) if self._motion_guidance else None
        options = {"shape": shape, "teacher": guided, "known": self.known(batch), "guidance": 1.0}
        clips = self._losses(networks, decoders, batch, Conditions(seen), clip, **options)
        options = {"shape": one, "guidance": self.recipe.guidance}
        pictures = self._losses(networks, drawer, batch, prediction.conditions, picture, **options)
        student, fake = clips[0] + pictures[0], clips[1] + pictures[1]
        return student + fake, {"student": student, "fake": fake}

    def _losses(
        self,
        networks: StageNetworks,
        decoders: "_Decoders",
        batch: Any,
        given: Conditions,
        key: Key[Array, ""],
        *,
        shape: tuple[int, ...],
        guidance: float,
        teacher: PredictV | None = None,
        known: KnownFrame | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the student's and the fake network's loss on latents of a shape.

        The teacher is the adapted decoder if it is not given. All are shown a known frame.
        """
        start, draw = jax.random.split(key)
        motion = self.motion(batch)
        empty = networks["encoder"].unconditional().astype(jnp.float32)
        empty = jnp.broadcast_to(empty[None], given.context.shape)
        nothing = Conditions(empty, memory_rows(given.memory, 1, num_given=0))

        def held(predict_v: PredictV) -> PredictV:
            return diffusion.hold(predict_v, known, self._schedule)

        def network(dit: DiT, given: Conditions) -> PredictV:
            options: Any = {"motion": motion, **given._asdict()}
            return held(lambda x, timestep: dit(x, timestep=timestep, **options))

        losses = distillation_losses(
            student=network(decoders.student, given),
            fake=network(decoders.fake, given),
            teacher=held(teacher) if teacher else network(decoders.teacher, given),
            unconditional=None if guidance == 1 else network(decoders.teacher, nothing),
            noise=jax.random.normal(start, (len(given.context), *shape)),
            schedule=self._schedule,
            key=draw,
            guidance=guidance,
            method=self.recipe.method,
        )
        return losses.student.mean(), losses.fake.mean()

    def _guide_motion(
        self, networks: StageNetworks, batch: Any, context: Float[Array, "b n r"]
    ) -> PredictV:
        """Returns the teacher of clips, with the guidance of motion that it plays with."""
        dit, motion = networks["teacher"], self.motion(batch)
        still = jnp.full_like(motion, self.protocol.motion_values[0])

        def predict_v(x: Latents, timestep: Float[Array, " b"]) -> Latents:
            noisy = self._schedule.is_noisy(timestep).reshape(-1, *(1,) * (x.ndim - 1))
            v, without = (
                dit(x, timestep=timestep, motion=value, context=context)
                for value in (motion, still)
            )
            return v + jnp.where(noisy, self._motion_guidance, 0.0) * (v - without)

        return predict_v

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns FLOPs as in the adaptation, with all evaluations of the three networks.

        A decoder of pictures is counted as if it had the size of the other.
        """
        dit, trained = networks["dit"], self.recipe.trained

        def others(*, pictures: int, guidance: float) -> float:
            once = self.decoder_flops(dit, trained=trained, pictures=pictures)
            forward = self.decoder_flops(dit, trained="all", pictures=pictures) / 3
            evaluations = len(self.recipe.student_timesteps) - 1 + (1 if guidance == 1 else 2)
            return once + evaluations * forward

        found, guidance = super().sample_flops(networks), self.recipe.guidance
        if not self.protocol.picture_first:
            return found + others(pictures=0, guidance=guidance)
        found += others(pictures=0, guidance=1.0 + self._motion_guidance)
        found += others(pictures=1, guidance=guidance)
        return found + self.decoder_flops(dit, trained=trained, pictures=1)
