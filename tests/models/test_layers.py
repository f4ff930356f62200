"""Linear maps with low-rank updates, norms, and stacks of layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.models.linear import (
    Dropout,
    LayerNorm,
    LayerStack,
    Linear,
    QKVLinear,
    RMSNorm,
    affine,
    count_params,
    hashed_bits,
)

FLOAT = NetworkConfig()
HALF = NetworkConfig(dtype="bfloat16", param_dtype="float32")
LORA = LoRAConfig(rank=2, alpha=3.0)
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def randomized(make, seed: int = 1):
    """A module without initialization: shapes, filled with random numbers."""
    module = nnx.eval_shape(make)
    state = nnx.state(module, nnx.Param)
    random = np.random.default_rng(seed)
    for variable in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable.set_value(jnp.asarray(random.normal(size=variable.shape), variable.dtype))
    nnx.update(module, state)
    return module


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
    for part, found in enumerate(fused(jnp.asarray(x))):
        update = value(fused.lora_a)[part] @ value(fused.lora_b)[part] * 1.5
        expected = x @ (value(fused.kernel)[part] + update) + value(fused.bias)[part]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_torchs(kind):
    ours = LayerNorm if kind == "layer" else RMSNorm
    norm = randomized(lambda: ours(8, eps=1e-3, config=FLOAT, rngs=nnx.Rngs(0)))
    x = normal(2, 3, 8) + 2
    weight, given = torch.from_numpy(np.array(norm.scale[...])), torch.from_numpy(x)
    if kind == "layer":
        bias = torch.from_numpy(np.array(norm.bias[...]))
        expected = torch.nn.functional.layer_norm(given, (8,), weight, bias, eps=1e-3)
    else:
        expected = torch.nn.functional.rms_norm(given, (8,), weight, eps=1e-3)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected.numpy(), atol=2e-6)
    # In bfloat16 the sums are float32's: the result is rounded once.
    half = jnp.asarray(x, jnp.bfloat16)
    found, exact = norm(half), norm(half.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), exact.astype(jnp.bfloat16))


def test_activations_have_the_configured_format():
    x = jnp.asarray(normal(2, 3, 6))
    linear = randomized(lambda: make_linear(config=HALF))
    assert linear.kernel[...].dtype == jnp.float32
    assert linear(x).dtype == jnp.bfloat16
    fused = randomized(lambda: QKVLinear(6, config=HALF, lora=LORA, rngs=nnx.Rngs(0)))
    assert {part.dtype for part in fused(x)} == {jnp.dtype(jnp.bfloat16)}


class Layer(nnx.Module):
    """`x + tanh(linear(x)) * gain`; with a memory, the sum of what it saw as well."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = Linear(6, 6, names=("embed", "mlp"), config=FLOAT, lora=LORA, rngs=rngs)

    def __call__(self, x: jax.Array, gain: jax.Array, memory: jax.Array | None = None):
        y = x + jnp.tanh(self.linear(x)) * gain
        return y if memory is None else (y, memory + y.sum())


def make_stack(remat: str = "none") -> LayerStack:
    config = dataclasses.replace(FLOAT, remat=remat)
    return LayerStack(lambda rngs: Layer(rngs), 3, config=config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def stack() -> LayerStack:
    return randomized(make_stack)


def test_the_scanned_stack_is_the_loop(stack):
    x, gain, memory = jnp.asarray(normal(2, 6)), jnp.asarray(0.5), jnp.arange(3.0)
    scanned, none = stack(x, gain)
    assert none is None
    with_memory, memories = stack(x, gain, per_layer=memory)
    graphdef, state = nnx.split(stack.blocks)
    expected = x
    for layer in range(3):
        block = nnx.merge(graphdef, jax.tree.map(lambda p, layer=layer: p[layer], state))
        expected = block(expected, gain)
        np.testing.assert_allclose(memories[layer], layer + expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(scanned, expected, atol=1e-6)
    np.testing.assert_allclose(with_memory, expected, atol=1e-6)


def test_recomputing_changes_no_gradient(stack):
    x, gain = jnp.asarray(normal(2, 6)), jnp.asarray(0.5)
    state = nnx.state(stack, nnx.Param)
    gradients = {}
    for remat in ("none", "full", "dots"):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda remat=remat: make_stack(remat)))

        def loss(state, graphdef=graphdef):
            return jnp.square(nnx.merge(graphdef, state)(x, gain)[0]).sum()

        gradients[remat] = jax.tree.leaves(jax.jit(jax.grad(loss))(state))
        saved = str(jax.make_jaxpr(jax.grad(loss))(state))
        assert ("checkpoint" in saved or "remat" in saved) == (remat != "none")
    for expected, *others in zip(*gradients.values(), strict=True):
        assert np.abs(expected).max() > 0
        for found in others:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_layers_of_a_stack_are_made_apart():
    """Each layer has its own random numbers, and a leading axis called `layers`."""
    stack = jax.jit(make_stack)()
    kernel = np.asarray(stack.blocks.linear.kernel[...])
    assert kernel.shape == (3, 6, 6)
    assert np.abs(kernel[0] - kernel[1]).min() > 1e-4
    names = {
        name: getattr(stack.blocks.linear, name).get_metadata()["out_sharding"]
        for name in ("kernel", "bias", "lora_a", "lora_b")
    }
    assert names == {
        "kernel": ("layers", "embed", "mlp"),
        "bias": ("layers", "mlp"),
        "lora_a": ("layers", "embed", "lora_rank"),
        "lora_b": ("layers", "lora_rank", "mlp"),
    }


def test_count_params(stack):
    assert count_params(stack) == 3 * (6 * 6 + 6 + 2 * 6 * 2)
    assert count_params(nnx.eval_shape(make_linear)) == 6 * 8 + 8 + 2 * (6 + 8)


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
    signs = np.stack([((bits >> bit) & 1) * 2.0 - 1 for bit in (31, 24, 16, 8, 0)])
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
    found = jax.grad(loss)(kernel)
    assert found.dtype == jnp.bfloat16
    loss = lambda scale: affine(x.T, scale, None).astype(jnp.float32).sum()  # noqa: E731
    assert float(jax.grad(loss)(jnp.ones((1, 1), jnp.bfloat16))[0, 0]) == 4096
