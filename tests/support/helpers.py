"""Tiny, real things that several tests share: configurations, a tokenizer, a bundle."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from random_model import write_model, write_tokenizer

from animegamer_jax.bench.model import random_leaves
from animegamer_jax.configs import (
    CLIPConfig,
    DiTConfig,
    LoRAConfig,
    MistralConfig,
    MLLMConfig,
    ModelConfig,
    ShotEncoderConfig,
    VAEConfig,
)
from animegamer_jax.convert.sources import Source, Tensor
from animegamer_jax.protocol import Protocol

__all__ = ["array_source", "make_bundle", "random_leaves", "tiny_config", "write_tokenizer"]

NUM_TEXT, NUM_IMAGE, WIDTH = 7, 9, 32
NUM_QUERIES = NUM_TEXT + NUM_IMAGE
INSTRUCTIONS = [
    "Character: Qiqi; Motion: quickly flying on broomstick; Background: day sky.",
    "Character: Qiqi; Motion: smoothly fly on broomstick; Background: day countryside.",
    "Motion: gently wave.",
    "Character: Tombo; Motion: gently turn head; Background: day town.",
]


def tiny_config(vocab_size: int) -> ModelConfig:
    """Networks that play in a moment: 9 frames of 16 x 24, of which CLIP sees 12 x 12."""
    return ModelConfig(
        mllm=MLLMConfig(
            mistral=MistralConfig(
                vocab_size=vocab_size,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                lora=LoRAConfig(rank=2, alpha=2.0),
            ),
            num_queries=NUM_QUERIES,
            representation_size=WIDTH,
        ),
        encoder=ShotEncoderConfig(
            num_text_tokens=NUM_TEXT,
            num_image_tokens=NUM_IMAGE,
            text_size=12,
            image_size=20,
            representation_size=WIDTH,
        ),
        dit=DiTConfig(
            hidden_size=WIDTH,
            intermediate_size=64,
            num_layers=2,
            num_attention_heads=2,
            latent_channels=4,
            latent_frames=3,
            latent_height=4,
            latent_width=6,
            num_context_tokens=NUM_QUERIES,
            time_embed_size=16,
            lora=LoRAConfig(rank=2, alpha=1.0),
        ),
        vae=VAEConfig(
            channels=8,
            multipliers=(1, 1, 2),
            num_res_blocks=1,
            latent_channels=4,
            norm_groups=4,
        ),
        clip=CLIPConfig(
            image_size=12,
            patch_size=4,
            vision_width=20,
            vision_layers=2,
            vision_heads=2,
            text_width=8,
            text_layers=0,
            text_heads=2,
            vocab_size=8,
            context_length=4,
            embed_size=8,
        ),
        t5=None,
    )


def make_bundle(path: Path, protocol: Protocol, *, seed: int = 0) -> Path:
    """A whole, random model on disk."""
    return write_model(path, tiny_config(0), protocol, name="tiny", seed=seed)


def array_source(tensors: Mapping[str, np.ndarray]) -> Source:
    """Arrays as if they were read from a file."""
    return Source("arrays", {k: Tensor(v.shape, v.dtype, v.copy) for k, v in tensors.items()})
