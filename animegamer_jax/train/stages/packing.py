"""Every turn of a window as a target, in one sequence.

Trained one by one, the turns of a game repeat each other's histories. Here the game as history
tells it is the trunk, and where a turn's frame tokens begin, a branch leaves it: the frame tokens
as queries and the turn's states, seen by nobody outside the branch and at the positions that they
have at play. A window of five turns costs 1.4 times the slots of its last turn alone.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from animegamer_jax.models.mistral import Tokens
from animegamer_jax.models.mllm import IGNORED, GameBatch
from animegamer_jax.protocol import Layout, Prompt


class BranchedLayout:
    """Where everything stands; static numpy only.

    Attributes:
        length: slots of the sequence.
        source: which slot [length] of the prompt with its answer each one is taken from.
        branches: 0 for the trunk, 1 to `w` for the branch of a turn [length].
        history: True [length] at the trunk's frame tokens.
        queries: slots [w, n] of the branches' frame tokens.
        answers: slots [w, 4] of their states.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        window, count = layout.window, layout.num_queries
        starts = layout.captions[:, 0] - 1
        firsts = layout.captions[:, -1] + 3  # after <img><frame>
        ends = [*starts[1:], layout.length + len(layout.answer)]
        branch = ends[-1] - firsts[-1]
        source, branches, queries = [0], [0], []
        for turn in range(window):
            source += range(starts[turn], firsts[turn])
            branches += [0] * (len(source) - len(branches))
            queries.append(len(source))
            source += range(firsts[turn], firsts[turn] + branch)
            branches += [turn + 1] * branch
            if turn < window - 1:
                source += range(firsts[turn], ends[turn])
                branches += [0] * (len(source) - len(branches))
        self.length = len(source)
        self.source = np.array(source)
        self.branches = np.array(branches, np.int32)
        self.queries = np.array(queries)[:, None] + np.arange(count)
        to_answer = layout.answers - layout.queries[0]
        self.answers = np.array(queries)[:, None] + to_answer
        in_history = np.zeros(ends[-1], bool)
        in_history[: layout.length] = layout.history
        self.history = in_history[self.source] & (self.branches == 0)

    def batch(
        self,
        prompt: Prompt,
        states: Int[Array, "b 4"],
        *,
        history: Float[Array, "b k r"],
        targets: Float[Array, "b w n r"],
    ) -> GameBatch:
        """Prompts of the layout, with this turn's states, as sequences with every turn a target."""
        whole = self.layout.append_answer(prompt, states)
        ids = whole.ids[:, self.source]
        b, w, n, r = targets.shape

        def every(row: np.ndarray) -> Array:
            return jnp.broadcast_to(jnp.asarray(row), (b, self.length))

        blocks = np.zeros(self.length, np.int32)
        blocks[self.queries] = np.arange(1, w + 1)[:, None]
        answers = self.answers.ravel()
        labels = jnp.full(ids.shape, IGNORED, jnp.int32).at[:, answers].set(ids[:, answers])
        tokens = Tokens(
            whole.positions[:, self.source],
            whole.valid[:, self.source],
            every(blocks),
            every(self.branches),
        )
        return GameBatch(
            ids=ids,
            tokens=tokens,
            labels=labels,
            history_mask=every(self.history),
            history=history,
            query_slots=jnp.broadcast_to(jnp.asarray(self.queries.ravel()), (b, w * n)),
            target=targets.reshape(b, w * n, r),
        )

    def present(self, num_history: Int[Array, " b"]) -> Bool[Array, "b w"]:
        """Which turns of the windows are there."""
        window = self.layout.window
        return jnp.arange(window)[None] >= window - 1 - num_history[:, None]


def window_ends(turns: Sequence[Any] | Any, window: int) -> list[int]:
    """Numbers of the records that end windows which hold every turn of their games once.

    The last turn of each game, and every `window` turns before it.
    """
    ends: list[int] = []
    start = 0
    while start < len(turns):
        count = int(turns[start]["num_turns"])
        ends += sorted(range(start + count - 1, start - 1, -window))
        start += count
    return ends
