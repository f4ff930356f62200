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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from files import REFUSED, RIGHT, WRONG, FileCases, Verdict
from kills import KillCases
from kinds import KINDS
from seeds import make_seeds


def run_campaign(options: argparse.Namespace) -> int:
    """Runs what the options ask for; returns 1 if anything is wrong."""
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "cache"))
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    keep = options.only is not None
    wrong = 0
    try:
        seeds = make_seeds(work / "seeds")
        for part in options.parts:
            start = time.monotonic()
            cases = _PARTS[part](seeds, work / part, options)
            for problem in cases.check_sound():
                print(f"{part}: without a fault: {problem}")
                wrong += 1
            verdicts = list(_told(cases.run(jobs=options.jobs, only=options.only), start))
            print_table(verdicts)
            wrong += sum(verdict.result == WRONG for verdict in verdicts)
            write(out / f"{part}.json", verdicts, time.monotonic() - start, options)
        if keep:
            print(f"the files of the case are in {work}")
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    return int(wrong > 0)


def _make_files(seeds: Path, folder: Path, options: argparse.Namespace) -> FileCases:
    kinds = [kind for kind in KINDS if options.kind in kind.name]
    return FileCases(seeds, folder, seed=options.seed, cases=options.cases, kinds=kinds)


def _make_kills(seeds: Path, folder: Path, options: argparse.Namespace) -> KillCases:
    return KillCases(seeds, folder, seed=options.seed, kills=options.kills)


_PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], Any]] = {
    "files": _make_files,
    "kills": _make_kills,
}


def _told(verdicts: Iterable[Verdict], start: float) -> Iterable[Verdict]:
    for count, verdict in enumerate(verdicts, start=1):
        if verdict.result == WRONG:
            line = f"{verdict.number:5} {verdict.kind}: {verdict.change}: {verdict.reason}"
            print(line, flush=True)
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
    print(
        f"{'all':34}{total['tried']:7.0f}{total[REFUSED]:9.0f}{total[RIGHT]:7.0f}{total[WRONG]:7.0f}"
    )


def write(path: Path, verdicts: list[Verdict], seconds: float, options: argparse.Namespace) -> None:
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
