"""A bucket whose server fails for a while: commands that read and write there.

Each case has a proxy of its own before one real server (fake-gcs-server). The command has to end
with the right result, or with one line; then the same command, with a server that works, has to
end with the right result.
"""

import contextlib
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bucket_server import NAME, serving_bucket
from commands import (
    Content,
    Subject,
    bundle_content,
    command,
    file_content,
    training_content,
)
from failing_proxy import HOW
from kills import difference, refusal
from sandbox import Child, run_all
from table import REFUSED, RIGHT, WRONG, Verdict

_SECONDS, _IDLE = 60.0, 120.0  # of CPU; without any, while a client waits before it tries again
_LENGTHS = (1, 3, 5)  # requests that fail, one after another


def _command(text: str) -> Callable[[Path, Path], Callable[[], int]]:
    return command(text, bucket=f"gs://{NAME}")


SUBJECTS = (
    Subject(
        name="bucket: features",
        needs=("networks", "toyworld"),
        run=_command(
            "data features --model {bucket}/networks/model --data {bucket}/toyworld "
            "--out {bucket}/{case}/out --batch 1 --shard 2"
        ),
        content=file_content,
    ),
    Subject(
        name="bucket: training",
        run=_command("train-tiny --bundle {bucket}/bundle --out {bucket}/{case}/out"),
        content=training_content,
    ),
    Subject(
        name="bucket: a bundle's export",
        run=_command("export --bundle {bucket}/bundle --out {out}"),
        content=file_content,
    ),
    Subject(
        name="bucket: convert",
        needs=("released",),
        run=_command("convert --reference {seeds}/released --out {bucket}/{case}/out"),
        content=bundle_content,
    ),
)
_IN_BUCKET = ("bundle", "networks", "toyworld")


class Failure(NamedTuple):
    """Requests of one command that fail."""

    subject: Subject
    first: int
    length: int
    how: str


