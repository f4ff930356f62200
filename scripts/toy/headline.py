"""Prints a table of the README from the results of an evaluation.

Of a model with two windows, the scores of the embedded model:

    animegamer evaluate --window 5 1 --out out/toy-report     # make toy-report
    python scripts/toy/headline.py out/toy-report

Of a model and games that were played elsewhere, the table with a baseline, next to the paper's:

    animegamer evaluate --played baseline=out/baseline --out out/main-table
    python scripts/toy/headline.py out/main-table
"""

from collections.abc import Iterator
from pathlib import Path

from run_script import run_script

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate_known
from animegamer_jax.evaluate.metrics.registry import CONTEXT, METRICS
from animegamer_jax.evaluate.reference_scores import NO_MEMORY, THROUGH_VAE
from animegamer_jax.evaluate.results import Evaluation, SystemResult, read_results

ROWS = (
    ("states right (ACC-S)", "ACC-S", "0.97"),
    ("motion level of the clip right, by optical flow (ACC-F)", "ACC-F", "0.75"),
    ("error of the motion level (MAE-F, lower is better)", "MAE-F", ""),
    ("character right in the clip", "character", "0.95"),
    ("place", "place", "0.97"),
    ("time of day", "time", "0.97"),
    ("details as the game first showed them, which no instruction says", "details kept", "0.85"),
    ("the same by chance: as another game showed them", "details by chance", ""),
    ("similarity to the true clip (CLIP-I, the toy's own CLIP)", "CLIP-I", ""),
)


COMPARED = (
    *("CLIP-I", "CLIP-T", "ACC-F", "MAE-F", "ACC-S", "MAE-S", "seconds"),
    *("character", "place", "time", "details kept", "details by chance"),
)


def lines(evaluation: Evaluation) -> Iterator[str]:
    """Returns the Markdown table.

    Raises:
        UserError: The evaluation is not of one model with two windows, or of one and its baseline.
    """
    if len(evaluation.systems) != 2:
        raise UserError(
            "expected the results of `animegamer evaluate`, with --window 5 1 or with --played"
        )
    own, short = evaluation.systems
    if short.digest is None:
        yield from _compare(own, short)
        return
    yield "| | reached (95 % interval over games) | target | through the VAE |"
    yield "|---|---|---|---|"
    for text, metric, target in ROWS:
        bound = own.estimate(metric, reference=THROUGH_VAE)
        through = "" if bound is None else f"{bound.mean:.2f}"
        yield f"| {text} | {_cell(own.estimate(metric))} | {target} | {through} |"
    is_open = evaluation.is_open
    context, without = (s.estimate(CONTEXT, is_open) for s in (own, short))
    yield f"| open instructions: character, place and time all right | {_cell(context)} | 0.88 |  |"
    least = own.estimate(CONTEXT, is_open, reference=NO_MEMORY)
    yield (
        f"| the same without memory (window 1) | {_cell(without)} | {_mean(least)}, the expected "
        "score of any model without memory |  |"
    )


def _compare(own: SystemResult, baseline: SystemResult) -> Iterator[str]:
    """Returns the table of a model and a baseline on the same turns, next to the paper's."""
    names = f"{own.name} | {baseline.name}"
    yield f"| | {names} | difference | AnimeGamer, paper | best baseline, paper |"
    yield "|---|---|---|---|---|---|"
    for name in COMPARED:
        if not (name in own.values and name in baseline.values):
            continue
        metric = METRICS[name]
        better = "" if metric.better == "higher" else " (lower is better)"
        cells = [_cell(system.estimate(name)) for system in (own, baseline)]
        cells.append(_cell(estimate_known(own.values[name] - baseline.values[name])))
        reported = (metric.paper, metric.baseline)
        cells += ["" if score is None else f"{score:g}" for score in reported]
        yield f"| {name}{better} | {' | '.join(cells)} |"


def _mean(found: Estimate | None) -> str:
    return "unknown" if found is None else f"{found.mean:.3f}"


def _cell(found: Estimate | None) -> str:
    return "" if found is None else f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def main(folder: Path, /) -> None:
    """Print the table.

    Args:
        folder: Folder of the evaluation.
    """
    for line in lines(read_results(folder)):
        print(line)


if __name__ == "__main__":
    run_script(main, name="headline")
