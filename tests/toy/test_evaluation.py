"""The toy world behind an evaluation: true clips, what is read off them, the decoder alone."""

import dataclasses
import itertools

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from flax import nnx
from random_modules import initialized

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import CLIPConfig, ShotEncoderConfig, T5Config
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate import worlds
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.details import score_details, with_details
from animegamer_jax.evaluate.metrics.formulas import clip_image_similarity, psnr
from animegamer_jax.evaluate.metrics.registry import CONTEXT, LOOKS, NAMED
from animegamer_jax.evaluate.metrics.scorers import (
    READ,
    Answers,
    ClipScorer,
    MotionScorer,
    TruthScorer,
    expected_of,
)
from animegamer_jax.evaluate.reference_scores import (
    MOST_FREQUENT,
    NO_MEMORY,
    OTHER_ANSWERS,
    baselines,
)
from animegamer_jax.evaluate.worlds import AttributeClassifier, FrameSize, World, find_world
from animegamer_jax.game.player import Player
from animegamer_jax.media.motion import (
    FLICKER,
    NOISE,
    measure_levels,
    motion_level,
    motion_value,
)
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.tokenizer import Tokenizer, write_word_tokenizer
from animegamer_jax.toy import evaluation
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.evaluation import WORLD, CheckedClassifier
from animegamer_jax.toy.scene import CHARACTERS, MOTION_EDGES, PLACES
from animegamer_jax.toy.scoring.attributes import DETAILS, VALUES, draw_scenes, labels
from animegamer_jax.toy.scoring.benchmark import toy_games, toy_pictures
from animegamer_jax.toy.scoring.classifier import Classifier, load_classifier, save_classifier
from animegamer_jax.toy.scoring.decoder_samples import sample_shots, true_representations
from animegamer_jax.toy.vocabulary import words
from animegamer_jax.toy.world import PROTOCOL

NUM_GAMES, NUM_TURNS = 8, 3
SIZE = FrameSize(num_frames=17, height=96, width=144)


@pytest.fixture(scope="module")
def benchmark():
    return WORLD.make_benchmark("test", num_games=NUM_GAMES, num_turns=NUM_TURNS, seed=0)


@pytest.fixture(scope="module")
def true_clips(benchmark) -> np.ndarray:
    return WORLD.true_clips(benchmark, SIZE)


@pytest.fixture(scope="module")
def scenes(benchmark):
    return [turn.scene for game in toy_games(benchmark) for turn in game]


@pytest.fixture(scope="module")
def levels(scenes) -> np.ndarray:
    return np.array([scene.level for scene in scenes])


@pytest.fixture(scope="module")
def classifier() -> CheckedClassifier:
    return WORLD.make_classifier(size=SIZE, reconstruct=None, num_clips=120)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> ClipEmbedder:
    """A tiny untrained CLIP: its features still separate equal from unequal."""
    folder = tmp_path_factory.mktemp("words")
    vocab_size = write_word_tokenizer(folder, words())
    config = CLIPConfig(
        image_size=24,
        patch_size=8,
        vision_width=32,
        vision_layers=1,
        vision_heads=2,
        text_width=32,
        text_layers=1,
        text_heads=2,
        vocab_size=vocab_size,
        context_length=24,
        embed_size=16,
    )
    clip = initialized(lambda: CLIP(config, rngs=nnx.Rngs(0)))
    tokenizer = Tokenizer.load(folder, vocab_size=vocab_size, num_queries=15)
    return ClipEmbedder(clip, tokenizer, batch_size=32)


def flat(clips: np.ndarray) -> np.ndarray:
    return clips.reshape(-1, *clips.shape[2:])


def turns_of(benchmark) -> list:
    return [turn for game in benchmark.games for turn in game.turns]


def measure(clips: np.ndarray, *, noise: float = FLICKER) -> np.ndarray:
    return measure_levels(clips, edges=MOTION_EDGES, noise=noise)


