"""The multimodal language model: Mistral with two resamplers (paper, section 3.3).

The input resampler maps a past turn's shot representation to embeddings at its frame tokens. The
output resampler maps the hidden states at this turn's frame tokens to the next representation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from animegamer_jax.configs import MLLMConfig
from animegamer_jax.models.kernels.attend import padded_length
from animegamer_jax.models.kernels.masks import StaticMask
from animegamer_jax.models.linear import Dropout, Projection
from animegamer_jax.models.mistral import KVCache, Mistral, Tokens, make_cache
from animegamer_jax.protocol import Layout, Prompt, inject

IGNORED = -100  # label of a token without a loss


class GameBatch(NamedTuple):
    """Sequences to train on, with up to `k` history rows and `n` queries each."""

    ids: Int[Array, "b t"]
    tokens: Tokens
    labels: Int[Array, "b t"]  # ids, or IGNORED
    history_mask: Bool[Array, "b t"]  # frame tokens of past turns
    history: Float[Array, "b k r"]
    query_slots: Int[Array, "b n"]  # frame tokens of this turn
    target: Float[Array, "b n r"]


class AnswerLosses(NamedTuple):
    """The losses of a batch's answers, and what the queries predict.

    Attributes:
        cross_entropy: Cross-entropy of each label slot, 0 where it has no label.
        squared_error: Mean squared error of each query's representation.
        representation: The predicted shot representations.
        hidden_states: Hidden states after each layer; None if they were not asked for.
    """

    cross_entropy: Float[Array, "b s"]
    squared_error: Float[Array, "b n"]
    representation: Float[Array, "b n r"]
    hidden_states: Float[Array, "l b t d"] | None = None


def make_batch(
    layout: Layout,
    prompt: Prompt,
    states: Int[Array, "b 4"],
    *,
    history: Float[Array, "b k r"],
    target: Float[Array, "b n r"],
) -> GameBatch:
    """Returns prompts with their answers, this turn's states, as sequences; only these have labels.

    In the history, the rows of absent turns come first.
    """
    answered = layout.append_answer(prompt, states)
    b, t = answered.ids.shape
    labels = jnp.full((b, t), IGNORED, jnp.int32)
    where = jnp.zeros((b, t), bool).at[:, : layout.length].set(jnp.asarray(layout.history)[None])
    return GameBatch(
        ids=answered.ids,
        tokens=_prompt_tokens(answered, layout, bidirectional=True),
        labels=labels.at[:, layout.answers].set(answered.ids[:, layout.answers]),
        history_mask=where,
        history=history,
        query_slots=jnp.broadcast_to(jnp.asarray(layout.queries), (b, layout.num_queries)),
        target=target,
    )


def pad_batch(batch: GameBatch, length: int) -> GameBatch:
    """Pads the sequences to `length` with tokens that nobody sees and that have no loss."""
    more = length - batch.ids.shape[1]
    if not more:
        return batch

    def pad(x: jax.Array, value: int = 0) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, more)), constant_values=value)

    return batch._replace(
        ids=pad(batch.ids),
        tokens=jax.tree.map(pad, batch.tokens),
        labels=pad(batch.labels, IGNORED),
        history_mask=pad(batch.history_mask),
    )


def _prompt_tokens(prompt: Prompt, layout: Layout, *, bidirectional: bool) -> Tokens:
    """Describes the tokens of prompts, maybe with answers; this turn's frames may be a block."""
    blocks, static = jnp.zeros(prompt.ids.shape, jnp.int32), StaticMask()
    if bidirectional:
        blocks = blocks.at[:, layout.queries].set(1)
        static = StaticMask(int(layout.queries[0]), int(layout.queries[-1]) + 1)
    return Tokens(prompt.positions, prompt.valid, blocks, static=static)


