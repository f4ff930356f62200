"""The multimodal language model against the recorded numbers, and its two protocols.

The recorded set is cut to the vocabulary rows that it uses (`scripts/make_test_reference.py`), so
the greedy choice is among these. All eight recorded sequences run as one batch, padded at the end.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from animegamer_jax.bundle.bundle import abstract_network
from animegamer_jax.convert.rules import load
from animegamer_jax.convert.sources import Source, Tensor
from animegamer_jax.convert.tables.mllm import infer_config, rules
from animegamer_jax.models import mllm as models_mllm
from animegamer_jax.models.kernels.masks import TokenMask
from animegamer_jax.models.mistral import Tokens, make_cache
from animegamer_jax.models.mllm import IGNORED, MLLM, GameBatch
from animegamer_jax.protocol import PAPER, RELEASED, SPECIAL_TOKENS, Layout, Prompt, TokenIds

RECORDED = Path(__file__).parents[1] / "reference" / "mllm"
NUM_GREEDY = 12
TURNS = [(window, turn) for window in (1, 3) for turn in range(4)]
REPRESENTATION = 1e-4  # reached: 2.4e-5 after 785 tokens, else 1.1e-5
MASKS = ("bidirectional", "causal")


def error(found: Any, expected: Any) -> float:
    """Largest difference over the RMS of `expected`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.sqrt(np.square(expected).mean()))


