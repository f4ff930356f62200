"""Writes a dataset whose shards the hosts of a run share out."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from animegamer_jax.data.datasets import DatasetInfo, Part, Record
from animegamer_jax.data.shards import ShardedDataset, begin_dataset
from animegamer_jax.distributed import raise_on_all_hosts
from animegamer_jax.progress import Progress, no_progress


def write_shards(
    path: epath.PathLike,
    info: DatasetInfo,
    *,
    places: Mapping[str, Sequence[range]],
    fingerprint: Mapping[str, Any],
    records: Callable[[str, range], Iterable[Mapping[Part, Record]]],
    on_progress: Progress = no_progress,
) -> DatasetInfo:
    """Writes a dataset shard by shard, or continues an unfinished one.

    All hosts of a run call it, and each shard is written once; an error on one host stops them all.

    Args:
        path: Path of the dataset, which must be free or hold the same unfinished dataset.
        info: Description of the dataset; its `splits` are replaced.
        places: The numbers of the turns in each shard, by split.
        fingerprint: Everything else that determines a shard, as JSON: settings, digests of sources.
        records: Returns the records of each part for the turns of a split with these numbers.
        on_progress: Called with what is being made, turns done, and turns.

    Returns:
        `info` with the number of turns of each split.

    Raises:
        UserError: The path is taken or cannot be written, or holds another unfinished dataset.
    """
    shards = {split: len(found) for split, found in places.items()}
    with raise_on_all_hosts():
        if jax.process_index() == 0:
            begin_dataset(path, info, shards=shards, fingerprint=fingerprint)
    with raise_on_all_hosts():
        # Now the other hosts find it as well.
        written = begin_dataset(path, info, shards=shards, fingerprint=fingerprint)
        for split, found in places.items():
            _write_split(written, split, found, records=records, on_progress=on_progress)
    lengths = {split: [len(place) for place in found] for split, found in places.items()}
    with raise_on_all_hosts():
        if jax.process_index() == 0:
            written.finish(expected=lengths)
    return dataclasses.replace(info, splits={split: sum(some) for split, some in lengths.items()})


def _write_split(
    written: ShardedDataset,
    split: str,
    places: Sequence[range],
    *,
    records: Callable[[str, range], Iterable[Mapping[Part, Record]]],
    on_progress: Progress,
) -> None:
    """Writes this host's part of the missing shards."""
    total, missing = sum(len(place) for place in places), written.missing(split)
    done = total - sum(len(places[shard]) for shard in missing)
    hosts, host = jax.process_count(), jax.process_index()
    # By number, because hosts list the missing shards at different times.
    mine = [shard for shard in missing if shard % hosts == host]

    def reported(number: int, place: range) -> Iterator[Mapping[Part, Record]]:
        last = number + len(place)
        for record in records(split, place):
            yield record
            number += 1
            if number < last:  # the last one counts once the shard is complete
                on_progress(f"{split} turns", number, total)

    on_progress(f"{split} turns", done, total)
    for shard in mine:
        place = places[shard]
        written.write(split, shard, reported(done, place), expected=len(place))
        done += len(place)
        on_progress(f"{split} turns", done, total)
