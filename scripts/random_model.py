"""Writes a complete model of random weights, to try play without trained ones.

    python scripts/random_model.py out/random [--size toy]

Its clips are noise and its states mean nothing, but files, shapes and speed are those of a trained
model. The tokenizer reads single bytes and knows the game's special tokens.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from animegamer_jax.bundle.bundle import BundleWriter, NetworkName, abstract_params
from animegamer_jax.configs import SIZES, ModelConfig, NetworkConfig
from animegamer_jax.protocol import PAPER, SPECIAL_TOKENS, Protocol


def write_tokenizer(folder: Path) -> int:
    """Writes a tokenizer of single bytes with the game's special tokens; returns its size."""
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


def random_leaves(
    name: NetworkName, config: NetworkConfig, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a value for every parameter of a network, without compiling anything.

    Scales are near one and all other values small and not zero, so that no zero or one hides a bug.
    """
    random = np.random.default_rng(seed)
    for path, leaf in abstract_params(name, config).items():
        fan_in = np.prod(leaf.shape[:-1] if name == "vae" else leaf.shape[-2:-1])
        value = random.normal(size=leaf.shape) * (fan_in**-0.5 if leaf.ndim > 1 else 0.1)
        yield path, (value + path.endswith("scale")).astype(np.float32)


def write_model(
    path: Path, config: ModelConfig, protocol: Protocol, *, name: str, seed: int = 0
) -> Path:
    """Writes a bundle of the networks that play; the vocabulary is the tokenizer's."""
    assert config.mllm is not None
    tokenizer = path.parent / f"{path.name}-tokenizer"
    mistral = dataclasses.replace(config.mllm.mistral, vocab_size=write_tokenizer(tokenizer))
    config = dataclasses.replace(config, mllm=dataclasses.replace(config.mllm, mistral=mistral))
    with BundleWriter(path, name=name, protocol=protocol) as writer:
        for network in ("mllm", "encoder", "dit", "vae"):
            size = getattr(config, network)
            writer.write_network(network, size, random_leaves(network, size, seed))
        writer.write_tokenizer(tokenizer)
    return path


def main(out: Path, /, *, size: Literal["toy", "full"] = "toy", seed: int = 0) -> None:
    """Write a model of random weights.

    Args:
        out: Folder to write.
        size: Size of the networks; `full` takes 37 GB.
        seed: Seed of the weights.
    """
    # Single bytes take more tokens than the words of a real tokenizer.
    protocol = dataclasses.replace(PAPER, caption_length=96)
    write_model(out, SIZES[size](), protocol, name=f"random {size}", seed=seed)
    print(f"{out}: a {size} model of random weights: play it with animegamer play --model {out}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
