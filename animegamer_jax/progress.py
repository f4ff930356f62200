"""Progress on the terminal: bars, or a line now and then where there is no terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

OnProgress = Callable[[str, int, int], None]
Progress = OnProgress


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing: the default of functions that take a `Progress`."""


def print_status(line: str) -> None:
    """Prints a line on standard error at once; where there are bars, above them."""
    print(line, file=sys.stderr, flush=True)


_STAGES = {"mllm": "language model", "decoder": "denoising", "vae": "frames"}


_PLAIN_INTERVAL = 10.0


@contextlib.contextmanager
def show_turn_progress(turn: int, total: int | None) -> Iterator[OnProgress]:
    """Bars on a terminal, a plain line every ten seconds elsewhere; both on standard error."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield _PlainProgress(turn, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        if total:
            progress.add_task("turns", total=total, completed=turn - 1)
        task = progress.add_task(f"turn {turn}: {_STAGES['mllm']}", total=None)
        current = "mllm"

        def on_progress(stage: str, step: int, steps: int) -> None:
            nonlocal current
            if stage != current:
                current = stage
                progress.reset(task, total=steps, description=f"turn {turn}: {_STAGES[stage]}")
            progress.update(task, total=steps, completed=step)

        yield on_progress


class _PlainProgress:
    """Denoising steps and time left as lines, no more often than every ten seconds."""

    def __init__(self, turn: int, console: Console):
        self.turn, self.console = turn, console
        self.started: tuple[float, int] | None = None
        self.told = time.monotonic()

    def __call__(self, stage: str, step: int, total: int) -> None:
        if stage != "decoder" or step == 0:
            return
        now = time.monotonic()
        if self.started is None:  # the first step may have compiled: time the others
            self.started = now, step
            return
        if now - self.told < _PLAIN_INTERVAL or step == total:
            return
        self.told = now
        began, first = self.started
        left = (now - began) / (step - first) * (total - step)
        self.console.print(
            f"turn {self.turn}: {_STAGES[stage]} {step}/{total}, about {left:.0f} s left"
        )


_LINE_EVERY = 20.0  # seconds between lines where there is no terminal


_MOST_BARS = 8


@contextlib.contextmanager
def show_progress(
    unit: str, *, note: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[str, int, int], None]]:
    """Tells how far each split is, with a note: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        name = TextColumn("{task.description}", markup=False)  # films have brackets in their names
        told = TextColumn(unit + "{task.fields[note]}")
        columns = (name, BarColumn(), MofNCompleteColumn(), told, TimeRemainingColumn())
        with Bars(*columns, console=console) as bar:
            tasks = {}

            def draw(split: str, done: int, total: int) -> None:
                if split not in tasks:
                    if len(tasks) == _MOST_BARS:  # the first stays
                        bar.remove_task(tasks.pop(list(tasks)[1]))
                    tasks[split] = bar.add_task(split, total=total, note="")
                bar.update(tasks[split], completed=done, note=note())

            yield draw
        return
    last = [time.monotonic()]

    def say(split: str, done: int, total: int) -> None:
        if done == total or time.monotonic() - last[0] > _LINE_EVERY:
            last[0] = time.monotonic()
            print(f"{split}: {done} of {total} {unit}{note()}", file=sys.stderr, flush=True)

    yield say
