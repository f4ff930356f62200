"""The scores in a few lines, for the terminal."""

from collections.abc import Iterator, Sequence

from animegamer_jax.evaluate.metrics.registry import METRICS
from animegamer_jax.evaluate.results import SystemResult


def summarize(systems: Sequence[SystemResult]) -> Iterator[str]:
    """Yields the table for the terminal: a line per metric, a column per system."""
    width = max(12, *(len(system.name) + 2 for system in systems))
    yield " " * 12 + "".join(f"{system.name:>{width}}" for system in systems) + f"{'paper':>12}"
    for name, metric in METRICS.items():
        found = [_mean(system, name) for system in systems]
        if all(one is None for one in found):
            continue
        cells = (" " * width if one is None else f"{one:>{width}.3f}" for one in found)
        paper = f"{metric.paper:>12.3f}" if metric.paper is not None else ""
        yield (f"{name:<12}" + "".join(cells) + paper).rstrip()
    yield "paper: on its own films and benchmark, so not comparable"
    for system in systems:
        for group, reason in system.skipped.items():
            yield f"{system.name}: {group} skipped: {reason}"


def _mean(system: SystemResult, metric: str) -> float | None:
    if metric in system.set_scores:
        return system.set_scores[metric]
    found = system.estimate(metric)
    return None if found is None else found.mean
