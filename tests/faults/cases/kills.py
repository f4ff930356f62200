"""SIGKILL at file operations of the commands that write, and at moments of a training.

A command runs once undisturbed, while its file operations are counted. Then it runs again and
again, is killed at the k-th operation (every other time in the middle of a write), is started
again as its documentation says, and must end with the same files.
"""

import errno
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from commands import SUBJECTS, Content, Subject, training_content
from sandbox import COUNT, FAIL, KILL, KILL_IN_WRITE, Child, FileFaults, Outcome, run_all
from table import REFUSED, RIGHT, WRONG, Verdict

_SECONDS = 60.0  # of CPU for a run
_NUMBERS = 10_000  # of a command's cases; the first ones are those at random moments
_NOT_REACHED = "not reached"


class KillCases:
    """All kills, by number.

    Args:
        seeds: Folder of the sound examples.
        folder: Folder of the cases.
        seed: Seed of all choices.
        kills: Number of kills; one in ten of them at random moments of a training.
        subjects: Commands to kill.
        operations: Number of file operations of each, from an earlier run; None: not known.
        first: Those that are struck first, from an earlier run; None: not known.
    """

    def __init__(
        self,
        seeds: Path,
        folder: Path,
        *,
        seed: int,
        kills: int,
        subjects: Sequence[Subject] = SUBJECTS,
        operations: Mapping[str, int] | None = None,
        first: Mapping[str, Sequence[int]] | None = None,
    ):
        self.seeds, self.folder, self.subjects = seeds, folder, subjects
        self.seed, self.rng = seed, random.Random(f"kills {seed}")
        self.kills = kills
        self.operations: dict[str, int] = {} if operations is None else dict(operations)
        self.expected: dict[str, Content] = {}
        self.seconds: dict[str, float] = {}
        self.first: dict[str, Sequence[int]] = {} if first is None else dict(first)

    def select(self, *, only: int | None, skip: Collection[int]) -> None:
        """Chooses which cases run: a single one, whose files are kept, or all but some."""
        self.only, self.skip = only, skip

    def check_sound(self, *, jobs: int) -> list[str]:
        """Runs every command undisturbed; returns what goes wrong there."""
        problems: list[str] = []
        ready: list[tuple[Subject, Path]] = []
        for compiled in (False, True):  # a training is compiled the first time
            started: dict[int, tuple[Subject, Path]] = {}

            def start(subject: Subject, started=started) -> Callable[[], Child]:
                def make() -> Child:
                    case = self._case(subject, "sound")
                    faults = FileFaults(root=case / "in", mode=COUNT, log=case / "operations")
                    run = subject.run(self.seeds, case / "in/out")
                    child = Child(run, case / ".log", faults=faults, seconds=_SECONDS)
                    started[child.pid] = subject, case
                    return child

                return make

            subjects = [s for s in self.subjects if (s.content is training_content) >= compiled]
            for child in run_all((start(subject) for subject in subjects), jobs=jobs):
                subject, case = started.pop(child.pid)
                assert child.outcome is not None
                self.seconds[subject.name] = child.outcome.wall
                if child.outcome.status:
                    problems.append(f"{subject.name}: {child.outcome.err}")
                elif compiled or subject.content is not training_content:
                    ready.append((subject, case))
        for subject, case in ready:
            # The order of threads changes the number a little; the plan of a record does not.
            lines = (case / "operations").read_text().splitlines()
            self.operations.setdefault(subject.name, len(lines))
            if pattern := subject.first:
                found = [at for at, line in enumerate(lines, 1) if re.search(pattern, line)]
                self.first.setdefault(subject.name, found)
            self.expected[subject.name] = self._content(subject, case)
            shutil.rmtree(case)
        return problems

    def _content(self, subject: Subject, case: Path) -> Content:
        """Reads the content in a child: reading starts JAX."""
        file = case / "content"

        def read() -> int:
            file.write_text(json.dumps(subject.content(case / "in/out")))
            return 0

        outcome = Child(read, case / ".log-content", seconds=_SECONDS).wait()
        if outcome.status:
            return {"cannot be read": outcome.err.splitlines()[-1:]}
        return json.loads(file.read_text())

    def _case(self, subject: Subject, name: str) -> Path:
        case = self.folder / f"{subject.name.replace(' ', '-').replace(',', '')}-{name}"
        shutil.rmtree(case, ignore_errors=True)
        (case / "in").mkdir(parents=True)
        return case

    def plan(self) -> dict[int, "Fault"]:
        """Returns each kill, those at random moments first.

        Commands of few operations are killed at each of them; the rest goes to the others. Each
        has its number, and more kills are those of fewer and others, so that a campaign with more
        of them continues one with fewer.
        """
        ready = [subject for subject in self.subjects if subject.name in self.expected]
        ready.sort(key=self._size)
        at_random = self.kills // 10
        planned: dict[int, Fault] = {}
        for subject in ready:
            if subject.content is training_content:
                for number in range(at_random):
                    share = (number + self.rng.random()) / at_random
                    kind, where = f"kill: {subject.name}, at random", f"after {share:.1%} of it"
                    planned[number] = Fault(subject, kind, where, KILL, 0, share)
        left = self.kills - at_random
        for position, subject in enumerate(ready):
            rest, size = sum(s.share for s in ready[position:]), self._size(subject)
            count = min(size, round(left * subject.share / rest))
            left -= count
            order = random.Random(f"{self.seed} {subject.name}").sample(range(1, size + 1), size)
            order.sort(key=lambda at: at not in self.first.get(subject.name, ()))
            first = _NUMBERS * (1 + SUBJECTS.index(subject))
            for at in sorted(order[:count]):
                mode = (KILL, KILL_IN_WRITE)[at % 2]
                where = f"{'in' if at % 2 else 'before'} operation {at} of {size}"
                fault = Fault(subject, f"kill: {subject.name}", where, mode, at, operations=size)
                planned[first + at] = fault
        return planned

    def _size(self, subject: Subject) -> int:
        return self.operations[subject.name]

    def run(self, *, jobs: int) -> Iterator[Verdict]:
        """Strikes, continues, compares, and yields the verdicts in any order."""
        planned = [
            (number, fault)
            for number, fault in self.plan().items()
            if self.only in (None, number) and number not in self.skip
        ]
        self.rng.shuffle(planned)  # a campaign that is stopped has tried some of each
        cases: dict[int, tuple[int, Fault]] = {}

        def start(number: int, fault: Fault) -> Callable[[], Child]:
            def make() -> Child:
                child = Child(
                    lambda: self._try(number, fault, keep=self.only is not None),
                    self.folder / f".case-{number}",
                    seconds=3 * _SECONDS,
                )
                cases[child.pid] = number, fault
                return child

            return make

        for child in run_all((start(*one) for one in planned), jobs=jobs):
            number, fault = cases.pop(child.pid)
            outcome = child.outcome
            assert outcome is not None
            reason = (outcome.out + outcome.err).strip()
            yield Verdict(
                number=number,
                kind=fault.kind,
                change=fault.change,
                result=WRONG if outcome.status else fault.result,
                reason=reason,
                seconds=outcome.seconds,
                operation=0 if _NOT_REACHED in reason else fault.at,
                operations=fault.operations,
            )

    def _try(self, number: int, fault: "Fault", *, keep: bool) -> int:
        """Does all of one case, in a child of its own; prints what was wrong."""
        subject = fault.subject
        case = self._case(subject, f"{number}")
        out = case / "in/out"
        faults = FileFaults(root=case / "in", mode=fault.mode, at=fault.at, errno=fault.errno)

        def child(command: Callable[[], int], log: str, faults: FileFaults | None = None) -> Child:
            return Child(command, case / log, faults=faults, seconds=_SECONDS)

        command = subject.run(self.seeds, out)
        first = child(command, ".log", faults if fault.at else None)
        if fault.mode == COUNT:  # two at once
            other = child(command, ".log-other")
            outcomes = [one.wait() for one in (first, other)]
            statuses = sorted(one.status for one in outcomes)
            if statuses not in ([0, 0], [0, 2]):
                print(f"two at once ended with {statuses}: {[o.err[-200:] for o in outcomes]}")
                return 1
            if problem := next(filter(None, map(refusal, outcomes)), None):
                print(problem)
                return 1
        else:
            if not fault.at:
                time.sleep(fault.share * self.seconds[subject.name])
                os.kill(first.pid, signal.SIGKILL)
            outcome = first.wait()
            if outcome.status == 0 and fault.at:
                print(_NOT_REACHED)  # threads in another order: fewer operations this time
            elif fault.mode != FAIL and outcome.status != -signal.SIGKILL:
                print(f"the run to kill ended with {outcome.status}: {outcome.err[-300:]}")
                return 1
            elif fault.mode == FAIL and (problem := refusal(outcome)):
                print(problem)
                return 1
            again = (subject.again or subject.run)(self.seeds, out)
            second = child(again, ".log-again").wait()
            done = second.status == 2 and "already there" in second.err  # killed after its end
            if second.status and not done:
                print(f"did not continue: {second.status}: {second.err.strip()[-300:]}")
                return 1
        if problem := difference(self._content(subject, case), self.expected[subject.name]):
            print(problem)
            return 1
        if not keep:
            shutil.rmtree(case)
        return 0


