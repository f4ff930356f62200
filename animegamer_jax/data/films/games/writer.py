"""A shots folder to a games set, with a data card beside it.

What must be known of all films (how many games, the edges of the motion levels) comes from the
rows, which are read first. Then films are written a few to a shard, one clip at a time in memory,
by any number of workers.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from animegamer_jax.bundle.config import to_json
from animegamer_jax.data.characters import Characters
from animegamer_jax.data.datasets import (
    Part,
    Record,
    SetInfo,
)
from animegamer_jax.data.films.annotation.labels import (
    clips_digest,
    read_labels,
    read_report,
    read_saved_characters,
)
from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.data.films.games.card import Tally, card_files, films_set_aside, first_dropped
from animegamer_jax.data.films.games.grouping import (
    FilmGame,
    GamesSettings,
    Group,
    draw,
    firsts,
    game_records,
    games_digest,
    games_of,
)
from animegamer_jax.data.shards import ShardedSet, begin_set
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import (
    PAPER_EDGES,
    motion_level,
    quantile_edges,
)
from animegamer_jax.protocol import PAPER, Protocol

# Calls the function once for each number, in any order and anywhere (`beam.for_each`); the second
# function counts the numbers that are done, asked now and then.
Share = Callable[[Sequence[int], Callable[[int], None], Callable[[], int]], None]
Split = Literal["train", "test"]

SPLITS: tuple[Split, ...] = ("train", "test")
MADE_BY = "animegamer data games"
_LEVELS = len(PAPER_EDGES) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is decided over all films.

    Attributes:
        films: with annotations, in order.
        skipped: without.
        characters: the characters.
        edges: motion values between the levels.
        protocol: with the motion value of each level.
        held_out: groups that draw less are tested on.
        tied: for groups that show a clip of another one, the first of those that do.
        digests: of each film's games (`games_digest`).
    """

    films: tuple[str, ...]
    skipped: tuple[str, ...]
    characters: Characters
    edges: tuple[float, ...]
    protocol: Protocol
    held_out: float
    tied: Mapping[Group, Group]
    digests: Mapping[str, str]

    def split(self, game: FilmGame) -> Split:
        group = self.tied.get(game.group, game.group)
        return "test" if draw(group) < self.held_out else "train"

    def games(
        self, folder: ShotsFolder, film: str, settings: GamesSettings
    ) -> tuple[FilmGame, ...]:
        """The games of a film, as they were when this was planned.

        Raises:
            UserError: they are others now.
        """
        games = games_of(folder, film, self.characters, settings)
        if games_digest(games) != self.digests[film]:
            raise UserError(
                f"{folder.folder(film)}: annotated or cut again while games were made of it: "
                "start anew in another folder"
            )
        return tuple(games)


def make_plan(folder: ShotsFolder, settings: GamesSettings) -> Plan:
    """Reads all rows once.

    Raises:
        UserError: films are not annotated, or with other characters, or there are too few games.
    """
    characters = read_saved_characters(folder)
    films = folder.films()
    done = [
        film for film in films if characters is not None and is_annotated(folder, film, characters)
    ]
    skipped = [film for film in films if film not in set(done)]
    if characters is None or not done or (skipped and settings.unannotated == "refuse"):
        raise UserError(_not_annotated(folder, films, skipped))
    groups, values, digests = set[Group](), list[float](), dict[str, str]()
    shown: dict[str, Group] = {}  # for each clip the first group that shows it
    ties: set[tuple[Group, Group]] = set()
    for film in done:
        games = games_of(folder, film, characters, settings)
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
    return Plan(
        films=tuple(done),
        skipped=tuple(skipped),
        characters=characters,
        edges=edges,
        protocol=protocol,
        held_out=_threshold(sorted(draws), settings.test_share, folder=folder),
        tied=tied,
        digests=digests,
    )


def _not_annotated(folder: ShotsFolder, films: Sequence[str], skipped: Sequence[str]) -> str:
    if not films:
        return f"{folder.path}: no finished films: run `animegamer data films`"
    mend = "run `animegamer data annotate` to its end"
    if len(skipped) < len(films):
        mend += ", or leave them out with --unannotated skip"
    told = f"{len(skipped)} of {len(films)} films, the first {skipped[0]}" if skipped else "no"
    return f"{folder.path}: not annotated: {told}: {mend}"


