"""Mistral-7B: grouped-query attention, rotary positions, sliding window, gated MLP, LoRA.

Source: arXiv 2310.06825. The mask may contain a block whose tokens attend in both directions
(paper, section 3.3). The key-value cache is an argument and a result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from animegamer_jax.configs import MistralConfig
from animegamer_jax.models.kernels.attend import attend, project_heads
from animegamer_jax.models.kernels.masks import StaticMask, TokenMask
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Dropout, Linear
from animegamer_jax.models.norms import RMSNorm
from animegamer_jax.sharding import axes, constrain


class KVCache(NamedTuple):
    """Keys and values of the tokens so far: `l` layers, a fixed number `s` of slots."""

    keys: Float[Array, "l b g s d"]
    values: Float[Array, "l b g s d"]
    positions: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    blocks: Int[Array, "b s"]
    length: Int[Array, ""]


class Tokens(NamedTuple):
    """Positions and masks of a batch of tokens; block 0 is no block (`TokenMask`).

    `segments` are those of a packed sequence. Segment 0 is the shared history; every other segment
    continues it, with positions of its own. A packed sequence needs a pass without a cache, in
    which the sliding window has no effect. A token then sees only tokens before it in the sequence,
    whatever their positions.

    `static` is the same mask by slots, for a sequence from the first slot on (`TokenMask`); None
    if positions or blocks differ between the sequences.
    """

    positions: Int[Array, "b t"]
    valid: Bool[Array, "b t"]
    blocks: Int[Array, "b t"]
    segments: Int[Array, "b t"] | None = None
    static: StaticMask | None = None


class LayerInput(NamedTuple):
    """The inputs that each layer gets for itself: its cached keys and values, its dropout key."""

    cached: tuple[Float[Array, "..."], Float[Array, "..."]] | None = None
    key: Key[Array, "..."] | None = None


def make_cache(config: MistralConfig, batch: int, slots: int) -> KVCache:
    """Returns an empty cache."""
    c = config
    shape = (c.num_hidden_layers, batch, c.num_key_value_heads, slots, c.head_dim)
    empty, zeros = jnp.zeros((batch, slots), jnp.int32), jnp.zeros(shape, c.dtype)
    return KVCache(zeros, zeros, empty, empty.astype(bool), empty, jnp.zeros((), jnp.int32))


def rotary_frequencies(head_dim: int, theta: float) -> Float[np.ndarray, " f"]:
    """Returns 1 / theta^(2i / d), float32, as PyTorch's code for Mistral computes them.

    In its order, `1 / theta ** (arange(0, d, 2) / d)`, every operation rounded to float32. Another
    order is one unit in the last place away at some frequencies, and positions multiply that.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = theta ** exponents.astype(np.float64)  # numpy's own float32 power is less exact
    return np.float32(1) / powers.astype(np.float32)


def rotary_tables(
    positions: Int[Array, "b t"], config: MistralConfig
) -> tuple[Float[Array, "b 1 t f"], Float[Array, "b 1 t f"]]:
    """Returns cosines and sines of positions times frequencies, float32.

    They are rounded to `config.rotary_dtype` (docs/decisions/rotary-tables.md) by
    `reduce_precision`, which a compiler may not undo as it may a pair of casts.
    """
    frequencies = jnp.asarray(rotary_frequencies(config.head_dim, config.rope_theta))
    angles = positions.astype(jnp.float32)[:, None, :, None] * frequencies[None, None, None]
    info = jnp.finfo(config.rotary_dtype)
    cos, sin = (
        jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        for x in (jnp.cos(angles), jnp.sin(angles))
    )
    return cos, sin


def rotate(
    x: Float[Array, "b h t d"], cos: Float[Array, "b 1 t f"], sin: Float[Array, "b 1 t f"]
) -> Float[Array, "b h t d"]:
    """Rotates the feature pairs (i, i + d/2) in float32."""
    a, b = (half.astype(jnp.float32) for half in jnp.split(x, 2, axis=-1))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """One layer: a norm before attention and one before the gated MLP; no biases."""

    def __init__(self, config: MistralConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        heads = c.num_attention_heads * c.head_dim
        kv_heads = c.num_key_value_heads * c.head_dim

        def linear(i: int, o: int, *names: str, gain: float = 1.0) -> Linear:
            return Linear(
                i, o, names=names, config=c, use_bias=False, lora=c.lora, rngs=rngs, gain=gain
            )

        # Of new weights: the sum over all layers has the variance of the embeddings.
        share = (2 * c.num_hidden_layers) ** -0.5

        self.attention_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, config=c, rngs=rngs)
        self.q = linear(c.hidden_size, heads, "embed", "heads")
        self.k = linear(c.hidden_size, kv_heads, "embed", "kv_heads")
        self.v = linear(c.hidden_size, kv_heads, "embed", "kv_heads")
        self.o = linear(heads, c.hidden_size, "heads", "embed", gain=share)
        self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, config=c, rngs=rngs)
        self.gate = linear(c.hidden_size, c.intermediate_size, "embed", "mlp")
        self.up = linear(c.hidden_size, c.intermediate_size, "embed", "mlp")
        self.down = linear(c.intermediate_size, c.hidden_size, "mlp", "embed", gain=share)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        mask: TokenMask,
        tables: tuple[Array, Array],
        start: Int[Array, ""] | None,
        rate: float,
        keep: bool,
        own: LayerInput,
    ) -> tuple[Float[Array, "b t d"], tuple[Array, Array] | Float[Array, "b t d"] | None]:
        """Runs the layer.

        Returns x, and what the stack of layers collects: with a cache, its keys and values
        including these tokens; otherwise x again if it is to be kept.

        Args:
            x: Hidden states.
            mask: Which token sees which.
            tables: Rotary cosines and sines of these tokens (`rotary_tables`).
            start: Slot of the first token in the cache.
            rate: Dropout rate of the low-rank updates' inputs, where the layer has a key.
            keep: Whether to return x again, without a cache.
            own: This layer's part of the cache, and its dropout key.
        """
        c = self.config
        keys = None if own.key is None else iter(jax.random.split(own.key, 7))

        def dropout() -> Dropout | None:
            return None if keys is None else Dropout(next(keys), rate)

        y = self.attention_norm(x)
        maps = [linear.map(dropout()) for linear in (self.q, self.k, self.v)]
        q, k, v = project_heads(y, maps, head_size=c.head_dim, mask=mask, window=c.sliding_window)
        q, k = rotate(q, *tables), rotate(k, *tables)
        cached = None
        if own.cached is not None and start is not None:

            def append(old: jax.Array, new: jax.Array) -> jax.Array:
                new = new.astype(old.dtype)
                return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=2)

            k, v = cached = append(own.cached[0], k), append(own.cached[1], v)
        x += attend(q, k, v, self.o, mask=mask, window=c.sliding_window, dropout=dropout())
        y = self.mlp_norm(x)
        y = jax.nn.silu(self.gate(y, dropout())) * self.up(y, dropout())
        y = constrain(y, "act_batch", "act_length", "act_mlp")
        x = constrain(x + self.down(y, dropout()), "act_batch", "act_length", "act_embed")
        return x, x if keep else cached


