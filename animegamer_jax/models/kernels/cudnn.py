"""Attention by cuDNN's flash kernel, on one NVIDIA GPU from Ampere on.

JAX calls the kernel (`jax.nn.dot_product_attention`); here is decided when, and how our masks are
passed. The kernel takes 16-bit numbers only, so float32 goes to `blocked.py`. Not yet run on a GPU:
the tests lower it for CUDA, and compare its arguments' meaning by JAX's own implementation.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from animegamer_jax.models.kernels.masks import StaticMask, TokenMask
from animegamer_jax.sharding import cuda_capability

_IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn"
_TOKENS = 256  # below, XLA's own fusions
_WIDEST = 128  # of a head; cuDNN takes 256 from Hopper on
_OLDEST = (8, 0)  # compute capability of Ampere


def takes_cudnn(
    q: Float[Array, "b h t d"], k: Float[Array, "b g s d"], mask: TokenMask | StaticMask | None
) -> bool:
    """Returns whether to use cuDNN's kernel: on one GPU that has it, for shapes and types it takes.

    The gradient with a mask that is more than padding needs even lengths, so others are excluded.
    """
    (t, d), s = q.shape[2:], k.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    if t < _TOKENS or not (mesh.empty or mesh.size == 1):
        return False
    if k.dtype not in (jnp.bfloat16, jnp.float16) or d > _WIDEST or d % 8:
        return False
    if _needs_array(mask) and (t % 2 or s % 2):
        return False
    capability = cuda_capability()
    return capability is not None and capability >= _OLDEST


def _needs_array(mask: TokenMask | StaticMask | None) -> bool:
    """Returns whether a mask is more than a number of valid keys."""
    return mask is not None and not (isinstance(mask, StaticMask) and mask.hides_only_padding)


def cudnn_attention(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b g s d"],
    v: Float[Array, "b g s d"],
    *,
    mask: TokenMask | StaticMask | None = None,
    window: int | None = None,
    scale: float = 1.0,
) -> Float[Array, "b h t d"]:
    """Returns what `blocked_attention` returns, for arguments that `takes_cudnn` accepts.

    Padding is passed as a number of keys. Any other mask becomes an array [b, 1, t, s].
    """
    (b, _, t, _), s = q.shape, k.shape[2]
    seen = lengths = None
    if isinstance(mask, TokenMask):
        seen = mask.dense(window)[:, None]
    elif mask is not None and _needs_array(mask):
        seen = jnp.broadcast_to(mask.dense(t, s), (b, 1, t, s))
    elif mask is not None and mask.length is not None:
        lengths = jnp.full((b,), mask.length, jnp.int32)
    out = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (q.astype(k.dtype), k, v)),
        mask=seen,
        key_value_seq_lengths=lengths,
        scale=scale,
        implementation=_IMPLEMENTATION,
    )
    return out.swapaxes(1, 2)
