"""Makes a game dataset from a shots folder, with a data card.

Any number of workers write the films, a few to a shard, with one clip in memory at a time.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from animegamer_jax.data.datasets import DatasetInfo, Part, Record
from animegamer_jax.data.films.clips.store import ShotsFolder
from animegamer_jax.data.films.games.card import make_card
from animegamer_jax.data.films.games.grouping import FilmGame, GamesSettings, game_records
from animegamer_jax.data.films.games.plan import SPLITS, GamesPlan, Split, make_plan
from animegamer_jax.data.films.runners import RunnerOptions
from animegamer_jax.data.films.runners import for_each as run_for_each
from animegamer_jax.data.shards import ShardedDataset, begin_dataset
from animegamer_jax.errors import check_at_least
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.storage.serialization import to_json

_MOST_SHARDS = 4096
MADE_BY = "animegamer data games"
_HERE = functools.partial(run_for_each, options=RunnerOptions(), label="shards")


def write_film_games(
    path: epath.PathLike,
    folder: ShotsFolder,
    settings: GamesSettings,
    *,
    films_a_shard: int | None = None,
    for_each: Callable[..., None] = _HERE,
    on_progress: Progress = no_progress,
) -> DatasetInfo:
    """Writes the games of all annotated films and the data card, or continues an earlier run.

    The dataset does not depend on who wrote which shard.

    Args:
        path: Folder to write: a new one, or one with the same dataset, unfinished.
        folder: Shots folder with annotated films.
        settings: Which clips make a game.
        films_a_shard: Number of films whose games go into one file. None: one, or more of many
            films, so that there are at most 4,096 files of each split.
        for_each: Called with the numbers of the missing shards, the function that writes one, and
            `count_done`, as `runners.for_each`.
        on_progress: Called with what else is counted, the number done and the total.

    Raises:
        UserError: Films are not annotated, there are too few games, a clip is damaged, the folder
            holds something else or cannot be written.
    """
    check_at_least("films a shard", films_a_shard, 1)
    plan, cut = make_plan(folder, settings, on_progress=on_progress), folder.settings
    films_a_shard = films_a_shard or math.ceil(len(plan.films) / _MOST_SHARDS)
    info = DatasetInfo(
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
    starts = range(0, len(plan.films), films_a_shard)
    films = [plan.films[start : start + films_a_shard] for start in starts]
    config = _run_config(plan, films)
    written = begin_dataset(
        path, info, shards=dict.fromkeys(SPLITS, len(films)), fingerprint=config
    )
    write = functools.partial(_write_shard, written=written, films=films, plan=plan)
    for_each(_missing(written), write, count_done=lambda: len(films) - len(_missing(written)))
    made = {
        "games": settings,
        "films": cut,
        "motion_edges": plan.edges,
        "motion_values": plan.protocol.motion_values,
        "films_without_annotation": plan.skipped,
        "digest_of_games": hashlib.sha256("".join(plan.digests.values()).encode()).hexdigest()[:16],
    }
    _, files = make_card(plan, made=made, on_progress=on_progress)
    expected = {split: [_turns(plan, some, split) for some in films] for split in SPLITS}
    return written.finish(expected=expected, extras=files)


def _turns(plan: GamesPlan, films: Sequence[str], split: Split) -> int:
    return sum(plan.turns[film][split] for film in films)


def _run_config(plan: GamesPlan, films: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns what must be the same when an unfinished dataset is continued."""
    shards = {film: shard for shard, some in enumerate(films) for film in some}
    return {
        "settings": to_json(plan.settings),
        "films_a_shard": len(films[0]),
        "characters": plan.characters.digest[:16],
        "num_films": len(plan.films),
        "films": {film: {"games": plan.digests[film], "shard": shards[film]} for film in shards},
        "held_out": plan.held_out,
    }


def _missing(written: ShardedDataset) -> list[int]:
    """Returns the shards of which a split is missing."""
    return sorted({shard for split in SPLITS for shard in written.missing(split)})


def _write_shard(
    shard: int, *, written: ShardedDataset, films: Sequence[Sequence[str]], plan: GamesPlan
) -> None:
    """Writes the games of a few films, in all splits."""
    games = {film: plan.games(film) for film in films[shard]}
    for split in SPLITS:
        if shard in written.missing(split):
            records = _records(games, split, plan)
            written.write(split, shard, records, expected=_turns(plan, films[shard], split))


def _records(
    games: Mapping[str, Sequence[FilmGame]], split: Split, plan: GamesPlan
) -> Iterator[dict[Part, Record]]:
    for film, found in games.items():
        of_split = [game for game in found if plan.split(game) == split]
        if not of_split:
            continue
        with plan.folder.clips(film) as archive:
            for game in of_split:
                records = game_records(game, edges=plan.edges)
                for shot, record in zip(game.shots, records, strict=True):
                    yield {"games": {**record, "clip": archive.clip(shot.row.clip)}}
