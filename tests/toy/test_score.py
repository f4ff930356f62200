"""Playing and scoring the toy world: perfect, shuffled and damaged clips; readers; the script."""

import dataclasses
import itertools
import json

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import score
import steps
from flax import nnx
from PIL import Image

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import CLIPConfig, ShotEncoderConfig, T5Config
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.formulas import clip_image_similarity, psnr
from animegamer_jax.game.player import Player
from animegamer_jax.media.motion import (
    NOISE,
    measure_levels,
    motion_level,
    motion_value,
)
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.tokenizer import Tokenizer, write_word_tokenizer
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scoring import classifiers as reading
from animegamer_jax.toy.scoring import scores as toyworld
from animegamer_jax.toy.scoring.classifiers import (
    ATTRIBUTES,
    CANDIDATES,
    ChosenReaders,
    ReaderCheck,
)
from animegamer_jax.toy.scoring.decoder_samples import sample_shots
from animegamer_jax.toy.scoring.scores import (
    ALL_THREE,
    attribute_values,
    other_game_values,
    play_games,
    state_values,
)
from animegamer_jax.toy.scoring.truth import make_truth
from animegamer_jax.toy.world import (
    CHARACTERS,
    MOTION_EDGES,
    PLACES,
    make_game,
    words,
)

NUM_GAMES, NUM_TURNS = 8, 3


@pytest.fixture(scope="module")
def truth():
    games = [make_game(seed, num_turns=NUM_TURNS, split="test") for seed in range(NUM_GAMES)]
    return make_truth(games, height=48, width=72, num_frames=17)


@pytest.fixture(scope="module")
def reader() -> ChosenReaders:
    """The one that needs no network, on fewer clips than in earnest."""
    return reading.make_readers(
        None, height=48, width=72, num_frames=17, num_truth=128, num_checked=24
    )


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> ClipEmbedder:
    """A tiny CLIP that has learnt nothing: its features still tell equal from unequal."""
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
    clip = CLIP(config, rngs=nnx.Rngs(0))
    tokenizer = Tokenizer.load(folder, vocab_size=vocab_size, num_queries=15)
    return ClipEmbedder(clip, tokenizer, batch_size=32)


def flat(clips: np.ndarray) -> np.ndarray:
    return clips.reshape(-1, *clips.shape[2:])


def read(reader, clips, truth) -> dict[str, float]:
    values = attribute_values(reader(flat(clips)), truth)
    return {name: float(value.mean()) for name, value in values.items()}


def falls(scores: list[float], *, by: float) -> None:
    assert all(a > b for a, b in itertools.pairwise(scores)), scores
    assert scores[0] - scores[-1] > by, scores


# Perfect, shuffled and damaged clips


def first(truth, num_games: int):
    """The truth of the first games."""

    def cut(value):
        if isinstance(value, dict):
            return {name: cut(part) for name, part in value.items()}
        return value[:num_games]

    fields = [field.name for field in dataclasses.fields(truth)]
    return dataclasses.replace(truth, **{name: cut(getattr(truth, name)) for name in fields})


def test_true_clips_score_nearly_perfect(truth, reader, embedder):
    few = first(truth, 4)
    values = toyworld.Judge(reader, embedder).values(few.clips, few)
    means = {name: float(value.mean()) for name, value in values.items()}
    assert means["ACC-F"] >= 0.8
    assert means["MAE-F"] <= 0.2
    assert means["ACC-F as in data"] >= 0.8
    assert means["CLIP-I"] == pytest.approx(1, abs=1e-5)
    assert means["PSNR"] > 84
    means = read(reader, truth.clips, truth)
    assert means["place"] == means["time"] == 1
    assert min(means["character"], means[ALL_THREE]) >= 0.9


def test_clips_of_another_game_score_as_chance(truth, reader):
    rate = {name: float(v.mean()) for name, v in other_game_values(truth, hear=False).items()}
    shifted = [read(reader, np.roll(truth.clips, k, axis=0), truth) for k in (2, 3, 5)]
    for name in ("character", "place", "time", ALL_THREE):
        assert np.mean([scores[name] for scores in shifted]) == pytest.approx(rate[name], abs=0.15)
    assert rate[ALL_THREE] < 0.1


def test_each_damage_lowers_its_own_score(truth, reader):
    """Another character in some turns lowers the character alone; another place the place."""
    scenes = [turn.scene for game in truth.games for turn in game]
    for attribute, candidates in (("character", CHARACTERS), ("place", PLACES)):
        damaged, found = flat(truth.clips).copy(), []
        for start in (0, 8, 16, 24):
            for index in range(max(0, start - 8), start):
                value = candidates[
                    (candidates.index(getattr(scenes[index], attribute)) + 3) % len(candidates)
                ]
                change = {attribute: value}
                if scenes[index].partner == value:
                    change["partner"] = scenes[index].character
                damaged[index] = render(dataclasses.replace(scenes[index], **change))
            found.append(read(reader, damaged.reshape(truth.clips.shape), truth))
        falls([scores[attribute] for scores in found], by=0.8)
        falls([scores[ALL_THREE] for scores in found], by=0.8)
        for other in set(ATTRIBUTES) - {attribute}:
            assert found[-1][other] > 0.9


