"""Mistral-7B: grouped-query attention, rotary positions, sliding window, gated MLP, LoRA.

Source: arXiv 2310.06825. The mask may hold one block that attends in both directions (PAPER
section 3.3), and the key-value cache is an argument and a result.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from animegamer_jax.configs import MistralConfig
from animegamer_jax.models.attention import (
    TokenMask,
    attention,
    columns_attention,
    takes_columns,
)
from animegamer_jax.models.kernels.splash import StaticMask
from animegamer_jax.models.linear import Dropout, LayerStack, Linear, RMSNorm, apart
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
    """What attention must know of a batch of tokens. Block 0 is no block (`TokenMask`).

    Branches are alternatives that go on from one trunk, branch 0, at their own positions: in a
    pass without a cache, that the sliding window does not limit. A token then sees only what
    stands before it in the sequence, whatever the positions.

    `static` says positions and blocks once more by slot, for a sequence from the first slot on
    (`TokenMask`); None where they are not the same in all sequences.
    """

    positions: Int[Array, "b t"]
    valid: Bool[Array, "b t"]
    blocks: Int[Array, "b t"]
    branches: Int[Array, "b t"] | None = None
    static: StaticMask | None = None


class LayerInput(NamedTuple):
    """What a layer gets beside what all get: its part of the cache, and its key for dropout."""

    cached: tuple[Float[Array, "..."], Float[Array, "..."]] | None = None
    key: Key[Array, "..."] | None = None


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
    x: Float[Array, "..."], cos: Float[Array, "..."], sin: Float[Array, "..."], *, axis: int = -1
) -> Float[Array, "..."]:
    """Rotates the feature pairs (i, i + d/2) of an axis, in float32."""
    a, b = (half.astype(jnp.float32) for half in jnp.split(x, 2, axis=axis))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=axis).astype(x.dtype)


def rotate_columns(
    x: Float[Array, "b h d t"], cos: Float[Array, "b t 1 f"], sin: Float[Array, "b t 1 f"]
) -> Float[Array, "b h d t"]:
    """`rotate` with tokens last."""
    cos, sin = (rearrange(table, "b t h f -> b h f t") for table in (cos, sin))
    return rotate(x, cos, sin, axis=2)


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
        rate: float,
        own: LayerInput,
    ) -> tuple[Float[Array, "b t d"], tuple[Array, Array] | None]:
        """Returns x and, with a cache, its keys and values with `t` more from slot `start` on.

        `rate` is the dropout of the low-rank updates' inputs, where the layer has a key.
        """
        keys = None if own.key is None else iter(jax.random.split(own.key, 7))

        def dropout() -> Dropout | None:
            return None if keys is None else Dropout(next(keys), rate)

        y, window, cached = self.attention_norm(x), self.config.sliding_window, None
        if own.cached is None and takes_columns(x.shape[1], mask, window=window):
            x = x + self._attend_columns(y, mask, tables, dropout)
        else:
            y, cached = self._attend(y, mask, tables, dropout, start, own.cached)
            x = x + y
        y = self.mlp_norm(x)
        y = jax.nn.silu(self.gate(y, dropout())) * self.up(y, dropout())
        y = constrain(y, "act_batch", "act_length", "act_mlp")
        x = constrain(x + self.down(y, dropout()), "act_batch", "act_length", "act_embed")
        return x, cached

    def _attend(
        self,
        x: Float[Array, "b t d"],
        mask: TokenMask,
        tables: tuple[Array, Array],
        dropout: Callable[[], Dropout | None],
        start: Int[Array, ""] | None,
        cached: tuple[Array, Array] | None,
    ) -> tuple[Float[Array, "b t d"], tuple[Array, Array] | None]:
        q, k, v = (
            rearrange(linear(x, dropout()), "b t (h d) -> b t h d", d=self.config.head_dim)
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotate(q, *tables), rotate(k, *tables)
        if cached is not None and start is not None:
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)
                for old, new in zip(cached, (k, v), strict=True)
            )
            cached = k, v
        y = attention(q, k, v, mask=mask, window=self.config.sliding_window)
        return self.o(rearrange(y, "b t h d -> b t (h d)"), dropout()), cached

    def _attend_columns(
        self,
        x: Float[Array, "b t d"],
        mask: TokenMask,
        tables: tuple[Array, Array],
        dropout: Callable[[], Dropout | None],
    ) -> Float[Array, "b t d"]:
        q, k, v = (
            rearrange(
                apart(linear.columns(x, dropout())), "b (h d) t -> b h d t", d=self.config.head_dim
            )
            for linear in (self.q, self.k, self.v)
        )
        q, k = rotate_columns(q, *tables), rotate_columns(k, *tables)
        return self.o.of_heads(columns_attention(q, k, v, mask=mask), dropout())


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

    def _mask(self, tokens: Tokens) -> TokenMask:
        """Who sees whom in a pass without a cache."""
        order, window = tokens.positions, self.config.sliding_window
        if tokens.branches is not None:
            length = order.shape[1]
            if window is not None and length > window:
                raise ValueError(
                    f"branches in a sequence of {length}: at most the {window} of the window"
                )
            order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), order.shape)
        both = tokens.branches, tokens.branches
        blocks = tokens.blocks
        return TokenMask(order, order, tokens.valid, blocks, blocks, *both, static=tokens.static)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        tokens: Tokens,
        cache: KVCache | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "b t d"], KVCache | None]:
        """Hidden states after the final norm, and the cache with these tokens appended.

        `x` are embeddings. The cache must have room for `t` more; what it holds is seen by the new
        tokens, by position. `dropout` is for training: of the low-rank updates' inputs.
        """
        c = self.config
        x = constrain(x.astype(c.dtype), "act_batch", "act_length", "act_embed")
        tables = rotary_tables(tokens.positions, c)
        rate, dropout_keys = 0.0, None
        if dropout is not None and c.lora is not None:
            rate, dropout_keys = dropout.rate, jax.random.split(dropout.key, c.num_hidden_layers)
        if cache is None:
            mask = self._mask(tokens)
            x, _ = self.layers(x, mask, tables, None, rate, per_layer=LayerInput(key=dropout_keys))
            return self.norm(x), None

        if tokens.branches is not None:
            raise ValueError("branches with a cache: expected a pass without one")

        def append(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)

        positions = append(cache.positions, tokens.positions)
        valid = append(cache.valid, tokens.valid)
        blocks = append(cache.blocks, tokens.blocks)
        mask = TokenMask(
            tokens.positions, positions, valid, tokens.blocks, blocks, static=tokens.static
        )
        own = LayerInput((cache.keys, cache.values), dropout_keys)
        x, (keys, values) = self.layers(x, mask, tables, cache.length, rate, per_layer=own)
        length = cache.length + tokens.positions.shape[1]
        return self.norm(x), KVCache(keys, values, positions, valid, blocks, length)

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
        """Scores of the next token, float32."""
        return self.head(hidden).astype(jnp.float32)
