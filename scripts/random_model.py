"""Writes a model of random weights, to try the way from instruction to frames without a real one.

    python scripts/random_model.py out/random [--size toy]

Its clips are noise and its states mean nothing; files, shapes and speed are the real ones. The
tokenizer reads single bytes and has the game's special tokens.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import tokenizers

from animegamer_jax.bench.model import write_random
from animegamer_jax.configs import SIZES, ModelConfig
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


def write_model(
    path: Path, config: ModelConfig, protocol: Protocol, *, name: str, seed: int = 0
) -> Path:
    """Writes a bundle of the networks that play; the vocabulary is the tokenizer's."""
    tokenizer = path.parent / f"{path.name}-tokenizer"
    size = write_tokenizer(tokenizer)
    return write_random(
        path,
        config,
        name=name,
        protocol=protocol,
        tokenizer=tokenizer,
        vocab_size=size,
        seed=seed,
    )


def main(out: Path, /, *, size: Literal["toy", "full"] = "toy", seed: int = 0) -> None:
    """Write a model of random weights.

    Args:
        out: Folder to write to.
        size: Size of the networks; `full` takes 37 GB.
        seed: Seed of the weights.
    """
    # Single bytes need more places than the words of a real tokenizer.
    protocol = dataclasses.replace(PAPER, caption_length=96)
    write_model(out, SIZES[size](), protocol, name=f"random {size}", seed=seed)
    print(f"{out}: a {size} model of random weights; animegamer play --model {out}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
