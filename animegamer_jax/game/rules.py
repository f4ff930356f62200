"""Rules that give a game days: a goal for each of them, and an end; they can be switched off.

The model's states stay as they are. The rules only look at the finished turns: a day has
`DAY_TURNS` turns, or ends when stamina is used up. Its goal depends on the game's seed and the
number of the day.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.game.saved.turns import Meters, Turn
from animegamer_jax.game.scene_words import SceneWords, read_scene

DAY_TURNS = 10
MORNING_STAMINA = 50
_RESTED, _CONTENT = 20, 50  # meters in the evening that earn a star

GoalKind = Literal["social", "entertainment", "balance", "places", "people", "motions"]
Ending = Literal["exhausted", "evening"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of a day.

    Attributes:
        kind: A meter to raise, `balance` of all meters, or a number of different `places`, `people`
            or `motions` to see.
        target: Value to reach.
        reached: Value so far in this day.
    """

    kind: GoalKind
    target: int
    reached: int

    @property
    def met(self) -> bool:
        return self.reached >= self.target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Day:
    """A day of a game.

    Attributes:
        number: Number of the day, from 1.
        first: Number of its first turn.
        played: Turns that were played in it.
        turns: Turns that it has.
        goal: Its goal.
        ending: How it ended; None while it continues.
        stars: Stars that it earned, 0 to 3: its goal, some stamina left, all meters good.
    """

    number: int
    first: int
    played: int
    turns: int
    goal: Goal
    ending: Ending | None
    stars: int


def scenes_of(turns: Sequence[Turn], words: Vocabulary, *, start: str = "") -> list[SceneWords]:
    """Returns the scene of each turn: what its instruction names, and else that of the turn before.

    Args:
        turns: Turns of a line, from the first.
        words: The words of the model's world.
        start: Text of the player's own picture, before the first turn.
    """
    scene, found = read_scene(start, words), []
    for turn in turns:
        named = read_scene(turn.instruction, words)
        motion = (named.motion, named.partner) if named.motion else (scene.motion, scene.partner)
        scene = SceneWords(
            character=named.character or scene.character,
            adverb=named.adverb,
            motion=motion[0],
            partner=motion[1],
            time=named.time or scene.time,
            place=named.place or scene.place,
        )
        found.append(scene)
    return found


def day_of(
    turns: Sequence[Turn], words: Vocabulary, *, seed: int, meters: Meters, start: str = ""
) -> Day:
    """Returns the current day of a game.

    Args:
        turns: Turns of the current line.
        words: The words of the model's world.
        seed: Seed of the game.
        meters: Meters with which the next turn begins.
        start: Text of the player's own picture.
    """
    breaks = [turn.turn for turn in turns if turn.edit is not None and turn.edit.new_day]
    number, done = len(breaks) + 1, breaks[-1] if breaks else 0
    today = turns[done:]
    scenes = scenes_of(turns, words, start=start)[done:]
    goal = _goal_of(seed, number, words, today, scenes)
    ending: Ending | None = None
    if today and meters.stamina == 0:
        ending = "exhausted"
    elif len(today) >= DAY_TURNS:
        ending = "evening"
    good = all(value >= _CONTENT for value in (meters.social, meters.entertainment))
    stars = goal.met + (meters.stamina >= _RESTED) + (good and meters.stamina > 0)
    return Day(
        number=number,
        first=done + 1,
        played=len(today),
        turns=DAY_TURNS,
        goal=goal,
        ending=ending,
        stars=int(stars) if ending else int(goal.met),
    )


def _goal_of(
    seed: int, number: int, words: Vocabulary, today: Sequence[Turn], scenes: Sequence[SceneWords]
) -> Goal:
    """Returns the goal of a day; the first days of a game have different ones."""

    def most(meter: str) -> int:
        return max((getattr(turn.meters, meter) for turn in today), default=0)

    def different(part: str) -> int:
        return len({value for scene in scenes if (value := getattr(scene, part))})

    def people() -> int:
        return len({name for scene in scenes for name in (scene.character, scene.partner) if name})

    def lowest() -> int:
        return max(
            (min(dataclasses.astuple(turn.meters)) for turn in today[DAY_TURNS // 2 :]), default=0
        )

    goals: list[tuple[GoalKind, int, Callable[[], int]]] = [
        ("social", 65, lambda: most("social")),
        ("entertainment", 70, lambda: most("entertainment")),
        ("balance", 50, lowest),
    ]
    if len(words.places) >= 3:
        goals.append(("places", 3, lambda: different("place")))
    if len(words.characters) >= 3:
        goals.append(("people", 3, people))
    if len(words.motions) >= 5:
        goals.append(("motions", 5, lambda: different("motion")))
    kind, target, reached = goals[(seed + number - 1) % len(goals)]
    return Goal(kind=kind, target=target, reached=min(reached(), target))
