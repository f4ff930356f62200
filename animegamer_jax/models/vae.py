"""The causal 3D VAE: 4x in time and 8x in space at the released size (PAPER section 3.2).

Its function is CogVideoX's (arXiv 2408.06072, section 2.1, and the published code): no output frame
sees a later input frame; a clip's first frame stands apart, so that 1 + 4k frames become 1 + k
latents and a picture is a clip of one frame. The decoder works in chunks of latent frames. Its
causal convolutions carry their last two input frames from chunk to chunk, but its group norms see
one chunk at a time: the chunking is part of the function, not an optimization.

Latents are in the VAE's own units here. Those of the diffusion model are the caller's to make:
`to_decoder` after `encode`, `from_decoder` before `decode`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Key, UInt8

from animegamer_jax.configs import VAEConfig
from animegamer_jax.models.convolution import (
    CausalConv,
    FrameConv,
    PointConv,
    mean_over_parts,
    split_frames,
)
from animegamer_jax.models.layer_stack import remat
from animegamer_jax.sharding import axes, constrain, partition_spec

_EPS = 1e-6
_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -30.0, 20.0

_zeros, _ones = nnx.initializers.zeros_init(), nnx.initializers.ones_init()


# Resizing


def _enlarge(x: Float[Array, "b t h w c"], rows: int, columns: int) -> Float[Array, "b t y x c"]:
    """Nearest neighbours: each pixel becomes `rows` x `columns` pixels."""
    b, t, h, w, c = x.shape
    x = jnp.broadcast_to(x[:, :, :, None, :, None], (b, t, h, rows, w, columns, c))
    return x.reshape(b, t, h * rows, w * columns, c)


def _stretch(x: Float[Array, "b t h w c"], factor: int) -> Float[Array, "b s h w c"]:
    """Each frame `factor` times; of an odd number of frames, the first one only once."""
    first = x.shape[1] % 2
    rest = jnp.repeat(x[:, first:], factor, axis=1)
    return jnp.concatenate([x[:, :1], rest], axis=1) if first else rest


def _halve_time(x: Float[Array, "b t h w c"]) -> Float[Array, "b s h w c"]:
    """Means of frame pairs; of an odd number of frames, the first one is kept as it is."""
    first = x.shape[1] % 2
    rest = (x[:, first::2] + x[:, first + 1 :: 2]) * 0.5
    return jnp.concatenate([x[:, :1], rest], axis=1) if first else rest


# Norms and residual blocks


class GroupNorm(nnx.Module):
    """Group norm over all frames given at once, in float32."""

    def __init__(self, channels: int, *, config: VAEConfig, rngs: nnx.Rngs):
        del rngs
        if channels % config.norm_groups:
            raise ValueError(
                f"{channels} channels do not divide into {config.norm_groups} norm groups"
            )
        dtype = jnp.dtype(config.param_dtype)
        self.groups = config.norm_groups
        self.scale = nnx.Param(jnp.ones((channels,), dtype), **axes("norm"))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype), **axes("norm"))

    def _group_mean(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b 1 1 1 c"]:
        # Columns first, then the rest: one sum over millions of pixels would lose digits. Channels
        # are grouped last, so that no array has a minor axis of a few channels.
        mean = x.mean(3).mean((1, 2))
        b, c = mean.shape
        mean = mean_over_parts(mean.reshape(b, self.groups, c // self.groups).mean(-1))
        return jnp.repeat(mean, c // self.groups, axis=-1)[:, None, None, None]

    def __call__(
        self, x: Float[Array, "b t h w c"], latents: Array | None = None
    ) -> Float[Array, "b t h w c"]:
        y = x.astype(jnp.float32)  # float32 island
        y = y - self._group_mean(y)
        scale, bias = (
            p[...].astype(jnp.float32).reshape(1, 1, 1, 1, -1) for p in (self.scale, self.bias)
        )
        y = y * (jax.lax.rsqrt(self._group_mean(jnp.square(y)) + _EPS) * scale) + bias
        return y.astype(x.dtype)


class SpatialNorm(nnx.Module):
    """Group norm whose result is scaled and shifted by maps of the latents (arXiv 2209.09002).

    A new one is the plain group norm: the scale map starts at one, the shift map at zero.
    """

    def __init__(self, channels: int, *, config: VAEConfig, rngs: nnx.Rngs):
        z = config.latent_channels
        self.norm = GroupNorm(channels, config=config, rngs=rngs)
        self.conv_y = PointConv(
            z, channels, config=config, rngs=rngs, kernel_init=_zeros, bias_init=_ones
        )
        self.conv_b = PointConv(z, channels, config=config, rngs=rngs, kernel_init=_zeros)

    def __call__(
        self, x: Float[Array, "b t h w c"], latents: Float[Array, "b s y x z"] | None
    ) -> Float[Array, "b t h w c"]:
        if latents is None:
            raise ValueError("a spatial norm needs the latents")
        frames, rows, columns = latents.shape[1:4]
        # Frames after a chunk's first one (odd length), or all of them (even length).
        factor = (x.shape[1] - frames % 2) // max(frames - frames % 2, 1)

        def resized(maps: jax.Array) -> jax.Array:
            maps = _stretch(maps, factor).astype(jnp.float32)
            return _enlarge(maps, x.shape[2] // rows, x.shape[3] // columns)

        # The maps are pointwise: the same numbers as resizing the latents first, at a fraction of
        # the products.
        y = self.norm(x.astype(jnp.float32))
        y = y * resized(self.conv_y(latents)) + resized(self.conv_b(latents))
        return y.astype(x.dtype)


Norm = type[GroupNorm] | type[SpatialNorm]


class BlockCache(NamedTuple):
    """The last two input frames of a residual block's convolutions."""

    conv1: Float[Array, "b 2 h w i"]
    conv2: Float[Array, "b 2 h w o"]


