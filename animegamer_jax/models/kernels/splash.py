"""Attention by a kernel on TPU: splash attention, which never writes a score to memory.

The kernel wants sequences in whole blocks and knows masks that are static. Padded and invalid keys
are told apart by one more feature (1 in the queries; 0 or a large negative number in the keys)
where the head's width leaves room for it in a register's lanes, else by segments.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

_LANES = 128
_UNSEEN = -1e4  # added to a score: exp underflows to 0 in float32, and bfloat16 holds it
_MOST_PADDING = 0.04  # of a sequence, for greater blocks
# Rows of a causal mask's blocks: small ones skip more of what nobody sees, and leave room in a
# core's own memory for the mask, which the kernel holds as four bytes a score.
_MOST_CAUSAL = 512


class Blocks(NamedTuple):
    """Rows of queries and keys that the kernel takes at a time, and the lengths that fit them."""

    queries: int
    keys: int
    keys_at_once: int
    query_length: int
    key_length: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticMask:
    """A mask that is known when a program is traced.

    Attributes:
        block_start: the first slot of those that all see one another.
        block_stop: the slot after the last of them; equal: there is no block.
        causal: whether other queries see no later slots.
        length: slots from here on are padding that nobody sees; None: there is none.
    """

    block_start: int = 0
    block_stop: int = 0
    causal: bool = True
    length: int | None = None

    def dense(self, queries: int, keys: int) -> np.ndarray:
        """True where the query (row) sees the key (column)."""
        seen = np.tri(queries, keys, dtype=bool) if self.causal else np.ones((queries, keys), bool)
        block = slice(self.block_start, self.block_stop)
        seen[block, block] = True
        if self.length is not None:
            seen[:, self.length :] = False
        return seen


@dataclasses.dataclass(frozen=True)
class _Before:
    """Which keys come before a length, as the kernel asks: from the slots, without an array."""

    length: int

    def __call__(self, queries: Any, keys: Any) -> Any:
        return (keys < self.length) & (queries >= 0)


def _fit(length: int, most: int) -> tuple[int, int]:
    """A block of at most `most` rows in whole lanes, and the padded length that it divides.

    The largest block that pads by less than 4 %, or the one that pads least.
    """
    least = -(-length // _LANES)
    best: tuple[int, int] | None = None
    for padded in range(least, max(least + 1, int(length * (1 + _MOST_PADDING)) // _LANES + 1)):
        lanes = max(n for n in range(1, min(padded, most // _LANES) + 1) if padded % n == 0)
        if best is None or lanes > best[0]:
            best = lanes, padded
    assert best is not None
    return best[0] * _LANES, best[1] * _LANES


def fitting_length(length: int, *, parts: int = 1, most: int = 1024) -> int:
    """A length that so many equal parts and the kernel's blocks divide, a little longer at most."""
    return _fit(-(-length // parts), most)[1] * parts


def choose_blocks(
    query_length: int,
    key_length: int,
    *,
    most_queries: int = 1024,
    most_keys: int = 1792,
    most_at_once: int = 896,
) -> Blocks:
    """Blocks that fit the lengths with little padding."""
    queries, padded_queries = _fit(query_length, most_queries)
    keys, padded_keys = _fit(key_length, most_keys)
    lanes = keys // _LANES
    at_once = max(n for n in range(1, min(lanes, most_at_once // _LANES) + 1) if lanes % n == 0)
    return Blocks(queries, keys, at_once * _LANES, padded_queries, padded_keys)


def _first_keys(size: tuple[int, int], length: int) -> Any:
    """A mask that the kernel computes from slots; as an array it takes 6 MB of a core's own."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

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
    """`mesh` is the one in force: the kernel holds arrays that belong to it."""
    del mesh
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

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


SAVED = "attention"
"""The name of a kernel's results for `jax.checkpoint` policies."""


def splash_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    valid: Bool[Array, "b s"] | None = None,
    mask: StaticMask | None = None,
    scale: float = 1.0,
    columns: bool = False,
    interpret: bool = False,
    most_queries: int = 1024,
    most_keys: int = 1792,
    most_at_once: int = 896,
) -> Float[Array, "b h t d"]:
    """softmax(q k^T * scale) v of one device's heads.

    Args:
        q: queries.
        k: keys; query heads `i h / g` to `(i + 1) h / g` use key head `i`.
        v: values.
        valid: keys that may be seen; all if None.
        mask: which of them, by slot; all see all if None.
        scale: of the scores.
        columns: whether the arrays come from ones with tokens last, of which these are views: the
            kernel then reads those, as it always does for heads narrower than a register's lanes.
        interpret: runs the kernel on a CPU, slowly.
        most_queries: rows of a block at most.
        most_keys: of keys.
        most_at_once: of keys in one product.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )

    b, heads, t, d = q.shape
    s = k.shape[2]
    q = (q * scale).astype(k.dtype)
    if mask is not None and mask.causal:
        most_queries, most_keys = min(most_queries, _MOST_CAUSAL), min(most_keys, _MOST_CAUSAL)
    blocks = choose_blocks(
        t, s, most_queries=most_queries, most_keys=most_keys, most_at_once=most_at_once
    )
    narrow = d % _LANES != 0  # one more feature costs nothing
    padded = blocks.key_length > s
    pad_queries, pad_keys = blocks.query_length - t, blocks.key_length - s
    segments = None
    if padded or valid is not None:
        seen = jnp.ones((b, s), bool) if valid is None else valid
        seen = jnp.pad(seen, ((0, 0), (0, pad_keys)))
        if narrow:
            told = jnp.where(seen, 0.0, _UNSEEN).astype(k.dtype)[:, None, :, None]
            told = jnp.broadcast_to(told, (b, k.shape[1], blocks.key_length, 1))
        else:
            told = None
            ones = jnp.ones((b, blocks.query_length), jnp.int32)
            segments = splash.SegmentIds(ones, seen.astype(jnp.int32))
    else:
        told = None

    def pad(x: jax.Array, rows: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, rows), (0, 0))) if rows else x

    q, k, v = pad(q, pad_queries), pad(k, pad_keys), pad(v, pad_keys)
    if told is not None:
        q = jnp.concatenate([q, jnp.ones((*q.shape[:-1], 1), q.dtype)], axis=-1)
        k = jnp.concatenate([k, told], axis=-1)
    mesh = jax.sharding.get_abstract_mesh()
    kernel = _make_kernel(
        heads, blocks, mask, tokens_last=narrow or columns, interpret=interpret, mesh=mesh
    )
    if segments is None:
        out = jax.vmap(lambda q, k, v: kernel(q, k, v))(q, k, v)
    else:
        out = jax.vmap(kernel)(q, k, v, segments)
    return out[:, :, :t]
