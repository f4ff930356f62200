"""Linear maps with low-rank updates: their layouts, dropout and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_modules import FLOAT, LORA, normal, randomized

from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.models.linear import (
    Dropout,
    Linear,
    QKVLinear,
    affine,
    hashed_bits,
    quantize_weights,
)

HALF = NetworkConfig(dtype="bfloat16", param_dtype="float32")


def make_linear(*, config=FLOAT, lora: LoRAConfig | None = LORA, use_bias: bool = True) -> Linear:
    options = {"names": ("embed", "mlp"), "config": config, "lora": lora, "use_bias": use_bias}
    return Linear(6, 8, **options, rngs=nnx.Rngs(0))


def value(variable: nnx.Variable) -> np.ndarray:
    return np.asarray(variable[...], np.float64)


def test_linear():
    linear, x = randomized(make_linear), normal(2, 3, 6)
    kernel = value(linear.kernel) + value(linear.lora_a) @ value(linear.lora_b) * 1.5
    expected = x @ kernel + value(linear.bias)
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)
    plain = randomized(lambda: make_linear(lora=None, use_bias=False))
    assert plain.bias is None
    assert plain.lora_a is None
    np.testing.assert_allclose(plain(jnp.asarray(x)), x @ value(plain.kernel), rtol=1e-5, atol=1e-5)


def test_a_low_rank_update_starts_at_nothing():
    """A is random, B is zero: the first step of training changes B."""
    linear = jax.jit(make_linear)()
    assert not np.asarray(linear.lora_b[...]).any()
    assert np.asarray(linear.lora_a[...]).std() == pytest.approx(6**-0.5, rel=0.7)
    assert np.asarray(linear.kernel[...]).std() == pytest.approx(6**-0.5, rel=0.4)
    x = jnp.asarray(normal(3, 6))
    np.testing.assert_allclose(linear(x), x @ linear.kernel[...], atol=1e-6)
    assert {type(p) for p in (linear.lora_a, linear.lora_b)} == {nnx.LoRAParam}


def test_fused_projection_is_three_linear_layers():
    fused = randomized(lambda: QKVLinear(6, config=FLOAT, lora=LORA, rngs=nnx.Rngs(0)))
    x = normal(2, 3, 6)
    for part, project in enumerate(fused.maps()):
        update = value(fused.lora_a)[part] @ value(fused.lora_b)[part] * 1.5
        expected = x @ (value(fused.kernel)[part] + update) + value(fused.bias)[part]
        np.testing.assert_allclose(project(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)


def test_layouts_of_a_linear_map():
    """Tokens last out, heads in, tokens last in: all are the map itself."""
    linear, x = randomized(make_linear).map(), jnp.asarray(normal(2, 3, 6))
    expected = linear(x)
    heads = x.reshape(2, 3, 2, 3).swapaxes(1, 2)
    for found in (
        linear.tokens_last(x).swapaxes(1, 2),
        linear.from_heads(heads),
        linear.from_tokens_last(x.swapaxes(1, 2)),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_activations_have_the_configured_format():
    x = jnp.asarray(normal(2, 3, 6))
    linear = randomized(lambda: make_linear(config=HALF))
    assert linear.kernel[...].dtype == jnp.float32
    assert linear(x).dtype == jnp.bfloat16
    fused = randomized(lambda: QKVLinear(6, config=HALF, lora=LORA, rngs=nnx.Rngs(0)))
    assert {project(x).dtype for project in fused.maps()} == {jnp.dtype(jnp.bfloat16)}


# --- dropout and the gradient of a product --------------------------------------------------


def test_dropout_of_a_low_rank_update():
    """A fifth of the update's input is gone, the rest is larger: on average nothing changes."""
    linear, x = randomized(make_linear), jnp.asarray(normal(2, 6))
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: linear(x, Dropout(key, 0.2))))(keys)
    exact, plain = linear(x), x @ linear.kernel[...] + linear.bias[...][None]
    deviation = np.abs(exact - plain).max()
    np.testing.assert_allclose(drawn.mean(0), exact, atol=0.04 * deviation)
    assert drawn.std(0).min() > 0.02 * deviation
    # The frozen layer reads all of its input.
    frozen = randomized(lambda: make_linear(lora=None))
    found = frozen(x, Dropout(jax.random.key(1), 0.2))
    np.testing.assert_array_equal(found, frozen(x))


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_the_share_that_is_dropped(rate):
    x = jnp.ones((400, 300), jnp.bfloat16)
    found = np.asarray(Dropout(jax.random.key(1), rate)(x), np.float32)
    assert set(np.unique(found)) == {0, np.float32(jnp.asarray(1 / (1 - rate), jnp.bfloat16))}
    np.testing.assert_allclose((found == 0).mean(), rate, atol=0.006)


