"""What an evaluation found, and its ablations, as files that are read back."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_evaluation import ABLATIONS, emptied, make_evaluation, with_judges

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.judge.scores import CRITERIA, JudgeScores
from animegamer_jax.evaluate.report.ablations import read_ablations, write_ablations
from animegamer_jax.evaluate.results import read_results, write_results
from animegamer_jax.vlm.usage import Usage


def test_results_come_back(tmp_path):
    evaluation = with_judges(make_evaluation(None))
    values = dict(evaluation.systems[1].values)
    values["CLIP-I"] = values["CLIP-I"].astype(np.float32)
    values["CLIP-I"][2, 1] = np.nan
    evaluation = emptied(
        evaluation,
        values=values,
        digest=None,
        set_scores={"FVD": float("nan")},
        settings={"steps": np.int64(50), "scale": np.float32(0.5), "list": [1, {"a": None}]},
    )
    evaluation = dataclasses.replace(evaluation, judge_note="a note", run_config={"t": (1, 2)})
    write_results(tmp_path, evaluation)
    again = read_results(tmp_path)
    for system, other in zip(evaluation.systems, again.systems, strict=True):
        for name, array in system.values.items():
            np.testing.assert_allclose(other.values[name], array, rtol=0, atol=1e-6)
        for name in ("name", "model", "digest", "folders", "skipped", "notes"):
            assert getattr(other, name) == getattr(system, name)
        np.testing.assert_equal(other.reference, system.reference)
    assert np.isnan(again.systems[1].set_scores["FVD"])
    assert again.systems[1].settings == {"steps": 50, "scale": 0.5, "list": [1, {"a": None}]}
    assert again.run_config == {"t": [1, 2]}
    for scores, other in zip(evaluation.judge_scores, again.judge_scores, strict=True):
        np.testing.assert_equal(other.scores, scores.scores)
        assert (other.usage, other.skipped) == (scores.usage, scores.skipped)
    assert again.agreements == evaluation.agreements
    np.testing.assert_equal(again.is_open, evaluation.is_open)
    np.testing.assert_equal(again.expected, evaluation.expected)
    for name in ("benchmark", "games", "instructions", "motions", "judge_note"):
        assert getattr(again, name) == getattr(evaluation, name)
    text = (tmp_path / "results.json").read_text()
    write_results(tmp_path, again)
    assert (tmp_path / "results.json").read_text() == text


def test_results_of_no_games_come_back(tmp_path):
    evaluation = make_evaluation(None)
    none = JudgeScores(
        model="j", seed=0, games=(), systems=("a",), scores=np.zeros((0, 1, len(CRITERIA))),
        skipped={}, usage=Usage(),
    )  # fmt: skip
    write_results(tmp_path, dataclasses.replace(evaluation, judge_scores=(none,), expected=None))
    again = read_results(tmp_path)
    assert again.judge_scores[0].scores.shape == (0, 1, len(CRITERIA))
    assert again.expected is None
    write_results(tmp_path, make_evaluation(None, games=0))
    assert read_results(tmp_path).games == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 1}, "format_version: expected 2, found 1: expected what this version"),
        ({"world": None}, "world: expected a valid string, found null"),
        ({"colour": 1}, "colour: unknown field"),
        ({"is_open": [[True], [False, True]]}, r"is_open: expected lists of bool in 2 dimensions"),
        ({"is_open": [[1, 0]]}, "is_open: expected lists of bool"),
        ({"games": ["a"]}, "instructions: expected 4 of each of 1 games"),
        ({"motions": [["walk"]]}, "motions: expected 4 of each of 6 games"),
        ({"systems": {}}, "systems: expected a valid array"),
        ({"expected": [[[1, 2, 3, 4]]]}, r"expected: expected the shape \(6, 4, 4\)"),
    ],
)
def test_results_that_are_damaged(tmp_path, change, message):
    write_results(tmp_path, make_evaluation(None))
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as caught:
        read_results(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_results_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"results\.json: cannot be read: No such file"):
        read_results(tmp_path)
    for text in ("{", '{"a": NaN}', "[]", "\xff"):
        (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=r"results\.json: "):
            read_results(tmp_path)


def test_ablations_come_back(tmp_path):
    path = tmp_path / "ablations.json"
    write_ablations(path, ABLATIONS)
    assert read_ablations(path) == ABLATIONS
    path.write_text(path.read_text().replace('"decoder"', '"nothing"'))
    with pytest.raises(UserError, match=r"rows\[0\]\.part: expected 'decoder' or 'game'"):
        read_ablations(path)
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_ablations(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_ablations(tmp_path / "nothing.json")
