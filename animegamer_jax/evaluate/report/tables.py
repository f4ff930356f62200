"""Builds the tables of a report, which the templates render as HTML or Markdown."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from animegamer_jax.evaluate.judge.scores import CRITERIA, JudgeScores
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate_known
from animegamer_jax.evaluate.metrics.registry import CONTEXT, METRICS
from animegamer_jax.evaluate.report.ablations import AblationRow, Score
from animegamer_jax.evaluate.results import Evaluation, SystemResult

NOTHING = "\u2013"
_OPEN_GROUPS = ("states", "motion", "truth")
_ARROWS = {"higher": "↑", "lower": "↓"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell: a value, its interval and a remark.

    `is_best` marks the best system of a row, `has_other_scale` a value on another scale than the
    others.
    """

    text: str
    interval: str = ""
    remark: str = ""
    is_best: bool = False
    has_other_scale: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One row; `better` is "higher", "lower" or ""."""

    name: str
    cells: Sequence[Cell]
    better: str = ""
    unit: str = ""

    @property
    def arrow(self) -> str:
        return _ARROWS.get(self.better, "")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; `corner` is the heading of its first column.

    The last `num_aside` columns are from the paper; with `of_words` the cells are text.
    """

    title: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[Row]
    num_aside: int = 0
    of_words: bool = False


def number(value: float | None) -> str:
    """Returns a number with three decimals, or fewer if it is large; a dash if it is unknown."""
    if value is None or not math.isfinite(value):
        return NOTHING
    digits = 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}".replace("-", "\u2212")


def interval(low: float, high: float) -> str:
    """Returns `low to high`; empty if they are unknown."""
    known = math.isfinite(low) and math.isfinite(high)
    return f"{number(low)} to {number(high)}" if known else ""


def in_order(names: Iterable[str]) -> list[str]:
    """Returns names of metrics in the registry's order; unknown names follow in their own."""
    found = list(dict.fromkeys(names))
    return [name for name in METRICS if name in found] + [n for n in found if n not in METRICS]


def has_values(system: SystemResult, metric: str) -> bool:
    """Returns whether a system has any value of a metric."""
    return metric in system.values and bool(np.isfinite(system.values[metric]).any())


def metrics_of(evaluation: Evaluation) -> list[str]:
    """Returns the metrics that any system has a value of."""
    return in_order(n for s in evaluation.systems for n in s.values if has_values(s, n))


def networks(evaluation: Evaluation, metric: str) -> dict[str, str]:
    """Returns the network that scored each system, if they differ; empty: one scale for all.

    The settings name the network under the metric's group, such as "clip".
    """
    known = METRICS.get(metric)
    if known is None or not known.backbone:
        return {}
    found = {
        s.name: str(s.settings.get(known.group, "unknown"))
        for s in evaluation.systems
        if has_values(s, metric)
    }
    return found if len(set(found.values())) > 1 else {}


def best_system(evaluation: Evaluation, metric: str) -> str | None:
    """Returns the system that is better than every other beyond chance, or None.

    That is: the interval of the difference to each other system, over the same turns and resampled
    by games, excludes zero.
    """
    known, systems = METRICS.get(metric), [s for s in evaluation.systems if has_values(s, metric)]
    if known is None or len(systems) < 2 or networks(evaluation, metric):
        return None
    sign = 1.0 if known.better == "higher" else -1.0
    for one in systems:
        others = [other for other in systems if other is not one]
        if all(_least_gain(one, other, metric, sign) > 0 for other in others):
            return one.name
    return None


def _least_gain(one: SystemResult, other: SystemResult, metric: str, sign: float) -> float:
    """Returns the low end of the interval of `one`'s advantage; 0 if there is no interval."""
    gains = sign * (one.values[metric].astype(np.float64) - other.values[metric])
    found = estimate_known(gains) if np.isfinite(gains).any(1).sum() > 1 else None
    return found.low if found else 0.0


def _cell(found: Estimate | Score | None, *, remark: str = "") -> Cell:
    if found is None:
        return Cell(NOTHING, remark=remark)
    return Cell(number(found.mean), interval(found.low, found.high), remark)


def _metric_row(name: str, cells: Sequence[Cell]) -> Row:
    known = METRICS.get(name)
    if known is None:
        return Row(name, cells)
    return Row(name, cells, better=known.better, unit=known.unit)


def main_table(evaluation: Evaluation) -> Table:
    """Returns the main table: a row per metric, a column per system, and the paper's scores."""
    e = evaluation
    num_all, rows = len(e.games) * e.num_turns, []
    for name in metrics_of(e):
        known, others, best = METRICS.get(name), networks(e, name), best_system(e, name)
        cells = []
        for system in e.systems:
            found = system.estimate(name)
            remarks = [f"of {found.count:,} turns"] if found and found.count != num_all else []
            if system.name in others and known:
                label = "CLIP" if known.group == "clip" else "network"
                remarks.append(f"{label} {shortened(others[system.name])}: another scale")
            cell = _cell(found, remark="; ".join(remarks))
            marks = {"is_best": system.name == best, "has_other_scale": system.name in others}
            cells.append(dataclasses.replace(cell, **marks))
        figures = (known.paper, known.baseline) if known else (None, None)
        cells += [Cell(_figure(value)) for value in figures]
        rows.append(_metric_row(name, cells))
    columns = [*(s.name for s in e.systems), "AnimeGamer, in the paper", "best baseline there"]
    return Table("All turns", "metric", columns, rows, num_aside=2)


def _figure(value: float | None) -> str:
    """Returns a score of the paper with its four decimals."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value < 10 else f"{value:g}"


def shortened(network: str) -> str:
    """Returns a network's name, cut to fit a cell."""
    return network if len(network) <= 24 else network[:12] + "…"


