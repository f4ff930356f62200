"""Work on many films by Apache Beam: here on the cores of a machine, elsewhere on a cluster.

The stages are plain functions of one item each that write their own results under names of their
own (`films`, `annotate`, `games`); Beam only shares the items out. So the result does not depend on
the runner or the number of workers, and what was finished before a stop is not made again.
"""

import contextlib
import dataclasses
import difflib
import io
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from animegamer_jax.errors import UserError

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]

LOCAL = "DirectRunner"
# What Beam calls so first looks for another program on the network, which knows no `--workers`.
_LOCAL_CLASS = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
_JOB_SERVERS = ("flink", "spark", "portable")  # these take options that only the server knows
_OPTION = re.compile(r"[a-z][a-z0-9_]*(=.*)?", re.DOTALL)
# A worker's error reaches us as text.
_TOLD = re.compile(r"animegamer_jax\.errors\.UserError: (.*?)(?: \[while running|\n|$)")
_LOOK_EVERY = 3.0  # seconds at least,
_LOOK_SHARE = 20.0  # and so many times what a look takes: a bucket of many films is slow to count
_WHILE = re.compile(r" \[while running .*", re.DOTALL)
_ENDED = re.compile(r"Worker subprocess exited with return code (-?\d+)")


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

    @property
    def is_local(self) -> bool:
        """Whether the work is done on this machine."""
        return self.runner.lower() in (LOCAL.lower(), "direct")  # as Beam reads it

    def arguments(self) -> list[str]:
        """As Beam's own command line takes them."""
        told = [f"--runner={_LOCAL_CLASS if self.is_local else self.runner}"]
        if self.is_local:
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
        done: counts the items that are done, also before this call; asked now and then, for the
            progress.
        on_progress: called with the label, finished items and items; where the work is done in
            this process, also by `tell`.

    Raises:
        UserError: Beam knows no such runner or option, a worker was ended from outside, or the
            function raised one.
    """
    if not items:
        return
    with _quiet():
        import apache_beam as beam

        with (
            _watching(len(items), label, done, on_progress),
            _telling(machines),
            _crew(machines) as crew,
            beam.Pipeline(options=_options(machines)) as pipeline,
        ):
            _ = (
                pipeline
                | beam.Create(list(items), reshuffle=False)
                | beam.Reshuffle()  # else a runner may give all items to one worker
                | label >> beam.Map(_Call(function, crew))
            )


def _options(machines: Machines) -> "PipelineOptions":
    """Beam's options.

    Raises:
        UserError: one is unknown, or has a wrong value: Beam passes the unknown over.
    """
    from apache_beam.options.pipeline_options import PipelineOptions

    told, unknown = io.StringIO(), []
    arguments = machines.arguments()

    def parse(parser: Any) -> None:
        unknown.extend(parser.parse_known_args(arguments)[1])

    try:
        with contextlib.redirect_stderr(told):
            options = PipelineOptions(arguments)
            known = options.get_all_options(add_extra_args_fn=parse)
    except SystemExit:
        wrong = told.getvalue().rpartition("error: ")[2].strip()
        raise UserError(f"Beam options: {wrong}: mend the value") from None
    for argument in unknown:
        name = argument.removeprefix("--").partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1)
        if near or not machines.runner.lower().startswith(_JOB_SERVERS):
            meant = f"did you mean {near[0]}?" if near else "leave it out"
            raise UserError(f"Beam option {name!r}: unknown to runner {machines.runner}: {meant}")
    return options


@contextlib.contextmanager
def _crew(machines: Machines) -> Iterator[Path | None]:
    """A folder in which worker processes of this machine note themselves; None: there are none.

    When one of them dies, or at Ctrl-C, all are ended: Beam would wait for the answers of the dead
    for ever, or for those of the living to the end of their films.

    Raises:
        UserError: one of them died.
    """
    main = threading.main_thread()
    if not machines.is_local or machines.workers == 1 or threading.current_thread() is not main:
        yield None
        return
    codes: list[int] = []
    stopping = threading.Event()

    def stop(number: int, frame: object) -> NoReturn:
        stopping.set()
        for note in Path(place).iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(note.name), signal.SIGKILL)
        raise KeyboardInterrupt

    def notice(error: threading.ExceptHookArgs) -> None:
        """Threads of Beam are the only ones here, and their errors follow from the workers'."""
        found = _ENDED.search(str(error.exc_value))
        if found and not stopping.is_set():
            codes.append(int(found[1]))
            signal.pthread_kill(main.ident or 0, signal.SIGINT)  # wakes it

    with tempfile.TemporaryDirectory() as place:
        former = threading.excepthook, signal.signal(signal.SIGINT, stop) or signal.SIG_DFL
        threading.excepthook = notice
        try:
            yield Path(place)
        except KeyboardInterrupt:
            code = codes[0] if codes else -signal.SIGINT
            code = 128 - code if code < 0 else code  # as a shell tells a signal
            if code == 128 + signal.SIGINT:
                raise
            why = f"{code}: out of memory?" if code == 128 + signal.SIGKILL else code
            raise UserError(
                f"a worker was ended ({why}): run again, or with fewer --workers"
            ) from None
        finally:
            threading.excepthook = former[0]
            signal.signal(signal.SIGINT, former[1])