def read(classifier, clips, benchmark) -> dict[str, float]:
    answers = Answers(turns=turns_of(benchmark), clips=flat(clips))
    values = TruthScorer(classifier, fingerprint={})(answers)
    return {name: float(np.nanmean(value)) for name, value in values.items()}


def falls(scores: list[float], *, by: float) -> None:
    assert all(a > b for a, b in itertools.pairwise(scores)), scores
    assert scores[0] - scores[-1] > by, scores


# The world


def test_the_world_is_found_by_its_name(monkeypatch):
    world = find_world("toy")
    assert world is WORLD
    assert isinstance(world, World)
    assert find_world("a film") is None
    assert tuple(world.motion_edges) == MOTION_EDGES
    assert world.motion_noise == FLICKER
    monkeypatch.setattr(worlds, "WORLDS", {"mine": f"{__name__}:NUM_GAMES"})
    assert find_world("toy") is None


def test_the_world_makes_benchmarks_of_its_held_out_splits():
    assert len(WORLD.make_benchmark("test", num_games=None, num_turns=None, seed=0).games) == 100
    found = WORLD.make_benchmark("phrasings", num_games=1, num_turns=2, seed=3)
    assert (found.name, found.games[0].seed, found.num_turns) == ("toy-phrasings", 3, 2)
    with pytest.raises(UserError, match=r"split train: expected one of test, .*, own"):
        WORLD.make_benchmark("train", num_games=1, num_turns=1, seed=0)


def test_true_clips_show_the_turns_and_other_views_the_same_scenes(benchmark, true_clips, scenes):
    assert true_clips.shape == (NUM_GAMES, NUM_TURNS, 17, 96, 144, 3)
    np.testing.assert_array_equal(true_clips[3, 2], render(scenes[3 * NUM_TURNS + 2]))
    assert WORLD.true_clips(benchmark, SIZE) is true_clips  # drawn once
    small = FrameSize(num_frames=9, height=48, width=72)
    other = WORLD.other_views(benchmark, small)
    assert other.shape == (NUM_GAMES, NUM_TURNS, 9, 48, 72, 3)


def test_a_benchmark_of_own_characters_begins_with_pictures():
    own = WORLD.make_benchmark("own", num_games=3, num_turns=2, seed=0)
    pictures = WORLD.pictures(own, SIZE)
    for game, picture, turn in zip(own.games, pictures, toy_pictures(own), strict=True):
        assert turn is not None
        np.testing.assert_array_equal(picture, render(turn.scene, num_frames=1)[0])
        assert game.picture.instruction.startswith("Character: ")
        assert "Motion: standing" in game.picture.instruction
        assert len(game.turns) == 2
        assert turn.scene.own.name in own.characters
    turns = [turn for game in toy_games(own) for turn in game]
    assert any(turn.scene.own for turn in turns)


def test_a_classifier_that_is_too_often_wrong_is_refused(monkeypatch):
    few = {
        "size": FrameSize(5, 24, 36),
        "reconstruct": lambda clips: clips[:, ::-1],
        "num_clips": 6,
    }
    monkeypatch.setattr(evaluation, "LEAST_ACCURACY", 1.1)
    with pytest.raises(
        UserError, match=r"character, place.* too often wrong on true clips of 24 x"
    ):
        WORLD.make_classifier(**few)
    monkeypatch.setattr(evaluation, "LEAST_ACCURACY", 0)
    found = WORLD.make_classifier(**few)
    assert isinstance(found, AttributeClassifier)
    assert found.description.keys() == found.values.keys() == VALUES.keys()
    assert "of 6 true clips, " in found.description["place"]
    with pytest.raises(UserError, match=r"in none of 1 true clips: give a higher --classifier-"):
        WORLD.make_classifier(**few | {"num_clips": 1})


