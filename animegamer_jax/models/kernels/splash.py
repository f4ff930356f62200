"""JAX's splash attention on a TPU, for training: no score is ever written to memory.

The kernel takes whole blocks of tokens and static masks. Padded and invalid keys are hidden by one
more feature (1 in the queries; 0 or a large negative number in the keys) where a head's width
leaves room for it in a register's lanes, otherwise by segment ids.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from animegamer_jax.models.kernels.masks import StaticMask

SAVED = "attention"
"""Name of the kernel's results in `jax.checkpoint` policies."""

_LANES = 128
_UNSEEN = -1e4  # added to a score: exp underflows to 0 in float32, and bfloat16 can represent it
_MAX_PADDING = 0.04  # share of a sequence that is padded for larger blocks


class Blocks(NamedTuple):
    """Number of queries and keys that the kernel takes at a time, and the padded lengths."""

    queries: int
    keys: int
    keys_at_once: int
    query_length: int
    key_length: int


def _fit(length: int, largest: int) -> tuple[int, int]:
    """Returns a block size of at most `largest`, in whole lanes, and the length padded to it.

    The largest block that pads by less than 4 %, or the one that pads least.
    """
    least = -(-length // _LANES)
    best: tuple[int, int] | None = None
    for padded in range(least, max(least + 1, int(length * (1 + _MAX_PADDING)) // _LANES + 1)):
        lanes = _largest_divisor(padded, largest // _LANES)
        if best is None or lanes > best[0]:
            best = lanes, padded
    assert best is not None
    return best[0] * _LANES, best[1] * _LANES


def _largest_divisor(number: int, largest: int) -> int:
    return max(n for n in range(1, min(number, largest) + 1) if number % n == 0)


def fitting_length(length: int, *, parts: int = 1) -> int:
    """Returns the nearest length from `length` on that splits into `parts` of whole blocks."""
    return _fit(-(-length // parts), 1024)[1] * parts


def choose_blocks(query_length: int, key_length: int, *, causal: bool = False) -> Blocks:
    """Returns blocks that fit numbers of queries and keys with little padding.

    Blocks of a causal mask are small: they skip more of what nobody sees, and leave room in a
    core's own memory for the mask, which takes four bytes a score.
    """
    queries, padded_queries = _fit(query_length, 512 if causal else 1024)
    keys, padded_keys = _fit(key_length, 512 if causal else 1792)
    at_once = _largest_divisor(keys // _LANES, 896 // _LANES) * _LANES
    return Blocks(queries, keys, at_once, padded_queries, padded_keys)


@dataclasses.dataclass(frozen=True)
class _Before:
    """Computes from slots which keys come before a length."""

    length: int

    def __call__(self, queries: Any, keys: Any) -> Any:
        return (keys < self.length) & (queries >= 0)


def _first_keys(size: tuple[int, int], length: int) -> Any:
    """Returns a mask that the kernel computes from slots; an array takes 6 MB of a core."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class FirstKeys(masks.Mask):
        q_sequence = np.arange(size[0], dtype=np.int32)
        mask_function = _Before(length)

        @property
        def shape(self) -> tuple[int, ...]:
            return size

        def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
            rows, columns = (np.arange(n)[s] for n, s in zip(size, idx, strict=True))
            return self.mask_function(rows[:, None], columns[None])

    return FirstKeys()


@functools.lru_cache(maxsize=64)
def _make_kernel(
    heads: int,
    blocks: Blocks,
    mask: StaticMask | None,
    *,
    tokens_last: bool,
    interpret: bool,
    mesh: jax.sharding.AbstractMesh,
) -> Any:
    """Makes JAX's kernel; `mesh` is the current one, since the kernel holds arrays on it."""
    del mesh
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (blocks.query_length, blocks.key_length)
    if mask is None:
        one: Any = masks.FullMask(shape)
    elif mask == StaticMask():
        one = masks.CausalMask(shape)
    elif mask == StaticMask(causal=False, length=mask.length) and mask.length is not None:
        one = _first_keys(shape, mask.length)
    else:
        one = masks.NumpyMask(mask.dense(*shape))
    # The backward kernel holds four tiles of scores where the forward one holds one or two.
    halves = blocks.queries // 2 if blocks.queries % (2 * _LANES) == 0 else blocks.queries
    layout = splash.QKVLayout.SEQ_MINOR if tokens_last else splash.QKVLayout.HEAD_DIM_MINOR
    sizes = splash.BlockSizes(
        block_q=blocks.queries,
        block_kv=blocks.keys,
        block_kv_compute=blocks.keys_at_once,
        block_q_dkv=halves,
        block_kv_dkv=blocks.keys,
        block_kv_dkv_compute=blocks.keys_at_once,
        use_fused_bwd_kernel=True,
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
    )
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            masks.MultiHeadMask([one] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )


def splash_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    valid: Bool[Array, "b s"] | None = None,
    mask: StaticMask | None = None,
    scale: float = 1.0,
    tokens_last: bool = False,
    interpret: bool = False,
) -> Float[Array, "b h t d"]:
    """Returns softmax(q k^T * scale) v of one device's heads.

    Args:
        q: Queries.
        k: Keys; query heads `i h / g` to `(i + 1) h / g` use key head `i`.
        v: Values.
        valid: Which keys may be seen; all if None.
        mask: Which query sees which key, by slot; every key if None.
        scale: Factor of the scores.
        tokens_last: Whether the arrays are transposed views of [b h d t] ones. The kernel then
            reads those; it always does for heads narrower than a register's lanes.
        interpret: Whether to run the kernel on a CPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    b, heads, t, d = q.shape
    s = k.shape[2]
    q = (q * scale).astype(k.dtype)
    blocks = choose_blocks(t, s, causal=mask is not None and mask.causal)
    pad_queries, pad_keys = blocks.query_length - t, blocks.key_length - s
    narrow = d % _LANES != 0  # room for one more feature at no cost

    def pad(x: jax.Array, tokens: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, tokens), (0, 0))) if tokens else x

    q, k, v = pad(q, pad_queries), pad(k, pad_keys), pad(v, pad_keys)
    segments = None
    if pad_keys or valid is not None:
        seen = jnp.ones((b, s), bool) if valid is None else valid
        seen = jnp.pad(seen, ((0, 0), (0, pad_keys)))
        if narrow:
            penalty = jnp.where(seen, 0.0, _UNSEEN).astype(k.dtype)[:, None, :, None]
            penalty = jnp.broadcast_to(penalty, (*k.shape[:-1], 1))
            q = jnp.concatenate([q, jnp.ones((*q.shape[:-1], 1), q.dtype)], axis=-1)
            k = jnp.concatenate([k, penalty], axis=-1)
        else:
            ones = jnp.ones((b, blocks.query_length), jnp.int32)
            segments = splash.SegmentIds(ones, seen.astype(jnp.int32))
    mesh = jax.sharding.get_abstract_mesh()
    kernel = _make_kernel(
        heads, blocks, mask, tokens_last=narrow or tokens_last, interpret=interpret, mesh=mesh
    )
    if segments is None:
        out = jax.vmap(lambda q, k, v: kernel(q, k, v))(q, k, v)
    else:
        out = jax.vmap(kernel)(q, k, v, segments)
    return out[:, :, :t]
