"""Toy foundations: the causal 3D VAE (CogVideoX, arXiv 2408.06072, section 2.1), from scratch.

The paper takes CogVideoX's VAE as it is. This is its recipe in small: an L1 reconstruction, a KL
term, and a perceptual distance, which uses features of the toy's CLIP in place of LPIPS. The toy's
own VAE has a squared error besides, and looks at one frame at a time (`VAEConfig.kernel_frames`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, UInt8

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import NetworkConfig, VAEConfig, clip_size
from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.samples import ClipSample, clip_samples, clip_spec
from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.convolution import CausalConv
from animegamer_jax.models.latents import cosines, mode, sample, split_moments
from animegamer_jax.models.vae import VAE, ResBlock, signed, to_uint8
from animegamer_jax.sharding import constrain
from animegamer_jax.train.stages.base import Evaluation, Scalars, Stage, StageNetworks
from animegamer_jax.train.stages.networks import count_matmul_flops, load_or_make
from animegamer_jax.train.stages.recipe import Count, FixedRecipe, NotNegative, OptimizerConfig

_SHOWN = 4  # clips in an evaluation
_FIRST_LOG_VARIANCE = -5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAERecipe(FixedRecipe):
    """The recipe of the VAE's training.

    Attributes:
        pictures: Number of random frames of each clip to train on, each as a clip of one frame;
            None trains on whole clips. With single frames the result is an image autoencoder
            applied to clips (inflation, arXiv 2310.05737).
        crop: Rows and columns of the random window of each clip to train on; None takes whole
            frames.
        l2_weight: Weight of the mean squared error of pixels in [-1, 1]; the mean absolute error
            has weight 1.
        change_weight: Weight of the mean absolute error of the differences between frames; without
            it a small VAE shows the mean of neighbouring frames, without motion.
        kl_weight: Weight of the KL divergence from the unit Gaussian, summed over a whole clip's
            latents.
        perceptual_weight: Weight of the distance of CLIP's features.
        perceptual_frames: Number of random frames of each clip for the distance of CLIP's
            features.
        finish_batches: Number of training batches on which the scaling factor is measured.
        frequency_power: Power of the deviation by which each frequency over time is divided for the
            decoder; 0 gives the decoder the latents unchanged.
    """

    pictures: Count | None = 4
    crop: tuple[int, int] | None = None
    l2_weight: NotNegative = 0.5
    change_weight: NotNegative = 0.5
    kl_weight: NotNegative = 1e-6
    perceptual_weight: NotNegative = 0.1
    perceptual_frames: Count = 2
    finish_batches: Count = 64
    frequency_power: NotNegative = 0.5


RECIPES = {
    "toy": VAERecipe(
        steps=9500,
        batch_size=4,
        crop=(64, 96),
        l2_weight=2.0,
        kl_weight=5e-7,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100, decay="cosine"),
        ema_decay=0.995,
        eval_every=250,
        save_every=250,
    )
}


def start_calmly(vae: VAE) -> None:
    """Makes a new VAE easy to train: nearly linear, with little noise, and without past frames.

    Every residual block starts as its shortcut, and the encoder's log-variance at -5, so that
    latents are more than noise from the first step. Causal kernels start with nonzero weights for
    the current frame only; others would give a mean of frames.
    """
    for _, module in nnx.iter_modules(vae):
        if isinstance(module, CausalConv):
            kernel = module.kernel[...]
            module.kernel[...] = (kernel * np.sqrt(len(kernel))).at[:-1].set(0)
        if isinstance(module, ResBlock):
            module.conv2.kernel[...] = jnp.zeros_like(module.conv2.kernel[...])
    out, means = vae.encoder.conv_out, vae.config.latent_channels
    out.kernel[...] = out.kernel[...].at[..., means:].multiply(0.1)
    out.bias[...] = out.bias[...].at[means:].set(_FIRST_LOG_VARIANCE)


def hold_past(vae: VAE) -> VAE:
    """Stops the gradients of the causal kernels' weights for past frames.

    For a clip of one frame these see the same frame again, and would learn a part of its weights.
    """
    held = nnx.clone(vae)
    for _, module in nnx.iter_modules(held):
        if isinstance(module, CausalConv):
            past, now = jnp.split(module.kernel[...], [module.num_past])
            module.kernel[...] = jnp.concatenate([jax.lax.stop_gradient(past), now])
    return held


def crop_clips(
    frames: UInt8[Array, "b f h w 3"], key: Key[Array, ""], *, size: tuple[int, int]
) -> UInt8[Array, "b f y x 3"]:
    """Crops all frames of a clip to the same window, at a random place for each clip.

    Windows that would reach over a border by up to half of their size are moved back to it, so that
    borders are seen as often as the middle.
    """
    b, f, h, w, c = frames.shape
    rows, columns = size
    over = jnp.array([rows // 2, columns // 2])
    room = jnp.array([h - rows, w - columns])
    corners = jax.random.randint(key, (b, 2), -over[None], (room + over + 1)[None])
    corners = jnp.clip(corners, 0, room[None])

    def one(clip: jax.Array, corner: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(clip, (0, *corner, 0), (f, rows, columns, c))

    return jax.vmap(one)(frames, corners)


def kl_divergence(moments: Float[Array, "b t y x m"]) -> Float[Array, ""]:
    """Returns the KL divergence from the unit Gaussian, in nats a latent number."""
    mean, log_variance = split_moments(moments)
    return 0.5 * (jnp.square(mean) + jnp.exp(log_variance) - 1.0 - log_variance).mean()


def perceptual_distance(
    clip: CLIP, made: Float[Array, "b h w 3"], true: Float[Array, "b h w 3"]
) -> Float[Array, ""]:
    """Returns one minus the mean cosine of CLIP's patch features; pixels are in [-1, 1]."""

    def features(frames: jax.Array) -> jax.Array:
        x = clip.image_features(clip.preprocess(frames)).astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)

    return 1.0 - (features(made) * jax.lax.stop_gradient(features(true))).sum(-1).mean()


