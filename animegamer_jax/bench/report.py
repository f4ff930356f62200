"""The results of a benchmark: tables for people, one JSON object for programs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from animegamer_jax.bench.compare import Difference
from animegamer_jax.bench.programs import Memory
from animegamer_jax.bench.timing import Spread, ratio, spread

JAX = "jax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One program on one backend.

    Attributes:
        backend: "jax", "torch eager" or "torch compiled".
        seconds: Seconds of all timed calls, in order.
        compile_seconds: Seconds to compile; of PyTorch, of the first call, when it compiles.
        call_memory: Bytes by which the process grows during a call; None: unknown.
        differences: Differences of the outputs from JAX's; none for JAX.
    """

    backend: str
    seconds: Sequence[float]
    compile_seconds: float
    call_memory: int | None
    differences: tuple[Difference, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program on all backends, JAX first."""

    name: str
    description: str
    flops: float
    memory: Memory | None
    timings: tuple[Timing, ...]

    @property
    def jax(self) -> Timing:
        return self.timings[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What was measured, and where.

    Attributes:
        model: Name of the model.
        device: JAX's name of the device; of a CPU, the operating system's.
        threads: CPU cores that all backends use.
        dtype: Number format of the parts of a turn; training steps have their own in their rows.
        repeats: Timed calls on each backend.
        peak: Peak FLOP/s; None: unknown.
        peak_source: Origin of the peak.
        versions: Versions of the libraries.
    """

    model: str
    device: str
    threads: int
    dtype: str
    repeats: int
    peak: float | None
    peak_source: str
    versions: dict[str, str]

    def lines(self) -> list[str]:
        """Describes the setup to people."""
        cores = f"{self.threads} thread{'s' * (self.threads != 1)}"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        peak = "unknown" if self.peak is None else f"{self.peak / 1e9:,.0f} GFLOP/s"
        return [
            f"{self.model}, {self.dtype}; {self.device}, {cores}; {versions}",
            f"peak: {peak}: {self.peak_source}",
            f"medians of {self.repeats} calls after one more; in brackets, percentiles 10 and 90",
        ]


def as_object(setup: Setup, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the object that `--json` writes."""
    return {
        "setup": dataclasses.asdict(setup),
        "programs": [_record(row, setup) for row in rows],
    }


def _record(row: Row, setup: Setup) -> dict[str, Any]:
    timings = {}
    for timing in row.timings:
        record = dataclasses.asdict(timing)
        record.pop("backend")
        found = spread(timing.seconds)
        record["median"], record["p10"], record["p90"] = found
        record["flops_per_second"] = row.flops / found.median
        record["share_of_peak"] = _share(row, found, setup)
        if timing is not row.jax:
            record["times_as_long"] = ratio(timing.seconds, row.jax.seconds)._asdict()
        timings[timing.backend] = record
    return {
        "name": row.name,
        "description": row.description,
        "flops": row.flops,
        "memory": None if row.memory is None else dataclasses.asdict(row.memory),
        "backends": timings,
    }


def _share(row: Row, seconds: Spread, setup: Setup) -> float | None:
    return None if setup.peak is None else row.flops / seconds.median / setup.peak


def show(setup: Setup, rows: Sequence[Row], console: Console) -> None:
    """Prints the tables, as Markdown."""
    for line in setup.lines():
        console.print(line)
    console.print()
    console.print(_program_table(setup, rows))
    if any(len(row.timings) > 1 for row in rows):
        console.print()
        console.print(_backend_table(rows))


def _table(*columns: str) -> Table:
    table = Table(box=box.MARKDOWN, pad_edge=True)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left", no_wrap=True)
    return table


def _program_table(setup: Setup, rows: Sequence[Row]) -> Table:
    table = _table(
        *("program", "what", "compile, s", "a call, ms", "GFLOP", "GFLOP/s", "of peak"),
        *("arguments, MB", "temporaries, MB", "a call, MB"),
    )
    for row in rows:
        found, memory = spread(row.jax.seconds), row.memory
        table.add_row(
            row.name,
            row.description,
            f"{row.jax.compile_seconds:.1f}",
            _milliseconds(found),
            f"{row.flops / 1e9:,.2f}",
            f"{row.flops / found.median / 1e9:,.1f}",
            _or_dash(_share(row, found, setup), "{:.0%}"),
            _megabytes(memory and memory.arguments),
            _megabytes(memory and memory.temporaries),
            _megabytes(row.jax.call_memory),
        )
    return table


def _backend_table(rows: Sequence[Row]) -> Table:
    table = _table(
        *("program", "backend", "compile or first call, s", "a call, ms"),
        *("times as long as jax", "a call, MB", "largest difference", "RMS of the difference"),
    )
    for row in rows:
        for timing in row.timings:
            found = ratio(timing.seconds, row.jax.seconds)
            times = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
            table.add_row(
                row.name,
                timing.backend,
                f"{timing.compile_seconds:.1f}",
                _milliseconds(spread(timing.seconds)),
                "" if timing is row.jax else times,
                _megabytes(timing.call_memory),
                ", ".join(f"{one.what} {one.largest:.1e}" for one in timing.differences),
                ", ".join(f"{one.rms:.1e}" for one in timing.differences),
            )
    return table


def _milliseconds(found: Spread) -> str:
    digits = 0 if found.median >= 1 else 1
    low, middle, high = (f"{1e3 * x:,.{digits}f}" for x in (found.low, found.median, found.high))
    return f"{middle} ({low} to {high})"


def _megabytes(size: int | None) -> str:
    return _or_dash(None if size is None else size / 1e6, "{:,.1f}")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
