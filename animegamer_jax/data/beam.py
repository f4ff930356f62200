"""Work on many films by Apache Beam: here on the cores of a machine, elsewhere on a cluster.

The stages are plain functions of one item each that write their own results under names of their
own (`films`, `annotate`, `games`); Beam only shares the items out. So the result does not depend on
the runner or the number of workers, and what was finished before a stop is not made again.
"""

import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from animegamer_jax.errors import UserError

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]

LOCAL = "DirectRunner"
_OPTION = re.compile(r"[a-z][a-z0-9_]*(=.*)?", re.DOTALL)
# A worker's error reaches us as text.
_TOLD = re.compile(r"animegamer_jax\.errors\.UserError: (.*?)(?: \[while running|\n|$)")
_LOOK_EVERY = 3.0  # seconds at least,
_LOOK_SHARE = 20.0  # and so many times what a look takes: a bucket of many films is slow to count
_WHILE = re.compile(r" \[while running .*", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """Where the work is done.

    Attributes:
        runner: of Apache Beam: DirectRunner (this machine), DataflowRunner, FlinkRunner,
            SparkRunner, PortableRunner.
        workers: processes on this machine; other runners have options of their own for it.
        beam_options: of the runner, such as project=mine region=europe-west4.
    """

    runner: str = LOCAL
    workers: int = 1
    beam_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"workers {self.workers}: expected 1 or more")
        for option in self.beam_options:
            if not _OPTION.fullmatch(option):
                raise UserError(
                    f"Beam option {option!r}: expected name=value, such as region=europe-west4"
                )

    def arguments(self) -> list[str]:
        """As Beam's own command line takes them."""
        told = [f"--runner={self.runner}"]
        if self.runner == LOCAL:
            mode = "in_memory" if self.workers == 1 else "multi_processing"
            told += [f"--direct_running_mode={mode}", f"--direct_num_workers={self.workers}"]
        return told + [f"--{option}" for option in self.beam_options]


def for_each(
    items: Sequence[Item],
    function: Callable[[Item], Any],
    *,
    machines: Machines,
    label: str,
    done: Callable[[], int] = lambda: 0,
    on_progress: Progress = lambda what, done, total: None,
) -> None:
    """Calls a function once for each item, or more often where a cluster tries again.

    Args:
        items: small: paths and numbers.
        function: importable, or a `functools.partial` of such a one; its result is dropped.
        machines: where.
        label: of the step.
        done: counts the results that are there; asked now and then, for the progress.
        on_progress: called with the label, finished items and items; where the work is done in
            this process, also by `tell`.

    Raises:
        UserError: Beam knows no such runner, or the function raised one.
    """
    if not items:
        return
    with _quiet():
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        with (
            _watching(len(items), label, done, on_progress),
            _telling(machines),
            beam.Pipeline(options=PipelineOptions(machines.arguments())) as pipeline,
        ):
            _ = (
                pipeline
                | beam.Create(list(items), reshuffle=False)
                | beam.Reshuffle()  # else a runner may give all items to one worker
                | label >> beam.Map(_Call(function))
            )


_hook: Progress | None = None


def tell(what: str, done: int, total: int) -> None:
    """Tells how far one item is, where the work is done in this process; elsewhere nothing."""
    if _hook is not None:
        _hook(what, done, total)


@contextlib.contextmanager
def _watching(
    total: int, label: str, done: Callable[[], int], on_progress: Progress
) -> Iterator[None]:
    """Within the block, tells now and then how many results are there, and at its end of all."""
    global _hook
    before, stop = done(), threading.Event()

    def watch() -> None:
        pause = _LOOK_EVERY
        while not stop.wait(pause):
            began = time.monotonic()
            on_progress(label, min(max(done() - before, 0), total), total)
            pause = max(_LOOK_EVERY, _LOOK_SHARE * (time.monotonic() - began))

    watcher = threading.Thread(target=watch, daemon=True)
    _hook = on_progress
    on_progress(label, 0, total)
    watcher.start()
    try:
        yield
    finally:
        _hook = None
        stop.set()
        watcher.join()
    on_progress(label, total, total)


@contextlib.contextmanager
def _telling(machines: Machines) -> Iterator[None]:
    """Turns what Beam makes of a `UserError` back into one."""
    try:
        yield
    except UserError as error:
        raise UserError(_WHILE.sub("", str(error))) from error
    except Exception as error:
        if isinstance(error, ValueError) and "runner" in str(error).lower():
            raise UserError(f"runner {machines.runner!r}: {str(error).splitlines()[0]}") from error
        found = _TOLD.search(str(error))
        if found is None:
            raise
        raise UserError(found[1]) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Beam logs each error several times, and its worker processes write to our standard error.

    What this process itself writes to `sys.stderr` is shown as before.
    """
    loggers = logging.getLogger(), logging.getLogger("apache_beam")
    levels = [logger.level for logger in loggers]
    former, shown, null = sys.stderr, os.dup(2), os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        os.dup2(null, 2)
        with os.fdopen(os.dup(shown), "w") as sys.stderr:
            yield
    finally:
        sys.stderr = former
        os.dup2(shown, 2)
        os.close(shown)
        os.close(null)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Drops the result: pictures and clips are not to travel between workers."""

    function: Callable[[Any], Any]

    def __call__(self, item: Any) -> None:
        self.function(item)
