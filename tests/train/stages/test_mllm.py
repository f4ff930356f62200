"""The language model's stage: its sequences, what it trains, its loss, its scores."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_games import make_key, make_stage, run, write_model
from tiny_sets import write_features_set
from tiny_stage import arrays, one_device

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import MistralConfig
from animegamer_jax.data.windows import GameSample
from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import (
    GameState,
    Instruction,
    advance,
    empty_window,
)
from animegamer_jax.models.mllm import IGNORED, MLLM
from animegamer_jax.protocol import RELEASED, STATE_NAMES
from animegamer_jax.sharding import make_mesh
from animegamer_jax.train.stages.base import DataSource
from animegamer_jax.train.stages.caption_heads import HEADS, make_heads, naming_error, new_captions
from animegamer_jax.train.stages.games import choose_turns, lay_out
from animegamer_jax.train.stages.mllm import RECIPES, MLLMRecipe, MLLMStage, forget_words
from animegamer_jax.train.stages.packing import window_ends
from animegamer_jax.train.stages.recipe import OptimizerConfig

RECIPE = MLLMRecipe(
    steps=4,
    batch_size=8,
    optimizer=OptimizerConfig(learning_rate=3e-3),
    lora_dropout=0.2,
    history_noise=0.3,
    word_dropout=0.1,
)
CALM = dataclasses.replace(RECIPE, lora_dropout=0.0, history_noise=0.0, word_dropout=0.0)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    return write_features_set(tmp_path_factory.mktemp("features") / "set", 4)


@pytest.fixture(scope="module")
def stage(bundle) -> MLLMStage:
    return make_stage(MLLMStage, CALM, bundle)


# --- sequences ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(stage, networks, batch) -> dict[str, Any]:
    """What play answers, and the training pass over the sequences that say the same."""

    @jax.jit
    def run(mllm: MLLM, encoder, game):
        prompts = lay_out(encoder, game, stage.layout)
        found, states = mllm.predict(prompts.prompt, prompts.history, stage.layout)
        own = game._replace(states=game.states.at[:, -1].set(states))
        sequences = stage.make_batch(encoder, own, make_key())
        x = mllm.embed(sequences.ids, sequences.history_mask, sequences.history)
        hidden, _ = mllm.mistral(x, sequences.tokens)
        return {
            "states": states,
            "representation": found,
            "alone": mllm.represent(prompts.prompt, prompts.history, stage.layout),
            "logits": mllm.mistral.logits(hidden[:, stage.layout.answers - 1]),
            "trained": mllm.output_resampler(hidden[:, stage.layout.queries]),
            "sequences": sequences,
            "prompt": prompts.prompt,
            "representations": prompts.representations,
        }

    game = jax.tree.map(jnp.asarray, batch)
    return jax.device_get(run(networks["mllm"], networks["encoder"], game))


def test_the_training_pass_is_plays(stage, played):
    """The states that decoding chooses are the best ones under teacher forcing as well."""
    assert len(np.unique(played["states"], axis=0)) > 1
    for number, (allowed, values) in enumerate(
        zip(stage.layout.allowed, stage.layout.values, strict=True)
    ):
        real = allowed >= 0
        best = played["logits"][:, number][:, allowed[real]].argmax(axis=1)
        np.testing.assert_array_equal(values[real][best], played["states"][:, number])
    for name in ("trained", "alone"):
        np.testing.assert_allclose(played[name], played["representation"], atol=1e-5)


def test_the_prompt_is_plays(stage, batch, played):
    """Turn by turn through play's own window; then the states with the forced tokens between."""
    layout, sequences = stage.layout, played["sequences"]
    length, width = layout.length, played["representations"].shape[-1]
    push = jax.jit(advance)
    for row in range(8):
        window = empty_window(layout, 1, width)
        count = int(batch.num_history[row])
        for turn in range(-1 - count, -1):
            instruction = Instruction(
                jnp.asarray(batch.captions[row, turn])[None],
                jnp.asarray(batch.caption_lengths[row, turn])[None],
            )
            state = GameState(
                jnp.asarray(played["representations"][row, turn])[None],
                jnp.asarray(batch.states[row, turn])[None],
                jnp.zeros((1,)),
            )
            window = push(window, instruction, state)
        captions = jnp.concatenate([window.captions, batch.captions[row, None, -1:]], axis=1)
        lengths = jnp.concatenate(
            [window.caption_lengths, batch.caption_lengths[row, None, -1:]], axis=1
        )
        prompt = layout.assemble(captions, lengths, window.states, window.num_turns)
        valid = np.asarray(prompt.valid[0])
        np.testing.assert_array_equal(sequences.tokens.valid[row, :length], valid)
        np.testing.assert_array_equal(sequences.tokens.positions[row, :length], prompt.positions[0])
        ids = np.asarray(prompt.ids[0])
        np.testing.assert_array_equal(sequences.ids[row, :length][valid], ids[valid])
        past = np.asarray(window.representations[0]).reshape(-1, width)
        start = len(past) - count * layout.num_queries
        np.testing.assert_allclose(sequences.history[row, start:], past[start:])
    assert set(batch.num_history) == {0, 1, 2}