_hook: Progress | None = None


def tell(what: str, done: int, total: int) -> None:
    """Tells how far one item is, where the work is done in this process; elsewhere nothing."""
    if _hook is not None:
        _hook(what, done, total)


@contextlib.contextmanager
def _watching(
    total: int, label: str, done: Callable[[], int], on_progress: Progress
) -> Iterator[None]:
    """Within the block, tells now and then how many items are done, and at its end of all."""
    global _hook
    stop = threading.Event()

    def look() -> None:
        with contextlib.suppress(UserError, OSError):  # of the bucket: the work tells of it
            on_progress(label, min(done(), total), total)

    def watch() -> None:
        pause = _LOOK_EVERY
        while not stop.wait(pause):
            began = time.monotonic()
            look()
            pause = max(_LOOK_EVERY, _LOOK_SHARE * (time.monotonic() - began))

    watcher = threading.Thread(target=watch, daemon=True)
    _hook = on_progress
    look()
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
        found = _TOLD.search(str(error))
        if found is not None:
            raise UserError(found[1]) from error
        if (wrong := _wrong_with_runner(error, machines)) is None:
            raise
        raise UserError(f"runner {machines.runner!r}: {wrong}") from error


def _wrong_with_runner(error: Exception, machines: Machines) -> str | None:
    """What Beam says of a runner that it cannot use; None: the error is another one's."""
    if machines.is_local:
        return None
    lines = str(error).splitlines() or [""]
    if isinstance(error, ImportError):
        dataflow = "dataflow" in machines.runner.lower()
        mend = "pip install 'animegamer-jax[dataflow]'" if dataflow else "install what it needs"
        return f"{lines[0]}: {mend}"
    if isinstance(error, ValueError) and "validations errors" in lines[0]:
        return f"{' '.join(lines[1:])} Say it by --beam-options name=value"
    known = isinstance(error, (OSError, NotImplementedError))  # no job server, no Java
    known |= isinstance(error, ValueError) and "runner" in lines[0].lower()
    return lines[0] if known else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Beam logs each error several times, and its worker processes write to our standard error.

    What this process itself writes to `sys.stderr` is shown as before.
    """
    loggers = logging.getLogger(), logging.getLogger("apache_beam")
    levels = [logger.level for logger in loggers]
    handlers = logging.getLogger().handlers[:]  # Beam adds one that writes to this block's stderr
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
        logging.getLogger().handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Drops the result: pictures and clips are not to travel between workers.

    A worker process of this machine notes itself in the folder `crew`.
    """

    function: Callable[[Any], Any]
    crew: Path | None

    def __call__(self, item: Any) -> None:
        if self.crew is not None:
            (self.crew / str(os.getpid())).touch()
        self.function(item)
