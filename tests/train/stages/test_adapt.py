"""The adaptation stage: the decoder's loss on what the frozen language model predicts."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_games import make_key, make_stage, run, write_model
from tiny_stage import arrays, one_device

from animegamer_jax.bundle.bundle import abstract_network
from animegamer_jax.convert.rules import load
from animegamer_jax.convert.sources import open_torch
from animegamer_jax.convert.tables.dit import infer_config, rules
from animegamer_jax.diffusion import Schedule, add_noise
from animegamer_jax.errors import UserError
from animegamer_jax.models import latents as vae_latents
from animegamer_jax.models.vae import to_uint8
from animegamer_jax.protocol import RELEASED
from animegamer_jax.sharding import make_mesh
from animegamer_jax.train.stages.adapt import (
    RECIPES,
    AdaptRecipe,
    AdaptStage,
    MemoryRecipe,
    PictureStage,
)
from animegamer_jax.train.stages.decoder import diffusion_loss, spread_timesteps
from animegamer_jax.train.stages.games import lay_out
from animegamer_jax.train.stages.recipe import OptimizerConfig

RECORDED = Path(__file__).parents[2] / "reference" / "vdm"
RECIPE = AdaptRecipe(
    steps=2, batch_size=8, optimizer=OptimizerConfig(learning_rate=3e-3), context_dropout=0.3
)


def error(found: Any, expected: Any) -> float:
    """Largest difference over the RMS of `expected`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.sqrt(np.square(expected).mean()))


