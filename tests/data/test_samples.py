"""Samples: the right turns in the right places, exact features, and sizes that do not fit."""

import collections
import dataclasses

import numpy as np
import pytest
from tiny_sets import (
    FULL,
    INFO,
    NUM_GAMES,
    features_of,
    frames_of,
    turns_of,
    write_features_set,
    write_games,
)

from animegamer_jax.data import samples as turns
from animegamer_jax.data import windows as games_of
from animegamer_jax.data.datasets import open_features, open_games
from animegamer_jax.errors import UserError

WRITTEN = list(turns_of(NUM_GAMES))


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("sets") / "games"
    return open_games(write_games(path, {"train": NUM_GAMES}))


# Games


def test_clips_are_whole_and_exact(games):
    samples = turns.clip_samples(games, split="train", config=FULL)
    assert len(samples) == len(WRITTEN)
    for number in (0, 7, 29):
        assert np.array_equal(samples[number].frames, frames_of(WRITTEN[number]))


@pytest.mark.parametrize("frame", ["first", "random"])
def test_captions_and_frames_are_drawn_again_each_epoch(games, tokenizer, frame):
    samples = turns.caption_samples(
        games, split="train", tokenizer=tokenizer, length=6, frame=frame, seed=1
    )
    shown, said = collections.Counter(), collections.Counter()
    frames, captions = frames_of(WRITTEN[7]), WRITTEN[7]["captions"]
    rows = [tokenizer.padded_with_end(caption, 6).tolist() for caption in captions]
    for epoch in range(60):
        sample = samples[7 + epoch * len(samples)]
        (number,) = [k for k in range(len(frames)) if np.array_equal(frames[k], sample.frame)]
        shown[number] += 1
        said[rows.index(sample.tokens.tolist())] += 1
    assert set(said) == {0, 1, 2}
    assert set(shown) == ({0} if frame == "first" else set(range(len(frames))))
    again = samples[7 + len(samples)]
    assert np.array_equal(again.tokens, samples[7 + len(samples)].tokens)


def test_texts_are_of_all_three_kinds(games, features, tokenizer):
    for turns_set in (games, features):
        samples = turns.text_samples(turns_set, split="train", tokenizer=tokenizer, length=5)
        record = WRITTEN[3]
        kinds = (record["motion_text"], *record["captions"], record["instruction"])
        expected = {tuple(tokenizer.padded(text, 5).tolist()) for text in kinds}
        found = {tuple(samples[3 + k * len(samples)].tokens.tolist()) for k in range(60)}
        assert found == expected


# Features


def test_turns_have_their_own_features(features, tokenizer):
    samples = turns.turn_samples(
        features, split="train", tokenizer=tokenizer, caption_length=6, config=FULL
    )
    assert len(samples) == len(WRITTEN)
    for number in (0, 11, 29):
        sample, turn = samples[number], WRITTEN[number]
        expected = features_of(turn)
        assert np.array_equal(sample.moments, expected["moments"].astype(np.float32))
        assert np.array_equal(sample.text, expected["text_features"].astype(np.float32))
        assert np.array_equal(sample.image, expected["image_features"].astype(np.float32))
        assert sample.motion_value == np.float32(turn["motion_value"])
        assert sample.level == turn["motion_level"]
        assert sample.caption.tolist() == tokenizer.padded(turn["captions"][0], 6).tolist()


# What does not fit


@pytest.mark.parametrize(
    ("network", "change", "message"),
    [
        ("encoder", {"num_text_tokens": 9}, r"text features: expected \(9, 12\)"),
        ("encoder", {"image_size": 21}, r"image features: expected \(4, 21\)"),
        ("dit", {"latent_frames": 5}, r"moments: expected \(5, 4, 6, 8\)"),
        ("dit", {"latent_channels": 16}, r"moments: expected \(3, 4, 6, 32\)"),
        ("t5", {"num_layers": 2}, r"t5\.num_layers: expected 2, as in the model, found 1"),
        ("clip", {"patch_size": 4}, r"clip\.patch_size: expected 4, as in the model, found 8"),
        ("vae", {"channels": 16}, r"vae\.channels: expected 16, as in the model, found 8"),
    ],
)
def test_features_of_another_size_name_the_field(
    features, windows, tokenizer, network, change, message
):
    other = dataclasses.replace(getattr(FULL, network), **change)
    config = dataclasses.replace(FULL, **{network: other})
    with pytest.raises(UserError, match=message):
        games_of.game_samples(features, split="train", windows=windows, config=config)
    with pytest.raises(UserError, match=message):
        turns.turn_samples(
            features, split="train", tokenizer=tokenizer, caption_length=6, config=config
        )
    with pytest.raises(UserError, match=message):
        games_of.adapt_samples(features, split="train", windows=windows, config=config)


def test_what_is_measured_after_training_may_differ(features):
    vae = dataclasses.replace(FULL.vae, scaling_factor=0.5, dtype="bfloat16")
    turns.check_features(features, dataclasses.replace(FULL, vae=vae, encoder=None, dit=None))


@pytest.mark.parametrize(
    ("network", "change", "message"),
    [
        ("vae", {"temporal_compression": 16}, "expected 1 \\+ a multiple of 16 frames"),
        ("dit", {"latent_height": 5}, "height: expected 20, as in the model, found 16"),
        ("dit", {"latent_frames": 5}, "num_frames: expected 17, as in the model, found 9"),
    ],
)
def test_clips_of_another_size_name_the_field(games, network, change, message):
    other = dataclasses.replace(getattr(FULL, network), **change)
    config = dataclasses.replace(FULL, **{network: other})
    with pytest.raises(UserError, match=message):
        turns.clip_samples(games, split="train", config=config)


def test_clips_that_are_not_as_the_set_says(games):
    record = games.turns("train")[7]
    declared = dataclasses.replace(INFO, num_frames=13)
    message = r"tiny, game 1, turn 2: clip: expected 13 frames or more of 16 x 24, found 9 of 16"
    with pytest.raises(UserError, match=message):
        turns.read_frames(record, declared, num_frames=13)


def test_latents_of_other_turns_are_refused(features, tokenizer, tmp_path):
    other = write_features_set(tmp_path / "other", NUM_GAMES, first=1)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "set.json").write_bytes((other / "set.json").read_bytes())
    (mixed / "latents").symlink_to(other / "latents")
    (mixed / "conditions").symlink_to(features.path / "conditions")
    samples = turns.turn_samples(
        open_features(mixed), split="train", tokenizer=tokenizer, caption_length=6, config=FULL
    )
    with pytest.raises(UserError, match="record 2 is game 1, turn 2, but its conditions are of"):
        samples[2]
