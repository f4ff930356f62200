"""Scaled dot-product attention: one function, a form per platform.

Here: the plain form, and a form that walks blocks of query rows so that the score matrix is never
whole in memory. On two CPU cores the blocked form is the faster one as well
(`docs/decisions/attention.md`).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Implementation = Literal["auto", "plain", "blocked"]

_MASKED = -1e30  # finite: a row with nothing to see (padding) gives a mean, not a NaN


class TokenMask(NamedTuple):
    """Who sees whom, told token by token, so that no [t, s] array need exist.

    A query sees a key that is valid and not later than itself, and every valid key of its own
    block. Block 0 is no block.
    """

    query_positions: Int[Array, "b t"]
    key_positions: Int[Array, "b s"]
    key_valid: Bool[Array, "b s"]
    query_blocks: Int[Array, "b t"]
    key_blocks: Int[Array, "b s"]

    def dense(self, window: int | None = None) -> Bool[Array, "b t s"]:
        """True where the query (row) sees the key (column); `window` limits how far back."""
        query, key = self.query_positions[:, :, None], self.key_positions[:, None, :]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        block = self.query_blocks[:, :, None]
        seen |= (block == self.key_blocks[:, None, :]) & (block != 0)
        return seen & self.key_valid[:, None, :]


def _rows(
    q: Float[Array, "b t g r d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g d"],
    mask: TokenMask | None,
    bias: Float[Array, "g r t s"] | None,
    window: int | None,
) -> Float[Array, "b t g r d"]:
    """Attention of some query rows; scores and softmax in float32."""
    scores = jnp.einsum("btgrd,bsgd->bgrts", q, k, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)[None]
    if mask is not None:
        scores = jnp.where(mask.dense(window)[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, v)


def attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g d"],
    *,
    mask: TokenMask | None = None,
    bias: Float[Array, "h t s"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
    block_rows: int = 256,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T * scale + bias) v, with grouped queries: `h` is a multiple of `g`.

    Args:
        mask: who sees whom; all see all if None.
        bias: added to the scores (T5's relative positions); the plain form only.
        window: a masked query sees no key `window` or more positions back.
        scale: 1 / sqrt(d) if None.
        implementation: "plain" holds the whole score matrix, "blocked" `block_rows` rows of it;
            "auto" takes blocks as soon as there is more than one of them.

    Raises:
        ValueError: `h` is no multiple of `g`, or a bias is asked of the blocked form.
    """
    b, t, h, d = q.shape
    g = k.shape[2]
    if h % g:
        raise ValueError(f"{h} query heads do not divide over {g} key-value heads")
    if bias is not None and implementation == "blocked":
        raise ValueError("a score bias needs the plain form of attention")
    # The scale goes into q: one pass over [t, d] in place of one over [t, s].
    q = (q * (d**-0.5 if scale is None else scale)).astype(k.dtype).reshape(b, t, g, h // g, d)
    blocked = implementation == "blocked" or (
        implementation == "auto" and bias is None and t > block_rows
    )
    if not blocked:
        grouped = None if bias is None else bias.reshape(g, h // g, *bias.shape[1:])
        return _rows(q, k, v, mask, grouped, window).reshape(b, t, h, d)

    blocks = -(-t // block_rows)
    padding = blocks * block_rows - t

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, blocks, block_rows, *x.shape[2:]), 1, 0)

    rows = {"q": split(q)}
    if mask is not None:
        rows |= {"p": split(mask.query_positions), "c": split(mask.query_blocks)}

    @jax.checkpoint  # the backward pass recomputes a block's scores: never whole in memory either
    def one(rows: dict[str, jax.Array]) -> jax.Array:
        part = mask and mask._replace(query_positions=rows["p"], query_blocks=rows["c"])
        return _rows(rows["q"], k, v, part, None, window)

    out = jax.lax.map(one, rows)
    return jnp.moveaxis(out, 0, 1).reshape(b, blocks * block_rows, h, d)[:, :t]
