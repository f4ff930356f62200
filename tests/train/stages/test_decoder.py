"""Warm-up and joint stage: their loss, what they train, what they drop, and what they show."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_sets
from flax import nnx
from random_modules import build
from tiny_games import batch_of, make_key, make_stage, run, write_model
from tiny_stage import arrays, one_device

from animegamer_jax.bundle.bundle import (
    Bundle,
    abstract_params,
)
from animegamer_jax.convert.rules import convert
from animegamer_jax.convert.sources import open_torch
from animegamer_jax.convert.tables import dit as dit_table
from animegamer_jax.convert.tables import encoder as encoder_table
from animegamer_jax.errors import UserError
from animegamer_jax.sharding import make_mesh
from animegamer_jax.train.stages import decoder
from animegamer_jax.train.stages.decoder import (
    DecoderRecipe,
    DecoderStage,
    WarmupStage,
    diffusion_loss,
    drawn_loss,
    drop_conditions,
    spread_timesteps,
)
from animegamer_jax.train.stages.recipe import OptimizerConfig
from animegamer_jax.train.step import split_networks

RECORDED = Path(__file__).parents[2] / "reference" / "vdm"
RECIPE = DecoderRecipe(
    steps=10,
    batch_size=8,
    optimizer=OptimizerConfig(learning_rate=1e-2, clip_norm=0.1),
    eval_clips=2,
    eval_sampling_steps=2,
)
CALM = dataclasses.replace(RECIPE, both_dropout=0.0, text_dropout=0.0, image_dropout=0.0)


@pytest.fixture(scope="module")
def features(tmp_path_factory) -> Path:
    return tiny_sets.write_features_set(tmp_path_factory.mktemp("features") / "set", 2)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, networks=("encoder", "dit", "vae"))


@pytest.fixture(scope="module")
def stage(bundle) -> DecoderStage:
    return make_stage(DecoderStage, RECIPE, bundle)


@pytest.fixture(scope="module")
def batch(stage, features) -> Any:
    return jax.tree.map(jnp.asarray, batch_of(stage, features, 8))


# --- the loss -------------------------------------------------------------------------------


def test_recorded_losses():
    """The released code's loss of each sample, under the encoder's context and the MLLM's."""
    source = open_torch(RECORDED / "1" / "mp_rank_00_model_states.pt")
    source = source.under("model.diffusion_model.")
    dit_config = dit_table.infer_config(source.shapes, latent_height=8, latent_width=12)
    encoder_config = encoder_table.infer_config(source.shapes)
    dit, encoder = (
        build(name, config, convert(table.rules(config), source, abstract_params(name, config)))
        for name, table, config in (
            ("dit", dit_table, dit_config),
            ("encoder", encoder_table, encoder_config),
        )
    )
    with np.load(RECORDED / "diffusion_loss.npz") as file:
        recorded = {name: jnp.asarray(value) for name, value in file.items()}
    with np.load(RECORDED / "dit_forward.npz") as file:
        forward = {name: jnp.asarray(value) for name, value in file.items()}
    contexts = {
        "loss_encoder": jax.jit(lambda e, *x: e(*x))(encoder, forward["text"], forward["clip"]),
        "loss_mllm": forward["mllm_train"][:, 0],
    }
    loss = jax.jit(diffusion_loss)
    for name, context in contexts.items():
        found = loss(
            dit,
            jnp.moveaxis(recorded["clean"], -3, -1),
            context=context,
            motion=recorded["flow"],
            noise=jnp.moveaxis(recorded["noise"], -3, -1),
            timestep=recorded["idx"].astype(jnp.int32),
        )
        np.testing.assert_allclose(found, recorded[name], rtol=1e-5)


def test_timesteps_are_spread():
    """One from each part of 0..999, anywhere in it, and never 1000."""
    draw = jax.jit(spread_timesteps, static_argnums=1)
    drawn = np.stack([draw(jax.random.key(seed), 10) for seed in range(200)])
    parts = drawn - 100 * np.arange(10)
    assert parts.min() == 0
    assert parts.max() == 99
    assert 45 < parts.mean() < 54
    assert drawn.dtype == np.int32


def test_shifted_timesteps_are_noisier():
    """By the formula of the shift, in order; a shift of 1 changes nothing."""
    draw = jax.jit(spread_timesteps, static_argnums=1, static_argnames="shift")
    drawn, shifted, same = (
        draw(jax.random.key(0), 1000, **shift) for shift in ({}, {"shift": 5.0}, {"shift": 1.0})
    )
    np.testing.assert_array_equal(same, drawn)
    assert np.all(np.diff(shifted) >= 0)
    assert shifted.max() == 999
    place = 5 * 0.2 / (1 + 4 * 0.2)  # a fifth of the samples has less noise than this
    assert abs(np.mean(np.asarray(shifted) < 1000 * place) - 0.2) < 0.01


