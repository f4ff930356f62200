"""Cycles of a program's instructions by libtpu's final schedule, one bundle a cycle.

libtpu writes down how it packs each instruction of a program into bundles, with the loops over an
instruction's blocks. These are the cycles of one core, if memory keeps up. An instruction that both
cores of a chip share has a loop over its half of the blocks.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_FORM = "final_bundles"
_LINE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+([A-Z]{2})?\s*:\s(>*)\s*\{(\})?")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
_FILE = re.compile(rf"^\d+-(.+)-\d+-{_FORM}\.txt$")
# Iterations of a loop over blocks that only fetch the first block or store the last one.
_FILLING = 2


@dataclasses.dataclass
class Schedule:
    """The schedule of one instruction.

    Attributes:
        cycles: Bundles that run, loops multiplied. Bundles that run only in some iterations of a
            loop count in all of them.
        unknown_loops: Loops of unknown length, counted once: those that copy what is left over.
    """

    cycles: float = 0.0
    unknown_loops: int = 0


@dataclasses.dataclass
class _Loop:
    depth: int
    cycles: float = 0.0
    trips: int | None = None


def compiler_flags(folder: Path) -> str:
    """Returns the flags (`LIBTPU_INIT_ARGS`) with which libtpu writes schedules to a folder."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=^{_FORM}$"
    )


def read_schedules(folder: Path) -> dict[str, Schedule]:
    """Returns the schedule of each instruction, by its name in the compiled program's text."""
    found = {}
    for path in sorted(folder.iterdir()):
        name = _FILE.match(path.name)
        if name is not None:
            with path.open(errors="replace") as lines:
                found[name[1]] = read_schedule(lines)
    return found


def read_schedule(lines: Iterable[str]) -> Schedule:
    """Returns the schedule that a file of bundles describes."""
    schedule = Schedule()
    loops = [_Loop(0, trips=1)]

    def close(depth: int) -> None:
        while len(loops) > 1 and loops[-1].depth > depth:
            loop = loops.pop()
            schedule.unknown_loops += loop.trips is None
            loops[-1].cycles += loop.cycles * (1 if loop.trips is None else loop.trips)

    for label, depth, line in _bundles(lines):
        close(depth - (label == "LB"))
        if label == "LB":
            loops.append(_Loop(depth))
        loops[-1].cycles += 1
        if found := _EXIT.search(line):
            loops[-1].trips = max(1, int(found[1]) - _FILLING)
    close(0)
    schedule.cycles = loops[0].cycles
    return schedule


def _bundles(lines: Iterable[str]) -> Iterator[tuple[str | None, int, str]]:
    """Yields the label, the depth of loops and the text of each bundle."""
    depth = 0
    for line in lines:
        if found := _LINE.match(line):
            # An empty bundle has no depth: it waits for the one before, such as a jump.
            depth = depth if found[3] else len(found[2])
            yield found[1], depth, line
