"""Samples: the right turns in the right places, exact features, and sizes that do not fit."""

import collections
import dataclasses

import numpy as np
import pytest
from tiny_sets import (
    CONFIG,
    INFO,
    PROTOCOL,
    features_of,
    frames_of,
    make_tokenizer,
    turns_of,
    write_features_set,
    write_games,
)

from animegamer_jax.configs import DiTConfig, ShotEncoderConfig
from animegamer_jax.data import samples as turns
from animegamer_jax.data.datasets import open_features, open_games
from animegamer_jax.data.samples import Windows
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import PAPER, STATE_NAMES

NUM_GAMES = 6
WRITTEN = list(turns_of(NUM_GAMES))
FULL = dataclasses.replace(
    CONFIG,
    encoder=ShotEncoderConfig(
        num_text_tokens=3, num_image_tokens=4, text_size=12, image_size=20, representation_size=32
    ),
    dit=DiTConfig(latent_channels=4, latent_frames=3, latent_height=4, latent_width=6),
)


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    path = tmp_path_factory.mktemp("sets") / "games"
    return open_games(write_games(path, {"train": NUM_GAMES}))


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    path = tmp_path_factory.mktemp("sets") / "features"
    return open_features(write_features_set(path, NUM_GAMES))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def windows(tokenizer):
    return Windows(tokenizer=tokenizer, protocol=PROTOCOL)


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


def check_window(sample, number: int, tokenizer, *, num_history: int) -> None:
    """A sample is record `number` with the turns before it, and zeros before those."""
    assert sample.num_history == num_history
    absent = PAPER.window - 1 - num_history
    for field in sample._fields:
        if field != "num_history":
            assert not getattr(sample, field)[:absent].any(), field
    for place in range(absent, PAPER.window):
        turn = WRITTEN[number - (PAPER.window - 1 - place)]
        assert turn["game"] == WRITTEN[number]["game"]
        ids, length = tokenizer.caption(turn["instruction"], PROTOCOL.caption_length)
        assert sample.captions[place].tolist() == ids.tolist()
        assert sample.caption_lengths[place] == length
        assert sample.states[place].tolist() == [turn[name] for name in STATE_NAMES]
        expected = features_of(turn)
        assert np.array_equal(sample.text[place], expected["text_features"].astype(np.float32))
        assert np.array_equal(sample.image[place], expected["image_features"].astype(np.float32))


def test_windows_hold_the_game_up_to_this_turn(features, windows, tokenizer):
    samples = turns.game_samples(features, split="train", windows=windows, config=FULL)
    assert len(samples) == len(WRITTEN)
    for number, turn in enumerate(WRITTEN):
        check_window(samples[number], number, tokenizer, num_history=turn["turn"])
    held = collections.Counter(int(samples[k].num_history) for k in range(len(samples)))
    assert held == dict.fromkeys(range(5), NUM_GAMES)


def test_a_smaller_window_holds_the_newest(features, windows):
    narrow = dataclasses.replace(PROTOCOL, window=2)
    windows = dataclasses.replace(windows, protocol=narrow)
    samples = turns.game_samples(features, split="train", windows=windows, config=FULL)
    sample = samples[9]
    assert sample.states.tolist() == [[WRITTEN[k][name] for name in STATE_NAMES] for k in (8, 9)]
    assert sample.num_history == 1
    alone = dataclasses.replace(windows, protocol=dataclasses.replace(PROTOCOL, window=1))
    (sample,) = [turns.game_samples(features, split="train", windows=alone, config=FULL)[9]]
    assert (sample.num_history, sample.text.shape[0]) == (0, 1)


@pytest.mark.parametrize("window", [3, 5, 7])
def test_windows_that_start_anywhere_are_of_uniform_length(features, windows, window):
    """1 turn to what window and game (five turns) hold; and every turn that has enough."""
    protocol = dataclasses.replace(PROTOCOL, window=window)
    anywhere = dataclasses.replace(windows, protocol=protocol, starts="anywhere")
    source, rng = features.turns("train"), np.random.default_rng(3)
    held: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    draws, longest = 50 * NUM_GAMES * 5, min(window, 5)
    for number in range(draws):
        start = number % (NUM_GAMES * 5) // 5 * 5
        last, records = anywhere.read(source, number % (NUM_GAMES * 5), rng)
        turns_read = [(record["game"], record["turn"]) for record in records]
        expected = [WRITTEN[place] for place in range(last - len(records) + 1, last + 1)]
        assert turns_read == [(record["game"], record["turn"]) for record in expected]
        assert start <= last - len(records) + 1 <= last < start + 5
        held[len(records)][last - start] += 1
    assert sorted(held) == list(range(1, longest + 1))
    for count, ends in held.items():
        assert_near(ends.total(), draws / longest)
        assert sorted(ends) == list(range(count - 1, 5))
        for times in ends.values():
            assert_near(times, draws / longest / (6 - count))


