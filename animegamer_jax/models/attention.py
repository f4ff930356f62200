"""Scaled dot-product attention: one function, a form per platform.

Three forms: "kernel" is a TPU's, for masks that are static (`splash.py`, and `flash.py` in play);
"plain" holds the whole score matrix; "blocked" walks blocks of query rows (on a CPU head by head as
well, so that a block of scores stays in cache), divides by the softmax's sum after the product with
the values, and recomputes the scores in its backward pass, so that no [t, s] array exists in either
direction.
Numbers: `docs/decisions/attention.md`.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from animegamer_jax.models.kernels.flash import flash_attention, takes
from animegamer_jax.models.kernels.splash import StaticMask, fitting_length, splash_attention
from animegamer_jax.sharding import has_wide_unit, partition_spec, parts_of, platform, shares

Implementation = Literal["auto", "plain", "blocked", "kernel"]

_MASKED = -1e30  # finite: a row with nothing to see (padding) gives a mean, not a NaN
_PLAIN_BYTES = 1 << 30  # off the CPU: blocks where the float32 scores of the call would exceed it
_BLOCK_BYTES = 1 << 28  # and then takes as many rows as make blocks of this size
_PLAIN_SCORES_CPU = 1 << 15  # on the CPU: blocks where one head has more scores than this
_BLOCK_ROWS_CPU = 1024
_TOGETHER_SCORES_CPU = 1 << 20  # and one head after the other where a block of all has more
_KERNEL_ROWS = 256  # on a TPU: the kernel from so many queries on


class TokenMask(NamedTuple):
    """Who sees whom, told token by token, so that no [t, s] array need exist.

    A query sees a key that is valid and not later than itself, and every valid key of its own
    block. Block 0 is no block. With branches, it sees only keys of its own branch and of the
    trunk, which is branch 0. `static` says the same of positions and blocks, where slots tell them
    when a program is traced; the kernel needs it.
    """

    query_positions: Int[Array, "b t"]
    key_positions: Int[Array, "b s"]
    key_valid: Bool[Array, "b s"]
    query_blocks: Int[Array, "b t"]
    key_blocks: Int[Array, "b s"]
    query_branches: Int[Array, "b t"] | None = None
    key_branches: Int[Array, "b s"] | None = None
    static: StaticMask | None = None

    def dense(self, window: int | None = None) -> Bool[Array, "b t s"]:
        """True where the query (row) sees the key (column); `window` limits how far back."""
        query, key = self.query_positions[:, :, None], self.key_positions[:, None, :]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        block = self.query_blocks[:, :, None]
        seen |= (block == self.key_blocks[:, None, :]) & (block != 0)
        if self.query_branches is not None and self.key_branches is not None:
            branch = self.key_branches[:, None, :]
            seen &= (branch == 0) | (branch == self.query_branches[:, :, None])
        return seen & self.key_valid[:, None, :]


class _Rows(NamedTuple):
    """Attention of some query rows, and what its backward pass needs of the softmax."""

    out: Float[Array, "*b r m d"]
    top: Float[Array, "*b r m"]  # largest score
    inverse: Float[Array, "*b r m"]  # 1 / sum of exp(score - top)


def _scores(
    q: Float[Array, "*b r m d"], k: Float[Array, "*b s d"], seen: Bool[Array, "..."] | None
) -> Float[Array, "*b r m s"]:
    scores = jnp.einsum("...rmd,...sd->...rms", q, k, preferred_element_type=jnp.float32)
    return scores if seen is None else jnp.where(seen, scores, _MASKED)


def _rows(
    q: Float[Array, "*b r m d"],
    k: Float[Array, "*b s d"],
    v: Float[Array, "*b s d"],
    seen: Bool[Array, "..."] | None,
    bias: Float[Array, "..."] | None = None,
) -> _Rows:
    """`m` query rows of the `r` heads that share keys and values; scores, softmax in float32."""
    scores = _scores(q, k, None if bias is not None else seen)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
        scores = scores if seen is None else jnp.where(seen, scores, _MASKED)
    top = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    inverse = 1.0 / weights.sum(-1)
    # Divided here, not in the weights: [m, d] divisions in place of [m, s].
    out = jnp.einsum(
        "...rms,...sd->...rmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return _Rows((out * inverse[..., None]).astype(v.dtype), top, inverse)


def _rows_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: _Rows, dout: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `_rows` for q, k, v in float32, from scores made again.

    Keys by queries all along: a product over the first axis of both factors is slow on a CPU, and
    so only q's gradient needs a transposition, of something small.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dtype, (*batch, heads, rows_each, _) = v.dtype, q.shape

    def together(x: jax.Array) -> jax.Array:
        """[*b r m ...] to [*b (r m) ...]: heads that share keys are more query rows."""
        return x.reshape(*batch, heads * rows_each, *x.shape[len(batch) + 2 :])

    # The softmax's division goes into the [m, d] side here as well.
    dout = dout.astype(jnp.float32) * rows.inverse[..., None]
    mean = together((dout * rows.out.astype(jnp.float32)).sum(-1))[..., None, :]
    dout, queries = together(dout).astype(dtype), together(q)
    scores = product("...sd,...md->...sm", k, queries)
    if seen is not None:
        seen = jnp.broadcast_to(seen, (*batch, heads, rows_each, k.shape[-2]))
        scores = jnp.where(together(seen).swapaxes(-1, -2), scores, _MASKED)
    weights = jnp.exp(scores - together(rows.top)[..., None, :])
    dv = product("...sm,...md->...sd", weights.astype(dtype), dout)
    dscores = (weights * (product("...sd,...md->...sm", v, dout) - mean)).astype(dtype)
    # A row that sees nothing has constant scores: weights of one, but no gradient through them.
    alive = together((rows.top > _MASKED / 2)[..., None].astype(jnp.float32))
    dk = product("...sm,...md->...sd", dscores, (queries * alive).astype(dtype))
    k = k.swapaxes(-1, -2)
    if platform() == "cpu":  # a row more, or XLA folds the transposition into the product
        k = jnp.pad(k, [(0, 0)] * len(batch) + [(0, 1), (0, 0)])
    dq = product("...ds,...sm->...dm", k, dscores)[..., : q.shape[-1], :].swapaxes(-1, -2)
    return (dq * alive).reshape(q.shape), dk, dv


class _Blocks(NamedTuple):
    """How the blocked form walks: static."""

    num_blocks: int
    rows: int
    window: int | None
    walk_games: bool
    walk_heads: bool

    def split(self, x: jax.Array, axis: int) -> jax.Array:
        """`axis` of query tokens, padded, becomes a leading axis of blocks and one of rows."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, self.num_blocks * self.rows - x.shape[axis])
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:axis], self.num_blocks, self.rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def join(self, x: jax.Array, *, axis: int, length: int) -> jax.Array:
        """The inverse of `split`; `axis` is that of the tokens in the result."""
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    def split_mask(self, mask: TokenMask | None) -> Any:
        if mask is None:
            return None
        of_queries = mask.query_positions, mask.query_blocks, mask.query_branches
        return jax.tree.map(lambda x: self.split(x, 1), of_queries)

    def seen(self, mask: TokenMask | None, part: Any) -> Bool[Array, "b 1 1 m s"] | None:
        """The dense mask of one block of rows."""
        if mask is None:
            return None
        positions, blocks, branches = part
        part = mask._replace(
            query_positions=positions, query_blocks=blocks, query_branches=branches
        )
        return part.dense(self.window)[:, None, None]


