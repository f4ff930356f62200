"""Convolutions of clips, channels last: one function for 3 x 3 x 3, and the layers made of it.

A causal convolution sees two frames back and none ahead; what it must remember from one chunk of a
clip to the next is an argument and a result.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax.configs import VAEConfig
from animegamer_jax.sharding import axes, platform

_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1)
_zeros = nnx.initializers.zeros_init()


def _conv2d(
    x: Float[Array, "n h w i"],
    kernel: Float[Array, "kh kw i o"],
    *,
    stride: int = 1,
    padding: tuple[int, int] = (1, 1),
) -> Float[Array, "n y x o"]:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv3d_direct(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "3 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """One 3D convolution: rows and columns padded with zeros, time not (t = s - 2)."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1, 1),
        ((0, 0), (1, 1), (1, 1)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )


def conv3d_planes(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "3 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """The same numbers as the sum of a 2D convolution for each of the kernel's three planes."""
    b, s, *plane = x.shape
    t = s - 2
    taps = [_conv2d(x[:, k : k + t].reshape(b * t, *plane), kernel[k]) for k in range(3)]
    return (taps[0] + taps[1] + taps[2]).reshape(b, t, *taps[0].shape[1:])


def conv3d(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "3 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """3 x 3 x 3 convolution in the platform's fastest form (docs/decisions/conv3d.md).

    Rows and columns are padded with zeros; time is not: `t = s - 2`.
    """
    return (conv3d_planes if platform() == "cpu" else conv3d_direct)(x, kernel)


class _Conv(nnx.Module):
    """Kernel `[*extent, in, out]` and bias; `out_axis` is the logical name of `out`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        extent: tuple[int, ...],
        config: VAEConfig,
        rngs: nnx.Rngs,
        out_axis: str = "conv_out",
        kernel_init: Callable[..., jax.Array] = _kernel_init,
        bias_init: Callable[..., jax.Array] = _zeros,
    ):
        dtype = jnp.dtype(config.param_dtype)
        self.dtype = jnp.dtype(config.dtype)
        kernel = kernel_init(rngs.params(), (*extent, in_channels, out_channels), dtype)
        names = ("kernel",) * len(extent)
        self.kernel = nnx.Param(kernel, **axes(*names, "conv_in", out_axis))
        bias = bias_init(rngs.params(), (out_channels,), dtype)
        self.bias = nnx.Param(bias, **axes(out_axis))

    def weights(self) -> tuple[jax.Array, jax.Array]:
        kernel, bias = self.kernel[...], self.bias[...]
        return kernel.astype(self.dtype), bias.astype(self.dtype).reshape(1, 1, 1, 1, -1)


class CausalConv(_Conv):
    """3 x 3 x 3, padded in time with the two frames before: the cache, or the first frame twice."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        config: VAEConfig,
        rngs: nnx.Rngs,
        out_axis: str = "conv_out",
    ):
        super().__init__(
            in_channels,
            out_channels,
            extent=(3, 3, 3),
            config=config,
            rngs=rngs,
            out_axis=out_axis,
        )

    def __call__(
        self, x: Float[Array, "b t h w i"], cache: Float[Array, "b 2 h w i"] | None = None
    ) -> tuple[Float[Array, "b t h w o"], Float[Array, "b 2 h w i"]]:
        kernel, bias = self.weights()
        x = x.astype(self.dtype)
        past = jnp.repeat(x[:, :1], 2, axis=1) if cache is None else cache
        x = jnp.concatenate([past, x], axis=1)
        return conv3d(x, kernel) + bias, x[:, -2:]


class FrameConv(_Conv):
    """3 x 3 on each frame by itself; `stride` 2 halves rows and columns, 1 keeps them."""

    def __init__(self, channels: int, *, stride: int, config: VAEConfig, rngs: nnx.Rngs):
        super().__init__(channels, channels, extent=(3, 3), config=config, rngs=rngs)
        self.stride = stride

    def __call__(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t y x c"]:
        kernel, bias = self.weights()
        b, t, *plane = x.shape
        # Halving pads below and at the right only: the published layers' alignment.
        padding = (1, 1) if self.stride == 1 else (0, 1)
        frames = x.astype(self.dtype).reshape(b * t, *plane)
        y = _conv2d(frames, kernel, stride=self.stride, padding=padding)
        return y.reshape(b, t, *y.shape[1:]) + bias


class PointConv(_Conv):
    """1 x 1 x 1: a linear map of each position's channels."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        config: VAEConfig,
        rngs: nnx.Rngs,
        kernel_init: Callable[..., jax.Array] = _kernel_init,
        bias_init: Callable[..., jax.Array] = _zeros,
    ):
        super().__init__(
            in_channels,
            out_channels,
            extent=(1, 1, 1),
            config=config,
            rngs=rngs,
            kernel_init=kernel_init,
            bias_init=bias_init,
        )

    def __call__(self, x: Float[Array, "b t h w i"]) -> Float[Array, "b t h w o"]:
        kernel, bias = self.weights()
        y = jnp.einsum("bthwi,io->bthwo", x.astype(self.dtype), kernel[0, 0, 0])
        return y + bias
