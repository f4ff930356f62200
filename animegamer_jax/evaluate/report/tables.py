"""The tables of a report, before they are HTML or Markdown."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from animegamer_jax.evaluate.judge.scores import CRITERIA, JudgeScores
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate
from animegamer_jax.evaluate.metrics.registry import CONTEXT, METRICS
from animegamer_jax.evaluate.report.ablations import AblationRow
from animegamer_jax.evaluate.results import Evaluation, SystemResult

NOTHING = "\u2013"
_OPEN_GROUPS = ("states", "motion", "truth")
_ARROWS = {"higher": "↑", "lower": "↓"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell: a value, its interval, a remark.

    `is_best` marks what is told as the best, `is_apart` what its row must not be compared with.
    """

    text: str
    interval: str = ""
    remark: str = ""
    is_best: bool = False
    is_apart: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row: its name, which way is better ("higher", "lower" or ""), its unit."""

    name: str
    cells: Sequence[Cell]
    better: str = ""
    unit: str = ""

    @property
    def arrow(self) -> str:
        return _ARROWS.get(self.better, "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table: what it is of, the heading of its first column and of the others, its rows.

    The last `num_aside` columns are somebody else's; `of_words` says that its cells are no numbers.
    """

    title: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[Row]
    num_aside: int = 0
    of_words: bool = False


def number(value: float | None) -> str:
    """Three digits behind the point, fewer of large numbers; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return NOTHING
    digits = 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}".replace("-", "\u2212")


def interval(low: float, high: float) -> str:
    """`low to high`; empty where they are no numbers."""
    is_there = math.isfinite(low) and math.isfinite(high)
    return f"{number(low)} to {number(high)}" if is_there else ""


def measured(names: Iterable[str]) -> list[str]:
    """Names of metrics in the order of the catalogue; unknown ones last, as they come."""
    found = list(dict.fromkeys(names))
    return [name for name in METRICS if name in found] + [n for n in found if n not in METRICS]


def is_there(system: SystemResult, metric: str) -> bool:
    """Whether a system has one value of a metric or more."""
    return metric in system.values and bool(np.isfinite(system.values[metric]).any())


def metrics_of(evaluation: Evaluation) -> list[str]:
    """Those that any system has a value of."""
    return measured(n for s in evaluation.systems for n in s.values if is_there(s, n))


def networks(evaluation: Evaluation, metric: str) -> dict[str, str]:
    """By system, the network that a metric was measured with, where these are not all the same.

    A metric that depends on a network depends on the one that the settings name under the metric's
    group, such as "clip". Empty: all is of one scale.
    """
    known = METRICS.get(metric)
    if known is None or not known.backbone:
        return {}
    found = {
        s.name: str(s.settings.get(known.group, "not told"))
        for s in evaluation.systems
        if is_there(s, metric)
    }
    return found if len(set(found.values())) > 1 else {}


def best_system(evaluation: Evaluation, metric: str) -> str | None:
    """The system that is better than every other by more than chance, or None.

    The interval of the difference to each other system, turn by turn of the same games and
    resampled by games, lies on one side of zero.
    """
    known, systems = METRICS.get(metric), [s for s in evaluation.systems if is_there(s, metric)]
    if known is None or len(systems) < 2 or networks(evaluation, metric):
        return None
    sign = 1.0 if known.better == "higher" else -1.0
    for one in systems:
        others = [other for other in systems if other is not one]
        if all(_least_gain(one, other, metric, sign) > 0 for other in others):
            return one.name
    return None


def _least_gain(one: SystemResult, other: SystemResult, metric: str, sign: float) -> float:
    """The low end of the interval of what `one` is better by; 0 where that cannot be told."""
    gains = sign * (one.values[metric].astype(np.float64) - other.values[metric])
    there = np.isfinite(gains)
    found = estimate(gains, where=there) if there.any(1).sum() > 1 else None
    return found.low if found else 0.0


def _cell(found: Estimate | None, *, remark: str = "") -> Cell:
    if found is None:
        return Cell(NOTHING)
    return Cell(number(found.mean), interval(found.low, found.high), remark)


def _metric_row(name: str, cells: Sequence[Cell]) -> Row:
    known = METRICS.get(name)
    if known is None:
        return Row(name=name, cells=cells)
    return Row(name=name, cells=cells, better=known.better, unit=known.unit)


def main_table(evaluation: Evaluation) -> Table:
    """A row a metric, a column a system; the paper's figures beside them."""
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
            told = {"is_best": system.name == best, "is_apart": system.name in others}
            cells.append(dataclasses.replace(cell, **told))
        figures = (known.paper, known.baseline) if known else (None, None)
        cells += [Cell(_figure(value)) for value in figures]
        rows.append(_metric_row(name, cells))
    columns = [*(s.name for s in e.systems), "AnimeGamer, in the paper", "best baseline there"]
    return Table(title="All turns", corner="metric", columns=columns, rows=rows, num_aside=2)


