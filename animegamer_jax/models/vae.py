"""The causal 3D VAE: 4x in time and 8x in space at the released size (paper, section 3.2).

The function is that of CogVideoX (arXiv 2408.06072, section 2.1, and the published code). No output
frame depends on a later input frame. A clip's first frame is encoded alone, so that 1 + 4k frames
become 1 + k latents, and a picture is a clip of one frame. The decoder takes chunks of latent
frames. Its causal convolutions pass their last input frames on to the next chunk, but its group
norms see one chunk: the chunks are part of the function, not an optimization.

Latents are in the VAE's own units; `latents.py` draws them and converts them to the units of the
diffusion model.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from animegamer_jax.configs import VAEConfig
from animegamer_jax.models.convolution import (
    CausalConv,
    FrameConv,
    PointConv,
    split_frames,
)
from animegamer_jax.models.layer_stack import remat
from animegamer_jax.models.linear import fusion_barrier
from animegamer_jax.models.norms import GroupNorm
from animegamer_jax.sharding import constrain, partition_spec, parts_of

_MOST_NUMBERS = 2**28  # that enter a convolution at once; a larger array goes in parts

_zeros, _ones = nnx.initializers.zeros_init(), nnx.initializers.ones_init()


# Resizing


def _enlarge(x: Float[Array, "b t h w c"], rows: int, columns: int) -> Float[Array, "b t y x c"]:
    """Repeats each pixel as `rows` x `columns` pixels."""
    b, t, h, w, c = x.shape
    x = jnp.broadcast_to(x[:, :, :, None, :, None], (b, t, h, rows, w, columns, c))
    return x.reshape(b, t, h * rows, w * columns, c)


def _stretch(x: Float[Array, "b t h w c"], factor: int) -> Float[Array, "b s h w c"]:
    """Repeats each frame `factor` times, except the first of an odd number of frames."""
    first = x.shape[1] % 2
    rest = jnp.repeat(x[:, first:], factor, axis=1)
    return jnp.concatenate([x[:, :1], rest], axis=1) if first else rest


def _halve_time(x: Float[Array, "b t h w c"]) -> Float[Array, "b s h w c"]:
    """Averages pairs of frames; keeps the first of an odd number of frames as it is."""
    first = x.shape[1] % 2
    rest = (x[:, first::2] + x[:, first + 1 :: 2]) * 0.5
    return jnp.concatenate([x[:, :1], rest], axis=1) if first else rest


# A few frames at a time

_Start = int | Int[Array, ""]
_Carry = TypeVar("_Carry")


def _at_once(count: int, *frame: int, past: int = 0) -> int:
    """Returns how many of `count` frames are computed at a time, after `past` others.

    A divisor of `count`, so that all parts have one shape.
    """
    most = max(1, _MOST_NUMBERS // math.prod(frame) - past)
    return max(n for n in range(1, min(most, count) + 1) if count % n == 0)


def _cut(x: Float[Array, "b t h w c"], start: _Start, number: int) -> Float[Array, "b n h w c"]:
    return jax.lax.dynamic_slice_in_dim(x, start, number, axis=1)


def _loop(
    step: Callable[[_Carry, _Start], tuple[_Carry, Float[Array, "b n h w c"]]],
    carry: _Carry,
    out: Float[Array, "b t h w c"],
    *,
    number: int,
    add: bool = False,
) -> tuple[_Carry, Float[Array, "b t h w c"]]:
    """Writes to `out`, or adds to it, `number` frames at a time: step(carry, first frame)."""

    def run(carried: tuple[_Carry, jax.Array], start: _Start) -> tuple[Any, None]:
        carry, out = carried
        carry, part = step(carry, start)
        part = _cut(out, start, number) + part if add else part
        return (carry, jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=1)), None

    starts = jnp.arange(0, out.shape[1], number)
    return jax.lax.scan(run, (carry, out), starts)[0]


# Norms and residual blocks


class SpatialNorm(nnx.Module):
    """Group norm, then a scale and a shift computed from the latents (arXiv 2209.09002).

    At initialization the scale is one and the shift zero, which is the plain group norm.
    """

    def __init__(self, channels: int, *, config: VAEConfig, rngs: nnx.Rngs):
        z = config.latent_channels
        self.norm = GroupNorm(channels, config=config, rngs=rngs)
        self.conv_y = PointConv(
            z, channels, config=config, rngs=rngs, kernel_init=_zeros, bias_init=_ones
        )
        self.conv_b = PointConv(z, channels, config=config, rngs=rngs, kernel_init=_zeros)

    def of_frames(
        self, x: Float[Array, "b t h w c"], latents: Float[Array, "b s y x z"]
    ) -> Callable[[Float[Array, "b n h w c"], _Start], Float[Array, "b n h w c"]]:
        """Returns a function that normalizes some of the frames, from the given one on."""
        frames, rows, columns = latents.shape[1:4]
        # Frames after a chunk's first one (odd length), or all of them (even length).
        factor = (x.shape[1] - frames % 2) // max(frames - frames % 2, 1)
        statistics = self.norm.statistics(x)
        # The maps are pointwise: resizing their results gives the same numbers as resizing the
        # latents, with a fraction of the products.
        scale, shift = (_stretch(conv(latents), factor) for conv in (self.conv_y, self.conv_b))

        def normalize(part: jax.Array, start: _Start) -> jax.Array:
            def resized(maps: jax.Array) -> jax.Array:
                maps = _cut(maps, start, part.shape[1])
                maps = _enlarge(maps, part.shape[2] // rows, part.shape[3] // columns)
                return fusion_barrier(maps).astype(jnp.float32)  # XLA would enlarge float32 maps

            y = self.norm.normalize(part, statistics)
            return (y * resized(scale) + resized(shift)).astype(part.dtype)

        return normalize

    def __call__(
        self, x: Float[Array, "b t h w c"], latents: Float[Array, "b s y x z"] | None
    ) -> Float[Array, "b t h w c"]:
        if latents is None:
            raise ValueError("a spatial norm needs latents: found None")
        return self.of_frames(x, latents)(x, 0)


Norm = type[GroupNorm] | type[SpatialNorm]


def _convolve(
    norm: GroupNorm | SpatialNorm,
    conv: CausalConv,
    x: Float[Array, "b t h w i"],
    latents: Float[Array, "b s y x z"] | None,
    past: Float[Array, "b p h w i"] | None,
    residual: Float[Array, "b t h w o"] | None = None,
) -> tuple[Float[Array, "b t h w o"], Float[Array, "b p h w i"]]:
    """Applies norm, SiLU and convolution, and adds the residual.

    Of the decoder's largest arrays, only input and result exist for more than a few frames.
    """
    b, count, *plane = x.shape
    number = _at_once(count, *plane, past=conv.num_past)
    if number == count or latents is None or isinstance(norm, GroupNorm):
        y, last = conv(jax.nn.silu(norm(x, latents)), past)
        return (y if residual is None else residual + y), last
    normalize = norm.of_frames(x, latents)

    def activate(start: _Start, number: int) -> jax.Array:
        return jax.nn.silu(normalize(_cut(x, start, number), start))

    def step(past: jax.Array, start: _Start) -> tuple[jax.Array, jax.Array]:
        y, past = conv(activate(start, number), past)
        return past, y

    if past is None:
        past = jnp.repeat(activate(0, 1), conv.num_past, axis=1)
    adds = residual is not None
    # Sums replace the residual in its own memory.
    out = residual if adds else jnp.zeros((b, count, *plane[:2], conv.bias.shape[0]), conv.dtype)
    past, y = _loop(step, past, out, number=number, add=adds)
    return y, past


class BlockCache(NamedTuple):
    """The last input frames of a residual block's two convolutions: two at the released size."""

    conv1: Float[Array, "b p h w i"]
    conv2: Float[Array, "b p h w o"]


