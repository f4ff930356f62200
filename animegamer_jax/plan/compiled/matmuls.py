"""The FLOPs of matmuls and convolutions in a compiled program's text."""

import math
import re
from collections.abc import Sequence

from animegamer_jax.plan.compiled.hlo import Computation, HLOError, Instruction


def matmul_flops(i: Instruction, inside: Computation) -> float:
    """Returns the FLOPs of a `convolution` or `dot`, two for each multiplication; else 0."""
    if i.opcode == "convolution":
        return _convolution_flops(i, inside)
    if i.opcode != "dot":
        return 0.0
    left = inside.instructions[i.operands[0]].array
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    dims = [int(d) for d in found[1].split(",") if d] if found else []
    return 2.0 * i.array.size * math.prod(left.shape[d] for d in dims)


def _convolution_flops(i: Instruction, inside: Computation) -> float:
    """Returns the FLOPs of a convolution; this compiler writes matmuls as such, too.

    Positions of the window on padding or in the gaps of a dilated operand are not counted.
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
        text = fields.get(name)
        return [int(n) for n in text.split("x")] if text else [default] * rank

    pads = fields.get("pad")
    low = [int(p.split("_")[0]) for p in pads.split("x")] if pads else [0] * rank
    return [
        {"taps": taps, "stride": stride, "low": lo, "dilation": dilation, "gaps": gaps}
        for taps, stride, lo, dilation, gaps in zip(
            numbers("size", 1),
            numbers("stride", 1),
            low,
            numbers("rhs_dilate", 1),
            numbers("lhs_dilate", 1),
            strict=True,
        )
    ]


def _hits(
    *, size: int, out: int, taps: int, stride: int, low: int, dilation: int, gaps: int
) -> int:
    """Returns the number of pairs of an output position and a tap that meet an input."""
    reach = (size - 1) * gaps
    total = 0
    for tap in range(taps):
        offset = tap * dilation - low
        # Output positions o with 0 <= o * stride + offset <= reach, on an input, not in a gap.
        first = max(0, -(offset // stride) if offset < 0 else 0)
        last = min(out - 1, (reach - offset) // stride)
        if gaps == 1:
            total += max(0, last - first + 1)
        else:
            total += sum((o * stride + offset) % gaps == 0 for o in range(first, last + 1))
    return total
