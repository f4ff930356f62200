"""Calls a function for many items: in processes of this machine, or on a cluster.

The steps (`films`, `annotate`, `games`) are functions of one item that write files of their own. So
the result depends neither on the runner nor on the number of workers, and what was finished before
an interruption is not made again.
"""

import contextlib
import dataclasses
import logging
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from animegamer_jax.data.films.beam_options import option_values
from animegamer_jax.data.films.pool import run_in_processes
from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.progress import Progress, no_progress

Item = TypeVar("Item")

_LOCAL = ("local", "direct", "directrunner")  # the others are Beam's names for this machine
_SHORT_NAMES = {"dask": "DaskRunner", "dataflow": "DataflowRunner", "flink": "FlinkRunner"}
_SHORT_NAMES |= {"spark": "SparkRunner", "portable": "PortableRunner"}
_OPTION = re.compile(r"[a-z][a-z0-9_]*(=.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Where the work runs.

    Attributes:
        runner: Where the work runs: `local` (this machine), or an Apache Beam runner: dask,
            dataflow, flink, spark, portable, or the full name of a runner's class.
        workers: Number of processes on this machine. A cluster's size is set by the options of its
            runner.
        beam_options: Options of the Apache Beam runner, such as project=mine region=europe-west4.
            Default: none.
    """

    runner: str = "local"
    workers: int = 1
    beam_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least("workers", self.workers, 1)
        for option in self.beam_options:
            if not _OPTION.fullmatch(option):
                raise UserError(
                    f"Beam option {option!r}: expected name=value, such as region=europe-west4"
                )
            if self.is_local:
                raise UserError(
                    f"Beam option {option!r}: runner {self.runner} takes none: name a Beam runner, "
                    "such as --runner dataflow"
                )

    @property
    def is_local(self) -> bool:
        """Whether the work runs on this machine."""
        return self.runner.lower() in _LOCAL

    @property
    def beam_runner(self) -> str:
        """The runner's name in Beam, from a short one in any case."""
        return _SHORT_NAMES.get(self.runner.lower().removesuffix("runner"), self.runner)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all workers are on this machine: processes, or those of a local Dask cluster."""
        if self.is_local or self.beam_runner != "DaskRunner":
            return self.is_local
        options = option_values(self.beam_options)
        if "dask_scheduler_file" in options:
            return False
        host = urllib.parse.urlsplit(options.get("dask_client_address", "//localhost")).hostname
        return is_loopback(host or "")

    def reporting(self, on_progress: Progress) -> Progress:
        """Returns what the function itself can report to: nothing in another process."""
        return on_progress if self.is_local and self.workers == 1 else no_progress


def is_loopback(host: str) -> bool:
    """Returns whether a host's name or address means the machine that uses it."""
    return host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")


def for_each(
    items: Sequence[Item],
    function: Callable[[Item], Any],
    *,
    options: RunnerOptions,
    label: str,
    count_done: Callable[[], int] = lambda: 0,
    on_progress: Progress = no_progress,
) -> None:
    """Calls a function once for each item; a cluster may call it again after a failure.

    Args:
        items: Small values, such as paths and numbers.
        function: An importable function, or a `functools.partial` of one. Its result is dropped.
        options: Where the work runs.
        label: What the items are, for the progress: "films".
        count_done: Returns the number of finished items, earlier runs included. A cluster's
            progress is counted by it.
        on_progress: Called with the label, the number of finished items and their number.

    Raises:
        UserError: The function raised one, a worker process died, or Beam does not know the runner
            or an option.
    """
    total = len(items)
    if not items:
        return
    if options.is_local:
        on_progress(label, 0, total)
        with contextlib.closing(run_in_processes(items, function, options.workers)) as finished:
            for done, _ in enumerate(finished, start=1):
                on_progress(label, done, total)
        return
    logging.disable(logging.WARNING)  # of Beam, about libraries that are not needed here
    try:
        from animegamer_jax.data.films.beam import run_with_beam
    finally:
        logging.disable(logging.NOTSET)

    run_with_beam(
        items,
        function,
        runner=options.beam_runner,
        options=options.beam_options,
        label=label,
        report=lambda: on_progress(label, min(count_done(), total), total),
    )
    on_progress(label, total, total)