class DecoderCache(NamedTuple):
    """What the decoder carries from one chunk to the next; `up` is indexed finest level first.

    None, before the first chunk.
    """

    conv_in: Float[Array, "b 2 h w z"] | None
    mid: tuple[BlockCache, ...] | None
    up: tuple[tuple[BlockCache, ...] | None, ...]
    conv_out: Float[Array, "b 2 y x c"] | None


class ResBlock(nnx.Module):
    """Norm, SiLU, convolution, twice, beside the input (or a linear map of its channels)."""

    def __init__(
        self, in_channels: int, out_channels: int, *, norm: Norm, config: VAEConfig, rngs: nnx.Rngs
    ):
        self.norm1 = norm(in_channels, config=config, rngs=rngs)
        self.conv1 = CausalConv(in_channels, out_channels, config=config, rngs=rngs)
        self.norm2 = norm(out_channels, config=config, rngs=rngs)
        self.conv2 = CausalConv(out_channels, out_channels, config=config, rngs=rngs)
        if in_channels == out_channels:
            self.shortcut = None
        else:
            self.shortcut = PointConv(in_channels, out_channels, config=config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t h w i"],
        latents: Float[Array, "b s y x z"] | None = None,
        cache: BlockCache | None = None,
    ) -> tuple[Float[Array, "b t h w o"], BlockCache]:
        past1, past2 = cache or (None, None)
        y, last1 = self.conv1(jax.nn.silu(self.norm1(x, latents)), past1)
        y, last2 = self.conv2(jax.nn.silu(self.norm2(y, latents)), past2)
        if self.shortcut is not None:
            x = self.shortcut(x)
        x = constrain(x + y, "act_batch", "act_frames", "act_rows", "act_columns", None)
        return x, BlockCache(last1, last2)


def _run_blocks(
    blocks: Sequence[ResBlock],
    x: jax.Array,
    config: VAEConfig,
    latents: jax.Array | None = None,
    caches: tuple[BlockCache, ...] | None = None,
) -> tuple[jax.Array, tuple[BlockCache, ...]]:
    run = remat(lambda block, *args: block(*args), config.remat)
    new = []
    for block, cache in zip(blocks, caches or (None,) * len(blocks), strict=True):
        x, last = run(block, x, latents, cache)
        new.append(last)
    return x, tuple(new)


def _make_blocks(
    channels: Sequence[int], *, norm: Norm, config: VAEConfig, rngs: nnx.Rngs
) -> nnx.List[ResBlock]:
    """A block for each step between neighbouring numbers of channels."""
    steps = itertools.pairwise(channels)
    return nnx.List([ResBlock(i, o, norm=norm, config=config, rngs=rngs) for i, o in steps])


# Encoder and decoder


def _num_time_levels(config: VAEConfig) -> int:
    """How many levels change the number of frames.

    Raises:
        ValueError: `temporal_compression` is no power of two, or greater than the spatial one.
    """
    factor = config.temporal_compression
    if factor < 1 or factor & (factor - 1) or factor > config.spatial_compression:
        raise ValueError(
            f"temporal compression {factor}: expected a power of two up to the spatial "
            f"compression {config.spatial_compression}"
        )
    return factor.bit_length() - 1