def read(name: str) -> dict[str, np.ndarray]:
    with np.load(RECORDED / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def stage(bundle) -> AdaptStage:
    return make_stage(AdaptStage, RECIPE, bundle)


def test_the_loss_under_the_language_models_context_is_the_recorded_one():
    source = open_torch(RECORDED / "1" / "mp_rank_00_model_states.pt")
    source = source.under("model.diffusion_model.")
    config = infer_config(source.shapes, latent_height=8, latent_width=12)
    dit = abstract_network("dit", config)
    names = {rule.source.split(".{")[0].split("{")[0] for rule in rules(config)}
    load(rules(config), source.select(lambda name: name.startswith(tuple(names))), dit)
    arrays, forward = read("diffusion_loss"), read("dit_forward")

    @jax.jit
    def run(dit: nnx.Module, clean, noise, context, motion, timestep):
        return diffusion_loss(
            dit, clean, context=context, motion=motion, noise=noise, timestep=timestep
        )

    clean, noise = (np.moveaxis(arrays[name], 2, -1) for name in ("clean", "noise"))
    context, timestep = forward["mllm_train"][:, 0], arrays["idx"].astype(np.int32)
    found = run(dit, clean, noise, context, arrays["flow"], timestep)
    assert error(found, arrays["loss_mllm"]) < 1e-5


def test_the_context_is_what_is_predicted(stage, networks, batch):
    """By play's own function; in some samples E_a of zeros; and no gradient reaches it."""

    @jax.jit
    def run(networks, batch):
        prompts = lay_out(networks["encoder"], batch.game, stage.layout)
        predicted, _ = networks["mllm"].predict(prompts.prompt, prompts.history, stage.layout)
        keys = jax.random.split(make_key(), 100)
        context = jax.lax.map(lambda key: stage.conditions(networks, batch, key).context, keys)
        return context, predicted, networks["encoder"].unconditional()

    context, predicted, empty = map(np.asarray, run(networks, jax.tree.map(jnp.asarray, batch)))
    dropped = np.isclose(context, empty, atol=1e-5).all(axis=(2, 3))
    np.testing.assert_allclose(dropped.mean(), 0.3, atol=0.06)
    kept = np.where(dropped[:, :, None, None], predicted, context)
    np.testing.assert_allclose(kept, np.broadcast_to(predicted, kept.shape), atol=1e-4)


def test_what_a_look_shows(stage, networks, batch):
    """Clips from predictions next to the true ones; none if the recipe wants none."""
    shown = stage.evaluate(networks, jax.tree.map(jnp.asarray, batch), make_key())
    (pairs,) = shown.clips.values()
    c, v = stage.config.dit, stage.config.vae
    size = c.latent_height * v.spatial_compression, 2 * c.latent_width * v.spatial_compression
    assert pairs.shape[0] == stage.recipe.eval_clips
    assert (pairs.shape[2:4], pairs.dtype) == (size, np.uint8)
    silent = AdaptStage(
        dataclasses.replace(stage.recipe, eval_clips=0),
        stage.config,
        stage.protocol,
        tokenizer_dir=stage.tokenizer_dir,
    )
    assert silent.evaluate(networks, batch, make_key()) == ({}, {})


def test_the_loss_is_the_decoders(bundle, networks, batch):
    """On latents drawn from the moments and scaled, with the true motion value."""
    recipe = dataclasses.replace(RECIPE, context_dropout=0.0, timestep_shift=2.0)
    stage = make_stage(AdaptStage, recipe, bundle)
    batch = jax.tree.map(jnp.asarray, batch)
    still = dataclasses.replace(bundle.protocol, motion_values=(0.0,) * 5)
    with_nothing = AdaptStage(stage.recipe, bundle.config, still, tokenizer_dir=stage.tokenizer_dir)

    @jax.jit
    def found(networks, batch):
        (loss, parts), (other, _) = (
            s.loss(networks, batch, make_key()) for s in (stage, with_nothing)
        )
        assert parts == {}
        return loss, other

    @jax.jit
    def expected(networks, batch, key):
        drop, draws = jax.random.split(key)
        latent, noise, step = jax.random.split(draws, 3)
        latents = vae_latents.sample(batch.moments, key=latent) * 0.7
        return diffusion_loss(
            networks["dit"],
            latents,
            context=stage.conditions(networks, batch, drop).context,
            motion=batch.motion_value,
            noise=jax.random.normal(noise, latents.shape),
            timestep=spread_timesteps(step, 8, shift=2.0),
        ).mean()

    loss, without = found(networks, batch)
    np.testing.assert_allclose(loss, expected(networks, batch, make_key()), rtol=1e-5)
    batch = batch._replace(motion_value=jnp.zeros(8))
    np.testing.assert_allclose(without, expected(networks, batch, make_key()), rtol=1e-5)
    assert loss != without


def test_pictures_first(bundle, networks, batch):
    """The first frame alone, drawn several times from one prediction; no clips to look at."""
    stage = make_stage(AdaptStage, dataclasses.replace(RECIPE, pictures=3), bundle)
    loss = jax.jit(lambda networks, batch, key: stage.loss(networks, batch, key)[0])
    batch = jax.tree.map(jnp.asarray, batch)
    found = loss(networks, batch, make_key())
    later = batch._replace(moments=batch.moments.at[:, 1:].set(7.0))
    assert loss(networks, later, make_key()) == found
    first = batch._replace(moments=batch.moments.at[:, :1].set(7.0))
    assert loss(networks, first, make_key()) != found
    assert stage.evaluate(networks, batch, make_key()) == ({}, {})
    assert stage.sample_flops(networks) < 3 * make_stage(AdaptStage, RECIPE, bundle).sample_flops(
        networks
    )


@pytest.fixture(scope="module")
def pictured(bundle) -> AdaptStage:
    protocol = dataclasses.replace(bundle.protocol, picture_first=True)
    recipe = dataclasses.replace(RECIPE, context_dropout=1.0, first_pictures=3)
    return AdaptStage(recipe, bundle.config, protocol, tokenizer_dir=bundle.tokenizer_dir)


def test_where_a_picture_comes_first(pictured, bundle, networks, batch):
    """Pictures of predictions, some of them dropped; clips of what E_a sees in the true frame.

    The clips begin with that frame: it is seen without noise, and costs nothing.
    """
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def loss(networks, batch):
        found, parts = pictured.loss(networks, batch, make_key())
        return {**parts, "loss": found}

    found = loss(networks, batch)
    np.testing.assert_allclose(found["loss"], found["pictures"] + found["clips"], rtol=1e-6)
    later = loss(networks, batch._replace(moments=batch.moments.at[:, 1:].set(7.0)))
    assert later["pictures"] == found["pictures"]
    assert later["clips"] != found["clips"]
    looks = batch.game._replace(image=batch.game.image.at[:, -1].add(1.0))
    other = loss(networks, batch._replace(game=looks))
    assert other["pictures"] == found["pictures"]
    assert other["clips"] != found["clips"]
    asked = batch.game._replace(captions=batch.game.captions.at[:, -1].set(3))
    other = loss(networks, batch._replace(game=asked))
    assert other["pictures"] == found["pictures"], "every prediction is dropped"
    assert other["clips"] != found["clips"], "the text tokens are predicted"
    kept = AdaptStage(
        dataclasses.replace(pictured.recipe, context_dropout=0.0),
        bundle.config,
        pictured.protocol,
        tokenizer_dir=bundle.tokenizer_dir,
    )
    drawn = jax.jit(lambda n, b: kept.loss(n, b, make_key())[1]["pictures"])
    first = drawn(networks, batch)
    assert drawn(networks, batch._replace(game=looks)) == first, "what is to be drawn is not seen"
    assert drawn(networks, batch._replace(game=asked)) != first, "pictures are of predictions"
    count = networks["encoder"].config.num_image_tokens

    @jax.jit
    def contexts(networks, batch):
        seen = networks["encoder"](batch.game.text[:, -1], batch.game.image[:, -1])
        return (
            pictured.clip_conditions(networks, batch).context,
            pictured.represent(networks, batch),
            seen,
        )

    context, predicted, seen = contexts(networks, batch)
    np.testing.assert_array_equal(context[:, :-count], predicted[:, :-count])
    np.testing.assert_allclose(context[:, -count:], seen[:, -count:], atol=1e-5)
    assert len(pictured.evaluate(networks, batch, make_key()).clips) == 1
    clips = make_stage(AdaptStage, RECIPE, bundle).sample_flops(networks)
    alone = make_stage(AdaptStage, dataclasses.replace(RECIPE, pictures=3), bundle)
    assert clips < pictured.sample_flops(networks) < clips + alone.sample_flops(networks)


def test_a_known_frame_is_seen_and_costs_nothing(pictured, networks, batch):
    """The loss is that of the other frames, of a network that sees the first one."""

    @jax.jit
    def losses(networks, batch):
        dit, known = networks["dit"], pictured.known(batch)
        latents = vae_latents.to_decoder(vae_latents.mode(batch.moments), pictured.config.vae)
        noise = jax.random.normal(make_key(), latents.shape)
        timestep = jnp.arange(100, 900, 100)
        given = {"context": pictured.represent(networks, batch), "motion": batch.motion_value}
        loss, other = (
            diffusion_loss(dit, latents, noise=noise, timestep=timestep, known=known, **given)
            for noise in (noise, noise.at[:, 0].add(1.0))
        )
        noised, target = add_noise(Schedule(), latents, noise, timestep)
        seen = noised.at[:, 0].set(latents[:, 0])
        v = dit(seen, timestep=timestep.astype(jnp.float32), **given)
        return loss, other, jnp.square(v - target)[:, 1:].sum((1, 2, 3, 4)) / v[0].size

    loss, other, expected = losses(networks, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(other, loss, rtol=1e-4)


def test_first_frames_drawn_again(pictured, networks, batch, tmp_path):
    """From noise of step 750 and in three steps, with guidance; E_a sees what comes of it."""
    recipe = dataclasses.replace(pictured.recipe, redrawn=1.0)
    bundle = write_model(tmp_path, networks=("mllm", "encoder", "dit", "vae", "clip"))
    protocol = dataclasses.replace(
        pictured.protocol, guidance_scale=1.5, guidance_schedule="constant"
    )
    again = AdaptStage(recipe, bundle.config, protocol, tokenizer_dir=bundle.tokenizer_dir)
    networks = {**networks, "clip": again.load(bundle, mesh=one_device())["clip"]}
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def losses(networks, batch):
        return [s.loss(networks, batch, make_key())[1] for s in (pictured, again)]

    true, drawn = losses(networks, batch)
    assert true["pictures"] == drawn["pictures"]
    assert true["clips"] != drawn["clips"]
    looks = batch.game._replace(image=batch.game.image.at[:, -1].add(1.0))
    true_other, drawn_other = losses(networks, batch._replace(game=looks))
    assert true_other["clips"] != true["clips"]
    assert drawn_other["clips"] == drawn["clips"], "the true frame is not seen"

    @jax.jit
    def by_hand(networks, batch, key):
        dit, vae, encoder = networks["dit"], networks["vae"], networks["encoder"]
        predicted = pictured.represent(networks, batch)
        clean = vae_latents.to_decoder(vae_latents.mode(batch.moments[:, :1]), vae.config)
        level = Schedule().signal_levels().astype(np.float32)
        noise = np.sqrt(1 - level**2)
        x = level[750] * clean + noise[750] * jax.random.normal(key, clean.shape)
        nothing = jnp.broadcast_to(encoder.unconditional(), predicted.shape)
        for t in (750, 500, 250):
            without, given = (
                dit(x, timestep=jnp.full(8, t * 1.0), motion=batch.motion_value, context=context)
                for context in (nothing, predicted)
            )
            v = without + 2.5 * (given - without)
            d, e = level[t] * x - noise[t] * v, noise[t] * x + level[t] * v
            x = level[t - 250] * d + noise[t - 250] * e if t > 250 else d
        frames = to_uint8(vae.decode(vae_latents.from_decoder(x, vae.config)))[:, 0]
        return encoder.image_tokens(networks["clip"].see(frames))

    found = jax.jit(lambda n, b, key: again.see_again(n, b, pictured.predict(n, b), key))(
        networks, batch, make_key()
    )
    expected = by_hand(networks, batch, make_key())
    np.testing.assert_allclose(found[:, -expected.shape[1] :], expected, atol=2e-3)
    clean = batch.game.image[:, -1]
    assert np.abs(expected - networks["encoder"].image_tokens(clean)).max() > 0.05
    assert again.sample_flops(networks) > pictured.sample_flops(networks)


def test_first_frames_drawn_again_need_clip(pictured, bundle):
    recipe = dataclasses.replace(pictured.recipe, redrawn=0.5)
    stage = AdaptStage(recipe, bundle.config, pictured.protocol, tokenizer_dir=bundle.tokenizer_dir)
    with pytest.raises(UserError, match=r"no CLIP there.*or give --redrawn 0"):
        stage.load(bundle, mesh=one_device())
    make_stage(AdaptStage, recipe, bundle).load(bundle, mesh=one_device())  # no picture first


@pytest.fixture(scope="module")
def trained(stage, bundle, batch):
    return run(stage, bundle, batch, steps=2)


def test_what_the_recipe_trains(trained):
    """The decoder's LoRA, modulation and motion input; the rest, the others too, bit for bit."""
    before, after, _ = trained
    frozen = arrays(after.frozen)
    assert {name.split(".")[0] for name in frozen} == {"dit", "encoder", "mllm", "vae"}
    for name, value in arrays(before.frozen).items():
        np.testing.assert_array_equal(frozen[name], value, err_msg=name)
    assert {name.removeprefix("dit.") for name in arrays(before.params)} == {
        *(f"layers.blocks.{linear}.lora_{letter}" for linear in ("qkv", "out") for letter in "ab"),
        *(f"layers.blocks.modulation.{leaf}" for leaf in ("kernel", "bias")),
        *(
            f"motion_embed.{layer}.{leaf}"
            for layer in ("input", "output")
            for leaf in ("kernel", "bias")
        ),
    }
    moved = arrays(after.params)
    for name, value in arrays(before.params).items():
        assert (moved[name] != value).any(), name


def test_all_of_the_decoder_with_its_positions(bundle):
    stage = make_stage(AdaptStage, dataclasses.replace(RECIPE, trained="all"), bundle)
    weight = nnx.Param(jnp.zeros(1))
    assert stage.is_trained("dit", ("patch_in", "kernel"), weight)
    assert stage.is_trained("dit", ("positions",), weight)
    assert not stage.is_trained("mllm", ("mistral", "embedding"), weight)
    assert not stage.is_trained("encoder", ("text", "input", "kernel"), weight)


def test_eight_devices_give_one_devices_losses(trained, stage, bundle, batch):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    _, _, found = run(stage, bundle, batch, steps=2, mesh=mesh)
    for a, b in zip(trained[2], found, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(b[name], a[name], rtol=1e-4)


def test_operations_of_a_step(stage, networks):
    """The language model's matrices once; the decoder's forward, and back for the inputs."""
    length, width, tokens = stage.layout.length, 32, 7 + 3 * 2 * 3
    attention = 2 * width * width + 2 * width * 16
    low_rank = 2 * (2 * 2 * width + 2 * (width + 16) + 3 * (width + 64))
    language = 2 * 2 * (attention + 3 * width * 64 + low_rank) * length
    language += 2 * 4 * length**2 * width
    decoder = 2 * (4 * width * width + 2 * width * 64 + 4 * 2 * 2 * width) * tokens
    decoder += 2 * 16 * width * 3 * 2 * 3  # patches in and out
    modulation = 2 * 16 * 12 * width
    scores = 2 * 12 * tokens**2 * width
    expected = language + 4 * decoder + 6 * modulation + scores
    assert stage.sample_flops(networks) == expected


def test_what_is_refused(bundle):
    dit = dataclasses.replace(bundle.config.dit, lora=None)
    config = dataclasses.replace(bundle.config, dit=dit)
    folder = bundle.tokenizer_dir
    for stage, message in (
        (AdaptStage(RECIPE, config, bundle.protocol, tokenizer_dir=folder), "give --trained all"),
        (AdaptStage(RECIPE, bundle.config, RELEASED, tokenizer_dir=folder), "found released"),
    ):
        with pytest.raises(UserError, match=message):
            stage.load(bundle, mesh=one_device())


def test_recipes():
    """The paper, section 4.1; the optimizer as in the decoder's stages."""
    full = RECIPES["full"]
    assert (full.steps, full.optimizer.learning_rate, full.context_dropout) == (10_000, 5e-5, 0.05)
    assert (full.optimizer.clip_norm, full.ema_decay, full.trained) == (0.1, 0.9999, "recipe")


def remembering_batch(bundle, batch, memory):
    """Returns a batch of turns with true first frames of up to `memory` turns before each."""
    c, random = bundle.config.dit, np.random.default_rng(3)
    shape = (len(batch.moments), memory, c.latent_height, c.latent_width, 2 * c.latent_channels)
    past = random.normal(size=shape).astype(np.float32)
    turns = np.arange(memory) >= memory - np.asarray(batch.game.num_history)[:, None]
    past = np.where(turns[:, :, None, None, None], past, 0.0).astype(np.float32)
    return jax.tree.map(jnp.asarray, batch._replace(past_moments=past))


def test_a_decoder_learns_to_remember(bundle, batch):
    """It gets positions for past clips' first frames, and these in the units of a picture."""
    recipe = dataclasses.replace(RECIPE, memory=2, context_dropout=0.0)
    stage = make_stage(AdaptStage, recipe, bundle)
    networks = stage.load(bundle, mesh=one_device())
    assert networks["dit"].config.memory == stage.configs()["dit"].memory == 2
    batch = remembering_batch(bundle, batch, 2)

    @jax.jit
    def run(networks, batch):
        return stage.loss(networks, batch, make_key())[0], stage.conditions(
            networks, batch, make_key()
        )

    loss, conditions = run(networks, batch)
    assert np.isfinite(loss)
    assert conditions.context.shape[1] == stage.config.dit.num_context_tokens
    scale = stage.vae_config.scaling_factor
    count = np.asarray(batch.game.num_history)
    assert count.min() < 2
    for found, true, turns in zip(conditions.memory, batch.past_moments, count, strict=True):
        absent = max(0, 2 - int(turns))
        np.testing.assert_array_equal(found[:absent], np.zeros_like(found[:absent]))
        mean = np.split(np.asarray(true), 2, axis=-1)[0] * scale
        np.testing.assert_allclose(found[absent:], mean[absent:], atol=1e-5)
    dit = dataclasses.replace(bundle.config.dit, memory=3)
    remembering = dataclasses.replace(bundle.config, dit=dit)
    with pytest.raises(
        UserError,
        match=r"--memory 2: expected 3, the number of clips that this .* give that number, or 0",
    ):
        AdaptStage(recipe, remembering, bundle.protocol, tokenizer_dir=stage.tokenizer_dir)
    long = dataclasses.replace(recipe, memory=3)
    with pytest.raises(
        UserError, match=r"--memory 3: expected fewer .* window of 3 turns: give at most 2"
    ):
        make_stage(AdaptStage, long, bundle)
    dit = dataclasses.replace(bundle.config.dit, patch_frames=3)
    several = dataclasses.replace(bundle.config, dit=dit)
    with pytest.raises(
        UserError, match=r"--memory 2: expected a decoder whose patches .* found 3: give --memory 0"
    ):
        AdaptStage(recipe, several, bundle.protocol, tokenizer_dir=stage.tokenizer_dir)


def test_a_decoder_of_pictures(bundle, batch):
    """It starts as the adapted decoder, which stays as it was, and learns first frames alone."""
    protocol = dataclasses.replace(bundle.protocol, picture_first=True)
    recipe = MemoryRecipe(
        steps=2, batch_size=8, optimizer=RECIPE.optimizer, pictures=2, memory=2, context_dropout=0.0
    )
    folder = bundle.tokenizer_dir
    stage = PictureStage(recipe, bundle.config, protocol, tokenizer_dir=folder)
    networks = stage.load(bundle, mesh=one_device())
    start, own = (arrays(nnx.state(n)) for n in (bundle.load("dit"), networks["picture"]))
    assert own.keys() - start.keys() == {"memory_positions"}
    for name, value in start.items():
        np.testing.assert_array_equal(own[name], value)
    assert "dit" not in networks
    assert stage.configs().keys() == {"picture"}
    assert stage.configs()["picture"].memory == 2
    assert not stage.config.dit.memory
    assert stage.sample_spec().past_moments.shape[0] == 2
    batch = remembering_batch(bundle, batch, 2)
    loss = jax.jit(lambda networks, batch: stage.loss(networks, batch, make_key())[0])
    found = loss(networks, batch)
    assert np.isfinite(found)
    later = batch._replace(moments=batch.moments.at[:, 1:].set(7.0))
    assert loss(networks, later) == found, "only the first frame counts"
    forgotten = batch._replace(past_moments=0 * batch.past_moments)
    assert loss(networks, forgotten) != found
    weight = nnx.Param(jnp.zeros(1))
    assert stage.is_trained("picture", ("modulation",), weight)
    assert not stage.is_trained("dit", ("modulation",), weight)

    with pytest.raises(UserError, match="stage picture: the model draws no picture first"):
        PictureStage(recipe, bundle.config, bundle.protocol, tokenizer_dir=folder)
    none = dataclasses.replace(recipe, pictures=0)
    with pytest.raises(UserError, match="stage picture: --pictures 0: it trains on first frames"):
        PictureStage(none, bundle.config, protocol, tokenizer_dir=folder)


def test_what_training_does_to_the_memory(bundle, batch):
    """A later frame of the clip, a context that is left out, noise: each where it is asked for."""
    batch = remembering_batch(bundle, batch, 2)
    networks, found = None, {}
    options = {"own": {"memory_own": 1.0}, "alone": {"memory_alone": 1.0}}
    options |= {"noise": {"memory_noise": 0.5}, "dropped": {"context_dropout": 1.0}, "plain": {}}
    for name, option in options.items():
        recipe = dataclasses.replace(RECIPE, memory=2, **({"context_dropout": 0.0} | option))
        stage = make_stage(AdaptStage, recipe, bundle)
        if networks is None:
            networks = stage.load(bundle, mesh=one_device())
        found[name] = jax.jit(stage.conditions)(networks, batch, make_key())
    plain, empty = found["plain"], networks["encoder"].unconditional()
    there = np.asarray(batch.game.num_history) > 0
    assert there.any()
    assert not there.all()
    # A later frame is drawn from its moments: near one of the means, far from the turn before.
    own = np.asarray(found["own"].memory)
    np.testing.assert_array_equal(own[:, 0], plain.memory[:, 0])
    assert not own[~there].any()
    means = np.split(np.asarray(batch.moments), 2, axis=-1)[0] * stage.vae_config.scaling_factor
    nearest = np.abs(own[:, 1, None] - means).mean(axis=(2, 3, 4)).argmin(axis=1)
    assert (nearest[there] > 0).all()
    np.testing.assert_allclose(
        np.asarray(found["alone"].context)[there],
        np.broadcast_to(empty, plain.context[there].shape),
        atol=1e-6,
    )
    np.testing.assert_array_equal(found["alone"].context[~there], plain.context[~there])
    np.testing.assert_array_equal(found["alone"].memory, plain.memory)
    noise = np.asarray(found["noise"].memory - plain.memory)
    spread = np.asarray(plain.memory)[np.asarray(plain.memory) != 0].std()
    assert 0 < noise.std() < 0.5 * spread
    np.testing.assert_array_equal(noise[np.asarray(plain.memory) == 0], 0)
    assert not np.asarray(found["dropped"].memory).any()
