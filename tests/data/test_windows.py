"""Samples of turns with their history: the right turns in the right places."""

import collections
import dataclasses

import numpy as np
import pytest
from tiny_sets import FULL, NUM_GAMES, PROTOCOL, features_of, turns_of

from animegamer_jax.data.windows import adapt_samples, common_captions, game_samples
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import PAPER, STATE_NAMES

WRITTEN = list(turns_of(NUM_GAMES))


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
    samples = game_samples(features, split="train", windows=windows, config=FULL)
    assert len(samples) == len(WRITTEN)
    for number, turn in enumerate(WRITTEN):
        check_window(samples[number], number, tokenizer, num_history=turn["turn"])
    held = collections.Counter(int(samples[k].num_history) for k in range(len(samples)))
    assert held == dict.fromkeys(range(5), NUM_GAMES)


def test_a_smaller_window_holds_the_newest(features, windows):
    narrow = dataclasses.replace(PROTOCOL, window=2)
    windows = dataclasses.replace(windows, protocol=narrow)
    samples = game_samples(features, split="train", windows=windows, config=FULL)
    sample = samples[9]
    assert sample.states.tolist() == [[WRITTEN[k][name] for name in STATE_NAMES] for k in (8, 9)]
    assert sample.num_history == 1
    alone = dataclasses.replace(windows, protocol=dataclasses.replace(PROTOCOL, window=1))
    (sample,) = [game_samples(features, split="train", windows=alone, config=FULL)[9]]
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


def test_numbers_of_common_captions(features, windows):
    """Those of a thousandth of the turns, the commonest first, of all sets together."""
    source = features.turns("train")
    turns = [source[number] for number in range(len(source))]
    counts = collections.Counter(text for turn in turns for text in set(turn["captions"]))
    numbers = common_captions([features, features])
    assert numbers.keys() == counts.keys()  # of thirty turns, each is one
    assert sorted(numbers.values()) == list(range(len(counts)))
    order = sorted(numbers, key=numbers.__getitem__)
    assert [counts[text] for text in order] == sorted(counts.values(), reverse=True)
    _, records = windows.read(source, 4, np.random.default_rng(0))
    sample = dataclasses.replace(windows, classes=numbers).sample(records)
    for row, record in zip(sample.classes[-len(records) :], records, strict=True):
        assert {order[number] for number in row if number >= 0} == set(record["captions"])
    assert windows.sample(records).classes.shape[-1] == 0


def test_a_caption_of_a_single_turn_has_no_number(monkeypatch, features):
    """Nothing can be learnt from it that holds for other turns."""
    turns = [{"captions": ["park", "a man runs"]}, {"captions": ["park", "a woman sits"]}]
    monkeypatch.setattr(type(features), "turns", lambda self, split: turns)
    assert common_captions([features]) == {"park": 0}


def test_samples_that_start_anywhere(features, windows, tokenizer):
    """Language model's and adaptation's: whole, another one each epoch, and again the same."""
    anywhere = dataclasses.replace(windows, starts="anywhere", seed=4)
    samples = adapt_samples(features, split="train", windows=anywhere, config=FULL)
    games = game_samples(features, split="train", windows=anywhere, config=FULL)
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
    samples = adapt_samples(features, split="train", windows=windows, config=FULL)
    for number in (0, 8, 24):
        sample = samples[number]
        check_window(sample.game, number, tokenizer, num_history=number % 5)
        moments = features_of(WRITTEN[number])["moments"]
        assert np.array_equal(sample.moments, moments.astype(np.float32))
        assert sample.motion_value == np.float32(WRITTEN[number]["motion_value"])


def test_states_that_the_protocol_lacks(features, windows):
    other = dataclasses.replace(PROTOCOL, stamina=(-2, 2))
    windows = dataclasses.replace(windows, protocol=other)
    with pytest.raises(UserError, match=r"stamina: expected some of \(-2, 2\).*found \(-1, 1\)"):
        game_samples(features, split="train", windows=windows, config=FULL)