def test_frozen_clips_lose_their_motion_only(truth, reader):
    moving = flat(truth.clips)
    frozen = np.repeat(moving[:, :1], moving.shape[1], axis=1)
    true = truth.levels.ravel()[:12]
    errors = [np.abs(measure_levels(clips[:12]) - true) for clips in (moving, frozen)]
    falls([-np.where(np.arange(12) < k, *errors[::-1]).mean() for k in (0, 4, 8, 12)], by=1)
    assert read(reader, frozen.reshape(truth.clips.shape), truth)["character"] > 0.9


def test_noise_lowers_what_compares_frames(truth, embedder):
    random, clips = np.random.default_rng(0), truth.clips[0]
    true, similar, ratio = embedder.frames(clips), [], []
    for sigma in (0, 8, 32, 96):
        noisy = clips + random.normal(0, sigma, clips.shape)
        noisy = noisy.round().clip(0, 255).astype(np.uint8)
        similar.append(float(clip_image_similarity(embedder.frames(noisy), true).mean()))
        ratio.append(float(psnr(noisy, clips).mean()))
    falls(similar, by=0.005)
    falls(ratio, by=50)


# Truth and answers without looking


def test_open_turns_say_less_than_they_show(truth):
    closed = ~truth.is_open
    assert closed[:, 0].all()
    assert 0.3 < truth.is_open[:, 1:].mean() < 0.9
    for name in ATTRIBUTES:
        assert truth.named[name][closed].all()
    said = np.prod([truth.named[name] for name in ATTRIBUTES], axis=0)[truth.is_open]
    assert said.mean() < 0.1
    game, turn = 3, 2
    scene = truth.games[game][turn].scene
    assert CANDIDATES["place"][truth.labels["place"][game, turn]] == scene.place
    assert truth.levels[game, turn] == scene.level


def test_states_score_by_slot_and_turn(truth):
    perfect = state_values(truth.states, truth.levels, truth)
    assert perfect["ACC-S"].min() == perfect["ACC-L"].min() == 1
    assert perfect["MAE-S"].max() == perfect["MAE-L"].max() == 0
    wrong = truth.states.copy()
    wrong[:, 0, 0] = 1 - wrong[:, 0, 0]
    values = state_values(wrong, truth.levels + 1, truth)
    assert values["ACC-S social"].mean() == pytest.approx(1 - 1 / NUM_TURNS)
    assert values["ACC-S stamina"].mean() == values["MAE-L"].mean() == 1
    assert values["ACC-S"].mean() == pytest.approx(1 - 1 / NUM_TURNS / 3)


def test_another_games_values_are_those_of_every_other_game(truth):
    found = other_game_values(truth, hear=False)
    heard = other_game_values(truth, hear=True)
    label, named = truth.labels["place"], truth.named["place"]
    for game in range(NUM_GAMES):
        others = np.delete(label, game, axis=0)
        np.testing.assert_allclose(found["place"][game], (others == label[game]).mean(0), atol=1e-6)
    assert (heard["place"][named] == 1).all()
    np.testing.assert_array_equal(heard["place"][~named], found["place"][~named])
    assert heard[ALL_THREE][truth.is_open].mean() < 0.6
    with pytest.raises(ValueError, match="two games"):
        other_game_values(dataclasses.replace(truth, games=truth.games[:1]), hear=False)


def test_the_most_frequent_value_is_right_as_often_as_it_occurs(truth):
    values = toyworld.constant_values(truth)
    counts = np.unique(truth.labels["place"], return_counts=True)[1]
    assert values["place"].mean() == pytest.approx(counts.max() / counts.sum())
    stamina = np.unique(truth.states[..., 2], return_counts=True)[1]
    assert values["ACC-S stamina"].mean() == pytest.approx(stamina.max() / stamina.sum())


def test_flicker_is_not_taken_for_motion(truth):
    """Scenery that shimmers takes no part in the mean of what moves."""
    rng = np.random.default_rng(0)
    clips = truth.clips.reshape(-1, *truth.clips.shape[2:])
    noise = rng.normal(size=clips.shape[:4])
    noise = np.stack([[cv2.GaussianBlur(frame, (0, 0), 1.5) for frame in clip] for clip in noise])
    noise *= 3 / noise.std()
    flickering = (clips + noise[..., None]).clip(0, 255).round().astype(np.uint8)
    levels = truth.levels.ravel()
    assert (measure_levels(clips) == levels).mean() > 0.95
    assert (measure_levels(flickering) == levels).mean() > 0.85
    taken = [motion_level(motion_value(clip), edges=MOTION_EDGES) for clip in flickering]
    np.testing.assert_array_equal(measure_levels(flickering, noise=NOISE), taken)
    assert (np.array(taken) == levels).mean() < 0.7


