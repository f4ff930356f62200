"""What a model shows of known turns, and histories made of it."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_games import batch_of, make_key, make_stage, write_model
from tiny_sets import write_features_set

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import SHOWN, open_features
from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import (
    GameState,
    Networks,
    decode_clip,
    denoise_clip,
    draw_picture,
    game_keys,
    start_clip,
)
from animegamer_jax.game.rollout import turn_keys as keys_of
from animegamer_jax.models.encoder import ShotNetworks
from animegamer_jax.models.mllm import GameBatch
from animegamer_jax.train import command
from animegamer_jax.train.stages import shown_clips
from animegamer_jax.train.stages.adapt import AdaptRecipe, AdaptStage
from animegamer_jax.train.stages.base import DataSource
from animegamer_jax.train.stages.mllm import MLLMRecipe, MLLMStage
from animegamer_jax.train.stages.recipe import OptimizerConfig

STEPS = 2
RECIPE = MLLMRecipe(
    steps=2,
    batch_size=4,
    optimizer=OptimizerConfig(learning_rate=1e-3),
    lora_dropout=0.0,
    history_shown=0.5,
    starts="game",
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, networks=("mllm", "encoder", "dit", "vae", "clip"))


@pytest.fixture(scope="module")
def features(tmp_path_factory, bundle) -> str:
    """Two games of five turns with what the model shows: batches of 4, the last one short."""
    folder = write_features_set(tmp_path_factory.mktemp("features") / "set", 2)
    status = command.shown(model=str(bundle.path), data=str(folder), steps=STEPS, batch=4)
    assert status == 0
    return str(folder)


def test_the_features_are_those_of_the_clip_that_the_model_plays(bundle, features):
    opened = open_features(features)
    turns, shown = opened.turns("train"), opened.shown("train")
    assert len(shown) == len(turns) == 10
    written = json.loads((Path(features) / SHOWN / "set.json").read_text())
    assert (written["decoder"], opened.info.decoder) == (bundle.digest("dit"), None)
    number = 9
    turn = turns[number]
    networks = {name: bundle.load(name) for name in ("clip", "encoder", "dit", "vae")}
    features = (
        np.asarray(turn[f"{name}_features"][None], np.float32) for name in ("text", "image")
    )
    shot = jax.jit(lambda encoder, *features: encoder(*features))(networks["encoder"], *features)
    motion = bundle.protocol.motion_values[turn["motion_level"] - 1]
    state = GameState(shot, jnp.zeros((1, 4), jnp.int32), jnp.array([motion]))
    keys = keys_of(
        game_keys([shown_clips.SEED + int(turn["game"])]), jnp.asarray(int(turn["turn"]) + 1)
    )
    table = diffusion.make_sampler_table(diffusion.schedule_of(bundle.protocol), STEPS)
    empty = networks["encoder"].unconditional() if bundle.protocol.guidance_scale else None

    @jax.jit
    def see(networks, state, keys):
        dit = networks["dit"]
        clip = denoise_clip(dit, empty, state, start_clip(dit, keys), table, keys).x
        frames, _ = decode_clip(networks["vae"], clip)
        return networks["clip"].see(frames[:, 0])[0]

    wanted = see(networks, state, keys)
    found = shown[number]
    assert (found["game"], found["turn"]) == (turn["game"], turn["turn"])
    spread = np.abs(np.asarray(wanted)).max()
    np.testing.assert_allclose(found["image_features"], wanted, atol=0.02 * spread)
    others = np.asarray(shown[0]["image_features"], np.float32)
    assert np.abs(others - found["image_features"]).max() > 0.1 * spread


def test_where_a_picture_comes_first_it_is_what_is_shown(bundle, tmp_path):
    """As in play, with guidance; nothing else of the clip is made."""
    protocol = dataclasses.replace(bundle.protocol, picture_first=True, guidance_scale=20.0)
    pictured = Bundle(bundle.path, dataclasses.replace(bundle.info, protocol=protocol))
    folder = write_features_set(tmp_path / "set", 1)
    opened = open_features(folder)
    shown_clips.write_shown(opened, bundle=pictured, steps=STEPS, batch_size=4)
    networks = {name: bundle.load(name) for name in ("clip", "encoder", "dit", "vae")}
    shot = ShotNetworks(networks["clip"], networks["encoder"])
    table = diffusion.make_sampler_table(diffusion.schedule_of(protocol), STEPS)
    empty = networks["encoder"].unconditional()
    turn = opened.turns("train")[3]
    features = (
        jnp.asarray(turn[f"{name}_features"][None], jnp.float32) for name in ("text", "image")
    )
    motion = protocol.motion_values[turn["motion_level"] - 1]
    state = GameState(shot.encoder(*features), jnp.zeros((1, 4), jnp.int32), jnp.array([motion]))
    keys = keys_of(game_keys([shown_clips.SEED + int(turn["game"])]), jnp.asarray(4))
    found = opened.shown("train")[3]["image_features"]

    def wanted(unconditional: jax.Array | None) -> np.ndarray:
        parts = Networks(cast(Any, None), networks["dit"], networks["vae"], unconditional, shot)
        return np.asarray(
            networks["clip"].see(draw_picture(parts, state, table, keys).frame[:, 0])[0]
        )

    spread = np.abs(wanted(empty)).max()
    np.testing.assert_allclose(found, wanted(empty), atol=0.02 * spread)
    assert np.abs(found - wanted(None)).max() > 0.1 * spread


def test_a_share_of_past_turns_is_as_shown_and_no_target(bundle, features):
    """Each turn for itself, so that a player's true picture stands before shown turns too."""
    stage = make_stage(MLLMStage, RECIPE, bundle)
    encoder = bundle.load("encoder")
    batch = jax.tree.map(jnp.asarray, batch_of(stage, features, 10))
    found = jax.jit(stage.make_batch)(encoder, batch, make_key())
    calm = make_stage(MLLMStage, dataclasses.replace(RECIPE, history_shown=0.0), bundle)
    make_calm = jax.jit(calm.make_batch)
    true = make_calm(encoder, batch, make_key())
    seen = make_calm(encoder, batch._replace(image=batch.shown), make_key())
    np.testing.assert_allclose(found.target, true.target, atol=1e-5)
    count = stage.layout.num_queries

    def is_like(other: GameBatch) -> np.ndarray:
        near = jnp.isclose(found.history, other.history, atol=1e-5)
        return np.asarray(near.reshape(10, stage.layout.window - 1, count, -1).all((2, 3)))

    present = [row for row in range(10) if batch.num_history[row] >= stage.layout.window - 1]
    as_shown, as_true = is_like(seen)[present], is_like(true)[present]
    assert (as_shown != as_true).all()
    assert 0 < as_shown.mean() < 1
    assert (as_shown[:, 0] != as_shown[:, -1]).any()


