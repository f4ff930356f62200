"""The encoder of T5 v1.1, which reads the motion text of a shot (paper, section 3.1, f_md).

Training, data preparation and players' own pictures need it; playing otherwise does not. Source:
the published T5 v1.1 (arXiv 2002.05202 for the gated feed-forward). Tests compare it with
transformers' `T5EncoderModel`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from animegamer_jax.configs import T5Config
from animegamer_jax.models.kernels.attend import attend, project_heads
from animegamer_jax.models.kernels.masks import TokenMask
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Linear
from animegamer_jax.models.norms import RMSNorm
from animegamer_jax.sharding import axes, constrain


def relative_position_buckets(
    num_tokens: int, *, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "t t"]:
    """Returns the bucket of each (query, key) pair: half of them are for later keys.

    In each half, the first half of the buckets are single distances. The others grow with the
    logarithm of the distance up to `max_distance`; all larger distances share the last bucket.
    """
    positions = np.arange(num_tokens)
    offset = positions[None, :] - positions[:, None]
    half = num_buckets // 2
    exact = half // 2
    distance = np.abs(offset)
    # float32 as in the published code: the edges of the buckets depend on the rounding.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(np.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + steps.astype(np.int64), half - 1)
    return np.where(distance < exact, distance, far) + half * (offset > 0)


class T5Block(nnx.Module):
    """Self-attention and a gated feed-forward, each after an RMS norm; no biases."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.head_size = config.d_kv
        inner = config.num_heads * config.d_kv

        def norm() -> RMSNorm:
            return RMSNorm(config.d_model, eps=config.layer_norm_epsilon, config=config, rngs=rngs)

        def linear(in_features: int, out_features: int, *names: str) -> Linear:
            return Linear(
                in_features, out_features, names=names, config=config, use_bias=False, rngs=rngs
            )

        self.attention_norm = norm()
        self.query = linear(config.d_model, inner, "embed", "heads")
        self.key = linear(config.d_model, inner, "embed", "heads")
        self.value = linear(config.d_model, inner, "embed", "heads")
        self.out = linear(inner, config.d_model, "heads", "embed")
        self.mlp_norm = norm()
        self.gate = linear(config.d_model, config.d_ff, "embed", "mlp")
        self.up = linear(config.d_model, config.d_ff, "embed", "mlp")
        self.down = linear(config.d_ff, config.d_model, "mlp", "embed")

    def __call__(
        self, x: Float[Array, "b t d"], bias: Float[Array, "h t t"], mask: TokenMask | None
    ) -> Float[Array, "b t d"]:
        maps = [linear.map() for linear in (self.query, self.key, self.value)]
        q, k, v = project_heads(self.attention_norm(x), maps, head_size=self.head_size, mask=mask)
        # T5 folds 1 / sqrt(d) into its initialisation: the scores are not scaled.
        x += attend(q, k, v, self.out, mask=mask, bias=bias, scale=1.0)
        y = self.mlp_norm(x)
        y = jax.nn.gelu(self.gate(y), approximate=True) * self.up(y)
        return constrain(x + self.down(y), "act_batch", None, "act_embed")


class T5Encoder(nnx.Module):
    """Encodes token ids as the last hidden state, after the final norm."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        dtype = jnp.dtype(config.param_dtype)
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), dtype),
            **axes("vocab", "embed"),
        )
        # One table for all layers.
        shape = (config.relative_attention_num_buckets, config.num_heads)
        self.relative_bias = nnx.Param(
            jax.random.normal(rngs.params(), shape, dtype) * config.d_model**-0.5,
            **axes("buckets", "heads"),
        )
        self.layers = LayerStack(
            lambda rngs: T5Block(config, rngs=rngs), config.num_layers, config=config, rngs=rngs
        )
        self.final_norm = RMSNorm(
            config.d_model, eps=config.layer_norm_epsilon, config=config, rngs=rngs
        )

    def __call__(
        self, tokens: Int[Array, "b t"], valid: Bool[Array, "b t"] | None = None
    ) -> Float[Array, "b t d"]:
        """Returns features of each token, of width `d_model`.

        Args:
            tokens: Ids of the T5 tokenizer; padding is id 0.
            valid: Which tokens may be attended to; all if None. AnimeGamer pads to 30 tokens and
                passes None, so the padding takes part and its features belong to the condition.
        """
        config = self.config
        buckets = relative_position_buckets(
            tokens.shape[1],
            num_buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
        )
        bias = jnp.moveaxis(self.relative_bias[...][buckets], -1, 0)
        mask = None
        if valid is not None:
            # All tokens at one position: every query sees every valid key.
            zeros = jnp.zeros(tokens.shape, jnp.int32)
            mask = TokenMask(zeros, zeros, valid, zeros, zeros)
        x = self.embedding[...].astype(config.dtype)[tokens]
        x = constrain(x, "act_batch", None, "act_embed")
        x, _ = self.layers(x, bias, mask)
        return self.final_norm(x)
