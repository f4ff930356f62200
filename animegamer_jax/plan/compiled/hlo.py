"""Parses the optimized HLO text of a compiled TPU program: computations, instructions, arrays."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from animegamer_jax.plan.interconnect import Groups

_NO_ESTIMATE = 10**12  # more cycles than this mean that there is no estimate
_ITEM_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64,
    "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_TAIL = re.compile(r"\}(, execution_thread=.*)?")
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_EXPLICIT_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
OPERAND = re.compile(r"%([\w.\-]+)")


class HLOError(ValueError):
    """The text is not in a known form."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a value: its type, shape, and whether it is in the chip's HBM."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> float:
        return self.size * _ITEM_BITS.get(self.dtype, 0) / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: an instruction's name, opcode, results and operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    literal: str

    @property
    def array(self) -> Array:
        if len(self.arrays) != 1:
            raise HLOError(f"{self.name}: expected one array, found {len(self.arrays)}")
        return self.arrays[0]

    def called(self, attribute: str) -> str | None:
        """Returns the computation that an attribute names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """`backend_config`, which the TPU compiler writes as JSON."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        except ValueError:
            return {}

    @property
    def estimated_cycles(self) -> float:
        """The compiler's estimate, made before the schedule; 0 if it has none."""
        cycles = float(self.config.get("window_config", {}).get("estimated_cycles", 0))
        return 0.0 if cycles > _NO_ESTIMATE else cycles


@dataclasses.dataclass(frozen=True)
class Computation:
    """The instructions of a computation by name, in order."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def users(self, name: str, *, through: tuple[str, ...] = ()) -> Iterator[Instruction]:
        """Yields the instructions that use a value, directly or through opcodes in `through`."""
        for user in self.instructions.values():
            if name in user.operands:
                if user.opcode in through:
                    yield from self.users(user.name, through=through)
                else:
                    yield user

    @property
    def parameters(self) -> list[Instruction]:
        """The parameters in order of their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations, and the name of the entry computation."""

    computations: Mapping[str, Computation]
    entry: str


def _balanced(text: str, start: int) -> int:
    """Returns the index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
            if depth == 0:
                return index + 1
    raise HLOError(f"no closing bracket: {text[start : start + 80]}")


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, shape, layout in _ARRAY.findall(text):
        if dtype not in _ITEM_BITS and dtype != "token":
            continue
        space = _MEMORY_SPACE.search(layout)
        dims = tuple(int(size.lstrip("<=")) for size in shape.split(",") if size)
        found.append(Array(dtype, dims, space is None or space[1] == "0"))
    return tuple(found)


def _read_instruction(line: str) -> Instruction | None:
    head = _NAME.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    bracket = rest.index("(")
    close = _balanced(rest, bracket)
    inside = rest[bracket + 1 : close - 1]
    return Instruction(
        name=head[2],
        opcode=rest[:bracket],
        arrays=_arrays(kind),
        operands=tuple(OPERAND.findall(inside)),
        attributes=rest[close:],
        is_root=head[1] is not None,
        literal=inside,
    )


def parse(text: str) -> Module:
    """Parses `compiled.as_text()`.

    Raises:
        HLOError: It is not the text of a compiled program.
    """
    computations: dict[str, Computation] = {}
    entry, name = None, None
    lines: list[str] = []
    for line in text.splitlines():
        if name is None:
            head = _HEAD.match(line)
            if head:
                name, lines = head[2], []
                entry = name if head[1] else entry
        elif _TAIL.fullmatch(line):
            found = filter(None, map(_read_instruction, lines))
            computations[name] = Computation(name, {i.name: i for i in found})
            name = None
        elif _NAME.match(line) or not lines:
            lines.append(line)
        else:  # a kernel's metadata spans several lines
            lines[-1] += line
    if entry is None or entry not in computations:
        raise HLOError("no ENTRY computation: expected the text of a compiled program")
    return Module(computations, entry)


def groups_of(attributes: str, *, devices: int) -> Groups:
    """Returns a collective's groups of devices; of a permutation, pairs of source and target.

    Raises:
        HLOError: The groups are in an unknown form.
    """
    if found := _EXPLICIT_GROUPS.search(attributes):
        return tuple(map(_numbers, re.findall(r"\{([\d,]*)\}", found[1])))
    if found := _IOTA_GROUPS.search(attributes):
        return _rows(_arranged(found[2], found[3]).reshape(_numbers(found[1])))
    if found := _AXIS_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        ids = _arranged(found[2] or str(math.prod(sizes.values())), found[3])
        return _along(ids.reshape(*sizes.values()), list(sizes), found[4])
    found = re.search(r"replica_groups=([^ ]*)", attributes)
    if found is not None and not found[1].startswith("{}"):
        raise HLOError(f"replica_groups={found[1][:80]}: an unknown form")
    return (tuple(range(devices)),)


def _along(ids: np.ndarray, names: list[str], axes: str) -> Groups:
    """Returns groups along axes: `'a'` is a full axis, `'a':(2)4` parts of 4 after a split in 2."""
    last = []
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        at = names.index(name)
        if part:
            split = (int(before), int(part), -1)
            ids = ids.reshape(*ids.shape[:at], *split, *ids.shape[at + 1 :])
            names = [*names[:at], f"{name} outside", name, f"{name} inside", *names[at + 1 :]]
        last.append(name)
    order = [n for n, name in enumerate(names) if name not in last]
    order += [names.index(name) for name in last]
    size = math.prod(ids.shape[names.index(name)] for name in last)
    return _rows(ids.transpose(order).reshape(-1, size))


def _arranged(shape: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, 2 … in a shape, with its axes in another order."""
    sizes = _numbers(shape)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(order) if order else None)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
