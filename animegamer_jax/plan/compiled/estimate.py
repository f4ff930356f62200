"""Estimates seconds and gigabytes of a compiled program, by its compiler and by arithmetic.

Nothing here was measured on a chip. A step's time is the sum of its parts without overlap: matmuls,
kernels and all other instructions by the compiler's final schedule or the bytes that they move
(`costs`), collectives by bytes over the links within their groups, as far as they are waited
for, and the traffic between slices by bytes over a chip's share of the network.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from animegamer_jax.plan.compiled.costs import Cost, Kernel, cost_of
from animegamer_jax.plan.compiled.schedule import Schedule
from animegamer_jax.plan.interconnect import NETWORK_GB_PER_SECOND, Torus, link_share

if TYPE_CHECKING:
    from animegamer_jax.plan.programs import Program
    from animegamer_jax.plan.topology import Topology

_MATMULS = {"fwd": 2, "dq": 3, "dkv": 5}  # in parts of splash attention; dkv also computes dq


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory on each chip in 10^9 bytes, as the compiler assigned it.

    Attributes:
        arguments: Weights, optimizer state, batch.
        temporaries: Arrays that exist only during a call.
        peak: Largest sum at any time.
        chip: Memory of the chip that a program may use.
    """

    arguments: float
    temporaries: float
    peak: float
    chip: float

    @property
    def fits(self) -> bool:
        return self.peak <= self.chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Time of one call on each chip.

    Attributes:
        matmuls: Instructions with a matmul.
        other: All instructions that are in no other part.
        kernels: Kernels: attention.
        collectives: Time in which collectives are waited for, which take that of their bytes over
            the busiest link (`interconnect.link_share`).
        collectives_over_one_link: All collectives, as if each chip had only one link.
        between_slices: Bytes over a chip's share of the network between slices, without overlap.
    """

    matmuls: float
    other: float
    kernels: float
    collectives: float
    collectives_over_one_link: float
    between_slices: float = 0.0

    @property
    def total(self) -> float:
        return self.matmuls + self.other + self.kernels + self.collectives + self.between_slices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a program on a slice.

    Attributes:
        program: Description of the program.
        topology: The slice, such as `v5p:4x4x4`.
        plan: Name of the sharding plan.
        mesh: Sizes of the mesh axes.
        num_chips: Number of chips.
        memory, seconds: Memory and time on each device (a chip, or half of one of two devices).
        flops: FLOPs of matmuls and kernels on each device in a call.
        gigabytes: Memory traffic (HBM) on each device in a call.
        collectives: Gigabytes that a device sends, by kind and group size.
        gigabytes_between_slices: Gigabytes that a device sends to other slices.
        samples: Samples of a call on all chips.
        unit: Unit of a sample.
        sample_flops: FLOPs of a sample by the stage's own count; None: it has none.
        sample_tokens: Tokens of a sample of the language model's training; None: another program.
        peak_share: Share of all chips' peak, by `sample_flops` or else `flops`.
        unknown_loops: Loops of unknown length, counted once.
        unknown_instructions: Runs of instructions without a schedule (`costs.Cost`).
        unknown_kernels: Runs of kernels whose FLOPs are unknown, by name; their time counts.
    """

    program: str
    topology: str
    plan: str
    mesh: Mapping[str, int]
    num_chips: int
    memory: Memory
    seconds: Seconds
    flops: float
    gigabytes: float
    collectives: Mapping[str, float]
    gigabytes_between_slices: float
    samples: int
    unit: str
    sample_flops: float | None
    sample_tokens: int | None
    peak_share: float
    unknown_loops: int
    unknown_instructions: float
    unknown_kernels: Mapping[str, float]

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds.total

    def chip_hours(self, samples: int) -> float:
        """Returns the chip-hours for a number of samples."""
        return samples / self.samples_per_second * self.num_chips / 3600


def attention_flops(kernel: Kernel) -> tuple[float, int] | None:
    """Returns the FLOPs of an attention kernel's call and a head's width; None: another kernel.

    All scores are counted: a causal mask, which is unknown here, saves up to half.
    """
    shapes = _attention_shapes(kernel)
    if shapes is None:
        return None
    parts = kernel.name.split("_")
    phase = next((p for p in parts if p in _MATMULS), None)
    matmuls = _MATMULS.get(phase or "")
    if "flash" in parts:
        matmuls = 5 if "backward" in parts else 2
    if matmuls is None:
        return None
    scores, width = shapes
    return 2.0 * matmuls * scores * width, width


