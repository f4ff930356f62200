"""Convolutions of clips, channels last: a function for 3 x 3 x 3 kernels, and layers.

A causal convolution sees two earlier frames (`VAEConfig.kernel_frames` less one) and no later one.
The frames that it needs in the next chunk of a clip are an argument and a result.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from animegamer_jax.configs import VAEConfig
from animegamer_jax.models.linear import fusion_barrier
from animegamer_jax.sharding import axes, platform

_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1)
_zeros = nnx.initializers.zeros_init()

_FEW_CHANNELS = 32  # on a CPU, up to these, in or out: kernel gradients by matrix products
_STACKED_CHANNELS = 16  # on a CPU, up to these in: one convolution for all planes of a kernel

MeshAxis = str | tuple[str, ...] | None

_SPLIT: contextvars.ContextVar[tuple[MeshAxis, MeshAxis]] = contextvars.ContextVar(
    "split", default=(None, None)
)


@contextlib.contextmanager
def split_frames(rows: MeshAxis, columns: MeshAxis) -> Iterator[None]:
    """Splits frames along these mesh axes within the block, inside `shard_map`.

    Convolutions then get the rows and columns next to their part from the neighbors, and
    `mean_over_parts` averages over all parts.
    """
    token = _SPLIT.set((rows, columns))
    try:
        yield
    finally:
        _SPLIT.reset(token)


def mean_over_parts(mean: jax.Array) -> jax.Array:
    """Averages the means of the parts into which `split_frames` splits frames."""
    for axis in _SPLIT.get():
        if axis is not None:
            mean = jax.lax.pmean(mean, axis)
    return mean


def _with_neighbours(x: jax.Array, *, dim: int, axis: MeshAxis) -> jax.Array:
    """Adds a row or column on both sides: the neighbors', or zeros at the frame's border."""
    size = jax.lax.axis_size(axis)
    onward = [(i, i + 1) for i in range(size - 1)]
    last = jax.lax.slice_in_dim(x, x.shape[dim] - 1, x.shape[dim], axis=dim)
    first = jax.lax.slice_in_dim(x, 0, 1, axis=dim)
    before = jax.lax.ppermute(last, axis, onward)
    after = jax.lax.ppermute(first, axis, [(b, a) for a, b in onward])
    return jnp.concatenate([before, x, after], axis=dim)


def _exchange_borders(x: jax.Array, *, rows: int) -> tuple[jax.Array, list[tuple[int, int]]]:
    """Returns a part with its neighbors' borders, and the padding that a convolution still needs.

    `rows` is the dimension of rows; columns are the next.
    """
    padding = []
    for dim, axis in zip((rows, rows + 1), _SPLIT.get(), strict=True):
        if axis is None:
            padding.append((1, 1))
        else:
            x = _with_neighbours(x, dim=dim, axis=axis)
            padding.append((0, 0))
    return x, padding


def _conv2d(
    x: Float[Array, "n h w i"],
    kernel: Float[Array, "kh kw i o"],
    *,
    stride: int = 1,
    padding: tuple[int, int] | None = None,
) -> Float[Array, "n y x o"]:
    """Convolves frames zero-padded by one on all sides, or by `padding` if they are not split."""
    if padding is None:
        x, pads = _exchange_borders(x, rows=1)
    elif _SPLIT.get() != (None, None):
        raise ValueError("split frames cannot be padded on one side: decode them unsplit")
    else:
        pads = [padding, padding]
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv3d_direct(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "k 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """Convolves by one 3D convolution; pads rows and columns with zeros, not time.

    So t = s - k + 1.
    """
    x, pads = _exchange_borders(x, rows=2)
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1, 1), ((0, 0), *pads), dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )


def sum_of_planes(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "k 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """Sums 2D convolutions of the kernel's planes in time (t = s - k + 1)."""
    b, s, *plane = x.shape
    t = s - kernel.shape[0] + 1
    starts = range(kernel.shape[0])
    taps = [_conv2d(x[:, k : k + t].reshape(b * t, *plane), kernel[k]) for k in starts]
    return functools.reduce(jnp.add, taps).reshape(b, t, *taps[0].shape[1:])