def _figure(value: float | None) -> str:
    """A figure of the paper, with its four digits."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value < 10 else f"{value:g}"


def shortened(network: str) -> str:
    """A network's name as a cell has room for: of a digest its first letters."""
    return network if len(network) <= 24 else network[:12] + "…"


def open_table(evaluation: Evaluation) -> Table | None:
    """The metrics over open turns, the context accuracy first; None: there is nothing to tell."""
    e = evaluation
    names = [n for n in metrics_of(e) if n in METRICS and METRICS[n].group in _OPEN_GROUPS]
    names.sort(key=lambda name: name != CONTEXT)
    rows = []
    for name in names:
        found = [s.estimate(name, e.is_open) for s in e.systems]
        if any(found):
            shown = _metric_row(name, [_cell(f) for f in found])
            title = f"context accuracy ({name})" if name == CONTEXT else name
            rows.append(dataclasses.replace(shown, name=title))
    columns = [s.name for s in e.systems]
    return Table(title="Open turns", corner="metric", columns=columns, rows=rows) if rows else None


def set_table(evaluation: Evaluation) -> Table | None:
    """Scores of all clips together; None: there are none."""
    systems = evaluation.systems
    names = measured(name for s in systems for name in s.set_scores)
    rows = [
        Row(name=name, cells=[Cell(number(s.set_scores.get(name))) for s in systems])
        for name in names
    ]
    columns = [s.name for s in systems]
    title = "All clips together"
    return Table(title=title, corner="score", columns=columns, rows=rows) if rows else None


def beside_table(system: SystemResult) -> Table | None:
    """One system's metrics and the tables to read them by; None: there are none."""
    names = measured(name for table in system.beside.values() for name in table)
    rows = [
        _metric_row(
            name,
            [_cell(system.estimate(name)), *(_cell(t.get(name)) for t in system.beside.values())],
        )
        for name in names
    ]
    columns = ["the system itself", *system.beside]
    return Table(title=system.name, corner="metric", columns=columns, rows=rows) if rows else None


def judge_table(evaluation: Evaluation, scores: JudgeScores) -> Table:
    """Returns a judge's scores by criterion and system, in the evaluation's order of systems."""
    found, order = scores.estimates(), [s.name for s in evaluation.systems]
    systems = sorted(scores.systems, key=lambda s: order.index(s) if s in order else len(order))
    rows = [
        Row(
            name=criterion.replace("_", " "),
            cells=[_cell(found[system][criterion]) for system in systems],
            better="higher",
            unit="0 to 10",
        )
        for criterion in CRITERIA
    ]
    title = f"Scores by {scores.model}"
    return Table(title=title, corner="criterion", columns=systems, rows=rows)


def agreement_table(evaluation: Evaluation) -> Table | None:
    """How far judges agree; None: there are no two."""
    rows = [
        Row(
            name=names,
            cells=[
                Cell(number(a.spearman), remark=f"of {a.num_scores:,} scores"),
                Cell(number(a.preference), remark=f"of {a.num_pairs:,} pairs; {a.num_tied:,} tied"),
            ],
        )
        for names, a in evaluation.agreements.items()
    ]
    columns = "rank correlation (chance: 0)", "same preference (chance: 0.5)"
    title = "Agreement of judges"
    return Table(title=title, corner="judges", columns=columns, rows=rows) if rows else None


def ablation_table(rows: Sequence[AblationRow], title: str) -> Table | None:
    """Rows by metrics, the paper's figure beneath ours; None: there is no row."""
    names = measured(name for row in rows for name in (*row.scores, *row.paper))
    shown = []
    for row in rows:
        cells = []
        for name in names:
            ours = row.scores.get(name)
            remark = f"paper: {row.paper[name]:g}" if name in row.paper else ""
            cell = Cell(NOTHING)
            if ours:
                cell = Cell(number(ours.mean), interval(ours.low, ours.high))
            cells.append(dataclasses.replace(cell, remark=remark))
        shown.append(Row(name=row.name, cells=cells))
    columns = [
        f"{name} {_ARROWS[METRICS[name].better]}" if name in METRICS else name for name in names
    ]
    return Table(title=title, corner="left out", columns=columns, rows=shown) if shown else None


def settings_table(evaluation: Evaluation) -> Table:
    """What each system played with."""
    systems = evaluation.systems
    names = list(dict.fromkeys(name for s in systems for name in s.settings))
    rows = [
        Row(name="model", cells=[Cell(s.model) for s in systems]),
        Row(name="digest", cells=[Cell(s.digest or "played elsewhere") for s in systems]),
    ]
    for name in names:
        told = [plain(s.settings[name]) if name in s.settings else NOTHING for s in systems]
        rows.append(Row(name=name, cells=[Cell(text) for text in told]))
    columns = [s.name for s in systems]
    title = "Settings of each system"
    return Table(title=title, corner="setting", columns=columns, rows=rows, of_words=True)


def plain(value: Any) -> str:
    """A setting in a line: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
