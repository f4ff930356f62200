"""The released agent file (PEFT names) and a plain Mistral folder (Hugging Face names)."""

import typing
from collections.abc import Mapping
from typing import Any

from animegamer_jax.configs import Dtype, LoRAConfig, MistralConfig, MLLMConfig
from animegamer_jax.convert.rules import TRANSPOSE, Rule
from animegamer_jax.convert.tables.layers import weight_and_bias

_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_BLOCKS = "mistral.layers.blocks."
AGENT_PREFIX = "llm.base_model.model."
_LAYER = "model.layers.{layer}."


def rules(config: MLLMConfig) -> tuple[Rule, ...]:
    """Returns the agent's table: PEFT's LoRA and saved modules, or plain names without LoRA."""
    table = _mistral_rules(AGENT_PREFIX, lora=config.mistral.lora is not None)
    for resampler in ("input_resampler", "output_resampler"):
        for index, layer in ((0, "input"), (2, "output")):
            table += weight_and_bias(f"{resampler}.proj.{index}", f"{resampler}.{layer}")
    return tuple(table)


def mistral_rules() -> tuple[Rule, ...]:
    """Returns the table of a plain Mistral folder: linear layers, norms and embeddings."""
    return tuple(_mistral_rules("", lora=False))


def _mistral_rules(prefix: str, *, lora: bool) -> list[Rule]:
    table = [
        Rule(f"{prefix}model.embed_tokens.weight", "mistral.embedding"),
        Rule(f"{prefix}lm_head.weight", "mistral.head.kernel", TRANSPOSE),
    ]
    norms = {f"{_LAYER}{source}": f"{_BLOCKS}{target}" for source, target in _NORMS.items()}
    for source, target in (norms | {"model.norm": "mistral.norm"}).items():
        name = f"{prefix}{source}"
        if not lora:
            table.append(Rule(f"{name}.weight", f"{target}.scale"))
            continue
        trained = f"{name}.modules_to_save.default.weight"
        table.append(Rule(trained, f"{target}.scale"))
        table.append(Rule(f"{name}.original_module.weight", None, copy_of=trained))
    for source, target in _LINEARS.items():
        name, layer = f"{prefix}{_LAYER}{source}", f"{_BLOCKS}{target}"
        frozen = f"{name}.base_layer.weight" if lora else f"{name}.weight"
        table.append(Rule(frozen, f"{layer}.kernel", TRANSPOSE))
        for part in "AB" if lora else "":
            update = f"{name}.lora_{part}.default.weight"
            table.append(Rule(update, f"{layer}.lora_{part.lower()}", TRANSPOSE))
    return table


def infer_config(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    base: Mapping[str, Any],
    num_queries: int = 226,
    lora_alpha: float | None = None,
) -> MLLMConfig:
    """Returns the agent's sizes; heads and constants are those of the base's `config.json`.

    Args:
        shapes: Shapes of the agent's tensors.
        base: Content of the base model's `config.json`.
        num_queries: Number of learned queries.
        lora_alpha: Alpha of the low-rank updates; None: the rank, for the release's scale of 1.

    Raises:
        ValueError: Networks cannot compute in the base model's number format.
    """
    vocab, hidden = shapes[f"{AGENT_PREFIX}model.embed_tokens.weight"]
    layer = f"{AGENT_PREFIX}model.layers.0."
    a = shapes.get(f"{layer}self_attn.q_proj.lora_A.default.weight")
    heads = base["num_attention_heads"]
    dtype = base.get("torch_dtype") or base.get("dtype") or "float32"
    if dtype not in typing.get_args(Dtype):
        known = ", ".join(typing.get_args(Dtype))
        raise ValueError(f"config.json: torch_dtype {dtype!r}: expected one of {known}")
    rotary = base.get("rope_parameters") or {}  # newer files have rope_theta there
    mistral = MistralConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=base["intermediate_size"],
        num_hidden_layers=base["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=base.get("num_key_value_heads") or heads,
        head_dim=base.get("head_dim") or hidden // heads,
        rms_norm_eps=base.get("rms_norm_eps", 1e-6),
        rope_theta=base.get("rope_theta") or rotary.get("rope_theta") or 10_000.0,
        sliding_window=base.get("sliding_window"),
        rotary_dtype=dtype,
        lora=LoRAConfig(rank=a[0], alpha=float(lora_alpha or a[0])) if a else None,
    )
    size = shapes["input_resampler.proj.0.weight"][1]
    return MLLMConfig(mistral=mistral, num_queries=num_queries, representation_size=size)
