"""Attention for play on a TPU: no mask but a length, no backward pass, arrays with tokens last.

Scores lie keys by queries. The product with the values then has whole depth, 64 rows of values that
run through it, and queries across: a matrix unit's weights are the scores, not the narrow values,
and their sums over keys are sums of registers. The result comes out with tokens last, as the
product after it reads it. All keys and values of a head stay in a core's own memory.

The algorithm is that of Dao et al., arXiv 2205.14135. What it takes by the compiler's schedule,
beside JAX's splash attention: `docs/decisions/attention.md`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LANES = 128
_MOST_ROWS = 1792
# Keys in one product: of 512, a unit of 128 x 128 loses least between them; a wider one, which has
# less to do for the same scores, is held up less by the softmax of 256.
_AT_ONCE, _AT_ONCE_WIDE = 512, 256
_MOST_KEYS = 1 << 14  # their products are written out one by one
# Of keys and values in a core's memory, twice: the next head's are on their way.
_OWN_BYTES = 1 << 24
_VMEM_BYTES = 48 << 20
_ROWS = 16  # of two-byte numbers in a register
_LEAST = -1e30


def takes(heads: tuple[int, int], width: int, keys: int, itemsize: int) -> bool:
    """Whether this is a way for so many heads of queries and of keys, a head's width and keys."""
    padded = _in_lanes(keys)
    fits = 4 * width * padded * itemsize <= _OWN_BYTES and padded <= _MOST_KEYS
    return heads[0] == heads[1] and width % _ROWS == 0 and fits


def _in_lanes(length: int) -> int:
    return -(-length // _LANES) * _LANES


def rows_at_once(queries: int) -> int:
    """Queries of a block: the most that divide them, in whole registers."""
    return _largest_divisor(_in_lanes(queries), _MOST_ROWS)


def keys_at_once(keys: int, *, wide: bool = False) -> int:
    """The most keys of one product that divide them all."""
    return _largest_divisor(keys, _AT_ONCE_WIDE if wide else _AT_ONCE)


def _largest_divisor(length: int, most: int) -> int:
    lanes = length // _LANES
    return _LANES * max(n for n in range(1, most // _LANES + 1) if lanes % n == 0)


def flash_attention(
    q: Float[Array, "b h d t"],
    k: Float[Array, "b h d s"],
    v: Float[Array, "b h d s"],
    *,
    length: int | None = None,
    scale: float = 1.0,
    wide: bool = False,
    interpret: bool = False,
) -> Float[Array, "b h d t"]:
    """softmax(q^T k * scale) v^T of one device's heads, tokens last; `takes` says of which sizes.

    Args:
        q: queries.
        k: keys.
        v: values.
        length: keys from here on are padding that nobody sees; None: there is none.
        scale: of the scores.
        wide: whether the matrix unit is wider than 128.
        interpret: runs the kernel on a CPU, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    b, heads, d, tokens = q.shape
    length = k.shape[3] if length is None else length
    # Powers of two: a core has no other exponential.
    q = (q * (scale * math.log2(math.e))).astype(q.dtype)
    q, k, v = (
        jnp.pad(
            x.reshape(b * heads, d, -1), ((0, 0), (0, 0), (0, _in_lanes(x.shape[3]) - x.shape[3]))
        )
        for x in (q, k, v)
    )
    t, s = q.shape[2], k.shape[2]
    rows = rows_at_once(t)
    queries = pl.BlockSpec((None, d, rows), lambda head, block: (head, 0, block))
    whole = pl.BlockSpec((None, d, s), lambda head, block: (head, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, chunk=keys_at_once(s, wide=wide), length=length),
        grid=(b * heads, t // rows),
        in_specs=[queries, whole, whole],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct((b * heads, d, t), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
        name="flash_attention",
    )(q, k, v)
    return out.reshape(b, heads, d, t)[..., :tokens]


def _kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, *, chunk: int, length: int) -> None:
    """A block of a head's queries against all keys, so many at a time."""
    q = q_ref[...]
    d, rows = q.shape
    # Rows of ones below the values: the weights' sums come with the product.
    ones = jnp.ones((_ROWS, chunk), v_ref.dtype)
    starts = range(0, length, chunk)

    def scores(start: int) -> jax.Array:
        keys = k_ref[:, start : start + chunk]
        x = jax.lax.dot_general(
            keys, q, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        if start + chunk <= length:
            return x
        slots = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(slots < length - start, x, _LEAST)

    top = jnp.full((1, rows), _LEAST, jnp.float32)
    total = jnp.zeros((d + _ROWS, rows), jnp.float32)
    following = scores(0)
    for start in starts:
        now = following
        if start + chunk < length:  # its product runs beside this softmax
            following = scores(start + chunk)
        higher = jnp.maximum(top, now.max(0, keepdims=True))
        weights = jnp.exp2(now - higher).astype(v_ref.dtype)
        values = jnp.concatenate([v_ref[:, start : start + chunk], ones], axis=0)
        part = jax.lax.dot_general(
            values, weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        total = total * jnp.exp2(top - higher) + part
        top = higher
    out_ref[...] = (total[:d] / total[d : d + 1]).astype(out_ref.dtype)