def test_a_file_of_other_weights_is_refused(tmp_path):
    path = tmp_path / "reader.safetensors"
    with pytest.raises(UserError, match=r"reader\.safetensors: cannot be read: .*make the file"):
        load_classifier(path)
    path.write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"reader\.safetensors: cannot be read: "):
        load_classifier(path)
    classifier = Classifier(rngs=nnx.Rngs(0))
    save_classifier(classifier, path)
    kernel = classifier.hidden.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(load_classifier(path).hidden.kernel[...], kernel)
    classifier.hidden = nnx.Linear(4, 192, rngs=nnx.Rngs(0))
    save_classifier(classifier, path)
    with pytest.raises(UserError, match="other weights than the network has"):
        load_classifier(path)


# Perfect, shuffled and damaged clips


def test_true_clips_score_nearly_perfect(benchmark, true_clips, classifier, embedder):
    few = dataclasses.replace(benchmark, games=benchmark.games[:4])
    clips = flat(true_clips[:4])
    answers = Answers(turns=turns_of(few), clips=clips, true_clips=clips)
    values = MotionScorer(edges=MOTION_EDGES, noise=FLICKER)(answers)
    values |= ClipScorer(embedder, digest="")(answers)
    values |= TruthScorer(classifier, fingerprint={})(answers)
    means = {name: float(np.nanmean(value)) for name, value in values.items()}
    assert means["ACC-F"] >= 0.8
    assert means["MAE-F"] <= 0.2
    assert MotionScorer(edges=MOTION_EDGES, noise=NOISE)(answers)["ACC-F"].mean() >= 0.8
    assert means["CLIP-I"] == pytest.approx(1, abs=1e-5)
    assert means["PSNR"] > 84
    means = read(classifier, true_clips, benchmark)
    assert means["place"] == means["time"] == 1
    assert min(means["character"], means[CONTEXT]) >= 0.9


def test_clips_of_another_game_score_as_chance(benchmark, true_clips, classifier):
    rate = {name: float(v.mean()) for name, v in baselines(benchmark)[OTHER_ANSWERS].items()}
    shifted = [read(classifier, np.roll(true_clips, k, axis=0), benchmark) for k in (2, 3, 5)]
    for name in (*NAMED, CONTEXT):
        assert np.mean([scores[name] for scores in shifted]) == pytest.approx(rate[name], abs=0.15)
    assert rate[CONTEXT] < 0.1


def test_each_damage_lowers_its_own_score(benchmark, true_clips, scenes, classifier):
    """Another character in some turns lowers the character alone; another place the place."""
    for attribute, values in (("character", CHARACTERS), ("place", PLACES)):
        damaged, found = flat(true_clips).copy(), []
        for start in (0, 8, 16, 24):
            for index in range(max(0, start - 8), start):
                value = values[(values.index(getattr(scenes[index], attribute)) + 3) % len(values)]
                change = {attribute: value}
                if scenes[index].partner == value:
                    change["partner"] = scenes[index].character
                damaged[index] = render(dataclasses.replace(scenes[index], **change))
            found.append(read(classifier, damaged.reshape(true_clips.shape), benchmark))
        falls([scores[attribute] for scores in found], by=0.8)
        falls([scores[CONTEXT] for scores in found], by=0.8)
        for other in set(NAMED) - {attribute}:
            assert found[-1][other] > 0.9


def test_frozen_clips_lose_their_motion_only(benchmark, true_clips, levels, classifier):
    moving = flat(true_clips)
    frozen = np.repeat(moving[:, :1], moving.shape[1], axis=1)
    true = levels[:12]
    errors = [np.abs(measure(clips[:12]) - true) for clips in (moving, frozen)]
    falls([-np.where(np.arange(12) < k, *errors[::-1]).mean() for k in (0, 4, 8, 12)], by=1)
    assert read(classifier, frozen.reshape(true_clips.shape), benchmark)["character"] > 0.9