def _one_by_one(function: Any, axis: int, *arrays: Any) -> Any:
    """`function` over slices of length one of `axis`, one after the other."""
    if all(x.shape[axis] == 1 for x in jax.tree.leaves(arrays)):
        return function(*arrays)
    leading = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), arrays)
    out = jax.lax.map(
        lambda one: jax.tree.map(
            lambda x: x.squeeze(axis),
            function(*jax.tree.map(lambda x: jnp.expand_dims(x, axis), one)),
        ),
        leading,
    )
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), out)


def _walk_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: TokenMask | None, blocks: _Blocks
) -> _Rows:
    t = q.shape[3]

    def game(q: jax.Array, k: jax.Array, v: jax.Array, mask: TokenMask | None) -> _Rows:
        def block(part: Any) -> _Rows:
            q, tokens = part
            seen = blocks.seen(mask, tokens)
            if not blocks.walk_heads:
                return _rows(q, k, v, seen)
            return _one_by_one(lambda q, k, v: _rows(q, k, v, seen), 1, q, k, v)

        rows = jax.lax.map(block, (blocks.split(q, 3), blocks.split_mask(mask)))
        return jax.tree.map(functools.partial(blocks.join, axis=3, length=t), rows)

    return _one_by_one(game, 0, q, k, v, mask) if blocks.walk_games else game(q, k, v, mask)