def test_the_adaptation_predicts_from_shown_histories(bundle, features):
    """With --history-shown 1 its predictions are those of play; its evaluation's are not."""
    recipe = AdaptRecipe(
        steps=2,
        batch_size=4,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        context_dropout=0.0,
        trained="all",
        history_shown=1.0,
    )
    stage = make_stage(AdaptStage, recipe, bundle)
    networks = {name: bundle.load(name) for name in ("mllm", "encoder")}
    batch = jax.tree.map(jnp.asarray, batch_of(stage, features, 10))
    game = batch.game
    assert game.shown.shape == game.image.shape

    predict = jax.jit(stage.represent)
    true = predict(networks, batch)
    seen = predict(networks, batch._replace(game=game._replace(image=game.shown)))
    trained = jax.jit(stage.conditions)(networks, batch, make_key()).context
    np.testing.assert_allclose(trained, seen, atol=1e-4)
    has_history = np.asarray(game.num_history) > 0
    assert (np.abs(np.asarray(trained - true)).max((1, 2)) > 1e-3)[has_history].all()
    assert stage.sample_spec().game.shown.shape[1] > 0


def test_what_another_decoder_showed_is_refused(bundle, features, tmp_path):
    """But an adapted decoder reads what the one before it showed."""
    data = (DataSource(features),)
    stage = make_stage(MLLMStage, RECIPE, bundle)
    stage.check_sources(bundle, data)
    other = write_model(tmp_path, networks=("encoder", "dit"), seed=1)
    assert other.digest("dit") != bundle.digest("dit")
    with pytest.raises(UserError, match=r"shown: made by another decoder than that of .*: remove"):
        stage.check_sources(other, data)
    calm = make_stage(MLLMStage, dataclasses.replace(RECIPE, history_shown=0.0), bundle)
    calm.check_sources(other, data)
    info = dataclasses.replace(other.info, stages=("mllm", "adapt"))
    stage.check_sources(Bundle(other.path, info), data)
    with pytest.raises(UserError, match="not a dataset"):
        stage.check_sources(bundle, (DataSource(str(tmp_path)),))


