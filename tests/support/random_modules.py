"""Random numbers for modules and their inputs, modules of given numbers, and comparisons."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from animegamer_jax.bundle.bundle import NetworkName, abstract_network, flat_params
from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.evaluate.metrics.lpips import LPIPS

FLOAT = NetworkConfig()
LORA = LoRAConfig(rank=2, alpha=3.0)
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


class RandomLPIPS(LPIPS):
    """Weights as a network begins with, so that no package is needed: noise grows all the same.

    It sees pictures twice as large: without its optimizations XLA takes 30 times as long for small
    ones.
    """

    def __init__(self):
        super().__init__()
        key = jax.random.key(0)
        for number, convolution in enumerate(self.backbone.convolutions):
            shape = convolution.kernel.shape
            draw = jax.random.normal(jax.random.fold_in(key, number), shape)
            convolution.kernel.set_value(draw * (2 / np.prod(shape[:3])) ** 0.5)
        for weights in self.linear.weights:
            weights.set_value(weights[...] + 1)

    def __call__(self, a, b):
        return super().__call__(*(x.repeat(2, axis=1).repeat(2, axis=2) for x in (a, b)))


def randomized(make, seed: int = 1):
    """Makes a module without initialization: its shapes, filled with random numbers."""
    module = nnx.eval_shape(make)
    state = nnx.state(module, nnx.Param)
    random = np.random.default_rng(seed)
    for variable in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable.set_value(jnp.asarray(random.normal(size=variable.shape), variable.dtype))
    nnx.update(module, state)
    return module


def initialized(make, seed: int = 0):
    """Makes a module with numbers as large as its first ones, drawn by numpy.

    Each initializer would be compiled for each shape.
    """
    module = nnx.eval_shape(make)
    state, random = nnx.state(module, nnx.Param), np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(state):
        shape, name = variable.shape, path[-1]
        value = np.full(shape, float(name == "scale"))
        if name not in ("scale", "bias", "lora_b"):
            value = random.normal(size=shape) * np.prod(shape[-2:-1]) ** -0.5
        variable.set_value(jnp.asarray(value.astype(variable.dtype)))
    nnx.update(module, state)
    return module


def assert_leaves_close(found, expected):
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = float(np.abs(plain).max())  # of a bias of keys: nothing but rounding
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=2e-4 * largest + 1e-8)


def build(name: NetworkName, config: NetworkConfig, leaves: Iterable[tuple[str, np.ndarray]]):
    """Makes a network that holds the given parameters, without compiling anything."""
    module = abstract_network(name, config)
    state = nnx.state(module, nnx.Param)
    variables = flat_params(state)
    for path, value in leaves:
        variable = variables.pop(path)
        assert variable.shape == value.shape, path
        variable.set_value(jnp.asarray(value, variable.dtype))
    assert not variables
    nnx.update(module, state)
    return module