class DecoderCache(NamedTuple):
    """The last input frames of the decoder's convolutions, for the next chunk.

    `up` starts with the finest level. Before the first chunk, entries are None.
    """

    conv_in: Float[Array, "b p h w z"] | None
    mid: tuple[BlockCache, ...] | None
    up: tuple[tuple[BlockCache, ...] | None, ...]
    conv_out: Float[Array, "b p y x c"] | None


class ResBlock(nnx.Module):
    """Twice norm, SiLU and convolution, added to the input or a linear map of its channels."""

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
        y, last1 = _convolve(self.norm1, self.conv1, x, latents, past1)
        if self.shortcut is not None:
            x = self.shortcut(x)
        x, last2 = _convolve(self.norm2, self.conv2, y, latents, past2, x)
        x = constrain(x, "act_batch", "act_frames", "act_rows", "act_columns", None)
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
    """Makes a block for each pair of successive numbers of channels."""
    steps = itertools.pairwise(channels)
    return nnx.List([ResBlock(i, o, norm=norm, config=config, rngs=rngs) for i, o in steps])


# Encoder and decoder


def _num_time_levels(config: VAEConfig) -> int:
    """Returns the number of levels that change the number of frames.

    Raises:
        ValueError: `temporal_compression` is not a power of two, or exceeds the spatial one.
    """
    factor = config.temporal_compression
    if factor < 1 or factor & (factor - 1) or factor > config.spatial_compression:
        raise ValueError(
            f"temporal compression {factor}: expected a power of two up to the spatial "
            f"compression {config.spatial_compression}"
        )
    return factor.bit_length() - 1


