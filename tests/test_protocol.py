"""The game protocol token by token, and the tokenizer's refusals."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers import write_tokenizer

from animegamer_jax.errors import UserError
from animegamer_jax.protocol import (
    PAPER,
    PROTOCOLS,
    RELEASED,
    SPECIAL_TOKENS,
    STATE_NAMES,
    Layout,
    Prompt,
    Protocol,
    TokenIds,
    inject,
)
from animegamer_jax.tokenizer import FILE, Tokenizer, copy_tokenizer

NAMES = ["<s>", "a", "b", "c", "d", "e", "f", *(f"<frame_{i:05d}>" for i in range(4))]
NAMES += SPECIAL_TOKENS
IDS = TokenIds(
    bos=0,
    special={token: NAMES.index(token) for token in SPECIAL_TOKENS},
    frames=tuple(NAMES.index(f"<frame_{i:05d}>") for i in range(4)),
)
TEXTS = {"oldest": "ab", "middle": "cdef", "now": "e"}
STATES = {"oldest": (5, 1, 0, -1), "middle": (2, 0, 1, 1)}
SIZE = 5


@functools.cache
def make_layout(protocol: Protocol) -> Layout:
    protocol = dataclasses.replace(protocol, caption_length=SIZE)
    return Layout(protocol, IDS, num_queries=2, window=3)


def caption(text: str) -> tuple[list[int], int]:
    return [NAMES.index(letter) for letter in text] + [0] * (SIZE - len(text)), len(text)


@functools.cache
def compiled(layout: Layout):
    return jax.jit(layout.assemble)


def assemble(layout: Layout, *num_history: int) -> Prompt:
    """Three turns in their slots, a game for each number of real turns of the history."""
    captions, lengths = zip(*map(caption, TEXTS.values()), strict=True)
    games = len(num_history)
    arrays = ([captions] * games, [lengths] * games, [list(STATES.values())] * games, num_history)
    return compiled(layout)(*(np.array(array, np.int32) for array in arrays))


def past(text: str, states: tuple[int, ...], end: str) -> str:
    level, social, entertainment, stamina = (f"<Strength_{k}>" for k in states)
    return (
        f"<TURN> {' '.join(text)} <img> <frame> <frame_00000> <frame_00001> </frame> </img>"
        f" <ML> {level} </ML> <SC> {social} </SC> <ET> {entertainment} </ET> <ST> {stamina} {end}"
    )


NOW = "<TURN> e <img> <frame> <frame_00000> <frame_00001> </frame> </img> <ML>"


@pytest.mark.parametrize("num_history", [0, 1, 2])
@pytest.mark.parametrize("protocol", [PAPER, RELEASED], ids=["paper", "released"])
def test_layout_token_by_token(protocol, num_history):
    released = protocol is RELEASED
    end = "</ST> </ST> </TURN>" if released else "</ST> </TURN>"
    turns = list(STATES)[2 - num_history :]
    expected = ["<s>"]
    for turn in turns:
        states = (0, 0, 0, 0) if released else STATES[turn]
        expected += past(TEXTS[turn], states, end).split()
    expected += NOW.split()

    layout = make_layout(protocol)
    prompt = assemble(layout, num_history)
    valid = np.asarray(prompt.valid[0])
    ids = np.asarray(prompt.ids[0])
    assert [NAMES[i] for i in ids[valid]] == expected
    np.testing.assert_array_equal(prompt.positions[0][valid], np.arange(len(expected)))
    assert prompt.ids.shape == (1, layout.length)
    assert valid[-1]  # the slot before the first state is always a token

    def frames(slots: np.ndarray) -> list[str]:
        return [NAMES[i] for i in ids[slots]]

    pair = ["<frame_00000>", "<frame_00001>"]
    assert frames(layout.queries) == pair
    assert frames(layout.history) == pair * 2
    assert valid[layout.history].sum() == 2 * num_history
    tail = ["</frame>", "</img>", "<ML>"]
    # The release reads as many positions, three later: the last ones of the sequence.
    assert frames(layout.representation) == (tail[1:] if released else pair)


def test_games_of_a_batch_have_their_own_history():
    layout = make_layout(PAPER)
    prompt = assemble(layout, 2, 0, 1)
    for row, num_history in enumerate((2, 0, 1)):
        alone = assemble(layout, num_history)
        for found, expected in zip(prompt, alone, strict=True):
            np.testing.assert_array_equal(found[row], expected[0])


def test_the_length_of_a_whole_turn_is_the_papers():
    """56 tokens of instruction and 226 frames: 300 with the tokens around them."""
    ids = IDS._replace(frames=tuple(range(100, 326)))
    long = Layout(PAPER, ids, num_queries=226, window=5)
    shorter = Layout(PAPER, ids, num_queries=226, window=4)
    assert long.length - shorter.length == 300
    alone = Layout(RELEASED, ids, num_queries=226, window=1)
    assert alone.length == 1 + 1 + 56 + 2 + 226 + 3
    assert not alone.history.any()


def test_allowed_values():
    layout = make_layout(PAPER)
    expected = {
        "motion_level": [1, 2, 3, 4, 5],
        "social": [0, 1],
        "entertainment": [0, 1],
        "stamina": [-1, 1],
    }
    assert tuple(expected) == STATE_NAMES
    for values, allowed, name in zip(layout.values, layout.allowed, STATE_NAMES, strict=True):
        real = allowed >= 0
        assert values[real].tolist() == expected[name]
        assert [NAMES[i] for i in allowed[real]] == [f"<Strength_{k}>" for k in expected[name]]
    between = [[NAMES[i] for i in pair] for pair in layout.between]
    assert between == [["</ML>", "<SC>"], ["</SC>", "<ET>"], ["</ET>", "<ST>"]]


def test_the_two_protocols():
    assert PROTOCOLS == {"paper": PAPER, "released": RELEASED}
    assert (PAPER.window, RELEASED.window) == (5, 1)
    assert RELEASED.turn_end.count("</ST>") == 2
    assert RELEASED.representation_shift == 3
    assert PAPER.history == RELEASED.history == "predicted"
    assert PAPER.motion_values == RELEASED.motion_values == (0.5, 2.5, 10.0, 15.0, 40.0)
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == 6 + 11 + 1 + 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0, "num_queries": 2}, "a window of 0 turns"),
        ({"window": 1, "num_queries": 5}, "5 queries, but 4 frame tokens"),
    ],
)
def test_layouts_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Layout(PAPER, IDS, **options)


def test_inject_in_order():
    x = jnp.zeros((2, 5, 2))
    where = jnp.asarray([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1]], bool)
    values = jnp.arange(1.0, 13.0).reshape(2, 3, 2)
    found = np.asarray(jax.jit(inject)(x, where, values))
    np.testing.assert_array_equal(found[0, [1, 3, 4]], values[0])
    np.testing.assert_array_equal(found[1, 4], values[1, 0])
    assert not found[~np.asarray(where)].any()
    np.testing.assert_array_equal(inject(x, where, values[:, :0]), x)


# --- the tokenizer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


def test_ids_are_the_tokenizers(folder, tokenizer):
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / FILE)).get_vocab()
    assert tokenizer.ids.bos == vocabulary["<s>"]
    assert tokenizer.ids.special == {token: vocabulary[token] for token in SPECIAL_TOKENS}
    assert tokenizer.ids.frames == tuple(vocabulary[f"<frame_{i:05d}>"] for i in range(226))
    assert Tokenizer.load(folder, num_queries=3).ids.frames == tokenizer.ids.frames[:3]


def test_captions_are_padded_and_trimmed(tokenizer):
    ids, length = tokenizer.caption("  wave\n gently ", 20)
    assert length == len("wave gently")
    assert ids.shape == (20,)
    assert ids[:length].tolist() == tokenizer.encode("wave gently")
    assert not ids[length:].any()


@pytest.mark.parametrize("text", ["<img>", "</s>", "<s><TURN>", "a<frame_00007>b", "<<ML>>"])
def test_text_that_spells_special_tokens(tokenizer, text):
    special = {tokenizer.ids.bos, *tokenizer.ids.special.values(), *tokenizer.ids.frames}
    special.update(tokenizer._tokenizer.token_to_id(token) for token in ("<unk>", "</s>"))
    found = tokenizer.encode(text)
    assert found
    assert not special & set(found)


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [("", 8, "empty"), ("word", 3, "4 tokens, the model reads 3"), ("x" * 2001, 8, "at most 2000")],
)
def test_captions_that_cannot_be(tokenizer, text, length, message):
    with pytest.raises(UserError, match=message):
        tokenizer.caption(text, length)


def refusal(folder: Path, **options: int) -> str:
    with pytest.raises(UserError) as caught:
        Tokenizer.load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_another_size_is_refused(folder):
    assert "has 543 entries, the model's embedding has 7 rows" in refusal(folder, vocab_size=7)


def test_missing_special_tokens_are_named(folder, tmp_path):
    content = json.loads((folder / FILE).read_text())
    lacking = ("<TURN>", "</ET>")
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in lacking]
    (tmp_path / FILE).write_text(json.dumps(content))
    message = refusal(tmp_path)
    assert "2 special tokens are missing (</ET>, <TURN>)" in message
    assert "300 special tokens" in refusal(folder, num_queries=556)
    with pytest.raises(UserError, match="2 special tokens"):
        copy_tokenizer(tmp_path, tmp_path / "out", vocab_size=541)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}'])
def test_what_is_no_tokenizer_file(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    assert "not a tokenizer file" in refusal(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    assert "expected a folder with tokenizer.json or tokenizer.model" in refusal(tmp_path)


def test_code_in_a_tokenizer_folder_is_not_run(tmp_path, monkeypatch):
    """Nor is anybody asked whether it may: there is an answer on standard input."""
    (tmp_path / "tokenizer.model").write_bytes(b"")
    names = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *texts: asked.extend(texts) or "y")
    assert "the tokenizer cannot be read" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert asked == []


def test_copies_what_it_has_checked(folder, tmp_path, tokenizer):
    copy_tokenizer(folder, tmp_path / "out", vocab_size=543)
    copy = Tokenizer.load(tmp_path / "out", vocab_size=543)
    assert copy.ids == tokenizer.ids
    text = "Character: Qiqi; Motion: wave."
    assert copy.encode(text) == tokenizer.encode(text)
