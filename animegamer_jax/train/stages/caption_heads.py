"""Heads that name captions, for a language model that is trained from scratch.

What an instruction leaves out has to be read from the pictures of the history, and the error of a
representation hardly says so: an accessory is in one or two of its tokens. So linear heads,
discarded afterwards, name the captions that describe a turn (`common_captions`) from hidden states,
in three steps on the way from a picture to the next one:

seen    at a past turn's frame tokens, after a quarter of the layers
noted   at the tokens that close a past turn (its states), after half of them
meant   at the frame tokens of the turn to be predicted, after three quarters

What is meant has to be written, too: "seen" also names the captions of shots that stand alone, true
and predicted ones. It learns from the true ones, and only the prediction from the predicted ones.

What is to be meant and written in a game are the captions that describe an earlier turn, too.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from animegamer_jax.configs import MistralConfig, NetworkConfig
from animegamer_jax.data.windows import MOST_CLASSES
from animegamer_jax.models.linear import Linear
from animegamer_jax.train.stages.base import StageNetworks

HEADS = ("seen", "noted", "meant")
RATE = 10.0
"""Factor of the heads' learning rate: they start from nothing where the model may not."""

_RARE = -5.0  # log-odds of a caption at the start


def make_heads(config: MistralConfig, names: Sequence[str] = HEADS, *, seed: int) -> StageNetworks:
    """Returns the heads of these names, new."""
    heads: StageNetworks = {}
    for name in names:
        heads[name] = _make_head(config, nnx.Rngs(seed))
    return heads


def _make_head(config: MistralConfig, rngs: nnx.Rngs) -> Linear:
    head = Linear(
        config.hidden_size, MOST_CLASSES, names=("embed", None), config=NetworkConfig(), rngs=rngs
    )
    assert head.bias is not None
    head.kernel[...] *= 0.1
    head.bias[...] = jnp.full((MOST_CLASSES,), _RARE)
    return head


def layers_of_heads(config: MistralConfig) -> dict[str, int]:
    """Returns after how many layers each head reads."""
    layers = config.num_hidden_layers
    return {name: max(1, layers * quarter // 4) for quarter, name in enumerate(HEADS, start=1)}


def new_captions(classes: Int[Array, "*b w l"]) -> Int[Array, "*b w l"]:
    """Returns the captions of turns that described no earlier one; -1 in place of the others.

    The history does not say what is new. A model that is to name it learns training games by heart.
    """
    same = classes[..., :, :, None, None] == classes[..., None, None, :, :]
    earlier = jnp.tri(classes.shape[-2], k=-1, dtype=jnp.int32)
    times = jnp.einsum("...wlvm,wv->...wl", same.astype(jnp.int32), earlier)
    return jnp.where(times > 0, -1, classes)


def without_gradient(networks: Any) -> Any:
    """Returns networks of the same weights that learn nothing."""
    graph, state = nnx.split(networks)
    return nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))


def naming_error(
    head: Linear,
    states: Float[Array, "*b n d"],
    classes: Int[Array, "*b l"],
    weights: Float[Array, "*b"],
    ignored: Int[Array, "*b l"] | None = None,
) -> Float[Array, ""]:
    """Returns the binary cross-entropy, summed over captions, a weighted mean over turns.

    Any of a turn's tokens can name a caption: a caption's score is the log of the mean of the
    tokens' exponential scores.

    Args:
        head: The head.
        states: Hidden states at turns' frame tokens, which are normalized first.
        classes: Numbers of the turns' captions, then -1.
        weights: Weights of the turns.
        ignored: Numbers of captions that do not count, or -1.
    """
    states = states.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(states).mean(axis=-1, keepdims=True) + 1e-6)
    scores = head(states * scale)
    scores = jax.nn.logsumexp(scores, axis=-2) - jnp.log(scores.shape[-2])
    said = jax.nn.one_hot(classes, scores.shape[-1]).max(axis=-2)
    errors = optax.sigmoid_binary_cross_entropy(scores, said)
    if ignored is not None:
        errors *= 1 - jax.nn.one_hot(ignored, scores.shape[-1]).max(axis=-2)
    return (weights * errors.sum(axis=-1)).sum() / jnp.maximum(weights.sum(), 1)
