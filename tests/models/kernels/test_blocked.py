"""Attention's forms against one another, and each against a slow loop in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from animegamer_jax.models.kernels import blocked
from animegamer_jax.models.kernels.blocked import (
    blocked_attention,
    plain_attention,
    saving_attention,
)
from animegamer_jax.models.kernels.masks import TokenMask
from animegamer_jax.sharding import make_mesh

WEIGHTS = {"atol": 1e-5, "rtol": 1e-5}
IN_BLOCKS = functools.partial(blocked_attention, block_rows=16)
FORMS = pytest.mark.parametrize(
    "attention",
    [plain_attention, saving_attention, IN_BLOCKS],
    ids=["plain", "saving", "blocked"],
)


def _inputs(b=2, t=37, s=37, h=4, g=2, d=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (b, h, t, d), (b, g, s, d), (b, g, s, d)
    return [jax.random.normal(k, x, dtype) for k, x in zip(keys, shapes, strict=True)]


def _mask(b=2, t=37, s=37) -> TokenMask:
    """The last `t` of `s` tokens ask; padding in front, two blocks, a query that sees nothing."""
    rng = np.random.default_rng(0)
    valid = np.ones((b, s), bool)
    valid[0, :3] = False  # with causality: the first queries of game 0 see nothing if t == s
    valid[1:, rng.integers(0, s, 4)] = False
    positions = np.broadcast_to(np.arange(s), (b, s))
    key_blocks = np.zeros((b, s), int)
    key_blocks[:, s - 20 : s - 12], key_blocks[:, s - 8 : s - 2] = 1, 2
    arrays = positions[:, s - t :], positions, valid, key_blocks[:, s - t :], key_blocks
    return TokenMask(*(jnp.asarray(x) for x in arrays))


def _seen(mask: TokenMask, window: int | None) -> np.ndarray:
    """`TokenMask`'s docstring, a pair at a time."""
    query, key, valid, query_block, key_block = (np.asarray(x) for x in mask[:5])
    (b, t), s = query.shape, key.shape[1]
    seen = np.zeros((b, t, s), bool)
    for n, i, j in np.ndindex(b, t, s):
        back = query[n, i] - key[n, j]
        causal = back >= 0 and (window is None or back < window)
        block = query_block[n, i] == key_block[n, j] != 0
        seen[n, i, j] = valid[n, j] and (causal or block)
    if mask.query_segments is not None and mask.key_segments is not None:
        query_segment, key_segment = np.asarray(mask.query_segments), np.asarray(mask.key_segments)
        for n, i, j in np.ndindex(b, t, s):
            seen[n, i, j] &= key_segment[n, j] in (0, query_segment[n, i])
    return seen