class BucketCases:
    """All failures of a bucket's server, by number.

    Args:
        seeds: Folder of the sound examples, of which some are put into the bucket.
        folder: Folder of the cases.
        seed: Seed of all choices.
        failures: Number of failures.
        subjects: Commands to try.
    """

    def __init__(
        self,
        seeds: Path,
        folder: Path,
        *,
        seed: int,
        failures: int,
        subjects: Sequence[Subject] = SUBJECTS,
    ):
        self.seeds, self.folder, self.failures, self.subjects = seeds, folder, failures, subjects
        self.rng = random.Random(f"buckets {seed}")
        self.requests: dict[str, int] = {}
        self.expected: dict[str, Content] = {}
        self._stack = contextlib.ExitStack()
        self.environment: Mapping[str, str] = {}

    def select(self, *, only: int | None, skip: Collection[int]) -> None:
        """Chooses which cases run: a single one, whose files are kept, or all but some."""
        self.only, self.skip = only, skip

    @property
    def _bucket(self) -> Path:
        return self.folder / "server" / NAME

    def check_sound(self, *, jobs: int) -> list[str]:
        """Starts the server and runs every command undisturbed; returns what goes wrong there."""
        del jobs
        self.folder.mkdir(parents=True)
        self.environment = self._stack.enter_context(serving_bucket(self.folder / "server"))
        put = Child(self._put_seeds, self.folder / ".log-put", seconds=_SECONDS).wait()
        problems = [put.err] if put.status else []
        for subject in self.subjects:
            with self._proxy() as port:
                case = self._case(subject, "sound")
                outcome = self._child(subject, case, port, ".log").wait()
                self.requests[subject.name] = _ask(port, "GET", "/_count")
            if outcome.status:
                problems.append(f"{subject.name}: {outcome.err}")
            else:
                self.expected[subject.name] = self._content(subject, case)
        return problems

    def _put_seeds(self) -> int:
        os.environ.update(self.environment)
        import gcsfs

        for name in _IN_BUCKET:
            if (self.seeds / name).exists():
                gcsfs.GCSFileSystem().put(
                    f"{self.seeds / name}/", f"{NAME}/{name}/", recursive=True
                )
        return 0

    def plan(self) -> list[Failure]:
        """Returns each failure: the same number for each command, at requests drawn at random."""
        planned = []
        for number in range(self.failures):
            subject = self.subjects[number % len(self.subjects)]
            first = self.rng.randint(1, max(1, self.requests.get(subject.name, 1)))
            length = self.rng.choice(_LENGTHS)
            planned.append(Failure(subject, first, length, self.rng.choice(HOW)))
        return planned

    def run(self, *, jobs: int) -> Iterator[Verdict]:
        """Lets requests fail, continues, compares, and yields the verdicts in any order."""
        planned = list(enumerate(self.plan()))
        if self.only is not None:
            planned = planned[self.only : self.only + 1]
        planned = [one for one in planned if one[0] not in self.skip]
        cases: dict[int, tuple[int, Failure]] = {}

        def start(number: int, failure: Failure) -> Callable[[], Child]:
            def make() -> Child:
                child = Child(
                    lambda: self._try(number, failure),
                    self.folder / f".case-{number}",
                    seconds=3 * _SECONDS,
                    idle=4 * _IDLE,
                )
                cases[child.pid] = number, failure
                return child

            return make

        with self._stack:
            for child in run_all((start(*one) for one in planned), jobs=jobs):
                number, failure = cases.pop(child.pid)
                outcome = child.outcome
                assert outcome is not None
                said = (outcome.out + outcome.err).strip()
                result = WRONG if outcome.status else REFUSED if said else RIGHT
                how = f"{failure.how}, {failure.length} from request {failure.first}"
                yield Verdict(
                    number=number,
                    kind=failure.subject.name,
                    change=f"{how} of {self.requests[failure.subject.name]}",
                    result=result,
                    reason=said,
                    seconds=outcome.seconds,
                )

    def _try(self, number: int, failure: Failure) -> int:
        """Does all of one case, in a child of its own; prints a refusal, or what was wrong."""
        subject = failure.subject
        case = self._case(subject, f"{number}")
        with self._proxy() as port:
            last = failure.first + failure.length - 1
            _ask(port, "POST", "/_fail", first=failure.first, last=last, how=failure.how)
            outcome = self._child(subject, case, port, ".log").wait()
            if outcome.timed_out:
                print(f"timed out: {outcome.err[-300:]}")
                return 1
            if problem := refusal(outcome):
                print(problem)
                return 1
            if outcome.status:
                print(outcome.err.strip().splitlines()[-1])
                _ask(port, "POST", "/_fail", first=0, last=0, how="")
                again = self._child(subject, case, port, ".log-again").wait()
                if again.status:
                    print(f"did not continue: {again.status}: {again.err.strip()[-300:]}")
                    return 1
        if problem := difference(self._content(subject, case), self.expected[subject.name]):
            print(problem)
            return 1
        return 0

    def _case(self, subject: Subject, name: str) -> Path:
        plain = "".join(c if c.isalnum() else "-" for c in f"{subject.name}-{name}")
        case = self.folder / plain
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        return case

    def _child(self, subject: Subject, case: Path, port: int, log: str) -> Child:
        own = f"http://127.0.0.1:{port}"
        theirs = self.environment["STORAGE_EMULATOR_HOST"]
        names = {k: v.replace(theirs, own) for k, v in self.environment.items()}
        run_command = subject.run(self.seeds, case / "out")

        def run() -> int:
            os.environ.update(names)
            return run_command()

        return Child(run, case / log, seconds=_SECONDS, idle=_IDLE)

    @contextlib.contextmanager
    def _proxy(self) -> Iterator[int]:
        behind = self.environment["STORAGE_EMULATOR_HOST"].removeprefix("http://")
        program = Path(__file__).with_name("failing_proxy.py")
        plain = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        process = subprocess.Popen(
            [sys.executable, program, behind], stdout=subprocess.PIPE, text=True, env=plain
        )
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()
            process.wait()

    def _content(self, subject: Subject, case: Path) -> Content:
        """Reads a result in a child: in the server's own folder, or here if it was written here."""
        stored = self._bucket / case.name / "out"
        place = stored if stored.exists() else case / "out"
        file = case / "content"

        def read() -> int:
            file.write_text(json.dumps(subject.content(place)))
            return 0

        outcome = Child(read, case / ".log-content", seconds=_SECONDS).wait()
        if outcome.status:
            return {"cannot be read": outcome.err.splitlines()[-1:]}
        return json.loads(file.read_text())


def _ask(port: int, method: str, path: str, **content: Any) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, json.dumps(content))
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()
