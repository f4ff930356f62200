"""A benchmark of the paper's size from a grammar: 20 characters, 200 games of ten turns.

The paper's own benchmark, written by a language model (paper, section 4.1), was not released. This
one has its size and the released form of instructions, but other games. Every game has a leading
character and a companion. The first turn names every part; of the others `_OPEN_SHARE` are open:
they name some parts, and the rest stays as it was. Expected states follow from the motion and its
level alone (`vocabulary.Motion`), as an annotator sees them in a single clip; the adverb that was
named last decides the motion level.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from animegamer_jax.errors import check_at_least
from animegamer_jax.evaluate.benchmarks.format import (
    PARTS,
    Benchmark,
    BenchmarkGame,
    BenchmarkTurn,
    Part,
    Parts,
    StateValues,
    compose,
)
from animegamer_jax.evaluate.benchmarks.vocabulary import (
    ADVERBS,
    CHARACTERS,
    MOTIONS,
    PLACES,
    TIMES,
    Motion,
)

_T = TypeVar("_T")
_STREAM = 20250401  # sets these draws apart from others of the same seed
_OPEN_SHARE = 0.4
_LEADS = 0.7  # share of the full turns that are about the leading character
_KEEPS = {"place": 0.5, "time": 0.6}  # share of the full turns that stay where and when it was
_OPEN_KINDS: dict[tuple[Part, ...], float] = {
    ("adverb", "motion"): 0.30,
    ("motion",): 0.08,
    ("adverb",): 0.10,
    ("place",): 0.10,
    ("time",): 0.08,
    ("time", "place"): 0.08,
    ("character",): 0.08,
    ("character", "adverb", "motion"): 0.10,
    ("adverb", "motion", "place"): 0.08,
}
"""Parts that an open turn names, and how often."""

_KIND_OF = {place: kind for kind, places in PLACES.items() for place in places}
_ALL_PLACES = tuple(_KIND_OF)
_LEVEL_OF = {adverb: level for level, adverbs in ADVERBS.items() for adverb in adverbs}


class _Shot(NamedTuple):
    """The content of a turn's shot."""

    character: str
    adverb: str
    motion: Motion
    partner: str | None
    time: str
    place: str

    @property
    def level(self) -> int:
        return _LEVEL_OF[self.adverb]

    def is_possible(self) -> bool:
        """Returns whether place, level and character allow the motion."""
        low, high = self.motion.levels
        fits = _KIND_OF[self.place] in self.motion.kinds and low <= self.level <= high
        return fits and self.partner != self.character

    def parts(self) -> Parts:
        return Parts(
            character=self.character,
            adverb=self.adverb,
            motion=self.motion.text.format(partner=self.partner),
            time=self.time,
            place=self.place,
        )


def make_paper_benchmark(
    *,
    characters: Sequence[str] = CHARACTERS,
    num_games: int = 200,
    num_turns: int = 10,
    seed: int = 0,
) -> Benchmark:
    """Makes a benchmark of games number `seed`, `seed + 1`, and so on; nothing else is random.

    Args:
        characters: Characters; number `n` modulo their count leads game `n`.
        num_games: Number of games.
        num_turns: Number of turns of each game.
        seed: Number of the first game; a game's number is also its seed in play.

    Raises:
        UserError: Fewer than two characters, no games, no turns, or a seed below 0.
    """
    for name, value, low in (
        ("characters", len(characters), 2),
        ("games", num_games, 1),
        ("turns", num_turns, 1),
        ("seed", seed, 0),
    ):
        check_at_least(name, value, low)
    numbers = range(seed, seed + num_games)
    return Benchmark(
        name="paper",
        world="everyday",
        made_by=f"a grammar, of the paper's size, games {seed} to {numbers[-1]}",
        num_turns=num_turns,
        states=StateValues(),
        characters=tuple(characters),
        games=tuple(_game(number, characters, num_turns) for number in numbers),
    )


def _game(number: int, characters: Sequence[str], num_turns: int) -> BenchmarkGame:
    rng = np.random.default_rng((_STREAM, number))
    lead = characters[number % len(characters)]
    pair = (lead, _pick(rng, [name for name in characters if name != lead]))
    turns: list[BenchmarkTurn] = []
    shot: _Shot | None = None
    for _ in range(num_turns):
        shot, named = _draw(rng, pair, before=shot)
        turns.append(_turn(shot, named))
    return BenchmarkGame(id=f"paper-{number:03}", seed=number, characters=pair, turns=tuple(turns))


def _turn(shot: _Shot, named: tuple[Part, ...]) -> BenchmarkTurn:
    parts, motion = shot.parts(), shot.motion
    omitted: tuple[Part, ...] = tuple(part for part in PARTS if part not in named)
    return BenchmarkTurn(
        instruction=compose(parts, omitted=omitted),
        parts=parts,
        omitted=omitted,
        motion_level=shot.level,
        social=int(motion.is_social),
        entertainment=int(shot.level >= motion.thrills_from),
        stamina=1 if shot.level <= motion.rests_up_to else -1,
    )


def _pick(rng: np.random.Generator, options: Sequence[_T]) -> _T:
    return options[int(rng.integers(len(options)))]


def _draw(
    rng: np.random.Generator, pair: tuple[str, str], *, before: _Shot | None
) -> tuple[_Shot, tuple[Part, ...]]:
    """Draws the next shot and the parts to name, again until the shot is possible."""
    is_open = before is not None and rng.random() < _OPEN_SHARE
    kinds, shares = list(_OPEN_KINDS), np.cumsum(list(_OPEN_KINDS.values()))
    while True:
        if before is not None and is_open:
            named = kinds[int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))]
            shot = _open_shot(rng, pair, before=before, named=named)
        else:
            named, shot = PARTS, _full_shot(rng, pair, before=before)
        if shot.is_possible():
            return shot, named


def _full_shot(rng: np.random.Generator, pair: tuple[str, str], *, before: _Shot | None) -> _Shot:
    character = pair[0] if rng.random() < _LEADS else pair[1]
    drawn = {"place": _pick(rng, _ALL_PLACES), "time": _pick(rng, TIMES)}
    for name, share in _KEEPS.items():
        if before is not None and rng.random() < share:
            drawn[name] = getattr(before, name)
    motion, partner = _motion(rng, pair, character)
    return _Shot(character, _pick(rng, list(_LEVEL_OF)), motion, partner, **drawn)


def _open_shot(
    rng: np.random.Generator, pair: tuple[str, str], *, before: _Shot, named: tuple[Part, ...]
) -> _Shot:
    """Draws the named parts again, each different from the shot before."""
    shot = before
    if "character" in named:
        shot = shot._replace(character=pair[1] if before.character == pair[0] else pair[0])
    if "motion" in named:
        motion, partner = _motion(rng, pair, shot.character, unlike=before.motion)
        shot = shot._replace(motion=motion, partner=partner)
    options = {"adverb": list(_LEVEL_OF), "time": TIMES, "place": _ALL_PLACES}
    for name, words in options.items():
        if name in named:
            new = _pick(rng, [word for word in words if word != getattr(before, name)])
            shot = shot._replace(**{name: new})
    return shot


def _motion(
    rng: np.random.Generator, pair: tuple[str, str], character: str, *, unlike: Motion | None = None
) -> tuple[Motion, str | None]:
    """Draws a motion; its partner is the other one of the pair, if it needs one."""
    motion = _pick(rng, [motion for motion in MOTIONS if motion != unlike])
    other = pair[1] if character == pair[0] else pair[0]
    return motion, other if motion.is_social else None
