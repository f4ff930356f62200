"""Mistral-7B: grouped-query attention, rotary positions, sliding window, gated MLP, LoRA.

Source: arXiv 2310.06825. The mask may hold one block that attends in both directions (PAPER
section 3.3), and the key-value cache is an argument and a result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from animegamer_jax.configs import MistralConfig
from animegamer_jax.models.attention import TokenMask, attention
from animegamer_jax.models.layers import LayerStack, Linear, RMSNorm
from animegamer_jax.sharding import axes, constrain


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, in slots of fixed number; `l` layers, `s` slots."""

    keys: Float[Array, "l b s g d"]
    values: Float[Array, "l b s g d"]
    positions: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    blocks: Int[Array, "b s"]
    length: Int[Array, ""]


class Tokens(NamedTuple):
    """What attention must know of a batch of tokens. Block 0 is no block (`TokenMask`)."""

    positions: Int[Array, "b t"]
    valid: Bool[Array, "b t"]
    blocks: Int[Array, "b t"]


def make_cache(config: MistralConfig, batch: int, slots: int) -> KVCache:
    """An empty cache."""
    shape = (
        config.num_hidden_layers,
        batch,
        slots,
        config.num_key_value_heads,
        config.head_dim,
    )
    empty = jnp.zeros((batch, slots), jnp.int32)
    zeros = jnp.zeros(shape, config.dtype)
    return KVCache(zeros, zeros, empty, empty.astype(bool), empty, jnp.zeros((), jnp.int32))


def rotary_tables(
    positions: Int[Array, "b t"], config: MistralConfig
) -> tuple[Float[Array, "b t 1 f"], Float[Array, "b t 1 f"]]:
    """Cosine and sine of position / theta^(2i/d), float32, rounded to `config.rotary_dtype`.

    The rounding is `reduce_precision`, which a compiler may not undo as it may a pair of casts.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
    info = jnp.finfo(config.rotary_dtype)
    cos, sin = (
        jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        for x in (jnp.cos(angles), jnp.sin(angles))
    )
    return cos, sin


def rotate(
    x: Float[Array, "b t h d"], cos: Float[Array, "b t 1 f"], sin: Float[Array, "b t 1 f"]
) -> Float[Array, "b t h d"]:
    """Rotates the feature pairs (i, i + d/2), in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """One layer, before-norm, without biases."""

    def __init__(self, config: MistralConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        heads = c.num_attention_heads * c.head_dim
        kv_heads = c.num_key_value_heads * c.head_dim

        def linear(i: int, o: int, *names: str) -> Linear:
            return Linear(i, o, names=names, config=c, use_bias=False, lora=c.lora, rngs=rngs)

        self.attention_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, config=c, rngs=rngs)
        self.q = linear(c.hidden_size, heads, "embed", "heads")
        self.k = linear(c.hidden_size, kv_heads, "embed", "kv_heads")
        self.v = linear(c.hidden_size, kv_heads, "embed", "kv_heads")
        self.o = linear(heads, c.hidden_size, "heads", "embed")
        self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, config=c, rngs=rngs)
        self.gate = linear(c.hidden_size, c.intermediate_size, "embed", "mlp")
        self.up = linear(c.hidden_size, c.intermediate_size, "embed", "mlp")
        self.down = linear(c.intermediate_size, c.hidden_size, "mlp", "embed")

    def __call__(
        self,
        x: Float[Array, "b t d"],
        mask: TokenMask,
        tables: tuple[Array, Array],
        start: Int[Array, ""] | None,
        cached: tuple[Array, Array] | None = None,
    ):
        """Returns x, or with `cached` keys and values (x, (keys, values)) with `t` more from slot
        `start` on.
        """
        c = self.config
        y = self.attention_norm(x)
        q = rearrange(self.q(y), "b t (h d) -> b t h d", d=c.head_dim)
        k = rearrange(self.k(y), "b t (h d) -> b t h d", d=c.head_dim)
        v = rearrange(self.v(y), "b t (h d) -> b t h d", d=c.head_dim)
        q, k = rotate(q, *tables), rotate(k, *tables)
        if cached is not None and start is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)
                for old, new in zip(cached, (k, v), strict=True)
            )
        y = attention(q, k, v, mask=mask, window=c.sliding_window)
        x = x + self.o(rearrange(y, "b t h d -> b t (h d)"))
        y = self.mlp_norm(x)
        y = constrain(jax.nn.silu(self.gate(y)) * self.up(y), "act_batch", "act_length", "act_mlp")
        x = constrain(x + self.down(y), "act_batch", "act_length", "act_embed")
        return x if cached is None else (x, (k, v))


class Mistral(nnx.Module):
    """Token embedding, layers, final norm, output head."""

    def __init__(self, config: MistralConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        shape, dtype = (c.vocab_size, c.hidden_size), jnp.dtype(c.param_dtype)
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), shape, dtype), **axes("vocab", "embed"))
        self.layers = LayerStack(
            lambda rngs: Block(c, rngs=rngs), c.num_hidden_layers, config=c, rngs=rngs
        )
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, config=c, rngs=rngs)
        self.head = Linear(
            c.hidden_size,
            c.vocab_size,
            names=("embed", "vocab"),
            config=c,
            use_bias=False,
            rngs=rngs,
        )

    def embed(self, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Embedding rows of the tokens."""
        return self.embedding[...][ids].astype(self.config.dtype)

    def __call__(
        self, x: Float[Array, "b t d"], tokens: Tokens, cache: KVCache | None = None
    ) -> tuple[Float[Array, "b t d"], KVCache | None]:
        """Hidden states after the final norm, and the cache with these tokens appended.

        `x` are embeddings. The cache must have room for `t` more; what it holds is seen by the new
        tokens, by position.
        """
        x = constrain(x.astype(self.config.dtype), "act_batch", "act_length", "act_embed")
        tables = rotary_tables(tokens.positions, self.config)
        if cache is None:
            mask = TokenMask(
                tokens.positions, tokens.positions, tokens.valid, tokens.blocks, tokens.blocks
            )
            x, _ = self.layers(x, mask, tables, None)
            return self.norm(x), None

        def append(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)

        positions = append(cache.positions, tokens.positions)
        valid = append(cache.valid, tokens.valid)
        blocks = append(cache.blocks, tokens.blocks)
        mask = TokenMask(tokens.positions, positions, valid, tokens.blocks, blocks)
        x, (keys, values) = self.layers(
            x, mask, tables, cache.length, per_layer=(cache.keys, cache.values)
        )
        length = cache.length + tokens.positions.shape[1]
        return self.norm(x), KVCache(keys, values, positions, valid, blocks, length)

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
        """Scores of the next token, float32."""
        return self.head(hidden).astype(jnp.float32)
