"""The decoder's memory: first frames of past clips, between the context and the clip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_config

from animegamer_jax.configs import DiTConfig
from animegamer_jax.models.dit import DiT, memory_rows, memory_table, position_table

PLAIN = dataclasses.replace(tiny_config(0).dit, spatial_interpolation=1.875, lora=None)


def test_remembered_frames_come_before_the_first():
    """The newest comes last, as frame -1; rows and columns are those of the clip's frames."""
    config = dataclasses.replace(PLAIN, latent_height=8, latent_width=12)
    found = memory_table(dataclasses.replace(config, memory=2)).reshape(2, 24, -1)
    in_time = config.hidden_size // 4
    clip = position_table(config)[config.num_context_tokens :][:24]
    np.testing.assert_array_equal(found[:, :, in_time:], np.stack([clip[:, in_time:]] * 2))
    frequencies = 10_000.0 ** -(np.arange(in_time // 2) / (in_time / 2))
    for shot, frame in enumerate((-2, -1)):
        angles = frame * frequencies
        expected = np.concatenate([np.sin(angles), np.cos(angles)])
        np.testing.assert_allclose(found[shot, :, :in_time], [expected] * 24, atol=1e-6)
    with pytest.raises(ValueError, match="a decoder without memory"):
        memory_table(config)
    with pytest.raises(ValueError, match="a patch has 2 of them"):
        memory_table(dataclasses.replace(config, memory=2, patch_frames=2))


def test_unconditional_rows_have_no_memory():
    memory = 1.0 + jnp.arange(2 * 3.0).reshape(2, 3, 1, 1, 1)
    assert memory_rows(None, 2) is None
    np.testing.assert_array_equal(memory_rows(memory, 1), memory)
    np.testing.assert_array_equal(
        memory_rows(memory, 2), np.concatenate([np.zeros_like(memory), memory])
    )
    # Guidance of motion gives it to both rows; a row may also be unconditional by itself.
    both = memory_rows(memory, 2, num_given=2)
    np.testing.assert_array_equal(both, np.concatenate([memory, memory]))
    np.testing.assert_array_equal(memory_rows(memory, 1, num_given=0), np.zeros_like(memory))


def make_inputs(c: DiTConfig, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns random latents, contexts and memories."""
    keys = jax.random.split(jax.random.key(1), 3)
    assert c.memory_shape is not None
    frame = c.first_shape
    assert frame is not None
    return (
        jax.random.normal(keys[0], (rows, c.latent_frames, *frame)),
        jax.random.normal(keys[1], (rows, c.num_context_tokens, c.hidden_size)),
        jax.random.normal(keys[2], (rows, *c.memory_shape)),
    )


def test_the_decoder_looks_at_its_memory():
    """A clip depends on every remembered frame, and not on where the memory is left out."""
    config = dataclasses.replace(PLAIN, memory=2)
    dit = DiT(config, rngs=nnx.Rngs(0))
    x, context, memory = make_inputs(config, 2)
    options = {"timestep": jnp.array([10.0, 500.0]), "motion": jnp.array([1.0, 20.0])}

    @jax.jit
    def run(dit, memory):
        return dit(x, context=context, memory=memory, **options)

    full = run(dit, memory)
    assert full.shape == x.shape
    for shot in range(2):
        other = run(dit, memory.at[:, shot].set(0.0))
        assert float(jnp.abs(full - other).max()) > 1e-3
    swapped = run(dit, memory[:, ::-1])
    assert float(jnp.abs(full - swapped).max()) > 1e-3
    plain, state = DiT(PLAIN, rngs=nnx.Rngs(0)), nnx.state(dit)
    nnx.update(plain, {k: v for k, v in state.items() if k != "memory_positions"})
    np.testing.assert_allclose(run(dit, None), run(plain, None), atol=1e-6)


def test_skipped_steps_remember_too():
    """The residual has a place for the memory's patches, and gives the same prediction again."""
    config = dataclasses.replace(PLAIN, memory=1)
    dit = DiT(config, rngs=nnx.Rngs(0))
    x, context, memory = make_inputs(config, 1)
    given = {"context": context, "memory": memory}

    @jax.jit
    def run(dit):
        timestep = jnp.array([300.0])
        modulation = dit.modulation(timestep, jnp.array([3.0]))
        options = {"timestep": timestep, "modulation": modulation, **given}
        v, residual = dit.with_residual(x, **options)
        again = dit.from_residual(x, residual=residual, **options)
        return dit(x, motion=jnp.array([3.0]), **options), v, again, residual

    called, v, again, residual = run(dit)
    np.testing.assert_allclose(v, called, atol=1e-5)
    np.testing.assert_allclose(again, called, atol=1e-4)
    assert residual.shape == dit.no_residual(1, has_memory=True).shape