def _walk_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: TokenMask | None,
    rows: _Rows,
    dout: jax.Array,
    blocks: _Blocks,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    t = q.shape[3]

    def game(q: Any, k: Any, v: Any, mask: Any, rows: _Rows, dout: Any) -> Any:
        def block(totals: Any, part: Any) -> Any:
            q, rows, dout, tokens = part
            seen = blocks.seen(mask, tokens)

            def heads(q: Any, k: Any, v: Any, rows: _Rows, dout: Any) -> Any:
                return _rows_backward(q, k, v, rows, dout, seen)

            walk = functools.partial(_one_by_one, heads, 1) if blocks.walk_heads else heads
            dq, dk, dv = walk(q, k, v, rows, dout)
            return (totals[0] + dk, totals[1] + dv), dq

        split = functools.partial(blocks.split, axis=3)
        parts = split(q), jax.tree.map(split, rows), split(dout), blocks.split_mask(mask)
        zeros = jnp.zeros(k.shape, jnp.float32)
        (dk, dv), dq = jax.lax.scan(block, (zeros, zeros), parts)
        return blocks.join(dq, axis=3, length=t), dk, dv

    walk = functools.partial(_one_by_one, game, 0) if blocks.walk_games else game
    return walk(q, k, v, mask, rows, dout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(
    q: Float[Array, "b g r t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    mask: TokenMask | None,
    blocks: _Blocks,
) -> Float[Array, "b g r t d"]:
    return _walk_forward(q, k, v, mask, blocks).out


def _blocked_forward(q: Any, k: Any, v: Any, mask: Any, blocks: _Blocks) -> Any:
    rows = _walk_forward(q, k, v, mask, blocks)
    return rows.out, (q, k, v, mask, rows)


def _blocked_backward(blocks: _Blocks, saved: Any, dout: jax.Array) -> Any:
    q, k, v, mask, rows = saved
    dq, dk, dv = _walk_backward(q, k, v, mask, rows, dout, blocks)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _choose(
    num_games: int, *, heads: int, t: int, s: int, mask: TokenMask | None, window: int | None
) -> Implementation:
    """The form for these sizes on this platform."""
    if platform() == "tpu" and t >= _KERNEL_ROWS and _is_static(mask, s=s, window=window):
        return "kernel"
    if platform() == "cpu":
        return "blocked" if t > 1 and t * s > _PLAIN_SCORES_CPU else "plain"
    return "blocked" if 4 * num_games * heads * t * s > _PLAIN_BYTES else "plain"


def _is_static(mask: TokenMask | None, *, s: int, window: int | None) -> bool:
    """Whether the kernel knows the mask."""
    if mask is None:
        return True
    near = window is None or s <= window
    return mask.static is not None and mask.query_branches is None and near


def _kernel(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    mask: TokenMask | StaticMask | None,
    *,
    scale: float = 1.0,
    columns: bool = False,
    play: bool = False,
    interpret: bool,
) -> Float[Array, "b h t d"]:
    """A kernel on each device's games, heads and queries; keys come together from all."""
    valid = mask.key_valid if isinstance(mask, TokenMask) else None
    static = mask.static if isinstance(mask, TokenMask) else mask
    known = static in (None, StaticMask(causal=False, length=static and static.length))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> jax.Array:
        sizes = (q.shape[1], k.shape[1]), q.shape[3], k.shape[2], k.dtype.itemsize
        if play and columns and known and valid is None and takes(*sizes):
            q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
            length = None if static is None else static.length
            wide = has_wide_unit()
            out = flash_attention(
                q, k, v, length=length, scale=scale, wide=wide, interpret=interpret
            )
            return out.swapaxes(2, 3)
        return splash_attention(
            q, k, v, valid=valid, mask=static, scale=scale, columns=columns, interpret=interpret
        )

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(q, k, v, valid)
    spec = partition_spec(("act_batch", "act_heads", "act_length"))
    # What does not divide lies whole on each device: a look at few clips, one game on many chips.
    batch = _dividing(spec[0], mesh, q.shape[0])
    heads = _dividing(spec[1], mesh, k.shape[1])
    context = _dividing(spec[2], mesh, k.shape[2])
    if static is not None and static.causal:
        context = None  # a part of the queries would need a part of the mask

    def local(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> jax.Array:
        if context is not None:
            k, v = (jax.lax.all_gather(x, context, axis=2, tiled=True) for x in (k, v))
        return run(q, k, v, valid)

    spec = PartitionSpec(batch, heads, context, None)
    return jax.shard_map(
        local,
        in_specs=(spec, spec, spec, None if valid is None else PartitionSpec(batch, None)),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, valid)


def _dividing(
    names: str | tuple[str, ...] | None, mesh: jax.sharding.AbstractMesh, size: int
) -> str | tuple[str, ...] | None:
    """Mesh axes, if so many parts divide the dimension; else None."""
    return None if size % parts_of(names, mesh) else names


def padded_length(length: int) -> int:
    """To how many tokens a sequence without a mask is best padded here.

    To equal parts for the devices that share it, and to the kernel's blocks where it runs.
    """
    parts = shares("act_length")
    if takes_columns(length):
        return fitting_length(length, parts=parts)
    return -(-length // parts) * parts


def takes_columns(length: int, mask: TokenMask | None = None, *, window: int | None = None) -> bool:
    """Whether `columns_attention` is the way here for so many tokens: on a TPU, but for a few.

    Args:
        length: of the sequence; its tokens see each other.
        mask: who sees whom; the kernel must know it.
        window: as of `attention`.
    """
    known = _is_static(mask, s=length, window=window)
    return platform() == "tpu" and length >= _KERNEL_ROWS and known


def padding_mask(batch: int, total: int, *, length: int) -> TokenMask | None:
    """All `total` tokens see the first `length`; None: these are all."""
    if total == length:
        return None
    later = jnp.full((batch, total), total, jnp.int32)
    zeros = jnp.zeros((batch, total), jnp.int32)
    valid = jnp.broadcast_to(jnp.arange(total) < length, (batch, total))
    return TokenMask(later, zeros, valid, zeros, zeros)


def columns_attention(
    q: Float[Array, "b h d t"],
    k: Float[Array, "b g d s"],
    v: Float[Array, "b g d s"],
    *,
    mask: TokenMask | StaticMask | None = None,
    scale: float | None = None,
    play: bool = False,
    interpret: bool = False,
) -> Float[Array, "b h t d"]:
    """`attention` by a TPU's kernels, of arrays with tokens last.

    That is how they read heads narrower than a register's lanes: no transposition, and norms and
    rotations over features fill whole registers. With `play` nothing can be differentiated, and
    the result is a view of an array with tokens last, where that kernel takes the sizes.
    """
    factor: float = q.shape[2] ** -0.5 if scale is None else scale
    q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
    return _kernel(q, k, v, mask, scale=factor, columns=True, play=play, interpret=interpret)


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
    block_rows: int | None = None,
) -> Float[Array, "b t h d"]:
    """softmax(q k^T * scale + bias) v, with grouped queries: `h` is a multiple of `g`.

    Args:
        q: queries of `h` heads.
        k: keys of `g` heads; query heads `i h / g` to `(i + 1) h / g` use key head `i`.
        v: values, as `k`.
        mask: who sees whom; all see all if None. A query that sees no key gets a mean of `v`.
        bias: added to the scores (T5's relative positions); the plain form only.
        window: a masked query sees no key `window` or more positions back.
        scale: 1 / sqrt(d) if None.
        implementation: "plain" holds the whole score matrix, "blocked" about `block_rows` rows of
            it, "kernel" none; "auto" chooses by platform and size. The kernel off a TPU is
            interpreted, slowly.
        block_rows: score rows of a block, those of heads that share keys counted together. None:
            1,024 on the CPU, elsewhere as many as keep all games' and heads' block within 256 MiB.

    Raises:
        ValueError: `h` is no multiple of `g`, a bias is asked of another form than the plain one,
            or the kernel does not know the mask.
    """
    b, t, h, d = q.shape
    g = k.shape[2]
    if h % g:
        raise ValueError(f"{h} query heads do not divide over {g} key-value heads")
    if bias is not None and implementation in ("blocked", "kernel"):
        raise ValueError("a score bias needs the plain form of attention")
    if implementation == "kernel" and not _is_static(mask, s=k.shape[1], window=window):
        raise ValueError("the kernel needs a static mask, without branches, within the window")
    # The scale goes into q: one pass over [t, d] in place of one over [t, s].
    q = (q * (d**-0.5 if scale is None else scale)).astype(k.dtype)
    if implementation == "auto" and bias is None:
        implementation = _choose(b, heads=h, t=t, s=k.shape[1], mask=mask, window=window)
    if implementation == "kernel":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return _kernel(q, k, v, mask, interpret=platform() != "tpu").swapaxes(1, 2)
    q = q.reshape(b, t, g, h // g, d).transpose(0, 2, 3, 1, 4)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if bias is not None or implementation == "plain":
        seen = None if mask is None else mask.dense(window)[:, None, None]
        if bias is not None:
            bias = bias.reshape(1, g, h // g, *bias.shape[1:])
        out = _rows(q, k, v, seen, bias).out
    else:
        cpu = platform() == "cpu"
        if block_rows is None:
            fitting = _BLOCK_BYTES // (4 * b * g * k.shape[2])
            block_rows = _BLOCK_ROWS_CPU if cpu else max(8, fitting)
        # Blocks of equal size, in multiples of 8 rows, so that little of the last is padding.
        num_blocks = -(-t * (h // g) // block_rows)
        rows = -(-t // num_blocks)
        rows = rows if num_blocks == 1 else -(-rows // 8) * 8
        # Under a mesh games and heads may lie on different devices: they stay side by side.
        alone = cpu and jax.sharding.get_abstract_mesh().empty
        large = h * rows * k.shape[2] > _TOGETHER_SCORES_CPU
        blocks = _Blocks(-(-t // rows), rows, window, alone, alone and large)
        out: jax.Array = _blocked(q, k, v, mask, blocks)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d)
