"""The cost of a compiled TPU program, from its optimized HLO text and its schedules.

`cost_analysis()` counts the body of a loop once, so this walks the text instead. An instruction
takes the cycles of its final schedule, or those in which the memory moves its bytes if these are
more, times the iterations of the loops around it. Asynchronous copies use the time in which other
instructions of their computation leave the memory idle; only what they need more counts. Of an
asynchronous collective only the time counts that its end waits for it; one at a time is on the way.
It is the same for a collective that SparseCores carry out.
"""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from animegamer_jax.plan.compiled.hlo import (
    OPERAND,
    Array,
    Computation,
    HLOError,
    Instruction,
    Module,
    groups_of,
    parse,
)
from animegamer_jax.plan.compiled.matmuls import matmul_flops
from animegamer_jax.plan.compiled.schedule import Schedule
from animegamer_jax.plan.compiled.traffic import COLLECTIVES, SLICES, moved_bytes, num_bytes
from animegamer_jax.plan.interconnect import Groups

_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "async-update",
)  # fmt: skip
_BETWEEN_SLICES = "xla_megascale_runtime"
_NOT_TINY = 1000  # cycles
_SAME_VALUE = ("bitcast", "copy", "reshape", "convert", "get-tuple-element")


@dataclasses.dataclass
class Collective:
    """All collectives of one kind over the same groups: their number, and bytes sent by a chip."""

    kind: str
    groups: Groups
    count: float = 0.0
    sent: float = 0.0

    @property
    def group(self) -> int:
        """Number of devices in a group; of a permutation, the two of a pair."""
        return len(self.groups[0])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A custom kernel: its name, operands and results."""

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]


@dataclasses.dataclass
class Cost:
    """The cost of one call of a program on one chip.

    Attributes:
        matmul_cycles, kernel_cycles, other_cycles: Cycles of instructions with a matmul, of
            kernels, and of all others.
        matmul_flops: FLOPs of the matmuls, two for each multiplication.
        waiting_cycles: Cycles in which a collective is waited for.
        moved_bytes: Bytes read and written in HBM.
        sent_between_slices: Bytes that a device sends to other slices.
        kernels: Number of calls of each kernel.
        collectives: Collectives by kind and groups.
        unknown_loops: Number of loops of unknown length, counted once.
        without_schedule: Runs of instructions without a schedule, counted by the compiler's earlier
            estimate or their bytes.
    """

    matmul_cycles: float = 0.0
    kernel_cycles: float = 0.0
    other_cycles: float = 0.0
    waiting_cycles: float = 0.0
    matmul_flops: float = 0.0
    moved_bytes: float = 0.0
    sent_between_slices: float = 0.0
    kernels: dict[Kernel, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    collectives: dict[tuple[str, Groups], Collective] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0
    without_schedule: float = 0.0

    @property
    def cycles(self) -> float:
        return self.matmul_cycles + self.kernel_cycles + self.other_cycles


def sent_by_a_chip(kind: str, *, result: float, group: int) -> float:
    """Returns the bytes that a chip sends for a collective in rings, by the bytes of its result."""
    share = (group - 1) / group
    return {
        "all-reduce": 2 * share * result,
        "all-gather": share * result,
        "reduce-scatter": (group - 1) * result,
        "all-to-all": share * result,
        "ragged-all-to-all": share * result,
        "collective-permute": result,
    }[kind]


LinkCycles = Callable[[str, Groups, float], float]
"""Returns the cycles that a collective takes, by its kind, its groups and the bytes of a chip."""


@dataclasses.dataclass
class _Scope:
    """The time within one computation, in cycles.

    Attributes:
        clock: Time since its start.
        free: When the links are free for the next collective.
        ends: When each asynchronous collective ends that is on the way.
        idle, copied: Time in which the memory is idle, and that of asynchronous copies.
    """

    clock: float = 0.0
    free: float = 0.0
    ends: dict[str, float] = dataclasses.field(default_factory=dict)
    idle: float = 0.0
    copied: float = 0.0


class _Walker:
    def __init__(
        self,
        module: Module,
        *,
        devices: int,
        schedules: Mapping[str, Schedule],
        bytes_a_cycle: float,
        link_cycles: LinkCycles,
        branch_shares: tuple[float, ...] = (),
    ):
        self.module, self.devices = module, devices
        self.schedules, self.bytes_a_cycle = schedules, bytes_a_cycle
        self.branch_shares = branch_shares
        self.link_cycles = link_cycles
        self.cost = Cost()
        self._scope = _Scope()  # of the computation that is walked

    @functools.cached_property
    def _started(self) -> set[str]:
        """Chains of asynchronous collectives whose start is in the text."""
        inside = [
            (i, c) for c in self.module.computations.values() for i in c.instructions.values()
        ]
        return {chain for i, c in inside if (chain := _chain(i)) and _is_started(i, c)}

    def computation(self, name: str) -> Computation:
        return self.module.computations[name]

    def walk(self, name: str, times: float) -> float:
        """Adds the cost of a computation that runs a number of times; returns one run's cycles."""
        outside, self._scope = self._scope, _Scope()
        for instruction in self.computation(name).instructions.values():
            self._visit(instruction, self.computation(name), times)
        scope = self._scope
        for chain in tuple(scope.ends):
            self._wait(chain, times)
        copying = max(0.0, scope.copied - scope.idle)
        self.cost.other_cycles += copying * times
        self._scope = outside
        return scope.clock + copying

    def _wait(self, name: str, times: float) -> None:
        """Waits for the end of an asynchronous collective."""
        scope = self._scope
        waited = max(0.0, scope.ends.pop(name, 0.0) - scope.clock)
        scope.clock += waited
        self.cost.waiting_cycles += waited * times

    def _visit(self, i: Instruction, inside: Computation, times: float) -> None:
        if i.opcode in _FREE:
            return
        if i.opcode == "while":
            trips = self._trips(i, inside)
            self._scope.clock += trips * self.walk(_named(i, "body"), times * trips)
        elif i.opcode == "call":
            self._scope.clock += self.walk(_named(i, "to_apply"), times)
        elif i.opcode == "conditional":
            self._conditional(i, times)
        elif i.opcode == "async-start":
            self._scope.clock += self.walk(_named(i, "calls"), times)
        elif i.opcode == "call-start":
            self._offloaded(i, inside, times)
        elif (kind := i.opcode.removesuffix("-start")) in COLLECTIVES:
            result = num_bytes(_result(i, inside))
            self._collective(i, kind, result=result, times=times, name=i.name)
            if kind == i.opcode:
                self._wait(i.name, times)
        elif i.opcode in ("send", "recv"):
            if i.opcode == "send" and _BETWEEN_SLICES in i.attributes:
                sent = num_bytes(inside.instructions[i.operands[0]].arrays)
                self.cost.sent_between_slices += sent * times
        elif i.opcode.endswith("-start"):
            self._transfer(i, inside, times)
        elif i.opcode == "custom-call":
            self._custom_call(i, inside, times)
        elif i.opcode.endswith("-done"):
            self._wait(i.operands[0], times)
        else:
            self._compute(i, inside, times)

    def _compute(self, i: Instruction, inside: Computation, times: float) -> None:
        called = i.called("calls") if i.opcode == "fusion" else None
        fused = self._fused_collectives(called) if called else []
        for collective, kind, result in fused:
            chain = _chain(collective) or collective.name
            self._collective(collective, kind, result=result, times=times, name=chain)
            if chain not in self._started or self._is_ended(called):
                self._wait(chain, times)
        if fused and "kind=kCustom" in i.attributes:
            return
        flops = self.flops(called) if called else matmul_flops(i, inside)
        cycles = self._cycles(i, inside, moved_bytes(i, inside, self.module), times)
        if flops:
            self.cost.matmul_flops += flops * times
            self.cost.matmul_cycles += cycles * times
        else:
            self.cost.other_cycles += cycles * times

    @functools.cached_property
    def _twins(self) -> dict[Any, Schedule]:
        """Schedules by form: of instructions that do the same, libtpu schedules one."""
        inside = [
            (i, c) for c in self.module.computations.values() for i in c.instructions.values()
        ]
        return {
            self._form(i, c): self.schedules[i.name] for i, c in inside if i.name in self.schedules
        }

    def _form(self, i: Instruction, inside: Computation) -> Any:
        """Returns what an instruction does: its arrays, and the operations fused in it."""
        called = i.called("calls") if i.opcode == "fusion" else None
        fused = self.computation(called).instructions.values() if called else ()
        found = (inside.instructions.get(name) for name in i.operands)
        operands = tuple(operand.arrays for operand in found if operand is not None)
        return i.opcode, i.arrays, operands, tuple((x.opcode, x.arrays) for x in fused)

    def _cycles(self, i: Instruction, inside: Computation, moved: float, times: float) -> float:
        """Returns the cycles of an instruction that moves bytes in HBM."""
        self.cost.moved_bytes += moved * times
        schedule = self.schedules.get(i.name) or self._twins.get(self._form(i, inside))
        least = moved / self.bytes_a_cycle
        # A product that is fused with a part of a collective has none, nor has what is tiny.
        cycles = i.estimated_cycles if schedule is None else schedule.cycles
        if schedule is None and max(cycles, least) >= _NOT_TINY:
            self.cost.without_schedule += times
        self._scope.idle += max(0.0, cycles - least)
        self._scope.clock += max(cycles, least)
        return max(cycles, least)

    def _conditional(self, i: Instruction, times: float) -> None:
        """Walks each branch as often as is known, or the most expensive one."""
        found = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
        names = OPERAND.findall(found[1]) if found else []
        names += [n for n in map(i.called, ("true_computation", "false_computation")) if n]
        if len(names) == len(self.branch_shares):
            for name, share in zip(names, self.branch_shares, strict=True):
                self._scope.clock += share * self.walk(name, times * share)
            return
        walked = []
        for name in names:
            walker = _Walker(
                self.module,
                devices=self.devices,
                schedules=self.schedules,
                bytes_a_cycle=self.bytes_a_cycle,
                link_cycles=self.link_cycles,
                branch_shares=self.branch_shares,
            )
            walker.walk(name, 1.0)
            walked.append((walker.cost.cycles, name))
        if walked:
            self._scope.clock += self.walk(max(walked)[1], times)

    def _collective(
        self, i: Instruction, kind: str, *, result: float, times: float, name: str
    ) -> None:
        """Sends a collective on its way; `name` is that by which its end is waited for."""
        groups = groups_of(i.attributes, devices=self.devices)
        group = len(groups[0])
        if group > 1 and result:
            found = self.cost.collectives.setdefault((kind, groups), Collective(kind, groups))
            found.count += times
            sent = sent_by_a_chip(kind, result=result, group=group)
            found.sent += sent * times
            scope = self._scope
            scope.free = max(scope.free, scope.clock) + self.link_cycles(kind, groups, sent)
            scope.ends[name] = scope.free

    def _offloaded(self, i: Instruction, inside: Computation, times: float) -> None:
        """Counts the work of an asynchronous call that SparseCores carry out.

        That is the collectives of the called computation or, if it has none, a copy. The program
        waits for it where the call ends.
        """
        called = self.computation(_named(i, "to_apply")).instructions.values()
        collectives = [one for one in called if one.opcode in COLLECTIVES]
        for one in collectives:
            result = num_bytes(one.arrays)
            self._collective(one, one.opcode, result=result, times=times, name=i.name)
        if not collectives:
            self._transfer(i, inside, times)

    def _is_ended(self, called: str | None) -> bool:
        """Returns whether a fused computation waits for the end of a collective."""
        inside = self.computation(called).instructions.values() if called else ()
        return any('"AsyncCollectiveDone"' in i.attributes for i in inside)

    def _fused_collectives(self, name: str) -> list[tuple[Instruction, str, float]]:
        """Returns the collectives in a fused computation, their kinds, and bytes of their results.

        A reduce-scatter is written as a slice of an all-reduce. A collective that runs in parallel
        to several fusions (`chain_id`) occurs in each of them: it counts where it starts, and has
        no bytes elsewhere.
        """
        computation = self.computation(name)
        found: list[tuple[Instruction, str, float]] = []
        for i in computation.instructions.values():
            if i.opcode == "fusion":
                found += self._fused_collectives(_named(i, "calls"))
            elif (kind := i.opcode.removesuffix("-start")) in COLLECTIVES:
                result = num_bytes(_result(i, computation))
                users = computation.users(i.name, through=_SAME_VALUE)
                slices = [user for user in users if user.opcode in SLICES]
                if kind == "all-reduce" and slices:
                    kind, result = "reduce-scatter", sum(num_bytes(s.arrays) for s in slices)
                if _chain(i) in self._started and not _is_started(i, computation):
                    result = 0.0
                found.append((i, kind, result))
        return found

    def _transfer(self, i: Instruction, inside: Computation, times: float) -> None:
        """Counts an asynchronous copy or slice, whose result goes in or out of HBM."""
        result = _result(i, inside)
        moved = num_bytes(array for array in result if array.in_hbm)
        sources = [a for o in i.operands[:1] for a in inside.instructions[o].arrays]
        if any(source.in_hbm for source in sources):
            moved += num_bytes(result)
        self.cost.moved_bytes += moved * times
        self._scope.copied += moved / self.bytes_a_cycle

    def _custom_call(self, i: Instruction, inside: Computation, times: float) -> None:
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        if target is None or target[1] != "tpu_custom_call":
            return
        name = re.sub(r"\.\d+$", "", i.name)
        operands = [a for o in i.operands for a in inside.instructions[o].arrays]
        self.cost.kernels[Kernel(name, tuple(operands), i.arrays)] += times
        moved = num_bytes(a for a in (*operands, *i.arrays) if a.in_hbm)
        self.cost.kernel_cycles += self._cycles(i, inside, moved, times) * times

    def _trips(self, i: Instruction, inside: Computation) -> float:
        known = i.config.get("known_trip_count", {}).get("n")
        trips = float(known) if known is not None else self._count_trips(i, inside)
        if trips is None:
            self.cost.unknown_loops += 1
            return 1.0
        return trips

    def _count_trips(self, i: Instruction, inside: Computation) -> float | None:
        """Returns the iterations of `for (n = start; n < end; n += 1)`, the form of `lax.scan`."""
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
        """Returns the FLOPs of the matmuls in a fused computation."""
        computation, total = self.computation(name), 0.0
        for i in computation.instructions.values():
            called = i.called("calls") if i.opcode == "fusion" else None
            total += self.flops(called) if called else matmul_flops(i, computation)
        return total


