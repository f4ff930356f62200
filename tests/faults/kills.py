"""SIGKILL at file operations of the commands that write, and at moments of a training.

A command runs once undisturbed, while its file operations are counted. Then it runs again and
again, is killed at the k-th operation (every other time in the middle of a write), is started
again as its documentation says, and must end with the same files.
"""

import dataclasses
import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_stage
from files import RIGHT, WRONG, Verdict
from sandbox import COUNT, KILL, KILL_IN_WRITE, Child, FileFaults, run_all

from animegamer_jax import cli

_SECONDS = 60.0  # of CPU for a run
Content = Mapping[str, Any]


def _files(out: Path) -> Content:
    """Returns a digest of every file but temporary ones, which are removed after an hour."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".part-" not in path.name
    }


def _bundle(out: Path) -> Content:
    """Returns a bundle's tokenizer and config.json; the checksums in it are those of the weights.

    Orbax chooses the names of the files of weights anew each time. Their values are compared with
    the checksums in `config.json` by reading them.
    """
    from animegamer_jax.bundle.bundle import NETWORKS, Bundle

    bundle = Bundle.open(out)
    found: dict[str, Any] = {"config.json": (out / "config.json").read_text()}
    found |= _files(out / "tokenizer")
    for name in filter(bundle.has, NETWORKS):
        for path, array in bundle.read_in_order(name, sorted(bundle.leaves(name))):
            found[f"{name}.{path}"] = hashlib.sha256(array.tobytes()).hexdigest()
    return found


def _training(out: Path) -> Content:
    """Returns weights and curve of a training; times in it differ."""
    from check_resume import curve

    scores = (out / "checkpoints/scores.json").read_text()
    return {**_bundle(out / "model"), "curve": curve(out), "scores": scores}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A command that writes.

    Attributes:
        name: Name in the table.
        run: Given the seeds and the output, returns the command.
        again: Given the same, the command that continues; None: the same one.
        content: Returns what two equal results have in common.
        share: Share of the kills; those of small commands take at most one an operation.
    """

    name: str
    run: Callable[[Path, Path], Callable[[], int]]
    again: Callable[[Path, Path], Callable[[], int]] | None = None
    content: Callable[[Path], Content] = _files
    share: float = 1.0


def _command(text: str) -> Callable[[Path, Path], Callable[[], int]]:
    def make(seeds: Path, out: Path) -> Callable[[], int]:
        words = [word.format(seeds=seeds, out=out) for word in text.split()]
        return lambda: cli.main(words)

    return make


def _train(seeds: Path, out: Path) -> Callable[[], int]:
    def run() -> int:
        import jax

        from animegamer_jax.bundle.bundle import Bundle
        from animegamer_jax.storage.paths import absolute
        from animegamer_jax.train.loop import train
        from animegamer_jax.train.run import TrainingRun
        from animegamer_jax.train.stages.base import DataSource

        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        bundle = Bundle.open(seeds / "bundle")
        recipe = dataclasses.replace(tiny_stage.RECIPE, save_every=2, eval_every=3, noise=0.1)
        stage = tiny_stage.TinyStage(
            recipe, bundle.config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir
        )
        return train(
            TrainingRun(
                stage=stage, bundle=bundle, sources=(DataSource("somewhere"),),
                out=absolute(out), mesh=tiny_stage.one_device(), peak_tflops=None,
                export_checkpoint="last",
            )
        )  # fmt: skip

    return run


_PLAY = "play --model {seeds}/bundle --instructions {seeds}/lines.txt --steps 2 --out {out}"
_PICTURE = " --picture {seeds}/picture.png --picture-text Hana"
SUBJECTS: tuple[Subject, ...] = (
    Subject(name="play", run=_command(_PLAY), again=_command(f"{_PLAY} --resume")),
    Subject(
        name="play, own picture",
        run=_command(_PLAY + _PICTURE),
        again=_command(_PLAY + _PICTURE + " --resume"),
    ),
    Subject(
        name="data films",
        run=_command(
            "data films {seeds}/film.mp4 --out {out} --height 16 --width 24 --num-frames 9"
        ),
    ),
    Subject(
        name="data games",
        run=_command("data games {seeds}/shots --out {out} --test-share 0.3 --min-turns 1"),
    ),
    Subject(
        name="data toyworld",
        run=_command(
            "data toyworld --out {out} --games 2 --test-games 1 --turns 2 --height 16 "
            "--width 24 --processes 1"
        ),
    ),
    Subject(
        name="data features",
        run=_command(
            "data features --model {seeds}/networks/model --data {seeds}/toyworld --out {out} "
            "--batch 1 --shard 2"
        ),
        share=0.4,
    ),
    Subject(
        name="convert",
        run=_command("convert --out {out} --reference {seeds}/released"),
        content=_bundle,
        share=0.6,
    ),
    Subject(name="export", run=_command("export --out {out} --bundle {seeds}/bundle")),
    Subject(name="training", run=_train, content=_training, share=0.4),
)
AT_RANDOM = "training, at random moments"


