"""Attention in plain JAX, for every mask: with the whole score matrix, or in blocks of its rows.

The saving form keeps the softmax's weights for its backward pass, which is the fastest on a CPU as
long as they fit. The blocked form divides by the softmax's sum after the product with the values
and recomputes the scores in its backward pass, so no [t, s] array exists in either direction. On a
CPU it also takes one head at a time, so that a block of scores stays in cache. Both have no
forward-mode derivatives. In all forms, a query that sees no key gets the mean of the values and no
gradient to its scores. Measurements: `docs/decisions/attention.md`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from animegamer_jax.models.kernels.masks import TokenMask
from animegamer_jax.sharding import platform

_MASKED = -1e30  # finite: a row that sees nothing (padding) gives a mean, not a NaN
_BLOCK_BYTES = 1 << 28  # off the CPU: size of a block of float32 scores
_BLOCK_ROWS_CPU = 1024
_SCORES_AT_ONCE_CPU = 1 << 20  # on the CPU: one head at a time if a block of all heads has more

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def plain_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    mask: TokenMask | None = None,
    bias: Float[Array, "h t s"] | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h t d"]:
    """Returns softmax(q k^T * scale + bias) v, computed with the whole score matrix.

    The arguments are those of `attend.attend`.

    Raises:
        ValueError: `h` is not a multiple of `g`.
    """
    q = _group_heads(q, k, scale)
    seen = None if mask is None else mask.dense(window)[:, None, None]
    if bias is not None:
        bias = bias.reshape(1, *q.shape[1:3], *bias.shape[1:])
    return _merge_groups(_attend_rows(q, k, v, seen, bias)[0].out)


def saving_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    mask: TokenMask | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h t d"]:
    """Returns what `plain_attention` returns for the same arguments; trains faster on a CPU.

    Its backward pass reads the weights of the forward pass, saved in the format of `v`, and divides
    by the softmax's sum on the side of the features. It has no forward-mode derivatives.
    """
    seen = None if mask is None else mask.dense(window)[:, None, None]
    return _merge_groups(_saving(_group_heads(q, k, scale), k, v, seen))


@jax.custom_vjp
def _saving(
    q: Float[Array, "b g r t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    seen: Bool[Array, "b 1 1 t s"] | None,
) -> Float[Array, "b g r t d"]:
    return _saving_forward(q, k, v, seen)[0]


def _saving_forward(q: Any, k: Any, v: Any, seen: Any) -> Any:
    rows, weights = _attend_rows(q, k, v, seen)
    return rows.out, (q, k, v, seen, weights, rows)


def _saving_backward(saved: Any, dout: jax.Array) -> Any:
    q, k, v, seen, weights, rows = saved
    dout = dout.astype(jnp.float32) * rows.inverse[..., None]
    mean = (dout * rows.out.astype(jnp.float32)).sum(-1, keepdims=True)
    dout = dout.astype(v.dtype)
    dscores = weights.astype(jnp.float32) * (_einsum("bgrtd,bgsd->bgrts", dout, v) - mean)
    if seen is not None:
        dscores = jnp.where(seen, dscores, 0.0)
    # With the barrier both products read one array; without it, each computes it.
    dscores = jax.lax.optimization_barrier(dscores.astype(v.dtype))
    dq = _einsum("bgrts,bgsd->bgrtd", dscores, k).astype(q.dtype)
    dk = _einsum("bgrts,bgrtd->bgsd", dscores, q).astype(k.dtype)
    dv = _einsum("bgrts,bgrtd->bgsd", weights, dout).astype(v.dtype)
    return dq, dk, dv, None


_saving.defvjp(_saving_forward, _saving_backward)


def blocked_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    mask: TokenMask | None = None,
    window: int | None = None,
    scale: float | None = None,
    block_rows: int | None = None,
) -> Float[Array, "b h t d"]:
    """Returns what `plain_attention` returns for the same arguments, without its score matrix.

    `block_rows` is the number of score rows in a block; those of heads that share keys count
    together. By default it is 1,024 on the CPU, and elsewhere as many as keep the block of all
    games and heads within 256 MiB.
    """
    q = _group_heads(q, k, scale)
    b, g, heads_each, t, _ = q.shape
    s, cpu = k.shape[2], platform() == "cpu"
    if block_rows is None:
        block_rows = _BLOCK_ROWS_CPU if cpu else max(8, _BLOCK_BYTES // (4 * b * g * s))
    # Blocks of equal size, in multiples of 8 rows, so that little of the last one is padding.
    num_blocks = -(-t * heads_each // block_rows)
    rows = -(-t // num_blocks)
    rows = rows if num_blocks == 1 else -(-rows // 8) * 8
    # A mesh may put games and heads on different devices: a loop over them would gather them.
    one_game = cpu and jax.sharding.get_abstract_mesh().empty
    one_head = one_game and g * heads_each * rows * s > _SCORES_AT_ONCE_CPU
    blocks = _Blocks(-(-t // rows), rows, window, one_game, one_head)
    out: jax.Array = _blocked(q, k, v, mask, blocks)
    return _merge_groups(out)


def _group_heads(q: jax.Array, k: jax.Array, scale: float | None) -> Float[Array, "b g r t d"]:
    """Scales queries (cheaper than scaling scores) and groups the heads that share keys."""
    b, h, t, d = q.shape
    g = k.shape[1]
    if h % g:
        raise ValueError(f"{h} query heads do not divide over {g} key-value heads")
    q = (q * (d**-0.5 if scale is None else scale)).astype(k.dtype)
    return q.reshape(b, g, h // g, t, d)


def _merge_groups(out: Float[Array, "b g r t d"]) -> Float[Array, "b h t d"]:
    return out.reshape(out.shape[0], -1, *out.shape[3:])


class _Rows(NamedTuple):
    """Attention of some query rows, and what its backward pass needs of the softmax."""

    out: Float[Array, "*b r m d"]
    top: Float[Array, "*b r m"]  # largest score
    inverse: Float[Array, "*b r m"]  # 1 / sum of exp(score - top)


def _attend_rows(
    q: Float[Array, "*b r m d"],
    k: Float[Array, "*b s d"],
    v: Float[Array, "*b s d"],
    seen: Bool[Array, "..."] | None,
    bias: Float[Array, "..."] | None = None,
) -> tuple[_Rows, Float[Array, "*b r m s"]]:
    """Attends from `m` query rows of the `r` heads that share keys; softmax in float32.

    Returns also exp(score - top), in the format of `v`.
    """
    scores = _einsum("...rmd,...sd->...rms", q, k)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if seen is not None:
        scores = jnp.where(seen, scores, _MASKED)
    top = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    inverse = 1.0 / weights.sum(-1)
    # Dividing here, not in the weights, takes [m, d] divisions in place of [m, s].
    weights = weights.astype(v.dtype)
    out = _einsum("...rms,...sd->...rmd", weights, v)
    return _Rows((out * inverse[..., None]).astype(v.dtype), top, inverse), weights


def _attend_rows_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: _Rows, dout: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v in float32, from recomputed scores.

    Scores are keys by queries throughout: on a CPU a product over the first axis of both factors
    is slow, and in this order only q's small gradient has to be transposed.
    """
    dtype, (*batch, heads, rows_each, _) = v.dtype, q.shape

    def flatten(x: jax.Array) -> jax.Array:
        """Reshapes [*b r m ...] to [*b (r m) ...]: heads that share keys are more query rows."""
        return x.reshape(*batch, heads * rows_each, *x.shape[len(batch) + 2 :])

    # The softmax's division is applied on the [m, d] side here as well.
    dout = dout.astype(jnp.float32) * rows.inverse[..., None]
    mean = flatten((dout * rows.out.astype(jnp.float32)).sum(-1))[..., None, :]
    dout, queries = flatten(dout).astype(dtype), flatten(q)
    scores = _einsum("...sd,...md->...sm", k, queries)
    if seen is not None:
        seen = jnp.broadcast_to(seen, (*batch, heads, rows_each, k.shape[-2]))
        scores = jnp.where(flatten(seen).swapaxes(-1, -2), scores, _MASKED)
    weights = jnp.exp(scores - flatten(rows.top)[..., None, :])
    dv = _einsum("...sm,...md->...sd", weights.astype(dtype), dout)
    dscores = (weights * (_einsum("...sd,...md->...sm", v, dout) - mean)).astype(dtype)
    # A row that sees nothing has constant scores: its weights are one, without a gradient.
    alive = flatten((rows.top > _MASKED / 2)[..., None].astype(jnp.float32))
    dk = _einsum("...sm,...md->...sd", dscores, (queries * alive).astype(dtype))
    k = k.swapaxes(-1, -2)
    if platform() == "cpu":  # one more row, or XLA folds the transposition into the product
        k = jnp.pad(k, [(0, 0)] * len(batch) + [(0, 1), (0, 0)])
    dq = _einsum("...ds,...sm->...dm", k, dscores)[..., : q.shape[-1], :].swapaxes(-1, -2)
    return (dq * alive).reshape(q.shape), dk, dv