def _truth(q, k, v, seen=None, bias=None) -> np.ndarray:
    """Attention in float64, one query of one head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for n, head, i in np.ndindex(q.shape[:3]):
        group = head * k.shape[1] // q.shape[1]
        scores = k[n, group] @ q[n, head, i] / np.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + np.asarray(bias)[head, i]
        if seen is not None:
            scores = np.where(seen[n, i], scores, -1e30)
        weights = np.exp(scores - scores.max())
        out[n, head, i] = weights / weights.sum() @ v[n, group]
    return out


@pytest.mark.parametrize("window", [None, 5])
def test_dense_mask(window):
    mask = _mask(t=21)
    np.testing.assert_array_equal(mask.dense(window), _seen(mask, window))


@FORMS
@pytest.mark.parametrize(("t", "window"), [(37, None), (21, 5), (1, None)])
def test_truth(attention, t, window):
    q, k, v = _inputs(t=t)
    mask = _mask(t=t)
    actual = jax.jit(functools.partial(attention, window=window))(q, k, v, mask=mask)
    np.testing.assert_allclose(actual, _truth(q, k, v, _seen(mask, window)), **WEIGHTS)


@FORMS
def test_segments_see_themselves_and_the_history(attention):
    segments = np.zeros((2, 37), np.int32)
    segments[:, 5:14], segments[:, 20:30] = 1, 2
    mask = _mask()._replace(
        query_segments=jnp.asarray(segments), key_segments=jnp.asarray(segments)
    )
    q, k, v = _inputs()
    seen = _seen(mask, None)
    assert (seen != _seen(_mask(), None)).any()
    np.testing.assert_array_equal(mask.dense(), seen)
    some = np.broadcast_to(seen.any(axis=-1)[:, None], q.shape[:3])
    found, expected = np.asarray(attention(q, k, v, mask=mask)), _truth(q, k, v, seen)
    np.testing.assert_allclose(found[some], expected[some], atol=1e-5)


def test_truth_with_a_bias():
    q, k, v = _inputs(t=9, s=11)
    bias = jax.random.normal(jax.random.key(1), (4, 9, 11))
    actual = jax.jit(plain_attention)(q, k, v, bias=bias)
    np.testing.assert_allclose(actual, _truth(q, k, v, bias=bias), **WEIGHTS)


def _value_and_grads(attention, mask, window):
    def loss(q, k, v):
        out = attention(q, k, v, mask=mask, window=window)
        return jnp.sum(jnp.sin(out) * out), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def _assert_is_plain(attention, *, t, g, masked, window):
    """Its output and the gradients of queries, keys and values."""
    inputs = _inputs(t=t, g=g)
    mask = _mask(t=t) if masked else None
    (_, plain), plain_grads = _value_and_grads(plain_attention, mask, window)(*inputs)
    (_, out), grads = _value_and_grads(attention, mask, window)(*inputs)
    np.testing.assert_allclose(out, plain, **WEIGHTS)
    for actual, expected in zip(grads, plain_grads, strict=True):
        np.testing.assert_allclose(actual, expected, **WEIGHTS)


@pytest.mark.parametrize(
    ("t", "g", "masked", "window", "heads_together"),
    [
        (37, 2, True, None, False),
        (37, 2, True, 5, True),
        (24, 4, True, 5, False),
        (37, 1, False, None, True),
        (32, 2, False, None, False),
    ],
)
def test_blocked_is_plain_forward_and_backward(monkeypatch, t, g, masked, window, heads_together):
    monkeypatch.setattr(blocked, "_SCORES_AT_ONCE_CPU", 1 << 20 if heads_together else 0)
    _assert_is_plain(IN_BLOCKS, t=t, g=g, masked=masked, window=window)


@pytest.mark.parametrize(
    ("t", "g", "masked", "window"), [(37, 2, True, None), (24, 4, True, 5), (37, 1, False, None)]
)
def test_saving_is_plain_forward_and_backward(t, g, masked, window):
    _assert_is_plain(saving_attention, t=t, g=g, masked=masked, window=window)


def test_blocked_inside_a_recomputed_scan():
    """As the layer stacks call it: under `checkpoint`, `scan` and `vmap`."""
    q, k, v = _inputs(h=2)
    mask = _mask()

    def loss(q, attention):
        @jax.checkpoint
        def layer(x, _):
            return x + attention(x, k, v, mask=mask), None

        return jax.lax.scan(layer, q, None, length=3)[0].sum()

    many = jnp.stack([q, 2 * q])
    grads = [
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, attention=attention))))(many)
        for attention in (plain_attention, IN_BLOCKS)
    ]
    np.testing.assert_allclose(grads[1], grads[0], **WEIGHTS)


@FORMS
def test_bfloat16_keeps_the_softmax_in_float32(attention):
    inputs = _inputs(t=64, s=64, dtype=jnp.bfloat16)
    truth = _truth(*(x.astype(jnp.float32) for x in inputs))
    (_, out), grads = _value_and_grads(attention, None, None)(*inputs)
    assert out.dtype == jnp.bfloat16
    assert all(grad.dtype == jnp.bfloat16 for grad in grads)
    # Errors of bfloat16's rounding of weights and values (2^-9), not of a sum in bfloat16.
    assert np.abs(np.asarray(out, np.float64) - truth).max() < 2**-7


def test_large_scores_stay_finite():
    q, k, v = _inputs()
    for attention in (plain_attention, saving_attention, IN_BLOCKS):
        (_, out), grads = _value_and_grads(attention, _mask(), 5)(1e4 * q, k, v)
        assert jnp.isfinite(out).all()
        assert all(jnp.isfinite(grad).all() for grad in grads)


def test_sharded_over_games_and_heads():
    inputs = _inputs(b=4, h=4, g=2)
    mask = _mask(b=4)
    run = jax.jit(lambda q, k, v, mask: IN_BLOCKS(q, k, v, mask=mask))
    alone = run(*inputs, mask)
    mesh = make_mesh({"data": 4, "tensor": 2})
    with jax.set_mesh(mesh):
        heads = jax.NamedSharding(mesh, jax.P("data", "tensor"))
        tokens = jax.NamedSharding(mesh, jax.P("data", None))
        sharded = run(*jax.device_put(inputs, heads), jax.device_put(mask, tokens))
    np.testing.assert_allclose(np.asarray(sharded), np.asarray(alone), **WEIGHTS)


@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_blocks(backward):
    """4,096 tokens, 2 heads: the plain score matrices take 134 MB, blocks of 256 rows 4 MB."""
    shape = jax.ShapeDtypeStruct((1, 2, 4096, 32), jnp.float32)

    def bytes_of(attention, **options):
        def run(q, k, v):
            return attention(q, k, v, **options).sum()

        function = jax.grad(run, argnums=(0, 1, 2)) if backward else run
        compiled = jax.jit(function).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 2 * 4096 * 4096 * 4
    if backward or jax.__version_info__ < (0, 12):  # later XLA fuses the plain form
        assert bytes_of(plain_attention) > scores
    assert bytes_of(blocked_attention, block_rows=256) < scores / 6


@FORMS
def test_bad_arguments(attention):
    q, k, v = _inputs(h=3, g=2)
    with pytest.raises(ValueError, match="3 query heads do not divide over 2"):
        attention(q, k, v)