def test_noise_lowers_what_compares_frames(true_clips, embedder):
    random, clips = np.random.default_rng(0), true_clips[0]
    true, similar, ratio = embedder.frames(clips), [], []
    for sigma in (0, 8, 32, 96):
        noisy = clips + random.normal(0, sigma, clips.shape)
        noisy = noisy.round().clip(0, 255).astype(np.uint8)
        similar.append(float(clip_image_similarity(embedder.frames(noisy), true).mean()))
        ratio.append(float(psnr(noisy, clips).mean()))
    falls(similar, by=0.003)
    falls(ratio, by=50)


def test_flicker_is_not_taken_for_motion(true_clips, levels):
    """Scenery that shimmers takes no part in the mean of what moves."""
    rng, clips = np.random.default_rng(0), flat(true_clips)
    noise = rng.normal(size=clips.shape[:4])
    noise = np.stack([[cv2.GaussianBlur(frame, (0, 0), 1.5) for frame in clip] for clip in noise])
    noise *= 1.5 / noise.std()
    flickering = (clips + noise[..., None]).clip(0, 255).round().astype(np.uint8)
    assert (measure(clips) == levels).mean() > 0.95
    assert (measure(flickering) == levels).mean() > 0.85
    taken = measure(flickering, noise=NOISE)
    assert (taken == levels).mean() < 0.7
    few = [motion_level(motion_value(clip), edges=MOTION_EDGES) for clip in flickering[:8]]
    np.testing.assert_array_equal(taken[:8], few)


# Answers without looking


def test_open_turns_say_less_than_they_show(benchmark):
    is_open = np.array([[turn.is_open for turn in game.turns] for game in benchmark.games])
    assert not is_open[:, 0].any()
    assert 0.3 < is_open[:, 1:].mean() < 0.9
    open_turns = [turn for turn in turns_of(benchmark) if turn.is_open]
    said_all = [not {*NAMED} & {*turn.omitted} for turn in open_turns]
    assert np.mean(said_all) < 0.1


def test_another_games_values_are_those_of_every_other_game(benchmark):
    found = baselines(benchmark)
    others, heard = found[OTHER_ANSWERS]["place"], found[NO_MEMORY]["place"]
    label = np.array([[turn.parts.place for turn in game.turns] for game in benchmark.games])
    named = np.array(
        [["place" not in turn.omitted for turn in game.turns] for game in benchmark.games]
    )
    for game in range(NUM_GAMES):
        other = np.delete(label, game, axis=0)
        np.testing.assert_allclose(others[game], (other == label[game]).mean(0), atol=1e-6)
    assert (heard[named] == 1).all()
    np.testing.assert_array_equal(heard[~named], others[~named])
    is_open = np.array([[turn.is_open for turn in game.turns] for game in benchmark.games])
    assert found[NO_MEMORY][CONTEXT][is_open].mean() < 0.6
    alone = baselines(dataclasses.replace(benchmark, games=benchmark.games[:1]))
    assert alone.keys() == {MOST_FREQUENT}


def test_the_most_frequent_value_is_right_as_often_as_it_occurs(benchmark):
    values = baselines(benchmark)[MOST_FREQUENT]
    places = np.unique([turn.parts.place for turn in turns_of(benchmark)], return_counts=True)[1]
    assert values["place"].mean() == pytest.approx(places.max() / places.sum())
    expected = expected_of(turns_of(benchmark))
    counts = [np.unique(column, return_counts=True)[1].max() for column in expected.T]
    assert values["ACC-L"].mean() == pytest.approx(counts[0] / len(expected))
    assert values["ACC-S"].mean() == pytest.approx(np.mean(counts[1:]) / len(expected))


# Reading


def test_every_attribute_is_read_off_true_clips(classifier):
    assert min(classifier.accuracy.values()) >= 0.97
    drawn, other = draw_scenes(96, seed=0), draw_scenes(96, seed=1)
    assert drawn == draw_scenes(96, seed=0)
    assert len(set(drawn) & set(other)) < 10
    for name, values in VALUES.items():
        found = labels(drawn, name)
        assert found.max() < len(values)
        assert (found >= 0).all() == (name not in ("character", *LOOKS))


# Details