def test_dropout_rates_hold():
    count = 40_000
    recipe = dataclasses.replace(RECIPE, both_dropout=0.2, text_dropout=0.3, image_dropout=0.1)
    text, image = jnp.ones((count, 2, 1)), jnp.ones((count, 3, 1))
    kept = drop_conditions(text, image, jax.random.key(0), recipe=recipe)
    text, image = (np.asarray(x) for x in kept)
    assert all((x.min(1) == x.max(1)).all() for x in (text, image))  # a whole row, or nothing
    no_text, no_image = text[:, 0, 0] == 0, image[:, 0, 0] == 0
    assert no_text.mean() == pytest.approx(0.2 + 0.8 * 0.3, abs=0.01)
    assert no_image.mean() == pytest.approx(0.2 + 0.8 * 0.1, abs=0.01)
    assert (no_text & no_image).mean() == pytest.approx(0.2 + 0.8 * 0.3 * 0.1, abs=0.01)
    text, image = jnp.ones((8, 2, 1)), jnp.ones((8, 3, 1))
    assert all(bool(x.all()) for x in drop_conditions(text, image, make_key(), recipe=CALM))


def test_latents_are_scaled(stage, networks, batch):
    """Latents half as large with a factor twice as large are the same to the decoder."""
    context, motion = jnp.ones((8, 7, 32)), jnp.ones(8)
    config = stage.vae_config
    factors = [dataclasses.replace(config, scaling_factor=f) for f in (0.7, 1.4)]

    @jax.jit
    def both(dit, moments, key):
        mean, _ = jnp.split(moments, 2, axis=-1)
        certain = jnp.full_like(mean, -1e9)  # no variance
        halves = (jnp.concatenate([mean * x, certain], axis=-1) for x in (1.0, 0.5))
        return [
            drawn_loss(dit, m, jax.random.clone(key), vae_config=c, context=context, motion=motion)
            for m, c in zip(halves, factors, strict=True)
        ]

    whole, half = both(networks["dit"], batch.moments, make_key())
    np.testing.assert_allclose(whole, half, rtol=1e-5)
    assert config.scaling_factor == 0.7


def test_pictures_are_first_frames_drawn_several_times(bundle, networks, batch):
    """Later frames do not matter; each draw has another noise, at another diffusion step."""
    stage = make_stage(DecoderStage, dataclasses.replace(CALM, pictures=3), bundle)
    loss = jax.jit(lambda networks, batch, key: stage.loss(networks, batch, key)[0])
    found = loss(networks, batch, make_key())
    changed = batch._replace(moments=batch.moments.at[:, 1:].set(7.0))
    assert loss(networks, changed, make_key()) == found
    other = batch._replace(moments=batch.moments.at[:, :1].set(7.0))
    assert loss(networks, other, make_key()) != found
    context, motion = jnp.ones((8, 7, 32)), jnp.ones(8)
    drawn = jax.jit(
        lambda dit, moments, key: drawn_loss(
            dit, moments, key, vae_config=stage.vae_config, context=context, motion=motion, draws=3
        )
    )(networks["dit"], batch.moments[:, :1], make_key())
    assert drawn.shape == (24,)
    assert len(np.unique(drawn)) == 24
    assert stage.evaluate(networks, batch, make_key()).clips == {}
    clips = make_stage(DecoderStage, CALM, bundle)
    assert stage.sample_flops(networks) < 3 * clips.sample_flops(networks)


# --- what is trained ------------------------------------------------------------------------


def _moved(before: Any, after: Any) -> dict[str, bool]:
    old, new = arrays(before), arrays(after)
    return {name: bool((old[name] != new[name]).any()) for name in old}


@pytest.mark.parametrize("kind", [DecoderStage, WarmupStage])
def test_steps(bundle, networks, batch, kind):
    """Frozen weights stay bit for bit, all trained ones move, and the loss of the batch falls.

    On eight devices, whose first loss is that of one.
    """
    stage = make_stage(kind, CALM, bundle)
    loss = jax.jit(lambda networks, batch, key: stage.loss(networks, batch, key)[0])
    alone = loss(networks, batch, jax.random.fold_in(make_key(), 0))
    before, after, history = run(stage, bundle, batch, steps=6, mesh=make_mesh())
    assert history[0]["loss"] == pytest.approx(float(alone), rel=1e-5)
    assert not any(_moved(before.frozen, after.frozen).values())
    moved = _moved(before.params, after.params)
    assert all(moved.values()), [name for name, m in moved.items() if not m]
    losses = np.array([step["loss"] for step in history])
    assert losses[-3:].mean() < losses[:3].mean()


def test_trained_sets(bundle, networks):
    """Warm-up, joint stage, and joint stage with everything, positions too."""
    both = {name: networks[name] for name in ("encoder", "dit")}
    for trained in ("recipe", "all"):
        warm = make_stage(WarmupStage, dataclasses.replace(RECIPE, trained=trained), bundle)
        names = {".".join(n.split(".")[:2]) for n in arrays(split_networks(both, warm)[1])}
        encoder = {f"encoder.{part}" for part in ("text", "image", "text_norm", "image_norm")}
        assert names == encoder | {"dit.motion_embed"}
    stage = make_stage(DecoderStage, RECIPE, bundle)
    joint = set(arrays(split_networks(networks, stage)[1]))
    assert {".".join(name.split(".")[:2]) for name in joint} == names | {"dit.layers"}
    found = {name for name in joint if "dit.layers" in name}
    assert {name.split(".")[3] for name in found} == {"qkv", "out", "modulation"}
    assert all(".modulation." in name or "lora" in name for name in found)
    everything = make_stage(DecoderStage, dataclasses.replace(RECIPE, trained="all"), bundle)
    frozen = {n for n in arrays(split_networks(networks, everything)[2]) if n[:4] != "vae."}
    assert frozen == {"encoder.output_norm.bias", "encoder.output_norm.scale"}


