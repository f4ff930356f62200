"""Line plots of a report, as SVG: every metric against the turn's number.

The same values give the same bytes. An SVG has a light and a dark colour scheme, and contains no
names of systems, which could be too long for it or in another script; `line_sample` draws the key.
"""

import dataclasses
import functools
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate_known

LONG_GAME = 30
"""Number of turns beyond which lines are smoothed."""

SMOOTHED = 9
"""Number of turns in the running mean of a long game."""

_INCHES = 3.9, 2.3
_MARKED = 12  # number of turns up to which each one has a dot

# Light and dark. The lines' colours resemble Okabe and Ito's palette; dashes differ as well.
_COLOURS = {
    "card": ("#ffffff", "#212329"),
    "ink": ("#22252c", "#e9e9e4"),
    "soft": ("#6c717e", "#a0a4af"),
    "edge": ("#e2e2dd", "#383b44"),
    "line0": ("#2f5fc4", "#8aacf7"),
    "line1": ("#bf4f08", "#f4a35b"),
    "line2": ("#18795a", "#5fcaa2"),
    "line3": ("#8a3ca6", "#d09be6"),
    "line4": ("#7a6a12", "#d9c65a"),
    "line5": ("#b02a5b", "#f58fb3"),
}
_LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
_NUM_COLOURS = sum(name.startswith("line") for name in _COLOURS)
_DASHES = ((), (5.0, 2.0), (1.5, 1.5), (6.0, 2.0, 1.5, 2.0))
_STYLE = "<style>:root{{{}}}@media (prefers-color-scheme:dark){{:root{{{}}}}}</style>".format(
    *(";".join(f"--{name}:{pair[which]}" for name, pair in _COLOURS.items()) for which in (0, 1))
)
_OPTIONS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "animegamer",
    "font.size": 9,
    "axes.edgecolor": _LIGHT["edge"],
    "axes.labelcolor": _LIGHT["soft"],
    "xtick.color": _LIGHT["edge"],
    "ytick.color": _LIGHT["edge"],
    "xtick.labelcolor": _LIGHT["soft"],
    "ytick.labelcolor": _LIGHT["soft"],
    "grid.color": _LIGHT["edge"],
    "grid.linewidth": 0.6,
    "path.simplify": False,
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One system's values of a metric by turn; the system's number chooses the colour."""

    number: int
    values: Float[np.ndarray, "g t"]

    @property
    def means(self) -> Float[np.ndarray, " t"]:
        """The mean over games of each turn; NaN if there is no value."""
        known = np.ma.masked_invalid(self.values.astype(np.float64))
        return np.ma.filled(known.mean(0), np.nan)

    @functools.cached_property
    def estimates(self) -> list[Estimate | None]:
        """The estimate of each turn; in a long game, of the `SMOOTHED` turns around it.

        Near both ends there are fewer.
        """
        num_turns = self.values.shape[1]
        around = SMOOTHED // 2 if num_turns > LONG_GAME else 0
        return [
            estimate_known(self.values[:, max(0, t - around) : t + around + 1])
            for t in range(num_turns)
        ]


def line_plot(lines: Sequence[Line], *, limits: tuple[float, float] | None = None) -> str:
    """Returns an SVG of the lines against the turn's number, each with the band of its intervals.

    Up to `LONG_GAME` turns a line is the mean of each turn. In longer games that line is thin, and
    a thick one shows a running mean with its intervals.

    Args:
        lines: One or more lines of equally many turns.
        limits: Limits of the vertical axis; None: those of the lines.
    """
    with mpl.rc_context(_OPTIONS):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line)
        num_turns = lines[0].values.shape[1]
        margin = 0.5 if num_turns < 3 else 0.02 * num_turns
        axes.set_xlim(1 - margin, num_turns + margin)
        axes.set_xlabel("turn")
        axes.set_xticks(_ticks(num_turns))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if limits is not None:
            margin = 0.04 * (limits[1] - limits[0])
            axes.set_ylim(limits[0] - margin, limits[1] + margin)
        axes.grid(axis="y")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        return _finished(figure)


def _draw(axes: Axes, line: Line) -> None:
    colour = _LIGHT[f"line{line.number % _NUM_COLOURS}"]
    turns = np.arange(1.0, line.values.shape[1] + 1)
    if len(turns) == 1:  # side by side
        turns += 0.04 * line.number
    if len(turns) > LONG_GAME:
        axes.plot(turns, line.means, color=colour, linewidth=0.6, alpha=0.4)
    unknown = (np.nan,) * 3
    rows = [(e.mean, e.low, e.high) if e else unknown for e in line.estimates]
    mean, low, high = np.array(rows).T
    axes.plot(
        turns,
        mean,
        color=colour,
        linewidth=2.0,
        dashes=_dashes(line.number) or (None, None),
        marker="o" if len(turns) <= _MARKED else "",
        markersize=3.5,
    )
    if len(turns) == 1:
        axes.vlines(turns, low, high, color=colour, alpha=0.35, linewidth=5)
    axes.fill_between(turns, low, high, color=colour, alpha=0.15, linewidth=0)


def _ticks(num_turns: int) -> list[int]:
    """Returns the first turn and multiples of a step, eleven at most."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, num_turns) if num_turns <= 10 * step)
    return [1, *range(step if step > 1 else 2, num_turns + 1, step)]


def _dashes(number: int) -> tuple[float, ...]:
    return _DASHES[number % len(_DASHES)]


def _finished(figure: Figure) -> str:
    """Returns the SVG with both colour schemes, a background, and the reader's font."""
    figure.set_facecolor(_LIGHT["card"])
    for axes in figure.axes:
        axes.set_facecolor("none")
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for name, light in _LIGHT.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace(">", f">{_STYLE}", 1)


def line_sample(number: int) -> str:
    """Returns an SVG of a piece of a system's line, for the key."""
    dashes = " ".join(f"{2 * length:g}" for length in _dashes(number))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="36" height="12" viewBox="0 0 36 12">'
        f'{_STYLE}<path d="M1 6H35" fill="none" stroke="var(--line{number % _NUM_COLOURS})" '
        f'stroke-width="3" stroke-dasharray="{dashes or "none"}"/></svg>'
    )
