"""Writes the report of an evaluation: `report.html`, a single file, and `report.md` with pictures.

Both are rendered from an `Evaluation` and the clips in its folder, so `results.read_results` and
`write_report` render them again after a change here.
"""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from animegamer_jax.evaluate.judge.scores import JudgeScores
from animegamer_jax.evaluate.metrics.registry import CONTEXT, METRICS, Metric
from animegamer_jax.evaluate.report.ablations import Ablations, read_ablations
from animegamer_jax.evaluate.report.games import MOST_TURNS, ShownGame, shown_games
from animegamer_jax.evaluate.report.plots import LONG_GAME, SMOOTHED, Line, line_plot, line_sample
from animegamer_jax.evaluate.report.render import render_html, render_markdown
from animegamer_jax.evaluate.report.tables import (
    Table,
    ablation_table,
    agreement_table,
    best_system,
    breakdown_tables,
    has_values,
    judge_table,
    main_table,
    metrics_of,
    networks,
    number,
    open_table,
    plain,
    reference_tables,
    set_table,
    settings_table,
    shortened,
)
from animegamer_jax.evaluate.results import Evaluation, SystemResult
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import user_errors

HTML_FILE = "report.html"
MARKDOWN_FILE = "report.md"
PICTURES = "report"
"""Folder of the Markdown file's pictures."""

