"""Attention for play on a TPU: no mask but a length, no backward pass, arrays with tokens last.

Scores are computed keys by queries. The product with the values then has full depth: the matrix
unit holds the scores as its weights, not the narrow values, and their sums over keys are sums of
registers. The result has tokens last, as the output projection reads it. All keys and values of a
head stay in a core's own memory.

The algorithm is that of Dao et al., arXiv 2205.14135. How many cycles it takes by the compiler's
schedule, compared with JAX's splash attention: `docs/decisions/attention.md`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LANES = 128
_MAX_QUERIES = 1792  # in a block
# Keys in one product. A unit of 128 x 128 loses least between products of 512; a wider unit, which
# needs less time for the same scores, waits less for the softmax of 256.
_MAX_AT_ONCE, _MAX_AT_ONCE_WIDE = 512, 256
_MAX_KEYS = 1 << 14  # their products are unrolled
# Keys and values in a core's memory: two heads' at a time, since the next head's are on their way.
_MAX_RESIDENT_BYTES = 1 << 24
_VMEM_BYTES = 48 << 20
_SUBLANES = 16  # of two-byte numbers in a register
_LEAST = -1e30


def supports(heads: tuple[int, int], width: int, keys: int, itemsize: int) -> bool:
    """Whether the kernel takes these sizes; `heads` are the numbers of query and of key heads."""
    padded = _in_lanes(keys)
    fits = 4 * width * padded * itemsize <= _MAX_RESIDENT_BYTES and padded <= _MAX_KEYS
    return heads[0] == heads[1] and width % _SUBLANES == 0 and fits


def _in_lanes(length: int) -> int:
    return -(-length // _LANES) * _LANES


def rows_at_once(queries: int) -> int:
    """Returns the number of queries in a block: the most that divide them, in whole registers."""
    return _largest_divisor(_in_lanes(queries), _MAX_QUERIES)


def keys_at_once(keys: int, *, wide: bool = False) -> int:
    """Returns the number of keys in one product: the most that divide them all."""
    return _largest_divisor(keys, _MAX_AT_ONCE_WIDE if wide else _MAX_AT_ONCE)


def _largest_divisor(length: int, largest: int) -> int:
    lanes = length // _LANES
    return _LANES * max(n for n in range(1, largest // _LANES + 1) if lanes % n == 0)


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
    """Returns softmax(q^T k * scale) v^T of one device's heads, tokens last.

    Args:
        q: Queries, of sizes that `supports` accepts.
        k: Keys.
        v: Values.
        length: First key of the padding, which nobody sees; None if there is no padding.
        scale: Factor of the scores.
        wide: Whether the matrix unit is wider than 128.
        interpret: Whether to run the kernel on a CPU, slowly.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    b, heads, d, tokens = q.shape
    length = k.shape[3] if length is None else length
    # A core has only the exponential to base two.
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
    all_keys = pl.BlockSpec((None, d, s), lambda head, block: (head, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, chunk=keys_at_once(s, wide=wide), length=length),
        grid=(b * heads, t // rows),
        in_specs=[queries, all_keys, all_keys],
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
    """Attends from a block of a head's queries to all keys, `chunk` keys at a time."""
    q = q_ref[...]
    d, rows = q.shape
    # Rows of ones below the values make the product return the weights' sums as well.
    ones = jnp.ones((_SUBLANES, chunk), v_ref.dtype)
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
    total = jnp.zeros((d + _SUBLANES, rows), jnp.float32)
    following = scores(0)
    for start in starts:
        now = following
        if start + chunk < length:  # its product runs during this softmax
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
