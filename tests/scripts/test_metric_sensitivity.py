"""Each metric is perfect on the truth, at chance on shuffled clips, and sees its own damage."""

import itertools

import metric_sensitivity
import numpy as np
import pytest
from metric_sensitivity import SIZE, Answers, Meter, Truth
from random_modules import RandomLPIPS

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.formulas import estimate
from animegamer_jax.evaluate.metrics.openclip import load_clip_for_scores
from animegamer_jax.evaluate.metrics.registry import CONTEXT, NAMED
from animegamer_jax.evaluate.reference_scores import OTHER_ANSWERS, baselines
from animegamer_jax.media.motion import FLICKER, measure_levels
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import LEVELS, MOTION_EDGES, MOTIONS, Scene

NUM_GAMES = 3
SHARES = (0, 0.5, 1)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(WORLD.make_benchmark("test", num_games=NUM_GAMES, num_turns=3, seed=0))


class OnceEach(ClipEmbedder):
    """Embeds each clip once: answers share most of their clips."""

    def __init__(self, embedder: ClipEmbedder):
        super().__init__(embedder.clip, embedder.tokenizer, batch_size=embedder.batch_size)
        self.known: dict[bytes, np.ndarray] = {}

    def frames(self, clips):
        keys = [clip.tobytes() for clip in clips]
        new = {key: n for n, key in enumerate(keys) if key not in self.known}
        if new:
            found = super().frames(clips[list(new.values())])
            self.known |= dict(zip(new, found, strict=True))
        return np.stack([self.known[key] for key in keys])


@pytest.fixture(scope="module")
def meter(truth) -> Meter:
    """The embedded model's CLIP, and the world's classifier; LPIPS takes long."""
    classifier = WORLD.make_classifier(size=SIZE, reconstruct=None, num_clips=24)
    embedder = OnceEach(load_clip_for_scores(model_folder("toy")))
    return Meter(truth, classifier=classifier, embedder=embedder, lpips=None)


def means(meter: Meter, answers: Answers) -> dict[str, float]:
    values, distances = meter(answers)
    found = metric_sensitivity.estimates(meter.truth, values)
    return {name: one.mean for name, one in found.items()} | distances


@pytest.fixture(scope="module")
def perfect(meter, truth) -> dict[str, float]:
    return means(meter, Answers(truth.clips, truth.states))


def test_the_truth_is_perfect(perfect):
    ones = ("CLIP-I", "ACC-F", *NAMED, CONTEXT, "context", "ACC-S")
    assert {name: perfect[name] for name in ones} == pytest.approx(dict.fromkeys(ones, 1), abs=1e-6)
    zeros = ("MAE-F", "MAE-S", "Fréchet, toy CLIP", "MMD, toy CLIP")
    found = {name: perfect[name] for name in zeros}
    assert found == pytest.approx(dict.fromkeys(zeros, 0), abs=1e-6)
    assert perfect["PSNR"] > 84
    assert 0.5 < perfect["CLIP-T"] < 1  # pictures and words are never the same


def test_another_games_answers_are_at_chance(meter, truth, perfect):
    """Over all ways to shuffle whole games, the rate is what counting the truth's values gives."""
    shifts = [means(meter, metric_sensitivity.shuffle(truth, k)) for k in range(1, NUM_GAMES)]
    counted = {name: v.mean() for name, v in baselines(truth.benchmark)[OTHER_ANSWERS].items()}
    counted |= {"ACC-F": counted["ACC-L"], "MAE-F": counted["MAE-L"]}
    for name in ("ACC-F", "MAE-F", *NAMED, CONTEXT, "ACC-S", "MAE-S"):
        found = np.mean([scores[name] for scores in shifts])
        assert found == pytest.approx(counted[name], abs=1e-6), name
    table = metric_sensitivity.chance(truth)
    assert table["ACC-F"].mean == pytest.approx(counted["ACC-L"], abs=1e-6)
    assert counted[CONTEXT] < 0.1
    for scores in shifts:
        assert scores["CLIP-I"] < 0.6
        assert scores["CLIP-T"] < perfect["CLIP-T"] - 0.4
        # Distances of sets do not see which clip answers what.
        assert scores["Fréchet, toy CLIP"] == pytest.approx(0, abs=1e-6)


def moves(found: list[dict[str, float]], name: str, *, by: float) -> None:
    """The metric grows (or with a negative `by` falls) with every step, by so much in all."""
    values = [scores[name] for scores in found]
    steps = [(b - a) * np.sign(by) for a, b in itertools.pairwise(values)]
    assert min(steps) > 0, (name, values)
    assert abs(values[-1] - values[0]) > abs(by), (name, values)


def stays(found: list[dict[str, float]], perfect: dict[str, float], *names: str) -> None:
    for name, scores in itertools.product(names, found):
        assert scores[name] == pytest.approx(perfect[name], abs=1e-6), name


STATES = "ACC-S", "MAE-S"


@pytest.mark.parametrize("attribute", ["character", "place", "time"])
def test_another_character_place_or_time(meter, truth, perfect, attribute):
    found = [means(meter, metric_sensitivity.swap(truth, attribute, share)) for share in SHARES]
    for name in (attribute, CONTEXT):
        moves(found, name, by=-0.9)
    moves(found, "CLIP-I", by=-0.1)
    moves(found, "CLIP-T", by=-0.1)
    moves(found, "Fréchet, toy CLIP", by=0.1)
    stays(found, perfect, *(set(NAMED) - {attribute}), *STATES)


