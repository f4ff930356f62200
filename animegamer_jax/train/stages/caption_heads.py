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

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from animegamer_jax.configs import MistralConfig, NetworkConfig
from animegamer_jax.data.windows import MOST_CLASSES
from animegamer_jax.models.linear import Linear
from animegamer_jax.protocol import Layout
from animegamer_jax.train.stages.base import Scalars, StageNetworks
from animegamer_jax.train.stages.packing import PackedLayout, closing_slots

Targets = Literal["last", "every", "captions"]
"""Turns of a window to train on."""
HEADS = ("seen", "noted", "meant")
NAMING = (*HEADS, "described", "alone", "written", "copied")
"""Parts of the loss that name captions."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionNaming:
    """The errors of the heads, each a part of the loss.

    Attributes:
        config: Sizes of the language model.
        layout: Layout of a sequence that ends with the turn to be predicted.
        packed: Layout of a sequence that predicts each of its turns.
        targets: Which turns of a window are predicted.
        query_start: Slot of the first query in the sequence of a turn that stands alone.
    """

    config: MistralConfig
    layout: Layout
    packed: PackedLayout
    targets: Targets
    query_start: int

    def of_sequences(
        self, networks: StageNetworks, game: Any, hidden: Float[Array, "l b t d"]
    ) -> Scalars:
        """Returns the errors of naming captions from hidden states: "seen", "noted", "meant".

        Captions come without a history, so that nothing is seen or noted there.
        """
        after = {name: hidden[count - 1] for name, count in layers_of_heads(self.config).items()}
        every = self.targets == "every"
        queries = self.packed.queries if every else self.layout.queries[None]
        meant = self._of_targets(networks["meant"], after["meant"][:, queries], game)
        if self.targets == "captions":
            return {"meant": meant}
        layout = self.packed if every else self.layout
        frames = np.flatnonzero(layout.history).reshape(-1, self.layout.num_queries)
        closing = self.packed.closing if every else closing_slots(self.layout)

        def past(name: str, slots: np.ndarray) -> jax.Array:
            return self._of_turns(networks[name], after[name][:, slots], game, slice(0, -1))

        return {"seen": past("seen", frames), "noted": past("noted", closing), "meant": meant}

    def of_shots(
        self,
        networks: StageNetworks,
        game: Any,
        shots: Float[Array, "b t n r"],
        found: Float[Array, "b m r"],
    ) -> Scalars:
        """Returns the errors of naming captions from shots that stand alone.

        Args:
            networks: Language model and heads.
            game: Samples.
            shots: Their true shots: "alone".
            found: The predicted ones: "written".
        """
        found = found.reshape(len(found), -1, *shots.shape[2:])
        alone = self._read(networks, shots, learns=True)
        written = self._read(networks, found, learns=False)
        return {
            "alone": self._of_turns(*alone, game),
            "written": self._of_targets(*written, game),
        }

    def of_captions(
        self,
        networks: StageNetworks,
        game: Any,
        hidden: Float[Array, "l bt s d"],
        found: Float[Array, "bt n r"],
    ) -> Scalars:
        """Returns the errors of naming captions from sequences that are given the same captions.

        Args:
            networks: Language model and heads.
            game: Samples.
            hidden: Hidden states at the queries, each turn alone: "described".
            found: What is predicted there: "copied".
        """
        shape = (*game.classes.shape[:2], found.shape[1], -1)
        states = hidden[layers_of_heads(self.config)["meant"] - 1].reshape(shape)
        copied = self._read(networks, found.reshape(shape), learns=False)
        return {
            "described": self._of_turns(networks["meant"], states, game),
            "copied": self._of_turns(*copied, game),
        }

    def _read(
        self, networks: StageNetworks, shots: Float[Array, "b t n r"], *, learns: bool
    ) -> tuple[Linear, Float[Array, "b t n d"]]:
        """Returns the head that reads past shots, and its states at shots that stand alone.

        `learns`: whether head and layers learn from the shots. If not, only the shots do.
        """
        mllm, head = networks["mllm"], networks["seen"]
        if not learns:
            mllm, head = without_gradient((mllm, head))
        rows = shots.reshape(-1, *shots.shape[2:])
        num_layers = layers_of_heads(self.config)["seen"]
        states = mllm.see(rows, start=self.query_start, num_layers=num_layers)
        return head, states.reshape(*shots.shape[:3], -1)

    def _of_turns(
        self, head: Linear, states: Float[Array, "b t n d"], game: Any, turns: slice = slice(None)
    ) -> Float[Array, ""]:
        weights = self.packed.present(game.num_history).astype(jnp.float32)
        return naming_error(head, states, game.classes[:, turns], weights[:, turns])

    def _of_targets(
        self, head: Linear, states: Float[Array, "b t n d"], game: Any
    ) -> Float[Array, ""]:
        """Returns the error at the turns to be predicted.

        A game's first turn does not count, and no caption that is new in a turn; a turn that is
        predicted from its captions counts whole.
        """
        turns = slice(-states.shape[1], None)
        if self.targets == "captions":
            return self._of_turns(head, states, game, turns)
        weights = self.packed.present(game.num_history).astype(jnp.float32)
        weights *= jnp.pad(weights[:, :-1], ((0, 0), (1, 0)))
        ignored = new_captions(game.classes)[:, turns]
        return naming_error(head, states, game.classes[:, turns], weights[:, turns], ignored)
