"""Progress of long work on standard error: bars on a terminal, a line now and then elsewhere.

Both show the number done, the rate and the time left.
"""

import collections
import contextlib
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from animegamer_jax.errors import printable, printable_lines

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Receives what is counted ("films", "turn 3: denoising steps"), the number done and the total."""

_LINE_EVERY = 10.0  # seconds between two lines about the same thing
_SAMPLE_EVERY = 1.0  # seconds between two measurements of the rate
_NUM_SAMPLES = 30  # the rate is their median, which one slow step (a compilation) does not change


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing: the default of functions that take a `Progress`."""


def print_status(line: str) -> None:
    """Prints a line on standard error at once; where there are bars, above them."""
    print(printable_lines(line), file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Prints a result on standard output, in whatever encoding it has."""
    encoding = sys.stdout.encoding or "utf-8"
    line = printable_lines(text).encode(encoding, "backslashreplace").decode(encoding)
    print(line, flush=True)


def track(items: Iterable[T], progress: Progress, what: str, *, total: int) -> Iterator[T]:
    """Passes items on and reports their number; does not hold one while the next is made."""
    done = 0
    progress(what, done, total)
    for item in items:
        yield item
        del item
        done += 1
        progress(what, done, total)


@contextlib.contextmanager
def show_progress(
    *, note: Callable[[], str] = lambda: "", transient: bool = False
) -> Iterator[Progress]:
    """Shows the progress of the work in the block.

    What is counted first stays visible; the rest disappears once it is finished.

    Args:
        note: Returns text to show after the numbers, such as a loss or a cost.
        transient: Whether the bars disappear at the end of the block, and its end prints no line.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, highlight=False)
    name = TextColumn("{task.description}", markup=False)  # names of films have brackets
    numbers = TextColumn("{task.fields[numbers]}", markup=False)
    bars = Bars(name, BarColumn(), numbers, console=console, transient=transient)
    counts: dict[str, _Count] = {}
    tasks: dict[str, TaskID] = {}

    def draw(what: str, done: int, total: int) -> None:
        for old in [old for old in list(counts)[1:] if counts[old].finished and old != what]:
            del counts[old]
            bars.remove_task(tasks.pop(old))
        text = counts.setdefault(what, _Count()).update(done, total) + note()
        if what not in tasks:
            tasks[what] = bars.add_task(printable(what), numbers=text)
        bars.update(tasks[what], completed=done, total=total, numbers=text)

    def write(what: str, done: int, total: int) -> None:
        count = counts.setdefault(what, _Count())
        text = count.update(done, total)
        is_first = not transient and what == next(iter(counts))
        if count.is_due() or (count.finished and (is_first or count.printed)):
            count.printed = True
            print_status(f"{what}: {text}{note()}")

    if not console.is_terminal:
        yield write
        return
    with bars:
        yield draw


class _Count:
    """The number done of one thing, and how fast it grows."""

    def __init__(self):
        self.finished = self.printed = False
        self._line_time = time.monotonic()
        self._last: tuple[float, int] | None = None  # time of the last sample, number done then
        self._paces = collections.deque[float](maxlen=_NUM_SAMPLES)  # seconds for each one

    def update(self, done: int, total: int) -> str:
        """Takes the number done; returns "3 of 10, 2.0/min, 0:03:30 left"."""
        self.finished = done >= total
        now = time.monotonic()
        if self._last is None:
            self._last = now, done
        elapsed, new = now - self._last[0], done - self._last[1]
        if new > 0 and elapsed >= _SAMPLE_EVERY:
            self._paces.append(elapsed / new)
            self._last = now, done
        if self.finished or not self._paces:
            return f"{done:,} of {total:,}"
        pace = statistics.median_low(self._paces)
        left = datetime.timedelta(seconds=round(pace * (total - done)))
        return f"{done:,} of {total:,}, {_rate(pace)}, {left} left"

    def is_due(self) -> bool:
        """Returns whether it is time for another line; asked once a line."""
        now = time.monotonic()
        if now - self._line_time < _LINE_EVERY:
            return False
        self._line_time = now
        return True


def _rate(pace: float) -> str:
    """Returns the rate in the smallest unit of time in which at least one is done."""
    unit, seconds = next((u for u in _UNITS if u[1] >= pace), _UNITS[-1])
    rate = seconds / pace
    return f"{rate:,.0f}/{unit}" if rate >= 10 else f"{rate:.1f}/{unit}"


_UNITS = (("s", 1), ("min", 60), ("h", 3600), ("day", 86400))