def test_what_is_forgotten_is_wrong_on_open_turns_only(meter, truth, perfect):
    found = [means(meter, metric_sensitivity.forget(truth, share)) for share in SHARES]
    moves(found, "context", by=-0.9)
    stays(found, perfect, *STATES)
    values, _ = meter(metric_sensitivity.forget(truth, 1))
    assert (values[CONTEXT][~truth.is_open] == 1).all()
    named = {name: np.array([name not in turn.omitted for turn in truth.turns]) for name in NAMED}
    said_all = np.all(list(named.values()), axis=0)
    assert (values[CONTEXT].ravel()[truth.is_open.ravel() & ~said_all] == 0).all()
    for name in NAMED:
        assert (values[name].ravel()[named[name]] == 1).all()


def test_motion_that_stops_or_slows(meter, truth, perfect):
    frozen = [means(meter, metric_sensitivity.freeze(truth, share)) for share in (0, 0.75, 1)]
    moves(frozen, "MAE-F", by=1)
    assert frozen[-1]["ACC-F"] == np.mean(
        truth.states[..., 0] == 1
    )  # still clips have the first level
    stays(frozen, perfect, *NAMED, CONTEXT, "context", *STATES)
    slower = [means(meter, metric_sensitivity.slow(truth, levels)) for levels in (1, 4)]
    moves([perfect, *slower], "MAE-F", by=1)
    stays(slower, perfect, *NAMED, *STATES)


@pytest.mark.parametrize(
    ("damage", "strengths", "ratio"),
    [(metric_sensitivity.add_noise, (8, 96), -60), (metric_sensitivity.blur, (0.5, 2), -60)],
)
def test_noise_and_blur(meter, truth, perfect, damage, strengths, ratio):
    found = [perfect, *(means(meter, damage(truth, strength)) for strength in strengths)]
    moves(found, "CLIP-I", by=-0.02)
    moves(found, "PSNR", by=ratio)
    stays(found, perfect, *STATES)


def test_lpips_sees_noise_and_another_place(meter):
    two = Truth(WORLD.make_benchmark("test", num_games=2, num_turns=1, seed=0))
    short = Meter(two, classifier=meter.classifier, embedder=meter.embedder, lpips=RandomLPIPS())
    true = means(short, Answers(two.clips, two.states))
    assert true["LPIPS"] == 0
    assert means(short, metric_sensitivity.swap(two, "place", 1))["LPIPS"] > 0.01
    noisy = [means(short, metric_sensitivity.add_noise(two, sigma)) for sigma in (16, 64)]
    moves([true, *noisy], "LPIPS", by=1e-3)


def test_wrong_states_are_seen_in_states_alone(meter, truth, perfect):
    found = [means(meter, metric_sensitivity.mistake(truth, share)) for share in SHARES]
    moves(found, "ACC-S", by=-0.9)
    moves(found, "MAE-S", by=0.9)
    stays(found, perfect, *(set(perfect) - set(STATES)))


def test_the_interval_holds_the_mean_and_games_are_resampled(meter, truth):
    values, _ = meter(metric_sensitivity.swap(truth, "place", 0.5))
    found = metric_sensitivity.estimates(truth, values)["context"]
    assert found == estimate(values[CONTEXT], where=truth.is_open)
    assert found.low <= found.mean <= found.high
    assert found.count == truth.is_open.sum()


# Flow levels at a larger size


def test_levels_of_larger_clips_are_the_scenes():
    found = []
    for number, (motion, level) in enumerate(itertools.product(MOTIONS, LEVELS)):
        partner = "Ren" if motion == "talk" else None
        place = ("meadow", "town", "snow")[number % 3]
        scene = Scene("Mika", motion, place, "day", level=level, partner=partner)
        clip = render(scene, height=128, width=192)[None]
        found.append((level, measure_levels(clip, edges=MOTION_EDGES, noise=FLICKER)[0]))
    drawn, measured = np.array(found).T
    assert (drawn == measured).sum() >= 36
    assert np.abs(drawn - measured).max() <= 1  # where wrong, by one level


# The page


def test_tables_take_their_place_in_the_page(truth):
    chance = metric_sensitivity.chance(truth)
    text = metric_sensitivity.table(
        [("none", "", {"ACC-S": 1.0}), ("other", "x", chance)], ("ACC-S", "place", "LPIPS")
    )
    head, _, perfect, other = text.splitlines()
    assert head == "| damage | strength | ACC-S | place |"
    assert perfect == "| none |  | 1.000 |  |"
    assert other.startswith(f"| other | x | {chance['ACC-S'].mean:.3f} ±.")
    page = metric_sensitivity.write_between("a\n<!-- t -->\nold\n<!-- /t -->\nb", "t", "new")
    assert page == "a\n<!-- t -->\nnew\n<!-- /t -->\nb"
    with pytest.raises(UserError, match="expected <!-- u --> and <!-- /u -->, each once"):
        metric_sensitivity.write_between(page, "u", "")
