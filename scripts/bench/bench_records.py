r"""Measures a feature dataset of millions of small records: opening, memory, resuming, speed.

    python scripts/bench/bench_records.py --records 2000000

makes a dataset with the number and sizes of files that `animegamer data features` would give it,
reads it as training does, and deletes it. The shards are copies of one: what is measured is the
cost of a record and of a file, not of a clip's features (`bench_films.py reading`). Seconds of a
core are the process's own; wall-clock seconds depend on what else the machine does.
"""

import contextlib
import dataclasses
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import tyro

from animegamer_jax.data.datasets import FeatureDataset, Part, Record, open_features
from animegamer_jax.data.loader import make_iterator
from animegamer_jax.data.shards import begin_dataset, shard_ranges, shard_size_for

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "training"))
from tiny_sets import FEATURES_INFO, features_record, turns_of

_TURNS = 4  # of a game


def make_set(path: Path, records: int) -> None:
    """Writes one shard, and copies it to all others; the last one is written, as it is shorter."""
    ranges = shard_ranges(records, size=shard_size_for(records))
    info = dataclasses.replace(FEATURES_INFO, splits={})
    written = begin_dataset(path, info, shards={"train": len(ranges)})
    for shard in {0, len(ranges) - 1}:
        written.write("train", shard, _turns(len(ranges[shard])), expected=len(ranges[shard]))
    for part in ("conditions", "latents"):
        (first,) = (path / part).rglob("*-00000-of-*")
        stem, _, count = first.name.rpartition("-of-")
        for shard in range(1, len(ranges) - 1):
            name = f"{stem.removesuffix('00000')}{shard:05d}-of-{count}"
            shutil.copyfile(first, first.with_name(name))
    written.finish(expected={"train": [len(each) for each in ranges]})


def _turns(count: int) -> Iterator[dict[Part, Record]]:
    games = -(-count // _TURNS)
    for number, turn in enumerate(turns_of(games, num_turns=_TURNS)):
        if number == count:
            return
        yield features_record(turn)


def _samples(found: FeatureDataset) -> grain.MapDataset[Any]:
    turns, latents = found.turns("train"), found.latents("train")

    def read(number: int) -> dict[str, Any]:
        record, moments = turns[number], latents[number]["moments"]
        return {"number": number, "text": record["text_features"], "moments": moments}

    return grain.MapDataset.range(len(turns)).map(read)


def _memory() -> float:
    """Returns the resident memory in MB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main(
    *, records: int = 2_000_000, batch_size: int = 64, batches: int = 500, out: Path | None = None
) -> None:
    """Make the dataset, read it, print what it costs.

    Args:
        records: Number of turns.
        batch_size: Number of turns in a batch.
        batches: Number of batches to read for memory and speed.
        out: Folder for the dataset, deleted at the end; None: a temporary one.
    """
    with contextlib.ExitStack() as stack:
        path = out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "set"
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        make_set(path, records)
        files = [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files) / 1e9
        print(f"{records:,} records in {len(files):,} files, {size:.1f} GB", flush=True)
        before = _memory()
        wall, core = time.perf_counter(), time.process_time()
        samples = _samples(open_features(path))
        wall, core = time.perf_counter() - wall, time.process_time() - core
        print(
            f"opening: {wall:.2f} s, {core:.2f} s of a core, {_memory() - before:.0f} MB",
            flush=True,
        )
        wall = time.perf_counter()
        stream = stack.enter_context(
            contextlib.closing(make_iterator(samples, batch_size=batch_size, seed=0))
        )
        next(stream)
        print(f"first batch of an epoch: {time.perf_counter() - wall:.2f} s", flush=True)
        sizes, seen = [], set[int]()
        wall, core = time.perf_counter(), time.process_time()
        for number in range(batches):
            seen |= set(next(stream)["number"].tolist())
            if number % (batches // 10) == 0:
                sizes.append(_memory())
        wall, core = time.perf_counter() - wall, time.process_time() - core
        count = batches * batch_size
        if len(seen) != count:
            raise SystemExit("expected an epoch to give no record twice")
        print(
            f"{count:,} records: {count / core:.0f} a second and core, {count / wall:.0f} a second "
            f"with two threads; memory from {sizes[1]:.0f} to {sizes[-1]:.0f} MB; their numbers "
            f"from {min(seen):,} to {max(seen):,}",
            flush=True,
        )
        _check_resuming(samples, batch_size)


def _check_resuming(samples: grain.MapDataset[Any], batch_size: int) -> None:
    """Goes to the middle of an epoch, stops there, and continues in a new iterator.

    Raises:
        SystemExit: Other records came.
    """
    middle = len(samples) // batch_size // 2

    def numbers(state: dict[str, Any] | None, steps: int) -> tuple[list[list[int]], Any]:
        stream = make_iterator(samples, batch_size=batch_size, seed=0)
        with contextlib.closing(stream):
            if state is not None:
                stream.set_state(state)
            return [next(stream)["number"].tolist() for _ in range(steps)], stream.get_state()

    _, state = numbers(None, 1)
    counted = {name: value for name, value in state.items() if isinstance(value, int) and value}
    print(f"state of a stream: {state}")
    start = {**state, **{name: value * middle for name, value in counted.items()}}
    wall = time.perf_counter()
    whole, _ = numbers(start, 6)
    first, state = numbers(start, 2)
    rest, _ = numbers(state, 4)
    took = time.perf_counter() - wall
    where = f"stopped after batch {middle + 2:,} of {2 * middle:,} and resumed"
    if whole != first + rest:
        raise SystemExit(f"{where}: expected the same records, found others")
    if np.unique(whole).size != 6 * batch_size:
        raise SystemExit(f"{where}: expected an epoch to give no record twice")
    print(f"{where}: the same records, {took:.2f} s for the three streams")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    tyro.cli(main)
