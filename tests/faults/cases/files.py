"""Mutated files: each case changes one file, runs the command that reads it, and judges it."""

import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from kinds import KINDS, Kind
from mutations import mutate
from sandbox import Child, FileFaults, Outcome, run_all
from table import REFUSED, RIGHT, WRONG, Verdict

MEMORY, SECONDS = 1024, 10.0  # megabytes and CPU seconds of a case
_LONGEST = 2000  # characters of a refusal
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LEFT = re.compile(r"\.part(-\w+)?$|\.tmp-\d+|^\.shard-")


def judge(
    outcome: Outcome,
    *,
    kind: Kind,
    expected: str,
    left: Sequence[str],
    made: Sequence[str],
) -> tuple[str, str]:
    """Returns the result of a command that read a changed file, and why.

    Args:
        outcome: How it ended.
        kind: The kind of file.
        expected: What it prints for the sound file, if that must not change.
        left: Temporary files that it left.
        made: Outputs that exist.
    """
    text = outcome.out + outcome.err
    if outcome.opened and not (kind.follows and outcome.opened.startswith("read")):
        return WRONG, f"opened a file elsewhere: {outcome.opened}"
    if outcome.timed_out:
        return WRONG, f"took {outcome.seconds:.0f} CPU s, {outcome.wall:.0f} s on the clock"
    if outcome.megabytes > MEMORY:
        return WRONG, f"took {outcome.megabytes:.0f} MB"
    if outcome.status < 0:
        return WRONG, f"ended by signal {-outcome.status}"
    if "Traceback (most recent call last)" in text:
        return WRONG, "traceback: " + _last_line(outcome.err)
    if found := _CONTROL.search(text):
        return WRONG, f"printed the control character {found[0]!a}"
    if left:
        return WRONG, f"left {left[0]}"
    if outcome.status == 0:
        if expected and outcome.out != expected:
            return WRONG, "accepted other values without a word"
        return RIGHT, ""
    if outcome.status != 2:
        return WRONG, f"ended with {outcome.status}: {_last_line(outcome.err)}"
    if made:
        return WRONG, f"refused, but wrote {made[0]}"
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    refusals = [n for n, line in enumerate(lines) if line.startswith("animegamer ")]
    if not refusals and kind.words[:2] == ("data", "films"):  # skipped films are listed
        return REFUSED, _last_line(outcome.out)
    if len(refusals) != 1:
        return WRONG, f"{len(refusals)} lines of refusal: {_last_line(outcome.err)}"
    rest = lines[refusals[0] :]
    if len(rest) > 1 and not kind.lists:
        return WRONG, f"a refusal of {len(rest)} lines: {rest[0]}"
    if max(map(len, rest)) > _LONGEST:
        return WRONG, f"a refusal of {max(map(len, rest))} characters"
    return REFUSED, rest[0]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing printed"


class FileCases:
    """All cases of mutated files, by number.

    Args:
        seeds: Folder of the sound examples.
        folder: Folder of the cases.
        seed: Seed of all choices.
        cases: Number of cases.
        kinds: Kinds to choose from.
    """

    def __init__(
        self,
        seeds: Path,
        folder: Path,
        *,
        seed: int,
        cases: int,
        kinds: Sequence[Kind] = KINDS,
    ):
        self.seeds, self.folder, self.seed, self.kinds = seeds, folder, seed, kinds
        self.cases = cases
        self.canary = seeds / "canary"
        self.expected: dict[str, str] = {}

    def select(self, *, only: int | None, skip: Collection[int]) -> None:
        """Chooses which cases run: a single one, whose files are kept, or all but some."""
        self.keep = only is not None
        numbers = range(self.cases) if only is None else [only]
        self.numbers = [number for number in numbers if number not in skip]

    def _choose(self, number: int) -> tuple[Kind, random.Random]:
        """Returns the kind of a case, and the source of its other choices."""
        rng = random.Random(f"{self.seed} {number}")
        (kind,) = rng.choices(self.kinds, [kind.weight for kind in self.kinds])
        return kind, rng

    def check_sound(self, *, jobs: int) -> list[str]:
        """Runs the chosen cases' commands on the sound files; returns what goes wrong there."""
        chosen = {self._choose(number)[0].name for number in self.numbers}
        problems, kinds = [], {}

        def start(kind: Kind) -> Callable[[], Child]:
            def make() -> Child:
                child = self._start(kind, self._make(kind, f"sound-{kind.name}"))
                kinds[child.pid] = kind
                return child

            return make

        for child in run_all(
            (start(kind) for kind in self.kinds if kind.name in chosen), jobs=jobs
        ):
            kind, outcome = kinds.pop(child.pid), child.outcome
            assert outcome is not None
            self.expected[kind.name] = outcome.out if kind.exact else ""
            if outcome.status or outcome.opened or not kind.candidates(self.seeds):
                problems.append(f"{kind.name}: {outcome.status} {outcome.opened} {outcome.err}")
            shutil.rmtree(child.folder.parent)
        return problems

    def run(self, *, jobs: int) -> Iterator[Verdict]:
        """Runs the chosen cases and yields their verdicts, in any order."""
        cases: dict[int, tuple[int, Kind, Path, str]] = {}

        def start(number: int) -> Callable[[], Child]:
            def make() -> Child:
                kind, rng = self._choose(number)
                case = self._make(kind, f"{number}")
                file = rng.choice(kind.candidates(self.seeds))
                form = _form(file, kind)
                mutation = mutate(self.seeds / file, form, rng, self.canary)
                mutation.apply(case / file)
                child = self._start(kind, case)
                cases[child.pid] = number, kind, case, f"{file}: {mutation.name}"
                return child

            return make

        for child in run_all((start(number) for number in self.numbers), jobs=jobs):
            number, kind, case, change = cases.pop(child.pid)
            outcome = child.outcome
            assert outcome is not None
            result, reason = judge(
                outcome,
                kind=kind,
                expected=self.expected.get(kind.name, ""),
                left=_left_in(case),
                made=[name for name in kind.outputs if os.path.lexists(case / name)],
            )
            if not self.keep:
                shutil.rmtree(case, ignore_errors=True)
            yield Verdict(
                number=number,
                kind=kind.name,
                change=change,
                result=result,
                reason=reason,
                seconds=outcome.seconds,
                megabytes=outcome.megabytes,
            )

    def _make(self, kind: Kind, name: str) -> Path:
        case = self.folder / re.sub(r"\W+", "-", name)
        shutil.rmtree(case, ignore_errors=True)
        kind.prepare(self.seeds, case)
        (case / "tmp").mkdir()
        return case

    def _start(self, kind: Kind, case: Path) -> Child:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "/nowhere")
        faults = FileFaults(forbidden=self.canary, allowed=(case, Path(cache)))
        command = kind.command(case)

        def run() -> int:
            import tempfile

            tempfile.tempdir = os.environ["TMPDIR"] = str(case / "tmp")
            os.chdir(case)
            return command()

        return Child(run, case / ".log", faults=faults, seconds=SECONDS)


def _form(file: Path, kind: Kind) -> str:
    """Returns the form of a file by its name, where a kind has several."""
    forms = {".json": "json", ".jsonl": "lines", ".zip": "zip"}
    if kind.form in ("binary", "lines", "zip") and file.suffix in forms:
        return forms[file.suffix]
    return kind.form


def _left_in(case: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(case):
        if Path(folder).name == ".log":
            continue
        found += [name for name in (*folders, *files) if _LEFT.search(name)]
    return found
