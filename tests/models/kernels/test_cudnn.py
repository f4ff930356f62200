"""cuDNN's attention without a GPU: when it is chosen, what it calls, what its arguments mean."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from animegamer_jax import sharding
from animegamer_jax.configs import NetworkConfig
from animegamer_jax.models.kernels import attend, cudnn
from animegamer_jax.models.kernels.blocked import plain_attention
from animegamer_jax.models.kernels.cudnn import cudnn_attention, takes_cudnn
from animegamer_jax.models.kernels.masks import StaticMask, TokenMask, padding_mask
from animegamer_jax.models.linear import Linear
from animegamer_jax.sharding import make_mesh

T = 300


def inputs(dtype=jnp.bfloat16, *, t: int = T, d: int = 64) -> list[jax.Array]:
    """Queries of four heads, keys and values of two, for two games."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 4, t, d), (2, 2, t, d), (2, 2, t, d)
    return [jax.random.normal(k, x, dtype) for k, x in zip(keys, shapes, strict=True)]


def game_mask(t: int = T) -> TokenMask:
    """Causal with an open block; the first 40 tokens of the second game are padding."""
    order = jnp.broadcast_to(jnp.arange(t), (2, t))
    blocks = ((order >= 100) & (order < 150)).astype(jnp.int32)
    return TokenMask(order, order, order >= 40 * jnp.arange(2)[:, None], blocks, blocks)


MASKS = {
    "none": lambda: None,
    "padding": lambda: padding_mask(T, length=280),
    "static": lambda: StaticMask(100, 150),
    "game": game_mask,
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU of the Ampere generation, as far as the choice is concerned."""
    monkeypatch.setattr(cudnn, "cuda_capability", lambda: (8, 6))


@pytest.fixture
def lowered_for_cuda(monkeypatch):
    """JAX's own checks find cuDNN and such a GPU, so that programs can be lowered for it."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(
        fused_attention_stablehlo, "check_compute_capability", lambda least: float(least) <= 8.6
    )


def test_only_where_it_runs(on_a_gpu, monkeypatch):
    q, k, _ = inputs()
    assert takes_cudnn(q, k, None)
    assert takes_cudnn(q, k, game_mask())
    assert not takes_cudnn(*inputs(jnp.float32)[:2], None)
    assert not takes_cudnn(*inputs(t=200)[:2], None)
    assert not takes_cudnn(*inputs(d=12)[:2], None)
    assert not takes_cudnn(*inputs(d=136)[:2], None)
    odd = inputs(t=301)[:2]
    assert takes_cudnn(*odd, padding_mask(301, length=280))
    assert not takes_cudnn(*odd, game_mask(301))
    with jax.set_mesh(make_mesh({"data": 1}, devices=jax.devices()[:1])):
        assert takes_cudnn(q, k, None)
    with jax.set_mesh(make_mesh()):
        assert not takes_cudnn(q, k, None)
    for other in (None, (7, 5)):
        monkeypatch.setattr(cudnn, "cuda_capability", lambda other=other: other)
        assert not takes_cudnn(q, k, None)


@pytest.mark.parametrize(
    ("name", "expected"), [("8.9", (8, 9)), ("12.0", (12, 0)), ("gfx90a", None)]
)
def test_capability(name, expected, monkeypatch):
    assert sharding.cuda_capability() is None  # on this machine
    device = type("Device", (), {"compute_capability": name})
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    assert sharding.cuda_capability() == expected


@pytest.mark.parametrize("mask", MASKS)
def test_arguments_mean_what_plain_attention_means(mask, monkeypatch):
    """The same call by JAX's own implementation, in float32, forward and backward."""
    monkeypatch.setattr(cudnn, "_IMPLEMENTATION", "xla")
    arrays, found = inputs(jnp.float32), MASKS[mask]()
    tokens = found.expand(2, T) if isinstance(found, StaticMask) else found
    window = 120 if mask == "game" else None

    def total(attention, mask):
        def run(*arrays):
            out = attention(*arrays, mask=mask, window=window, scale=0.2)
            if tokens is not None:  # a query of padding may see anything
                out = jnp.where(tokens.key_valid[:, None, :, None], out, 0)
            return (out @ jnp.arange(64.0)).sum(), out

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(*arrays)

    ours, plain = total(cudnn_attention, found), total(plain_attention, tokens)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert jnp.abs(one - other).max() <= 2e-5 * jnp.abs(other).max()


@pytest.mark.parametrize("mask", MASKS)
def test_the_kernels_that_a_gpu_would_run(mask, on_a_gpu, lowered_for_cuda):
    """`attend` lowered for CUDA, forward and backward, with its output projection."""
    arrays, found, out = inputs(), MASKS[mask](), projection()

    def run(*arrays):
        return attend.attend(*arrays, out, mask=found).astype(jnp.float32).sum()

    name = "fmhaSoftmax" if mask in ("none", "padding") else "fmhaScaleBiasSoftmax"
    assert kernels_of(run, *arrays) == {name}
    assert kernels_of(jax.grad(run, argnums=(0, 1, 2)), *arrays) == {name, f"{name}Backward"}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("mask", MASKS)
def test_on_this_gpu(mask):
    """The kernel itself, for `scripts/bench/gpu.sh`: within bfloat16's 8 bits of the plain form."""
    arrays, found = inputs(), MASKS[mask]()
    tokens = found.expand(2, T) if isinstance(found, StaticMask) else found

    def run(attention, mask):
        def total(*arrays):
            out = attention(*arrays, mask=mask, scale=0.125).astype(jnp.float32)
            if tokens is not None:
                out = jnp.where(tokens.key_valid[:, None, :, None], out, 0)
            return jnp.square(out).sum(), out

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)

    assert takes_cudnn(*arrays[:2], found)
    for one, other in zip(
        *map(jax.tree.leaves, (run(cudnn_attention, found), run(plain_attention, tokens))),
        strict=True,
    ):
        one, other = (x.astype(jnp.float32) for x in (one, other))
        assert jnp.sqrt(jnp.square(one - other).mean()) < 0.02 * jnp.sqrt(jnp.square(other).mean())


def projection() -> Linear:
    config = NetworkConfig(dtype="bfloat16", param_dtype="bfloat16")
    return Linear(256, 32, names=("heads", "embed"), config=config, rngs=nnx.Rngs(0))


def kernels_of(function, *args) -> set[str]:
    """Names of cuDNN's kernels in a program for CUDA."""
    text = (
        jax.jit(lambda *args: function(*args))
        .trace(*args)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    return set(re.findall(r"__cudnn\$(\w+)", text))


def test_none_in_float32_or_elsewhere(on_a_gpu, lowered_for_cuda, monkeypatch):
    out = projection()

    def run(*arrays):
        return attend.attend(*arrays, out)

    assert kernels_of(run, *inputs()) == {"fmhaSoftmax"}
    assert kernels_of(run, *inputs(jnp.float32)) == set()
    monkeypatch.setattr(cudnn, "cuda_capability", lambda: None)
    assert kernels_of(run, *inputs()) == set()