# Readers


def test_the_reader_that_is_right_most_often_reads(reader):
    assert all(reader.chosen[name].accuracy == 1 for name in ("place", "time"))
    assert reader.chosen["character"].accuracy >= 0.9
    assert all(20 <= check.num_clips <= 24 for check in reader.checks)

    def check(name: str, accuracy: float, reconstructed: float) -> ReaderCheck:
        return ReaderCheck(
            attribute="place",
            reader=name,
            accuracy=accuracy,
            reconstructed=reconstructed,
            num_clips=1,
        )

    # Who may judge goes first, then who bears the VAE's blur.
    ranked = [check("a", 0.98, 0.98), check("b", 0.999, 0.90), check("c", 0.992, 0.95)]
    assert sorted(ranked, key=lambda c: c.rank, reverse=True) == [ranked[2], ranked[1], ranked[0]]


def test_readers_learn_from_scenes_of_their_own():
    drawn, other = reading.draw_scenes(96, seed=0), reading.draw_scenes(96, seed=1)
    assert drawn == reading.draw_scenes(96, seed=0)
    assert len(set(drawn)) > 90
    assert len(set(drawn) & set(other)) < 10
    assert np.bincount(reading.labels(drawn, "character")).tolist() == [12] * 8
    assert all((s.partner is None) == (s.motion != "talk") for s in drawn)
    assert all(s.partner != s.character for s in drawn)


def test_embeddings_do_not_depend_on_the_batch(embedder, truth):
    clips = truth.clips[0, :3, :5]  # 15 frames, less than a batch
    found = embedder.frames(clips)
    frame = jnp.asarray(clips[1, 2][None], jnp.float32) / 127.5 - 1
    embed = jax.jit(lambda clip, frame: clip.embed_image(clip.preprocess(frame)))
    direct = np.asarray(embed(embedder.clip, frame))[0]
    np.testing.assert_allclose(found[1, 2], direct / np.linalg.norm(direct), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-5)
    texts = embedder.texts(["Mika", "the beach", "night"] * 12)
    assert texts.shape == (36, 16)
    np.testing.assert_allclose(texts[:3], texts[-3:], atol=1e-6)
    zero_shot = reading.ZeroShotReader(embedder, reading.PROMPTS)(clips)
    expected = (found.mean(1) @ embedder.texts(reading.PROMPTS["place"]).T).argmax(1)
    np.testing.assert_array_equal(zero_shot["place"], expected)


# Playing


def test_a_row_of_the_steps_table(truth):
    """True clips have all levels right, still ones the lowest."""
    accuracy, error, _, *levels = steps.describe(truth.clips, truth)
    assert (accuracy, error) == ("1.000", "0.000")
    still = truth.clips[:, :, :1].repeat(17, axis=2)
    accuracy, error, _, *slow = steps.describe(still, truth)
    assert float(accuracy) == pytest.approx((truth.levels == 1).mean(), abs=5e-4)
    assert float(error) == pytest.approx((truth.levels - 1).mean(), abs=5e-4)
    for level, (one, other) in enumerate(zip(levels, slow, strict=True), start=1):
        if (truth.levels == level).any():
            assert one.endswith("(1.00)")
            assert other == ("0.0 (1.00)" if level == 1 else "0.0 (0.00)")


@pytest.fixture(scope="module")
def player(tiny_bundle) -> Player:
    return Player.from_bundle(Bundle.open(tiny_bundle), steps=2)


def test_games_play_alone_as_side_by_side(player):
    """Five games in batches of four: the last batch is filled up, and nothing mixes."""
    games = [make_game(seed, num_turns=2, split="test") for seed in range(5)]
    told: list[tuple[int, int]] = []
    played = play_games(
        player, games, seeds=range(5), batch_size=4, on_turn=lambda *done: told.append(done)
    )
    assert told == [(4, 10), (8, 10), (9, 10), (10, 10)]
    assert played.frames.shape == (5, 2, 9, 16, 24, 3)
    assert played.states.shape == (5, 2, 4)
    assert played.seconds.shape == (5, 2)
    alone = play_games(player, games[4:], seeds=[4])
    np.testing.assert_array_equal(alone.states, played.states[4:])
    np.testing.assert_allclose(alone.representations, played.representations[4:], atol=1e-4)
    difference = np.abs(alone.frames.astype(int) - played.frames[4:])
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.001