def _attention_shapes(kernel: Kernel) -> tuple[int, int] | None:
    """Returns the number of scores of all heads, and a head's width."""
    arrays = [a for a in kernel.operands if len(a.shape) >= 3 and a.dtype in ("bf16", "f32")]
    # The name of a differentiated kernel has words before its own.
    if not {"splash", "flash"} & set(kernel.name.split("_")) or len(arrays) < 3:
        return None
    queries, keys, values = (a.shape for a in arrays[:3])
    lengths = (max(shape[-2:]) for shape in (queries, keys))
    return math.prod((*queries[:-2], *lengths)), min(values[-2:])


def kernel_flops(cost: Cost) -> float:
    """Returns the FLOPs of the attention kernels in a call."""
    found = ((attention_flops(kernel), times) for kernel, times in cost.kernels.items())
    return sum(flops[0] * times for flops, times in found if flops is not None)


def unknown_kernels(cost: Cost) -> dict[str, float]:
    """Returns the runs of kernels that `attention_flops` does not know, by name."""
    found: dict[str, float] = {}
    for kernel, times in cost.kernels.items():
        if attention_flops(kernel) is None:
            found[kernel.name] = found.get(kernel.name, 0.0) + times
    return found


def make_estimate(
    compiled: Any,
    program: "Program",
    *,
    schedules: Mapping[str, Schedule],
    topology: "Topology",
    plan: str,
    mesh: Mapping[str, int],
    torus: Torus,
) -> Estimate:
    """Makes the estimate of a compiled program.

    Args:
        compiled: The program.
        program: What it is.
        schedules: Schedules of its instructions.
        topology: The slices.
        plan: Name of the sharding plan.
        mesh: Sizes of the mesh axes.
        torus: The devices' places in the mesh's order.
    """
    chip, devices = topology.chip, topology.num_devices
    clock = chip.clock_ghz * 1e9
    cycles_a_byte = chip.clock_ghz / chip.link_gb_per_second
    share_of = functools.cache(functools.partial(link_share, torus=torus))
    cost = cost_of(
        compiled.as_text(),
        devices=devices,
        schedules=schedules,
        bytes_a_cycle=chip.hbm_gb_per_second / chip.clock_ghz,
        link_cycles=lambda kind, groups, sent: sent * cycles_a_byte * share_of(kind, groups),
        branch_shares=program.branch_shares,
    )
    memory: Any = compiled.memory_analysis()
    sent: dict[str, float] = defaultdict(float)
    for c in cost.collectives.values():
        sent[f"{c.kind} of {c.group}"] += c.sent / 1e9
    between = cost.sent_between_slices / 1e9
    seconds = Seconds(
        matmuls=cost.matmul_cycles / clock,
        other=cost.other_cycles / clock,
        kernels=cost.kernel_cycles / clock,
        collectives=cost.waiting_cycles / clock,
        collectives_over_one_link=sum(sent.values()) / chip.link_gb_per_second,
        between_slices=between * chip.devices / NETWORK_GB_PER_SECOND,
    )
    flops = cost.matmul_flops + kernel_flops(cost)
    useful = flops if program.flops is None else program.flops * program.samples / devices
    return Estimate(
        program=program.name,
        topology=str(topology),
        plan=plan,
        mesh=dict(mesh),
        num_chips=topology.num_chips,
        memory=Memory(
            arguments=memory.argument_size_in_bytes / 1e9,
            temporaries=memory.temp_size_in_bytes / 1e9,
            peak=memory.peak_memory_in_bytes / 1e9,
            chip=chip.usable_gb,
        ),
        seconds=seconds,
        flops=flops,
        gigabytes=cost.moved_bytes / 1e9,
        collectives=dict(sent),
        gigabytes_between_slices=between,
        samples=program.samples,
        unit=program.unit,
        sample_flops=program.flops,
        sample_tokens=program.tokens,
        peak_share=useful / (seconds.total * chip.peak_tflops * 1e12),
        unknown_loops=cost.unknown_loops,
        unknown_instructions=cost.without_schedule,
        unknown_kernels=unknown_kernels(cost),
    )
