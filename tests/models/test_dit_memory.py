"""The decoder's memory: image tokens of past shots before the context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_config

from animegamer_jax.models.dit import (
    DiT,
    memory_table,
    position_table,
    recall,
    with_memory,
    without_memory,
)

PLAIN = dataclasses.replace(tiny_config(0).dit, spatial_interpolation=1.875, lora=None)


def test_remembered_shots_are_over_the_frames_before_the_first():
    """The newest comes last, over frame -1; their cells are those of a context grid."""
    config = dataclasses.replace(
        PLAIN, latent_height=8, latent_width=12, num_context_tokens=7, context_grid=(2, 3)
    )
    found = memory_table(dataclasses.replace(config, memory=(2, 2, 3))).reshape(2, 6, -1)
    in_time = config.hidden_size // 4
    grid = position_table(config)[1:7]
    np.testing.assert_array_equal(found[:, :, in_time:], np.stack([grid[:, in_time:]] * 2))
    frequencies = 10_000.0 ** -(np.arange(in_time // 2) / (in_time / 2))
    for shot, frame in enumerate((-2, -1)):
        angles = frame * frequencies
        expected = np.concatenate([np.sin(angles), np.cos(angles)])
        np.testing.assert_allclose(found[shot, :, :in_time], [expected] * 6, atol=1e-6)
    with pytest.raises(ValueError, match="a decoder without memory"):
        memory_table(config)


def test_what_is_recalled_are_the_image_tokens_of_turns_that_were():
    config = dataclasses.replace(PLAIN, memory=(3, 1, 2))
    shots = 1.0 + jnp.arange(2 * 4 * 5.0).reshape(2, 4, 5, 1)
    found = recall(config, shots, jnp.array([1, 4])).reshape(2, 3, 2)
    np.testing.assert_array_equal(found[0], [[0, 0], [0, 0], shots[0, 3, 3:, 0]])
    np.testing.assert_array_equal(found[1], shots[1, 1:, 3:, 0])
    few = recall(config, shots[:, :1], jnp.array([0, 1])).reshape(2, 3, 2)
    np.testing.assert_array_equal(few[0], np.zeros((3, 2)))
    np.testing.assert_array_equal(few[1], [[0, 0], [0, 0], shots[1, 0, 3:, 0]])
    assert recall(PLAIN, shots, jnp.array([1, 4])) is None


def test_the_decoder_looks_at_its_memory():
    """A clip depends on it, and not on where the memory's place is left out."""
    config = dataclasses.replace(PLAIN, memory=(2, 1, 3))
    dit = DiT(config, rngs=nnx.Rngs(0))
    c, keys = dit.config, jax.random.split(jax.random.key(1), 3)
    shape = (2, c.latent_frames, c.latent_height, c.latent_width, c.latent_channels)
    x = jax.random.normal(keys[0], shape)
    context = jax.random.normal(keys[1], (2, c.num_context_tokens, c.hidden_size))
    memory = jax.random.normal(keys[2], (2, 6, c.hidden_size))
    options = {"timestep": jnp.array([10.0, 500.0]), "motion": jnp.array([1.0, 20.0])}

    @jax.jit
    def run(dit, context):
        return dit(x, context=context, **options)

    full = run(dit, with_memory(context, memory))
    absent = run(dit, without_memory(context, c.num_context_tokens + 6))
    assert full.shape == x.shape
    assert float(jnp.abs(full - absent).max()) > 1e-3
    plain, state = DiT(PLAIN, rngs=nnx.Rngs(0)), nnx.state(dit)
    nnx.update(plain, {k: v for k, v in state.items() if k != "memory_positions"})
    np.testing.assert_allclose(run(dit, context), run(plain, context), atol=1e-6)
