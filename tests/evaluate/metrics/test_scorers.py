"""Scorers of `animegamer evaluate`: what they say of true clips and of others."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from animegamer_jax.configs import CLIPConfig
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.lpips import LPIPS
from animegamer_jax.evaluate.metrics.scorers import (
    NUM_FRAMES,
    Answers,
    ClipScorer,
    LpipsScorer,
    MotionScorer,
    Pictures,
    SetScorer,
    StateScorer,
    TruthScorer,
    expected_of,
)
from animegamer_jax.evaluate.metrics.suite import (
    FrameSize,
    Means,
    Scoring,
    make_scoring,
)
from animegamer_jax.evaluate.metrics.video_distance import frechet_distance
from animegamer_jax.evaluate.play_games import (
    _add,
    _nothing,
    _set_scores,
    clip_values,
)
from animegamer_jax.evaluate.reference_scores import most_frequent_values, tables_beside
from animegamer_jax.models.clip import CLIP
from animegamer_jax.toy.scoring.benchmark import make_toy_benchmark, toy_games
from animegamer_jax.toy.scoring.truth import make_truth
from animegamer_jax.toy.world import (
    CHARACTERS,
    PLACES,
    TIMES,
)

GAMES, TURNS = 3, 2


@pytest.fixture(scope="module")
def benchmark():
    return make_toy_benchmark(num_games=GAMES, num_turns=TURNS)


@pytest.fixture(scope="module")
def truth(benchmark):
    return make_truth(toy_games(benchmark), height=48, width=72, num_frames=17)


@pytest.fixture(scope="module")
def answers(benchmark, truth):
    """The truth of every first turn."""
    turns = [game.turns[0] for game in benchmark.games]
    clips = truth.clips[:, 0, :NUM_FRAMES]
    return Answers(turns=turns, clips=clips, told=expected_of(turns), truth=clips)


@pytest.fixture(scope="module")
def embedder():
    config = CLIPConfig(
        image_size=24,
        patch_size=8,
        vision_width=16,
        vision_layers=1,
        vision_heads=2,
        text_width=16,
        text_layers=0,
        text_heads=2,
        vocab_size=8,
        context_length=4,
        embed_size=12,
    )
    return ClipEmbedder(CLIP(config, rngs=nnx.Rngs(0)), None, batch_size=16)


@pytest.fixture(scope="module")
def lpips():
    """Random weights: distances mean nothing but are distances."""
    model = LPIPS()
    state = nnx.state(model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(state))))
    drawn = jax.tree.map(lambda x: abs(jax.random.normal(next(keys), x.shape)) * 0.1, state)
    nnx.update(model, drawn)
    return model


class Labels:
    """Reads what it is told that the clips show."""

    name = "told"

    def __init__(self, labels):
        self.labels = labels

    def __call__(self, clips):
        return {name: label[: len(clips)] for name, label in self.labels.items()}


def others(answers):
    return dataclasses.replace(answers, clips=np.roll(answers.clips, 1, axis=0))


def test_true_clips_are_perfect_and_others_are_not(answers, embedder, lpips):
    for scorer, best in (
        (ClipScorer(embedder, digest="a", texts=False), {"CLIP-I": 1}),
        (LpipsScorer(lpips, digest="b"), {"LPIPS": 0}),
        (MotionScorer(toy=True), {"ACC-F": 1, "MAE-F": 0}),
    ):
        found, worse = scorer(answers), scorer(others(answers))
        assert found.keys() == best.keys()
        for name, value in best.items():
            assert found[name].shape == (GAMES,)
            np.testing.assert_allclose(found[name], value, atol=1e-5)
            assert (abs(worse[name] - value) > 1e-3).any()


def test_who_where_and_when_as_read(answers, truth):
    right = {name: label[:, 0] for name, label in truth.labels.items()}
    wrong = right | {"place": (right["place"] + 1) % len(PLACES)}
    found = TruthScorer(Labels(right), made={})(answers)
    assert {name: set(found[name]) for name in ("character", "place", "time", "all three")} == {
        name: {1.0} for name in ("character", "place", "time", "all three")
    }
    assert (found["PSNR"] > 80).all()
    found = TruthScorer(Labels(wrong), made={})(answers)
    assert set(found["character"]) == set(found["time"]) == {1.0}
    assert set(found["place"]) == set(found["all three"]) == {0.0}
    assert len(CHARACTERS) > 1 < len(TIMES)


def test_without_a_true_clip_metrics_that_need_it_are_absent(answers, embedder, lpips, truth):
    alone = dataclasses.replace(answers, truth=None)
    right = {name: label[:, 0] for name, label in truth.labels.items()}
    assert LpipsScorer(lpips, digest="b")(alone) == {}
    assert ClipScorer(embedder, digest="a", texts=False)(alone) == {}
    assert "PSNR" not in TruthScorer(Labels(right), made={})(alone)


def test_pictures_of_characters_take_the_place_of_true_clips(answers, embedder):
    alone = dataclasses.replace(answers, truth=None)
    names = [turn.parts.character for turn in answers.turns]
    frame = answers.clips[0, 0]
    pictures = Pictures(by_name={names[0].upper(): [frame, frame]}, digest="p")
    scorer = ClipScorer(embedder, digest="a", texts=False, pictures=pictures)
    found = scorer(alone)["CLIP-I"]
    still = np.repeat(frame[None, None], NUM_FRAMES, axis=1).repeat(GAMES, axis=0)
    same = scorer(dataclasses.replace(alone, clips=still))["CLIP-I"]
    known = np.array([name == names[0] for name in names])
    assert np.isfinite(found[known]).all()
    assert np.isnan(found[~known]).all()
    np.testing.assert_allclose(same[known], 1, atol=1e-5)
    assert scorer.made["pictures"] == "p"


def test_distances_of_sets(benchmark, truth, capsys):
    def features(clips):
        return clips.reshape(len(clips), -1)[:, ::9999].astype(np.float64)

    reference = features(truth.clips.reshape(-1, *truth.clips.shape[2:])[:, :NUM_FRAMES])
    common = {"group": "fvd", "metric": "FVD", "features": features, "reference": reference}
    for least, expected in ((2, 0.0), (None, np.nan)):
        distance = functools.partial(frechet_distance, least=least)
        scorer = SetScorer(**common, made={}, distance=distance)
        scoring = Scoring(scorers=(), set_scorers=(scorer,), left_out={}, truth=truth)
        scored = [_nothing() for _ in benchmark.games]
        for turn in range(TURNS):
            turns = [game.turns[turn] for game in benchmark.games]
            clips = truth.clips[:, turn, :NUM_FRAMES]
            _add(scored, scoring, Answers(turns=turns, clips=clips))
        found = _set_scores(scored, scoring)
        np.testing.assert_allclose(found["FVD"], expected, atol=1e-6)
    assert "FVD" in capsys.readouterr().err  # too few clips, told


def test_tables_to_read_scores_by(benchmark, truth, tmp_path):
    scoring = Scoring(scorers=(MotionScorer(toy=True),), set_scorers=(), left_out={}, truth=truth)
    tables = tables_beside(benchmark, scoring, vae=None, keep=tmp_path)
    assert tables["another take of the same"]["ACC-F"].mean == 1
    assert tables["another game's clips"]["ACC-F"].mean < 1
    frequent = tables["always the most frequent"]
    expected = np.concatenate([expected_of(game.turns) for game in benchmark.games])
    rates = [np.unique(column, return_counts=True)[1].max() / len(column) for column in expected.T]
    assert frequent["ACC-S"].mean == pytest.approx(np.mean(rates[1:]))
    assert frequent["ACC-L"].mean == pytest.approx(rates[0])
    assert most_frequent_values(benchmark)["ACC-S"].shape == (GAMES, TURNS)
    assert tables_beside(benchmark, scoring, vae=None, keep=tmp_path) == tables
    others = dataclasses.replace(scoring, scorers=(*scoring.scorers, StateScorer()))
    assert tables_beside(benchmark, others, vae=None, keep=tmp_path).keys() == tables.keys()


def test_values_of_other_clips_have_an_axis_of_games_and_of_turns(benchmark, truth):
    scoring = Scoring(scorers=(MotionScorer(toy=True),), set_scorers=(), left_out={}, truth=truth)
    values = clip_values(lambda turn: truth.clips[:, turn], benchmark, scoring)
    assert {name: v.shape for name, v in values.items()} == {
        "ACC-F": (GAMES, TURNS),
        "MAE-F": (GAMES, TURNS),
    }
    assert (values["ACC-F"] == 1).all()


@pytest.mark.parametrize(
    ("means", "group", "told"),
    [
        (Means(groups=("clip",)), "clip", "no model has a CLIP"),
        (Means(groups=("clip",), clip="x: no such file"), "clip", "x: no such file"),
        (Means(groups=("dreamsim",)), "dreamsim", "--dreamsim names no folder"),
        (Means(groups=("fvd",)), "fvd", "--fvd names no file"),
        (Means(groups=("jedi",)), "jedi", "--jedi names no file"),
    ],
)
def test_what_is_not_there_is_left_out_with_the_reason(benchmark, means, group, told):
    scoring = make_scoring(benchmark, means, FrameSize(17, 48, 72))
    assert told in scoring.left_out[group]
    assert scoring.scorers == scoring.set_scorers == ()


def test_weights_that_are_not_there_are_left_out(benchmark, tmp_path):
    size = FrameSize(17, 48, 72)
    none = tmp_path / "none"
    means = Means(
        groups=("dreamsim", "lpips", "fvd", "jedi"),
        lpips=(none, none),
        dreamsim=none,
        fvd=none,
        jedi=none,
    )
    scoring = make_scoring(benchmark, means, size)
    assert scoring.left_out.keys() == {"dreamsim", "lpips", "fvd", "jedi"}
    assert all("\n" not in reason for reason in scoring.left_out.values())
    films = dataclasses.replace(benchmark, world="films")
    scoring = make_scoring(films, means, size)
    assert "no true clips" not in scoring.left_out["fvd"]
    assert "which this world has none of" in scoring.left_out["lpips"]


def test_captions_need_a_tokenizer(answers, embedder):
    with pytest.raises(UserError, match="without its tokenizer"):
        ClipScorer(embedder, digest="a")(answers)