def _result(i: Instruction, inside: Computation) -> tuple[Array, ...]:
    """Returns an instruction's result; for an asynchronous start, the result of its end.

    The start's own tuple differs by kind: operands before results, no results, or counters.
    """
    if not i.opcode.endswith("-start"):
        return i.arrays
    end = i.opcode.removesuffix("-start") + "-done"
    for user in inside.users(i.name):
        if user.opcode == end:
            return user.arrays
    raise HLOError(f"{i.opcode} {i.name}: no {end}")


def _chain(i: Instruction) -> str | None:
    """Returns the id of a collective that runs in parallel to several fusions."""
    found = re.search(r'chain_id="(\d+)"', i.attributes)
    return found and found[1]


def _is_started(i: Instruction, computation: Computation) -> bool:
    users = computation.users(i.name, through=(*_SAME_VALUE, *SLICES))
    return any('"AsyncCollectiveStart"' in user.attributes for user in users)


def _named(i: Instruction, attribute: str) -> str:
    name = i.called(attribute)
    if name is None:
        raise HLOError(f"{i.opcode} {i.name}: no {attribute}")
    return name


def cost_of(
    text: str,
    *,
    devices: int,
    schedules: Mapping[str, Schedule],
    bytes_a_cycle: float,
    link_cycles: LinkCycles,
    branch_shares: tuple[float, ...] = (),
) -> Cost:
    """Returns the cost of a compiled program.

    Args:
        text: The program's `as_text()`.
        devices: Number of its devices.
        schedules: Schedules of its instructions by name.
        bytes_a_cycle: Bytes that a device's memory moves in a cycle.
        link_cycles: The time of a collective.
        branch_shares: How often each branch of a conditional with as many branches runs.

    Raises:
        HLOError: It is not the text of a compiled program.
    """
    module = parse(text)
    walker = _Walker(
        module,
        devices=devices,
        schedules=schedules,
        bytes_a_cycle=bytes_a_cycle,
        link_cycles=link_cycles,
        branch_shares=branch_shares,
    )
    walker.walk(module.entry, 1.0)
    return walker.cost