def test_the_answer_token_by_token(stage, played):
    layout, sequences = stage.layout, played["sequences"]
    special = stage.tokenizer.ids.special
    for row in range(8):
        level, social, entertainment, stamina = (
            special[f"<Strength_{k}>"] for k in played["states"][row]
        )
        between = [special[f"<{name}>"] for name in ("/ML", "SC", "/SC", "ET", "/ET", "ST")]
        expected = [level, *between[:2], social, *between[2:4], entertainment, *between[4:]]
        ids = sequences.ids[row, layout.length :]
        assert ids.tolist() == [*expected, stamina]
        last = sequences.tokens.positions[row, layout.length - 1]
        after = sequences.tokens.positions[row, layout.length :]
        np.testing.assert_array_equal(after, last + 1 + np.arange(10))
        assert sequences.tokens.valid[row, layout.length :].all()
        # Only the four states are labels, and only the frame tokens of this turn see ahead.
        labelled = np.flatnonzero(sequences.labels[row] != IGNORED)
        np.testing.assert_array_equal(labelled, layout.answers)
        assert sequences.labels[row, labelled].tolist() == [level, social, entertainment, stamina]
        np.testing.assert_array_equal(np.flatnonzero(sequences.tokens.blocks[row]), layout.queries)
        np.testing.assert_array_equal(sequences.query_slots[row], layout.queries)


def test_the_target_is_this_turns_representation(networks, batch, played):
    encode = jax.jit(lambda encoder, *arrays: encoder(*arrays))
    expected = encode(networks["encoder"], batch.text[:, -1], batch.image[:, -1])
    np.testing.assert_allclose(played["sequences"].target, expected, atol=1e-5)


# --- every turn as a target -----------------------------------------------------------------


def earlier(game: GameSample, back: int) -> GameSample:
    """The same games with fewer past turns: absent turns come at the front."""

    def shift(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(x[:, :back]), x[:, : x.shape[1] - back]], axis=1)

    moved = GameSample(*(x if x.ndim == 1 else shift(x) for x in game))
    return moved._replace(num_history=game.num_history - back)


