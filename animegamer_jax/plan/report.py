"""The results of planning: lines for people, one JSON object for programs."""

import dataclasses
from importlib import metadata
from typing import TYPE_CHECKING, Any

from animegamer_jax.plan.configurations import recipe_samples

if TYPE_CHECKING:
    from animegamer_jax.plan.compiled.compiler import NoRoomError
    from animegamer_jax.plan.compiled.estimate import Estimate
    from animegamer_jax.plan.configurations import Configuration

Found = tuple["Configuration", "Estimate"]
_TURNS = 1000  # for the cost of playing

CAVEAT = (
    "These are estimates, not measurements: memory and cycles are from libtpu's compiler (the "
    "final schedule of each\ninstruction, or its bytes at the memory's bandwidth); collectives are "
    "bytes over the links within their groups,\nless the time in which other work runs."
)


def _work(configuration: "Configuration") -> tuple[str, int]:
    """Returns the name and the number of samples of the work whose cost is given."""
    samples = recipe_samples(configuration)
    return (f"{_TURNS:,} turns", _TURNS) if samples is None else ("the recipe", samples)


def as_record(
    configuration: "Configuration", e: "Estimate", *, price: float | None
) -> dict[str, Any]:
    """Returns a configuration and its estimate as plain data, with costs if a price is given."""
    name, samples = _work(configuration)
    record = configuration.fields() | dataclasses.asdict(e)
    record["seconds"]["total"] = e.seconds.total
    record["memory"]["fits"] = e.memory.fits
    record["samples_per_second"] = e.samples_per_second
    work = {"samples": samples, "chip_hours": e.chip_hours(samples)}
    if price is not None:
        work["cost"] = e.chip_hours(samples) * price
    record["recipe" if name == "the recipe" else "thousand_turns"] = work
    return record


def as_object(
    found: list[Found],
    *,
    price: float | None,
    refused: "NoRoomError | None" = None,
    nearest: Found | None = None,
) -> dict[str, Any]:
    """Returns the object that `animegamer plan --json` prints.

    Args:
        found: Configurations that fit, the best first.
        price: Price of a chip for an hour.
        refused: Why the wanted program does not fit; None: it fits.
        nearest: The nearest configuration that fits instead.
    """
    return {
        "fits": refused is None,
        "why": None if refused is None else str(refused),
        "needed_gb": getattr(refused, "needed", None),
        "nearest": None if nearest is None else as_record(*nearest, price=price),
        "plans": [as_record(*pair, price=price) for pair in found],
        "libtpu": metadata.version("libtpu"),
        "jax": metadata.version("jax"),
    }


def describe_estimate(
    configuration: "Configuration", e: "Estimate", *, price: float | None
) -> list[str]:
    """Returns the lines for people."""
    m, s = e.memory, e.seconds
    room = m.chip - m.peak
    result = f"fits, {room:.1f} GB to spare" if m.fits else f"does not fit, {-room:.1f} GB short"
    sent = ", ".join(f"{name} {size:.2f} GB" for name, size in e.collectives.items()) or "none"
    lines = [
        f"{e.program} on {e.topology}: {configuration}",
        f"  memory a chip    arguments {m.arguments:.2f} + temporaries {m.temporaries:.2f} GB, "
        f"peak {m.peak:.2f} of {m.chip:.1f} GB: {result}",
        f"  work a chip      {e.flops / 1e12:.1f} TFLOP, {e.gigabytes:.0f} GB of memory traffic",
        f"  sent by a chip   {sent}",
        f"  time a call      {s.total:.3g} s = matmuls {s.matmuls:.3g} + other {s.other:.3g} + "
        f"collectives {s.collectives:.3g} + kernels {s.kernels:.3g}{_between(e)}",
        f"  speed            {e.samples_per_second / e.num_chips:.3g} {e.unit} a second and chip, "
        f"{e.samples_per_second:.3g} in all{_tokens(e)}; {e.peak_share:.0%} of the peak",
        *_uncounted(e),
    ]
    name, samples = _work(configuration)
    hours = e.chip_hours(samples)
    amount = "" if configuration.stage == "rollout" else f"{samples:,} {e.unit}: "
    cost = "" if price is None else f", {_number(hours * price)} at {price:g} a chip and hour"
    lines.append(f"  {name:<16} {amount}{_number(hours)} chip-hours{cost}")
    if configuration.command is not None:
        lines.append(f"  {configuration.command}")
    return lines


def _between(e: "Estimate") -> str:
    if not e.gigabytes_between_slices:
        return ""
    seconds, size = e.seconds.between_slices, e.gigabytes_between_slices
    return f" + between slices {seconds:.3g} ({size:.2f} GB)"


def _tokens(e: "Estimate") -> str:
    if e.sample_tokens is None:
        return ""
    return f", {e.sample_tokens * e.samples_per_second:,.0f} tokens"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _uncounted(e: "Estimate") -> list[str]:
    lines = []
    if e.unknown_loops:
        lines.append(f"  {e.unknown_loops} loops of unknown length were counted once")
    if e.unknown_instructions:
        count = f"{e.unknown_instructions:,.0f}"
        lines.append(f"  {count} runs of instructions have no schedule, only an earlier estimate")
    if e.unknown_kernels:
        kernels = ", ".join(f"{name} x {n:,.0f}" for name, n in e.unknown_kernels.items())
        lines.append(f"  kernels whose FLOPs are unknown: {kernels}")
    return lines
