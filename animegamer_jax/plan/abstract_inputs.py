"""Inputs of a stage that is planned: networks without weights, a dataset of zeros, a tokenizer.

The shapes of a batch then come from the code that reads real data.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from animegamer_jax.bundle.bundle import Bundle, abstract_network
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.configs import ModelConfig
from animegamer_jax.data.datasets import (
    FeatureInfo,
    Record,
    SetInfo,
    write_set,
)
from animegamer_jax.media.motion import PAPER_EDGES
from animegamer_jax.protocol import Protocol
from animegamer_jax.tokenizer import write_word_tokenizer

_WORDS = ("character", "motion", "background", "mika", "walking", "the", "beach", "day")


class AbstractBundle(Bundle):
    """A bundle whose networks have shapes but no weights."""

    def __init__(self, config: ModelConfig, protocol: Protocol, *, tokenizer: Path):
        self._config, self._protocol, self._tokenizer = config, protocol, tokenizer
        self.path = tokenizer.parent  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return "abstract"

    @property
    def protocol(self) -> Protocol:
        return self._protocol

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer_dir(self) -> Path:
        return self._tokenizer

    def load(self, name: Any, *, mesh: Any = None, rules: Any = None, **formats: Any) -> Any:
        """Returns a network of shapes only."""
        del mesh, rules
        return abstract_network(name, with_dtypes(getattr(self._config, name), **formats))


def write_tokenizer(folder: Path, config: ModelConfig) -> Path:
    """Writes a tokenizer of the model's vocabulary size: the game's tokens and made-up words."""
    assert config.mllm is not None
    tokenizer, count = folder / "tokenizer", config.mllm.num_queries
    smallest = write_word_tokenizer(tokenizer, _WORDS, num_frame_tokens=count)
    others = [f"word{number}" for number in range(config.mllm.mistral.vocab_size - smallest)]
    write_word_tokenizer(tokenizer, (*_WORDS, *others), num_frame_tokens=count)
    return tokenizer


def write_features(folder: Path, config: ModelConfig, protocol: Protocol) -> Path:
    """Writes a features set with one game of the window's length in each split, all zeros."""
    encoder, dit, vae, t5, clip = (
        getattr(config, name) for name in ("encoder", "dit", "vae", "t5", "clip")
    )
    moments = (dit.latent_frames, dit.latent_height, dit.latent_width, 2 * vae.latent_channels)
    info = SetInfo(
        kind="features",
        made_by="animegamer plan",
        seed=None,
        num_frames=1 + (dit.latent_frames - 1) * vae.temporal_compression,
        height=dit.latent_height * vae.spatial_compression,
        width=dit.latent_width * vae.spatial_compression,
        fps=8,
        protocol=protocol,
        motion_edges=PAPER_EDGES,
        splits={},
        features=FeatureInfo(
            bundle="abstract",
            games="none",
            frame="first",
            text=(encoder.num_text_tokens, encoder.text_size),
            image=(encoder.num_image_tokens, encoder.image_size),
            moments=moments,
            t5=t5,
            clip=clip,
            vae=vae,
        ),
    )

    def positions() -> Iterator[Record]:
        for turn in range(protocol.window):
            yield {"game": 0, "turn": turn, "num_turns": protocol.window}

    def conditions() -> Iterator[Record]:
        assert info.features
        for position in positions():
            yield {
                **position,
                "film": "none",
                "instruction": "Character: Mika; Motion: walking; Background: day the beach.",
                "is_open": 0,
                "motion_text": "walking",
                "captions": ["Mika"],
                "character": "Mika",
                "motion": "walking",
                "place": "the beach",
                "time": "day",
                "motion_level": protocol.motion_levels[0],
                "motion_value": 0.0,
                "social": 0,
                "entertainment": 0,
                "stamina": protocol.stamina[0],
                "text_features": np.zeros(info.features.text, np.float16),
                "image_features": np.zeros(info.features.image, np.float16),
            }

    def latents() -> Iterator[Record]:
        for position in positions():
            yield {**position, "moments": np.zeros(moments, np.float16)}

    splits = ("train", "test")
    parts: Any = {
        "conditions": dict.fromkeys(splits, conditions),
        "latents": dict.fromkeys(splits, latents),
    }
    write_set(folder / "features", info, parts=parts)
    return folder / "features"
