"""transformers' tensor names of the T5 v1.1 encoder."""

import re
from collections.abc import Mapping

from animegamer_jax.configs import T5Config
from animegamer_jax.convert.rules import TRANSPOSE, Rule
from animegamer_jax.convert.tables.layers import shape_of

_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"
_GATE = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"


def rules(config: T5Config) -> tuple[Rule, ...]:
    """Returns the table of `T5EncoderModel`'s state dict."""
    del config  # the names are the same at every size

    def layer(source: str, target: str) -> Rule:
        source = f"encoder.block.{{layer}}.layer.{source}.weight"
        return Rule(source, f"layers.blocks.{target}.kernel", TRANSPOSE)

    return (
        Rule("shared.weight", "embedding"),
        Rule("encoder.embed_tokens.weight", None, copy_of="shared.weight"),
        Rule(_BIAS, "relative_bias"),
        Rule(
            "encoder.block.{layer}.layer.0.layer_norm.weight", "layers.blocks.attention_norm.scale"
        ),
        layer("0.SelfAttention.q", "query"),
        layer("0.SelfAttention.k", "key"),
        layer("0.SelfAttention.v", "value"),
        layer("0.SelfAttention.o", "out"),
        Rule("encoder.block.{layer}.layer.1.layer_norm.weight", "layers.blocks.mlp_norm.scale"),
        layer("1.DenseReluDense.wi_0", "gate"),
        layer("1.DenseReluDense.wi_1", "up"),
        layer("1.DenseReluDense.wo", "down"),
        Rule("encoder.final_layer_norm.weight", "final_norm.scale"),
    )


def infer_config(shapes: Mapping[str, tuple[int, ...]]) -> T5Config:
    """Returns the sizes that a state dict's shapes imply; the rest is as in T5 v1.1.

    Raises:
        UserError: A tensor that gives a size is missing, or is not that of a T5 v1.1.
    """
    names = ("shared.weight", _BIAS, _QUERY, _GATE)
    embedding, bias, query, gate = (
        shape_of(shapes, name, rank=2, model="the encoder of a T5 v1.1") for name in names
    )
    numbers = [re.match(r"encoder\.block\.(\d+)\.", name) for name in shapes]
    return T5Config(
        vocab_size=embedding[0],
        d_model=embedding[1],
        d_kv=query[0] // bias[1],
        d_ff=gate[0],
        num_layers=1 + max(int(number[1]) for number in numbers if number),
        num_heads=bias[1],
        relative_attention_num_buckets=bias[0],
    )
