"""Norms over features or channels; statistics in float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax.configs import NetworkConfig, VAEConfig
from animegamer_jax.models.convolution import mean_over_parts
from animegamer_jax.models.linear import along_last_axis
from animegamer_jax.sharding import axes, platform

_GROUP_EPS = 1e-6


class LayerNorm(nnx.Module):
    """Layer norm over the last axis."""

    def __init__(self, features: int, *, eps: float, config: NetworkConfig, rngs: nnx.Rngs):
        del rngs
        self.eps = eps
        dtype = jnp.dtype(config.param_dtype)
        self.scale = nnx.Param(jnp.ones((features,), dtype), **axes("norm"))
        self.bias = nnx.Param(jnp.zeros((features,), dtype), **axes("norm"))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        y = x.astype(jnp.float32)  # float32 island: a mean of bfloat16 sums loses digits
        center = y.mean(-1, keepdims=True)
        if platform() == "tpu" and x.dtype == jnp.bfloat16:
            # Both sums in one pass: squares of numbers with so few digits lose nothing in float32.
            variance = jnp.square(y).mean(-1, keepdims=True) - jnp.square(center)
            y = (y - center) * jax.lax.rsqrt(jnp.maximum(variance, 0) + self.eps)
        else:
            y = y - center
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        scale, bias = (
            along_last_axis(p[...].astype(jnp.float32), y) for p in (self.scale, self.bias)
        )
        return (y * scale + bias).astype(x.dtype)

    def most_norm(self) -> Float[Array, "..."]:
        """Returns a bound of the Euclidean norm of results; of each layer if layers are stacked."""
        scale, bias = (
            jax.lax.stop_gradient(p[...].astype(jnp.float32)) for p in (self.scale, self.bias)
        )
        return scale.shape[-1] ** 0.5 * jnp.abs(scale).max(-1) + jnp.linalg.norm(bias, axis=-1)

    def normalize_heads(self, x: Float[Array, "b h t d"]) -> Float[Array, "b h t d"]:
        """Normalizes each head's features, in the layout of `kernels.attend.project_heads`.

        On a TPU those arrays have tokens last in memory. Sums over features are then products with
        ones, which take a tenth of the time of reductions across the rows of registers.
        """
        if platform() != "tpu":
            return self(x)
        return self._normalize_tokens_last(x.swapaxes(2, 3)).swapaxes(2, 3)

    def _normalize_tokens_last(self, x: Float[Array, "b h d t"]) -> Float[Array, "b h d t"]:
        b, heads, size, t = x.shape
        ones = jnp.repeat(jnp.eye(heads, dtype=x.dtype), size, axis=0)

        def mean(x: jax.Array) -> Float[Array, "b h 1 t"]:
            flat = x.reshape(b, heads * size, t)
            total = jnp.einsum("bct,ch->bht", flat, ones, preferred_element_type=jnp.float32)
            return total[:, :, None] / size

        # The square of a bfloat16 number is the sum of two such numbers. So the difference of the
        # means of squares is as exact as float32, and nothing is written between sums and result.
        square = jnp.square(x.astype(jnp.float32))
        most = jax.lax.stop_gradient(square.astype(x.dtype))
        rest = (square - most.astype(jnp.float32)).astype(x.dtype)
        center = mean(x)
        variance = jnp.maximum(mean(most) + mean(rest) - jnp.square(center), 0)
        y = (x.astype(jnp.float32) - center) * jax.lax.rsqrt(variance + self.eps)
        scale, bias = (
            p[...].astype(jnp.float32).reshape(1, 1, size, 1) for p in (self.scale, self.bias)
        )
        return (y * scale + bias).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis (Mistral's and T5's)."""

    def __init__(self, features: int, *, eps: float, config: NetworkConfig, rngs: nnx.Rngs):
        del rngs
        self.eps = eps
        dtype = jnp.dtype(config.param_dtype)
        self.scale = nnx.Param(jnp.ones((features,), dtype), **axes("norm"))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        y = x.astype(jnp.float32)  # float32 island
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        return (y * along_last_axis(self.scale[...].astype(jnp.float32), y)).astype(x.dtype)


class GroupStatistics(NamedTuple):
    """Each channel's mean, and the inverse of its deviation, over its group and all frames."""

    center: Float[Array, "b 1 1 1 c"]
    inverse: Float[Array, "b 1 1 1 c"]


class GroupNorm(nnx.Module):
    """Group norm over channels and all given frames (the VAE's)."""

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
        # are grouped last, so that no array has a minor axis of few channels.
        mean = x.mean(3).mean((1, 2))
        b, c = mean.shape
        mean = mean_over_parts(mean.reshape(b, self.groups, c // self.groups).mean(-1))
        return jnp.repeat(mean, c // self.groups, axis=-1)[:, None, None, None]

    def __call__(
        self, x: Float[Array, "b t h w c"], latents: Array | None = None
    ) -> Float[Array, "b t h w c"]:
        """Normalizes; `latents` is there for the sake of `vae.SpatialNorm` and ignored."""
        return self.normalize(x).astype(x.dtype)

    def statistics(self, x: Float[Array, "b t h w c"]) -> GroupStatistics:
        """Returns what normalizes the frames, or some of them; float32."""
        y = x.astype(jnp.float32)  # float32 island
        center = self._group_mean(y)
        if platform() == "tpu" and x.dtype == jnp.bfloat16:
            # Both sums in one pass over the frames, as in `LayerNorm`.
            variance = jnp.maximum(self._group_mean(jnp.square(y)) - jnp.square(center), 0)
        else:
            variance = self._group_mean(jnp.square(y - center))
        return GroupStatistics(center, jax.lax.rsqrt(variance + _GROUP_EPS))

    def normalize(
        self, x: Float[Array, "b t h w c"], statistics: GroupStatistics | None = None
    ) -> Float[Array, "b t h w c"]:
        """Normalizes frames by these statistics, or by their own; returns float32."""
        center, inverse = statistics or self.statistics(x)
        scale, bias = (
            p[...].astype(jnp.float32).reshape(1, 1, 1, 1, -1) for p in (self.scale, self.bias)
        )
        return (x.astype(jnp.float32) - center) * (inverse * scale) + bias
