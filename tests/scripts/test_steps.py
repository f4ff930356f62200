"""The comparison of denoising steps and students (`scripts/toy/steps.py`): what its columns say."""

import importlib

import numpy as np
import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.toy.evaluation import WORLD

steps = importlib.import_module("steps")


@pytest.fixture(scope="module")
def true_clips():
    benchmark = WORLD.make_benchmark("test", num_games=4, num_turns=2, seed=0)
    levels = [[turn.motion_level for turn in game.turns] for game in benchmark.games]
    return WORLD.true_clips(benchmark, FrameSize(17, 96, 144)), np.array(levels)


def test_the_columns_of_a_row(true_clips):
    """Exchanged clips have the same distribution, so only the scores of each clip fall."""
    clips, levels = true_clips
    comparison = steps.Comparison(clips, levels, lambda x: x.mean((2, 3)).astype(np.float32) / 255)

    def row(clips, others):
        cells = list(comparison.describe(clips, others))
        assert len(cells) == len(steps.Comparison.columns)
        return {n: cell.split()[0] for n, cell in zip(steps.Comparison.columns, cells, strict=True)}

    exchanged = clips[::-1]
    same, other = row(clips, clips), row(exchanged, clips)
    assert (same["ACC-F"], same["MAE-F"], same["distance"], same["diversity"]) == (
        "1.000",
        "0.000",
        "0",
        "0.0",
    )
    assert other["distance"] == "0"
    assert float(other["ACC-F"]) < 1
    assert float(other["PSNR"]) < 20 < float(same["PSNR"])
    assert float(other["diversity"]) == pytest.approx(
        np.sqrt(np.square(exchanged.astype(float) - clips).mean()), abs=0.06
    )
    grey = row(np.full_like(clips, 128), clips)
    assert float(grey["distance"]) > 0
    assert grey["level 5"].startswith("0") or grey["level 5"] == "none"
    *scores, _ = comparison.describe(clips, None)
    assert scores[:5] == [scores[0], "0.000", "", "", ""]


def test_only_a_student_is_one(tiny_bundle):
    with pytest.raises(UserError, match=r"expected a model of animegamer train distill"):
        steps.open_student(str(tiny_bundle))
