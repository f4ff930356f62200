"""Suggestions of what to do next: from the words of the model's world, the meters and the game."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.game.instructions import compose_instruction
from animegamer_jax.game.rules import scenes_of
from animegamer_jax.game.saved.turns import Meters, Turn
from animegamer_jax.game.scene_words import SceneWords, partner_of

COUNT = 4
_LOW = 35  # a meter below it is to be raised

Kind = Literal["rest", "meet", "fun", "place", "motion", "character", "time", "example"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Something to do next.

    Attributes:
        kind: Why it is suggested.
        words: Words of the model's world to show.
        instruction: Instruction to play.
    """

    kind: Kind
    words: str
    instruction: str


def suggest(
    turns: Sequence[Turn], words: Vocabulary, *, meters: Meters, start: str = ""
) -> tuple[Suggestion, ...]:
    """Returns up to four suggestions, no two of one kind if others are left.

    Args:
        turns: Turns of the current line.
        words: The words of the model's world; without any, its examples are suggested.
        meters: Meters with which the next turn begins.
        start: Text of the player's own picture.
    """
    scenes = scenes_of(turns, words, start=start)
    effects = _effects(turns, scenes, words)
    found: dict[str, Suggestion] = {}
    for suggestion in itertools.chain(
        _by_meters(words, scenes, effects, meters), _by_words(words, scenes)
    ):
        if suggestion.kind not in {other.kind for other in found.values()}:
            found.setdefault(suggestion.instruction, suggestion)
    for suggestion in itertools.chain(_by_words(words, scenes), _examples(words)):
        found.setdefault(suggestion.instruction, suggestion)
    return tuple(found.values())[:COUNT]


def _effects(
    turns: Sequence[Turn], scenes: Sequence[SceneWords], words: Vocabulary
) -> dict[str, dict[str, int]]:
    """Returns what each motion does to the meters, as far as the world or this game shows it."""
    found = {
        scene.motion: turn.changes
        for turn, scene in zip(turns, scenes, strict=True)
        if scene.motion
    }
    return found | {motion: dict(changes) for motion, changes in words.effects.items()}


def _motion(motion: str, kind: Kind) -> Suggestion:
    text = compose_instruction(character="", adverb="", motion=motion, time="", place="")
    return Suggestion(kind=kind, words=motion, instruction=text)


def _fresh(motions: Sequence[str], scenes: Sequence[SceneWords]) -> list[str]:
    """Returns motions that the game has shown least, and not in the last turn."""
    seen = [scene.motion for scene in scenes]
    shift = len(scenes)  # so that another one comes first in the next turn
    turned = [*motions[shift % max(1, len(motions)) :], *motions[: shift % max(1, len(motions))]]
    last = seen[-1] if seen else ""
    return sorted((m for m in turned if m != last), key=seen.count)


def _by_meters(
    words: Vocabulary,
    scenes: Sequence[SceneWords],
    effects: dict[str, dict[str, int]],
    meters: Meters,
) -> Iterator[Suggestion]:
    """Yields motions that raise a meter, the lowest meter's first."""
    who = scenes[-1].character if scenes else ""
    kinds: dict[str, Kind] = {"stamina": "rest", "social": "meet", "entertainment": "fun"}
    values = dataclasses.asdict(meters)
    for meter in sorted(kinds, key=lambda name: values[name]):
        if meter == "stamina" and values[meter] >= _LOW + 15:
            continue
        raising = [
            motion
            for motion in words.motions
            if effects.get(motion, {}).get(meter, 0) > 0
            and (not partner_of(motion, words) or partner_of(motion, words) != who)
        ]
        for motion in _fresh(raising, scenes)[:1]:
            yield _motion(motion, kinds[meter])


def _by_words(words: Vocabulary, scenes: Sequence[SceneWords]) -> Iterator[Suggestion]:
    """Yields what the game has not shown yet: places, motions, times, characters."""
    now = scenes[-1] if scenes else SceneWords()
    blank = dict.fromkeys(("character", "adverb", "motion", "time", "place"), "")

    def unseen(part: str, choice: Sequence[str]) -> list[str]:
        shown = {getattr(scene, part) for scene in scenes}
        shift = len(scenes) % max(1, len(choice))
        turned = [*choice[shift:], *choice[:shift]]
        return [word for word in turned if word not in shown]

    def of(kind: Kind, word: str, **parts: str) -> Suggestion:
        return Suggestion(kind=kind, words=word, instruction=compose_instruction(**blank | parts))

    yield from (of("place", word, place=word) for word in unseen("place", words.places)[:2])
    motions = [
        motion
        for motion in unseen("motion", words.motions)
        if partner_of(motion, words) != now.character or not now.character
    ]
    yield from (_motion(word, "motion") for word in motions[:2])
    if now.character:
        yield from (
            of("character", word, character=word)
            for word in unseen("character", words.characters)[:1]
        )
    yield from (of("time", word, time=word) for word in unseen("time", words.times)[:1])


def _examples(words: Vocabulary) -> Iterator[Suggestion]:
    for text in words.examples:
        yield Suggestion(kind="example", words=text, instruction=text)
