"""The diffusion transformer in the released decoder file (names after `model.diffusion_model.`).

It is a file of SwissArmyTransformer: fused query-key-value, LoRA as `original` with `matrix_A` and
`matrix_B` (three pairs for the fused projection), alpha 1.
"""

from collections.abc import Mapping

from animegamer_jax.configs import DiTConfig, LoRAConfig
from animegamer_jax.convert.rules import QKV, QKV_BIAS, TRANSPOSE, Rule, Transform
from animegamer_jax.convert.tables.layers import norm, weight_and_bias

_LAYER = "transformer.layers.{layer}."
_ADALN = "mixins.adaln_layer."


def _patch_embedding(patch: int) -> Transform:
    """Returns the transform of a convolution [width, c, p, q] to a linear map [(p q c), width]."""
    return Transform(
        lambda x: x.transpose(2, 3, 1, 0).reshape(-1, x.shape[0]),
        lambda x: x.reshape(patch, patch, -1, x.shape[1]).transpose(3, 2, 0, 1),
    )


POSITIONS = Transform(lambda x: x[0], lambda x: x[None])  # [1, t, d] -> [t, d]


def rules(config: DiTConfig) -> tuple[Rule, ...]:
    """Returns the table, with LoRA if the configuration has it."""
    blocks = "layers.blocks."
    qkv, dense = f"{_LAYER}attention.query_key_value", f"{_LAYER}attention.dense"
    inner = ".original" if config.lora else ""
    table = [
        Rule("mixins.pos_embed.pos_embedding", "positions", POSITIONS),
        *weight_and_bias(
            "mixins.patch_embed.proj", "patch_in", _patch_embedding(config.patch_size)
        ),
        *weight_and_bias("time_embed.0", "time_embed.input"),
        *weight_and_bias("time_embed.2", "time_embed.output"),
        *weight_and_bias("flow_embed.0", "motion_embed.input"),
        *weight_and_bias("flow_embed.2", "motion_embed.output"),
        *weight_and_bias(f"{_ADALN}adaLN_modulations.{{layer}}.1", f"{blocks}modulation"),
        *norm(f"{_ADALN}query_layernorm_list.{{layer}}", f"{blocks}query_norm"),
        *norm(f"{_ADALN}key_layernorm_list.{{layer}}", f"{blocks}key_norm"),
        *norm(f"{_LAYER}input_layernorm", f"{blocks}attention_norm"),
        *norm(f"{_LAYER}post_attention_layernorm", f"{blocks}mlp_norm"),
        Rule(f"{qkv}{inner}.weight", f"{blocks}qkv.kernel", QKV),
        Rule(f"{qkv}{inner}.bias", f"{blocks}qkv.bias", QKV_BIAS),
        *weight_and_bias(f"{dense}{inner}", f"{blocks}out"),
        *weight_and_bias(f"{_LAYER}mlp.dense_h_to_4h", f"{blocks}mlp_in"),
        *weight_and_bias(f"{_LAYER}mlp.dense_4h_to_h", f"{blocks}mlp_out"),
        *norm("transformer.final_layernorm", "final_norm"),
        *norm("mixins.final_layer.norm_final", "output_norm"),
        *weight_and_bias("mixins.final_layer.adaLN_modulation.1", "output_modulation"),
        *weight_and_bias("mixins.final_layer.linear", "patch_out"),
    ]
    if config.lora:
        for letter in "AB":
            target = f"lora_{letter.lower()}"
            table += [
                Rule(f"{qkv}.matrix_{letter}.{{part}}", f"{blocks}qkv.{target}", TRANSPOSE),
                Rule(f"{dense}.matrix_{letter}.0", f"{blocks}out.{target}", TRANSPOSE),
            ]
    return tuple(table)


def infer_config(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    latent_height: int = 60,
    latent_width: int = 90,
    num_context_tokens: int = 226,
) -> DiTConfig:
    """Returns the configuration that the shapes imply, given the frame's height and width.

    Raises:
        ValueError: The frame is not a whole number of patches, or the position table is not a
            whole number of such frames.
    """
    width, channels, patch, _ = shapes["mixins.patch_embed.proj.weight"]
    head = shapes[f"{_ADALN}query_layernorm_list.0.weight"][0]
    layers = sum(
        name.endswith(".input_layernorm.weight") and name.startswith("transformer.layers.")
        for name in shapes
    )
    if min(latent_height, latent_width) < patch or latent_height % patch or latent_width % patch:
        raise ValueError(
            f"latents of {latent_height} x {latent_width}: expected multiples of the {patch} rows "
            "and columns of a patch"
        )
    per_frame = (latent_height // patch) * (latent_width // patch)
    patches = shapes["mixins.pos_embed.pos_embedding"][1] - num_context_tokens
    if patches < per_frame or patches % per_frame:
        raise ValueError(
            f"the position table holds {patches} patches, not a whole number of frames of "
            f"{latent_height} x {latent_width} latents with patches of {patch}"
        )
    a = shapes.get("transformer.layers.0.attention.dense.matrix_A.0")
    return DiTConfig(
        hidden_size=width,
        intermediate_size=shapes["transformer.layers.0.mlp.dense_h_to_4h.weight"][0],
        num_layers=layers,
        num_attention_heads=width // head,
        patch_size=patch,
        latent_channels=channels,
        latent_frames=patches // per_frame,
        latent_height=latent_height,
        latent_width=latent_width,
        num_context_tokens=num_context_tokens,
        time_embed_size=shapes["time_embed.0.weight"][0],
        lora=LoRAConfig(rank=a[0], alpha=1.0) if a else None,
    )
