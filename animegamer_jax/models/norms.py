"""Norms over features; statistics in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax.configs import NetworkConfig
from animegamer_jax.models.linear import along_last_axis
from animegamer_jax.sharding import axes, platform


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
