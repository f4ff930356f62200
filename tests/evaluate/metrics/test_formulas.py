"""The metrics against arithmetic by hand, and the bootstrap against what it promises."""

import numpy as np
import pytest

from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.evaluate.metrics.formulas import estimate


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def test_states_are_compared_slot_by_slot():
    predicted = np.array([[1, 0, -2], [0, 1, 1]])
    truth = np.array([[1, 1, 1], [0, 1, -1]])
    assert formulas.accuracy(predicted, truth).tolist() == [[1, 0, 0], [1, 1, 0]]
    assert formulas.error(predicted, truth).tolist() == [[0, 1, 3], [0, 0, 2]]


def test_motion_levels_hit_or_miss_by_their_distance():
    measured, requested = np.array([1, 5, 3]), np.array([1, 2, 4])
    assert formulas.accuracy(measured, requested).tolist() == [1, 0, 0]
    assert formulas.error(measured, requested).tolist() == [0, 3, 1]


def test_cosine_is_that_of_float64_and_zero_for_nothing(random):
    a, b = random.normal(size=(2, 6, 16)).astype(np.float32)
    a[0] = 0
    expected = (
        (a[1:] * b[1:]).sum(1) / np.linalg.norm(a[1:], axis=1) / np.linalg.norm(b[1:], axis=1)
    )
    found = np.asarray(formulas.cosine(a, b))
    assert found[0] == 0
    np.testing.assert_allclose(found[1:], expected, atol=1e-6)


def test_clip_scores_are_means_over_frames_and_do_not_see_lengths(random):
    frames = random.normal(size=(3, 4, 8)).astype(np.float32)
    texts = random.normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_allclose(formulas.clip_image_similarity(frames, 7 * frames), 1, atol=1e-6)
    np.testing.assert_allclose(formulas.clip_image_similarity(frames, -frames), -1, atol=1e-6)
    each = formulas.cosine(frames, np.repeat(texts[:, None], 4, axis=1))
    found = formulas.clip_text_similarity(frames, texts)
    np.testing.assert_allclose(found, np.mean(each, axis=1), atol=1e-6)


def test_psnr_counts_levels():
    black = np.zeros((2, 3, 4, 6, 3), np.uint8)
    other = black.copy()
    other[0] += 1
    other[1] += 16
    expected = [20 * np.log10(255), 20 * np.log10(255 / 16)]
    np.testing.assert_allclose(formulas.psnr(black, other), expected, atol=1e-3)
    assert 84 < float(formulas.psnr(black, black)[0]) < 84.2


# The bootstrap


def test_estimate_is_the_mean_of_what_is_chosen():
    values = np.array([[1.0, 0.0], [1.0, np.nan]])
    found = estimate(values, where=np.array([[True, True], [True, False]]))
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(2 / 3), 3)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert estimate(values, where=np.zeros((2, 2), bool)) is None
    with pytest.raises(ValueError, match="not finite"):
        estimate(values)


def test_estimate_repeats():
    values = np.random.default_rng(1).random((20, 5))
    assert estimate(values) == estimate(values)
    assert estimate(values, seed=1) != estimate(values)


def test_interval_covers_the_true_mean_as_often_as_it_says(random):
    """Turns of a game share most of their luck; the interval must not take them for independent."""
    trials, covered, width = 300, 0, []
    for _ in range(trials):
        skill = random.beta(4, 2, size=(60, 1))  # mean 2/3
        found = estimate((random.random((60, 5)) < skill).astype(float), num_resamples=300)
        assert found is not None
        covered += found.low <= 2 / 3 <= found.high
        width.append(found.high - found.low)
    assert 0.90 <= covered / trials <= 0.98
    independent = estimate((random.random((60, 5)) < 2 / 3).astype(float))
    assert independent is not None
    assert np.mean(width) > 1.1 * (independent.high - independent.low)


def test_interval_shrinks_with_games(random):
    few, many = (estimate(random.random((n, 5))) for n in (20, 320))
    assert few is not None
    assert many is not None
    assert (few.high - few.low) > 3 * (many.high - many.low)
