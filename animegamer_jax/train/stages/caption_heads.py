"""Heads that name captions, for a language model that is trained from scratch.

What an instruction leaves out has to be read from the pictures of the history, and the error of a
representation hardly says so: an accessory is in one or two of its tokens. So linear heads,
discarded afterwards, name the captions that describe a turn (`common_captions`) from hidden states,
in three steps on the way from a past picture to the next one:

history    captions of a past turn, at its frame tokens, after a quarter of the layers
turn_end   captions of a past turn, at the tokens that close it (its states), after half of them
target     captions of the turn to be predicted, at its frame tokens, after three quarters

The head "history" also reads shots by themselves, without words: true ones, from which head and
layers learn, and predicted ones, from which only the prediction learns, so that it shows what it
should. At the turn to be predicted, only captions count that describe an earlier turn, too.

Each error is a part of the loss (`NAMING`):

history, turn_end, target   of the heads, in sequences with a history
true_shot                   of "history", at true shots by themselves
predicted_shot              of "history", at the shots that the sequences predict
caption_target              of "target", in sequences that are given the turn's captions
caption_shot                of "history", at the shots that these predict
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
HEADS = ("history", "turn_end", "target")
NAMING = (*HEADS, "true_shot", "predicted_shot", "caption_target", "caption_shot")
"""Parts of the loss that name captions."""
RATE = 10.0
"""Factor of the heads' learning rate: they are always new, and the model may not be."""

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
    """Returns the captions that describe no earlier turn of the window; -1 in place of the others.

    The history does not say what is new in a turn. A model that has to name it memorises the
    training games.
    """
    same = classes[..., :, :, None, None] == classes[..., None, None, :, :]
    earlier = jnp.tri(classes.shape[-2], k=-1, dtype=jnp.int32)
    times = jnp.einsum("...wlvm,wv->...wl", same.astype(jnp.int32), earlier)
    return jnp.where(times > 0, -1, classes)


def without_gradient(networks: Any) -> Any:
    """Returns networks of the same weights, which get no gradient."""
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
        ignored: Numbers of captions that do not count, -1 in other places.
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
        query_start: Slot of the first query in the sequence of a turn without a history.
    """

    config: MistralConfig
    layout: Layout
    packed: PackedLayout
    targets: Targets
    query_start: int

    def of_sequences(
        self, networks: StageNetworks, game: Any, hidden: Float[Array, "l b t d"]
    ) -> Scalars:
        """Returns the errors of the three heads, from hidden states of the training sequences.

        With targets "captions" there is no history, and only "target" is returned.
        """
        after = {name: hidden[count - 1] for name, count in layers_of_heads(self.config).items()}
        every = self.targets == "every"
        queries = self.packed.queries if every else self.layout.queries[None]
        target = self._of_targets(networks["target"], after["target"][:, queries], game)
        if self.targets == "captions":
            return {"target": target}
        layout = self.packed if every else self.layout
        frames = np.flatnonzero(layout.history).reshape(-1, self.layout.num_queries)
        closing = self.packed.closing if every else closing_slots(self.layout)

        def past(name: str, slots: np.ndarray) -> jax.Array:
            return self._of_turns(networks[name], after[name][:, slots], game, slice(0, -1))

        return {
            "history": past("history", frames),
            "turn_end": past("turn_end", closing),
            "target": target,
        }

    def of_shots(
        self,
        networks: StageNetworks,
        game: Any,
        shots: Float[Array, "b t n r"],
        found: Float[Array, "b m r"],
    ) -> Scalars:
        """Returns the errors of naming captions from shots by themselves.

        Args:
            networks: Language model and heads.
            game: Samples.
            shots: Their true shots: "true_shot".
            found: The predicted ones: "predicted_shot".
        """
        found = found.reshape(len(found), -1, *shots.shape[2:])
        true = self._read_shots(networks, shots, trains_reader=True)
        predicted = self._read_shots(networks, found, trains_reader=False)
        return {
            "true_shot": self._of_turns(*true, game),
            "predicted_shot": self._of_targets(*predicted, game),
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
            hidden: Hidden states at the queries, each turn by itself: "caption_target".
            found: The shots that are predicted there: "caption_shot".
        """
        shape = (*game.classes.shape[:2], found.shape[1], -1)
        states = hidden[layers_of_heads(self.config)["target"] - 1].reshape(shape)
        predicted = self._read_shots(networks, found.reshape(shape), trains_reader=False)
        return {
            "caption_target": self._of_turns(networks["target"], states, game),
            "caption_shot": self._of_turns(*predicted, game),
        }

    def _read_shots(
        self, networks: StageNetworks, shots: Float[Array, "b t n r"], *, trains_reader: bool
    ) -> tuple[Linear, Float[Array, "b t n d"]]:
        """Returns the head "history", and the hidden states that it reads of shots by themselves.

        `trains_reader`: whether head and layers get the gradient; otherwise only the shots do.
        """
        mllm, head = networks["mllm"], networks["history"]
        if not trains_reader:
            mllm, head = without_gradient((mllm, head))
        rows = shots.reshape(-1, *shots.shape[2:])
        num_layers = layers_of_heads(self.config)["history"]
        states = mllm.encode_shots(rows, start=self.query_start, num_layers=num_layers)
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

        A window's first turn does not count, nor do captions that are new in a turn
        (`new_captions`). With targets "captions" everything counts.
        """
        turns = slice(-states.shape[1], None)
        if self.targets == "captions":
            return self._of_turns(head, states, game, turns)
        weights = self.packed.present(game.num_history).astype(jnp.float32)
        weights *= jnp.pad(weights[:, :-1], ((0, 0), (1, 0)))
        ignored = new_captions(game.classes)[:, turns]
        return naming_error(head, states, game.classes[:, turns], weights[:, turns], ignored)