class DownLevel(nnx.Module):
    """Residual blocks, then half the rows and columns (except at the last level).

    The first log2(temporal compression) levels halve the frames as well, before rows and columns.
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


def _enlarge_and_convolve(
    conv: FrameConv, x: Float[Array, "b t h w c"]
) -> Float[Array, "b t y x c"]:
    """Doubles rows and columns, then convolves each frame; large frames a few at a time."""
    b, count, h, w, c = x.shape
    number = _at_once(count, 2 * h, 2 * w, c)
    if number == count:
        return conv(_enlarge(x, 2, 2))

    def step(carry: None, start: _Start) -> tuple[None, jax.Array]:
        return carry, conv(_enlarge(_cut(x, start, number), 2, 2))

    return _loop(step, None, jnp.zeros((b, count, 2 * h, 2 * w, c), conv.dtype), number=number)[1]


class UpLevel(nnx.Module):
    """Residual blocks, then twice the rows and columns (except at level 0, the finest).

    The log2(temporal compression) coarsest levels, which run first, double the frames as well.
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
        x = _enlarge_and_convolve(self.upsample, x)
        # Repeating frames after the framewise convolution gives the same numbers with half the
        # products.
        return (_stretch(x, 2) if self.doubles_time else x), caches


class Encoder(nnx.Module):
    """Encodes frames as the means and log-variances of latents."""

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
    """Decodes a chunk of latent frames; every norm reads the latents again."""

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
        frames, conv_out = _convolve(self.norm_out, self.conv_out, x, latents, past.conv_out)
        return frames.astype(jnp.float32), DecoderCache(conv_in, mid, tuple(up[::-1]), conv_out)


