"""The table of what was tried, of a record of the campaign, on the terminal and in the docs.

python tests/faults/table.py out/faults docs/reliability.md
"""

import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

REFUSED, RIGHT, WRONG = "refused", "right", "wrong"
PARTS = ("files", "kills", "disks", "buckets", "crowd", "requests")
_START, _END = "<!-- the campaign -->\n", "<!-- end -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one case.

    Attributes:
        number: Number of the case, by which it can be run again.
        kind: Kind of file, or fault.
        change: What was done.
        result: REFUSED, RIGHT or WRONG.
        reason: What is wrong, or the refusal.
        seconds, megabytes: What it took.
        operation, operations: File operation at which a kill struck, and their number; 0: none.
    """

    number: int
    kind: str
    change: str
    result: str
    reason: str
    seconds: float = 0.0
    megabytes: float = 0.0
    operation: int = 0
    operations: int = 0


def read_record(path: Path) -> dict[int, Verdict]:
    """Returns the last verdict of each case in a record."""
    if not path.exists():
        return {}
    found = [Verdict(**json.loads(line)) for line in path.read_text().splitlines()]
    return {verdict.number: verdict for verdict in found}


@dataclasses.dataclass
class _Row:
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0
    megabytes: float = 0.0
    struck: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    operations: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, one: Verdict) -> None:
        self.counts.update(["tried", one.result])
        self.seconds = max(self.seconds, one.seconds)
        self.megabytes = max(self.megabytes, one.megabytes)
        if one.operations:
            self.operations[one.kind] = one.operations
        if one.operation:
            self.struck.add((one.kind, one.operation))

    def fields(self) -> list[str]:
        counts = [f"{self.counts[name]:,}" for name in ("tried", REFUSED, RIGHT, WRONG)]
        seconds = f"{self.seconds:.1f}" if self.seconds else ""
        memory = f"{self.megabytes:.0f}" if self.megabytes else ""
        operations = sum(self.operations.values())
        struck = f"{len(self.struck):,} of {operations:,}" if operations else ""
        return [*counts, seconds, memory, struck]


_HEAD = ("tried", REFUSED, RIGHT, WRONG, "CPU s", "MB", "operations")


def _rows(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the head and each row, without columns that are empty in all of them."""
    rows: dict[str, _Row] = {}
    total = _Row()
    for one in sorted(verdicts, key=lambda one: one.kind):
        rows.setdefault(one.kind, _Row()).add(one)
        total.add(one)
    shown = [bool(field) for field in total.fields()]
    yield "", list(itertools.compress(_HEAD, shown))
    for kind, row in [*rows.items(), ("all", total)]:
        yield kind, list(itertools.compress(row.fields(), shown))


def format_table(verdicts: Iterable[Verdict]) -> str:
    """Returns the table of a part of the campaign for the terminal."""
    rows = [(kind, *fields) for kind, fields in _rows(verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([kind.ljust(widths[0]), *map(str.rjust, fields, widths[1:])])
        for kind, *fields in rows
    )


def _markdown(verdicts: Iterable[Verdict]) -> str:
    (_, head), *rows = _rows(verdicts)
    lines = [f"| | {' | '.join(head)} |", "|---" + "|--:" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {kind} | {' | '.join(row)} |" for kind, row in rows), ""])


def main(folder: Path, page: Path) -> None:
    """Replaces the tables of a page by those of a record."""
    before, _, rest = page.read_text().partition(_START)
    _, _, after = rest.partition(_END)
    records = [read_record(folder / f"{part}.jsonl") for part in PARTS]
    tables = [_markdown(record.values()) for record in records if record]
    page.write_text(before + _START + "\n" + "\n".join(tables) + "\n" + _END + after)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
