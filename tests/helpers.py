"""Tiny, real things that several tests share: configurations, a tokenizer, a bundle."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tokenizers

from animegamer_jax.bundle import BundleWriter, NetworkName, abstract_params
from animegamer_jax.configs import (
    DiTConfig,
    LoRAConfig,
    MistralConfig,
    MLLMConfig,
    ModelConfig,
    NetworkConfig,
    ShotEncoderConfig,
    VAEConfig,
)
from animegamer_jax.convert.sources import Source, Tensor
from animegamer_jax.protocol import SPECIAL_TOKENS, Protocol

NUM_TEXT, NUM_IMAGE, WIDTH = 6, 10, 32
NUM_QUERIES = NUM_TEXT + NUM_IMAGE


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of single bytes with the game's special tokens; returns its size."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    frames = [f"<frame_{i:05d}>" for i in range(256)]
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *frames, *SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def tiny_config(vocab_size: int) -> ModelConfig:
    """Networks that play in a moment: 9 frames of 16 x 24."""
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
        clip=None,
        t5=None,
    )


def random_leaves(
    name: NetworkName, config: NetworkConfig, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Values for every parameter of a network, made without compiling anything.

    Scales are near one and everything else is small and not zero, so that no zero or one hides a
    mistake.
    """
    random = np.random.default_rng(seed)
    for path, leaf in abstract_params(name, config).items():
        fan_in = np.prod(leaf.shape[:-1] if name == "vae" else leaf.shape[-2:-1])
        value = random.normal(size=leaf.shape) * (fan_in**-0.5 if leaf.ndim > 1 else 0.1)
        yield path, (value + path.endswith("scale")).astype(np.float32)


def make_bundle(path: Path, protocol: Protocol, *, seed: int = 0) -> Path:
    """A whole, random model on disk."""
    tokenizer = path.parent / f"{path.name}-tokenizer"
    config = tiny_config(write_tokenizer(tokenizer))
    with BundleWriter(path, name="tiny", protocol=protocol) as writer:
        for name in ("mllm", "encoder", "dit", "vae"):
            network = getattr(config, name)
            writer.write_network(name, network, random_leaves(name, network, seed))
        writer.write_tokenizer(tokenizer)
    return path


def array_source(tensors: Mapping[str, np.ndarray]) -> Source:
    """Arrays as if they were read from a file."""
    return Source("arrays", {k: Tensor(v.shape, v.dtype, v.copy) for k, v in tensors.items()})
