"""Attention for play on a TPU: no mask but a length, no backward pass, arrays with tokens last.

Scores are computed keys by queries. The product with the values then has full depth: the matrix
unit holds the scores as its weights, not the narrow values, and their sums over keys are sums of
registers. The result has tokens last, as the output projection reads it. All keys and values of a
head stay in a core's own memory.

Queries and keys of the transformer come from layer norms, so a head's scores cannot exceed a number
that is known with the weights (`most_score`). Where its power of two is a float32, no maximum needs
to be subtracted before the exponential: neither running maxima nor the rescaling of earlier sums.

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
VMEM_BYTES = 48 << 20
"""Memory of a core that a kernel of attention may use."""
MOST_POWER = 106.0
"""Largest score to base two without a maximum: 2^14 sums of its power of two are a float32."""
_SUBLANES = 16  # of two-byte numbers in a register
_LEAST = -1e30


def supports(heads: tuple[int, int], width: int, keys: int, itemsize: int) -> bool:
    """Returns whether the kernel takes these sizes; `heads` counts those of queries and of keys."""
    padded = _in_lanes(keys)
    fits = 4 * width * padded * itemsize <= _MAX_RESIDENT_BYTES and padded <= _MAX_KEYS
    return heads[0] == heads[1] and width % _SUBLANES == 0 and fits


def _in_lanes(length: int) -> int:
    return -(-length // _LANES) * _LANES


def pad_to_lanes(x: Float[Array, "*b t"]) -> Float[Array, "*b p"]:
    """Pads tokens, the last axis, with zeros to whole registers."""
    padding = _in_lanes(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),))


def rows_at_once(queries: int, most: int = _MAX_QUERIES) -> int:
    """Returns the number of queries in a block: the most that divide them, in whole registers."""
    return _largest_divisor(_in_lanes(queries), most)


def keys_at_once(keys: int, *, wide: bool = False) -> int:
    """Returns the number of keys in one product: the most that divide them all."""
    return _largest_divisor(keys, _MAX_AT_ONCE_WIDE if wide else _MAX_AT_ONCE)


def _largest_divisor(length: int, largest: int) -> int:
    lanes = length // _LANES
    return _LANES * max(n for n in range(1, largest // _LANES + 1) if lanes % n == 0)


def is_bounded(most_score: float | jax.Array, scale: float) -> Any:
    """Returns whether scores up to `most_score * scale` need no maximum."""
    return most_score * (scale * math.log2(math.e)) <= MOST_POWER


def flash_attention(
    q: Float[Array, "b h d t"],
    k: Float[Array, "b h d s"],
    v: Float[Array, "b h d s"],
    *,
    length: int | None = None,
    scale: float = 1.0,
    wide: bool = False,
    bounded: bool = False,
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
        bounded: Whether no score exceeds `MOST_POWER` (`is_bounded`).
        interpret: Whether to run the kernel on a CPU, slowly.
    """
    b, heads, d, tokens = q.shape
    length = k.shape[3] if length is None else length
    # A core has only the exponential to base two.
    q = (q * (scale * math.log2(math.e))).astype(q.dtype)
    parts = (pad_to_lanes(x.reshape(b * heads, d, -1)) for x in (q, k, v))
    (out,) = run_forward(*parts, length=length, wide=wide, bounded=bounded, interpret=interpret)
    return out.reshape(b, heads, d, -1)[..., :tokens]


def run_forward(
    q: Float[Array, "n d t"],
    k: Float[Array, "n d s"],
    v: Float[Array, "n d s"],
    *,
    length: int,
    wide: bool,
    bounded: bool = False,
    interpret: bool = False,
    returns_log_sums: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs the kernel on heads in whole registers, whose queries have all factors of the scores.

    Returns the output [n d t] and, if asked, the logarithms to base two of the softmax's sums
    [n 1 t], float32. The arguments are those of `flash_attention`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (n, d, t), s = q.shape, k.shape[2]
    rows = rows_at_once(t)
    queries = pl.BlockSpec((None, d, rows), lambda head, block: (head, 0, block))
    numbers = pl.BlockSpec((None, 1, rows), lambda head, block: (head, 0, block))
    all_keys = pl.BlockSpec((None, d, s), lambda head, block: (head, 0, 0))
    outputs = [(queries, jax.ShapeDtypeStruct((n, d, t), q.dtype))]
    if returns_log_sums:
        outputs.append((numbers, jax.ShapeDtypeStruct((n, 1, t), jnp.float32)))
    chunk = keys_at_once(s, wide=wide)
    return pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, length=length, bounded=bounded),
        grid=(n, t // rows),
        in_specs=[queries, all_keys, all_keys],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="flash_attention",
    )(q, k, v)


def scores_of(keys: jax.Array, q: jax.Array, *, left: int) -> jax.Array:
    """Returns scores [c r] of keys [d c], of which the first `left` are seen, by queries [d r]."""
    x = jax.lax.dot_general(keys, q, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    if keys.shape[1] <= left:
        return x
    slots = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(slots < left, x, _LEAST)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    log_sums_ref: Any = None,
    *,
    chunk: int,
    length: int,
    bounded: bool,
) -> None:
    """Attends from a block of a head's queries to all keys, `chunk` keys at a time."""
    q = q_ref[...]
    d, rows = q.shape
    # Rows of ones below the values make the product return the weights' sums as well.
    ones = jnp.ones((_SUBLANES, chunk), v_ref.dtype)
    starts = range(0, length, chunk)

    def scores(start: int) -> jax.Array:
        return scores_of(k_ref[:, start : start + chunk], q, left=length - start)

    top = jnp.zeros((1, rows), jnp.float32) if bounded else jnp.full((1, rows), _LEAST, jnp.float32)
    total = jnp.zeros((d + _SUBLANES, rows), jnp.float32)
    following = scores(0)
    for start in starts:
        now = following
        if start + chunk < length:  # its product runs during this softmax
            following = scores(start + chunk)
        if not bounded:
            higher = jnp.maximum(top, now.max(0, keepdims=True))
            now, total, top = now - higher, total * jnp.exp2(top - higher), higher
        weights = jnp.exp2(now).astype(v_ref.dtype)
        values = jnp.concatenate([v_ref[:, start : start + chunk], ones], axis=0)
        total += jax.lax.dot_general(
            values, weights, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
    out_ref[...] = (total[:d] / total[d : d + 1]).astype(out_ref.dtype)
    if log_sums_ref is not None:
        log_sums_ref[...] = top + jnp.log2(total[d : d + 1])
