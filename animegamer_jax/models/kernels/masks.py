"""Which query sees which key: as arrays, or as numbers known when a program is traced."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticMask:
    """A mask of token slots that is known when a program is traced.

    Attributes:
        block_start: First slot of a block whose tokens all see one another.
        block_stop: Slot after the block; equal to `block_start` if there is no block.
        causal: Whether a query outside the block sees no later slots.
        length: First slot of the padding, which nobody sees; None if there is no padding.
    """

    block_start: int = 0
    block_stop: int = 0
    causal: bool = True
    length: int | None = None

    @property
    def hides_only_padding(self) -> bool:
        return self == StaticMask(causal=False, length=self.length)

    def dense(self, queries: int, keys: int) -> Bool[np.ndarray, "t s"]:
        """Returns True where the query (row) sees the key (column)."""
        seen = np.tri(queries, keys, dtype=bool) if self.causal else np.ones((queries, keys), bool)
        block = slice(self.block_start, self.block_stop)
        seen[block, block] = True
        if self.length is not None:
            seen[:, self.length :] = False
        return seen

    def expand(self, batch: int, slots: int) -> "TokenMask":
        """Returns the same mask as arrays, for `slots` tokens that see each other."""
        slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        queries = slot if self.causal else jnp.full_like(slot, slots)
        block = ((slot >= self.block_start) & (slot < self.block_stop)).astype(jnp.int32)
        valid = slot < (slots if self.length is None else self.length)
        return TokenMask(queries, slot, valid, block, block)


class TokenMask(NamedTuple):
    """A mask that is computed from a few numbers a token, so that no [t, s] array need exist.

    A query sees every valid key at its own position or before, and every valid key of its own
    block (block 0 is no block). In a packed sequence it sees only keys of its own segment and of
    segment 0, the shared history. `static` is the same mask by slots, where positions and blocks
    are known when a program is traced; validity is not part of it. The TPU kernel needs it.
    """

    query_positions: Int[Array, "b t"]
    key_positions: Int[Array, "b s"]
    key_valid: Bool[Array, "b s"]
    query_blocks: Int[Array, "b t"]
    key_blocks: Int[Array, "b s"]
    query_segments: Int[Array, "b t"] | None = None
    key_segments: Int[Array, "b s"] | None = None
    static: StaticMask | None = None

    def dense(self, window: int | None = None) -> Bool[Array, "b t s"]:
        """Returns True where the query (row) sees the key (column).

        Args:
            window: Number of positions that a query looks back, its own included, except within
                its block; unlimited if None.
        """
        query, key = self.query_positions[:, :, None], self.key_positions[:, None, :]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        block = self.query_blocks[:, :, None]
        seen |= (block == self.key_blocks[:, None, :]) & (block != 0)
        if self.query_segments is not None and self.key_segments is not None:
            segment = self.key_segments[:, None, :]
            seen &= (segment == 0) | (segment == self.query_segments[:, :, None])
        return seen & self.key_valid[:, None, :]


def padding_mask(total: int, *, length: int) -> StaticMask | None:
    """Returns a mask of `total` tokens that all see the first `length`; None if that is all."""
    return None if total == length else StaticMask(causal=False, length=length)
