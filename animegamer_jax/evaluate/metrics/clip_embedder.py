"""CLIP embeddings of frames and texts, in batches."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP

Clips = UInt8[np.ndarray, "n f h w 3"]


@runtime_checkable
class TextTokenizer(Protocol):
    """A tokenizer for CLIP's text tower: a bundle's `Tokenizer`, or CLIP's own."""

    def padded_with_end(self, text: str, length: int) -> Int[np.ndarray, " {length}"]: ...


class ClipEmbedder:
    """Computes CLIP's pooled embeddings of clips and texts, normalized to length one.

    Args:
        clip: Both towers.
        tokenizer: The text tower's tokenizer; None: only frames can be embedded.
        batch_size: Number of frames or texts that go through a tower together.
    """

    def __init__(self, clip: CLIP, tokenizer: TextTokenizer | None, *, batch_size: int = 64):
        self.clip, self.tokenizer, self.batch_size = clip, tokenizer, batch_size

        def embed_frames(clip: CLIP, frames: jax.Array) -> jax.Array:
            return clip.embed_image(clip.preprocess(frames.astype(jnp.float32) / 127.5 - 1))

        self._embed_frames = jax.jit(embed_frames)
        self._embed_texts = jax.jit(lambda clip, tokens: clip.embed_text(tokens))

    @property
    def has_text(self) -> bool:
        """Whether texts can be embedded."""
        return self.tokenizer is not None and self.clip.config.text_layers > 0

    def frames(self, clips: Clips) -> Float32[np.ndarray, "n f e"]:
        """Returns the embedding of every frame."""
        flat = clips.reshape(-1, *clips.shape[2:])
        return self._run(self._embed_frames, flat).reshape(*clips.shape[:2], -1)

    def texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n e"]:
        """Returns the embeddings of texts, each cut to the length of the text tower's context.

        Raises:
            UserError: There is no tokenizer, or the text tower has no layers.
        """
        if self.tokenizer is None:
            raise UserError(
                "CLIP: texts cannot be embedded without its tokenizer: give a folder with CLIP's "
                "tokenizer.json, or vocab.json and merges.txt"
            )
        length = self.clip.config.context_length
        rows = [self.tokenizer.padded_with_end(text, length) for text in texts]
        return self._run(self._embed_texts, np.stack(rows))

    def _run(self, function: Callable, rows: np.ndarray) -> np.ndarray:
        found = in_batches(lambda batch: function(self.clip, batch), rows, self.batch_size)
        found = found.astype(np.float32)
        return found / np.linalg.norm(found, axis=-1, keepdims=True)


def in_batches(
    function: Callable[[np.ndarray], jax.Array], rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """Applies `function` to all rows, a batch at a time.

    The last batch is filled up with its own rows, so that one shape is compiled.
    """
    parts = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        filled = np.resize(batch, (batch_size, *batch.shape[1:]))
        parts.append(np.asarray(function(filled))[: len(batch)])
    return np.concatenate(parts)