def open_table(evaluation: Evaluation) -> Table | None:
    """Returns the metrics on open turns, the context accuracy first; None: there are no values."""
    e = evaluation
    found = {n: [s.estimate(n, e.is_open) for s in e.systems] for n in _open_metrics(metrics_of(e))}
    rows = _estimate_rows(found, context="context accuracy")
    columns = [s.name for s in e.systems]
    return Table("Open turns", "metric", columns, rows) if rows else None


def _estimate_rows(
    found: Mapping[str, Sequence[Estimate | None]], *, context: str = ""
) -> list[Row]:
    """Returns a row per metric that has any estimate; `context` renames the context metric."""
    rows = [_metric_row(name, [_cell(e) for e in row]) for name, row in found.items() if any(row)]
    return [
        dataclasses.replace(row, name=f"{context} ({CONTEXT})")
        if context and row.name == CONTEXT
        else row
        for row in rows
    ]


def _open_metrics(names: Iterable[str]) -> list[str]:
    found = [name for name in names if name in METRICS and METRICS[name].group in _OPEN_GROUPS]
    return sorted(found, key=lambda name: name != CONTEXT)


def set_table(evaluation: Evaluation) -> Table | None:
    """Returns the scores of all clips together; None: there are none."""
    systems = evaluation.systems
    names = in_order(name for s in systems for name in s.set_scores)
    rows = [Row(name, [Cell(number(s.set_scores.get(name))) for s in systems]) for name in names]
    columns = [s.name for s in systems]
    return Table("All clips together", "score", columns, rows) if rows else None


def reference_tables(evaluation: Evaluation, system: SystemResult) -> list[Table]:
    """Returns a system's scores with the reference scores, over all turns and over open turns."""
    names = in_order(name for values in system.reference.values() for name in values)
    tables = []
    for turns, shown, where, context in (
        ("all turns", names, None, ""),
        ("open turns", _open_metrics(names), evaluation.is_open, "context accuracy"),
    ):
        sources = (None, *system.reference)
        found = {n: [system.estimate(n, where, reference=s) for s in sources] for n in shown}
        if rows := _estimate_rows(found, context=context):
            columns = ["the system itself", *system.reference]
            tables.append(Table(f"{system.name}: {turns}", "metric", columns, rows))
    return tables


def breakdown_tables(evaluation: Evaluation, system: SystemResult) -> list[Table]:
    """Returns a system's scores by true motion level, and by kind of motion if it is known."""
    groups: dict[str, np.ndarray] = {}
    if evaluation.expected is not None:
        groups["motion level"] = evaluation.expected[..., 0].astype(str)
    motions = np.array(evaluation.motions, str)
    if motions.size and (motions != "").all():
        groups["kind of motion"] = motions
    names = [name for name in in_order(system.values) if has_values(system, name)]
    tables = []
    for corner, labels in groups.items():
        rows = [
            Row(label, [_cell(system.estimate(name, labels == label)) for name in names])
            for label in np.unique(labels).tolist()
        ]
        if rows and names:
            tables.append(Table(f"{system.name}: by {corner}", corner, names, rows))
    return tables


def judge_table(evaluation: Evaluation, scores: JudgeScores) -> Table:
    """Returns a judge's scores: a row per criterion, a column per system."""
    found, order = scores.estimates(), [s.name for s in evaluation.systems]
    systems = sorted(scores.systems, key=lambda s: order.index(s) if s in order else len(order))
    rows = []
    for criterion in CRITERIA:
        cells = [_cell(found[system][criterion]) for system in systems]
        rows.append(Row(criterion.replace("_", " "), cells, better="higher", unit="0 to 10"))
    return Table(f"Scores by {scores.model}", "criterion", systems, rows)


def agreement_table(evaluation: Evaluation) -> Table | None:
    """Returns how far judges agree; None: there are fewer than two."""
    rows = []
    for names, a in evaluation.agreements.items():
        pairs = f"of {a.num_pairs:,} pairs; {a.num_tied:,} tied"
        ranks = Cell(number(a.spearman), remark=f"of {a.num_scores:,} scores")
        rows.append(Row(names, [ranks, Cell(number(a.preference), remark=pairs)]))
    columns = "rank correlation (chance: 0)", "same preference (chance: 0.5)"
    return Table("Agreement of judges", "judges", columns, rows) if rows else None


def ablation_table(rows: Sequence[AblationRow], title: str) -> Table | None:
    """Returns a table of ablations with the paper's scores; None: there is no row."""
    names = in_order(name for row in rows for name in (*row.scores, *row.paper))
    shown = []
    for row in rows:
        remarks = {name: f"paper: {score:g}" for name, score in row.paper.items()}
        cells = [_cell(row.scores.get(n), remark=remarks.get(n, "")) for n in names]
        shown.append(Row(row.name, cells))
    columns = [
        f"{name} {_ARROWS[METRICS[name].better]}" if name in METRICS else name for name in names
    ]
    return Table(title, "without", columns, shown) if shown else None


def settings_table(evaluation: Evaluation) -> Table:
    """Returns the settings of each system."""
    systems = evaluation.systems
    names = list(dict.fromkeys(name for s in systems for name in s.settings))
    rows = [
        Row("model", [Cell(s.model) for s in systems]),
        Row("digest", [Cell(s.digest or "played elsewhere") for s in systems]),
    ]
    for name in names:
        texts = [plain(s.settings[name]) if name in s.settings else NOTHING for s in systems]
        rows.append(Row(name, [Cell(text) for text in texts]))
    columns = [s.name for s in systems]
    return Table("Settings of each system", "setting", columns, rows, of_words=True)


def plain(value: Any) -> str:
    """Returns a setting in one line: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
