"""The distillation stage: what it trains, what it refuses, and what its result plays."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx
from tiny_games import make_key, make_stage, run
from tiny_stage import one_device

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import UserError
from animegamer_jax.game.player import Player
from animegamer_jax.train.checkpoint import Checkpoints
from animegamer_jax.train.stages.distill import DistillRecipe, DistillStage
from animegamer_jax.train.stages.recipe import OptimizerConfig

RECIPE = DistillRecipe(
    steps=2,
    batch_size=8,
    optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.0),
    student_timesteps=(999, 500),
    guidance=2.0,
    ema_decay=0.9,
)


@pytest.fixture(scope="module")
def stage(bundle) -> DistillStage:
    return make_stage(DistillStage, RECIPE, bundle)


@pytest.fixture(scope="module")
def trained(stage, bundle, batch):
    return run(stage, bundle, batch, steps=2)


def leaves(state: Any, network: str) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for part in (state.params, state.frozen)
        if network in part
        for path, leaf in jax.tree_util.tree_flatten_with_path(part[network])[0]
    }


def test_student_and_fake_network_learn_and_the_teacher_stays(trained):
    before, after, history = trained
    assert set(before.params) == {"dit", "fake"}
    start = leaves(before, "teacher")
    for network in ("dit", "fake", "teacher"):
        old, new = leaves(before, network), leaves(after, network)
        assert old.keys() == new.keys() == start.keys()
        assert all(np.array_equal(old[name], start[name]) for name in old)
        moved = [name for name in old if not np.array_equal(old[name], new[name])]
        assert bool(moved) == (network != "teacher")
        assert not any("positions" in name for name in moved)
    for metrics in history:
        assert metrics["finite"]
        assert metrics["loss"] == pytest.approx(metrics["student"] + metrics["fake"], rel=1e-5)
    assert history[1]["loss"] != history[0]["loss"]


def test_a_resumed_student_is_the_uninterrupted_one(stage, bundle, batch, trained, tmp_path):
    """Student, fake network, both averages and the optimizer are all in a checkpoint."""

    def interrupt(state):
        folder = epath.Path(tmp_path)
        checkpoints = Checkpoints(folder, run_config={}, keep_last=1, best_mode="min")
        checkpoints.save(state, {})
        checkpoints.wait()
        restored, _ = checkpoints.restore(state)
        checkpoints.close()
        return restored

    _, found, history = run(stage, bundle, batch, steps=2, between=interrupt)
    _, expected, whole = trained
    assert history == whole
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_fake_network_learns_at_its_own_rate(trained):
    """In AdamW's first step every weight with a gradient moves by the learning rate."""
    before, after, _ = trained

    def farthest(network: str) -> float:
        old, new = before.params[network], after.params[network]
        return max(
            float(np.abs(a - b).max())
            for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        )

    assert farthest("fake") == pytest.approx(5 * farthest("dit"), rel=0.3)


def test_the_conditions_are_predictions_and_true_shots(stage, networks, batch):
    @jax.jit
    def contexts(networks, batch):
        true = networks["encoder"](batch.game.text[:, -1], batch.game.image[:, -1])
        keys = jax.random.split(make_key(), 50)
        found = jax.lax.map(lambda key: stage.conditions(networks, batch, key).context, keys)
        return found, true, stage.represent(networks, batch)

    found, true, predicted = map(np.asarray, contexts(networks, jax.tree.map(jnp.asarray, batch)))
    is_true = np.isclose(found, true[None], atol=1e-4).all(axis=(2, 3))
    is_predicted = np.isclose(found, predicted[None], atol=1e-4).all(axis=(2, 3))
    assert (is_true ^ is_predicted).all()
    assert is_true.mean() == pytest.approx(0.5, abs=0.1)


def test_where_a_picture_comes_first(stage, bundle, networks, batch):
    """Pictures of predictions by the guided teacher; clips of what E_a sees, without guidance."""
    protocol = dataclasses.replace(bundle.protocol, picture_first=True)
    folder = bundle.tokenizer_dir
    batch = jax.tree.map(jnp.asarray, batch)
    networks = {**networks, "teacher": networks["dit"], "fake": networks["dit"]}

    def run(batch, guidance=2.0, motion=0.0):
        recipe = dataclasses.replace(RECIPE, guidance=guidance)
        taught = dataclasses.replace(protocol, motion_guidance=motion)
        pictured = DistillStage(recipe, bundle.config, taught, tokenizer_dir=folder)
        assert pictured.protocol.picture_first
        assert not pictured.protocol.motion_guidance
        loss = jax.jit(lambda n, b: pictured.loss(n, b, make_key()))
        found, parts = loss(networks, batch)
        np.testing.assert_allclose(found, parts["student"] + parts["fake"], rtol=1e-5)
        return float(parts["student"]), float(parts["fake"]), pictured.sample_flops(networks)

    guided, plain = run(batch), run(batch, guidance=1.0)
    looks = batch.game._replace(image=batch.game.image.at[:, -1].add(1.0))
    other = run(batch._replace(game=looks))
    assert guided[0] != plain[0], "the picture's teacher is guided"
    assert other[:2] != guided[:2], "clips are of what is seen"
    assert stage.sample_flops(networks) < guided[2]
    assert plain[2] < guided[2]
    moved = run(batch, motion=3.0)
    assert moved[0] != guided[0], "the clip's teacher is guided by motion"
    assert moved[2] > guided[2]


