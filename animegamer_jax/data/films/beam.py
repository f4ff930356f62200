"""Calls a function for many items on a cluster, by Apache Beam."""

import contextlib
import difflib
import importlib
import io
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import grpc
from apache_beam.options.pipeline_options import PipelineOptions

from animegamer_jax.data.films.beam_options import option_values
from animegamer_jax.errors import UserError
from animegamer_jax.extras import how_to_install

_JOB_SERVERS = ("flink", "spark", "portable")  # take options that only the server knows
# A worker's error arrives as text.
_USER_ERROR = re.compile(r"animegamer_jax\.errors\.UserError: (.*?)(?: \[while running|\n|$)")
_WHILE = re.compile(r" \[while running .*\]$", re.DOTALL)
_DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"  # Beam has no short name for it
_DASK_TASKS = 20_000  # that a scheduler manages with ease; a task is lost with its worker
_REPORT_EVERY = 60.0  # seconds: a bucket of many films is slow to count


def run_with_beam(
    items: Sequence[Any],
    function: Callable[[Any], Any],
    *,
    runner: str,
    options: Sequence[str],
    label: str,
    report: Callable[[], None],
) -> None:
    """Calls a function for each item on a runner of Apache Beam, and waits for the end.

    Args:
        items: Small values that can be pickled.
        function: An importable function, or a `functools.partial` of one.
        runner: Name of the runner.
        options: Options of the runner, each `name=value`.
        label: Name of the step.
        report: Called now and then, to count and report what is finished.

    Raises:
        UserError: The function raised one, or Beam does not know the runner or an option.
    """
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)  # logs what it raises too
    with (
        _user_errors(runner, options),
        _repeating(report),
        _closed_clients(runner),
        beam.Pipeline(options=_parse(runner, [*_defaults(runner, options, items), *options])) as p,
    ):
        _ = (
            p
            | beam.Create(list(items), reshuffle=False)
            | beam.Reshuffle()  # else a runner may give all items to one worker
            | label >> beam.Map(function)
        )


def _defaults(runner: str, options: Sequence[str], items: Sequence[Any]) -> list[str]:
    """Returns options that Beam chooses badly: 128 items at a time for each of Dask's workers."""
    if runner != "DaskRunner" or option_values(options).keys() & {
        "dask_npartitions",
        "dask_partition_size",
    }:
        return []
    return [f"dask_partition_size={math.ceil(len(items) / _DASK_TASKS)}"]


@contextlib.contextmanager
def _closed_clients(runner: str) -> Iterator[None]:
    """Closes the connection to a Dask cluster at the end, which Beam leaves open."""
    if runner != "DaskRunner":
        yield
        return
    distributed: Any = importlib.import_module("dask.distributed")
    for name in ("distributed", "distributed.client", "distributed.scheduler"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # none was opened
            client = distributed.default_client()
            cluster = client.cluster  # one that was started for this run
            client.close()
            if cluster is not None:
                cluster.close()


@contextlib.contextmanager
def _repeating(report: Callable[[], None]) -> Iterator[None]:
    """Calls a function at once, and then every minute until the block ends."""
    stop = threading.Event()

    def repeat() -> None:
        while True:
            with contextlib.suppress(UserError, OSError):  # of the bucket; the work raises it too
                report()
            if stop.wait(_REPORT_EVERY):
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _parse(runner: str, options: Sequence[str]) -> PipelineOptions:
    """Returns Beam's options.

    Raises:
        UserError: One is unknown, which Beam itself ignores, or has a wrong value.
    """
    name = _DASK if runner == "DaskRunner" else runner
    if "." in name:  # its options are known once its module is loaded
        importlib.import_module(name.rpartition(".")[0])
    arguments = [f"--runner={name}", *(f"--{option}" for option in options)]
    unknown: list[str] = []
    known: list[str] = []

    def parse(parser: Any) -> None:
        known.extend(re.findall(r"--(\w+)", parser.format_usage()))
        unknown.extend(parser.parse_known_args(arguments)[1])

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parsed = PipelineOptions(arguments)
            parsed.get_all_options(add_extra_args_fn=parse)
    except SystemExit:
        wrong = printed.getvalue().rpartition("error: ")[2].strip()
        raise UserError(f"Beam options: {wrong}: correct the value") from None
    for argument in unknown:
        name = argument.removeprefix("--").partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1)
        if near or not runner.lower().startswith(_JOB_SERVERS):
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise UserError(f"Beam option {name!r}: unknown to runner {runner}: {hint}")
    return parsed


@contextlib.contextmanager
def _user_errors(runner: str, options: Sequence[str]) -> Iterator[None]:
    """Turns a worker's `UserError` back into one, and what Beam says of a runner it cannot use."""
    try:
        yield
    except UserError as error:
        raise UserError(_WHILE.sub("", str(error))) from error
    except Exception as error:
        found = _USER_ERROR.search(str(error))
        if found is not None:
            raise UserError(found[1]) from error
        if (reason := _runner_failure(error, runner, options)) is None:
            raise
        raise UserError(f"runner {runner!r}: {reason}") from error


def _runner_failure(error: Exception, runner: str, options: Sequence[str]) -> str | None:
    """Returns why Beam cannot use a runner; None if the error has another cause."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, ImportError):
        extra = next((name for name in ("dataflow", "dask") if name in runner.lower()), None)
        hint = how_to_install(extra) if extra else "install what it needs"
        return f"{lines[0]}: {hint}"
    if isinstance(error, grpc.FutureTimeoutError):
        address = option_values(options).get("job_endpoint", "its address")
        return f"no job server answers at {address}: start it, or check job_endpoint"
    if isinstance(error, RuntimeError) and "job server jar" in lines[0]:
        return (
            "its job server is not on this machine and cannot be downloaded: start one, and use "
            "--runner portable --beam-options job_endpoint=HOST:PORT"
        )
    if type(error).__name__ == "KilledWorker":  # of Dask
        return f"workers died again and again: {lines[0]}: give them more memory"
    if isinstance(error, ValueError) and "validations errors" in lines[0]:
        return f"{' '.join(lines[1:])} Give it by --beam-options name=value"
    known = isinstance(error, (OSError, NotImplementedError))  # no job server, no Java
    known |= isinstance(error, ValueError) and "runner" in lines[0].lower()
    return lines[0] if known else None
