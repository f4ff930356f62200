"""Runs the parts of the campaign, and writes the table of what was tried."""

import argparse
import collections
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from files import REFUSED, RIGHT, WRONG, FileCases, Verdict
from kinds import KINDS
from seeds import make_seeds


def run_campaign(options: argparse.Namespace) -> int:
    """Runs what the options ask for; returns 1 if anything is wrong."""
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "cache"))
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        seeds = make_seeds(work / "seeds")
        kinds = [kind for kind in KINDS if options.kind in kind.name]
        cases = FileCases(seeds, work / "cases", seed=options.seed, kinds=kinds)
        for problem in cases.check_sound():
            print(f"sound files: {problem}")
        numbers = range(options.cases) if options.only is None else [options.only]
        keep = options.only is not None
        verdicts = list(_told(cases.run(numbers, jobs=options.jobs, keep=keep), start))
        print_table(verdicts)
        write(out / "faults.json", verdicts, seconds=time.monotonic() - start, options=options)
        if keep:
            print(f"the files of the case are in {work / 'cases'}")
    finally:
        if options.only is None:
            shutil.rmtree(work, ignore_errors=True)
    return int(any(verdict.result == WRONG for verdict in verdicts))


def _told(verdicts: Iterable[Verdict], start: float) -> Iterable[Verdict]:
    for count, verdict in enumerate(verdicts, start=1):
        if verdict.result == WRONG:
            print(f"{verdict.number:5} {verdict.kind}: {verdict.change}: {verdict.reason}")
        if count % 250 == 0:
            print(f"{count} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        yield verdict


def rows(verdicts: Iterable[Verdict]) -> dict[str, dict[str, float]]:
    """Counts the verdicts of each kind."""
    found: dict[str, dict[str, float]] = {}
    for one in verdicts:
        row = found.setdefault(one.kind, collections.defaultdict(float))
        row["tried"] += 1
        row[one.result] += 1
        row["seconds"] = max(row["seconds"], one.seconds)
        row["megabytes"] = max(row["megabytes"], one.megabytes)
    return found


def print_table(verdicts: Iterable[Verdict]) -> None:
    """Prints what was tried, by kind."""
    print(f"{'':34}{'tried':>7}{'refused':>9}{'right':>7}{'wrong':>7}{'CPU s':>8}{'MB':>7}")
    total: dict[str, float] = collections.defaultdict(float)
    for kind, row in rows(verdicts).items():
        counts = [row.get(name, 0) for name in ("tried", REFUSED, RIGHT, WRONG)]
        for name, count in zip(("tried", REFUSED, RIGHT, WRONG), counts, strict=True):
            total[name] += count
        print(
            f"{kind:34}{counts[0]:7.0f}{counts[1]:9.0f}{counts[2]:7.0f}{counts[3]:7.0f}"
            f"{row['seconds']:8.1f}{row['megabytes']:7.0f}"
        )
    print(f"{'all':34}{total['tried']:7.0f}{total[REFUSED]:9.0f}{total[RIGHT]:7.0f}{total[WRONG]:7.0f}")


def write(
    path: Path, verdicts: list[Verdict], *, seconds: float, options: argparse.Namespace
) -> None:
    """Writes the table and all that is wrong as JSON."""
    content = {
        "cases": options.cases,
        "kills": options.kills,
        "seed": options.seed,
        "seconds": round(seconds),
        "rows": rows(verdicts),
        "wrong": [dataclasses.asdict(v) for v in verdicts if v.result == WRONG],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