def test_the_decoder_alone_makes_what_it_makes_in_a_game(player, tiny_bundle):
    games = [make_game(seed, num_turns=2, split="test") for seed in range(3)]
    played = play_games(player, games, seeds=range(3))
    truth = make_truth(games, height=16, width=24, num_frames=9)
    told = dataclasses.replace(truth, levels=played.states[..., 0])
    found = sample_shots(
        Bundle.open(tiny_bundle),
        told,
        representations=played.representations,
        seeds=range(3),
        steps=2,
        batch_size=4,
    )
    difference = np.abs(found.astype(int) - played.frames)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.001


def test_playing_does_not_look_at_the_truth(player):
    game = make_game(0, num_turns=2)
    blind = [
        dataclasses.replace(turn, scene=make_game(9)[0].scene, caption="", motion_text="", social=1)
        for turn in game
    ]
    a, b = (play_games(player, [turns], seeds=[3]) for turns in (game, blind))
    np.testing.assert_array_equal(a.frames, b.frames)
    np.testing.assert_array_equal(a.states, b.states)


@pytest.mark.parametrize(("lengths", "seeds"), [((), ()), ((2, 3), (0, 1)), ((2, 2), (0,))])
def test_games_that_do_not_fit_together_are_refused(player, lengths, seeds):
    games = [make_game(0, num_turns=length) for length in lengths]
    with pytest.raises(UserError, match="games to score: expected one or more of one length"):
        play_games(player, games, seeds=seeds)


# Shot representations


def test_representations_are_the_encoders_of_the_truth(truth, embedder):
    tokenizer, clip = embedder.tokenizer, embedder.clip
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
    t5, encoder = T5Encoder(t5_config, rngs=nnx.Rngs(1)), ShotEncoder(config, rngs=nnx.Rngs(2))
    found = toyworld.true_representations(
        truth, encoder=encoder, t5=t5, clip=clip, tokenizer=tokenizer
    )
    assert found.shape == (NUM_GAMES, NUM_TURNS, 15, 24)
    turn = truth.games[2][1]
    frame = jnp.asarray(truth.clips[2, 1, :1], jnp.float32) / 127.5 - 1
    tokens = jnp.asarray(tokenizer.padded(turn.motion_text, 6))[None]
    direct = jax.jit(
        lambda frame, tokens: encoder(t5(tokens), clip.image_features(clip.preprocess(frame)))
    )
    np.testing.assert_allclose(found[2, 1], np.asarray(direct(frame, tokens))[0], atol=1e-4)
    scores = toyworld.representation_scores(found, found, num_text_tokens=6)
    assert scores["all"] == {"MSE": 0, "explained variance": 1}
    damaged = found.copy()
    damaged[:, :, :6] += 1
    scores = toyworld.representation_scores(damaged, found, num_text_tokens=6)
    assert scores["text"]["MSE"] == pytest.approx(1, rel=1e-5)
    assert scores["image"]["MSE"] == 0
    assert scores["all"]["MSE"] == pytest.approx(6 / 15, rel=1e-5)


# The script


def test_script_reports_a_model(tiny_bundle, tmp_path, capsys):
    out = tmp_path / "report" / "scores.json"
    score.main(
        str(tiny_bundle),
        split="phrasings",
        games=2,
        turns=2,
        steps=1,
        reader_clips=24,
        batch_size=1,
        out=out,
    )
    report = json.loads(out.read_text())
    assert report["settings"]["split"] == "phrasings"
    assert report["settings"]["reader_clips"] == 24
    assert report["settings"]["model_digest"] == Bundle.open(tiny_bundle).digest()
    assert report["num_games"] == 2
    assert set(report["ceilings"]) == {"true clips", "another take", "through the VAE"}
    assert set(report["base_rates"]) == {"most frequent", "another game", "no memory"}
    found = report["all_turns"]["ACC-S"]
    assert found["count"] == 4
    assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1
    assert sum(table["ACC-F"]["count"] for table in report["by_level"].values()) == 4
    assert set(report["by_turn"]) == {"1", "2"}
    assert report["representation"] is None
    motion = {"ACC-F", "MAE-F", "ACC-F as in data", "MAE-F as in data"}
    assert motion <= report["all_turns"].keys()
    assert motion <= report["ceilings"]["through the VAE"].keys()
    printed, told = capsys.readouterr()
    assert "played 1 of 4 turns\n" in told  # no terminal: whole lines
    assert "played 4 of 4 turns\n" in told
    assert "open turns (context)" in printed
    assert "ACC-S stamina" in printed
    with Image.open(out.with_suffix(".png")) as board:
        assert board.height > 2 * 2 * 3 * 16


@pytest.mark.parametrize("option", ["games", "turns", "batch_size", "reader_clips"])
def test_script_refuses_numbers_that_are_too_small(option):
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')}: expected"):
        score.main("nowhere", **{option: 0})
