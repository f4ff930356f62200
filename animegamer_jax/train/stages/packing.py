"""Packed sequences: every turn of a window as a target, in one sequence.

Trained one by one, the turns of a game repeat each other's histories. A packed sequence holds the
game once, as history (segment 0), and for each turn a segment of its own: the frame tokens as
queries, and the turn's states. A segment is seen by nothing outside it, and has the positions that
it has in play. A window of five turns takes 1.4 times the tokens of its last turn alone.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from animegamer_jax.models.mistral import Tokens
from animegamer_jax.models.mllm import IGNORED, GameBatch
from animegamer_jax.protocol import Layout, Prompt


def closing_slots(layout: Layout) -> Int[np.ndarray, "t m"]:
    """Returns the slots of a prompt after the frame tokens of each past turn: its states."""
    frames = np.flatnonzero(layout.history).reshape(-1, layout.num_queries)
    ends = layout.captions[1:, 0] - 1
    rows = [np.arange(row[-1] + 1, end) for row, end in zip(frames, ends, strict=True)]
    return np.array(rows, int).reshape(len(rows), -1 if rows else 0)


class PackedLayout:
    """Positions of everything in a packed sequence; static numpy only.

    Attributes:
        length: Number of tokens.
        source: Index [length] of each token in the prompt with its answer.
        segments: 0 for the history, 1 to `w` for the segment of a turn [length].
        history: True [length] at the frame tokens of the history.
        queries: Indices [w, n] of the segments' frame tokens.
        answers: Indices [w, 4] of the segments' states.
        closing: Indices [w - 1, m] of the tokens after the history's frame tokens, of each turn.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        window, count = layout.window, layout.num_queries
        starts = layout.captions[:, 0] - 1
        firsts = layout.captions[:, -1] + 3  # after <img><frame>
        ends = [*starts[1:], layout.length + len(layout.answer)]
        size = ends[-1] - firsts[-1]
        source, segments, queries = [0], [0], []
        for turn in range(window):
            source += range(starts[turn], firsts[turn])
            segments += [0] * (len(source) - len(segments))
            queries.append(len(source))
            source += range(firsts[turn], firsts[turn] + size)
            segments += [turn + 1] * size
            if turn < window - 1:
                source += range(firsts[turn], ends[turn])
                segments += [0] * (len(source) - len(segments))
        self.length = len(source)
        self.source = np.array(source)
        self.segments = np.array(segments, np.int32)
        self.queries = np.array(queries)[:, None] + np.arange(count)
        to_answer = layout.answers - layout.queries[0]
        self.answers = np.array(queries)[:, None] + to_answer
        in_history = np.zeros(ends[-1], bool)
        in_history[: layout.length] = layout.history
        self.history = in_history[self.source] & (self.segments == 0)
        once = np.flatnonzero(self.segments == 0)
        self.closing = once[np.searchsorted(self.source[once], closing_slots(layout))]

    def batch(
        self,
        prompt: Prompt,
        states: Int[Array, "b 4"],
        *,
        history: Float[Array, "b k r"],
        targets: Float[Array, "b w n r"],
    ) -> GameBatch:
        """Returns the packed sequences of prompts, whose last turns have the given states."""
        whole = self.layout.append_answer(prompt, states)
        ids = whole.ids[:, self.source]
        b, w, n, r = targets.shape

        def repeated(row: np.ndarray) -> Array:
            return jnp.broadcast_to(jnp.asarray(row), (b, self.length))

        blocks = np.zeros(self.length, np.int32)
        blocks[self.queries] = np.arange(1, w + 1)[:, None]
        answers = self.answers.ravel()
        labels = jnp.full(ids.shape, IGNORED, jnp.int32).at[:, answers].set(ids[:, answers])
        tokens = Tokens(
            whole.positions[:, self.source],
            whole.valid[:, self.source],
            repeated(blocks),
            repeated(self.segments),
        )
        return GameBatch(
            ids=ids,
            tokens=tokens,
            labels=labels,
            history_mask=repeated(self.history),
            history=history,
            query_slots=jnp.broadcast_to(jnp.asarray(self.queries.ravel()), (b, w * n)),
            target=targets.reshape(b, w * n, r),
        )

    def present(self, num_history: Int[Array, " b"]) -> Bool[Array, "b w"]:
        """Returns whether each turn of the windows exists."""
        window = self.layout.window
        return jnp.arange(window)[None] >= window - 1 - num_history[:, None]


def window_ends(turns: Sequence[Any] | Any, window: int) -> list[int]:
    """Returns the indices of the last turns of windows that hold every turn of the games once.

    These are the last turn of each game, and every `window` turns before it.
    """
    ends: list[int] = []
    start = 0
    while start < len(turns):
        count = int(turns[start]["num_turns"])
        ends += sorted(range(start + count - 1, start - 1, -window))
        start += count
    return ends