def read(name: str) -> dict[str, np.ndarray]:
    with np.load(RECORDED / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return read("rollout")


@pytest.fixture(scope="module")
def mllm() -> MLLM:
    weights = read("weights")
    tensors = {
        name: Tensor(value.shape, value.dtype, lambda value=value: value)
        for name, value in weights.items()
    }
    source = Source("weights.npz", tensors)
    config = infer_config(source.shapes, base=json.loads((RECORDED / "config.json").read_text()))
    module = abstract_network("mllm", config)
    load(rules(config), source, module)
    return module


@pytest.fixture(scope="module")
def token_ids() -> TokenIds:
    known = json.loads((RECORDED / "tokens.json").read_text())
    return TokenIds(
        bos=known["<s>"],
        special={token: known[token] for token in SPECIAL_TOKENS},
        frames=tuple(known[f"<frame_{i:05d}>"] for i in range(226)),
    )


def past_turns(recorded: dict[str, np.ndarray], window: int, turn: int) -> np.ndarray:
    """The representations that a turn sees, oldest first [rows, 64]."""
    past = range(max(0, turn - window + 1), turn)
    rows = [recorded[f"w{window}_t{t}_released_rep"] for t in past]
    return np.concatenate([np.zeros((0, 64), np.float32), *rows])


@dataclasses.dataclass
class Sequences:
    """The recorded sequences, each under both masks; padded at the end."""

    names: list[tuple[str, str]]
    ids: np.ndarray
    lengths: np.ndarray
    query_slots: np.ndarray
    history_mask: np.ndarray
    history: np.ndarray
    blocks: np.ndarray

    @property
    def tokens(self) -> Tokens:
        slots = np.broadcast_to(np.arange(self.ids.shape[1], dtype=np.int32), self.ids.shape)
        valid = slots < self.lengths[:, None]
        return Tokens(jnp.asarray(slots), jnp.asarray(valid), jnp.asarray(self.blocks))


def sequences(recorded: dict[str, np.ndarray], turns: list[tuple[int, int]]) -> Sequences:
    length = max(len(recorded[f"w{w}_t{t}_input_ids"]) for w, t in turns)
    most = max(len(past_turns(recorded, w, t)) for w, t in turns)
    rows = [(mask, w, t) for mask in MASKS for w, t in turns]
    out = Sequences(
        names=[(mask, f"w{w}_t{t}_") for mask, w, t in rows],
        ids=np.zeros((len(rows), length), np.int32),
        lengths=np.zeros(len(rows), np.int32),
        query_slots=np.zeros((len(rows), 226), np.int32),
        history_mask=np.zeros((len(rows), length), bool),
        history=np.zeros((len(rows), most, 64), np.float32),
        blocks=np.zeros((len(rows), length), np.int32),
    )
    for row, (mask, w, t) in enumerate(rows):
        key = f"w{w}_t{t}_"
        n = out.lengths[row] = len(recorded[key + "input_ids"])
        out.ids[row, :n] = recorded[key + "input_ids"]
        out.query_slots[row] = np.flatnonzero(recorded[key + "query_mask"])
        out.history_mask[row, :n] = recorded[key + "history_mask"]
        past = past_turns(recorded, w, t)
        out.history[row, : len(past)] = past
        if mask == "bidirectional":
            out.blocks[row, :n] = recorded[key + "attention_mask"] == -1
    return out


@pytest.fixture(scope="module")
def answers(mllm, recorded) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """Representations, last logits and greedy ids of every recorded sequence."""
    batch = sequences(recorded, TURNS)

    @jax.jit
    def run(mllm: MLLM, tokens: Tokens, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        b, t = batch["ids"].shape
        x = mllm.embed(batch["ids"], batch["history_mask"], batch["history"])
        cache = make_cache(mllm.config.mistral, b, t + NUM_GREEDY)
        hidden, cache = mllm.mistral(x, tokens, cache)

        def resample(slots: jax.Array) -> jax.Array:
            return mllm.output_resampler(jnp.take_along_axis(hidden, slots[:, :, None], axis=1))

        def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
            logits, position, cache = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            more, cache = mllm.extend(token[:, None], position[:, None], cache)
            return (mllm.mistral.logits(more[:, -1]), position + 1, cache), token

        last = mllm.mistral.logits(hidden[jnp.arange(b), batch["lengths"] - 1])
        _, greedy = jax.lax.scan(step, (last, batch["lengths"], cache), length=NUM_GREEDY)
        return {
            "masked_rep": resample(batch["query_slots"]),
            "released_rep": resample(batch["query_slots"] + 3),
            "last_logits": last,
            "greedy_ids": greedy.T,
        }

    fields = ("ids", "lengths", "query_slots", "history_mask", "history")
    arrays = {name: jnp.asarray(getattr(batch, name)) for name in fields}
    found = jax.device_get(run(mllm, batch.tokens, arrays))
    return {
        name: {quantity: value[row] for quantity, value in found.items()}
        for row, name in enumerate(batch.names)
    }


# --- recorded numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_last_logits(answers, recorded, mask):
    for window, turn in TURNS:
        key = f"w{window}_t{turn}_"
        found, expected = answers[mask, key]["last_logits"], recorded[f"{key}{mask}_last_logits"]
        assert error(found, expected) < 1e-5, key


@pytest.mark.parametrize("name", ["masked_rep", "released_rep"])
def test_representations(answers, recorded, name):
    for window, turn in TURNS:
        key = f"w{window}_t{turn}_"
        found, expected = answers["bidirectional", key][name], recorded[key + name]
        assert error(found, expected) < REPRESENTATION, key


@pytest.mark.parametrize("mask", MASKS)
def test_greedy_ids(answers, recorded, mask):
    for window, turn in TURNS:
        key = f"w{window}_t{turn}_"
        found, expected = answers[mask, key]["greedy_ids"], recorded[f"{key}{mask}_greedy_ids"]
        np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def losses():
    return jax.jit(lambda mllm, batch: mllm.losses(batch))


def game_batch(arrays: dict[str, np.ndarray]) -> GameBatch:
    mask, embeds = arrays["attention_mask"], arrays["turn_embeds"]
    queries = np.stack([np.flatnonzero(row) for row in arrays["query_mask"]])
    return GameBatch(
        ids=jnp.asarray(arrays["input_ids"], jnp.int32),
        tokens=Tokens(
            positions=jnp.asarray(np.maximum(np.cumsum(mask != 0, axis=1) - 1, 0), jnp.int32),
            valid=jnp.asarray(mask != 0),
            blocks=jnp.asarray(mask == -1, jnp.int32),
        ),
        labels=jnp.asarray(arrays["labels"], jnp.int32),
        history_mask=jnp.asarray(arrays["history_mask"]),
        history=jnp.asarray(embeds.reshape(len(embeds), -1, embeds.shape[-1])),
        query_slots=jnp.asarray(queries, jnp.int32),
        target=jnp.asarray(embeds[np.arange(len(mask)), arrays["target_turn"]]),
    )


def test_losses(mllm, losses):
    """A batch padded at the end, of games of two and three turns."""
    arrays = read("training_loss")
    batch = game_batch(arrays)
    language, representation = losses(mllm, batch)
    assert error(language, arrays["lm_loss"]) < 1e-5
    assert error(representation, arrays["rec_loss"]) < 1e-5
    assert error(language + representation, arrays["total_loss"]) < 1e-5
    # Scores where labels stand only.
    slots = np.flatnonzero((arrays["labels"] != IGNORED).any(axis=0))
    few = jax.jit(lambda mllm, batch: mllm.answer_losses(batch, label_slots=slots))(mllm, batch)
    count = (arrays["labels"] != IGNORED).sum()
    np.testing.assert_allclose(few[0].sum() / count, language, rtol=1e-5)
    np.testing.assert_allclose(few[1].mean(), representation, rtol=1e-5)
    none = batch._replace(labels=jnp.full_like(batch.labels, IGNORED))
    language, again = losses(mllm, none)
    assert float(language) == 0
    assert float(again) == float(representation)


def test_padding_of_a_sequence_counts_for_nothing(mllm, monkeypatch):
    """As on a TPU, whose kernel takes whole blocks."""
    batch = game_batch(read("training_loss"))
    alone = jax.jit(lambda mllm, batch: mllm.answer_losses(batch))(mllm, batch)
    monkeypatch.setattr(models_mllm, "padded_length", lambda length: length + 13)
    padded = jax.jit(lambda mllm, batch: mllm.answer_losses(batch))(mllm, batch)
    for found, expected in zip(padded[:2], alone[:2], strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


# --- the slots of fixed size ----------------------------------------------------------------

GAP = 5  # more slots for an instruction than the longest needs


@pytest.fixture(scope="module")
def window_of_3(recorded, token_ids):
    """The four recorded turns with a window of 3, as four games in the slots of `Layout`."""
    captions = []
    for turn in range(4):
        ids = recorded[f"w1_t{turn}_input_ids"]
        captions.append(ids[2 : np.flatnonzero(ids == token_ids.special["<img>"])[0]])
    size = max(map(len, captions)) + GAP
    padded = np.zeros((4, 3, size), np.int32)
    lengths = np.zeros((4, 3), np.int32)
    history = np.zeros((4, 2 * 226, 64), np.float32)
    for turn in range(4):
        for back, t in enumerate(range(turn, max(-1, turn - 3), -1)):
            padded[turn, -1 - back, : len(captions[t])] = captions[t]
            lengths[turn, -1 - back] = len(captions[t])
        past = past_turns(recorded, 3, turn)
        history[turn, len(history[turn]) - len(past) :] = past
    states, count = np.zeros((4, 2, 4), np.int32), np.array([0, 1, 2, 2], np.int32)

    def make(protocol) -> tuple[Layout, Prompt]:
        protocol = dataclasses.replace(protocol, window=3, caption_length=size)
        layout = Layout(protocol, token_ids, num_queries=226, window=3)
        return layout, jax.jit(layout.assemble)(padded, lengths, states, count)

    made = {protocol.name: make(protocol) for protocol in (RELEASED, PAPER)}
    return lambda protocol: made[protocol.name], jnp.asarray(history)


@pytest.fixture(scope="module")
def predicted(mllm, window_of_3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`predict` by either protocol: representations and states of the four turns."""
    lay_out, history = window_of_3
    out = {}
    for protocol in (RELEASED, PAPER):
        layout, prompt = lay_out(protocol)
        run = jax.jit(lambda mllm, *args, layout=layout: mllm.predict(*args, layout))
        out[protocol.name] = jax.device_get(run(mllm, prompt, history))
    return out


def test_slots_with_gaps_are_the_sequence_without(window_of_3, predicted, recorded):
    _, prompt = window_of_3[0](RELEASED)
    for turn in range(4):
        ids = np.asarray(prompt.ids[turn])[np.asarray(prompt.valid[turn])]
        np.testing.assert_array_equal(ids, recorded[f"w3_t{turn}_input_ids"])
    found, _ = predicted["released"]
    for turn in range(4):
        assert error(found[turn], recorded[f"w3_t{turn}_released_rep"]) < REPRESENTATION, turn


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_static_mask_is_what_the_tokens_say(mllm, window_of_3, bidirectional):
    """What the TPU's kernel gets of a prompt: the same for every token that is there."""
    lay_out, history = window_of_3
    layout, prompt = lay_out(PAPER)
    seen = []

    class Spy:
        def __call__(self, x, tokens, cache):
            seen.append(tokens)
            return x, cache

    fake = SimpleNamespace(config=mllm.config, embed=mllm.embed, mistral=Spy())
    type(mllm).prefill(fake, prompt, history, layout, bidirectional=bidirectional, extra_slots=9)
    (tokens,) = seen
    mask = TokenMask(tokens.positions, tokens.positions, tokens.valid, tokens.blocks, tokens.blocks)
    length = prompt.ids.shape[1]
    static = tokens.static.dense(length, length)[None] & np.asarray(tokens.valid)[:, None]
    there = np.asarray(tokens.valid)
    np.testing.assert_array_equal(static[there], np.asarray(mask.dense())[there])
    assert (tokens.static.block_stop > 0) == bidirectional


def test_the_papers_protocol_reads_the_queries(predicted, recorded):
    """Without a history both lay out the same tokens, and differ in where they read."""
    found, _ = predicted["paper"]
    assert error(found[0], recorded["w3_t0_masked_rep"]) < REPRESENTATION
    assert error(found[0], recorded["w3_t0_released_rep"]) > 0.1
    # And with one in a token too: the history's `</ST>` stands there once.
    assert error(found[1], recorded["w3_t1_masked_rep"]) > 1e-3


def test_the_motion_level_comes_from_the_pass_that_the_protocol_says(
    predicted, recorded, token_ids
):
    levels = [token_ids.special[f"<Strength_{level}>"] for level in PAPER.motion_levels]
    for name, mask, turns in (("released", "causal", range(4)), ("paper", "bidirectional", (0,))):
        _, states = predicted[name]
        for turn in turns:
            best = recorded[f"w3_t{turn}_{mask}_last_logits"][levels].argmax()
            assert states[turn, 0] == PAPER.motion_levels[best]


def test_states_are_the_greedy_choice_among_allowed_tokens(
    mllm, window_of_3, predicted, recorded, token_ids
):
    """One token at a time, the forced ones too, and only allowed tokens' scores are looked at."""
    lay_out, history = window_of_3
    layout, prompt = lay_out(RELEASED)

    @jax.jit
    def start(mllm, prompt, history):
        hidden, cache = mllm.prefill(prompt, history, layout, bidirectional=False, extra_slots=9)
        return mllm.mistral.logits(hidden[:, -1]), prompt.positions[:, -1], cache

    @jax.jit
    def extend(mllm, ids, position, cache):
        hidden, cache = mllm.extend(ids[:, None], position[:, None] + 1, cache)
        return mllm.mistral.logits(hidden[:, -1]), position + 1, cache

    logits, position, cache = start(mllm, prompt, history)
    for turn in range(4):
        assert error(logits[turn], recorded[f"w3_t{turn}_causal_last_logits"]) < 1e-5, turn
    chosen = []
    between = [("</ML>", "<SC>"), ("</SC>", "<ET>"), ("</ET>", "<ST>"), ()]
    for values, forced in zip(RELEASED.state_values, between, strict=True):
        allowed = np.array([token_ids.special[f"<Strength_{value}>"] for value in values])
        best = np.asarray(logits)[:, allowed].argmax(axis=1)
        chosen.append(np.array(values)[best])
        following = [allowed[best], *(np.full(4, token_ids.special[token]) for token in forced)]
        for token in following if forced else ():
            logits, position, cache = extend(mllm, jnp.asarray(token, jnp.int32), position, cache)
    np.testing.assert_array_equal(predicted["released"][1], np.stack(chosen, axis=1))


def test_cached_is_uncached(mllm, recorded, answers):
    """Prompt and greedy tokens in one pass without a cache give the greedy tokens again."""
    batch = sequences(recorded, [(1, turn) for turn in range(4)])
    length = batch.ids.shape[1] + NUM_GREEDY
    for name in ("ids", "history_mask", "blocks"):
        array = getattr(batch, name)
        setattr(batch, name, np.pad(array, [(0, 0), (0, length - array.shape[1])]))
    expected = [recorded[f"{key}{mask}_greedy_ids"] for mask, key in batch.names]
    for row, greedy in enumerate(expected):
        start = batch.lengths[row]
        batch.ids[row, start : start + NUM_GREEDY] = greedy
    prompts, batch.lengths = batch.lengths, batch.lengths + NUM_GREEDY

    @jax.jit
    def run(mllm, ids, history_mask, tokens, at):
        x = mllm.embed(ids, history_mask, jnp.zeros((len(ids), 0, 64)))
        hidden, _ = mllm.mistral(x, tokens)
        return mllm.mistral.logits(jnp.take_along_axis(hidden, at[:, :, None], axis=1))

    at = prompts[:, None] - 1 + np.arange(NUM_GREEDY)[None]
    logits = run(mllm, jnp.asarray(batch.ids), jnp.asarray(batch.history_mask), batch.tokens, at)
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), expected)
    for row, name in enumerate(batch.names):
        assert error(logits[row, 0], answers[name]["last_logits"]) < 1e-5, name