class DownLevel(nnx.Module):
    """Residual blocks, then half the rows and columns (not at the last level).

    The first log2(temporal compression) levels halve time as well, before they do so in space.
    """

    def __init__(self, level: int, *, config: VAEConfig, rngs: nnx.Rngs):
        before = config.multipliers[max(level - 1, 0)] if level else 1
        after = config.multipliers[level]
        widths = [config.channels * m for m in (before, *(after,) * config.num_res_blocks)]
        self.config = config
        self.halves_time = level < _num_time_levels(config)
        self.blocks = _make_blocks(widths, norm=GroupNorm, config=config, rngs=rngs)
        if level == len(config.multipliers) - 1:
            self.downsample = None
        else:
            self.downsample = FrameConv(widths[-1], stride=2, config=config, rngs=rngs)

    def __call__(self, x: Float[Array, "b t h w i"]) -> Float[Array, "b s y x o"]:
        x, _ = _run_blocks(self.blocks, x, self.config)
        if self.downsample is None:
            return x
        return self.downsample(_halve_time(x) if self.halves_time else x)


class UpLevel(nnx.Module):
    """Residual blocks, then twice the rows and columns (not at level 0, the finest).

    The first log2(temporal compression) levels that are run, the coarsest, double time as well.
    """

    def __init__(self, level: int, *, config: VAEConfig, rngs: nnx.Rngs):
        coarsest = len(config.multipliers) - 1
        before = config.multipliers[min(level + 1, coarsest)]
        after = config.multipliers[level]
        widths = [config.channels * m for m in (before, *(after,) * (config.num_res_blocks + 1))]
        self.config = config
        self.doubles_time = coarsest - level < _num_time_levels(config)
        self.blocks = _make_blocks(widths, norm=SpatialNorm, config=config, rngs=rngs)
        if level == 0:
            self.upsample = None
        else:
            self.upsample = FrameConv(widths[-1], stride=1, config=config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t h w i"],
        latents: Float[Array, "b l y x z"],
        caches: tuple[BlockCache, ...] | None = None,
    ) -> tuple[Float[Array, "b s r q o"], tuple[BlockCache, ...]]:
        x, caches = _run_blocks(self.blocks, x, self.config, latents, caches)
        if self.upsample is None:
            return x, caches
        x = self.upsample(_enlarge(x, 2, 2))
        # Frames are repeated after the framewise convolution: the same numbers, half the products.
        return (_stretch(x, 2) if self.doubles_time else x), caches


class Encoder(nnx.Module):
    """Frames to the mean and log-variance of latents."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        levels = range(len(config.multipliers))
        top = config.channels * config.multipliers[-1]
        self.config = config
        self.conv_in = CausalConv(config.image_channels, config.channels, config=config, rngs=rngs)
        self.down = nnx.List([DownLevel(level, config=config, rngs=rngs) for level in levels])
        self.mid = _make_blocks((top,) * 3, norm=GroupNorm, config=config, rngs=rngs)
        self.norm_out = GroupNorm(top, config=config, rngs=rngs)
        self.conv_out = CausalConv(
            top, 2 * config.latent_channels, config=config, rngs=rngs, out_axis="features"
        )

    def __call__(self, video: Float[Array, "b f h w c"]) -> Float[Array, "b t y x m"]:
        x, _ = self.conv_in(video)
        x = constrain(x, "act_batch", "act_frames", "act_rows", "act_columns", None)
        for level in self.down:
            x = level(x)
        x, _ = _run_blocks(self.mid, x, self.config)
        moments, _ = self.conv_out(jax.nn.silu(self.norm_out(x)))
        return moments.astype(jnp.float32)


class Decoder(nnx.Module):
    """A chunk of latent frames to frames; every norm looks at the latents again."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        levels = range(len(config.multipliers))
        top, bottom = (config.channels * config.multipliers[i] for i in (-1, 0))
        self.config = config
        self.conv_in = CausalConv(config.latent_channels, top, config=config, rngs=rngs)
        self.mid = _make_blocks((top,) * 3, norm=SpatialNorm, config=config, rngs=rngs)
        self.up = nnx.List([UpLevel(level, config=config, rngs=rngs) for level in levels])
        self.norm_out = SpatialNorm(bottom, config=config, rngs=rngs)
        self.conv_out = CausalConv(
            bottom, config.image_channels, config=config, rngs=rngs, out_axis="features"
        )

    def __call__(
        self, latents: Float[Array, "b t h w z"], cache: DecoderCache | None = None
    ) -> tuple[Float[Array, "b f y x c"], DecoderCache]:
        past = cache or DecoderCache(None, None, (None,) * len(self.up), None)
        x, conv_in = self.conv_in(latents, past.conv_in)
        x = constrain(x, "act_batch", "act_frames", "act_rows", "act_columns", None)
        x, mid = _run_blocks(self.mid, x, self.config, latents, past.mid)
        up = []
        for level, level_past in reversed(list(zip(self.up, past.up, strict=True))):
            x, level_cache = level(x, latents, level_past)
            up.append(level_cache)
        frames, conv_out = self.conv_out(jax.nn.silu(self.norm_out(x, latents)), past.conv_out)
        return frames.astype(jnp.float32), DecoderCache(conv_in, mid, tuple(up[::-1]), conv_out)


