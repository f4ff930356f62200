"""Runs the parts of the campaign, and writes the table of what was tried."""

import argparse
import collections
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from files import REFUSED, RIGHT, WRONG, FileCases, Verdict
from kills import NEEDS, SUBJECTS, DiskCases, KillCases, Subject
from kinds import KINDS, Kind
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
        wanted = [name for kind in _kinds(options) for name in kind.needs]
        wanted += NEEDS if {"kills", "disks"} & {*options.parts} else ()
        seeds = make_seeds(work / "seeds", {name.split("/")[0] for name in wanted})
        for part in options.parts:
            start = time.monotonic()
            cases = _PARTS[part](seeds, work / part, options)
            for problem in cases.check_sound():
                print(f"{part}: without a fault: {problem}", flush=True)
                wrong += 1
            record = out / f"{part}.jsonl"
            done = {} if keep else _read(record)
            sound = {number for number, one in done.items() if one.result != WRONG}
            for verdict in _told(
                cases.run(jobs=options.jobs, only=options.only, skip=sound), start
            ):
                done[verdict.number] = verdict
                if not keep:
                    with record.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
            print_table(done.values())
            wrong += sum(verdict.result == WRONG for verdict in done.values())
        if keep:
            print(f"the files of the case are in {work}")
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    return int(wrong > 0)


def _make_files(seeds: Path, folder: Path, options: argparse.Namespace) -> FileCases:
    kinds = _kinds(options)
    return FileCases(seeds, folder, seed=options.seed, cases=options.cases, kinds=kinds)


def _kinds(options: argparse.Namespace) -> list[Kind]:
    if "files" not in options.parts:
        return []
    return [kind for kind in KINDS if re.search(options.kind, kind.name)]


def _subjects(options: argparse.Namespace) -> list[Subject]:
    return [subject for subject in SUBJECTS if re.search(options.kind, subject.name)]


def _make_kills(seeds: Path, folder: Path, options: argparse.Namespace) -> KillCases:
    return KillCases(
        seeds, folder, seed=options.seed, kills=options.kills, subjects=_subjects(options)
    )


def _make_disks(seeds: Path, folder: Path, options: argparse.Namespace) -> DiskCases:
    return DiskCases(
        seeds, folder, seed=options.seed, disks=options.disks, subjects=_subjects(options)
    )


_PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], Any]] = {
    "files": _make_files,
    "kills": _make_kills,
    "disks": _make_disks,
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


def _read(path: Path) -> dict[int, Verdict]:
    """Returns the last verdict of each case in a record; cases that were wrong are tried again."""
    if not path.exists():
        return {}
    found = [Verdict(**json.loads(line)) for line in path.read_text().splitlines()]
    return {verdict.number: verdict for verdict in found}
