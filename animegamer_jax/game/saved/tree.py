"""The turns of a game as a tree: a current line from its start, and turns that left it.

Nothing is forgotten: a turn that is undone, replaced or left for another line is set aside.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.turns import SetAside, Turn

MAX_OTHERS = 400  # turns that are set aside in a game


class Tree(NamedTuple):
    """A game's turns. Clips name them; "" names the start.

    Attributes:
        turns: Turns of the current line, in order.
        others: Turns that are set aside, the latest last.
    """

    turns: Sequence[Turn]
    others: Sequence[SetAside] = ()

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """Turns of the current line, then those that are set aside."""
        return (*self.turns, *(other.turn for other in self.others))

    @property
    def next_turn(self) -> Turn | None:
        """The turn that was set aside last after the current one."""
        last = self.turns[-1].clip if self.turns else ""
        found = [other.turn for other in self.others if other.after == last]
        return found[-1] if found else None

    def is_left(self, turn: Turn) -> bool:
        """Returns whether a turn that is set aside follows this one."""
        return any(other.after == turn.clip for other in self.others)

    def free_clip(self, number: int) -> str:
        """Returns an unused name for a clip: a turn that is played again gets another file."""
        taken = {turn.clip for turn in self.all_turns}
        marks = itertools.chain([""], (f"_{again}" for again in itertools.count(2)))
        names = (f"turn_{number:03d}{mark}.mp4" for mark in marks)
        return next(name for name in names if name not in taken)

    def leave(self, kept: int, *new: Turn) -> "Tree":
        """Sets the turns after the first `kept` aside; new ones follow in their place."""
        return Tree((*self.turns[:kept], *new), (*self.others, *self._aside(kept)))

    def bring_back(self) -> "Tree":
        """Continues with `next_turn`.

        Raises:
            UserError: There is none.
        """
        turn = self.next_turn
        if turn is None:
            raise UserError("no turn to bring back: undo one first")
        others = [other for other in self.others if other.turn.clip != turn.clip]
        return Tree((*self.turns, turn), others)

    def go_to(self, clip: str) -> "Tree":
        """Makes the turns up to a clip the current line; sets the others aside.

        Raises:
            UserError: No turn has this clip.
        """
        # The current line is set aside last, so `bring_back` continues along it.
        aside = (*self.others, *self._aside(0))
        found = {other.turn.clip: other for other in aside}
        line: list[Turn] = []
        while clip:
            if clip not in found:
                raise UserError(f"no turn with the clip {clip[:40]!r} in this game")
            line.insert(0, found[clip].turn)
            clip = found[clip].after
        taken = {turn.clip for turn in line}
        return Tree(line, [other for other in aside if other.turn.clip not in taken])

    def bounded(self) -> "Tree":
        """Drops turns until at most `MAX_OTHERS` are set aside.

        The oldest goes first that no other turn follows.
        """
        others = list(self.others)
        while len(others) > MAX_OTHERS:
            followed = {other.after for other in others}
            others.remove(next(x for x in others if x.turn.clip not in followed))
        return self._replace(others=others)

    def _aside(self, kept: int) -> list[SetAside]:
        """Returns the turns after the first `kept`, as they are set aside."""
        clips = ["", *(turn.clip for turn in self.turns)]
        return [
            SetAside(after=clips[index], turn=self.turns[index])
            for index in range(kept, len(self.turns))
        ]