class MLLM(nnx.Module):
    """Predicts the next game state from the history of the game."""

    def __init__(self, config: MLLMConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, size = config.mistral.hidden_size, config.representation_size
        self.mistral = Mistral(config.mistral, rngs=rngs)
        self.input_resampler = Projection(size, hidden, config=config, rngs=rngs)
        self.output_resampler = Projection(hidden, size, config=config, rngs=rngs)

    def embed(
        self,
        ids: Int[Array, "b t"],
        history_mask: Bool[Array, "b t"],
        history: Float[Array, "b k r"],
    ) -> Float[Array, "b t d"]:
        """Embeds tokens, with resampled representations at the frame tokens of past turns."""
        x = self.mistral.embed(ids)
        return inject(x, history_mask, self.input_resampler(history.astype(x.dtype)))

    def prefill(
        self,
        prompt: Prompt,
        history: Float[Array, "b k r"],
        layout: Layout,
        *,
        bidirectional: bool,
        extra_slots: int,
    ) -> tuple[Float[Array, "b t d"], KVCache]:
        """Returns hidden states of the prompt, and a cache with room for `extra_slots` more tokens.

        `bidirectional`: whether this turn's frame tokens see one another, as in training.
        """
        b, t = prompt.ids.shape
        where = jnp.broadcast_to(jnp.asarray(layout.history), (b, t))
        x = self.embed(prompt.ids, where, history)
        cache = make_cache(self.config.mistral, b, t + extra_slots)
        tokens = _prompt_tokens(prompt, layout, bidirectional=bidirectional)
        hidden, cache = self.mistral(x, tokens, cache)
        assert cache is not None
        return hidden, cache

    def extend(
        self, ids: Int[Array, "b t"], positions: Int[Array, "b t"], cache: KVCache
    ) -> tuple[Float[Array, "b t d"], KVCache]:
        """Returns hidden states of `t` more causal tokens, and the cache with them."""
        tokens = Tokens(positions, jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32))
        hidden, longer = self.mistral(self.mistral.embed(ids), tokens, cache)
        assert longer is not None
        return hidden, longer

    def decode_states(
        self,
        last_hidden: Float[Array, "b d"],
        last_position: Int[Array, " b"],
        cache: KVCache,
        layout: Layout,
    ) -> Int[Array, "b 4"]:
        """Chooses the four states greedily among their allowed tokens.

        The tokens between the states are fixed, so decoding takes only three short passes. The
        cache holds the prompt and needs room for 9 more tokens.
        """

        def choose(hidden: jax.Array, tokens: jax.Array) -> jax.Array:
            logits = self.mistral.logits(hidden)[:, jnp.maximum(tokens, 0)]
            return jnp.argmax(jnp.where(tokens >= 0, logits, -jnp.inf), axis=-1)

        def step(carry: Any, state: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            hidden, position, cache = carry
            allowed, between = state
            best = choose(hidden, allowed)
            forced = jnp.broadcast_to(between, (best.shape[0], 2))
            ids = jnp.concatenate([allowed[best][:, None], forced], axis=1)
            more, cache = self.extend(ids, position[:, None] + jnp.arange(1, 4)[None], cache)
            return (more[:, -1], position + 3, cache), best

        allowed = jnp.asarray(layout.allowed)
        (last, _, _), best = jax.lax.scan(
            step, (last_hidden, last_position, cache), (allowed[:3], jnp.asarray(layout.between))
        )
        best = jnp.concatenate([best, choose(last, allowed[3])[None]])
        return jnp.take_along_axis(jnp.asarray(layout.values), best, axis=1).T

    def predict(
        self, prompt: Prompt, history: Float[Array, "b k r"], layout: Layout
    ) -> tuple[Float[Array, "b n r"], Int[Array, "b 4"]]:
        """Returns the next game state: shot representation (float32) and the four states.

        `layout.protocol` defines where the representation is read, and whether the states come from
        the same pass.
        """
        hidden, cache = self.prefill(prompt, history, layout, bidirectional=True, extra_slots=9)
        representation = self.output_resampler(hidden[:, layout.representation])
        if layout.protocol.states_pass == "causal":
            hidden, cache = self.prefill(
                prompt, history, layout, bidirectional=False, extra_slots=9
            )
        states = self.decode_states(hidden[:, -1], prompt.positions[:, -1], cache, layout)
        return representation.astype(jnp.float32), states

    def represent(
        self, prompt: Prompt, history: Float[Array, "b k r"], layout: Layout
    ) -> Float[Array, "b n r"]:
        """Returns the shot representation that `predict` returns, without the states."""
        hidden, _ = self.mistral(*self._whole_prompt(prompt, history, layout))
        return self.output_resampler(hidden[:, layout.representation]).astype(jnp.float32)

    def represent_with_hidden_states(
        self, prompt: Prompt, history: Float[Array, "b k r"], layout: Layout
    ) -> tuple[Float[Array, "b n r"], Float[Array, "l b n d"]]:
        """Returns `represent`, and the hidden states at this turn's frame tokens by layer."""
        hidden, states = self.mistral.run_layers(*self._whole_prompt(prompt, history, layout))
        representation = self.output_resampler(hidden[:, layout.representation])
        return representation.astype(jnp.float32), states[:, :, layout.queries]

    def encode_shots(
        self, shots: Float[Array, "b n r"], *, start: int, num_layers: int
    ) -> Float[Array, "b n d"]:
        """Returns hidden states of shots, each a sequence of frame tokens without any words.

        Args:
            shots: Shot representations.
            start: Position of their first frame token.
            num_layers: Number of layers to run, from the first.
        """
        b, n, _ = shots.shape
        positions = jnp.broadcast_to(start + jnp.arange(n, dtype=jnp.int32), (b, n))
        tokens = Tokens(positions, jnp.ones((b, n), bool), jnp.zeros((b, n), jnp.int32))
        x = self.input_resampler(shots.astype(self.config.dtype))
        return self.mistral.run_first_layers(x, tokens, num_layers=num_layers)

    def _whole_prompt(
        self, prompt: Prompt, history: Float[Array, "b k r"], layout: Layout
    ) -> tuple[Float[Array, "b t d"], Tokens]:
        where = jnp.broadcast_to(jnp.asarray(layout.history), prompt.ids.shape)
        x = self.embed(prompt.ids, where, history)
        return x, _prompt_tokens(prompt, layout, bidirectional=True)

    def answer_losses(
        self,
        batch: GameBatch,
        *,
        label_slots: np.ndarray | None = None,
        dropout: Dropout | None = None,
        with_hidden_states: bool = False,
    ) -> AnswerLosses:
        """Returns the losses of a batch's answers, slot by slot.

        Args:
            batch: The sequences.
            label_slots: Slots that may have labels, the same in all sequences; scores of the
                vocabulary are computed only for these. All slots but the first if None.
            dropout: Dropout of the low-rank updates' inputs.
            with_hidden_states: Whether to return the hidden states as well.
        """
        slots = np.arange(1, batch.ids.shape[1]) if label_slots is None else label_slots
        batch = pad_batch(batch, padded_length(batch.ids.shape[1]))
        x = self.embed(batch.ids, batch.history_mask, batch.history)
        states = None
        if with_hidden_states:
            hidden, states = self.mistral.run_layers(x, batch.tokens, dropout=dropout)
        else:
            hidden, _ = self.mistral(x, batch.tokens, dropout=dropout)
        at_queries = jnp.take_along_axis(hidden, batch.query_slots[:, :, None], axis=1)
        representation = self.output_resampler(at_queries).astype(jnp.float32)
        labels = batch.labels[:, slots]
        counts = labels != IGNORED
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
            self.mistral.logits(hidden[:, slots - 1]), jnp.where(counts, labels, 0)
        )
        return AnswerLosses(
            cross_entropy=jnp.where(counts, cross_entropy, 0),
            squared_error=jnp.square(representation - batch.target).mean(axis=-1),
            representation=representation,
            hidden_states=states,
        )

    def losses(self, batch: GameBatch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the cross-entropy of the labels and the representation's mean squared error.

        The training loss is the first plus alpha times the second (paper, equation 5).
        """
        losses = self.answer_losses(batch)
        count = (batch.labels[:, 1:] != IGNORED).sum()
        return losses.cross_entropy.sum() / jnp.maximum(count, 1), losses.squared_error.mean()