class VAE(nnx.Module):
    """The encoder and the decoder of clips.

    Raises:
        ValueError: the config's sizes do not fit one another (norm groups, compressions).
    """

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def encode(self, video: Float[Array, "b f h w c"]) -> Float[Array, "b t y x m"]:
        """Frames in [-1, 1] to moments: means, then log-variances, in float32, not scaled.

        The whole clip in one pass, as the release does; `f` = 1 is a picture. With the released
        compressions, t = 1 + (f - 1) / 4, y = h / 8, x = w / 8. `mode` and `sample` make latents of
        the moments; `scaling_factor` is not applied.

        Raises:
            ValueError: the size is no multiple of the spatial compression, or `f` not one more
                than a multiple of the temporal compression.
        """
        time, space = self.config.temporal_compression, self.config.spatial_compression
        _, f, h, w, _ = video.shape
        if f % time != 1 % time or h % space or w % space:
            raise ValueError(
                f"a clip of {f} frames of {h} x {w}: expected 1 + a multiple of {time} frames, "
                f"and rows and columns that are multiples of {space}"
            )
        return self.encoder(video)

    def decode_chunk(
        self, latents: Float[Array, "b t h w z"], cache: DecoderCache | None = None
    ) -> tuple[Float[Array, "b f y x c"], DecoderCache]:
        """Some latent frames, not scaled, to frames in about [-1, 1] (float32), and the new cache.

        Of an odd number of latent frames, the first becomes one frame and each other one four (at
        the released size); of an even number, each becomes four. `cache` is what the chunk before
        returned, or None for a clip's first chunk.
        """
        return self.decoder(latents, cache)

    def decode(self, latents: Float[Array, "b t h w z"]) -> Float[Array, "b f y x c"]:
        """Latents of a whole clip, not scaled, to frames in about [-1, 1] (float32).

        Walks `chunk_bounds(t)` and carries the cache, as the release does: decoding in one piece
        would be another function. f = 1 + 4 (t - 1), y = 8 h, x = 8 w at the released size.

        Raises:
            ValueError: `t` is even.
        """
        frames, cache = [], None
        for start, stop in chunk_bounds(latents.shape[1]):
            chunk, cache = self.decode_chunk(latents[:, start:stop], cache)
            frames.append(chunk)
        return jnp.concatenate(frames, axis=1)


def decode_in_parts(vae: VAE, latents: Float[Array, "b t h w z"]) -> Float[Array, "b f y x c"]:
    """`VAE.decode` with the frames in parts over the mesh axes of the rules in force.

    Each device decodes its rows and columns: its convolutions get their neighbours' border, and
    group norms are means over all. Left to the partitioner the same compiles for minutes. Without
    a mesh, or where no rule splits frames, it is `VAE.decode`.

    Raises:
        ValueError: rows or columns of the latents do not divide over the mesh axes.
    """
    names = ("act_batch", "act_frames", "act_rows", "act_columns", None)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return vae.decode(latents)
    spec = partition_spec(names)
    rows, columns = (_split(axis, mesh) for axis in spec[2:4])
    if rows is None and columns is None:
        return vae.decode(latents)
    for what, size, axis in zip(("rows", "columns"), latents.shape[2:4], spec[2:4], strict=True):
        if size % (parts := _num_parts(axis, mesh)):
            raise ValueError(f"{size} {what} of latents do not divide over {parts} devices")
    graphdef, state = nnx.split(vae)

    def local(state: nnx.State, latents: jax.Array) -> jax.Array:
        with split_frames(rows, columns):
            return nnx.merge(graphdef, state).decode(latents)

    whole = PartitionSpec()
    run = jax.shard_map(local, in_specs=(whole, spec), out_specs=spec, check_vma=False)
    return run(state, latents)