def test_a_segment_is_the_turn_alone(bundle, networks, stage, batch):
    """States and representation of every turn of a window, as of that turn's own sequence."""
    every = make_stage(MLLMStage, dataclasses.replace(CALM, targets="every"), bundle)
    layout, packed = stage.layout, every.packed_layout

    def run(stage: MLLMStage, slots: np.ndarray, game: GameSample) -> Any:
        @jax.jit
        def errors(networks, game):
            sequences = stage.make_batch(networks["encoder"], game, make_key())
            return networks["mllm"].answer_losses(sequences, label_slots=slots)

        return jax.device_get(errors(networks, jax.tree.map(jnp.asarray, game)))

    entropy, square, *_ = run(every, packed.answers.ravel(), batch)
    entropy, square = entropy.reshape(8, 3, 4), square.reshape(8, 3, -1)
    present = np.asarray(packed.present(jnp.asarray(batch.num_history)))
    np.testing.assert_array_equal(present.sum(axis=1), batch.num_history + 1)
    for back in range(3):
        alone = run(stage, layout.answers, earlier(batch, back))
        rows = present[:, 2 - back]
        assert rows.any()
        np.testing.assert_allclose(entropy[rows, 2 - back], alone[0][rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(square[rows, 2 - back], alone[1][rows], rtol=1e-4, atol=1e-5)


def test_every_target_of_a_sample_weighs_the_same(bundle, networks, batch):
    """And a turn that is not there nothing, whatever stands in its place."""
    every = make_stage(MLLMStage, dataclasses.replace(CALM, targets="every"), bundle)

    @jax.jit
    def run(networks, game):
        sequences = every.make_batch(networks["encoder"], game, make_key())
        slots = every.packed_layout.answers.ravel()
        errors = networks["mllm"].answer_losses(sequences, label_slots=slots)
        return every.loss(networks, game, make_key()), errors

    game = jax.tree.map(jnp.asarray, batch)
    (loss, parts), (entropy, square, *_) = jax.device_get(run(networks, game))
    present = np.asarray(every.packed_layout.present(jnp.asarray(batch.num_history)))
    for name, errors in (("states", entropy), ("representation", square)):
        turns = errors.reshape(8, 3, -1).mean(axis=2)
        expected = np.mean([row[there].mean() for row, there in zip(turns, present, strict=True)])
        np.testing.assert_allclose(parts[name], expected, rtol=1e-5)
    np.testing.assert_allclose(loss, parts["states"] + parts["representation"], rtol=1e-6)
    absent = (np.arange(3)[None] < 2 - batch.num_history[:, None])[:, :, None]
    other = game._replace(states=jnp.where(absent, 1, game.states))
    (again, _), _ = run(networks, other)
    np.testing.assert_allclose(again, loss, rtol=1e-6)


def test_captions_are_kept_in_games(bundle, networks, features):
    """The third part of the loss is that of --targets captions on the turns that are there."""
    recipe = dataclasses.replace(CALM, targets="every", caption_weight=2.0)
    stage = make_stage(MLLMStage, recipe, bundle)
    data = [DataSource(str(features))]
    samples = stage.samples(data, split="train")
    games = jax.tree.map(lambda *x: jnp.stack(x), *[samples[i] for i in range(len(samples))])
    loss, parts = jax.jit(stage.loss)(networks, games, make_key())
    expected = parts["states"] + parts["representation"] + 2 * parts["captions"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

    alone = make_stage(MLLMStage, dataclasses.replace(CALM, targets="captions"), bundle)
    turns = []
    for game in range(len(games.num_history)):
        for turn in range(3 - 1 - int(games.num_history[game]), 3):
            ids = games.complete[game, turn]
            turns.append(
                GameSample(
                    captions=jnp.maximum(ids, 0)[None],
                    caption_lengths=(ids >= 0).sum()[None].astype(jnp.int32),
                    states=games.states[game, turn][None],
                    num_history=jnp.zeros((), jnp.int32),
                    text=games.text[game, turn][None],
                    image=games.image[game, turn][None],
                    shown=games.shown[game, turn][None],
                    complete=games.complete[game, turn][None, :0],
                    classes=games.classes[game, turn][None],
                )
            )
    batch = jax.tree.map(lambda *x: jnp.stack(x), *turns)
    wanted, _ = jax.jit(alone.loss)(networks, batch, make_key())
    np.testing.assert_allclose(parts["captions"], wanted, rtol=1e-4)
    every = make_stage(MLLMStage, dataclasses.replace(CALM, targets="every"), bundle)
    assert stage.sample_flops(networks) > every.sample_flops(networks)


def test_naming_captions(bundle, networks, features):
    """Heads on past turns, on turns to be predicted and on captions, none of which is kept."""
    data = [DataSource(str(features))]
    parts_of = {}
    for targets in ("every", "last", "captions"):
        recipe = dataclasses.replace(CALM, targets=targets, caption_weight=1.0, naming_weight=0.1)
        stage = make_stage(MLLMStage, recipe, bundle)
        samples = stage.samples(data, split="train")
        games = jax.tree.map(lambda *x: jnp.stack(x), *[samples[i] for i in range(len(samples))])
        spec = stage.sample_spec()
        assert jax.tree.map(lambda x: x.shape[1:], games) == jax.tree.map(lambda x: x.shape, spec)
        assert (games.classes >= 0).sum(axis=2).max() > 1
        loaded = stage.load(bundle, mesh=one_device())
        heads = {name: loaded[name] for name in HEADS if name in loaded}
        loss, parts = jax.jit(stage.loss)(networks | heads, games, make_key())
        named = set(parts) - {"representation", "states", "captions"}
        weights = {name: 0.1 if name in named else 1.0 for name in parts}
        np.testing.assert_allclose(loss, sum(weights[k] * parts[k] for k in parts), rtol=1e-5)
        assert stage.configs().keys() == {"mllm"}
        assert stage.rate_factors().keys() == {"mllm", *heads}
        assert ("turn_end" in heads) == (targets != "captions")  # no past turn ends
        parts_of[targets] = parts
    of_captions = {"representation", "target", "true_shot", "predicted_shot"}
    assert parts_of["captions"].keys() == of_captions
    of_games = {"states", "captions", "history", "turn_end", "caption_target", "caption_shot"}
    assert parts_of["every"].keys() == of_captions | of_games
    assert parts_of["last"].keys() == parts_of["every"].keys()


def test_what_is_written_trains_the_prediction_alone(bundle, networks, features):
    """The reader of predictions learns from true shots only."""
    recipe = dataclasses.replace(CALM, targets="captions", naming_weight=0.1)
    stage = make_stage(MLLMStage, recipe, bundle)
    samples = stage.samples([DataSource(str(features))], split="train")
    turns = jax.tree.map(lambda *x: jnp.stack(x), *[samples[i] for i in range(4)])
    heads = make_heads(stage.mllm_config.mistral, ("history", "target"), seed=0)

    def slopes(networks, turns, part):
        def of(trained):
            mllm, seen = trained
            changed = networks | {"mllm": mllm, "history": seen}
            return stage.loss(changed, turns, make_key())[1][part]

        mllm, seen = nnx.grad(of)((networks["mllm"], networks["history"]))
        parts = {"output": mllm["output_resampler"], "input": mllm["input_resampler"], "head": seen}
        return {name: optax.tree.norm(part) for name, part in parts.items()}

    @nnx.jit
    def both(networks, turns):
        return slopes(networks, turns, "predicted_shot"), slopes(networks, turns, "true_shot")

    written, alone = both(networks | heads, turns)
    assert {name for name, slope in written.items() if slope > 0} == {"output"}
    assert {name for name, slope in alone.items() if slope > 0} == {"input", "head"}


def test_nothing_to_name(bundle, features, monkeypatch):
    """Captions of which each describes one turn, as people write them."""
    monkeypatch.setattr(f"{MLLMStage.__module__}.common_captions", lambda datasets: {})
    recipe = dataclasses.replace(CALM, naming_weight=0.1)
    stage = make_stage(MLLMStage, recipe, bundle)
    with pytest.raises(UserError, match=r"--naming-weight 0\.1: no caption of the data"):
        stage.samples([DataSource(str(features))], split="train")


def test_a_head_reads_any_token():
    """A caption that one token of a turn names is named; turns without weight do not count."""
    head = make_heads(MistralConfig(hidden_size=8), seed=0)["history"]
    head.kernel[...] = jnp.zeros_like(head.kernel[...]).at[3, 5].set(20.0)
    states = jnp.zeros((2, 4, 8)).at[0, 2, 3].set(2.0)
    classes = jnp.array([[5, -1], [5, -1]])
    right = naming_error(head, states, classes, jnp.array([1.0, 0.0]))
    wrong = naming_error(head, states, classes, jnp.array([0.0, 1.0]))
    assert right < 7.5  # the other 1,023, of which each costs what its rarity says
    assert wrong > right + 4


def test_new_captions():
    classes = jnp.array([[[-1, -1], [3, 5], [5, 7], [7, 3]]])
    expected = [[-1, -1], [3, 5], [-1, 7], [-1, -1]]
    np.testing.assert_array_equal(new_captions(classes)[0], expected)


def test_what_is_new_is_not_to_be_named():
    head = make_heads(MistralConfig(hidden_size=8), seed=0)["target"]
    states = jax.random.normal(make_key(), (1, 4, 8))
    known, new, none = jnp.array([[5, -1]]), jnp.array([[5, 9]]), jnp.array([[-1, -1]])
    weight = jnp.ones(1)
    without = naming_error(head, states, new, weight, jnp.array([[-1, 9]]))
    assert without < naming_error(head, states, known, weight)  # nor is it to be left out
    assert without < naming_error(head, states, new, weight)
    same = naming_error(head, states, new, weight, none)
    np.testing.assert_allclose(same, naming_error(head, states, new, weight))


def test_windows_that_hold_every_turn_once(bundle, features):
    games = [5, 3, 1, 7]
    turns = [{"num_turns": count} for count in games for _ in range(count)]
    assert window_ends(turns, 3) == [1, 4, 7, 8, 9, 12, 15]
    every = make_stage(MLLMStage, dataclasses.replace(CALM, targets="every"), bundle)
    found = every.samples([DataSource(str(features))], split="train")
    # Games of five turns in windows of three: turns 0 and 1, then 2 to 4.
    assert [int(found[i].num_history) for i in range(len(found))] == [1, 2] * 4
    both = dataclasses.replace(CALM, targets="every", starts="anywhere")
    with pytest.raises(UserError, match=r"--starts anywhere: expected --starts game with --tar"):
        make_stage(MLLMStage, both, bundle).samples([DataSource(str(features))], split="train")


def test_captions_come_alone(bundle, features, networks):
    """Single turns, of which only the representation is learned; play's window stays as it was."""
    stage = make_stage(MLLMStage, dataclasses.replace(CALM, targets="captions"), bundle)
    samples = stage.samples([DataSource(str(features))], split="train")
    assert len(samples) == 4 * 5
    batch = jax.tree.map(lambda *x: jnp.stack(x), *(samples[i] for i in range(8)))
    spec = stage.sample_spec()
    assert jax.tree.map(lambda x: x.shape[1:], batch) == jax.tree.map(lambda x: x.shape, spec)
    assert batch.captions.shape[1] == 1
    assert not batch.num_history.any()
    loss, parts = jax.jit(stage.loss)(networks, batch, make_key())
    assert parts == {"representation": loss}
    other = batch._replace(states=jnp.roll(batch.states, 1, axis=0))
    assert (other.states != batch.states).any()
    assert stage.evaluate(networks, batch, make_key()).scalars.keys() == {"explained"}
    assert stage.protocol.window == bundle.protocol.window > 1


# --- what is random -------------------------------------------------------------------------


def test_forgotten_words(stage, networks, batch):
    captions = jnp.full((50, 4, 20), 9)
    found = np.asarray(forget_words(captions, make_key(), rate=0.1, unknown=1))
    assert set(np.unique(found)) == {1, 9}
    np.testing.assert_allclose((found == 1).mean(), 0.1, atol=0.02)


def test_swapped_turns():
    """Whole turns become the same turn of other games; the others stay."""
    samples, turns, count = 50, 4, 3
    names = jnp.arange(samples * turns, dtype=jnp.float32).reshape(samples, turns)
    history = jnp.repeat(jnp.repeat(names, count, axis=1)[..., None], 2, axis=2)
    others = jnp.roll(history, 1, axis=0)
    found = np.asarray(choose_turns(history, others, make_key(), rate=0.3, count=count))
    assert (found.reshape(samples, turns, -1).std(axis=-1) == 0).all()
    first = found[:, ::count, 0]
    swapped = first != names
    np.testing.assert_array_equal(first[swapped], np.roll(names, 1, axis=0)[swapped])
    np.testing.assert_allclose(swapped.mean(), 0.3, atol=0.1)


def test_disturbed_histories(bundle, networks, batch, played):
    """Noise of the given size on past turns, none on the target; some words are unknown."""
    stage = make_stage(MLLMStage, RECIPE, bundle)
    make = jax.jit(lambda encoder, game: stage.make_batch(encoder, game, make_key()))
    found = jax.device_get(make(networks["encoder"], jax.tree.map(jnp.asarray, batch)))
    calm = played["sequences"]
    np.testing.assert_allclose((found.history - calm.history).std(), 0.3, rtol=0.1)
    np.testing.assert_array_equal(found.target, calm.target)
    captions = stage.layout.captions.ravel()
    changed = found.ids[:, captions] != calm.ids[:, captions]
    assert 0.02 < changed.mean() < 0.2
    assert set(found.ids[:, captions][changed]) == {stage.tokenizer.id_of("<unk>")}
    swapping = make_stage(MLLMStage, dataclasses.replace(CALM, history_swap=1.0), bundle)
    make = jax.jit(lambda encoder, game: swapping.make_batch(encoder, game, make_key()))
    found = jax.device_get(make(networks["encoder"], jax.tree.map(jnp.asarray, batch)))
    np.testing.assert_array_equal(found.history, np.roll(calm.history, 1, axis=0))
    np.testing.assert_array_equal(found.target, calm.target)


# --- training -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(bundle, batch):
    return run(make_stage(MLLMStage, RECIPE, bundle), bundle, batch, steps=2)


def test_what_the_recipe_trains(trained):
    """LoRA, norms, embeddings and resamplers move; everything else is bit for bit as before."""
    before, after, _ = trained
    frozen = arrays(after.frozen)
    for name, value in arrays(before.frozen).items():
        np.testing.assert_array_equal(frozen[name], value, err_msg=name)
    names = {name.removeprefix("mllm.") for name in arrays(before.params)}
    blocks = "mistral.layers.blocks."
    linears = ("q", "k", "v", "o", "gate", "up", "down")
    assert names == {
        *(f"{blocks}{linear}.lora_{letter}" for linear in linears for letter in "ab"),
        *(f"{blocks}{norm}.scale" for norm in ("attention_norm", "mlp_norm")),
        *("mistral.norm.scale", "mistral.embedding", "mistral.head.kernel"),
        *(
            f"{side}_resampler.{layer}.{leaf}"
            for side in ("input", "output")
            for layer in ("input", "output")
            for leaf in ("kernel", "bias")
        ),
    }
    moved = arrays(after.params)
    for name, value in arrays(before.params).items():
        assert (moved[name] != value).any(), name


def test_eight_devices_give_one_devices_losses(trained, bundle, batch):
    """Dropout, noise and forgotten words are the same wherever they are drawn."""
    stage = make_stage(MLLMStage, RECIPE, bundle)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    _, _, found = run(stage, bundle, batch, steps=2, mesh=mesh)
    for a, b in zip(trained[2], found, strict=True):
        for name in ("loss", "states", "representation", "grad_norm"):
            np.testing.assert_allclose(b[name], a[name], rtol=1e-4)


def test_the_loss_falls(tmp_path, batch):
    """All weights of a new language model, on one batch."""
    recipe = dataclasses.replace(CALM, trained="all", alpha=0.5)
    without = write_model(tmp_path, networks=("encoder",))
    stage = make_stage(MLLMStage, recipe, without)
    before, after, history = run(stage, without, batch, steps=25)
    assert not [name for name in arrays(before.frozen) if name.startswith("mllm.")]
    assert history[-1]["states"] < 0.5 * history[0]["states"]
    assert history[-1]["representation"] < history[0]["representation"]
    for metrics in history:
        total = metrics["states"] + 0.5 * metrics["representation"]
        np.testing.assert_allclose(metrics["loss"], total, rtol=1e-6)
    kernel = before.params["mllm"]["output_resampler"]["input"]["kernel"][...]
    np.testing.assert_allclose(np.std(kernel), 32**-0.5, rtol=0.1)
    assert set(stage.configs()) == {"mllm"}
    moved = arrays(after.params)
    for name, value in arrays(before.params).items():
        assert (moved[name] != value).any(), name


def test_scores(stage, networks, batch, played):
    """A model is right about its own answers; of others, as often as counted."""
    found = stage.evaluate(networks, batch, make_key()).scalars
    truth = batch.states[:, -1]
    for number, name in enumerate(STATE_NAMES):
        expected = (played["states"][:, number] == truth[:, number]).mean()
        np.testing.assert_allclose(found[f"accuracy_{name}"], expected)
    own = batch._replace(
        states=np.concatenate([batch.states[:, :-1], played["states"][:, None]], 1)
    )
    again = stage.evaluate(networks, own, make_key()).scalars
    assert again["accuracy"] == 1
    assert found["accuracy"] < 1
    error = np.square(played["representation"] - played["sequences"].target).mean()
    explained = 1 - error / played["sequences"].target.var(axis=0, ddof=1).mean()
    np.testing.assert_allclose(found["explained"], explained, rtol=1e-4)


def test_operations_of_a_step(bundle, stage, networks):
    """4 operations a weight and token, 2 more where the weight is trained; 12 a score."""
    length, queries, width = stage.layout.length + 10, 7, 32
    attention = 2 * width * width + 2 * width * 16
    low_rank = 2 * (2 * 2 * width + 2 * (width + 16) + 3 * (width + 64))
    matrices = 2 * (attention + 3 * width * 64 + low_rank)
    resamplers = 2 * width * width * queries * (2 + 1)
    head = 4 * width * stage.config.mllm.mistral.vocab_size
    scores = 2 * length**2 * width
    expected = 4 * matrices * length + 6 * (head + resamplers) + 12 * scores
    assert stage.sample_flops(networks) == expected
    everything = make_stage(MLLMStage, dataclasses.replace(CALM, trained="all"), bundle)
    assert everything.sample_flops(networks) == expected + 2 * matrices * length
    every = make_stage(MLLMStage, dataclasses.replace(CALM, targets="every"), bundle)
    assert every.packed_layout.length == length + 2 * (queries + 3 + 10)
    assert 1 < every.sample_flops(networks) / expected < 3


# --- what is refused ------------------------------------------------------------------------


def refusal(stage: MLLMStage, bundle: Bundle) -> str:
    with pytest.raises(UserError) as caught:
        stage.load(bundle, mesh=one_device())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_pre_trained_to_adapt(tmp_path):
    new = write_model(tmp_path, networks=("encoder",))
    stage = make_stage(MLLMStage, RECIPE, new)
    assert "this one is new: give --trained all" in refusal(stage, new)


def test_no_low_rank_updates(bundle):
    mistral = dataclasses.replace(bundle.config.mllm.mistral, lora=None)
    mllm = dataclasses.replace(bundle.config.mllm, mistral=mistral)
    config = dataclasses.replace(bundle.config, mllm=mllm)
    stage = MLLMStage(RECIPE, config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)
    assert "this one has no low-rank updates" in refusal(stage, bundle)


def test_a_model_of_the_released_protocol(bundle):
    stage = MLLMStage(RECIPE, bundle.config, RELEASED, tokenizer_dir=bundle.tokenizer_dir)
    assert "expected a model with protocol paper, found released" in refusal(stage, bundle)


def test_recipes():
    """The paper, section 4.1 and the code base that it grew from."""
    full = RECIPES["full"]
    o = full.optimizer
    assert (full.steps, full.batch_size % 16, full.alpha, full.lora_dropout) == (15_000, 0, 1, 0.05)
    assert (o.learning_rate, o.b1, o.b2, o.eps, o.weight_decay) == (5e-5, 0.9, 0.98, 1e-6, 0.05)
    assert (o.warmup_steps, o.decay, o.final_fraction, o.clip_norm) == (500, "cosine", 0.05, 1.0)
    assert (full.trained, full.targets, RECIPES["toy"].trained) == ("recipe", "last", "all")
