"""The report of an evaluation: `report.html`, one file that needs no other, and `report.md`.

Both are drawn from an `Evaluation` alone and the clips in its folder, so `results.read_results`
and `write_report` draw them again after a change here.
"""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from animegamer_jax.evaluate.judge.scores import JudgeScores
from animegamer_jax.evaluate.metrics.registry import (
    CONTEXT,
    METRICS,
    Metric,
)
from animegamer_jax.evaluate.report.ablations import Ablations, read_ablations
from animegamer_jax.evaluate.report.games import (
    MOST_TURNS,
    ShownGame,
    shown_games,
)
from animegamer_jax.evaluate.report.plots import (
    LONG_GAME,
    SMOOTHED,
    Line,
    line_plot,
    line_sample,
)
from animegamer_jax.evaluate.report.render import (
    render_html,
    render_markdown,
    verbatim,
)
from animegamer_jax.evaluate.report.tables import (
    Table,
    ablation_table,
    agreement_table,
    beside_table,
    best_system,
    is_there,
    judge_table,
    main_table,
    metrics_of,
    networks,
    number,
    open_table,
    plain,
    set_table,
    settings_table,
    shortened,
)
from animegamer_jax.evaluate.results import Evaluation, SystemResult
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling

HTML_FILE = "report.html"
MARKDOWN_FILE = "report.md"
PICTURES = "report"
"""Folder of the Markdown's pictures, beside it."""