def _num_parts(axis: str | tuple[str, ...] | None, mesh: AbstractMesh) -> int:
    names = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(mesh.shape[name] for name in names)


def _split(axis: str | tuple[str, ...] | None, mesh: AbstractMesh) -> Any:
    return axis if _num_parts(axis, mesh) > 1 else None


# At the VAE's border


def chunk_bounds(num_latent_frames: int) -> list[tuple[int, int]]:
    """Start and stop of the chunks that the decoder takes: (0, 3), (3, 5), (5, 7), ...

    One latent frame, a picture, is the chunk (0, 1).

    Raises:
        ValueError: the number is even or not positive: the first chunk takes one or three frames
            and each other one two.
    """
    if num_latent_frames < 1 or num_latent_frames % 2 == 0:
        raise ValueError(f"{num_latent_frames} latent frames: expected an odd number")
    if num_latent_frames == 1:
        return [(0, 1)]
    return [(0, 3)] + [(start, start + 2) for start in range(3, num_latent_frames, 2)]


def split_moments(
    moments: Float[Array, "*b m"],
) -> tuple[Float[Array, "*b z"], Float[Array, "*b z"]]:
    """Means and log-variances, the latter clipped to [-30, 20] as in CogVideoX."""
    mean, log_variance = jnp.split(moments, 2, axis=-1)
    return mean, jnp.clip(log_variance, _MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE)


def mode(moments: Float[Array, "*b m"]) -> Float[Array, "*b z"]:
    """The most likely latents, not scaled: the means."""
    return split_moments(moments)[0]


def sample(moments: Float[Array, "*b m"], *, key: Key[Array, ""]) -> Float[Array, "*b z"]:
    """Latents drawn from the encoder's Gaussian, not scaled."""
    mean, log_variance = split_moments(moments)
    noise = jax.random.normal(key, mean.shape, mean.dtype)
    return mean + jnp.exp(0.5 * log_variance) * noise


def cosines(num_frames: int) -> Float[np.ndarray, "k f"]:
    """The orthonormal cosine transform (DCT-II): a row a frequency, a column a frame."""
    k, f = np.arange(num_frames)[:, None], np.arange(num_frames)[None]
    basis = np.cos(np.pi * k * (f + 0.5) / num_frames) * np.sqrt(2 / num_frames)
    basis[0] /= np.sqrt(2)
    return basis


def to_decoder(
    latents: Float[Array, "*b f h w z"], config: VAEConfig
) -> Float[Array, "*b f h w z"]:
    """The VAE's latents as the diffusion model sees them.

    Times `scaling_factor`; with `frequency_scales` also each of their cosine frequencies over time
    times its scale.

    Raises:
        ValueError: there is not one scale for each latent frame.
    """
    return _over_time(latents * config.scaling_factor, _frequency_gain(config, latents))


def from_decoder(
    latents: Float[Array, "*b f h w z"], config: VAEConfig
) -> Float[Array, "*b f h w z"]:
    """The inverse of `to_decoder`."""
    gain = _frequency_gain(config, latents)
    inverse = None if gain is None else np.linalg.inv(gain)
    return _over_time(latents, inverse) / config.scaling_factor


def _frequency_gain(config: VAEConfig, latents: jax.Array) -> Float[np.ndarray, "f f"] | None:
    """Frames to frequencies, each times its scale, and back to frames; None: as they are."""
    scales, frames = config.frequency_scales, latents.shape[-4]
    if not scales:
        return None
    if len(scales) != frames:
        raise ValueError(
            f"latents of {frames} frames: the VAE has frequency scales of {len(scales)}"
        )
    basis = cosines(frames)
    return basis.T @ (np.array(scales)[:, None] * basis)


def _over_time(x: jax.Array, matrix: Float[np.ndarray, "f f"] | None) -> jax.Array:
    if matrix is None:
        return x
    weights = jnp.asarray(matrix, jnp.float32)  # float32 island: small frequencies beside large
    return jnp.einsum("kf,...fhwz->...khwz", weights, x.astype(jnp.float32)).astype(x.dtype)


def to_uint8(frames: Float[Array, "*b c"]) -> UInt8[Array, "*b c"]:
    """Frames in [-1, 1] to 0..255; what lies outside is clipped.

    Rounds to the nearest level, as diffusers and torchvision do. The published CogVideoX script
    cuts the fraction off, which darkens by half a level and never gives 255 but for exactly 1.
    """
    levels = jnp.clip((frames.astype(jnp.float32) + 1.0) * 0.5, 0.0, 1.0) * 255.0
    return jnp.round(levels).astype(jnp.uint8)