class VAE(nnx.Module):
    """The encoder and the decoder of clips.

    Raises:
        ValueError: Sizes in the config contradict one another (norm groups, compressions).
    """

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def encode(self, video: Float[Array, "b f h w c"]) -> Float[Array, "b t y x m"]:
        """Returns moments of the latents: means, then log-variances, float32, not scaled.

        `mode` and `sample` make latents of moments. The whole clip is encoded in one pass, as in
        the release. At the released size, t = 1 + (f - 1) / 4, y = h / 8, x = w / 8.

        Args:
            video: Frames in [-1, 1]; `f` = 1 is a picture.

        Raises:
            ValueError: Rows or columns are not multiples of the spatial compression, or `f` is not
                one more than a multiple of the temporal compression.
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
        """Decodes one chunk to frames in about [-1, 1] (float32); returns also the new cache.

        At the released size each latent frame becomes four frames, except that the first of an odd
        number becomes one.

        Args:
            latents: Latent frames, not scaled.
            cache: Cache that the previous chunk returned; None for a clip's first chunk.
        """
        return self.decoder(latents, cache)

    def decode(self, latents: Float[Array, "b t h w z"]) -> Float[Array, "b f y x c"]:
        """Decodes a whole clip to frames in about [-1, 1] (float32).

        Decodes the chunks of `chunk_bounds(t)` in turn, as in the release; a single chunk would
        give other frames. At the released size f = 1 + 4 (t - 1), y = 8 h, x = 8 w.

        Args:
            latents: Latent frames, not scaled.

        Raises:
            ValueError: `t` is even.
        """
        (_, stop), *rest = chunk_bounds(latents.shape[1])
        first, cache = self.decode_chunk(latents[:, :stop])
        if not rest:
            return first

        # In a loop each chunk's cache replaces the one before; unrolled, several are in memory.
        def decode_next(cache: DecoderCache, chunk: jax.Array) -> tuple[DecoderCache, jax.Array]:
            frames, cache = self.decode_chunk(chunk, cache)
            return cache, frames

        b, _, *plane = latents.shape
        chunks = latents[:, stop:].reshape(b, len(rest), -1, *plane)
        _, frames = jax.lax.scan(decode_next, cache, jnp.moveaxis(chunks, 1, 0))
        frames = jnp.moveaxis(frames, 0, 1).reshape(b, -1, *frames.shape[3:])
        return jnp.concatenate([first, frames], axis=1)


def decode_in_parts(vae: VAE, latents: Float[Array, "b t h w z"]) -> Float[Array, "b f y x c"]:
    """Runs `VAE.decode`, frames split into rows and columns over the mesh, by the current rules.

    Each device decodes its part: convolutions get the border rows and columns of the neighbors, and
    group norms average over all parts. XLA's partitioner would take minutes to compile this.
    Without a mesh, or if no rule splits frames, this is `VAE.decode`.

    Raises:
        ValueError: Rows or columns of the latents do not divide over the mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return vae.decode(latents)
    spec = partition_spec(("act_batch", "act_frames", "act_rows", "act_columns", None))
    parts = [parts_of(axis, mesh) for axis in spec[2:4]]
    if parts == [1, 1]:
        return vae.decode(latents)
    for what, size, count in zip(("rows", "columns"), latents.shape[2:4], parts, strict=True):
        if size % count:
            raise ValueError(f"{size} {what} of latents do not divide over {count} devices")
    rows, columns = (axis if n > 1 else None for axis, n in zip(spec[2:4], parts, strict=True))
    graphdef, state = nnx.split(vae)

    def local(state: nnx.State, latents: jax.Array) -> jax.Array:
        with split_frames(rows, columns):
            return nnx.merge(graphdef, state).decode(latents)

    specs = PartitionSpec(), spec
    run = jax.shard_map(local, in_specs=specs, out_specs=spec, check_vma=False)
    return run(state, latents)


# Latents and frames outside the VAE


def chunk_bounds(num_latent_frames: int) -> list[tuple[int, int]]:
    """Returns start and stop of the decoder's chunks: (0, 3), (3, 5), (5, 7), ...

    A single latent frame, a picture, is the chunk (0, 1).

    Raises:
        ValueError: The number is even or not positive.
    """
    if num_latent_frames < 1 or num_latent_frames % 2 == 0:
        raise ValueError(f"{num_latent_frames} latent frames: expected an odd number")
    if num_latent_frames == 1:
        return [(0, 1)]
    return [(0, 3)] + [(start, start + 2) for start in range(3, num_latent_frames, 2)]


def signed(frames: UInt8[Array, "*b h w 3"]) -> Float[Array, "*b h w 3"]:
    """Scales pixels from 0..255 to -1..1."""
    return frames.astype(jnp.float32) / 127.5 - 1.0


def to_uint8(frames: Float[Array, "*b c"]) -> UInt8[Array, "*b c"]:
    """Converts frames in [-1, 1] to 0..255; other values are clipped.

    Rounds to the nearest level, as diffusers and torchvision do. The published CogVideoX script
    truncates, which darkens frames by half a level.
    """
    levels = jnp.clip((frames.astype(jnp.float32) + 1.0) * 0.5, 0.0, 1.0) * 255.0
    return jnp.round(levels).astype(jnp.uint8)
