"""A tiny random CLIP of transformers, and its weights in OpenCLIP's names."""

import warnings
from typing import Any

import numpy as np
import pytest

from animegamer_jax.configs import CLIPConfig

TINY = CLIPConfig(
    image_size=24,
    patch_size=8,
    vision_width=32,
    vision_layers=3,
    vision_heads=4,
    text_width=16,
    text_layers=2,
    text_heads=2,
    vocab_size=40,
    context_length=12,
    embed_size=20,
)


def make_transformers_clip(config: CLIPConfig) -> Any:
    """Returns transformers' CLIPModel of these sizes; the last two tokens are start and end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        import transformers

        torch.manual_seed(0)
        common = {"hidden_act": "gelu", "projection_dim": config.embed_size}
        model = transformers.CLIPModel(
            transformers.CLIPConfig(
                vision_config=dict(
                    hidden_size=config.vision_width,
                    intermediate_size=4 * config.vision_width,
                    num_hidden_layers=config.vision_layers,
                    num_attention_heads=config.vision_heads,
                    image_size=config.image_size,
                    patch_size=config.patch_size,
                    **common,
                ),
                text_config=dict(
                    vocab_size=config.vocab_size,
                    hidden_size=config.text_width,
                    intermediate_size=4 * config.text_width,
                    num_hidden_layers=config.text_layers,
                    num_attention_heads=config.text_heads,
                    max_position_embeddings=config.context_length,
                    bos_token_id=config.vocab_size - 2,
                    eos_token_id=config.vocab_size - 1,
                    **common,
                ),
                projection_dim=config.embed_size,
            )
        ).eval()
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.2)
    return model


def openclip_tensors(model: Any, config: CLIPConfig) -> dict[str, np.ndarray]:
    """Returns the weights of a CLIPModel in OpenCLIP's names."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "logit_scale": state["logit_scale"],
        "visual.class_embedding": state["vision_model.embeddings.class_embedding"],
        "visual.conv1.weight": state["vision_model.embeddings.patch_embedding.weight"],
        "visual.positional_embedding": state["vision_model.embeddings.position_embedding.weight"],
        "visual.proj": state["visual_projection.weight"].T,
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "text_projection": state["text_projection.weight"].T,
    }
    for kind in ("weight", "bias"):
        out[f"visual.ln_pre.{kind}"] = state[f"vision_model.pre_layrnorm.{kind}"]
        out[f"visual.ln_post.{kind}"] = state[f"vision_model.post_layernorm.{kind}"]
        out[f"ln_final.{kind}"] = state[f"text_model.final_layer_norm.{kind}"]
        for target, source, layers in (
            ("visual.transformer", "vision_model", config.vision_layers),
            ("transformer", "text_model", config.text_layers),
        ):
            for i in range(layers):
                a, b = f"{target}.resblocks.{i}", f"{source}.encoder.layers.{i}"
                qkv = [state[f"{b}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                out[f"{a}.attn.in_proj_{kind}"] = np.concatenate(qkv)
                out[f"{a}.attn.out_proj.{kind}"] = state[f"{b}.self_attn.out_proj.{kind}"]
                out[f"{a}.ln_1.{kind}"] = state[f"{b}.layer_norm1.{kind}"]
                out[f"{a}.ln_2.{kind}"] = state[f"{b}.layer_norm2.{kind}"]
                out[f"{a}.mlp.c_fc.{kind}"] = state[f"{b}.mlp.fc1.{kind}"]
                out[f"{a}.mlp.c_proj.{kind}"] = state[f"{b}.mlp.fc2.{kind}"]
    return out