def test_turns_of_which_nothing_is_shown_keep_their_features(bundle, tmp_path):
    folder = write_features_set(tmp_path / "set", 2)
    model = str(bundle.path)
    assert command.shown(model=model, data=str(folder), turns=8, steps=STEPS, batch=4) == 0
    opened = open_features(folder)
    turns, shown = opened.turns("train"), opened.shown("train")
    assert (len(shown), len(turns)) == (8, 10)
    samples = make_stage(MLLMStage, RECIPE, bundle).read_samples(str(folder), split="train")
    sample = samples[9]
    assert len(sample.shown) == sample.num_history + 1 == 3
    for place, row in zip(range(7, 10), sample.shown, strict=True):
        wanted = (shown if place < 8 else turns)[place]["image_features"]
        np.testing.assert_array_equal(row, wanted.astype(np.float32))


def test_held_out_turns_are_read_as_they_were(bundle, tmp_path):
    folder = write_features_set(tmp_path / "set", 1, splits=("train", "test"))
    stage = make_stage(MLLMStage, RECIPE, bundle)
    samples = stage.read_samples(str(folder), split="test")
    assert samples[0].shown.shape[1] == 0
    batch = jax.tree.map(lambda *rows: jnp.stack(rows), *(samples[i] for i in range(4)))
    encoder = bundle.load("encoder")
    found = jax.jit(stage.make_batch)(encoder, batch, make_key())
    calm = make_stage(MLLMStage, dataclasses.replace(RECIPE, history_shown=0.0), bundle)
    true = jax.jit(calm.make_batch)(encoder, batch, make_key())
    np.testing.assert_array_equal(found.history, true.history)


def test_what_is_missing_is_named(bundle, features, tmp_path, monkeypatch):
    plain = write_features_set(tmp_path / "plain", 1)
    with pytest.raises(UserError, match=r"shown: not a dataset: expected a folder with set.json"):
        make_stage(MLLMStage, RECIPE, bundle).read_samples(str(plain), split="train")
    blind = write_model(tmp_path / "blind", networks=("encoder", "dit", "vae"))
    with pytest.raises(UserError, match=r"no network clip, which a model needs to show turns"):
        shown_clips.write_shown(open_features(plain), bundle=blind)
    for name in ("steps", "turns"):
        with pytest.raises(UserError, match=rf"--{name}: expected 1 or more, found 0"):
            command.shown(model=str(bundle.path), data=str(plain), **{name: 0})
    (tmp_path / "plain" / SHOWN).symlink_to(f"{features}/{SHOWN}")
    with pytest.raises(UserError, match=r"expected at most 5 turns, as the features have, found"):
        open_features(plain).shown("train")
    other = shutil.copytree(features, tmp_path / "other")
    info = json.loads((other / SHOWN / "set.json").read_text())
    info["features"]["bundle"] = "another model"
    (other / SHOWN / "set.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"shown: made of other features than .*: remove it"):
        open_features(other).shown("train")


def test_an_unfinished_set_is_continued(bundle, tmp_path, monkeypatch):
    folder = write_features_set(tmp_path / "set", 2)
    monkeypatch.setattr(shown_clips, "shard_size_for", lambda count: 4)
    made = shown_clips._ClipMaker.records
    calls = []

    def records(self, turns):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(self, turns)

    monkeypatch.setattr(shown_clips._ClipMaker, "records", records)
    for again in (False, True):
        try:
            shown_clips.write_shown(open_features(folder), bundle=bundle, steps=STEPS, batch_size=4)
        except KeyboardInterrupt:
            assert not again
    assert len(calls) == 4  # the first shard was not made again
    assert len(open_features(folder).shown("train")) == 10