def readings(benchmark) -> dict[str, np.ndarray]:
    """What a perfect classifier reads off the true clips."""
    scenes = [[turn.scene for turn in game] for game in toy_games(benchmark)]
    return {
        READ + name: np.stack([labels(game, name) for game in scenes]).astype(np.float32)
        for name in (*DETAILS, *LOOKS)
    }


@pytest.mark.parametrize("split", ["test", "own"])
def test_details_of_true_clips_are_kept_and_others_are_not(split):
    games = WORLD.make_benchmark(split, num_games=40, num_turns=5, seed=0)
    truth, read = WORLD.details(games), readings(games)
    kept = score_details(read, truth)
    wrong = {name for name, value in kept.items() if np.nanmean(value) != 1}
    by_chance = {"details by chance"} | ({"looks by chance"} if split == "own" else set())
    assert wrong == by_chance
    assert 0.1 < np.nanmean(kept["details by chance"]) < 0.5
    blind = {  # every detail follows from the character's name or the place
        name: truth[name.removeprefix(READ)].thing.astype(np.float32) for name, x in read.items()
    }
    from_words = score_details(blind, truth)
    for name in by_chance:
        assert np.nanmean(from_words[name]) == 1
        assert np.nanmean(kept[name]) < 0.5
    constant = score_details({name: np.zeros_like(x) for name, x in read.items()}, truth)
    assert np.nanmean(constant["details by chance"]) == 1
    assert np.isnan(kept["accessory kept"][:, 0]).all() == (split == "test")
    assert ("looks" in kept) == (split == "own")
    again = np.isfinite(kept["details kept"][:, 1:])
    assert 0.5 < again.mean() < 1
    shuffled = {name: np.roll(x.ravel(), 7).reshape(x.shape) for name, x in read.items()}
    chance = score_details(shuffled, truth)
    assert np.nanmean(chance["accessory kept"]) < 0.35
    assert np.nanmean(chance["view kept"]) < 0.6
    forgetful = {**read, READ + "variant": read[READ + "variant"].copy()}
    forgetful[READ + "variant"][:, 3:] = (forgetful[READ + "variant"][:, 3:] + 1) % 3
    lost = score_details(forgetful, truth)
    assert np.nanmean(lost["variant kept"]) < 1
    assert np.nanmean(lost["accessory kept"]) == 1
    assert score_details({}, truth) == {}
    found = with_details({**read, "place": read[READ + "variant"]}, truth)
    assert found.keys() == {*kept, "place"}, "what was read is no score"


def test_what_no_window_holds_is_new_again():
    """In games of 5 turns nothing does; in longer ones, after a window without the thing."""
    short, long = (
        WORLD.make_benchmark("test", num_games=10, num_turns=turns, seed=0) for turns in (5, 20)
    )
    for games, forgets in ((short, False), (long, True)):
        places = [[turn.parts.place for turn in game.turns] for game in games.games]
        found, restarts = WORLD.details(games)["variant"].first, 0
        for game, row in zip(places, found, strict=True):
            for turn, place in enumerate(game):
                before = [t for t in range(turn) if game[t] == place]
                kept = bool(before) and turn - before[-1] < PROTOCOL.window
                assert row[turn] == (row[before[-1]] if kept else turn)
                restarts += bool(before) and not kept
        assert bool(restarts) == forgets


def test_embeddings_do_not_depend_on_the_batch(embedder, true_clips):
    clips = true_clips[0, :3, :5]  # 15 frames, less than a batch
    found = embedder.frames(clips)
    frame = jnp.asarray(clips[1, 2][None], jnp.float32) / 127.5 - 1
    embed = jax.jit(lambda clip, frame: clip.embed_image(clip.preprocess(frame)))
    direct = np.asarray(embed(embedder.clip, frame))[0]
    np.testing.assert_allclose(found[1, 2], direct / np.linalg.norm(direct), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-5)
    texts = embedder.texts(["Mika", "the beach", "night"] * 12)
    assert texts.shape == (36, 16)
    np.testing.assert_allclose(texts[:3], texts[-3:], atol=1e-6)