def test_needs_and_changes():
    assert set(DecoderStage.needs) == {"vae", "encoder", "dit"}
    assert DecoderStage.needs["encoder"] == WarmupStage.name
    assert set(WarmupStage.needs) == {"vae", "dit"}
    assert set(WarmupStage.changes) == set(DecoderStage.changes) == {"encoder", "dit"}
    full = decoder.RECIPES["full"], decoder.WARMUP_RECIPES["full"]
    assert [(r.steps, r.optimizer.learning_rate) for r in full] == [(80_000, 2e-4), (10_000, 2e-4)]
    assert {(r.optimizer.clip_norm, r.optimizer.b2, r.ema_decay) for r in full} == {
        (0.1, 0.95, 0.9999)
    }


def test_warmup_makes_the_encoder(bundle, tmp_path, batch):
    """From a bundle without one, of the recipe's seed; a bundle's own is taken."""
    bare = write_model(tmp_path, networks=("dit", "vae"))
    config = dataclasses.replace(bundle.config)

    def load(source: Bundle, seed: int) -> dict[str, np.ndarray]:
        recipe = dataclasses.replace(RECIPE, seed=seed)
        stage = WarmupStage(recipe, config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)
        return arrays(nnx.state(stage.load(source, mesh=one_device())["encoder"]))

    first, other, own = load(bare, 0), load(bare, 1), load(bundle, 0)
    name = "text.input.kernel"
    assert (first[name] != other[name]).any()
    np.testing.assert_array_equal(own[name], bundle.read("encoder", name))


def test_low_rank_updates_are_needed(bundle):
    config = dataclasses.replace(
        bundle.config, dit=dataclasses.replace(bundle.config.dit, lora=None)
    )
    stage = DecoderStage(RECIPE, config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)
    with pytest.raises(UserError, match="--trained all"):
        stage.load(bundle, mesh=one_device())


# --- motion and clips -----------------------------------------------------------------------


def test_motion_can_be_left_out(bundle, batch, stage):
    """The ablation's decoder gets 0 in training, and in play by its protocol."""
    quiet = make_stage(DecoderStage, dataclasses.replace(RECIPE, motion="none"), bundle)
    assert set(quiet.protocol.motion_values) == {0.0}
    assert len(quiet.protocol.motion_values) == len(bundle.protocol.motion_values)
    assert stage.protocol == bundle.protocol
    np.testing.assert_array_equal(quiet.motion(batch), np.zeros(8))
    np.testing.assert_array_equal(stage.motion(batch), batch.motion_value)


def test_sampled_clips(stage, networks, batch):
    """True and sampled clips side by side, of as many turns as asked for."""
    watched = stage.evaluate(networks, batch, make_key())
    clips = np.asarray(watched.clips["true_and_sampled"])
    assert clips.shape == (2, tiny_sets.NUM_FRAMES, tiny_sets.HEIGHT, 2 * tiny_sets.WIDTH, 3)
    assert clips.dtype == np.uint8
    other = stage.evaluate(networks, batch, jax.random.key(8)).clips["true_and_sampled"]
    true, made = np.split(clips != np.asarray(other), 2, axis=3)
    assert not true.any()  # only what is sampled depends on the key
    assert made.any()
    quiet = dataclasses.replace(stage.recipe, eval_clips=0)
    none = DecoderStage(quiet, stage.config, stage.protocol)
    assert not none.evaluate(networks, batch, make_key()).clips


def test_flops_are_those_of_the_matrices(stage, networks, bundle):
    """Within a tenth of three times a pass forward where everything is trained."""
    from animegamer_jax.train.stages.networks import count_matmul_flops

    everything = make_stage(DecoderStage, dataclasses.replace(RECIPE, trained="all"), bundle)
    d, e = stage.config.dit, stage.config.encoder

    def forward(networks, x, text, image):
        context = networks["encoder"](text, image)
        one = jnp.ones(1)
        return networks["dit"](x, timestep=one, motion=one, context=context)

    shapes = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in (
            (1, d.latent_frames, d.latent_height, d.latent_width, d.latent_channels),
            (1, e.num_text_tokens, e.text_size),
            (1, e.num_image_tokens, e.image_size),
        )
    )
    counted = 3 * count_matmul_flops(forward, networks, *shapes)
    assert everything.sample_flops(networks) == pytest.approx(counted, rel=0.1)
    assert stage.sample_flops(networks) < everything.sample_flops(networks)
