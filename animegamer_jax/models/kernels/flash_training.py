"""Attention for training on a TPU: forward and backward with tokens last, no mask but a length.

As in `flash.py`, scores are computed keys by queries. With tokens as columns, S = K^T Q, O = V P,
and backward dP = V^T dO, dV = dO P^T, dK = Q dS^T, dQ = K dS. The backward kernel takes a block of
queries at a time: it finishes their dQ, and adds to the head's float32 dK and dV, which stay in a
core's own memory with K and V. Heads are independent, so a chip's cores share them.

The algorithm is that of Dao et al., arXiv 2205.14135; the results of the forward pass that the
backward pass needs are the output and the logarithm (to base two) of the softmax's sums.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from animegamer_jax.models.kernels import flash
from animegamer_jax.models.kernels.splash import SAVED

_MAX_QUERIES = 1024  # in a block: four tiles of scores are alive at once
_LOG2_E = math.log2(math.e)


def trained_attention(
    q: Float[Array, "b h d t"],
    k: Float[Array, "b h d s"],
    v: Float[Array, "b h d s"],
    *,
    length: int | None = None,
    scale: float = 1.0,
    wide: bool = False,
    interpret: bool = False,
) -> Float[Array, "b h d t"]:
    """Returns softmax(q^T k * scale) v^T of one device's heads, tokens last, with gradients.

    The arguments are those of `flash.flash_attention`.
    """
    b, heads, d, tokens = q.shape
    length = k.shape[3] if length is None else length
    q = (q * (scale * _LOG2_E)).astype(q.dtype)
    parts = (flash.pad_to_lanes(x.reshape(b * heads, d, -1)) for x in (q, k, v))
    out: jax.Array = _attend(*parts, length, wide, interpret)  # pyright: ignore[reportAssignmentType]
    return out.reshape(b, heads, d, -1)[..., :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, length: int, wide: bool, interpret: bool
) -> jax.Array:
    return _forward(q, k, v, length, wide, interpret)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, length: int, wide: bool, interpret: bool
) -> Any:
    out, log_sums = flash.run_forward(
        q, k, v, length=length, wide=wide, interpret=interpret, returns_log_sums=True
    )
    out, log_sums = checkpoint_name(out, SAVED), checkpoint_name(log_sums, SAVED)
    return out, (q, k, v, out, log_sums)


def _backward(length: int, wide: bool, interpret: bool, saved: Any, dout: jax.Array) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    q, k, v, out, log_sums = saved
    (n, d, t), s = q.shape, k.shape[2]
    # What every weight's gradient has in common: sum over features of out * dout.
    common = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(1, keepdims=True)
    rows, chunk = flash.rows_at_once(t, _MAX_QUERIES), flash.keys_at_once(s, wide=wide)
    queries = pl.BlockSpec((None, d, rows), lambda head, block: (head, 0, block))
    numbers = pl.BlockSpec((None, 1, rows), lambda head, block: (head, 0, block))
    keys = pl.BlockSpec((None, d, s), lambda head, block: (head, 0, 0))
    dq, dk, dv = pl.pallas_call(
        functools.partial(_backward_kernel, chunk=chunk, length=length),
        grid=(n, t // rows),
        in_specs=[queries, keys, keys, queries, numbers, numbers],
        out_specs=[queries, keys, keys],
        out_shape=[
            jax.ShapeDtypeStruct((n, d, t), q.dtype),
            *(jax.ShapeDtypeStruct((n, d, s), jnp.float32) for _ in range(2)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=flash.VMEM_BYTES
        ),
        interpret=interpret,
        name="flash_backward",
    )(q, k, v, dout, log_sums, common)
    # The gradient of a score to base two is smaller by log(2) than that of a score to base e.
    return dq, (dk / _LOG2_E).astype(k.dtype), dv.astype(v.dtype)


_attend.defvjp(_forward, _backward)


def _backward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dout_ref: Any,
    log_sums_ref: Any,
    common_ref: Any,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    chunk: int,
    length: int,
) -> None:
    """Adds a block of queries' gradients of a head's keys and values; finishes the queries' own."""
    from jax.experimental import pallas as pl

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    q, dout = q_ref[...], dout_ref[...]
    log_sums, common = log_sums_ref[...], common_ref[...]
    dq = jnp.zeros(q.shape, jnp.float32)
    for start in range(0, length, chunk):
        here = slice(start, start + chunk)
        keys, values = k_ref[:, here], v_ref[:, here]
        weights = jnp.exp2(flash.scores_of(keys, q, left=length - start) - log_sums)
        gradients = weights * (_product(values, dout, 0, 0) - common)
        weights, gradients = weights.astype(q.dtype), gradients.astype(q.dtype)
        dv_ref[:, here] += _product(dout, weights, 1, 1)
        dk_ref[:, here] += _product(q, gradients, 1, 1)
        dq += _product(keys, gradients, 1, 0)
    dq_ref[...] = (dq / _LOG2_E).astype(dq_ref.dtype)


def _product(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    axes = (((over_a,), (over_b,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
