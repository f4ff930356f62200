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
    """What CLIP's text tower needs: a bundle's `Tokenizer`, or CLIP's own."""

    def padded_with_end(self, text: str, length: int) -> Int[np.ndarray, " {length}"]: ...


class ClipEmbedder:
    """CLIP's pooled embeddings of clips and texts, of length one, a batch at a time.

    Args:
        clip: both towers.
        tokenizer: of its text tower; None: frames only.
        batch_size: frames or texts that go through a tower together.
    """

    def __init__(self, clip: CLIP, tokenizer: TextTokenizer | None, *, batch_size: int = 64):
        self.clip, self.tokenizer, self.batch_size = clip, tokenizer, batch_size

        def embed_frames(clip: CLIP, frames: jax.Array) -> jax.Array:
            return clip.embed_image(clip.preprocess(frames.astype(jnp.float32) / 127.5 - 1))

        self._embed_frames = jax.jit(embed_frames)
        self._embed_texts = jax.jit(lambda clip, tokens: clip.embed_text(tokens))

    def frames(self, clips: Clips) -> Float32[np.ndarray, "n f e"]:
        """Embeddings of every frame."""
        flat = clips.reshape(-1, *clips.shape[2:])
        return self._run(self._embed_frames, flat).reshape(*clips.shape[:2], -1)

    def texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n e"]:
        """Embeddings of texts; what does not fit the context is cut.

        Raises:
            UserError: there is no tokenizer, or the text tower has no layers.
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
        """Batches of one shape, so that each tower is compiled once; the last one is filled up."""
        found = in_batches(lambda batch: function(self.clip, batch), rows, self.batch_size)
        found = found.astype(np.float32)
        return found / np.linalg.norm(found, axis=-1, keepdims=True)


def in_batches(
    function: Callable[[np.ndarray], jax.Array], rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """`function` of all rows, a batch of one shape at a time; the last is filled with its own."""
    parts = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        filled = np.resize(batch, (batch_size, *batch.shape[1:]))
        parts.append(np.asarray(function(filled))[: len(batch)])
    return np.concatenate(parts)
