"""Groups the annotated clips of a film into games: each is a run of clips about one character.

The paper makes its games in this way (paper, sections 3.1 and 3.4). Where it is silent (how far
apart two turns may be, which scenes are held out) the settings decide.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from animegamer_jax.data.characters import Characters
from animegamer_jax.data.datasets import Record
from animegamer_jax.data.films.annotation.labels import Annotation, Label, read_labels
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import motion_level

Group = tuple[str, int]
"""A film, and the first of the scenes that share games: all of these are in one split."""
Key = TypeVar("Key", int, Group)

_ROUNDING = 1e-6  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class GamesSettings:
    """Which clips make a game, and how motion is sorted into levels.

    Attributes:
        max_gap: Largest gap in seconds between two turns of a game.
        min_turns: Least number of turns of a game; shorter ones are dropped.
        max_turns: Largest number of turns of a game; longer ones are divided evenly. The paper
            trains on 1 to 5 turns.
        test_share: Share of the scenes held out for the test split, between 0 and 1. Scenes that
            share a game or an identical clip are in one split.
        edges: Motion values between the levels: those of the `paper`, or `quantiles` of the
            dataset, which make all levels equally frequent and set the levels' motion values to
            their medians.
        unannotated: What to do about films without annotations: `refuse` to make games, or `skip`
            these films.

    Raises:
        UserError: A value is out of range.
    """

    max_gap: float = 4.0
    min_turns: int = 1
    max_turns: int = 5
    test_share: float = 0.1
    edges: Literal["paper", "quantiles"] = "paper"
    unannotated: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        if not 0 <= self.max_gap < float("inf"):
            raise UserError(f"max_gap {self.max_gap}: expected seconds, 0 or more")
        if not 1 <= self.min_turns <= self.max_turns:
            raise UserError(
                f"min_turns {self.min_turns}, max_turns {self.max_turns}: expected 1 or more, and "
                "the first not above the second"
            )
        if not 0 < self.test_share < 1:
            raise UserError(f"test_share {self.test_share}: expected more than 0 and less than 1")


@dataclasses.dataclass(frozen=True)
class Shot:
    """A kept clip and its annotation."""

    row: ClipRow
    label: Label

    @property
    def annotation(self) -> Annotation:
        return self.label.annotation


@dataclasses.dataclass(frozen=True)
class FilmGame:
    """Turns of one character in one film.

    Attributes:
        film: The film's id.
        scene: First of the scenes that share games with this one's scenes, and so its split.
        shots: The turns.
    """

    film: str
    scene: int
    shots: tuple[Shot, ...]

    @property
    def number(self) -> int:
        """The game's number, 63 bits of a hash of the film and the first clip."""
        return _hash(f"game {self.film} {self.shots[0].row.clip}") >> 1

    @property
    def group(self) -> Group:
        return self.film, self.scene


def draw(group: Group) -> float:
    """Returns a group's number in [0, 1); the groups with the smallest are held out."""
    film, scene = group
    return _hash(f"split {film} {scene}") / 2**64


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def games_digest(games: Iterable[FilmGame]) -> str:
    """Returns 16 hexadecimal digits that identify what the records of some games are made from."""
    digest = hashlib.sha256()
    for game in games:
        for shot in game.shots:
            of_clip = game.number, game.scene, shot.row.digest, shot.row.motion_value
            digest.update(json.dumps([*of_clip, shot.annotation.model_dump()]).encode())
    return digest.hexdigest()[:16]


# Games of a film


def film_games(film: str, shots: Iterable[Shot], settings: GamesSettings) -> list[FilmGame]:
    """Returns the games of a film, in order of their first clips.

    Args:
        film: The film's id.
        shots: The film's clips in order, about known characters.
        settings: Which of them make a game.
    """
    pieces = [
        piece
        for run in _runs(shots, max_gap=settings.max_gap)
        for piece in _divided(run, most=settings.max_turns)
        if len(piece) >= settings.min_turns
    ]
    first = firsts([shot.row.scene for shot in piece] for piece in pieces)
    games = [FilmGame(film, first[piece[0].row.scene], tuple(piece)) for piece in pieces]
    return sorted(games, key=lambda game: game.shots[0].row.clip)


def _runs(shots: Iterable[Shot], *, max_gap: float) -> list[list[Shot]]:
    """Returns runs of shots about one character without a long gap; others may come in between."""
    latest: dict[str, list[Shot]] = {}
    runs: list[list[Shot]] = []
    for shot in shots:
        run = latest.get(shot.annotation.subject)
        if run is not None and shot.row.start - run[-1].row.end <= max_gap + _ROUNDING:
            run.append(shot)
            continue
        latest[shot.annotation.subject] = run = [shot]
        runs.append(run)
    return runs


def _divided(run: Sequence[Shot], *, most: int) -> Iterator[Sequence[Shot]]:
    """Divides a run into as few pieces as possible, whose lengths differ by at most one."""
    count = -(-len(run) // most)
    bounds = [len(run) * number // count for number in range(count + 1)]
    for start, end in itertools.pairwise(bounds):
        yield run[start:end]


def firsts(ties: Iterable[Sequence[Key]]) -> dict[Key, Key]:
    """Returns, for each member of the ties, the first member of all that are tied to it."""
    parents: dict[Key, Key] = {}

    def find(one: Key) -> Key:
        while parents.setdefault(one, one) != one:
            parents[one] = one = parents[parents[one]]
        return one

    for tied in ties:
        for one in tied:
            first, second = sorted((find(tied[0]), find(one)))
            parents[second] = first
    return {one: find(one) for one in parents}


def games_of(
    folder: ShotsFolder, film: str, characters: Characters, settings: GamesSettings
) -> list[FilmGame]:
    """Returns the games of a film in a shots folder."""
    labels = read_labels(folder, film)
    shots = (
        Shot(row, labels[row.clip])
        for row in folder.rows(film)
        if row.dropped is None
        and row.clip in labels
        and labels[row.clip].annotation.subject in characters.names
    )
    return film_games(film, shots, settings)


# Records


def instruction(said: Annotation) -> str:
    """Returns the instruction of a turn, worded as in the release."""
    return (
        f"Character: {said.subject}; Motion: {said.adverb} {said.motion}; "
        f"Background: {said.time} {said.environment}."
    )


def captions(said: Annotation) -> list[str]:
    """Returns the complete caption, then shorter ones."""
    motion, background = f"{said.adverb} {said.motion}", f"{said.time} {said.environment}"
    return [
        f"{said.subject} is {motion}, {background}",
        said.subject,
        said.environment,
        said.time,
        background,
        f"{said.subject} is {said.motion}",
        f"{said.subject}, {background}",
    ]


def game_records(game: FilmGame, *, edges: Sequence[float]) -> Iterator[Record]:
    """Yields the turns of a game without their clips; `edges` are between the motion levels."""
    for turn, shot in enumerate(game.shots):
        said, value = shot.annotation, shot.row.motion_value
        yield {
            "film": game.film,
            "game": game.number,
            "turn": turn,
            "num_turns": len(game.shots),
            "instruction": instruction(said),
            "is_open": 0,
            "motion_text": f"{said.adverb} {said.motion}",
            "captions": captions(said),
            "character": said.subject,
            "motion": said.motion,
            "place": said.environment,
            "time": said.time,
            "motion_level": motion_level(value, edges=edges),
            "motion_value": value,
            "social": said.social,
            "entertainment": said.entertainment,
            "stamina": said.stamina,
        }
