"""Norms against PyTorch, and their forms on a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_modules import FLOAT, normal, randomized

from animegamer_jax.configs import VAEConfig
from animegamer_jax.models import norms
from animegamer_jax.models.norms import GroupNorm, LayerNorm, RMSNorm

torch = pytest.importorskip("torch")


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


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_norm_of_heads_on_a_tpu_is_as_exact_as_the_norm(monkeypatch, mean):
    """Far from zero too: rounded squares of what is not centered would lose the variance."""
    norm = LayerNorm(64, eps=1e-6, config=FLOAT, rngs=nnx.Rngs(0))
    x = (mean + jax.random.normal(jax.random.key(0), (2, 2, 50, 64))).astype(jnp.float16)
    exact = norm.normalize_heads(x.astype(jnp.float32))
    np.testing.assert_array_equal(exact, norm(x.astype(jnp.float32)))
    monkeypatch.setattr(norms, "platform", lambda: "tpu")
    found = jax.jit(norm.normalize_heads)(x).astype(jnp.float32)
    assert jnp.abs(found - exact).max() < 0.005


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_norm_on_a_tpu_is_as_exact_as_the_norm(monkeypatch, mean):
    """Both sums in one pass, of bfloat16: its own rounding is all that differs."""
    norm = LayerNorm(256, eps=1e-6, config=FLOAT, rngs=nnx.Rngs(0))
    x = (mean + jax.random.normal(jax.random.key(0), (2, 50, 256))).astype(jnp.bfloat16)

    def run(x):
        return jax.value_and_grad(lambda x: jnp.sin(norm(x).astype(jnp.float32)).sum())(x)

    _, exact = run(x.astype(jnp.float32))
    expected = norm(x.astype(jnp.float32))
    monkeypatch.setattr(norms, "platform", lambda: "tpu")
    assert jnp.abs(norm(x).astype(jnp.float32) - expected).max() < 0.02
    gradient = jax.jit(run)(x)[1].astype(jnp.float32)
    assert jnp.abs(gradient - exact).max() < 0.02 * jnp.abs(exact).max()


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_group_norm_on_a_tpu_is_as_exact_as_the_norm(monkeypatch, mean):
    """Sums and sums of squares of bfloat16 numbers in one pass, near zero and far from it."""
    config = VAEConfig(norm_groups=4, param_dtype="float32")
    norm = GroupNorm(8, config=config, rngs=nnx.Rngs(0))
    x = mean + jax.random.normal(jax.random.key(0), (2, 3, 16, 24, 8))
    x = x.astype(jnp.bfloat16)
    exact = norm.normalize(x.astype(jnp.float32))
    monkeypatch.setattr(norms, "platform", lambda: "tpu")
    np.testing.assert_allclose(norm.normalize(x), exact, atol=2e-3 if mean else 1e-5)
    np.testing.assert_array_equal(norm.normalize(x.astype(jnp.float32)), exact)
