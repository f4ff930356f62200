"""Multi-head attention for every network: projection into heads, attention, output projection.

The models see heads as [b h t d] arrays. How those lie in memory, and which function computes
attention, is decided here, when a program is traced:

- On a TPU, from 256 tokens on and with a mask known at tracing: a kernel. It reads tokens last, so
  `project_heads` makes such arrays and returns transposed views, which cost nothing. Without a mask
  but that of padding it is our `flash.py` or, if JAX differentiates, `flash_training.py`; otherwise
  JAX's splash attention.
- On one NVIDIA GPU, in 16-bit formats, from 256 tokens on: cuDNN's kernel (`cudnn.py`).
- Elsewhere `blocked.py`: the plain form, or the blocked one where the scores would be large. On a
  CPU, training takes the saving form as long as a head's scores are few enough.

Under a mesh the kernel runs on each device's games, heads and queries. Measurements:
`docs/decisions/attention.md`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from animegamer_jax.models.kernels.blocked import (
    blocked_attention,
    plain_attention,
    saving_attention,
)
from animegamer_jax.models.kernels.cudnn import cudnn_attention, takes_cudnn
from animegamer_jax.models.kernels.flash import flash_attention, is_bounded, supports
from animegamer_jax.models.kernels.flash_training import trained_attention
from animegamer_jax.models.kernels.masks import StaticMask, TokenMask
from animegamer_jax.models.kernels.splash import fitting_length, splash_attention
from animegamer_jax.models.linear import Dropout, Linear, LinearMap, fusion_barrier
from animegamer_jax.sharding import has_wide_unit, partition_spec, parts_of, platform, shares

Mask = TokenMask | StaticMask | None
Kernel = Literal["splash", "training", "play", "bounded"]

_HEAD_GROUPS = 3  # at most: groups of heads whose keys are gathered one after the other
_KERNEL_TOKENS = 256  # on a TPU: the kernel from this many tokens on
_PLAIN_BYTES = 1 << 30  # off the CPU: the blocked form if the call's float32 scores take more
_PLAIN_SCORES_CPU = 1 << 15  # on the CPU: the blocked form if one head has more scores
_SAVED_SCORES_CPU = 1 << 18  # on the CPU, in training: the saving form up to here


def project_heads(
    x: Float[Array, "b t i"],
    projections: Sequence[LinearMap],
    *,
    head_size: int,
    mask: Mask,
    window: int | None = None,
) -> tuple[Float[Array, "b h t d"], ...]:
    """Projects tokens into the heads of `attend`, in the layout that it will read.

    Args:
        x: Features of each token.
        projections: Linear maps to queries, keys and values, each [i, h * d].
        head_size: Width `d` of a head.
        mask: The mask of `attend`.
        window: The window of `attend`.
    """
    if _reads_tokens_last(x.shape[1], mask, window):
        outputs = (
            rearrange(project.tokens_last(x), "b (h d) t -> b h d t", d=head_size)
            for project in projections
        )
        # With the barrier before the split into heads, XLA copies the arrays.
        return tuple(fusion_barrier(y).swapaxes(2, 3) for y in outputs)
    outputs = (project(x) for project in projections)
    return tuple(rearrange(y, "b t (h d) -> b h t d", d=head_size) for y in outputs)


def attend(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    out: Linear,
    *,
    mask: Mask = None,
    bias: Float[Array, "h t s"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    most_score: float | Float[Array, ""] | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "b t o"]:
    """Returns out(softmax(q k^T * scale + bias) v).

    Args:
        q: Queries of `h` heads.
        k: Keys of `g` heads; query heads `i h / g` to `(i + 1) h / g` use key head `i`.
        v: Values, as `k`.
        out: Output projection of all heads' features.
        mask: Which query sees which key; every key if None. A query that sees no key gets the
            mean of the values.
        bias: Addend of the scores (T5's relative positions).
        window: Number of positions that a query looks back (`TokenMask.dense`).
        scale: Factor of the scores; 1 / sqrt(d) if None.
        most_score: Bound of all scores before that factor, by their absolute value; None: unknown.
            A number decides which kernel is compiled, an array which of two runs.
        dropout: Dropout on the input of the output projection's low-rank update.

    Raises:
        ValueError: `h` is not a multiple of `g`.
    """
    (b, h, t, d), s = q.shape, k.shape[2]
    factor: float = d**-0.5 if scale is None else scale

    def by_splash(q: jax.Array, k: jax.Array, v: jax.Array, out: Linear) -> jax.Array:
        last = _reads_tokens_last(t, mask, window)
        y = kernel_attention(q, k, v, mask=mask, scale=factor, tokens_last=last)
        return out.map(dropout).from_heads(y)

    def by_flash(kernel: Kernel) -> Callable[..., jax.Array]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, out: Linear, *_: Any) -> jax.Array:
            y = kernel_attention(q, k, v, mask=mask, scale=factor, kernel=kernel)
            return out.map().from_tokens_last(rearrange(y, "b h t d -> b (h d) t"))

        return run

    # A number stays outside of what JAX differentiates, where it would become an array.
    measured = (most_score,) if isinstance(most_score, jax.Array) else ()
    is_small = isinstance(most_score, float) and bool(is_bounded(most_score, factor))

    def in_play(*args: Any) -> jax.Array:
        if not measured:
            return by_flash("bounded" if is_small else "play")(*args)
        bounded = is_bounded(args[-1], factor)
        return jax.lax.cond(bounded, by_flash("bounded"), by_flash("play"), *args[:4])

    if bias is None and _takes_kernel(t, mask, window):
        unmasked = mask is None or (isinstance(mask, StaticMask) and mask.hides_only_padding)
        if unmasked and dropout is None and supports((h, k.shape[1]), d, s, k.dtype.itemsize):
            either = forward_only_variant(in_play, by_flash("training"))
            return either(q, k, v, out, *measured)
        return by_splash(q, k, v, out)
    if bias is None and takes_cudnn(q, k, mask):
        y = cudnn_attention(q, k, v, mask=mask, window=window, scale=factor)
        return out(rearrange(y, "b h t d -> b t (h d)"), dropout)
    tokens = mask.expand(b, t) if isinstance(mask, StaticMask) else mask
    options: dict[str, Any] = {"mask": tokens, "window": window, "scale": factor}
    if bias is not None or not _takes_blocks(b, h, t, s):
        y = plain_attention(q, k, v, bias=bias, **options)
    else:
        blocked = functools.partial(blocked_attention, **options)
        saving = functools.partial(saving_attention, **options)
        saves = platform() == "cpu" and t * s <= _SAVED_SCORES_CPU
        y = (forward_only_variant(blocked, saving) if saves else blocked)(q, k, v)
    return out(rearrange(y, "b h t d -> b t (h d)"), dropout)


def padded_length(length: int) -> int:
    """Returns the length to which a sequence is best padded (`masks.padding_mask`).

    It splits into equal parts for the devices that share a sequence, and into the kernel's blocks
    where the kernel runs.
    """
    parts = shares("act_length")
    if _takes_kernel(length, None, None):
        return fitting_length(length, parts=parts)
    return -(-length // parts) * parts


def _takes_kernel(t: int, mask: Mask, window: int | None) -> bool:
    """Returns whether a TPU kernel is used: it must know the mask when the program is traced."""
    if isinstance(mask, TokenMask):
        in_window = window is None or mask.key_positions.shape[1] <= window
        if mask.static is None or mask.query_segments is not None or not in_window:
            return False
    return platform() == "tpu" and t >= _KERNEL_TOKENS


def _reads_tokens_last(t: int, mask: Mask, window: int | None) -> bool:
    """Returns whether keys come from projections with tokens last; those of a cache do not."""
    cached = isinstance(mask, TokenMask) and mask.key_positions.shape[1] != t
    return _takes_kernel(t, mask, window) and not cached


def _takes_blocks(batch: int, heads: int, t: int, s: int) -> bool:
    """Returns whether there are enough scores that the blocked form is faster, or the only one."""
    if platform() == "cpu":
        return t > 1 and t * s > _PLAIN_SCORES_CPU
    return 4 * batch * heads * t * s > _PLAIN_BYTES


def forward_only_variant(
    forward_only: Callable[..., Any], differentiable: Callable[..., Any]
) -> Callable[..., Any]:
    """Makes a function that is `forward_only` unless JAX differentiates it.

    Both must return the same; `forward_only` may use operations that have no gradient.
    """
    either = jax.custom_vjp(forward_only)
    either.defvjp(
        lambda *args: jax.vjp(differentiable, *args), lambda backward, dout: backward(dout)
    )
    return either


def kernel_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    mask: Mask = None,
    scale: float = 1.0,
    tokens_last: bool = False,
    kernel: Kernel = "splash",
) -> Float[Array, "b h t d"]:
    """Runs a TPU kernel on each device's games, heads and queries; keys are gathered.

    Off a TPU the kernel is interpreted, slowly. `q`, `k`, `v`, `mask` and `scale` are those of
    `attend`; with `tokens_last` the arrays are transposed views of [b h d t] ones. All kernels but
    "splash" are for arrays with tokens last and masks of padding alone, and the result is then a
    view of an array with tokens last, too: "training", and for play, without gradients, "play" and
    "bounded" (`flash.is_bounded`).

    Raises:
        ValueError: The mask is not known when the program is traced, or has segments.
    """
    valid = mask.key_valid if isinstance(mask, TokenMask) else None
    static = mask.static if isinstance(mask, TokenMask) else mask
    if isinstance(mask, TokenMask) and (static is None or mask.query_segments is not None):
        raise ValueError("the kernel needs a static mask without segments: use blocked_attention")
    interpret = platform() != "tpu"

    def run(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> jax.Array:
        if kernel == "splash":
            more: Any = {"mask": static, "scale": scale, "tokens_last": tokens_last}
            return splash_attention(q, k, v, valid=valid, interpret=interpret, **more)
        options: Any = {
            "length": static and static.length,
            "scale": scale,
            "wide": has_wide_unit(),
            "interpret": interpret,
        }
        q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
        if kernel == "training":
            out = trained_attention(q, k, v, **options)
        else:
            out = flash_attention(q, k, v, bounded=kernel == "bounded", **options)
        return out.swapaxes(2, 3)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(q, k, v, valid)

    def dividing(axes: Any, size: int) -> Any:
        """Returns the mesh axes if they divide the size; else None, for a copy on every device."""
        return None if size % parts_of(axes, mesh) else axes

    spec = partition_spec(("act_batch", "act_heads", "act_length"))
    sizes = q.shape[0], k.shape[1], k.shape[2]
    batch, heads, context = (dividing(*pair) for pair in zip(spec, sizes, strict=True))
    if static is not None and static.causal:
        context = None  # a part of the queries would need a part of the mask

    def gathered(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> jax.Array:
        if context is not None:
            k, v = (jax.lax.all_gather(x, context, axis=2, tiled=True) for x in (k, v))
        return run(q, k, v, valid)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> jax.Array:
        if context is None or kernel not in ("play", "bounded"):
            return gathered(q, k, v, valid)
        # The keys of the next group of heads are on their way while the kernel works on this one.
        count = max(n for n in range(1, _HEAD_GROUPS + 1) if q.shape[1] % n == 0)
        queries, keys, values = (jnp.split(x, count, axis=1) for x in (q, k, v))
        groups = zip(queries, keys, values, strict=True)
        return jnp.concatenate([gathered(*group, valid) for group in groups], axis=1)

    spec = PartitionSpec(batch, heads, context, None)
    return jax.shard_map(
        local,
        in_specs=(spec, spec, spec, None if valid is None else PartitionSpec(batch, None)),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, valid)