def is_annotated(folder: ShotsFolder, film: str, characters: Characters) -> bool:
    """Whether a film's annotation is whole.

    Raises:
        UserError: it is of other characters or of other clips.
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
    """The draw below which groups are held out: the share, but one group in each split or more."""
    if len(draws) < 2:
        raise UserError(
            f"{folder.path}: {len(draws)} group{'s' * (len(draws) != 1)} of scenes with games: "
            "expected 2 or more, one to train on and one to test on: add films, name more "
            "characters, or lower max_gap"
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


def one_by_one(
    numbers: Sequence[int], function: Callable[[int], None], done: Callable[[], int]
) -> None:
    """The `Share` that needs no other process."""
    for number in numbers:
        function(number)


def write_film_games(
    path: epath.PathLike,
    folder: ShotsFolder,
    settings: GamesSettings,
    *,
    films_a_shard: int = 1,
    share: Share = one_by_one,
) -> SetInfo:
    """Writes the games of all annotated films, and the data card beside them, or goes on with it.

    The set does not depend on who wrote which shard.

    Args:
        path: must be free, or hold the same set on its way.
        folder: with annotated films.
        settings: which clips make a game.
        films_a_shard: films whose games go into one file.
        share: calls what writes a shard for each shard that is missing.

    Raises:
        UserError: films are not annotated, there are too few games, a clip is damaged, the place
            is taken, what was begun there was made of something else, or the disk refuses.
    """
    if films_a_shard < 1:
        raise UserError(f"films a shard {films_a_shard}: expected 1 or more")
    plan = make_plan(folder, settings)
    cut = folder.settings
    info = SetInfo(
        kind="games",
        made_by=MADE_BY,
        seed=None,
        num_frames=cut.num_frames,
        height=cut.height,
        width=cut.width,
        fps=cut.fps,
        protocol=plan.protocol,
        motion_edges=plan.edges,
        splits={},
    )
    films = [
        plan.films[start : start + films_a_shard]
        for start in range(0, len(plan.films), films_a_shard)
    ]
    fingerprint = _fingerprint(plan, settings, films)
    written = begin_set(
        path, info, shards=dict.fromkeys(SPLITS, len(films)), fingerprint=fingerprint
    )
    write = functools.partial(
        _write_shard, written=written, films=films, folder=folder, plan=plan, settings=settings
    )
    share(_missing(written), write, lambda: len(films) - len(_missing(written)))
    digest = hashlib.sha256("".join(plan.digests.values()).encode()).hexdigest()[:16]
    made = {"games": settings, "films": cut, "motion_edges": plan.edges}
    made |= {"motion_values": plan.protocol.motion_values, "films_without_annotation": plan.skipped}
    tally = count(folder, plan, settings)
    return written.finish(
        expected={split: tally.turns[split] for split in SPLITS},
        extras=card_files(tally, made={**made, "digest_of_games": digest}),
    )


def _fingerprint(
    plan: Plan, settings: GamesSettings, films: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """What must be the same when a set is gone on with."""
    shards = {film: shard for shard, some in enumerate(films) for film in some}
    return {
        "settings": to_json(settings),
        "films_a_shard": len(films[0]),
        "characters": plan.characters.digest[:16],
        "num_films": len(plan.films),
        "films": {film: {"games": plan.digests[film], "shard": shards[film]} for film in shards},
        "held_out": plan.held_out,
    }


def _missing(written: ShardedSet) -> list[int]:
    """The shards of which a split is missing."""
    return sorted({shard for split in SPLITS for shard in written.missing(split)})


def _write_shard(
    shard: int,
    *,
    written: ShardedSet,
    films: Sequence[Sequence[str]],
    folder: ShotsFolder,
    plan: Plan,
    settings: GamesSettings,
) -> None:
    """The games of a few films, in all splits."""
    games = {film: plan.games(folder, film, settings) for film in films[shard]}
    for split in SPLITS:
        if shard in written.missing(split):
            written.write(split, shard, _records(games, split, folder=folder, plan=plan))


def _records(
    games: Mapping[str, Sequence[FilmGame]], split: Split, *, folder: ShotsFolder, plan: Plan
) -> Iterator[dict[Part, Record]]:
    for film, found in games.items():
        of_split = [game for game in found if plan.split(game) == split]
        for record in _with_clips(folder, film, of_split, plan):
            yield {"games": record}


def _with_clips(
    folder: ShotsFolder, film: str, games: Sequence[FilmGame], plan: Plan
) -> Iterator[Record]:
    """The turns of some games of one film."""
    if not games:
        return
    with folder.clips(film) as archive:
        for game in games:
            for shot, record in zip(game.shots, game_records(game, edges=plan.edges), strict=True):
                yield {**record, "clip": archive.clip(shot.row.clip)}


def count(folder: ShotsFolder, plan: Plan, settings: GamesSettings) -> Tally:
    """What the card tells of the films and games, from the rows."""
    tally = Tally(characters=plan.characters, aside=films_set_aside(folder))
    for film in plan.films:
        report, labels = read_report(folder, film), read_labels(folder, film)
        assert report is not None  # `make_plan` saw it
        games = plan.games(folder, film, settings)
        for game in games:
            records = list(game_records(game, edges=plan.edges))
            tally.add_game(plan.split(game), game, records)
        cut = folder.report(film)
        tally.add_film(cut, report, labels, games)
        for reason in set(cut.dropped) - set(tally.examples):
            tally.examples[reason] = first_dropped(folder, film, reason)
    return tally
