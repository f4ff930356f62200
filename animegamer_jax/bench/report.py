"""What was measured: rows, the tables for people, one object for programs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from animegamer_jax.bench.compare import Difference
from animegamer_jax.bench.programs import Memory
from animegamer_jax.bench.timing import Spread, ratio, spread

OURS = "this code"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation of a program.

    Attributes:
        name: "this code", "eager" or "compiled".
        seconds: of all calls, by round.
        before_seconds: of compiling; of PyTorch, of the first call, which is when it compiles.
        call_memory: bytes by which the process grows within a call; None: the system does not say.
        differences: of its outputs from ours; none for this code.
    """

    name: str
    seconds: Sequence[float]
    before_seconds: float
    call_memory: int | None
    differences: tuple[Difference, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One program, this code's side first."""

    name: str
    about: str
    flops: float
    memory: Memory | None
    sides: tuple[Side, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What was measured where.

    Attributes:
        model: of the networks.
        device: what JAX calls it; of a CPU, what the system calls it.
        threads: cores that both sides use.
        dtype: of the parts of a turn; the stages' rows tell their own.
        repeats: calls of each side.
        peak: FLOP/s that shares are of; None: not known.
        peak_source: where that is from.
        versions: of the libraries.
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
        """For people."""
        cores = f"{self.threads} thread{'s' * (self.threads != 1)}"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        peak = "not known" if self.peak is None else f"{self.peak / 1e9:,.0f} GFLOP/s"
        return [
            f"{self.model}, {self.dtype}; {self.device}, {cores}; {versions}",
            f"peak: {peak}: {self.peak_source}",
            f"medians of {self.repeats} calls after one before; in brackets, percentiles 10 and 90",
        ]


def as_object(about: About, rows: Sequence[Row]) -> dict[str, Any]:
    """All that `--json` writes."""
    return {
        "about": dataclasses.asdict(about),
        "programs": [_record(row, about) for row in rows],
    }


def _record(row: Row, about: About) -> dict[str, Any]:
    sides = {}
    for side in row.sides:
        record = dataclasses.asdict(side)
        record.pop("name")
        found = spread(side.seconds)
        record["median"], record["p10"], record["p90"] = found
        record["flops_per_second"] = row.flops / found.median
        record["share_of_peak"] = _share(row, found, about)
        if side is not row.sides[0]:
            record["times_as_long"] = ratio(side.seconds, row.sides[0].seconds)._asdict()
        sides[side.name] = record
    memory = None if row.memory is None else dataclasses.asdict(row.memory)
    return {
        "name": row.name,
        "about": row.about,
        "flops": row.flops,
        "memory": memory,
        "sides": sides,
    }


def _share(row: Row, seconds: Spread, about: About) -> float | None:
    return None if about.peak is None else row.flops / seconds.median / about.peak


def show(about: About, rows: Sequence[Row], console: Console) -> None:
    """The tables, as Markdown."""
    for line in about.lines():
        console.print(line)
    console.print()
    console.print(_own_table(about, rows))
    if any(len(row.sides) > 1 for row in rows):
        console.print()
        console.print(_table_beside(rows))


def _table(*columns: str) -> Table:
    table = Table(box=box.MARKDOWN, pad_edge=True)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left", no_wrap=True)
    return table


def _own_table(about: About, rows: Sequence[Row]) -> Table:
    table = _table(
        *("program", "what", "compile, s", "a call, ms", "GFLOP", "GFLOP/s", "of peak"),
        *("arguments, MB", "temporaries, MB", "a call, MB"),
    )
    for row in rows:
        side = row.sides[0]
        found = spread(side.seconds)
        share = _share(row, found, about)
        memory = row.memory
        table.add_row(
            row.name,
            row.about,
            f"{side.before_seconds:.1f}",
            _milliseconds(found),
            f"{row.flops / 1e9:,.2f}",
            f"{row.flops / found.median / 1e9:,.1f}",
            _or_dash(share, "{:.0%}"),
            _megabytes(memory and memory.arguments),
            _megabytes(memory and memory.temporaries),
            _megabytes(side.call_memory),
        )
    return table


def _table_beside(rows: Sequence[Row]) -> Table:
    table = _table(
        *(
            "program",
            "side",
            "before the first call, s",
            "a call, ms",
            "times as long as this code",
        ),
        *("a call, MB", "largest difference", "RMS of the difference"),
    )
    for row in rows:
        ours = row.sides[0]
        for side in row.sides:
            found = ratio(side.seconds, ours.seconds)
            times = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
            table.add_row(
                row.name,
                side.name if side is ours else f"PyTorch, {side.name}",
                f"{side.before_seconds:.1f}",
                _milliseconds(spread(side.seconds)),
                "" if side is ours else times,
                _megabytes(side.call_memory),
                ", ".join(f"{one.what} {one.largest:.1e}" for one in side.differences),
                ", ".join(f"{one.rms:.1e}" for one in side.differences),
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
