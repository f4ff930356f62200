"""From a compiled program to seconds and gigabytes: what the compiler and arithmetic say.

Nothing here was measured on a chip. A step's time is the sum of four parts, none of which overlap:
products of matrices and all other instructions by the compiler's own estimated cycles, collectives
by bytes over the links within their groups, kernels by arithmetic at the peak of the matrix unit
(splash attention) or by the cycles of their schedule (our own).
The compiler's cycles of elementwise work look pessimistic: the same instructions' bytes over the
memory's bandwidth are given beside them, and the truth lies between.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from animegamer_jax.devices import Chip
from animegamer_jax.plan.costs import Cost, Kernel, cost_of
from animegamer_jax.plan.links import Torus, link_share
from animegamer_jax.plan.topology import Topology

_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 5}  # of the parts of splash attention; dkv makes dq, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Of a chip, in 10^9 bytes: what the compiler assigned.

    Attributes:
        arguments: weights, optimizer state, batch.
        temporaries: what lives inside a call.
        peak: the greatest sum.
        chip: what a program may use of the chip's.
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
    """Of one call, on each chip.

    Attributes:
        products: instructions that hold a product of matrices, by estimated cycles.
        other: all other instructions, by estimated cycles.
        other_by_bytes: the same, by bytes over the memory's bandwidth.
        collectives: by bytes over the busiest link (`links.link_share`), without overlap.
        collectives_over_one_link: the same, as if a chip had one link only.
        kernels: by arithmetic.
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
        """With elementwise work as fast as the memory."""
        return self.total - self.other + min(self.other, self.other_by_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of a program on a slice.

    Attributes:
        program: what it is.
        topology: of the slice, such as `v5p:4x4x4`.
        plan: name of the plan.
        mesh: sizes of the mesh axes.
        memory, seconds: of a chip.
        flops: of products and kernels, of a chip and call.
        gigabytes: read and written in HBM, of a chip and call.
        collectives: gigabytes that a chip sends, by kind and size of the group.
        samples: of a call, over all chips.
        unit: what a sample is.
        sample_flops: of a sample by the stage's own arithmetic; None: it has none.
        sample_tokens: of a sample, of the language model's training; None: another program.
        peak_share: of all chips' peak, by `sample_flops` or else by `flops`.
        unknown_loops: loops whose trips could not be read, counted once.
        unknown_instructions: runs of instructions without an estimate of the compiler, counted as
            no time.
        unknown_kernels: runs of kernels that no arithmetic is known for, by name, counted as no
            time.
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
        """To get through so many samples."""
        return samples / self.samples_per_second * self.num_chips / 3600


def attention_flops(kernel: Kernel) -> tuple[float, int] | None:
    """The products of a call of an attention kernel, and a head's width; None: another kernel.

    All scores are counted: a causal mask is not known here and saves up to half.
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
    """Scores of all heads, and a head's width."""
    arrays = [a for a in kernel.operands if len(a.shape) >= 3 and a.dtype in ("bf16", "f32")]
    if kernel.name.split("_")[0] not in ("splash", "flash") or len(arrays) < 3:
        return None
    queries, keys, values = (a.shape for a in arrays[:3])
    lengths = (max(shape[-2:]) for shape in (queries, keys))
    return math.prod((*queries[:-2], *lengths)), min(values[-2:])


def kernel_seconds(cost: Cost, chip: Chip) -> tuple[float, float]:
    """Seconds and operations of a call's kernels.

    Splash attention at the peak, of which a head narrower than the matrix unit leaves the rest
    idle; our own kernel by the cycles of its schedule, of other widths than 64 as its unit's work.
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
            # Products with whole depth for scores, rows of values and 16 of ones for results.
            seconds += times * cycles * (filled + width + 16) / (unit + 80) / (chip.clock_ghz * 1e9)
        else:
            seconds += operations * times * filled / width / (chip.peak_tflops * 1e12)
        flops += operations * times
    return seconds, flops


def unknown_kernels(cost: Cost) -> dict[str, float]:
    """Runs of the kernels that `attention_flops` does not know, by name."""
    found: dict[str, float] = {}
    for kernel, times in cost.kernels.items():
        if attention_flops(kernel) is None:
            found[kernel.name] = found.get(kernel.name, 0.0) + times
    return found


def make_estimate(
    compiled: Any,
    *,
    program: str,
    topology: Topology,
    plan: str,
    mesh: Mapping[str, int],
    torus: Torus,
    samples: int,
    unit: str,
    sample_flops: float | None = None,
    sample_tokens: int | None = None,
) -> Estimate:
    """Reads a compiled program; `torus`: its chips in the mesh's order; else as `Estimate` says."""
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
    useful = flops if sample_flops is None else sample_flops * samples / chips
    return Estimate(
        program=program,
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
        samples=samples,
        unit=unit,
        sample_flops=sample_flops,
        sample_tokens=sample_tokens,
        peak_share=useful / (seconds.total * chip.peak_tflops * 1e12),
        unknown_loops=cost.unknown_loops,
        unknown_instructions=cost.without_estimate,
        unknown_kernels=unknown_kernels(cost),
    )