class _Blocks(NamedTuple):
    """How the blocked form loops; static."""

    num_blocks: int
    rows: int
    window: int | None
    one_game: bool  # at a time
    one_head: bool

    def split(self, x: jax.Array, axis: int) -> jax.Array:
        """Pads an axis of query tokens and splits it into a leading axis of blocks and its rows."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, self.num_blocks * self.rows - x.shape[axis])
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:axis], self.num_blocks, self.rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def join(self, x: jax.Array, *, axis: int, length: int) -> jax.Array:
        """Inverts `split`; `axis` is the tokens' axis in the result."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    def split_mask(self, mask: TokenMask | None) -> Any:
        """Splits what a mask says about queries."""
        if mask is None:
            return None
        of_queries = mask.query_positions, mask.query_blocks, mask.query_segments
        return jax.tree.map(lambda x: self.split(x, 1), of_queries)

    def dense(self, mask: TokenMask | None, of_queries: Any) -> Bool[Array, "b 1 1 m s"] | None:
        """Returns the dense mask of one block of rows."""
        if mask is None:
            return None
        names = ("query_positions", "query_blocks", "query_segments")
        part = mask._replace(**dict(zip(names, of_queries, strict=True)))
        return part.dense(self.window)[:, None, None]


def _one_by_one(function: Callable[..., Any], axis: int) -> Callable[..., Any]:
    """Makes `function` take slices of length one along `axis`, one after the other."""

    def run(*arrays: Any) -> Any:
        if all(x.shape[axis] == 1 for x in jax.tree.leaves(arrays)):
            return function(*arrays)

        def one(slices: Any) -> Any:
            slices = jax.tree.map(lambda x: jnp.expand_dims(x, axis), slices)
            return jax.tree.map(lambda x: x.squeeze(axis), function(*slices))

        out = jax.lax.map(one, jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), arrays))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), out)

    return run


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: TokenMask | None, blocks: _Blocks
) -> _Rows:
    t = q.shape[3]

    def game(q: jax.Array, k: jax.Array, v: jax.Array, mask: TokenMask | None) -> _Rows:
        def block(part: Any) -> _Rows:
            q, of_queries = part
            seen = blocks.dense(mask, of_queries)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> _Rows:
                return _attend_rows(q, k, v, seen)[0]

            return (_one_by_one(attend, 1) if blocks.one_head else attend)(q, k, v)

        rows = jax.lax.map(block, (blocks.split(q, 3), blocks.split_mask(mask)))
        return jax.tree.map(functools.partial(blocks.join, axis=3, length=t), rows)

    return (_one_by_one(game, 0) if blocks.one_game else game)(q, k, v, mask)


