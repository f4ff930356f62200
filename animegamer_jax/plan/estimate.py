"""Estimates seconds and gigabytes of a compiled program, by its compiler and by arithmetic.

Nothing here was measured on a chip. A step's time is the sum of four parts without overlap: matrix
products and all other instructions by the compiler's estimated cycles, collectives by bytes over
the links within their groups, kernels by arithmetic at the matrix unit's peak (splash attention) or
by the cycles of their schedule (`models/kernels/flash.py`). The compiler's cycles of elementwise
work look pessimistic, so the time of the same instructions by memory bandwidth is reported too; the
truth is in between.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from animegamer_jax.devices import Chip
from animegamer_jax.plan.costs import Cost, Kernel, cost_of
from animegamer_jax.plan.interconnect import Torus, link_share
from animegamer_jax.plan.topology import Topology

if TYPE_CHECKING:
    from animegamer_jax.plan.programs import Program

_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 5}  # in parts of splash attention; dkv also computes dq


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
        products: Instructions with a matrix product, by estimated cycles.
        other: All other instructions, by estimated cycles.
        other_by_bytes: The same instructions, by memory bandwidth.
        collectives: Bytes over the busiest link (`interconnect.link_share`), without overlap.
        collectives_over_one_link: The same, as if each chip had only one link.
        kernels: Kernels, by arithmetic or by their schedule.
    """

    products: float
    other: float
    other_by_bytes: float
    collectives: float
    collectives_over_one_link: float
    kernels: float

    @property
    def total(self) -> float:
        return self.products + self.other + self.collectives + self.kernels

    @property
    def least(self) -> float:
        """The total with elementwise work at memory bandwidth."""
        return self.total - self.other + min(self.other, self.other_by_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a program on a slice.

    Attributes:
        program: Description of the program.
        topology: The slice, such as `v5p:4x4x4`.
        plan: Name of the sharding plan.
        mesh: Sizes of the mesh axes.
        memory, seconds: Memory and time on each chip.
        flops: FLOPs of products and kernels on each chip in a call.
        gigabytes: Memory traffic (HBM) on each chip in a call.
        collectives: Gigabytes that a chip sends, by kind and group size.
        samples: Samples of a call on all chips.
        unit: Unit of a sample.
        sample_flops: FLOPs of a sample by the stage's own count; None: it has none.
        sample_tokens: Tokens of a sample of the language model's training; None: another program.
        peak_share: Share of all chips' peak, by `sample_flops` or else `flops`.
        unknown_loops: Loops of unknown length, counted once.
        unknown_instructions: Runs of instructions without an estimate, counted as no time.
        unknown_kernels: Runs of kernels of unknown cost, by name, counted as no time.
    """

    program: str
    topology: str
    plan: str
    mesh: Mapping[str, int]
    memory: Memory
    seconds: Seconds
    flops: float
    gigabytes: float
    collectives: Mapping[str, float]
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

    @property
    def num_chips(self) -> int:
        return math.prod(self.mesh.values())

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
    phase = next((p for p in parts if p in _PRODUCTS), None)
    products = 2 if parts[0] == "flash" else _PRODUCTS.get(phase or "")
    if products is None:
        return None
    scores, width = shapes
    return 2.0 * products * scores * width, width


def _attention_shapes(kernel: Kernel) -> tuple[int, int] | None:
    """Returns the number of scores of all heads, and a head's width."""
    arrays = [a for a in kernel.operands if len(a.shape) >= 3 and a.dtype in ("bf16", "f32")]
    if kernel.name.split("_")[0] not in ("splash", "flash") or len(arrays) < 3:
        return None
    queries, keys, values = (a.shape for a in arrays[:3])
    lengths = (max(shape[-2:]) for shape in (queries, keys))
    return math.prod((*queries[:-2], *lengths)), min(values[-2:])


def kernel_seconds(cost: Cost, chip: Chip) -> tuple[float, float]:
    """Returns seconds and FLOPs of the kernels in a call.

    Splash attention runs at the peak of the matrix unit, which heads narrower than the unit fill
    only in part. Our own kernel takes the cycles of its schedule, scaled for heads other than 64.
    """
    seconds = flops = 0.0
    for kernel, times in cost.kernels.items():
        if (found := attention_flops(kernel)) is None:
            continue
        operations, width = found
        unit = chip.matrix_width
        filled = math.ceil(width / unit) * unit
        if kernel.name.startswith("flash") and chip.flash_cycles is not None:
            scores, _ = _attention_shapes(kernel) or (0, 0)
            cycles = scores / 1024 * chip.flash_cycles / chip.cores
            # Scores take products of the full depth; results take the values' rows and 16 of ones.
            seconds += times * cycles * (filled + width + 16) / (unit + 80) / (chip.clock_ghz * 1e9)
        else:
            seconds += operations * times * filled / width / (chip.peak_tflops * 1e12)
        flops += operations * times
    return seconds, flops


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
    topology: Topology,
    plan: str,
    mesh: Mapping[str, int],
    torus: Torus,
) -> Estimate:
    """Makes the estimate of a compiled program; `torus` has the chips in the mesh's order."""
    chip, chips = topology.chip, topology.num_chips
    cost = cost_of(compiled.as_text(), devices=chips)
    memory: Any = compiled.memory_analysis()
    in_kernels, kernel_flops = kernel_seconds(cost, chip)
    clock = chip.clock_ghz * 1e9
    sent: dict[str, float] = defaultdict(float)
    over_links = 0.0
    for c in cost.collectives.values():
        sent[f"{c.kind} of {c.group}"] += c.sent / 1e9
        over_links += c.sent / 1e9 * link_share(c.kind, c.groups, torus)
    seconds = Seconds(
        products=cost.product_cycles / clock,
        other=cost.other_cycles / clock,
        other_by_bytes=cost.other_bytes / (chip.hbm_gb_per_second * 1e9),
        collectives=over_links / chip.link_gb_per_second,
        collectives_over_one_link=sum(sent.values()) / chip.link_gb_per_second,
        kernels=in_kernels,
    )
    flops = cost.product_flops + kernel_flops
    useful = flops if program.flops is None else program.flops * program.samples / chips
    return Estimate(
        program=program.name,
        topology=str(topology),
        plan=plan,
        mesh=dict(mesh),
        memory=Memory(
            arguments=memory.argument_size_in_bytes / 1e9,
            temporaries=memory.temp_size_in_bytes / 1e9,
            peak=memory.peak_memory_in_bytes / 1e9,
            chip=chip.usable_gb,
        ),
        seconds=seconds,
        flops=flops,
        gigabytes=(cost.product_bytes + cost.other_bytes) / 1e9,
        collectives=dict(sent),
        samples=program.samples,
        unit=program.unit,
        sample_flops=program.flops,
        sample_tokens=program.tokens,
        peak_share=useful / (seconds.total * chip.peak_tflops * 1e12),
        unknown_loops=cost.unknown_loops,
        unknown_instructions=cost.without_estimate,
        unknown_kernels=unknown_kernels(cost),
    )