_PARTS = {"decoder": "The decoder alone, on true shot representations", "game": "Whole games"}
_KINDS = {".svg": "image/svg+xml", ".jpg": "image/jpeg"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: its file's name, its bytes, and what it shows in words."""

    name: str
    content: bytes
    alt: str
    size: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """All of it, as an address."""
        kind = _KINDS[Path(self.name).suffix]
        return f"data:{kind};base64,{base64.b64encode(self.content).decode()}"

    @property
    def file(self) -> str:
        """Its place beside the Markdown file."""
        return verbatim(f"{PICTURES}/{self.name}")


@dataclasses.dataclass(frozen=True)
class Plot:
    """A metric against the turns; `is_apart`: its lines must not be compared with each other."""

    name: str
    metric: Metric | None
    picture: Picture
    is_apart: bool


@dataclasses.dataclass(frozen=True)
class System:
    """What is told of one system: its line in plots, its games with a picture for each turn."""

    result: SystemResult
    sample: Picture
    beside: Table | None
    games: Sequence[ShownGame]
    pictures: Mapping[tuple[str, int], Picture]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A judge's scores and their table."""

    scores: JudgeScores
    table: Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """All that the templates show."""

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
        """Those that the Markdown links."""
        found = [system.sample for system in self.systems] + [plot.picture for plot in self.plots]
        return found + [picture for s in self.systems for picture in s.pictures.values()]


def write_report(
    folder: Path, evaluation: Evaluation, *, ablations: Path | None = None
) -> tuple[Path, Path]:
    """Writes `report.html` and `report.md`, with its pictures in `report/`.

    Pictures that an earlier report left there, and this one has not, are removed. A game that
    cannot be read is told of and not shown.

    Args:
        folder: of the evaluation: games' folders are beneath it.
        evaluation: what was found.
        ablations: a file that `ablations.write_ablations` wrote, to be shown as well.

    Returns:
        The two files.

    Raises:
        UserError: the ablations cannot be read, or the disk refuses.
    """
    view = make_view(folder, evaluation, read_ablations(ablations) if ablations else None)
    pages = {HTML_FILE: render_html(view), MARKDOWN_FILE: render_markdown(view)}
    place, kept = folder / PICTURES, {picture.name for picture in view.pictures}
    with telling(folder, "the report cannot be written", mend="choose another place"):
        place.mkdir(parents=True, exist_ok=True)
        for picture in view.pictures:
            write_whole(place / picture.name, picture.content)
        for name, text in pages.items():
            write_whole(folder / name, text.encode(errors="replace"))
        for pattern in ("line_*.svg", "turns_*.svg", "game_*.jpg"):
            for path in place.glob(pattern):
                if path.name not in kept:
                    path.unlink()
    return folder / HTML_FILE, folder / MARKDOWN_FILE


def make_view(folder: Path, evaluation: Evaluation, ablations: Ablations | None) -> View:
    """What the templates show; reads the clips of the games that are shown."""
    e = evaluation
    systems = [_system(folder, e, number) for number in range(len(e.systems))]
    names = " · ".join(system.name for system in e.systems)
    rows = ablations.rows if ablations else ()
    tables = (ablation_table([r for r in rows if r.part == part], _PARTS[part]) for part in _PARTS)
    played = _count(len(e.games), "game")
    return View(
        title=f"Benchmark {e.benchmark}: {names}",
        sentence=f"{played} of {_count(e.num_turns, 'turn')} (world: {e.world}), played from their "
        "instructions alone; what was shown and told is measured turn by turn.",
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
    """What may be compared with what, a sentence each."""
    names = metrics_of(e)
    if not names:
        return ["No system has a value of any metric."]
    lines = [
        "Beneath a mean is its 95 % interval, from resampling whole games."
        if len(e.games) > 1
        else "There is one game only: intervals come from resampling games, so these tell nothing.",
        "The paper's figures are of its own films and its own benchmark. They are here for "
        "orientation: no number of ours is a score of the same task.",
    ]
    if of_network := [name for name in names if name in METRICS and METRICS[name].backbone]:
        lines.append(
            f"{_listed(of_network)}: measured by a network. Values by two networks are of two "
            "scales, so these stand beside the paper's still less than the others."
        )
    apart: dict[str, list[str]] = {}
    for name in names:
        if other := networks(e, name):
            told = "; ".join(f"{system}: {shortened(network)}" for system, network in other.items())
            apart.setdefault(told, []).append(name)
    lines += [
        f"{_listed(which)}: the systems were not measured with the same network ({told}), so they "
        "may not be compared with each other, and none is marked."
        for told, which in apart.items()
    ]
    if len(e.systems) > 1:
        marked = any(best_system(e, name) for name in names)
        lines.append(
            "★ marks a system that is better than every other by more than chance: over the same "
            "turns of the same games, the interval of the difference does not hold zero."
            + ("" if marked else " There is none here.")
        )
    return lines


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _open_note(e: Evaluation) -> str:
    is_open = int(e.is_open.sum())
    if not is_open:
        return "No turn of this benchmark is open: each instruction tells everything."
    note = (
        f"{is_open:,} of {_count(e.is_open.size, 'turn')} are open: what they leave out is as in "
        "the turns before, so only a system that remembers them can be right."
    )
    if not any(is_there(system, CONTEXT) for system in e.systems):
        note += (
            " The context accuracy itself compares what is read off the clips with what carries "
            "on, which needs a world whose clips can be read, as the toy world's."
        )
    return note


def _plots_note(e: Evaluation) -> str:
    if e.num_turns > LONG_GAME:
        return (
            f"Thin: the mean over games of each turn. Thick: the mean of the {SMOOTHED} turns "
            "around it (fewer at both ends), with its 95 % interval as a band."
        )
    return "The mean over games of each turn, with its 95 % interval as a band."


def _games_note(e: Evaluation) -> str:
    note = (
        "Each system's games are ranked by their mean of each metric, and by the mean of these "
        f'ranks: in the toy world of "{CONTEXT}", ACC-F and ACC-S, elsewhere of every metric that '
        "has a better direction but the time. Shown are the first of that order, the middle one "
        "and the last. Pictures are the clip's first and last frames and two between. A state "
        "that differs from what was expected has a ✗; the last line is what the turn scored."
    )
    if e.num_turns > MOST_TURNS:
        note += f" Of each game {MOST_TURNS} turns are shown, evenly spread."
    if e.expected is None:
        note += " What was expected is not in the results."
    return note


def _facts(e: Evaluation) -> dict[str, str]:
    facts = {
        "benchmark": e.benchmark,
        "digest of its games": e.benchmark_digest,
        "made by": e.made_by,
        "games": f"{len(e.games):,}, of {_count(e.num_turns, 'turn')}",
    }
    return facts | {str(name): plain(value) for name, value in e.about.items()}


# Pictures


def _plots(e: Evaluation) -> list[Plot]:
    plots = []
    for place, name in enumerate(metrics_of(e), start=1):
        lines = [
            Line(number, system.values[name])
            for number, system in enumerate(e.systems)
            if is_there(system, name)
        ]
        told = "; ".join(f"{e.systems[line.number].name}: {_told(line)}" for line in lines)
        svg = line_plot(lines, limits=_limits(name)).encode()
        picture = Picture(f"turns_{place:02d}.svg", svg, f"{name} by turn. {told}")
        plots.append(Plot(name, METRICS.get(name), picture, bool(networks(e, name))))
    return plots


def _limits(name: str) -> tuple[float, float] | None:
    """Shares are drawn from none to all, so that a small change looks small."""
    metric = METRICS.get(name)
    return (0.0, 1.0) if metric is not None and metric.unit.startswith("share of") else None


def _told(line: Line) -> str:
    """A line in words: its first and its last value."""
    ends = [(t, found.mean) for t, found in enumerate(line.estimates, start=1) if found]
    (first, begins), (last, becomes) = ends[0], ends[-1]
    if first == last:
        return f"{number(begins)} in turn {first}"
    return f"{number(begins)} in turn {first}, {number(becomes)} in turn {last}"


def _system(folder: Path, e: Evaluation, which: int) -> System:
    result = e.systems[which]
    games = shown_games(folder, e, result)
    pictures = {
        (game.place, turn.turn): Picture(
            f"game_{which + 1}_{game.place}_{turn.turn:03d}.jpg",
            turn.picture,
            f"{_count(turn.num_frames, 'frame')} of turn {turn.turn}, from left to right",
            turn.size,
        )
        for game in games
        for turn in game.turns
    }
    sample = Picture(f"line_{which + 1}.svg", line_sample(which).encode(), f"line {which + 1}")
    return System(result, sample, beside_table(result), games, pictures)
