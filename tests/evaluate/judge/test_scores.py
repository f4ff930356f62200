"""Rank correlation, and the agreement of two judges."""

import string

import numpy as np
import pytest
import scipy.stats

from animegamer_jax.evaluate.judge.scores import CRITERIA, JudgeScores, agreement, spearman
from animegamer_jax.vlm.usage import Usage


def scores_of(scores: list, *, games: str = "", systems: str = "pqr") -> JudgeScores:
    """Of overall scores by game and system; the other criteria are zero."""
    overall = np.array(scores, np.float64)
    full = np.zeros((*overall.shape, len(CRITERIA)))
    full[:, :, 0] = overall
    return JudgeScores(
        model="m",
        seed=0,
        games=tuple(games or string.ascii_lowercase[: len(overall)]),
        systems=tuple(systems[: overall.shape[1]]),
        scores=full,
        skipped={},
        usage=Usage(),
    )


def test_rank_correlation_is_scipys():
    random = np.random.default_rng(0)
    for _ in range(20):
        x, y = random.integers(0, 6, (2, 15)).astype(np.float64)  # with ties
        assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    assert spearman(np.ones(3), np.arange(3.0)) is None
    assert spearman(np.ones(1), np.ones(1)) is None


def test_judges_that_agree_and_judges_that_do_not():
    a = scores_of([[1, 2, 3], [4, 6, 9]])
    same = agreement(a, scores_of([[0, 1, 2], [5, 6, 10]]))
    assert (same.spearman, same.preference) == (pytest.approx(1), 1)
    assert (same.num_scores, same.num_pairs, same.num_tied) == (6, 6, 0)
    turned = agreement(a, scores_of([[9, 8, 7], [6, 4, 1]]))
    assert (turned.spearman, turned.preference) == (pytest.approx(-1), 0)


def test_preference_is_within_games_and_ties_do_not_count():
    a = scores_of([[1, 2, 3], [5, 5, 6]])
    b = scores_of([[2, 1, 3], [1, 2, 3]])
    # First game: p < q against p > q, the other two alike. Second: a is undecided on (p, q).
    found = agreement(a, b)
    assert (found.preference, found.num_pairs, found.num_tied) == (4 / 5, 5, 1)
    constant = agreement(a, scores_of([[5, 5, 5], [5, 5, 5]]))
    assert (constant.spearman, constant.preference, constant.num_tied) == (None, None, 6)
    assert agreement(a, b, criterion="state_update").spearman is None


def test_only_what_both_have_scored_is_compared():
    nan = float("nan")
    a = scores_of([[1, 2], [nan, nan], [3, 4], [9, 1]], games="abcx", systems="pq")
    b = scores_of([[7, 8, 5], [1, 2, nan], [6, nan, 4]], games="bac", systems="qpr")
    # Both: game a (p 1 and 2, q 2 and 1) and game c (q 4 and 6).
    found = agreement(a, b)
    assert (found.num_scores, found.num_pairs, found.preference) == (3, 1, 0)
    assert found.spearman == pytest.approx(scipy.stats.spearmanr([1, 2, 4], [2, 1, 6]).statistic)
    assert agreement(a, scores_of([[1, 2]], games="z")).num_scores == 0