def draw_frames(videos: Sequence[Array], key: Key[Array, ""], *, count: int) -> list[Array]:
    """Draws `count` frames of each clip, the same of all `videos`, as [(b count) h w 3]."""
    b, f = videos[0].shape[:2]
    chosen = jax.random.randint(key, (b, count, 1, 1, 1), 0, f)
    taken = [jnp.take_along_axis(video, chosen, axis=1) for video in videos]
    return [x.reshape(b * count, *x.shape[2:]) for x in taken]


def psnr(made: Float[Array, "b f h w 3"], true: Float[Array, "b f h w 3"]) -> Float[Array, ""]:
    """Returns the mean PSNR over clips in dB; pixels are in [-1, 1], and `made` is clipped."""
    error = jnp.square(jnp.clip(made, -1, 1) - true).mean(axis=(1, 2, 3, 4))
    return (10 * jnp.log10(4.0 / jnp.maximum(error, 1e-10))).mean()


class VAEStage(Stage[VAERecipe]):
    """Train the VAE on clips of the toy world."""

    recipes = RECIPES
    name: ClassVar[str] = "foundations-vae"
    needs: ClassVar[Mapping[NetworkName, str]] = {"clip": "foundations --part clip"}
    changes: ClassVar[tuple[NetworkName, ...]] = ("vae",)
    unit: ClassVar[str] = "clips"

    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the VAE, the bundle's or a new one, and CLIP."""
        assert bundle is not None, "the command has checked what the stage needs"
        vae = load_or_make("vae", self, bundle, mesh=mesh)
        if not bundle.has("vae"):
            start_calmly(vae)
        return {
            "vae": vae,
            "clip": bundle.load("clip", mesh=mesh, dtype=self.recipe.dtype),
        }

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        games = open_games(path)
        self._check_crop(games.info.height, games.info.width, path=path)
        return clip_samples(games, split=split, config=self.config)

    def sample_spec(self) -> ClipSample:
        return clip_spec(self.config)

    def _check_crop(self, height: int, width: int, *, path: str) -> None:
        crop, space = self.recipe.crop, self.vae_config.spatial_compression
        if crop is None:
            return
        fits = (0 < c <= s and c % space == 0 for c, s in zip(crop, (height, width), strict=True))
        if not all(fits):
            raise UserError(
                f"--crop {crop[0]} {crop[1]}: expected multiples of {space} up to the {height} x "
                f"{width} pixels of {path}"
            )

    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns the weighted sum of the terms, and the terms without weights as parts."""
        recipe = self.recipe
        picture_key, crop_key, latent_key, frame_key = jax.random.split(key, 4)
        frames = jnp.asarray(cast(ClipSample, batch).frames)
        vae = networks["vae"]
        if recipe.pictures is not None:
            vae = hold_past(vae)
            frames = draw_frames([frames], picture_key, count=recipe.pictures)[0][:, None]
        num_latents = _num_latents(self.vae_config, frames.shape[1:4])
        if recipe.crop is not None:
            frames = crop_clips(frames, crop_key, size=recipe.crop)
        true = signed(frames)
        moments = vae.encode(true)
        made = vae.decode(sample(moments, key=latent_key))
        parts = {"l1": jnp.abs(made - true).mean(), "l2": jnp.square(made - true).mean()}
        parts["kl"] = kl_divergence(moments)
        loss = parts["l1"] + recipe.l2_weight * parts["l2"]
        if recipe.change_weight and true.shape[1] > 1:
            parts["change"] = jnp.abs(jnp.diff(made, axis=1) - jnp.diff(true, axis=1)).mean()
            loss += recipe.change_weight * parts["change"]
        loss += recipe.kl_weight * num_latents * parts["kl"]
        if recipe.perceptual_weight:
            count = min(recipe.perceptual_frames, true.shape[1])
            shown = draw_frames([made, true], frame_key, count=count)
            parts["perceptual"] = perceptual_distance(networks["clip"], *shown)
            loss += recipe.perceptual_weight * parts["perceptual"]
        return loss, parts

    def sample_flops(self, networks: StageNetworks) -> float:
        """Returns three times the FLOPs of a forward pass of encoder and decoder.

        CLIP's share is small and not counted.
        """
        d = self.config.dit
        assert d is not None
        c = self.vae_config
        frames, *size = clip_size(d, c)
        rows, columns = self.recipe.crop or size
        pictures = self.recipe.pictures
        frames = 1 if pictures else frames

        def forward(vae: VAE, clip: jax.Array) -> jax.Array:
            return vae.decode(mode(vae.encode(clip)))

        shape = jax.ShapeDtypeStruct((1, frames, rows, columns, c.image_channels), jnp.float32)
        return 3 * (pictures or 1) * count_matmul_flops(forward, networks["vae"], shape)

    @functools.cached_property
    def _reconstruct(self) -> Callable[..., tuple[Array, Array]]:
        def reconstruct(vae: VAE, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
            true = signed(frames)
            made = vae.decode(mode(vae.encode(true)))
            pairs = jnp.concatenate([frames, to_uint8(made)], axis=3)[:_SHOWN]
            return psnr(made, true), constrain(pairs, *(None,) * 5)

        return jax.jit(reconstruct)

    def evaluate(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Evaluation:
        """Returns the PSNR of reconstructed clips, and some of them with their originals."""
        del key
        ratio, pairs = self._reconstruct(networks["vae"], jnp.asarray(batch.frames))
        return Evaluation({"psnr": float(ratio)}, {"true_and_reconstructed": pairs})

    def finish(
        self, networks: StageNetworks, batches: Iterator[Any]
    ) -> dict[NetworkName, NetworkConfig]:
        """Returns the configuration with the scaling factor that gives latents unit deviation.

        It also has scales of the frequencies, which keep the deviation.
        """

        @jax.jit
        def means(vae: VAE, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
            frames = constrain(frames, *(None,) * 5)  # sums in one order on any mesh
            latents, log_variance = split_moments(vae.encode(signed(frames)))
            frequencies = jnp.einsum("kf,bfhwz->bkhwz", cosines(latents.shape[1]), latents)
            noise = jnp.exp(log_variance).mean()  # the same in all frequencies
            return latents.mean(), jnp.square(frequencies).mean((0, 2, 3, 4)) + noise

        found = [
            means(networks["vae"], jnp.asarray(next(batches).frames))
            for _ in range(self.recipe.finish_batches)
        ]
        mean = np.mean([f[0] for f in found], dtype=np.float64)
        squares = np.array([f[1] for f in found], np.float64).mean(0)
        squares[0] -= len(squares) * mean**2
        factor = 1 / np.sqrt(squares.mean())
        changed = dataclasses.replace(self.vae_config, scaling_factor=float(factor))
        if power := self.recipe.frequency_power:
            deviations = np.sqrt(squares) * factor
            scales = deviations**-power / np.sqrt(np.mean(deviations ** (2 - 2 * power)))
            changed = dataclasses.replace(changed, frequency_scales=tuple(map(float, scales)))
        return {"vae": changed}


def _num_latents(config: VAEConfig, size: tuple[int, ...]) -> int:
    """Returns how many numbers the latents of a clip [frames, rows, columns] have."""
    frames, rows, columns = size
    latent_frames = 1 + (frames - 1) // config.temporal_compression
    space = config.spatial_compression
    return latent_frames * (rows // space) * (columns // space) * config.latent_channels
