"""Stacks of layers: the scan, recomputation, and what is sliced for a TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_modules import FLOAT, LORA, assert_leaves_close, normal, randomized

from animegamer_jax.configs import LoRAConfig
from animegamer_jax.models import layer_stack, linear
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Linear, QKVLinear


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


def test_few_layers_with_many_tokens_are_unrolled_on_a_cpu(stack):
    """From 1,024 tokens on; the results are those of the scan."""
    gain = jnp.asarray(0.5)
    few, many = jnp.asarray(normal(2, 511, 6)), jnp.asarray(normal(2, 512, 6))
    loops = [str(jax.make_jaxpr(lambda x: stack(x, gain)[0])(x)) for x in (few, many)]
    assert ["unroll=1" in loop for loop in loops] == [True, False]
    assert ["unroll=3" in loop or "scan" not in loop for loop in loops] == [False, True]
    found = jax.jit(lambda x: stack(x, gain)[0])(many)
    expected = jax.jit(lambda x: stack(x, gain)[0])(many[:, :511])
    np.testing.assert_allclose(found[:, :511], expected, atol=1e-6)


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


def test_the_layers_of_a_stack_are_initialized_separately():
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


def test_layers_sliced_part_by_part_on_a_tpu(monkeypatch):
    """Few tokens on a TPU; gradients too, though nothing trains this way at full size."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.qkv = QKVLinear(16, config=FLOAT, lora=LoRAConfig(rank=2, alpha=2.0), rngs=rngs)

        def __call__(self, x):
            q, k, v = (project(x) for project in self.qkv.maps())
            return x + jnp.tanh(q) * k - v

    stack = LayerStack(Block, 3, config=dataclasses.replace(FLOAT, remat="full"), rngs=nnx.Rngs(0))
    assert stack.blocks.qkv.lora_b is not None
    stack.blocks.qkv.lora_b.set_value(
        jnp.ones((3, 3, 2, 16)) * jnp.arange(3.0)[:, None, None, None]
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))

    def run(stack, x):
        return jax.value_and_grad(lambda *a: jnp.square(a[0](a[1])[0]).sum(), (0, 1))(stack, x)

    expected = jax.jit(lambda *a: run(*a))(stack, x)
    monkeypatch.setattr(layer_stack, "platform", lambda: "tpu")
    one = jax.tree.map(lambda leaf: leaf[0], stack.blocks)
    cut = layer_stack._slice_parts(one, stack.blocks, jnp.int32(2))
    np.testing.assert_array_equal(cut.qkv.kernel[...], stack.blocks.qkv.kernel[2])
    assert_leaves_close(jax.jit(lambda *a: run(*a))(stack, x), expected)
    monkeypatch.setattr(linear, "_MANY_TOKENS", 10)
    assert_leaves_close(jax.jit(lambda *a: run(*a))(stack, x), expected)
