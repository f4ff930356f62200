"""What a compiled TPU program costs, read from its optimized HLO text.

`cost_analysis()` counts the body of a loop once, so the text is walked instead: each instruction's
estimated cycles, times the trips of the loops around it. What the compiler has no estimate for
(kernels) is listed with its operands.
"""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from animegamer_jax.plan.hlo import (
    OPERAND,
    Array,
    Computation,
    HLOError,
    Instruction,
    Module,
    groups_of,
    parse,
)
from animegamer_jax.plan.links import Groups

_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all",
)  # fmt: skip
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "async-update",
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_VALUE = ("bitcast", "copy", "reshape", "convert", "get-tuple-element")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same groups: how often, and bytes sent by a chip."""

    kind: str
    groups: Groups
    count: float = 0.0
    sent: float = 0.0

    @property
    def group(self) -> int:
        """Devices of a group; of a permutation the two of a pair."""
        return len(self.groups[0])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is not XLA's own, as it is called: its name, operands and results."""

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]


@dataclasses.dataclass
class Cost:
    """What one chip does in one call of a program.

    Attributes:
        product_cycles, other_cycles: the compiler's estimates: instructions that hold a product of
            matrices, and all others.
        product_flops: of the products, two a multiplication.
        other_bytes: read and written in HBM by the other instructions.
        product_bytes: by the products.
        kernels: number of calls; the compiler has no estimate for them.
        collectives: by kind and groups.
        unknown_loops: loops whose trips are not known, counted once.
        without_estimate: instructions that the compiler has no estimate for.
    """

    product_cycles: float = 0.0
    other_cycles: float = 0.0
    product_flops: float = 0.0
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    kernels: dict[Kernel, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    collectives: dict[tuple[str, Groups], Collective] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0
    without_estimate: float = 0.0

    def add_collective(self, kind: str, groups: Groups, sent: float, times: float) -> None:
        old = self.collectives.get((kind, groups), Collective(kind, groups))
        self.collectives[kind, groups] = dataclasses.replace(
            old, count=old.count + times, sent=old.sent + sent * times
        )


def sent_by_a_chip(kind: str, *, result: float, group: int) -> float:
    """Bytes that a chip sends for a collective whose result has so many, in rings."""
    share = (group - 1) / group
    return {
        "all-reduce": 2 * share * result,
        "all-gather": share * result,
        "reduce-scatter": (group - 1) * result,
        "all-to-all": share * result,
        "ragged-all-to-all": share * result,
        "collective-permute": result,
    }[kind]


class _Walker:
    def __init__(self, module: Module, *, devices: int):
        self.module, self.devices = module, devices
        self.cost = Cost()

    @functools.cached_property
    def _started(self) -> set[str]:
        """Chains of collectives whose start is in the text."""
        inside = [
            (i, c) for c in self.module.computations.values() for i in c.instructions.values()
        ]
        return {chain for i, c in inside if (chain := _chain(i)) and _is_started(i, c)}

    def computation(self, name: str) -> Computation:
        return self.module.computations[name]

    def walk(self, name: str, times: float) -> None:
        for instruction in self.computation(name).instructions.values():
            self._visit(instruction, self.computation(name), times)

    def _visit(self, i: Instruction, inside: Computation, times: float) -> None:
        if i.opcode in _FREE:
            return
        if i.opcode == "while":
            self.walk(_named(i, "body"), times * self._trips(i, inside))
        elif i.opcode == "call":
            self.walk(_named(i, "to_apply"), times)
        elif i.opcode == "conditional":
            self._branches(i, times)
        elif i.opcode == "async-start":
            self.walk(_named(i, "calls"), times)
        elif (kind := i.opcode.removesuffix("-start")) in _COLLECTIVES:
            result = _num_bytes(_result(i, inside))
            self._collective(i, kind, result=result, times=times)
        elif i.opcode.endswith("-start"):
            self._transfer(i, inside, times)
        elif i.opcode == "custom-call":
            self._custom_call(i, inside, times)
        elif not i.opcode.endswith("-done"):
            self._compute(i, inside, times)

    def _compute(self, i: Instruction, inside: Computation, times: float) -> None:
        called = i.called("calls") if i.opcode == "fusion" else None
        fused = self._fused_collectives(called) if called else []
        for collective, kind, result in fused:
            self._collective(collective, kind, result=result, times=times)
        if fused and "kind=kCustom" in i.attributes:
            return
        flops = self.flops(called) if called else _product_flops(i, inside)
        moved = self._bytes(i, inside)
        cycles = i.cycles
        if cycles is None:
            self.cost.without_estimate += times
            cycles = 0.0
        if flops:
            self.cost.product_flops += flops * times
            self.cost.product_cycles += cycles * times
            self.cost.product_bytes += moved * times
        else:
            self.cost.other_cycles += cycles * times
            self.cost.other_bytes += moved * times

    def _branches(self, i: Instruction, times: float) -> None:
        """The dearest branch."""
        found = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
        names = OPERAND.findall(found[1]) if found else []
        names += [n for n in map(i.called, ("true_computation", "false_computation")) if n]
        walked = []
        for name in names:
            walker = _Walker(self.module, devices=self.devices)
            walker.walk(name, 1.0)
            walked.append((walker.cost.product_cycles + walker.cost.other_cycles, name))
        if walked:
            self.walk(max(walked)[1], times)

    def _collective(self, i: Instruction, kind: str, *, result: float, times: float) -> None:
        groups = groups_of(i.attributes, devices=self.devices)
        group = len(groups[0])
        if group > 1 and result:
            sent = sent_by_a_chip(kind, result=result, group=group)
            self.cost.add_collective(kind, groups, sent, times)

    def _fused_collectives(self, name: str) -> list[tuple[Instruction, str, float]]:
        """Those in a fused computation, their kinds, and bytes of their results.

        A reduce-scatter is written as a slice of an all-reduce. A collective that runs beside
        several fusions (`chain_id`) stands in each of them: it counts where it starts, and has no
        bytes elsewhere.
        """
        computation = self.computation(name)
        found: list[tuple[Instruction, str, float]] = []
        for i in computation.instructions.values():
            if i.opcode == "fusion":
                found += self._fused_collectives(_named(i, "calls"))
            elif (kind := i.opcode.removesuffix("-start")) in _COLLECTIVES:
                result = _num_bytes(_result(i, computation))
                users = computation.users(i.name, through=_SAME_VALUE)
                slices = [user for user in users if user.opcode in _SLICES]
                if kind == "all-reduce" and slices:
                    kind, result = "reduce-scatter", sum(_num_bytes(s.arrays) for s in slices)
                if _chain(i) in self._started and not _is_started(i, computation):
                    result = 0.0
                found.append((i, kind, result))
        return found

    def _transfer(self, i: Instruction, inside: Computation, times: float) -> None:
        """A copy or a slice that runs beside other work: its result goes in or out of HBM."""
        result = _result(i, inside)
        moved = _num_bytes(array for array in result if array.in_hbm)
        sources = [a for o in i.operands[:1] for a in inside.instructions[o].arrays]
        if any(source.in_hbm for source in sources):
            moved += _num_bytes(result)
        self.cost.other_bytes += moved * times
        self.cost.other_cycles += (i.cycles or 0.0) * times

    def _custom_call(self, i: Instruction, inside: Computation, times: float) -> None:
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        if target is None or target[1] != "tpu_custom_call":
            return
        name = re.sub(r"\.\d+$", "", i.name)
        operands = [a for o in i.operands for a in inside.instructions[o].arrays]
        self.cost.kernels[Kernel(name, tuple(operands), i.arrays)] += times

    def _trips(self, i: Instruction, inside: Computation) -> float:
        known = i.config.get("known_trip_count", {}).get("n")
        trips = float(known) if known is not None else self._counted(i, inside)
        if trips is None:
            self.cost.unknown_loops += 1
            return 1.0
        return trips

    def _counted(self, i: Instruction, inside: Computation) -> float | None:
        """Trips of `for (n = start; n < end; n += 1)`, which is what `lax.scan` becomes."""
        condition = self.computation(_named(i, "condition"))
        compare = condition.root
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        counter, end = (condition.instructions[name] for name in compare.operands)
        index = re.search(r"index=(\d+)", counter.attributes)
        if end.opcode != "constant" or index is None:
            return None
        start = inside.instructions[inside.instructions[i.operands[0]].operands[int(index[1])]]
        while start.opcode in ("copy", "bitcast") and start.operands:
            start = inside.instructions[start.operands[0]]
        if start.opcode != "constant":
            return None
        return float(int(end.literal) - int(start.literal))

    @functools.cache  # noqa: B019 - lives as long as the walk
    def flops(self, name: str) -> float:
        """Of the products in a fused computation."""
        computation, total = self.computation(name), 0.0
        for i in computation.instructions.values():
            called = i.called("calls") if i.opcode == "fusion" else None
            total += self.flops(called) if called else _product_flops(i, computation)
        return total

    def _bytes(self, i: Instruction, inside: Computation) -> float:
        """Read and written in HBM; of what is sliced only the slice."""
        called = i.called("calls") if i.opcode == "fusion" else None
        total = self._written(i, inside)
        parameters = self.computation(called).parameters if called else []
        for place, name in enumerate(i.operands):
            operand = inside.instructions.get(name)
            if operand is None or len(operand.arrays) != 1 or not operand.array.in_hbm:
                continue
            whole = operand.array.num_bytes
            if called:
                total += self._read(self.computation(called), parameters[place], whole)
            elif i.opcode in _SLICES:
                total += min(whole, _num_bytes(i.arrays))
            elif i.opcode == "dynamic-update-slice" and place == 0:
                continue
            else:
                total += whole
        return total

    def _written(self, i: Instruction, inside: Computation) -> float:
        stored = zip(self._stored(i, inside), i.arrays, strict=True)
        return sum((size for size, array in stored if array.in_hbm), 0.0)

    def _stored(self, i: Instruction, inside: Computation) -> list[float]:
        """Bytes that are stored for each array of a value, wherever it lies.

        Of an update in place only the update; nothing for an operand that is passed on, nor for
        what a collective brings.
        """
        parts = [inside.instructions[name] for name in i.operands if name in inside.instructions]
        if i.opcode == "fusion" and (called := i.called("calls")):
            found = self._stored(self.computation(called).root, self.computation(called))
        elif i.opcode == "tuple":
            found = [
                size
                for part in parts
                for size in ([0.0] if part.opcode == "parameter" else self._stored(part, inside))
            ]
        elif i.opcode == "bitcast" and parts:
            found = self._stored(parts[0], inside)
        elif i.opcode == "dynamic-update-slice":
            found = [_num_bytes(parts[1].arrays)]
        elif i.opcode in _COLLECTIVES:
            found = [0.0] * len(i.arrays)
        else:
            found = []
        if len(found) != len(i.arrays):
            return [array.num_bytes for array in i.arrays]
        return found

    def _read(self, computation: Computation, parameter: Instruction, whole: float) -> float:
        total = 0.0
        for user in computation.users(parameter.name, through=("bitcast",)):
            if user.opcode in _SLICES:
                total += _num_bytes(user.arrays)
            elif user.opcode == "tuple" or user.opcode in _COLLECTIVES:
                continue  # it stays where it is; a collective's traffic is counted by itself
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
                continue
            elif user.opcode == "fusion" and (called := user.called("calls")):
                inner = self.computation(called)
                places = [n for n, name in enumerate(user.operands) if name == parameter.name]
                total += sum(self._read(inner, inner.parameters[n], whole) for n in places)
            else:
                return whole
        return min(total, whole)


def _num_bytes(arrays: Iterable[Array]) -> float:
    return sum((array.num_bytes for array in arrays), 0.0)


def _result(i: Instruction, inside: Computation) -> tuple[Array, ...]:
    """What an instruction gives; of one that starts, what the one that ends it gives.

    The tuples of those that start differ by kind: operands before results, or none, or counters.
    """
    if not i.opcode.endswith("-start"):
        return i.arrays
    end = i.opcode.removesuffix("-start") + "-done"
    for user in inside.users(i.name):
        if user.opcode == end:
            return user.arrays
    raise HLOError(f"{i.opcode} {i.name}: no {end}")


def _chain(i: Instruction) -> str | None:
    """Of a collective that runs beside several fusions: a number of its own."""
    found = re.search(r'chain_id="(\d+)"', i.attributes)
    return found and found[1]


def _is_started(i: Instruction, computation: Computation) -> bool:
    users = computation.users(i.name, through=(*_SAME_VALUE, *_SLICES))
    return any('"AsyncCollectiveStart"' in user.attributes for user in users)


def _named(i: Instruction, attribute: str) -> str:
    name = i.called(attribute)
    if name is None:
        raise HLOError(f"{i.opcode} {i.name}: no {attribute}")
    return name


def _product_flops(i: Instruction, inside: Computation) -> float:
    """Two a multiplication, of one `convolution` or `dot`; 0 for anything else."""
    if i.opcode == "convolution":
        return _convolution_flops(i, inside)
    if i.opcode != "dot":
        return 0.0
    left = inside.instructions[i.operands[0]].array
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    dims = [int(d) for d in found[1].split(",") if d] if found else []
    return 2.0 * i.array.size * math.prod(left.shape[d] for d in dims)


def _convolution_flops(i: Instruction, inside: Computation) -> float:
    """A product of matrices is a convolution without a window to this compiler.

    Places of the window that fall on padding or on the holes of a dilated operand multiply
    nothing; they are not counted.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        raise HLOError(f"convolution {i.name}: no dim_labels")
    source, kernel, result = labels[1], labels[2], labels[3]
    left = inside.instructions[i.operands[0]].array
    right = inside.instructions[i.operands[1]].array
    window = _window(i.attributes, rank=sum(c.isdigit() for c in result))
    total = 2.0 * i.array.shape[result.index("b")] * i.array.shape[result.index("f")]
    total *= right.shape[kernel.index("i")]
    for number, part in enumerate(window):
        size = left.shape[source.index(str(number))]
        out = i.array.shape[result.index(str(number))]
        total *= _hits(size=size, out=out, **part)
    return total


def _window(attributes: str, *, rank: int) -> list[dict[str, int]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}

    def numbers(name: str, default: int) -> Sequence[int]:
        said = fields.get(name)
        return [int(n) for n in said.split("x")] if said else [default] * rank

    pads = fields.get("pad")
    low = [int(p.split("_")[0]) for p in pads.split("x")] if pads else [0] * rank
    return [
        {"taps": taps, "stride": stride, "low": lo, "dilation": dilation, "holes": holes}
        for taps, stride, lo, dilation, holes in zip(
            numbers("size", 1),
            numbers("stride", 1),
            low,
            numbers("rhs_dilate", 1),
            numbers("lhs_dilate", 1),
            strict=True,
        )
    ]


def _hits(
    *, size: int, out: int, taps: int, stride: int, low: int, dilation: int, holes: int
) -> int:
    """Pairs of an output place and a tap that meet an input."""
    reach = (size - 1) * holes
    total = 0
    for tap in range(taps):
        offset = tap * dilation - low
        # Output places o with 0 <= o * stride + offset <= reach, on an input, not in a hole.
        first = max(0, -(offset // stride) if offset < 0 else 0)
        last = min(out - 1, (reach - offset) // stride)
        if holes == 1:
            total += max(0, last - first + 1)
        else:
            total += sum((o * stride + offset) % holes == 0 for o in range(first, last + 1))
    return total


def cost_of(text: str, *, devices: int) -> Cost:
    """Walks a compiled program's text.

    Args:
        text: `compiled.as_text()`.
        devices: that the program runs on.

    Raises:
        HLOError: it is not the text of a compiled program.
    """
    module = parse(text)
    walker = _Walker(module, devices=devices)
    walker.walk(module.entry, 1.0)
    return walker.cost