def stacked_planes(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "k 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """Returns the same by one 2D convolution of `k` frames' concatenated channels."""
    b, s, *plane = x.shape
    k = kernel.shape[0]
    t = s - k + 1
    x = jnp.concatenate([x[:, start : start + t] for start in range(k)], axis=-1)
    kernel = jnp.moveaxis(kernel, 0, 2).reshape(*kernel.shape[1:3], -1, kernel.shape[-1])
    y = _conv2d(x.reshape(b * t, *plane[:2], -1), kernel)
    return y.reshape(b, t, *y.shape[1:])


def _planes(x: jax.Array, kernel: jax.Array) -> jax.Array:
    few = kernel.shape[0] > 1 and x.shape[-1] <= _STACKED_CHANNELS
    return (stacked_planes if few else sum_of_planes)(x, kernel)


def _input_gradient(
    dy: Float[Array, "b t h w o"], kernel: Float[Array, "k 3 3 i o"], x: jax.Array
) -> Float[Array, "b s h w i"]:
    k = kernel.shape[0]
    if k == 1 or dy.shape[-1] > _STACKED_CHANNELS:
        return jax.vjp(lambda x: sum_of_planes(x, kernel), x)[1](dy)[0]
    dy = jnp.pad(dy, ((0, 0), (k - 1, k - 1), (0, 0), (0, 0), (0, 0)))
    return stacked_planes(dy, jnp.swapaxes(kernel[::-1, ::-1, ::-1], 3, 4))


def _correlate(
    window: Float[Array, "b s h w i"], shifted: Float[Array, "b t h w o"]
) -> Float[Array, "k 3 3 i o"]:
    """Sums window[:, k:k + t] x shifted, moved by r - 1 rows and c - 1 columns, at each [k, r, c].

    One frame at a time, so that its nine copies stay in the processor's cache; sums in float32.
    """
    b, s, h, w, i = window.shape
    t, o = shifted.shape[1], shifted.shape[-1]
    k = s - t + 1
    frames = jnp.pad(shifted, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    frames = frames.reshape(b * t, h + 2, w + 2, o)
    window = window.reshape(b * s, h, w, i)
    starts = np.add.outer(s * np.arange(b), np.arange(t)).astype(np.uint32).ravel()

    def add_frame(total: jax.Array, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        frame, start = place
        near = jax.lax.dynamic_slice_in_dim(window, start, k)
        moved = [frame[r : r + h, c : c + w] for r in (2, 1, 0) for c in (2, 1, 0)]
        products = jax.lax.dot_general(
            jnp.concatenate(list(near), axis=-1).reshape(h * w, k * i),
            jnp.concatenate(moved, axis=-1).reshape(h * w, 9 * o),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return total + products, None

    total, _ = jax.lax.scan(add_frame, jnp.zeros((k * i, 9 * o)), (frames, jnp.asarray(starts)))
    return jnp.moveaxis(total.reshape(k, i, 3, 3, o), 1, 3)


def kernel_gradient(
    x: Float[Array, "b s h w i"], dy: Float[Array, "b t h w o"]
) -> Float[Array, "k 3 3 i o"]:
    """Returns the gradient of a `k` x 3 x 3 convolution's kernel (k = s - t + 1), float32.

    Computed by matrix products: on a CPU, for few channels, three times as fast as the convolution
    that autodiff makes (docs/decisions/conv3d.md).
    """
    if x.shape[-1] >= dy.shape[-1]:
        return _correlate(x, dy)
    # The nine copies are made of the narrower array, which reverses all offsets.
    after = x.shape[1] - dy.shape[1]
    dy = jnp.pad(dy, ((0, 0), (after, after), (0, 0), (0, 0), (0, 0)))
    return jnp.swapaxes(_correlate(dy, x)[::-1, ::-1, ::-1], 3, 4)


@jax.custom_vjp
def conv3d_planes(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "k 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """Convolves by 2D convolutions, with the fastest form and gradients on a CPU (t = s - k + 1).

    `stacked_planes` for few channels, otherwise `sum_of_planes`; the numbers of `conv3d_direct`.
    """
    return _planes(x, kernel)


def _planes_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return _planes(x, kernel), (x, kernel)


def _planes_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    if min(kernel.shape[-2:]) > _FEW_CHANNELS:
        return jax.vjp(sum_of_planes, x, kernel)[1](dy)
    dx = _input_gradient(dy, kernel, x)
    return dx, kernel_gradient(x, dy).astype(kernel.dtype)


conv3d_planes.defvjp(_planes_forward, _planes_backward)


def conv3d(
    x: Float[Array, "b s h w i"], kernel: Float[Array, "k 3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """Convolves in the platform's fastest form (docs/decisions/conv3d.md).

    Rows and columns are padded with zeros, time is not: t = s - k + 1.
    """
    return (conv3d_planes if platform() == "cpu" else conv3d_direct)(x, kernel)


def conv_frames(
    x: Float[Array, "b t h w i"], kernel: Float[Array, "3 3 i o"]
) -> Float[Array, "b t h w o"]:
    """Convolves each zero-padded frame by itself, in the platform's fastest form."""
    if platform() == "cpu":
        return conv3d_planes(x, kernel[None])
    b, t, *plane = x.shape
    return _conv2d(x.reshape(b * t, *plane), kernel).reshape(b, t, *plane[:2], -1)


class _Conv(nnx.Module):
    """Kernel [*extent, in, out] and bias; `out_axis` is the logical name of `out`."""

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
    """k x 3 x 3, after the `k` - 1 frames of the cache, or as many first frames without one."""

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
            extent=(config.kernel_frames, 3, 3),
            config=config,
            rngs=rngs,
            out_axis=out_axis,
        )
        self.num_past = config.kernel_frames - 1

    def __call__(
        self, x: Float[Array, "b t h w i"], cache: Float[Array, "b p h w i"] | None = None
    ) -> tuple[Float[Array, "b t h w o"], Float[Array, "b p h w i"]]:
        kernel, bias = self.weights()
        x, past = x.astype(self.dtype), self.num_past
        if cache is None and x.shape[1] == 1:  # a picture: all planes see one frame
            plane = kernel.sum(0, dtype=jnp.float32).astype(self.dtype)
            return conv_frames(x, plane) + bias, jnp.repeat(x, past, axis=1)
        before = jnp.repeat(x[:, :1], past, axis=1) if cache is None else cache
        x = jnp.concatenate([before, x], axis=1)
        # XLA would take the last frames at a program's end, and keep all frames until then.
        x, last = fusion_barrier((x, x[:, x.shape[1] - past :]))
        return conv3d(x, kernel) + bias, last


class FrameConv(_Conv):
    """3 x 3 on each frame by itself; a `stride` of 2 halves rows and columns."""

    def __init__(self, channels: int, *, stride: int, config: VAEConfig, rngs: nnx.Rngs):
        super().__init__(channels, channels, extent=(3, 3), config=config, rngs=rngs)
        self.stride = stride

    def __call__(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t y x c"]:
        kernel, bias = self.weights()
        x = x.astype(self.dtype)
        if self.stride == 1:
            return conv_frames(x, kernel) + bias
        b, t, *plane = x.shape
        # Halving pads only below and on the right, as the published layers do.
        y = _conv2d(x.reshape(b * t, *plane), kernel, stride=self.stride, padding=(0, 1))
        return y.reshape(b, t, *y.shape[1:]) + bias


class PointConv(_Conv):
    """1 x 1 x 1: a linear map of each pixel's channels."""

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