class KillCases:
    """All kills, by number.

    Args:
        seeds: Folder of the sound examples.
        folder: Folder of the cases.
        seed: Seed of all choices.
        kills: Number of kills; 50 in 500 of them at random moments of a training.
    """

    def __init__(self, seeds: Path, folder: Path, *, seed: int, kills: int):
        self.seeds, self.folder = seeds, folder
        self.rng = random.Random(f"kills {seed}")
        self.kills = kills
        self.operations: dict[str, int] = {}
        self.expected: dict[str, Content] = {}
        self.seconds: dict[str, float] = {}

    def _log(self, name: str) -> Path:
        return self.folder / ".log" / name.replace(" ", "-").replace(",", "")

    def check_sound(self) -> list[str]:
        """Runs every command undisturbed; returns what goes wrong there."""
        problems = []
        for subject in SUBJECTS:
            for _ in range(2 if subject.content is _training else 1):  # compiled the first time
                case = self._case(subject, "sound")
                log = case / "operations"
                outcome = Child(
                    subject.run(self.seeds, case / "in/out"),
                    case / ".log",
                    faults=FileFaults(root=case / "in", mode=COUNT, log=log),
                    seconds=_SECONDS,
                ).wait()
            if outcome.status:
                problems.append(f"{subject.name}: {outcome.status} {outcome.err}")
                continue
            self.operations[subject.name] = len(log.read_text().splitlines())
            self.expected[subject.name] = self._content(subject, case)
            self.seconds[subject.name] = outcome.wall
            shutil.rmtree(case)
        return problems

    def _content(self, subject: Subject, case: Path) -> Content:
        """Reads the content in a child: reading starts JAX."""
        import json

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

    def plan(self) -> list[tuple[Subject, int, int]]:
        """Returns subject, operation and mode of each kill; 0 operations: at a random moment.

        Commands of few operations are killed at each of them; the rest goes to the others.
        """
        ready = [subject for subject in SUBJECTS if subject.name in self.expected]
        at_random = self.kills // 10
        left, counts = self.kills - at_random, dict.fromkeys((s.name for s in ready), 0)
        for position, subject in enumerate(sorted(ready, key=self._size)):
            rest = sum(s.share for s in sorted(ready, key=self._size)[position:])
            counts[subject.name] = min(self._size(subject), int(left * subject.share / rest))
            left -= counts[subject.name]
        planned = []
        for subject in ready:
            size, count = self._size(subject), counts[subject.name]
            chosen = sorted(self.rng.sample(range(1, size + 1), count))
            planned += [(subject, k, (KILL, KILL_IN_WRITE)[k % 2]) for k in chosen]
        training = next((s for s in ready if s.content is _training), None)
        return planned + [(training, 0, KILL)] * (at_random if training else 0)

    def _size(self, subject: Subject) -> int:
        return self.operations[subject.name]

    def run(self, *, jobs: int, only: int | None = None) -> Iterator[Verdict]:
        """Kills, continues, compares, and yields the verdicts in any order."""
        planned = list(enumerate(self.plan()))
        delays = [self.rng.random() for _ in planned]
        if only is not None:
            planned = planned[only : only + 1]

        def whole(number: int, subject: Subject, at: int, mode: int) -> int:
            """Does a kill and everything after it, in a child; prints what was wrong."""
            case = self._case(subject, f"{number}")
            out = case / "in/out"
            killed = Child(
                subject.run(self.seeds, out),
                case / ".log",
                faults=FileFaults(root=case / "in", mode=mode, at=at) if at else None,
                seconds=_SECONDS,
            )
            if not at:
                time.sleep(delays[number] * self.seconds[subject.name])
                os.kill(killed.pid, signal.SIGKILL)
            first = killed.wait()
            if at and first.status == 0:  # another order of threads: fewer operations this time
                print("not reached")
            elif at and first.status != -signal.SIGKILL:
                print(f"the run to kill ended with {first.status}: {first.err[-300:]}")
                return 1
            again = (subject.again or subject.run)(self.seeds, out)
            second = Child(again, case / ".log-again", seconds=_SECONDS).wait()
            if second.status:
                print(f"did not continue: {second.status}: {second.err.strip()[-300:]}")
                return 1
            found, expected = self._content(subject, case), self.expected[subject.name]
            if found != expected:
                names = [n for n in {**found, **expected} if found.get(n) != expected.get(n)]
                print(f"another result: {', '.join(sorted(names)[:5])}")
                return 1
            shutil.rmtree(case)
            return 0

        cases = {}

        def start(number: int, subject: Subject, at: int, mode: int) -> Callable[[], Child]:
            def make() -> Child:
                child = Child(
                    lambda: whole(number, subject, at, mode),
                    self.folder / f".kill-{number}",
                    seconds=3 * _SECONDS,
                )
                cases[child.pid] = number, subject, at, mode
                return child

            return make

        for child in run_all((start(n, *one) for n, one in planned), jobs=jobs):
            number, subject, at, mode = cases.pop(child.pid)
            assert child.outcome is not None
            size = self.operations[subject.name]
            how = "in" if mode == KILL_IN_WRITE else "before"
            yield Verdict(
                number=number,
                kind=f"kill: {subject.name}" if at else f"kill: {AT_RANDOM}",
                change=f"{how} operation {at} of {size}" if at else f"after {delays[number]:.0%}",
                result=WRONG if child.outcome.status else RIGHT,
                reason=(child.outcome.out + child.outcome.err).strip(),
                seconds=child.outcome.seconds,
            )


def operations_of(cases: KillCases) -> Sequence[str]:
    """Says how many operations each command has."""
    return [f"{name}: {count} file operations" for name, count in cases.operations.items()]