def test_a_decoder_of_pictures_gets_a_student_of_its_own(bundle, networks, batch):
    protocol = dataclasses.replace(bundle.protocol, picture_first=True)
    config = dataclasses.replace(bundle.config, picture=bundle.config.dit)
    pictured = DistillStage(RECIPE, config, protocol, tokenizer_dir=bundle.tokenizer_dir)
    assert pictured.configs().keys() == {"dit", "picture"}
    names = ("dit", "fake", "picture", "picture_fake")
    assert pictured.rate_factors().keys() == set(names)
    weight = nnx.Param(jnp.zeros(1))
    assert all(pictured.is_trained(name, ("modulation",), weight) for name in names)
    assert not pictured.is_trained("picture_teacher", ("modulation",), weight)
    copies = dict.fromkeys((*names, "teacher", "picture_teacher"), networks["dit"])
    other = jax.tree.map(lambda x: 1.1 * x, networks["dit"])  # or the student has nothing to learn
    copies |= {"fake": other, "picture_fake": other}
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    @jax.grad
    def gradients(trained, rest):
        return pictured.loss({**rest, **trained}, batch, make_key())[0]

    rest = {name: copies.get(name, network) for name, network in networks.items()} | copies
    trained = {name: rest.pop(name) for name in ("dit", "picture")}
    found = gradients(trained, rest)
    for name in trained:
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(found[name])) > 0


def test_the_result_plays_with_its_own_steps(stage, bundle):
    protocol = stage.protocol
    assert protocol.student_timesteps == (999, 500)
    assert (protocol.denoising_steps, protocol.guidance_scale) == (2, 0.0)
    kept = ("guidance_scale", "denoising_steps", "student_timesteps")
    back = {name: getattr(bundle.protocol, name) for name in kept}
    assert dataclasses.replace(protocol, **back) == bundle.protocol


def test_what_a_look_shows(stage, networks, batch):
    """Clips by the student's own steps, whatever number the recipe names."""
    (pairs,) = stage.evaluate(networks, jax.tree.map(jnp.asarray, batch), make_key()).clips.values()
    assert len(pairs) == RECIPE.eval_clips


def test_steps_that_are_no_path(bundle):
    recipe = dataclasses.replace(RECIPE, student_timesteps=(900, 500))
    with pytest.raises(UserError, match="stage distill: student steps 900, 500: expected training"):
        make_stage(DistillStage, recipe, bundle)


def altered(bundle: Bundle, folder: Any, **changes: Any) -> Bundle:
    """A copy with another `config.json`."""
    shutil.copytree(bundle.path, folder)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            content[name] |= value
        else:
            content[name] = value
    file.write_text(json.dumps(content))
    return Bundle.open(folder)


def test_a_student_is_no_teacher(bundle, tmp_path):
    student = altered(
        bundle,
        tmp_path / "student",
        protocol={"student_timesteps": [999, 500], "guidance_scale": 0.0, "denoising_steps": 2},
    )
    with pytest.raises(UserError, match="is itself a student, with 2 steps: distill the adapted"):
        make_stage(DistillStage, RECIPE, student).load(student, mesh=one_device())


def test_a_student_is_played_by_a_table_of_its_modulation(bundle, tmp_path):
    """Which it needs at its own steps alone; clips are those of the computed one."""
    settings = {"student_timesteps": [999, 500], "guidance_scale": 0.0, "denoising_steps": 2}
    student = Player.from_bundle(altered(bundle, tmp_path / "student", protocol=settings))
    teacher = Player.from_bundle(bundle)
    assert student.networks.dit.table is not None
    assert teacher.networks.dit.table is None
    protocol = student.protocol
    computed = Player(teacher.networks, teacher.tokenizer, protocol)
    for level in protocol.motion_levels[::2]:
        found, expected = (
            player.play_turn(player.start(1), ["wave"], seeds=[3], turn=1, levels=[level])[1]
            for player in (student, computed)
        )
        apart = np.abs(found.frames.astype(int) - expected.frames)
        assert apart.max() <= 1
        assert expected.frames.std() > 5


def test_a_decoder_that_is_not_adapted(bundle, tmp_path):
    early = altered(bundle, tmp_path / "early", stages=["warmup", "decoder", "mllm"])
    with pytest.raises(UserError, match=r"not adapted .*: run `animegamer train adapt` first"):
        make_stage(DistillStage, RECIPE, early).load(early, mesh=one_device())