def _backward(blocks: _Blocks, saved: Any, dout: jax.Array) -> Any:
    q, k, v, mask, rows = saved
    t = q.shape[3]

    def game(q: Any, k: Any, v: Any, mask: Any, rows: _Rows, dout: Any) -> Any:
        def block(totals: Any, part: Any) -> Any:
            q, rows, dout, of_queries = part
            attend = functools.partial(_attend_rows_backward, seen=blocks.dense(mask, of_queries))
            walk = _one_by_one(attend, 1) if blocks.one_head else attend
            dq, dk, dv = walk(q, k, v, rows, dout)
            return (totals[0] + dk, totals[1] + dv), dq

        split = functools.partial(blocks.split, axis=3)
        parts = split(q), jax.tree.map(split, rows), split(dout), blocks.split_mask(mask)
        zeros = jnp.zeros(k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(block, (zeros, zeros), parts)
        return blocks.join(dq, axis=3, length=t), dk, dv

    walk = _one_by_one(game, 0) if blocks.one_game else game
    dq, dk, dv = walk(q, k, v, mask, rows, dout)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(
    q: Float[Array, "b g r t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    mask: TokenMask | None,
    blocks: _Blocks,
) -> Float[Array, "b g r t d"]:
    return _forward(q, k, v, mask, blocks).out


def _blocked_forward(q: Any, k: Any, v: Any, mask: Any, blocks: _Blocks) -> Any:
    rows = _forward(q, k, v, mask, blocks)
    return rows.out, (q, k, v, mask, rows)


_blocked.defvjp(_blocked_forward, _backward)
