"""Scorers of `animegamer evaluate`: their values for true clips and for others."""

import dataclasses
import functools

import numpy as np
import pytest
from flax import nnx
from random_modules import RandomLPIPS, initialized

from animegamer_jax.configs import CLIPConfig
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.registry import NAMED
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
    MetricResources,
    MetricSuite,
    make_suite,
)
from animegamer_jax.evaluate.metrics.video_distance import frechet_distance
from animegamer_jax.evaluate.options import MetricFiles
from animegamer_jax.evaluate.play_games import (
    _collect,
    _no_scores,
    _score,
    score_clips,
)
from animegamer_jax.evaluate.reference_scores import reference_scores
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.models.clip import CLIP
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import MOTION_EDGES
from animegamer_jax.toy.scoring.attributes import VALUES
from animegamer_jax.toy.scoring.benchmark import make_toy_benchmark

GAMES, TURNS = 3, 2
SIZE = FrameSize(num_frames=17, height=48, width=72)


@pytest.fixture(scope="module")
def benchmark():
    return make_toy_benchmark(num_games=GAMES, num_turns=TURNS)


@pytest.fixture(scope="module")
def true_clips(benchmark):
    return WORLD.true_clips(benchmark, SIZE)


@pytest.fixture(scope="module")
def answers(benchmark, true_clips):
    """The truth of every first turn."""
    turns = [game.turns[0] for game in benchmark.games]
    clips = true_clips[:, 0, :NUM_FRAMES]
    return Answers(turns=turns, clips=clips, predicted_states=expected_of(turns), true_clips=clips)


@pytest.fixture(scope="module")
def suite(benchmark, true_clips):
    """Scores motion by the toy world's levels."""
    return MetricSuite(
        scorers=(MotionScorer(edges=MOTION_EDGES, noise=WORLD.motion_noise),),
        true_clips=true_clips,
        other_views=functools.partial(WORLD.other_views, benchmark, SIZE),
    )


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
    clip = initialized(lambda: CLIP(config, rngs=nnx.Rngs(0)))
    return ClipEmbedder(clip, None, batch_size=16)


@pytest.fixture(scope="module")
def lpips():
    return RandomLPIPS()


class Fixed:
    """Classifies clips as it was given."""

    values, digest = VALUES, "fixed"

    def __init__(self, labels):
        self.labels, self.description = labels, {}

    def __call__(self, clips):
        return {name: label[: len(clips)] for name, label in self.labels.items()}


def score_truth(labels):
    return TruthScorer(Fixed(labels), fingerprint={})


@pytest.fixture(scope="module")
def right(answers):
    """The expected index of every attribute that instructions name; of the others, the first."""
    parts = [turn.parts for turn in answers.turns]
    return {
        name: np.array([known.index(getattr(part, name)) for part in parts])
        if name in NAMED
        else np.zeros(len(parts), int)
        for name, known in VALUES.items()
    }


def others(answers):
    return dataclasses.replace(answers, clips=np.roll(answers.clips, 1, axis=0))


def test_true_clips_are_perfect_and_others_are_not(answers, embedder, lpips, suite):
    for scorer, best in (
        (ClipScorer(embedder, digest="a"), {"CLIP-I": 1}),
        (LpipsScorer(lpips, digest="b"), {"LPIPS": 0}),
        (suite.scorers[0], {"ACC-F": 1, "MAE-F": 0}),
    ):
        found, worse = scorer(answers), scorer(others(answers))
        assert found.keys() == best.keys()
        for name, value in best.items():
            assert found[name].shape == (GAMES,)
            np.testing.assert_allclose(found[name], value, atol=1e-5)
            assert (abs(worse[name] - value) > 1e-3).any()


def test_attributes_as_classified(answers, right):
    wrong = right | {"place": (right["place"] + 1) % len(VALUES["place"])}
    found = score_truth(right)(answers)
    assert {name: set(found[name]) for name in ("character", "place", "time", "all three")} == {
        name: {1.0} for name in ("character", "place", "time", "all three")
    }
    assert (found["PSNR"] > 80).all()
    found = score_truth(wrong)(answers)
    assert set(found["character"]) == set(found["time"]) == {1.0}
    assert set(found["place"]) == set(found["all three"]) == {0.0}
    assert all(len(known) > 1 for known in VALUES.values())


def test_without_a_true_clip_metrics_that_need_it_are_absent(answers, embedder, lpips, right):
    alone = dataclasses.replace(answers, true_clips=None)
    assert LpipsScorer(lpips, digest="b")(alone) == {}
    assert ClipScorer(embedder, digest="a")(alone) == {}
    assert "PSNR" not in score_truth(right)(alone)


def test_pictures_of_characters_take_the_place_of_true_clips(answers, embedder):
    alone = dataclasses.replace(answers, true_clips=None)
    names = [turn.parts.character for turn in answers.turns]
    frame = answers.clips[0, 0]
    pictures = Pictures(by_name={names[0].upper(): [frame, frame]}, digest="p")
    scorer = ClipScorer(embedder, digest="a", pictures=pictures)
    found = scorer(alone)["CLIP-I"]
    still = np.repeat(frame[None, None], NUM_FRAMES, axis=1).repeat(GAMES, axis=0)
    same = scorer(dataclasses.replace(alone, clips=still))["CLIP-I"]
    known = np.array([name == names[0] for name in names])
    assert np.isfinite(found[known]).all()
    assert np.isnan(found[~known]).all()
    np.testing.assert_allclose(same[known], 1, atol=1e-5)
    assert scorer.fingerprint["pictures"] == "p"