class DiskCases(KillCases):
    """Full and read-only disks, and two processes that write to one place, by number.

    Args:
        seeds, folder, seed, subjects, operations: As `KillCases`.
        disks: Number of operations of each command at which the disk is full.
    """

    def __init__(
        self,
        seeds: Path,
        folder: Path,
        *,
        seed: int,
        disks: int,
        subjects: Sequence[Subject] = SUBJECTS,
        operations: Mapping[str, int] | None = None,
    ):
        super().__init__(
            seeds, folder, seed=seed, kills=0, subjects=subjects, operations=operations
        )
        self.disks = disks

    def plan(self) -> dict[int, "Fault"]:
        """Returns each fault of a disk, and each pair of processes."""
        planned = []
        for subject in self.subjects:
            size = self.operations.get(subject.name, 0)
            for at in sorted(self.rng.sample(range(1, size + 1), min(size, self.disks))):
                where = f"from operation {at} of {size}"
                planned.append(
                    Fault(subject, "full disk", f"{subject.name}: {where}", FAIL, at, 0,
                          errno.ENOSPC, REFUSED)
                )  # fmt: skip
            if size:
                planned.append(
                    Fault(subject, "read-only disk", subject.name, FAIL, 1, 0, errno.EROFS,
                          REFUSED)
                )  # fmt: skip
                planned.append(Fault(subject, "two processes at once", subject.name, COUNT, 1))
        return dict(enumerate(planned))


class Fault(NamedTuple):
    """One fault of one command."""

    subject: Subject
    kind: str
    change: str
    mode: int
    at: int
    share: float = 0.0
    errno: int = 0
    result: str = RIGHT
    operations: int = 0  # of the whole command, if this is a kill at one of them


def difference(found: Content, expected: Content) -> str | None:
    """Returns in what a result is not the uninterrupted one's, or None."""
    if found == expected:
        return None
    names = [n for n in {**found, **expected} if found.get(n) != expected.get(n)]
    return f"another result: {', '.join(sorted(names)[:5])} {found.get('cannot be read')}"


def refusal(outcome: Outcome) -> str | None:
    """Returns what is wrong with how a command refused to go on, or None."""
    if outcome.status == 0:
        return None
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    if "Traceback (most recent call last)" in outcome.err:
        return "traceback: " + lines[-1][:300]
    if outcome.status != 2:
        return f"ended with {outcome.status}: {lines[-1:]}"
    return None