# The decoder alone


def test_a_row_of_the_steps_table(true_clips, levels):
    """True clips have all levels right, still ones the lowest."""
    true_clips, levels = true_clips[:4], levels[: 4 * NUM_TURNS]
    expected = levels.reshape(true_clips.shape[:2])
    comparison = steps.Comparison(true_clips, expected, lambda x: x.mean((2, 3)) / 255)
    accuracy, error, *_, one, two, three, four, five = comparison.describe(true_clips, true_clips)
    assert (accuracy, error) == ("1.000 (1.00 to 1.00)", "0.000")
    true = one, two, three, four, five
    still = true_clips[:, :, :1].repeat(17, axis=2)
    accuracy, error, _, _, _, *slow = comparison.describe(still, still)
    assert float(accuracy.split()[0]) == pytest.approx((levels == 1).mean(), abs=5e-4)
    assert float(error) == pytest.approx((levels - 1).mean(), abs=5e-4)
    for level, (one, other) in enumerate(zip(true, slow, strict=True), start=1):
        if (levels == level).any():
            assert one.endswith("(1.00)")
            assert other == ("0.0 (1.00)" if level == 1 else "0.0 (0.00)")


def test_the_decoder_alone_makes_what_it_makes_in_a_game(tiny_bundle):
    bundle = Bundle.open(tiny_bundle)
    player = Player.from_bundle(bundle, steps=2)
    benchmark = WORLD.make_benchmark("test", num_games=3, num_turns=2, seed=0)
    window, seeds, played = player.start(3), [0, 1, 2], []
    for turn in range(2):
        instructions = [game.turns[turn].instruction for game in benchmark.games]
        window, output = player.play_turn(window, instructions, seeds=seeds, turn=turn + 1)
        played.append(output)
    representations = steps.predict(bundle, benchmark)
    expected = np.stack([one.representation for one in played], axis=1).astype(np.float32)
    np.testing.assert_array_equal(representations, expected)
    found = sample_shots(
        bundle,
        representations=representations,
        levels=np.stack([one.states[:, 0] for one in played], axis=1),
        seeds=seeds,
        steps=2,
        batch_size=4,
    )
    difference = np.abs(found.astype(int) - np.stack([one.frames for one in played], axis=1))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.001


def test_true_representations_are_the_encoders(embedder, tmp_path, true_clips, benchmark):
    clip, tokenizer = embedder.clip, embedder.tokenizer
    t5_config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    config = ShotEncoderConfig(
        num_text_tokens=6,
        num_image_tokens=9,
        text_size=16,
        image_size=32,
        representation_size=24,
    )
    t5 = initialized(lambda: T5Encoder(t5_config, rngs=nnx.Rngs(0)), seed=1)
    encoder = initialized(lambda: ShotEncoder(config, rngs=nnx.Rngs(0)), seed=2)

    class Networks(Bundle):
        """A bundle of these networks, in memory."""

        tokenizer_dir = tmp_path

        def __init__(self): ...

        def load(self, name: str) -> nnx.Module:
            return {"t5": t5, "encoder": encoder, "clip": clip}[name]

    write_word_tokenizer(tmp_path, words())
    turns = turns_of(benchmark)
    found = true_representations(
        Networks(), [turn.full_motion for turn in turns], flat(true_clips)[:, 0]
    )
    assert found.shape == (NUM_GAMES * NUM_TURNS, 15, 24)
    row = 2 * NUM_TURNS + 1
    frame = jnp.asarray(true_clips[2, 1, :1], jnp.float32) / 127.5 - 1
    tokens = jnp.asarray(tokenizer.padded(turns[row].motion_text, 6))[None]
    direct = jax.jit(
        lambda frame, tokens: encoder(t5(tokens), clip.image_features(clip.preprocess(frame)))
    )
    np.testing.assert_allclose(found[row], np.asarray(direct(frame, tokens))[0], atol=1e-4)