def test_distances_of_sets(benchmark, true_clips, capsys):
    def features(clips):
        return clips.reshape(len(clips), -1)[:, ::9999].astype(np.float64)

    reference = features(true_clips.reshape(-1, *true_clips.shape[2:])[:, :NUM_FRAMES])
    common = {"group": "fvd", "metric": "FVD", "features": features, "reference": reference}
    for least, expected in ((2, 0.0), (None, np.nan)):
        distance = functools.partial(frechet_distance, least=least)
        scorer = SetScorer(**common, fingerprint={}, distance=distance)
        suite = MetricSuite(set_scorers=(scorer,), true_clips=true_clips)
        scored = [_no_scores() for _ in benchmark.games]
        for turn in range(TURNS):
            turns = [game.turns[turn] for game in benchmark.games]
            clips = true_clips[:, turn, :NUM_FRAMES]
            _score(Answers(turns=turns, clips=clips), suite, into=scored)
        found = _collect(scored, suite, TURNS)["set_scores"]
        np.testing.assert_allclose(found["FVD"], expected, atol=1e-6)
    assert "FVD" in capsys.readouterr().err  # too few clips


def test_reference_scores(benchmark, suite, tmp_path):
    found = reference_scores(benchmark, suite, vae=None, cache=tmp_path)
    assert list(found) == [
        "true clips",
        "true clips from another view",
        "another game's clips",
        "always the most frequent",
        "another game's answers",
        "without memory",
    ]
    assert (found["true clips"]["ACC-F"] == 1).all()
    assert found["true clips from another view"]["ACC-F"].mean() > 0.8
    assert found["another game's clips"]["ACC-F"].mean() < 1
    assert found["without memory"] == {}, "of motion there is no answer without clips"
    (file,) = tmp_path.iterdir()
    again = reference_scores(benchmark, suite, vae=None, cache=tmp_path)
    np.testing.assert_equal(again, found)
    file.write_text(file.read_text().replace("1.0", "0.5"))
    kept = reference_scores(benchmark, suite, vae=None, cache=tmp_path)
    assert (kept["true clips"]["ACC-F"] == 0.5).all(), "clips are scored once"
    others = dataclasses.replace(suite, scorers=(*suite.scorers, StateScorer()))
    found = reference_scores(benchmark, others, vae=None, cache=tmp_path)
    assert (found["true clips"]["ACC-F"] == 1).all(), "other scorers, other file"
    assert found["always the most frequent"].keys() == {"ACC-S", "MAE-S", "ACC-L", "MAE-L"}
    expected = np.concatenate([expected_of(game.turns) for game in benchmark.games])
    rates = [np.unique(column, return_counts=True)[1].max() / len(column) for column in expected.T]
    frequent = found["always the most frequent"]
    assert frequent["ACC-S"].shape == (GAMES, TURNS)
    assert frequent["ACC-S"].mean() == pytest.approx(np.mean(rates[1:]))
    assert frequent["ACC-L"].mean() == pytest.approx(rates[0])


def test_values_of_given_clips_have_an_axis_of_games_and_of_turns(benchmark, true_clips, suite):
    values = score_clips(lambda turn: true_clips[:, turn], benchmark, suite)
    assert {name: v.shape for name, v in values.items()} == {
        "ACC-F": (GAMES, TURNS),
        "MAE-F": (GAMES, TURNS),
    }
    assert (values["ACC-F"] == 1).all()


@pytest.mark.parametrize(
    ("resources", "group", "reason"),
    [
        (MetricResources(groups=("clip",)), "clip", "no model has a CLIP"),
        (MetricResources(groups=("clip",), clip="x: no such file"), "clip", "x: no such file"),
        (MetricResources(groups=("dreamsim",)), "dreamsim", "its weights with --dreamsim"),
        (MetricResources(groups=("fvd",)), "fvd", "I3D with --fvd"),
        (MetricResources(groups=("jedi",)), "jedi", "features with --jedi"),
    ],
)
def test_what_is_missing_is_skipped_with_the_reason(benchmark, resources, group, reason):
    suite = make_suite(benchmark, resources, SIZE)
    assert reason in suite.skipped[group]
    assert suite.scorers == suite.set_scorers == ()


def test_missing_weights_are_skipped(benchmark, tmp_path):
    none = tmp_path / "none"
    resources = MetricResources(
        groups=("dreamsim", "lpips", "fvd", "jedi"),
        files=MetricFiles(lpips=(none, none), dreamsim=none, fvd=none, jedi=none),
    )
    suite = make_suite(benchmark, resources, SIZE)
    assert suite.skipped.keys() == {"dreamsim", "lpips", "fvd", "jedi"}
    assert all("\n" not in reason for reason in suite.skipped.values())
    films = dataclasses.replace(benchmark, world="films")
    suite = make_suite(
        films, dataclasses.replace(resources, groups=("truth", *resources.groups)), SIZE
    )
    assert suite.true_clips is None
    assert "true clips" not in suite.skipped["fvd"]
    assert "LPIPS needs true clips, which this world does not have" in suite.skipped["lpips"]
    assert "can be classified" in suite.skipped["truth"]


def test_levels_of_a_world_are_measured_by_its_edges(benchmark):
    resources = MetricResources(groups=("motion",))
    (toy,) = make_suite(benchmark, resources, SIZE).scorers
    assert toy.fingerprint == {"edges": list(MOTION_EDGES), "noise": WORLD.motion_noise}
    films = dataclasses.replace(benchmark, world="films")
    (paper,) = make_suite(films, resources, SIZE).scorers
    assert paper.fingerprint == MotionScorer().fingerprint != toy.fingerprint


def test_captions_need_a_tokenizer(answers, embedder):
    assert not embedder.has_text
    with pytest.raises(UserError, match="without its tokenizer"):
        embedder.texts([turn.full_caption for turn in answers.turns])