def test_what_is_dropped_is_like_chance():
    """No place knows of its neighbours, of another key's, or of its own bits (5 sigma)."""
    shape = (3, 96, 1024)
    keys = jax.random.split(jax.random.key(0), 4)
    bits = np.stack([np.asarray(jax.jit(hashed_bits, static_argnums=1)(k, shape)) for k in keys])
    ones = np.stack([(bits >> bit) & 1 for bit in (31, 24, 16, 8, 0)])
    signs = 2 * ones.astype(np.float32) - 1
    assert np.abs(signs.mean(axis=(2, 3, 4))).max() < 5 / np.sqrt(np.prod(shape))
    views = [signs]
    views += [np.roll(signs, 1, axis) for axis in range(5)]
    views += [np.roll(signs, lag, axis) for axis in (3, 4) for lag in (2, 8, 32)]
    views += [np.roll(signs, (1, 1), (1, 4)), np.roll(signs, (1, 1), (3, 4))]
    for view in views[1:]:
        together = (signs * view).mean(axis=(2, 3, 4))
        assert np.abs(together).max() < 5 / np.sqrt(np.prod(shape))
    assert len(np.unique(bits)) > 0.999 * bits.size


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(6, 4), (4, 6)])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_gradients_of_a_product(shape, widths, bias):
    """Both ways round: the narrower of input and gradient is the one that is transposed."""
    x, kernel = jnp.asarray(normal(*shape, widths[0])), jnp.asarray(normal(*widths))
    shift = jnp.asarray(normal(widths[1])) if bias else None

    def plain(x, kernel, shift):
        y = x @ kernel
        return y if shift is None else y + jnp.broadcast_to(shift, y.shape)

    def gradients(multiply):
        loss = lambda x, kernel, shift: jnp.sin(multiply(x, kernel, shift)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2) if bias else (0, 1)))(x, kernel, shift)

    for found, expected in zip(gradients(affine), gradients(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_sums_of_a_product_are_float32():
    """In bfloat16 a sum of 4,096 ones would stop at 256."""
    x, kernel = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 1), jnp.bfloat16)
    assert float(affine(x, kernel, None)[0, 0]) == 4096
    loss = lambda kernel: affine(kernel.T, x.T, None).astype(jnp.float32).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss))(kernel)
    assert found.dtype == jnp.bfloat16
    loss = lambda scale: affine(x.T, scale, None).astype(jnp.float32).sum()  # noqa: E731
    found = jax.jit(jax.grad(loss))(jnp.ones((1, 1), jnp.bfloat16))
    assert float(found[0, 0]) == 4096


def test_weights_of_eight_bits():
    """Each weight within half a step of its output; all layouts of the product agree."""
    linear = Linear(24, 10, names=("embed", "mlp"), config=FLOAT, rngs=nnx.Rngs(0))
    linear.bias.set_value(jnp.arange(10.0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 24))
    exact, kernel = linear(x), linear.kernel[...]
    quantize_weights(linear)
    steps = linear.steps[...]
    assert linear.kernel[...].dtype == jnp.int8
    assert jnp.abs(linear.kernel[...]).max() == 127
    rounded = linear.kernel[...] * steps[None]
    assert (jnp.abs(rounded - kernel) <= steps[None] / 2 * 1.001).all()
    found = linear(x)
    np.testing.assert_allclose(found, x @ rounded + linear.bias[...][None, None], atol=1e-5)
    assert 0 < jnp.abs(found - exact).max() < 0.05
    np.testing.assert_allclose(linear.map().tokens_last(x).swapaxes(1, 2), found, atol=1e-5)
    heads = x.reshape(2, 5, 4, 6).swapaxes(1, 2)
    np.testing.assert_allclose(linear.map().from_heads(heads), found, atol=1e-5)
    last = linear.map().from_tokens_last(x.swapaxes(1, 2))
    np.testing.assert_allclose(last, found, atol=1e-5)
