"""Inputs of a stage that is planned: networks without weights, and a tokenizer."""

from pathlib import Path
from typing import Any

from etils import epath

from animegamer_jax.bundle.bundle import Bundle, abstract_network
from animegamer_jax.bundle.config import BundleConfig, with_dtypes
from animegamer_jax.configs import ModelConfig
from animegamer_jax.protocol import Protocol
from animegamer_jax.tokenizer import write_word_tokenizer

_WORDS = ("character", "motion", "background", "mika", "walking", "the", "beach", "day")


class AbstractBundle(Bundle):
    """A bundle whose networks have shapes but no weights."""

    def __init__(self, config: ModelConfig, protocol: Protocol, *, folder: Path):
        info = BundleConfig(
            name="abstract", date=None, protocol=protocol, networks=config, weights={}, released={}
        )
        super().__init__(epath.Path(folder), info)

    def load(self, name: Any, *, mesh: Any = None, rules: Any = None, **formats: Any) -> Any:
        """Returns a network of shapes only."""
        del mesh, rules
        return abstract_network(name, with_dtypes(getattr(self.config, name), **formats))


def write_tokenizer(folder: Path, config: ModelConfig) -> Path:
    """Writes a tokenizer of the model's vocabulary size: the game's tokens and made-up words."""
    assert config.mllm is not None
    tokenizer, count = folder / "tokenizer", config.mllm.num_queries
    smallest = write_word_tokenizer(tokenizer, _WORDS, num_frame_tokens=count)
    others = [f"word{number}" for number in range(config.mllm.mistral.vocab_size - smallest)]
    write_word_tokenizer(tokenizer, (*_WORDS, *others), num_frame_tokens=count)
    return tokenizer
