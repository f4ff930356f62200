"""Runs the parts of the campaign, and writes the table of what was tried."""

import argparse
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

import buckets
from buckets import BucketCases
from commands import SUBJECTS, Subject
from crowd import CrowdCases
from files import WRONG, FileCases, Verdict
from kills import DiskCases, KillCases
from kinds import KINDS, Kind
from odd_requests import RequestCases
from seeds import make_seeds
from table import format_table, read_record


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
        if {"kills", "disks"} & {*options.parts}:
            wanted += [name for subject in _subjects(options) for name in subject.needs]
        if "buckets" in options.parts:
            wanted += [name for subject in _of_buckets(options) for name in subject.needs]
        seeds = make_seeds(work / "seeds", {name.split("/")[0] for name in wanted})
        for part in options.parts:
            start = time.monotonic()
            cases = _PARTS[part](seeds, work / part, options)
            record = out / f"{part}.jsonl"
            done = {} if keep else read_record(record)
            sound = {number for number, one in done.items() if one.result != WRONG}
            cases.select(only=options.only, skip=sound)
            for problem in cases.check_sound(jobs=options.jobs):
                print(f"{part}: without a fault: {problem}", flush=True)
                wrong += 1
            if isinstance(cases, KillCases):
                (out / "operations.json").write_text(json.dumps(cases.operations, indent=1) + "\n")
                (out / "first.json").write_text(json.dumps(cases.first) + "\n")
            for verdict in _reported(cases.run(jobs=options.jobs), start):
                done[verdict.number] = verdict
                if not keep:
                    with record.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
            print(format_table(done.values()))
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


def _of_commands(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what kills and disks have in common."""
    return {
        "seed": options.seed,
        "subjects": _subjects(options),
        "operations": _earlier(options.out / "operations.json"),
    }


def _earlier(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _make_kills(seeds: Path, folder: Path, options: argparse.Namespace) -> KillCases:
    first = _earlier(options.out / "first.json")
    return KillCases(seeds, folder, kills=options.kills, first=first, **_of_commands(options))


def _make_disks(seeds: Path, folder: Path, options: argparse.Namespace) -> DiskCases:
    return DiskCases(seeds, folder, disks=options.disks, **_of_commands(options))


def _of_buckets(options: argparse.Namespace) -> list[Subject]:
    return [one for one in buckets.SUBJECTS if re.search(options.kind, one.name)]


def _make_buckets(seeds: Path, folder: Path, options: argparse.Namespace) -> BucketCases:
    subjects = _of_buckets(options)
    return BucketCases(
        seeds, folder, seed=options.seed, failures=options.buckets, subjects=subjects
    )


def _make_crowd(seeds: Path, folder: Path, options: argparse.Namespace) -> CrowdCases:
    del seeds
    return CrowdCases(folder, turns=options.turns)


def _make_requests(seeds: Path, folder: Path, options: argparse.Namespace) -> RequestCases:
    del seeds
    return RequestCases(folder, seed=options.seed, count=options.requests)


_PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], Any]] = {
    "files": _make_files,
    "kills": _make_kills,
    "disks": _make_disks,
    "buckets": _make_buckets,
    "crowd": _make_crowd,
    "requests": _make_requests,
}


def _reported(verdicts: Iterable[Verdict], start: float) -> Iterable[Verdict]:
    for count, verdict in enumerate(verdicts, start=1):
        if verdict.result == WRONG:
            line = f"{verdict.number:5} {verdict.kind}: {verdict.change}: {verdict.reason}"
            print(line, flush=True)
        if count % 250 == 0:
            print(f"{count} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        yield verdict