class Mistral(nnx.Module):
    """Token embedding, layers, final norm, output head."""

    def __init__(self, config: MistralConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        shape, dtype = (c.vocab_size, c.hidden_size), jnp.dtype(c.param_dtype)
        init = nnx.initializers.normal(1.0)
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
        """Returns the embeddings of the tokens."""
        return self.embedding[...][ids].astype(self.config.dtype)

    def _mask(self, tokens: Tokens) -> TokenMask:
        """Returns the mask of a pass without a cache."""
        order, window = tokens.positions, self.config.sliding_window
        if tokens.segments is not None:
            length = order.shape[1]
            if window is not None and length > window:
                raise ValueError(
                    f"a packed sequence of {length} tokens is longer than the sliding window of "
                    f"{window}: shorten it"
                )
            order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), order.shape)
        both = tokens.segments, tokens.segments
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
        """Returns hidden states after the final norm, and the cache with these tokens appended.

        Args:
            x: Embeddings.
            tokens: Positions and masks of the tokens.
            cache: Earlier tokens, which the new ones see by position; with room for `t` more.
            dropout: Dropout of the low-rank updates' inputs, for training.

        Raises:
            ValueError: A packed sequence with a cache, or one longer than the sliding window.
        """
        if cache is None:
            return self._run(x, tokens, dropout, keep=False)[0], None
        x, tables, rate, dropout_keys = self._prepare(x, tokens, dropout)
        if tokens.segments is not None:
            raise ValueError("packed sequences cannot use a cache: run without one")

        def append(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)

        positions = append(cache.positions, tokens.positions)
        valid = append(cache.valid, tokens.valid)
        blocks = append(cache.blocks, tokens.blocks)
        mask = TokenMask(
            tokens.positions, positions, valid, tokens.blocks, blocks, static=tokens.static
        )
        own = LayerInput((cache.keys, cache.values), dropout_keys)
        x, (keys, values) = self.layers(x, mask, tables, cache.length, rate, False, per_layer=own)
        length = cache.length + tokens.positions.shape[1]
        return self.norm(x), KVCache(keys, values, positions, valid, blocks, length)

    def run_layers(
        self, x: Float[Array, "b t d"], tokens: Tokens, *, dropout: Dropout | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "l b t d"]]:
        """Returns hidden states after the final norm, and those after each layer, without a cache.

        Arguments and errors are those of a call.
        """
        hidden, each = self._run(x, tokens, dropout, keep=True)
        assert each is not None
        return hidden, each

    def run_first_layers(
        self, x: Float[Array, "b t d"], tokens: Tokens, *, num_layers: int
    ) -> Float[Array, "b t d"]:
        """Returns hidden states after the first `num_layers` layers, without a cache or a norm."""
        x, tables, rate, _ = self._prepare(x, tokens, None)
        layers = self.layers.first(num_layers)
        return layers(x, self._mask(tokens), tables, None, rate, False, per_layer=LayerInput())[0]

    def _run(
        self, x: Float[Array, "b t d"], tokens: Tokens, dropout: Dropout | None, *, keep: bool
    ) -> tuple[Float[Array, "b t d"], Float[Array, "l b t d"] | None]:
        mask = self._mask(tokens)
        x, tables, rate, keys = self._prepare(x, tokens, dropout)
        x, each = self.layers(x, mask, tables, None, rate, keep, per_layer=LayerInput(key=keys))
        return self.norm(x), each

    def _prepare(
        self, x: Float[Array, "b t d"], tokens: Tokens, dropout: Dropout | None
    ) -> tuple[Array, tuple[Array, Array], float, Array | None]:
        """Returns embeddings, rotary tables, and the rate and keys of dropout for the layers."""
        c = self.config
        x = constrain(x.astype(c.dtype), "act_batch", "act_length", "act_embed")
        tables = rotary_tables(tokens.positions, c)
        if dropout is None or c.lora is None:
            return x, tables, 0.0, None
        return x, tables, dropout.rate, jax.random.split(dropout.key, c.num_hidden_layers)

    def logits(self, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
        """Returns the scores of the next token, float32."""
        return self.head(hidden).astype(jnp.float32)
