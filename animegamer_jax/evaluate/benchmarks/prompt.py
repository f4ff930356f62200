"""The question for one game of a benchmark, and how its answer is read."""

import dataclasses
import functools
import re
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from animegamer_jax.errors import check_at_least
from animegamer_jax.evaluate.benchmarks.format import (
    PARTS,
    BenchmarkGame,
    BenchmarkTurn,
    Part,
    Parts,
    compose,
)
from animegamer_jax.evaluate.benchmarks.spec import MAX_WORDS, Lists
from animegamer_jax.vlm.fields import LOWER, LOWER_FIRST, WHOLE, explain, text_of
from animegamer_jax.vlm.messages import Message, read_content

VERSION = 1
"""Version of the wording; another version is another question."""

_STREAM = 20250402  # keeps these draws independent of others with the same seed
_MOTIONS_A_GAME = 15
_PLACES_A_GAME = 6
_SYSTEM = (
    "You invent short games of anime life that test a video model. A player names a character, "
    "what it does and where, turn by turn. Write plain English and answer with one JSON object and "
    "nothing around it."
)


class TurnAnswer(pydantic.BaseModel):
    """One turn of an answer; the prompt shows the fields' descriptions."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    character: str = pydantic.Field(description="who acts, one of the two characters")
    adverb: Annotated[str, text_of(24), LOWER] = pydantic.Field(
        description="one word for the manner, such as `slowly`"
    )
    motion: Annotated[str, text_of(MAX_WORDS), LOWER_FIRST] = pydantic.Field(
        description="one of the motions as listed; words may follow it, such as whom or what with"
    )
    motion_level: Annotated[Literal[1, 2, 3, 4, 5], WHOLE] = pydantic.Field(
        description="how much moves: 1 almost nothing, 2 a little, 3 clearly, 4 much, 5 nearly "
        "everything and fast; it goes with the adverb"
    )
    time: Annotated[str, text_of(24), LOWER] = pydantic.Field(
        description="the time of day in one word, such as `day`, `evening` or `night`"
    )
    place: str = pydantic.Field(description="one of the places as listed")
    omitted: tuple[Part, ...] = pydantic.Field(
        description="fields among character, adverb, motion, time and place that the player does "
        "not say, because they are as in the turn before; not all five, and none in the first turn"
    )
    social: Annotated[Literal[0, 1], WHOLE] = pydantic.Field(
        description="1 where the character deals with somebody, otherwise 0"
    )
    entertainment: Annotated[Literal[0, 1], WHOLE] = pydantic.Field(
        description="1 where the character enjoys itself, otherwise 0"
    )
    stamina: Annotated[Literal[-1, 1], WHOLE] = pydantic.Field(
        description="-1 where this costs the character strength, 1 where it rests or eats"
    )


class GameAnswer(pydantic.BaseModel):
    """A whole answer."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    turns: tuple[TurnAnswer, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GamePrompt:
    """The question for one game.

    Attributes:
        number: Number of the game, also its seed in play.
        characters: The two characters of the game.
        motions, places: Lists that the model chooses from.
        num_turns: Number of turns.
    """

    number: int
    characters: tuple[str, ...]
    motions: tuple[str, ...]
    places: tuple[str, ...]
    num_turns: int

    def messages(self) -> list[Message]:
        """Returns the conversation."""
        fields = "\n".join(
            f"- {name}: {field.description}." for name, field in TurnAnswer.model_fields.items()
        )
        text = (
            f"Write a game of exactly {self.num_turns} turns, a little story in which things vary "
            "and some carry on. In about four turns of ten the player leaves something out.\n"
            f"Characters: {'; '.join(self.characters)}.\n"
            f"Motions: {'; '.join(self.motions)}.\n"
            f"Places: {'; '.join(self.places)}.\n"
            'Answer {"turns": [...]}; every turn has all of these fields, also those that the '
            f"player does not say:\n{fields}"
        )
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of an answer."""
        schema = GameAnswer.model_json_schema()
        turn = schema["$defs"]["TurnAnswer"]["properties"]
        turn["character"]["enum"] = list(self.characters)
        turn["place"]["enum"] = list(self.places)
        return schema

    def parse(self, answer: str) -> BenchmarkGame:
        """Returns the game in an answer.

        Raises:
            ValueError: In one line, what is wrong with it.
        """
        content = read_content(answer)
        try:
            found = GameAnswer.model_validate(content)
        except pydantic.ValidationError as error:
            raise ValueError(explain(error)[:400]) from None
        if len(found.turns) != self.num_turns:
            raise ValueError(f"expected {self.num_turns} turns, found {len(found.turns)}")
        turns: list[BenchmarkTurn] = []
        for number, turn in enumerate(found.turns, start=1):
            try:
                turns.append(self._turn(turn, before=turns[-1] if turns else None))
            except ValueError as error:
                raise ValueError(f"turn {number}: {error}") from None
        return BenchmarkGame(
            id=f"game-{self.number:03}",
            seed=self.number,
            characters=self.characters,
            turns=tuple(turns),
        )

    def _turn(self, turn: TurnAnswer, *, before: BenchmarkTurn | None) -> BenchmarkTurn:
        begins = (motion.casefold() for motion in self.motions)
        if not any(re.match(rf"{re.escape(b)}(?!\w)", turn.motion.casefold()) for b in begins):
            listed = "; ".join(self.motions)
            raise ValueError(f"motion: expected one of {listed}; found {turn.motion!a}")
        parts = Parts(
            character=_listed(turn.character, self.characters, "character"),
            adverb=turn.adverb,
            motion=turn.motion,
            time=turn.time,
            place=_listed(turn.place, self.places, "place"),
        )
        omitted: tuple[Part, ...] = tuple(part for part in PARTS if part in turn.omitted)
        if omitted and before is None:
            raise ValueError("omitted: expected none in the first turn")
        if len(omitted) == len(PARTS):
            raise ValueError("omitted: expected one field or more that the player says")
        for name in omitted:
            now, then = getattr(parts, name), getattr(before and before.parts, name)
            if now != then:
                raise ValueError(f"{name} is omitted: expected {then!a} as before, found {now!a}")
        return BenchmarkTurn(
            instruction=compose(parts, omitted=omitted),
            parts=parts,
            omitted=omitted,
            motion_level=turn.motion_level,
            social=turn.social,
            entertainment=turn.entertainment,
            stamina=turn.stamina,
        )


def _listed(value: str, options: tuple[str, ...], name: str) -> str:
    """Returns the option that equals a value, in any case."""
    known = {option.casefold(): option for option in options}
    if (found := known.get(value.strip().casefold())) is None:
        raise ValueError(f"{name}: expected one of {'; '.join(options)}; found {value[:40]!a}")
    return found


def make_prompts(
    lists: Lists, *, num_games: int, num_turns: int, seed: int
) -> tuple[GamePrompt, ...]:
    """Returns the questions: character `n` (modulo their number) leads game `n`, the rest is drawn.

    Raises:
        UserError: There are no games, no turns, or the seed is below 0.
    """
    for name, value, low in (("games", num_games, 1), ("turns", num_turns, 1), ("seed", seed, 0)):
        check_at_least(name, value, low)
    found = []
    for number in range(seed, seed + num_games):
        rng = np.random.default_rng((_STREAM, number))
        lead = lists.characters[number % len(lists.characters)]
        others = [name for name in lists.characters if name != lead]
        prompt = GamePrompt(
            number=number,
            characters=(lead, others[int(rng.integers(len(others)))]),
            motions=_some(rng, lists.motions, _MOTIONS_A_GAME),
            places=_some(rng, lists.places, _PLACES_A_GAME),
            num_turns=num_turns,
        )
        found.append(prompt)
    return tuple(found)


def _some(rng: np.random.Generator, words: tuple[str, ...], most: int) -> tuple[str, ...]:
    chosen = rng.permutation(len(words))[:most]
    return tuple(words[int(i)] for i in chosen)
