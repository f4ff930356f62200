"""What must be decided over all films before their games are written.

The number of games, the splits and the edges of the motion levels come from the rows of all films.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from animegamer_jax.data.characters import Characters
from animegamer_jax.data.films.annotation.labels import (
    clips_digest,
    read_report,
    read_saved_characters,
)
from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.data.films.games.grouping import (
    FilmGame,
    GamesSettings,
    Group,
    draw,
    firsts,
    games_digest,
    games_of,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import PAPER_EDGES, motion_level, quantile_edges
from animegamer_jax.progress import Progress, no_progress, track
from animegamer_jax.protocol import PAPER, Protocol

Split = Literal["train", "test"]

SPLITS: tuple[Split, ...] = ("train", "test")
_LEVELS = len(PAPER_EDGES) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GamesPlan:
    """What is decided over all films.

    Attributes:
        folder: Shots folder of the films.
        settings: Which clips make a game.
        films: Ids of the annotated films, in order.
        skipped: Ids of the films without annotations.
        characters: The characters.
        edges: Motion values between the levels.
        protocol: Protocol with the motion value of each level.
        held_out: Number below which a group's draw puts it into the test split.
        tied: For groups that show a clip of another one, the first of those that do.
        digests: Digest of each film's games (`games_digest`).
        turns: Number of turns of each film in each split.
    """

    folder: ShotsFolder
    settings: GamesSettings
    films: tuple[str, ...]
    skipped: tuple[str, ...]
    characters: Characters
    edges: tuple[float, ...]
    protocol: Protocol
    held_out: float
    tied: Mapping[Group, Group]
    digests: Mapping[str, str]
    turns: Mapping[str, Mapping[Split, int]]

    def split(self, game: FilmGame) -> Split:
        """Returns the split of a game."""
        return _split(game.group, tied=self.tied, held_out=self.held_out)

    def games(self, film: str) -> list[FilmGame]:
        """Returns the games of a film, as they were when this was planned.

        Raises:
            UserError: They have changed.
        """
        games = games_of(self.folder, film, self.characters, self.settings)
        if games_digest(games) != self.digests[film]:
            raise UserError(
                f"{self.folder.folder(film)}: annotated or cut again while games were made of it: "
                "start again in another folder"
            )
        return games


def _split(group: Group, *, tied: Mapping[Group, Group], held_out: float) -> Split:
    return "test" if draw(tied.get(group, group)) < held_out else "train"


def make_plan(
    folder: ShotsFolder, settings: GamesSettings, *, on_progress: Progress = no_progress
) -> GamesPlan:
    """Reads all rows and decides what depends on all films.

    Args:
        folder: Shots folder with annotated films.
        settings: Which clips make a game.
        on_progress: Called with what is counted, the number done and the total.

    Raises:
        UserError: Films are not annotated, or with other characters, or there are too few games.
    """
    characters = read_saved_characters(folder)
    films = folder.films()
    done, skipped = list[str](), list[str]()
    for film in track(films, on_progress, "films checked", total=len(films)):
        annotated = characters is not None and is_annotated(folder, film, characters)
        (done if annotated else skipped).append(film)
    if characters is None or not done or (skipped and settings.unannotated == "refuse"):
        raise UserError(_not_annotated(folder, films, skipped))
    groups, values, digests = set[Group](), list[float](), dict[str, str]()
    shown: dict[str, Group] = {}  # for each clip the first group that shows it
    ties: set[tuple[Group, Group]] = set()
    lengths: dict[str, list[tuple[Group, int]]] = {}
    for film in track(done, on_progress, "films read", total=len(done)):
        games = games_of(folder, film, characters, settings)
        lengths[film] = [(game.group, len(game.shots)) for game in games]
        digests[film] = games_digest(games)
        for game in games:
            groups.add(game.group)
            values += [shot.row.motion_value for shot in game.shots]
            for shot in game.shots:
                first = shown.setdefault(shot.row.digest, game.group)
                if first != game.group:
                    ties.add((first, game.group))
    tied = firsts(ties)
    draws = {draw(tied.get(group, group)) for group in groups}
    edges, protocol = _levels(values, settings) if values else (PAPER_EDGES, PAPER)
    held_out = _threshold(sorted(draws), settings.test_share, folder=folder)
    turns: dict[str, Counter[Split]] = {film: Counter() for film in done}
    for film, found in lengths.items():
        for group, length in found:
            turns[film][_split(group, tied=tied, held_out=held_out)] += length
    return GamesPlan(
        folder=folder,
        settings=settings,
        films=tuple(done),
        skipped=tuple(skipped),
        characters=characters,
        edges=edges,
        protocol=protocol,
        held_out=held_out,
        tied=tied,
        digests=digests,
        turns=turns,
    )


def _not_annotated(folder: ShotsFolder, films: Sequence[str], skipped: Sequence[str]) -> str:
    if not films:
        return f"{folder.path}: no finished films: run `animegamer data films`"
    hint = "run `animegamer data annotate` to its end"
    if len(skipped) < len(films):
        hint += ", or skip them with --unannotated skip"
    which = f"{len(skipped)} of {len(films)} films, the first {skipped[0]}" if skipped else "no"
    return f"{folder.path}: not annotated: {which}: {hint}"


def is_annotated(folder: ShotsFolder, film: str, characters: Characters) -> bool:
    """Returns whether a film's annotation is complete.

    Raises:
        UserError: It is of other characters or of other clips.
    """
    report = read_report(folder, film)
    if report is None:
        return False
    where = folder.folder(film)
    if report.characters != characters.digest:
        raise UserError(f"{where}: annotated with other characters: run `animegamer data annotate`")
    if report.clips != clips_digest(folder.rows(film)):
        raise UserError(f"{where}: cut again since it was annotated: annotate it again")
    return True


def _threshold(draws: Sequence[float], share: float, *, folder: ShotsFolder) -> float:
    """Returns the draw below which groups are held out; each split has one group at least."""
    if len(draws) < 2:
        raise UserError(
            f"{folder.path}: {len(draws)} group{'s' * (len(draws) != 1)} of scenes with games: "
            "expected 2 or more, one to train on and one to test on: add films, name more "
            "characters, or lower --max-gap"
        )
    if draws[0] >= share:
        return draws[1]
    return min(share, draws[-1])


def _levels(values: Sequence[float], settings: GamesSettings) -> tuple[tuple[float, ...], Protocol]:
    if settings.edges == "paper":
        return PAPER_EDGES, PAPER
    edges = quantile_edges(values, levels=_LEVELS)
    levels = np.array([motion_level(value, edges=edges) for value in values])
    medians = [float(np.median(np.asarray(values)[levels == k + 1])) for k in range(_LEVELS)]
    return edges, dataclasses.replace(PAPER, motion_values=tuple(medians))
