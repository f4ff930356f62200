"""The CPU's convolution: its own gradients are those of differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from animegamer_jax.models import convolution
from animegamer_jax.models.convolution import conv3d_direct, conv3d_planes, kernel_gradient
from animegamer_jax.sharding import make_mesh


def _inputs(planes: int, i: int, o: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = (2, 2 + planes, 5, 7, i), (planes, 3, 3, i, o), (2, 3, 5, 7, o)
    random = np.random.default_rng(i * 100 + o)
    x, kernel, dy = (jnp.asarray(random.normal(size=s).astype(np.float32)) for s in shapes)
    return x, kernel, dy


def _close(found: jax.Array, expected: jax.Array, tolerance: float) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    scale = np.sqrt(np.square(expected).mean())
    np.testing.assert_allclose(found / scale, expected / scale, atol=tolerance)


@pytest.mark.parametrize(
    ("planes", "i", "o"), [(3, 8, 8), (3, 3, 6), (3, 6, 3), (1, 8, 8), (3, 20, 4), (3, 4, 20)]
)
def test_kernel_gradient_is_that_of_differentiation(planes: int, i: int, o: int):
    x, kernel, dy = _inputs(planes, i, o)

    def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1, 1),
            ((0, 0), (1, 1), (1, 1)),
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )

    expected = jax.jit(lambda x, k, dy: jax.vjp(plain, x, k)[1](dy))(x, kernel, dy)
    found = jax.jit(lambda x, k, dy: jax.vjp(conv3d_planes, x, k)[1](dy))(x, kernel, dy)
    for a, b in zip(found, expected, strict=True):
        _close(a, b, 1e-5)


def test_many_channels_are_left_to_differentiation(monkeypatch: pytest.MonkeyPatch):
    """Above the limit the other path is taken, and gives the same."""
    x, kernel, dy = _inputs(3, 8, 8)
    few = jax.jit(lambda *a: jax.vjp(conv3d_planes, *a)[1](dy))(x, kernel)
    monkeypatch.setattr(convolution, "_FEW_CHANNELS", 4)
    monkeypatch.setattr(convolution, "kernel_gradient", None)
    many = jax.jit(lambda *a: jax.vjp(conv3d_planes, *a)[1](dy))(x, kernel)
    for a, b in zip(few, many, strict=True):
        _close(a, b, 1e-5)


def test_sums_of_bfloat16_are_float32():
    x, _, dy = _inputs(3, 8, 8)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    gradient = jax.jit(kernel_gradient)
    found = gradient(x, dy)
    assert found.dtype == jnp.float32
    _close(found, gradient(x.astype(jnp.float32), dy.astype(jnp.float32)), 1e-5)
    kernel = jnp.zeros((3, 3, 3, 8, 8), jnp.bfloat16)
    both = jax.eval_shape(lambda *a: jax.vjp(conv3d_planes, *a)[1](dy), x, kernel)
    assert both[1].dtype == jnp.bfloat16


def test_a_split_batch_gives_the_same_gradient():
    x, _, dy = _inputs(3, 4, 4)
    x, dy = (jnp.asarray(np.concatenate([a, a, a, a])) for a in (x, dy))
    expected = jax.jit(kernel_gradient)(x, dy)
    split = NamedSharding(make_mesh(), PartitionSpec("data"))
    found = jax.jit(kernel_gradient)(jax.device_put(x, split), jax.device_put(dy, split))
    _close(found, expected, 1e-5)
    kernel = jnp.ones((3, 3, 3, 4, 4))
    _close(conv3d_planes(x, kernel), conv3d_direct(x, kernel), 1e-5)