def assert_near(times: int, expected: float) -> None:
    """Within five deviations of a binomial."""
    assert abs(times - expected) <= 5 * expected**0.5


def test_captions_in_place_of_instructions(features, windows, tokenizer):
    """The complete one first, then as many of the others as fit, drawn again each time."""
    source = features.turns("train")
    captions = source[3]["captions"]
    length = len(tokenizer.encode(", ".join(captions[:2])))
    protocol = dataclasses.replace(windows.protocol, window=1, caption_length=length)
    described = dataclasses.replace(windows, protocol=protocol, captions=True)
    rng, found = np.random.default_rng(0), set()
    for _ in range(20):
        last, (record,) = described.read(source, 3, rng)
        assert last == 3
        text = record["instruction"]
        assert text.startswith(captions[0])
        assert len(tokenizer.encode(text)) <= length
        assert set(text.split(", ")) <= set(", ".join(captions).split(", "))
        found.add(text)
    assert len(found) > 1
    assert source[3]["instruction"] not in found


def test_captions_next_to_instructions(features, windows, tokenizer):
    """Those of every turn of a sample, -1 behind them; and none where they are not read."""
    source = features.turns("train")
    both = dataclasses.replace(windows, complete=True)
    _, records = both.read(source, 4, np.random.default_rng(0))
    assert records[-1]["instruction"] == source[4]["instruction"]
    sample = both.sample(records)
    length = windows.protocol.caption_length
    for row, record in zip(sample.complete[-len(records) :], records, strict=True):
        ids, count = tokenizer.caption(record["complete"], length)
        assert record["complete"].startswith(record["captions"][0])
        assert row[:count].tolist() == np.asarray(ids)[:count].tolist()
        assert (row[count:] == -1).all()
        assert count < length
    _, records = windows.read(source, 4, np.random.default_rng(0))
    assert windows.sample(records).complete.shape[-1] == 0


def test_samples_that_start_anywhere(features, windows, tokenizer):
    """Language model's and adaptation's: whole, another one each epoch, and again the same."""
    anywhere = dataclasses.replace(windows, starts="anywhere", seed=4)
    samples = turns.adapt_samples(features, split="train", windows=anywhere, config=FULL)
    games = turns.game_samples(features, split="train", windows=anywhere, config=FULL)
    assert len(samples) == len(games) == len(WRITTEN)
    moved = set()
    for epoch in range(4):
        for place in range(5, 10):
            sample = samples[place + epoch * len(samples)]
            last = next(
                k
                for k in range(5, 10)
                if sample.motion_value == np.float32(WRITTEN[k]["motion_value"])
            )
            check_window(sample.game, last, tokenizer, num_history=int(sample.game.num_history))
            moments = features_of(WRITTEN[last])["moments"]
            assert np.array_equal(sample.moments, moments.astype(np.float32))
            again = games[place + epoch * len(samples)]
            assert all(np.array_equal(a, b) for a, b in zip(sample.game, again, strict=True))
            moved.add((place, last, int(sample.game.num_history)))
    assert len(moved) > 10
    assert any(place != last for place, last, _ in moved)


def test_adaptation_has_the_window_and_the_latents_of_its_last_turn(features, windows, tokenizer):
    samples = turns.adapt_samples(features, split="train", windows=windows, config=FULL)
    for number in (0, 8, 24):
        sample = samples[number]
        check_window(sample.game, number, tokenizer, num_history=number % 5)
        moments = features_of(WRITTEN[number])["moments"]
        assert np.array_equal(sample.moments, moments.astype(np.float32))
        assert sample.motion_value == np.float32(WRITTEN[number]["motion_value"])


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
        turns.game_samples(features, split="train", windows=windows, config=config)
    with pytest.raises(UserError, match=message):
        turns.turn_samples(
            features, split="train", tokenizer=tokenizer, caption_length=6, config=config
        )
    with pytest.raises(UserError, match=message):
        turns.adapt_samples(features, split="train", windows=windows, config=config)


def test_what_is_measured_after_training_may_differ(features):
    vae = dataclasses.replace(FULL.vae, scaling_factor=0.5, dtype="bfloat16")
    turns.check_features(features, dataclasses.replace(FULL, vae=vae, encoder=None, dit=None))


def test_states_that_the_protocol_lacks(features, windows):
    other = dataclasses.replace(PROTOCOL, stamina=(-2, 2))
    windows = dataclasses.replace(windows, protocol=other)
    with pytest.raises(UserError, match=r"stamina: expected some of \(-2, 2\).*found \(-1, 1\)"):
        turns.game_samples(features, split="train", windows=windows, config=FULL)


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
