"""A small network that reads every attribute off the frames of a clip, trained on drawn ones.

`scripts/toy/classifier.py` trains it; its weights come with the package, and `evaluate` checks it
on true clips before its answers count as scores.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import Clips
from animegamer_jax.toy.scoring.attributes import VALUES

WEIGHTS = Path(__file__).parents[2] / "assets" / "reader.safetensors"
_SIZE = (96, 144)
_WIDTHS = (24, 48, 64, 96, 128)
_NUM_FRAMES = 5
_BATCH = 16  # clips
_AGAIN = "make the file again with scripts/toy/classifier.py"

Logits = Mapping[str, Float[Array, "b _"]]


class Classifier(nnx.Module):
    """Five convolutions of stride 2, and a linear layer for each attribute."""

    def __init__(self, *, rngs: nnx.Rngs):
        sizes = zip((3, *_WIDTHS), _WIDTHS, strict=False)
        self.convolutions = nnx.List(
            [nnx.Conv(a, b, (4, 4), strides=2, padding="SAME", rngs=rngs) for a, b in sizes]
        )
        self.norms = nnx.List([nnx.GroupNorm(w, num_groups=8, rngs=rngs) for w in _WIDTHS])
        self.hidden = nnx.Linear(3 * 5 * _WIDTHS[-1], 192, rngs=rngs)
        self.heads = nnx.Dict(
            {_key(name): nnx.Linear(192, len(values), rngs=rngs) for name, values in VALUES.items()}
        )

    def __call__(self, frames: Float[Array, "b h w 3"]) -> Logits:
        """Returns the logits of every attribute; pixels are in [0, 1], of any size."""
        x = jax.image.resize(frames, (len(frames), *_SIZE, 3), "linear") * 2 - 1
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.gelu(norm(convolution(x)))
        x = jax.nn.gelu(self.hidden(x.reshape(len(x), -1)))
        return {name: self.heads[_key(name)](x) for name in VALUES}


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _weights(classifier: Classifier) -> Mapping[str, nnx.Param]:
    found = nnx.to_flat_state(nnx.state(classifier, nnx.Param))
    return {".".join(map(str, path)): param for path, param in found}


def save_classifier(classifier: Classifier, path: Path) -> None:
    """Writes the weights in bfloat16."""
    weights = _weights(classifier).items()
    save_file({name: param[...].astype(jnp.bfloat16) for name, param in weights}, path)


def load_classifier(path: Path = WEIGHTS) -> Classifier:
    """Loads the weights that come with the package, or others of `scripts/toy/classifier.py`.

    Raises:
        UserError: The file cannot be read, or holds other weights than the network has.
    """
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}: {_AGAIN}") from None
    classifier = nnx.eval_shape(lambda: Classifier(rngs=nnx.Rngs(0)))
    weights = _weights(classifier)
    if {name: param.shape for name, param in weights.items()} != {
        name: array.shape for name, array in found.items()
    }:
        raise UserError(f"{path}: other weights than the network has: {_AGAIN}")
    for name, param in weights.items():
        param.set_value(found[name].astype(jnp.float32))
    return classifier


@jax.jit
def _log_shares(classifier: Classifier, frames: UInt8[Array, "b k h w 3"]) -> Mapping[str, Array]:
    b, k = frames.shape[:2]
    logits = classifier(frames.reshape(b * k, *frames.shape[2:]).astype(jnp.float32) / 255)
    return {
        name: jax.nn.log_softmax(x).reshape(b, k, -1).mean(axis=1) for name, x in logits.items()
    }


def read_clips(classifier: Classifier, clips: Clips) -> Mapping[str, Int[np.ndarray, " n"]]:
    """Returns the index of each clip's value, by attribute, from a few frames of each."""
    count = min(_NUM_FRAMES, clips.shape[1])
    shown = clips[:, np.linspace(0, clips.shape[1] - 1, count).round().astype(int)]
    padded = np.concatenate([shown, np.repeat(shown[-1:], -len(shown) % _BATCH, axis=0)])
    parts = [
        jax.device_get(_log_shares(classifier, padded[i : i + _BATCH]))
        for i in range(0, len(padded), _BATCH)
    ]
    return {
        name: np.concatenate([part[name] for part in parts])[: len(clips)].argmax(-1)
        for name in VALUES
    }
