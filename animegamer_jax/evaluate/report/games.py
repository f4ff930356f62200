"""Selects the games that a report shows: each system's best, median and worst."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image
from scipy.stats import rankdata

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.registry import CONTEXT, METRICS
from animegamer_jax.evaluate.report.tables import has_values, in_order
from animegamer_jax.evaluate.results import Evaluation, SystemResult
from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media.video import pick_frames, read_mp4

MOST_TURNS = 20
"""Largest number of turns that are shown of a game."""

_WITH_CONTEXT = (CONTEXT, "ACC-F", "ACC-S")
_FRAMES, _FRAME_WIDTH, _GAP = 4, 220, 4
_STATES = ("motion level", "social", "entertainment", "stamina")


@dataclasses.dataclass(frozen=True)
class State:
    """A motion level or a change of a state; `expected` is None if it is unknown."""

    name: str
    predicted: str
    expected: str | None

    @property
    def is_wrong(self) -> bool:
        return self.expected is not None and self.predicted != self.expected


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownTurn:
    """A turn; `picture` is a JPEG of some of its frames side by side."""

    turn: int
    instruction: str
    is_open: bool
    picture: bytes
    size: tuple[int, int]
    num_frames: int
    states: Sequence[State]
    values: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownGame:
    """A game; `rank` is "best", "median" or "worst", `note` gives its mean rank or an error."""

    rank: str
    name: str
    note: str
    turns: Sequence[ShownTurn]


def ranked_by(system: SystemResult) -> list[str]:
    """Returns the metrics that a system's games are ranked by.

    With a context accuracy, these are that metric, ACC-F and ACC-S; otherwise all but the time.
    """
    names = in_order(name for name in system.values if has_values(system, name))
    if CONTEXT in names:
        return [name for name in _WITH_CONTEXT if name in names]
    return [name for name in names if name in METRICS and METRICS[name].group != "speed"]


def mean_ranks(system: SystemResult) -> Float[np.ndarray, " g"]:
    """Returns the mean of each game's ranks, 1 the best, over the metrics of `ranked_by`.

    Equal games share the mean of their ranks. NaN: a game has no value.
    """
    ranks = []
    for name in ranked_by(system):
        values, sign = system.values[name], -1 if METRICS[name].better == "higher" else 1
        known = np.ma.masked_invalid(values.astype(np.float64))
        means = np.ma.filled(known.mean(1), np.nan)
        ranks.append(rankdata(sign * means.round(9), nan_policy="omit"))
    if not ranks:
        return np.full(len(system.folders), np.nan)
    return np.ma.filled(np.ma.masked_invalid(ranks).mean(0), np.nan)


def chosen_games(ranks: Float[np.ndarray, " g"]) -> dict[str, int]:
    """Returns the number of the best, the median and the worst game.

    Of an even number the median is the better of the two in the middle; of equal games the first
    counts as better. Two games have no median, and one is the best; without ranks the first is
    shown.
    """
    order = [int(n) for n in np.argsort(ranks, kind="stable") if np.isfinite(ranks[n])]
    if not order:
        return {"first": 0} if len(ranks) else {}
    chosen = {"best": order[0], "median": order[(len(order) - 1) // 2], "worst": order[-1]}
    if len(order) < 3:
        del chosen["median"]
    if len(order) < 2:
        del chosen["worst"]
    return chosen


def shown_games(folder: Path, evaluation: Evaluation, system: SystemResult) -> list[ShownGame]:
    """Returns the games of a system that a report shows, with a note if one is unreadable."""
    if not system.folders:
        return []
    ranks, shown = mean_ranks(system), []
    num_ranked = int(np.isfinite(ranks).sum())
    for rank, which in chosen_games(ranks).items():
        note = "not ranked: there are no scores"
        if np.isfinite(ranks[which]):
            note = f"mean rank {ranks[which]:.1f} of {num_ranked:,} games"
        try:
            turns = _turns(folder / system.folders[which], evaluation, system, which)
            if len(turns) < evaluation.num_turns:
                note += f"; {len(turns)} of {evaluation.num_turns} turns, evenly spread"
        except UserError as error:
            turns, note = [], f"{note}; cannot be shown: {error}"
        name = evaluation.games[which]
        shown.append(ShownGame(rank=rank, name=name, note=note, turns=turns))
    return shown


def _turns(
    folder: Path, evaluation: Evaluation, system: SystemResult, which: int
) -> list[ShownTurn]:
    game = Game.load(folder)
    if len(game.turns) < evaluation.num_turns:
        found = len(game.turns)
        raise UserError(f"{folder}: expected {evaluation.num_turns} turns, found {found}")
    numbers = np.linspace(0, evaluation.num_turns - 1, min(MOST_TURNS, evaluation.num_turns))
    return [
        _turn(game, evaluation, system, which, int(number)) for number in numbers.round().tolist()
    ]


def _turn(
    game: Game, evaluation: Evaluation, system: SystemResult, which: int, turn: int
) -> ShownTurn:
    played = game.turns[turn]
    frames = pick_frames(read_mp4(game.folder / played.clip), count=_FRAMES)
    picture, size = _strip(frames)
    values = {
        name: f"{system.values[name][which, turn]:.3g}"
        for name in ranked_by(system)
        if np.isfinite(system.values[name][which, turn])
    }
    expected = None if evaluation.expected is None else evaluation.expected[which, turn]
    return ShownTurn(
        turn=turn + 1,
        instruction=evaluation.instructions[which][turn],
        is_open=bool(evaluation.is_open[which, turn]),
        picture=picture,
        size=size,
        num_frames=len(frames),
        states=_states(played, expected),
        values=values,
    )


def _states(turn: Turn, expected: np.ndarray | None) -> list[State]:
    values = turn.motion_level, turn.social, turn.entertainment, turn.stamina
    wanted = [None] * 4 if expected is None else [int(value) for value in expected]
    return [
        State(name, _text(name, value), None if want is None else _text(name, want))
        for name, value, want in zip(_STATES, values, wanted, strict=True)
    ]


def _text(name: str, value: int) -> str:
    return str(value) if name == _STATES[0] or value == 0 else f"{value:+d}".replace("-", "\u2212")


def _strip(frames: UInt8[np.ndarray, "k h w 3"]) -> tuple[bytes, tuple[int, int]]:
    """Returns a JPEG of frames side by side, and its width and height."""
    count, height, width = frames.shape[:3]
    rows = max(1, round(height * _FRAME_WIDTH / width))
    size = count * _FRAME_WIDTH + (count - 1) * _GAP, rows
    board = Image.new("RGB", size, (128, 128, 128))
    for column, frame in enumerate(frames):
        smaller = Image.fromarray(frame).resize((_FRAME_WIDTH, rows), Image.Resampling.LANCZOS)
        board.paste(smaller, (column * (_FRAME_WIDTH + _GAP), 0))
    buffer = io.BytesIO()
    board.save(buffer, format="JPEG", quality=82)
    return buffer.getvalue(), size