_PARTS = {"decoder": "The decoder alone, on true shot representations", "game": "Whole games"}
_KINDS = {".svg": "image/svg+xml", ".jpg": "image/jpeg"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: its file name, its bytes and its description."""

    name: str
    content: bytes
    alt: str
    size: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """The whole picture as a data URL."""
        kind = _KINDS[Path(self.name).suffix]
        return f"data:{kind};base64,{base64.b64encode(self.content).decode()}"

    @property
    def file(self) -> str:
        """Its path relative to the Markdown file, which is not escaped."""
        return Markup(f"{PICTURES}/{self.name}")


@dataclasses.dataclass(frozen=True)
class Plot:
    """A metric by turn; with `has_other_scales` its lines are on different scales."""

    name: str
    metric: Metric | None
    picture: Picture
    has_other_scales: bool


@dataclasses.dataclass(frozen=True)
class System:
    """One system: the key to its lines in plots, its tables, its games and a picture per turn."""

    result: SystemResult
    sample: Picture
    reference: Sequence[Table]
    breakdowns: Sequence[Table]
    games: Sequence[ShownGame]
    pictures: Mapping[tuple[str, int], Picture]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A judge's scores and their table."""

    scores: JudgeScores
    table: Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Everything that the templates show."""

    title: str
    sentence: str
    evaluation: Evaluation
    main: Table
    to_compare: Sequence[str]
    definitions: Sequence[Metric]
    open_note: str
    open: Table | None
    sets: Table | None
    systems: Sequence[System]
    plots: Sequence[Plot]
    plots_note: str
    judged: Sequence[Judged]
    agreements: Table | None
    ablations: Ablations | None
    ablation_tables: Sequence[Table]
    games_note: str
    facts: Mapping[str, str]
    settings: Table

    @property
    def pictures(self) -> list[Picture]:
        """The pictures that the Markdown file links."""
        found = [system.sample for system in self.systems] + [plot.picture for plot in self.plots]
        return found + [picture for s in self.systems for picture in s.pictures.values()]


def write_report(
    folder: Path, evaluation: Evaluation, *, ablations: Path | None = None
) -> tuple[Path, Path]:
    """Writes `report.html` and `report.md`, with its pictures in `report/`.

    Pictures of an earlier report that this one lacks are removed. A game that cannot be read is
    replaced by a note.

    Args:
        folder: Folder of the evaluation, which contains the games' folders.
        evaluation: The results.
        ablations: A file that `ablations.write_ablations` wrote, to be shown as well.

    Returns:
        The two files.

    Raises:
        UserError: The ablations cannot be read, or a file cannot be written.
    """
    view = make_view(folder, evaluation, read_ablations(ablations) if ablations else None)
    pages = {HTML_FILE: render_html(view), MARKDOWN_FILE: render_markdown(view)}
    pictures, kept = folder / PICTURES, {picture.name for picture in view.pictures}
    with user_errors(folder, "the report cannot be written", hint="choose another place"):
        pictures.mkdir(parents=True, exist_ok=True)
        for picture in view.pictures:
            write_whole(pictures / picture.name, picture.content)
        for name, text in pages.items():
            write_whole(folder / name, text.encode(errors="replace"))
        for pattern in ("line_*.svg", "turns_*.svg", "game_*.jpg"):
            for path in pictures.glob(pattern):
                if path.name not in kept:
                    path.unlink()
    return folder / HTML_FILE, folder / MARKDOWN_FILE


def make_view(folder: Path, evaluation: Evaluation, ablations: Ablations | None) -> View:
    """Returns what the templates show; reads the clips of the games that are shown."""
    e = evaluation
    systems = [_system(folder, e, number) for number in range(len(e.systems))]
    names = " · ".join(system.name for system in e.systems)
    rows = ablations.rows if ablations else ()
    tables = (ablation_table([r for r in rows if r.part == part], _PARTS[part]) for part in _PARTS)
    played = _count(len(e.games), "game")
    return View(
        title=f"Benchmark {e.benchmark}: {names}",
        sentence=f"{played} of {_count(e.num_turns, 'turn')} (world: {e.world}), played from their "
        "instructions alone. Every turn's clip and predicted states are scored.",
        evaluation=e,
        main=main_table(e),
        to_compare=_to_compare(e),
        definitions=[METRICS[name] for name in metrics_of(e) if name in METRICS],
        open_note=_open_note(e),
        open=open_table(e),
        sets=set_table(e),
        systems=systems,
        plots=_plots(e),
        plots_note=_plots_note(e),
        judged=[Judged(scores, judge_table(e, scores)) for scores in e.judge_scores],
        agreements=agreement_table(e),
        ablations=ablations,
        ablation_tables=[table for table in tables if table],
        games_note=_games_note(e),
        facts=_facts(e),
        settings=settings_table(e),
    )


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


# Words


def _to_compare(e: Evaluation) -> list[str]:
    """Returns sentences on which numbers may be compared."""
    names = metrics_of(e)
    if not names:
        return ["No system has a value of any metric."]
    lines = [
        "The range below a mean is its 95 % interval, from resampling whole games."
        if len(e.games) > 1
        else "There is only one game. Intervals come from resampling games, so they mean nothing.",
        "The paper's scores were measured on its own films and benchmark. They give orientation "
        "only: no number here is a score of the same task.",
    ]
    if of_network := [name for name in names if name in METRICS and METRICS[name].backbone]:
        lines.append(
            f"{_listed(of_network)}: computed by a network. Two networks have two scales, so these "
            "are even less comparable with the paper's than the others."
        )
    by_networks: dict[str, list[str]] = {}
    for name in names:
        if other := networks(e, name):
            pairs = "; ".join(f"{system}: {shortened(n)}" for system, n in other.items())
            by_networks.setdefault(pairs, []).append(name)
    lines += [
        f"{_listed(which)}: computed with different networks ({pairs}), so the systems cannot be "
        "compared with each other, and none is marked."
        for pairs, which in by_networks.items()
    ]
    if len(e.systems) > 1:
        marked = any(best_system(e, name) for name in names)
        lines.append(
            "★ marks a system that is better than every other beyond chance: over the same turns "
            "of the same games, the interval of the difference excludes zero."
            + ("" if marked else " No system is marked here.")
        )
    return lines


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _open_note(e: Evaluation) -> str:
    is_open = int(e.is_open.sum())
    if not is_open:
        return "No turn of this benchmark is open: every instruction is complete."
    note = (
        f"{is_open:,} of {_count(e.is_open.size, 'turn')} are open: their instruction omits "
        "something that stays as in the turns before, so only a system with memory can be right."
    )
    if not any(has_values(system, CONTEXT) for system in e.systems):
        note += (
            " The context accuracy itself needs a world whose clips can be classified, such as the "
            "toy world."
        )
    return note


def _plots_note(e: Evaluation) -> str:
    if e.num_turns > LONG_GAME:
        return (
            f"Thin lines: the mean over games of each turn. Thick lines: the mean of the "
            f"{SMOOTHED} turns around it (fewer near both ends), with its 95 % interval as a band."
        )
    return "The mean over games of each turn, with its 95 % interval as a band."


def _games_note(e: Evaluation) -> str:
    note = (
        "The games of each system are ranked by the mean of their ranks in several metrics: "
        f'"{CONTEXT}", ACC-F and ACC-S where there is a context accuracy, otherwise all but the '
        "time. The first, the middle and the last game are shown. Each picture has the clip's "
        "first and last frames and two in between. ✗ marks a state other than the expected one. "
        "The last line has the turn's scores."
    )
    if e.num_turns > MOST_TURNS:
        note += f" Of each game, {MOST_TURNS} evenly spread turns are shown."
    if e.expected is None:
        note += " The results do not contain the expected states."
    return note


def _facts(e: Evaluation) -> dict[str, str]:
    facts = {
        "benchmark": e.benchmark,
        "digest of the games": e.benchmark_digest,
        "made by": e.made_by,
        "games": f"{len(e.games):,}, of {_count(e.num_turns, 'turn')}",
    }
    return facts | {str(name): plain(value) for name, value in e.run_config.items()}


# Pictures


def _plots(e: Evaluation) -> list[Plot]:
    plots = []
    for position, name in enumerate(metrics_of(e), start=1):
        lines = [
            Line(number, system.values[name])
            for number, system in enumerate(e.systems)
            if has_values(system, name)
        ]
        text = "; ".join(f"{e.systems[line.number].name}: {_in_words(line)}" for line in lines)
        svg = line_plot(lines, limits=_limits(name)).encode()
        picture = Picture(f"turns_{position:02d}.svg", svg, f"{name} by turn. {text}")
        plots.append(Plot(name, METRICS.get(name), picture, bool(networks(e, name))))
    return plots


def _limits(name: str) -> tuple[float, float] | None:
    """Returns 0 and 1 for shares, so that a small change looks small."""
    metric = METRICS.get(name)
    return (0.0, 1.0) if metric is not None and metric.unit.startswith("share of") else None


def _in_words(line: Line) -> str:
    """Describes a line by its first and last value."""
    ends = [(t, found.mean) for t, found in enumerate(line.estimates, start=1) if found]
    (first, begins), (last, becomes) = ends[0], ends[-1]
    if first == last:
        return f"{number(begins)} in turn {first}"
    return f"{number(begins)} in turn {first}, {number(becomes)} in turn {last}"


def _system(folder: Path, e: Evaluation, which: int) -> System:
    result = e.systems[which]
    games = shown_games(folder, e, result)
    pictures = {
        (game.rank, turn.turn): Picture(
            f"game_{which + 1}_{game.rank}_{turn.turn:03d}.jpg",
            turn.picture,
            f"{_count(turn.num_frames, 'frame')} of turn {turn.turn}, from left to right",
            turn.size,
        )
        for game in games
        for turn in game.turns
    }
    sample = Picture(f"line_{which + 1}.svg", line_sample(which).encode(), f"line {which + 1}")
    return System(
        result=result,
        sample=sample,
        reference=reference_tables(e, result),
        breakdowns=breakdown_tables(e, result),
        games=games,
        pictures=pictures,
    )
