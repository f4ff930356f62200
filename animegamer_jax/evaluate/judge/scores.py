"""A judge's scores of played games (paper, section 4.2), and the agreement of two judges.

In the paper GPT-4V and people score games from 0 to 10 by the criteria here. Only scores of the
same judge are comparable.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate
from animegamer_jax.storage.serialization import array_field
from animegamer_jax.vlm.usage import Usage

Criterion = Literal[
    "overall",
    "instruction_following",
    "contextual_consistency",
    "character_consistency",
    "style_consistency",
    "state_update",
]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
"""The criteria, in the order of the scores' last axis."""

LEAST_SCORE, MOST_SCORE = 0, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeScores:
    """A judge's scores of all systems' games.

    Attributes:
        model: Name of the judge.
        seed: Seed of the systems' order in each question.
        games: Names of the games, in the given order.
        systems: Names of the systems, sorted.
        scores: Scores by game, system and criterion, 0 to 10; NaN if the game was skipped, or if
            the system did not play it.
        skipped: Reasons of the games without scores, by game.
        usage: Requests, tokens and costs of the questions.
    """

    model: str
    seed: int
    games: tuple[str, ...]
    systems: tuple[str, ...]
    scores: Annotated[Float[np.ndarray, "g s c"], array_field(float, 3)]
    skipped: Mapping[str, str]
    usage: Usage

    @property
    def num_judged(self) -> int:
        """Number of games with scores."""
        return len(self.games) - len(self.skipped)

    def of(self, system: str, criterion: Criterion) -> Float[np.ndarray, " g"]:
        """Returns one system's scores by game."""
        return self.scores[:, self.systems.index(system), CRITERIA.index(criterion)]

    def estimate(self, system: str, criterion: Criterion) -> Estimate | None:
        """Returns the mean over judged games and its bootstrap interval; None if there are none."""
        values = self.of(system, criterion)[:, None]
        return estimate(values, where=np.isfinite(values))

    def estimates(self) -> dict[str, dict[Criterion, Estimate | None]]:
        """Returns `estimate` of every system and criterion."""
        return {s: {c: self.estimate(s, c) for c in CRITERIA} for s in self.systems}

    def __str__(self) -> str:
        """Returns in one line how many games were judged, why others were not, and the usage."""
        if not self.games:
            return f"{self.model}: no games to judge"
        text = f"{self.model}: {self.num_judged} of {len(self.games)} games judged"
        if self.skipped:
            first = next(name for name in self.games if name in self.skipped)
            text += f", {len(self.skipped)} skipped (the first, {first}: {self.skipped[first]})"
        return f"{text}; {self.usage}, {self.usage.cached:,} answers from the cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """The agreement of two judges (`agreement`).

    Attributes:
        spearman: Rank correlation of their scores, -1 to 1; None if there are fewer than two
            scores, or if all scores of one judge are the same.
        num_scores: Number of pairs of scores in the correlation.
        preference: Share of pairs of systems of which both judges prefer the same one, 0 to 1;
            None if there is no pair.
        num_pairs: Number of pairs of systems within a game of which each judge prefers one.
        num_tied: Number of pairs to which a judge gave the same score; they are not counted.
    """

    spearman: float | None
    num_scores: int
    preference: float | None
    num_pairs: int
    num_tied: int


def agreement(a: JudgeScores, b: JudgeScores, *, criterion: Criterion = "overall") -> Agreement:
    """Returns the agreement of two judges on the games and systems that both have scored.

    Rank correlation (Spearman 1904) is Pearson's correlation of the scores' ranks over games and
    systems; equal scores have the mean of their ranks:

        sum (r - mean r) (s - mean s) / sqrt(sum (r - mean r)^2 sum (s - mean s)^2).

    Preference (Zheng et al., arXiv 2306.05685, section 4, without ties): over all pairs (i, j) of
    systems in one game,

        share of sign(a_i - a_j) = sign(b_i - b_j) where neither is 0.

    By chance the former is 0 and the latter 1/2. The same judge with two seeds shows how much the
    order of the systems matters.
    """
    x, y, rows = _matched(a, b, criterion)
    preferred = _preferences(x, rows), _preferences(y, rows)
    decided = (preferred[0] != 0) & (preferred[1] != 0)
    same = (preferred[0] == preferred[1])[decided]
    return Agreement(
        spearman=spearman(x, y),
        num_scores=len(x),
        preference=float(same.mean()) if len(same) else None,
        num_pairs=len(same),
        num_tied=int((~decided).sum()),
    )


def _matched(
    a: JudgeScores, b: JudgeScores, criterion: Criterion
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"], np.ndarray]:
    """Returns the scores of what both judges have scored, and the index of each score's game."""
    games = [name for name in a.games if name in b.games]
    systems = [name for name in a.systems if name in b.systems]

    def chosen(judge: JudgeScores) -> np.ndarray:
        rows = [judge.games.index(name) for name in games]
        columns = [judge.systems.index(name) for name in systems]
        return judge.scores[:, :, CRITERIA.index(criterion)][rows][:, columns]

    of_a, of_b = chosen(a), chosen(b)
    both = np.isfinite(of_a) & np.isfinite(of_b)
    return of_a[both], of_b[both], np.nonzero(both)[0]


def _preferences(scores: Float[np.ndarray, " n"], games: np.ndarray) -> Float[np.ndarray, " p"]:
    """Returns for each pair within a game 1 if the former is better, -1 the latter, 0 neither."""
    first, second = np.triu_indices(len(scores), k=1)
    within = games[first] == games[second]
    return np.sign(scores[first] - scores[second])[within]


def spearman(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float | None:
    """Returns the rank correlation; None for fewer than two values, or if all are the same."""
    r, s = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    size = np.sqrt(np.square(r).sum() * np.square(s).sum())
    return float((r * s).sum() / size) if size > 0 else None
