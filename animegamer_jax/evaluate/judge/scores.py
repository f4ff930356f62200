"""What a judge said of played games (PAPER section 4.2), and how far two judges agree.

The paper lets GPT-4V and people score games from 0 to 10 by the criteria here. A score of one judge
stands beside others of the same judge only.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate
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
"""The order of the criteria wherever scores have an axis of them."""

LEAST_SCORE, MOST_SCORE = 0, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's scores of all systems' games.

    Attributes:
        model: that judged.
        seed: of the systems' order in each question.
        games: names, in the order that they were given.
        systems: names, sorted.
        scores: by game, system and criterion, 0 to 10; NaN where a game was set aside, or a system
            did not play it.
        set_aside: reason by game.
        usage: what was asked for this, and what it took.
    """

    model: str
    seed: int
    games: tuple[str, ...]
    systems: tuple[str, ...]
    scores: Float[np.ndarray, "g s c"]
    set_aside: Mapping[str, str]
    usage: Usage

    @property
    def num_judged(self) -> int:
        """Games that have scores."""
        return len(self.games) - len(self.set_aside)

    def of(self, system: str, criterion: Criterion) -> Float[np.ndarray, " g"]:
        """One system's scores by game."""
        return self.scores[:, self.systems.index(system), CRITERIA.index(criterion)]

    def estimate(self, system: str, criterion: Criterion) -> Estimate | None:
        """The mean over judged games with its bootstrap interval; None: no game was judged."""
        values = self.of(system, criterion)[:, None]
        return estimate(values, where=np.isfinite(values))

    def estimates(self) -> dict[str, dict[Criterion, Estimate | None]]:
        """`estimate` of every system and criterion."""
        return {s: {c: self.estimate(s, c) for c in CRITERIA} for s in self.systems}

    def __str__(self) -> str:
        """One line: how many games were judged, why others were not, and what it took."""
        if not self.games:
            return f"{self.model}: there was no game to judge"
        told = f"{self.model}: {self.num_judged} of {len(self.games)} games judged"
        if self.set_aside:
            first = next(name for name in self.games if name in self.set_aside)
            told += f", {len(self.set_aside)} set aside (the first, {first}: "
            told += f"{self.set_aside[first]})"
        return f"{told}; {self.usage}, {self.usage.cached:,} answers from the cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two judges agree (`agreement`).

    Attributes:
        spearman: rank correlation of their scores, -1 to 1; None: fewer than two scores, or all
            of one judge's are the same.
        num_scores: pairs of scores that it is made of.
        preference: share of pairs of systems in which both prefer the same one, 0 to 1; None:
            there is no pair.
        num_pairs: of systems within a game, of which each judge prefers one.
        num_tied: pairs in which a judge scored both the same; they are not counted.
    """

    spearman: float | None
    num_scores: int
    preference: float | None
    num_pairs: int
    num_tied: int


def agreement(a: Verdict, b: Verdict, *, criterion: Criterion = "overall") -> Agreement:
    """The agreement of two judges on the games and systems that both have scored.

    Rank correlation (Spearman 1904): Pearson's correlation of the scores' ranks over games and
    systems, equal scores having the mean of their ranks,

        sum (r - mean r) (s - mean s) / sqrt(sum (r - mean r)^2 sum (s - mean s)^2).

    Preference (Zheng et al., arXiv 2306.05685, section 4, without ties): over all pairs (i, j) of
    systems in one game,

        share of sign(a_i - a_j) = sign(b_i - b_j) where neither is 0.

    Chance is 0 for the former and 1/2 for the latter. The same judge with two seeds tells how much
    the order of systems matters.
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
    a: Verdict, b: Verdict, criterion: Criterion
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"], np.ndarray]:
    """Both judges' scores of what both have scored, and which game each is of."""
    games = [name for name in a.games if name in b.games]
    systems = [name for name in a.systems if name in b.systems]

    def chosen(verdict: Verdict) -> np.ndarray:
        rows = [verdict.games.index(name) for name in games]
        columns = [verdict.systems.index(name) for name in systems]
        return verdict.scores[:, :, CRITERIA.index(criterion)][rows][:, columns]

    of_a, of_b = chosen(a), chosen(b)
    both = np.isfinite(of_a) & np.isfinite(of_b)
    return of_a[both], of_b[both], np.nonzero(both)[0]


def _preferences(scores: Float[np.ndarray, " n"], games: np.ndarray) -> Float[np.ndarray, " p"]:
    """Of each pair within a game: 1 where the former scores higher, -1 the latter, 0 neither."""
    first, second = np.triu_indices(len(scores), k=1)
    within = games[first] == games[second]
    return np.sign(scores[first] - scores[second])[within]


def spearman(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float | None:
    """Rank correlation as in `agreement`; None: fewer than two values, or all are the same."""
    r, s = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    size = np.sqrt(np.square(r).sum() * np.square(s).sum())
    return float((r * s).sum() / size) if size > 0 else None
