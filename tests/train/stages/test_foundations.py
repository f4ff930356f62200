"""The toy's foundations: each part's loss by known numbers, what it trains, and its bad input."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_sets
from flax import nnx
from helpers import random_leaves
from jax.sharding import NamedSharding, PartitionSpec
from tiny_games import batch_of, make_config, make_key, run
from tiny_stage import arrays, one_device

from animegamer_jax.bundle.bundle import (
    Bundle,
    BundleWriter,
    flat_params,
)
from animegamer_jax.configs import VAEConfig
from animegamer_jax.data.samples import ClipSample
from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.convolution import CausalConv
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.latents import cosines, split_moments, to_decoder
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE, ResBlock
from animegamer_jax.sharding import make_mesh
from animegamer_jax.train.registry import PARTS, find_stage
from animegamer_jax.train.stages.base import DataSource
from animegamer_jax.train.stages.foundations.clip import (
    CLIPRecipe,
    CLIPStage,
    contrastive_loss,
    pixel_loss,
    same_rows,
)
from animegamer_jax.train.stages.foundations.dit import (
    DiTRecipe,
    DiTStage,
    open_gates,
)
from animegamer_jax.train.stages.foundations.t5 import (
    Masked,
    T5Recipe,
    T5Stage,
    mask_tokens,
    predict_tokens,
)
from animegamer_jax.train.stages.foundations.vae import (
    VAERecipe,
    VAEStage,
    crop_clips,
    draw_frames,
    kl_divergence,
    perceptual_distance,
    psnr,
    start_calmly,
)
from animegamer_jax.train.stages.networks import count_matmul_flops
from animegamer_jax.train.stages.recipe import OptimizerConfig

COMMON: dict[str, Any] = {
    "steps": 10,
    "batch_size": 8,
    "optimizer": OptimizerConfig(learning_rate=1e-2),
}
STAGES = {
    CLIPStage: CLIPRecipe(**COMMON, pixel_weight=0.5),
    T5Stage: T5Recipe(**COMMON, length=12),
    VAEStage: VAERecipe(**COMMON, crop=(8, 12), finish_batches=1),
    DiTStage: DiTRecipe(**COMMON),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    """Random networks of the sizes of the tiny datasets."""
    folder = tmp_path_factory.mktemp("model")
    vocab_size = len(tiny_sets.make_tokenizer(folder / "tokenizer"))
    config = dataclasses.replace(
        make_config(vocab_size), clip=tiny_sets.CONFIG.clip, t5=tiny_sets.CONFIG.t5
    )
    with BundleWriter(folder / "model", name="tiny", protocol=tiny_sets.PROTOCOL) as writer:
        for name in ("dit", "vae", "clip", "t5"):
            network = getattr(config, name)
            writer.write_network(name, network, random_leaves(name, network, 3))
        writer.write_tokenizer(folder / "tokenizer")
    return Bundle.open(folder / "model")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, bundle) -> Bundle:
    """The same with a VAE that compiles in a moment: it only reads clips of one frame."""
    folder = tmp_path_factory.mktemp("pictures") / "model"
    small = VAEConfig(
        channels=4,
        multipliers=(1,),
        num_res_blocks=1,
        latent_channels=4,
        temporal_compression=1,
        norm_groups=2,
        scaling_factor=0.7,
    )
    with BundleWriter(folder, name="tiny", protocol=bundle.protocol) as writer:
        writer.write_network(
            "clip", bundle.config.clip, random_leaves("clip", bundle.config.clip, 3)
        )
        writer.write_network("vae", small, random_leaves("vae", small, 3))
        writer.write_tokenizer(bundle.tokenizer_dir)
    return Bundle.open(folder)


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    shape = (8, 1, tiny_sets.HEIGHT, tiny_sets.WIDTH, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[type, Path]:
    folder = tmp_path_factory.mktemp("sets")
    games = tiny_sets.write_games(folder / "games", {"train": 2})
    features = tiny_sets.write_features_set(folder / "features", 2)
    return {CLIPStage: games, T5Stage: games, VAEStage: games, DiTStage: features}


def make(kind: type, bundle: Bundle, **changes: Any) -> Any:
    recipe = dataclasses.replace(STAGES[kind], **changes)
    # As in the command, networks that the bundle lacks have a configuration, too.
    config = dataclasses.replace(bundle.config, encoder=make_config(152).encoder)
    return kind(recipe, config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)


# --- every part -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k is VAEStage)) for k in STAGES]
)
def test_steps(kind, bundle, pictures, data, frames):
    """Frozen weights stay bit for bit, all trained ones move, and the loss of the batch falls.

    On eight devices, whose first loss is that of one.
    """
    source = pictures if kind is VAEStage else bundle
    stage = make(kind, source)
    batch = ClipSample(frames) if kind is VAEStage else batch_of(stage, data[kind], 8)
    before, after, history = run(stage, source, batch, steps=6, mesh=make_mesh())
    for name, x in arrays(after.frozen).items():
        np.testing.assert_array_equal(x, arrays(before.frozen)[name], err_msg=name)
    old, new = arrays(before.params), arrays(after.params)
    still = [name for name in old if (old[name] == new[name]).all()]
    assert not still
    assert {name.split(".")[0] for name in new} >= set(stage.changes)
    losses = np.array([step["loss"] for step in history])
    assert losses[-3:].mean() < losses[:3].mean()
    networks = stage.load(source, mesh=one_device())
    loss = jax.jit(lambda networks, batch, key: stage.loss(networks, batch, key)[0])
    key = jax.random.fold_in(make_key(), 0)
    alone = loss(networks, jax.tree.map(jnp.asarray, batch), key)
    assert losses[0] == pytest.approx(float(alone), rel=1e-5)


def test_parts_and_recipes():
    for part in PARTS:
        stage, _ = find_stage("foundations", part=part)
        assert stage.changes == (part,)
        assert part not in stage.needs
        with pytest.raises(UserError, match=r"recipes only for toy.*initialise"):
            find_stage("foundations", part=part, size="full")
    makers = {maker for part in PARTS for maker in find_stage("foundations", part=part)[0].needs}
    assert makers == {"clip", "vae", "t5"}


# --- CLIP -----------------------------------------------------------------------------------


def test_contrastive_loss():
    """By hand: cosines over temperature, one row and one column at a time."""
    rng = np.random.default_rng(0)
    images, texts = rng.normal(size=(2, 4, 6))
    tokens = np.array([[1, 2], [3, 4], [1, 2], [5, 6]], np.int32)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images, texts)]
    logits = 7.0 * unit[0] @ unit[1].T
    counts = np.ones((4, 4), bool)
    counts[0, 2] = counts[2, 0] = False  # the same caption: neither right nor wrong
    terms = []
    for scores, mask in ((logits, counts), (logits.T, counts.T)):
        for i in range(4):
            row = scores[i][mask[i]]
            terms.append(np.log(np.exp(row).sum()) - scores[i, i])
    loss, parts = contrastive_loss(
        *(jnp.asarray(x, jnp.float32) for x in (images, texts)),
        log_scale=jnp.log(7.0),
        same=same_rows(jnp.asarray(tokens)),
    )
    assert float(loss) == pytest.approx(np.mean(terms), rel=1e-5)
    best = np.where(counts, logits, -np.inf).argmax(1) == np.arange(4)
    assert float(parts["image_to_text"]) == best.mean()


def test_temperature_has_an_end():
    x, same = jnp.eye(3), jnp.eye(3, dtype=bool)
    scales = [
        contrastive_loss(x, x, log_scale=jnp.float32(s), same=same)[1]["scale"] for s in (3.0, 9.0)
    ]
    np.testing.assert_allclose(scales, [np.exp(3.0), 100.0], rtol=1e-5)


def test_pixels_are_recovered_patch_by_patch(bundle, data):
    """The error of tokens that are their patches is zero; the layer is no part of the result."""
    pixels = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    found = np.empty((2, 4, 48), np.float32)
    for number, (row, column) in enumerate(itertools.product((0, 4), (0, 4))):
        found[:, number] = pixels[:, row : row + 4, column : column + 4].reshape(2, 48)
    found, pixels = jnp.asarray(found), jnp.asarray(pixels)
    assert float(pixel_loss(found, pixels, patch_size=4)) == 0
    assert float(pixel_loss(found[:, ::-1], pixels, patch_size=4)) > 1
    assert float(pixel_loss(found + 2, pixels, patch_size=4)) == pytest.approx(4)
    without, with_pixels = (make(CLIPStage, bundle, pixel_weight=w) for w in (0.0, 0.5))
    networks = with_pixels.load(bundle, mesh=one_device())
    batch = jax.tree.map(jnp.asarray, batch_of(with_pixels, data[CLIPStage], 8))
    loss, parts = jax.jit(with_pixels.loss)(networks, batch, make_key())
    networks_without = without.load(bundle, mesh=one_device())
    alone, _ = jax.jit(without.loss)(networks_without, batch, make_key())
    assert float(loss) == pytest.approx(float(alone + 0.5 * parts["pixels"]), rel=1e-5)
    assert networks.keys() - set(with_pixels.changes) == {"pixels"}


# --- T5 -------------------------------------------------------------------------------------


def test_masks():
    """Only real tokens are targets, a share of each text between the rates, at least one."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 21, 4000)
    tokens = np.where(np.arange(20) < lengths[:, None], 7, 0).astype(np.int32)
    recipe = T5Recipe(**COMMON, length=20, least_masked=0.2, most_masked=0.4, shown=0.25)
    masked = mask_tokens(jnp.asarray(tokens), jax.random.key(0), recipe=recipe, mask=3)
    found, targets, valid = (np.asarray(x) for x in masked)
    assert not targets[tokens == 0].any()
    count = targets.sum(1)
    assert (count >= 1).all()
    assert (count >= np.floor(0.2 * lengths)).all()
    assert (count <= np.maximum(np.ceil(0.4 * lengths), 1)).all()
    assert count[lengths == 20].mean() == pytest.approx(6, abs=0.3)
    np.testing.assert_array_equal(found != tokens, targets & (found == 3))
    assert (found == 3).sum() / targets.sum() == pytest.approx(0.75, abs=0.02)
    # Every place of a text is as likely as the others.
    np.testing.assert_allclose(targets[lengths == 20].mean(0), 0.3, atol=0.12)
    # All of the text is seen, and any number of paddings after it.
    seen = valid.sum(1)
    np.testing.assert_array_equal(valid, np.arange(20) < seen[:, None])
    assert (seen >= lengths).all()
    assert set(seen[lengths == 15]) == set(range(15, 21))


def test_hidden_padding_is_as_if_it_were_not_there(bundle):
    """So a motion text of few tokens is read in training as in use."""
    t5 = bundle.load("t5")
    assert isinstance(t5, T5Encoder)
    tokens = jnp.asarray([[5, 6, 7, 0, 0, 0, 0]], jnp.int32)
    valid = jnp.arange(7)[None] < 4
    predict = jax.jit(predict_tokens)
    long = predict(t5, Masked(tokens, valid, valid))
    every = jnp.ones((1, 4), bool)
    short = predict(t5, Masked(tokens[:, :4], every, every))
    np.testing.assert_allclose(long[:, :4], short, atol=1e-4)
    features = jax.jit(lambda t5, x: t5(x))(t5, tokens[:, :4])
    rows = np.asarray(t5.embedding[...])
    expected = np.asarray(features) @ rows.T / np.sqrt(t5.config.d_model)
    np.testing.assert_allclose(short, expected, atol=1e-4)


def test_new_t5_starts_with_small_scores(bundle):
    stage = make(T5Stage, bundle)
    queries = [
        np.asarray(stage.load(source, mesh=one_device())["t5"].layers.blocks.query.kernel[...])
        for source in (None, bundle)
    ]
    c = bundle.config.t5
    assert queries[0].std() == pytest.approx((c.d_model * c.d_kv) ** -0.5, rel=0.2)
    np.testing.assert_array_equal(queries[1], bundle.read("t5", "layers.blocks.query.kernel"))


# --- VAE ------------------------------------------------------------------------------------


def test_a_new_vae_starts_calmly(pictures):
    """Residual blocks are their shortcuts, latents nearly without noise, kernels without a past."""
    stage = make(VAEStage, pictures)
    trained = stage.load(pictures, mesh=one_device())["vae"]
    assert all(conv.kernel[...][:2].any() for conv in causal_convolutions(trained))
    assert all(block.conv2.kernel[...].any() for block in residual_blocks(trained))
    start_calmly(trained)
    assert not any(block.conv2.kernel[...].any() for block in residual_blocks(trained))
    assert all(block.conv1.kernel[...].any() for block in residual_blocks(trained))
    assert not any(conv.kernel[...][:2].any() for conv in causal_convolutions(trained))
    config = pictures.config.vae
    fresh = VAE(config, rngs=nnx.Rngs(0))
    start_calmly(fresh)
    _, log_variance = split_moments(fresh.encode(jax.random.normal(make_key(), (1, 1, 16, 24, 3))))
    assert float(log_variance.mean()) == pytest.approx(-5, abs=0.5)


def causal_convolutions(vae: VAE) -> list[CausalConv]:
    return [module for _, module in nnx.iter_modules(vae) if isinstance(module, CausalConv)]


@pytest.mark.slow
def test_pictures_teach_no_past(pictures):
    """Drawn frames are clips of their own; the planes that see frames before get no gradient."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 5, 16, 24, 3), dtype=np.uint8)
    networks = make(VAEStage, pictures).load(pictures, mesh=one_device())
    start_calmly(networks["vae"])
    graph, state = nnx.split(networks["vae"])
    found = {}
    for pictures_each in (None, 3):
        stage = make(VAEStage, pictures, crop=None, pictures=pictures_each)

        def loss(state: Any, stage: VAEStage = stage) -> Any:
            both = {**networks, "vae": nnx.merge(graph, state)}
            return stage.loss(both, ClipSample(jnp.asarray(frames)), make_key())

        (_, parts), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
        found[pictures_each] = parts, causal_convolutions(nnx.merge(graph, gradient))
    assert "change" in found[None][0]
    assert "change" not in found[3][0]
    assert any(conv.kernel[...][:2].any() for conv in found[None][1])
    assert not any(conv.kernel[...][:2].any() for conv in found[3][1])
    assert any(conv.kernel[...][2].any() for conv in found[3][1])


def residual_blocks(vae: VAE) -> list[ResBlock]:
    return [module for _, module in nnx.iter_modules(vae) if isinstance(module, ResBlock)]


def test_crops():
    """One window of all frames of a clip; every place of it occurs."""
    rows, columns = np.meshgrid(np.arange(4), np.arange(6), indexing="ij")
    frame = np.stack([rows, columns, rows], -1).astype(np.uint8)
    clips = np.broadcast_to(frame, (64, 2, 4, 6, 3)).copy()
    clips[:, 1] += 100
    split = jax.device_put(clips, NamedSharding(make_mesh(), PartitionSpec("data")))
    crop = jax.jit(lambda clips, key: crop_clips(clips, key, size=(2, 4)))
    found, spread = (np.asarray(crop(x, jax.random.key(0))) for x in (jnp.asarray(clips), split))
    np.testing.assert_array_equal(found, spread)
    assert found.shape == (64, 2, 2, 4, 3)
    np.testing.assert_array_equal(found[:, 1], found[:, 0] + 100)
    corners = found[:, 0, 0, 0, :2]
    assert {tuple(c) for c in corners.tolist()} == {(r, c) for r in range(3) for c in range(3)}
    for clip, (row, column) in zip(found, corners, strict=True):
        np.testing.assert_array_equal(clip[0], frame[row : row + 2, column : column + 4])


def test_divergence_and_ratio():
    shape = (1, 1, 2, 2, 3)
    unit = jnp.zeros((1, 1, 2, 2, 6))
    assert float(kl_divergence(unit)) == 0
    moments = jnp.concatenate([jnp.full(shape, 2.0), jnp.full(shape, np.log(0.25))], axis=-1)
    assert float(kl_divergence(moments)) == pytest.approx((4 + 0.25 - 1 - np.log(0.25)) / 2)
    true = jnp.zeros((2, 1, 2, 2, 3))
    assert float(psnr(true + 0.2, true)) == pytest.approx(20.0, abs=1e-3)


def test_perceptual_distance(bundle):
    """Zero between equals; frames are drawn at the same times from both clips."""
    clip = bundle.load("clip")
    assert isinstance(clip, CLIP)
    frames = jnp.linspace(-1, 1, 2 * 3 * 16 * 24 * 3).reshape(2, 3, 16, 24, 3)
    a, b = draw_frames([frames, frames], make_key(), count=4)
    assert a.shape == (8, 16, 24, 3)
    np.testing.assert_array_equal(a, b)
    distance = jax.jit(perceptual_distance)
    assert float(distance(clip, a, b)) == pytest.approx(0, abs=1e-5)
    assert float(distance(clip, a, a[:, ::-1])) > 1e-3


def test_scaling_factor_and_clips(pictures, frames):
    """With the factor, latents that are drawn from the moments have a deviation of one.

    So have they with their frequencies scaled, which are then more alike.
    """
    stage = make(VAEStage, pictures)
    networks = stage.load(pictures, mesh=one_device())

    def batches() -> Iterator[ClipSample]:
        yield ClipSample(frames)

    config = stage.finish(networks, batches())["vae"]
    moments = jax.jit(lambda vae, x: vae.encode(x))(
        networks["vae"], jnp.asarray(frames, jnp.float32) / 127.5 - 1
    )
    mean, log_variance = np.split(np.asarray(moments), 2, axis=-1)
    noise = np.random.default_rng(1).normal(size=mean.shape)
    drawn = (mean + np.exp(log_variance / 2) * noise) * config.scaling_factor
    assert drawn.std() == pytest.approx(1, rel=0.02)
    seen = np.asarray(to_decoder(jnp.asarray(drawn / config.scaling_factor), config))
    assert (seen - seen.mean()).std() == pytest.approx(1, rel=0.05)
    to_frequencies = functools.partial(np.einsum, "kf,bfhwz->bkhwz", cosines(drawn.shape[1]))
    before, after = (to_frequencies(x).std((0, 2, 3, 4)) for x in (drawn, seen))
    np.testing.assert_allclose(after / after[0], np.sqrt(before / before[0]), rtol=0.1)
    unscaled = dataclasses.replace(config, scaling_factor=0.7, frequency_scales=())
    assert unscaled == stage.config.vae
    same = make(VAEStage, pictures, frequency_power=0.0).finish(networks, batches())["vae"]
    assert same == dataclasses.replace(config, frequency_scales=())
    watched = stage.evaluate(networks, ClipSample(jnp.asarray(frames)), make_key())
    pairs = np.asarray(watched.clips["true_and_reconstructed"])
    assert pairs.shape == (4, *frames.shape[1:3], 2 * tiny_sets.WIDTH, 3)
    np.testing.assert_array_equal(pairs[:, :, :, : tiny_sets.WIDTH], frames[:4])
    assert 0 < watched.scalars["psnr"] < 20  # random weights


@pytest.mark.parametrize("crop", [(8, 28), (6, 12), (0, 12)])
def test_crops_that_do_not_fit(crop, bundle, data):
    stage = make(VAEStage, bundle, crop=crop)
    with pytest.raises(UserError, match=r"--crop .*multiples of 4 up to the 16 x 24"):
        stage.samples([DataSource(str(data[VAEStage]))], split="train")


# --- the transformer ------------------------------------------------------------------------


def test_new_transformer_does_not_hear_motion(bundle, tmp_path):
    """Its motion layer is silent, and no weight of it is trained."""
    stage = make(DiTStage, bundle)
    with BundleWriter(tmp_path / "model", name="x", protocol=bundle.protocol) as writer:
        for name in ("vae", "t5"):
            leaves = random_leaves(name, getattr(bundle.config, name), 3)
            writer.write_network(name, getattr(bundle.config, name), leaves)
    networks = stage.load(Bundle.open(tmp_path / "model"), mesh=one_device())
    embed = jax.jit(lambda dit, x: dit.motion_embed(x))(networks["dit"], jnp.array([0.0, 30.0]))
    assert not np.asarray(embed).any()
    assert not stage.is_trained("dit", ("motion_embed", "output", "kernel"), nnx.Param(0))
    assert stage.is_trained("dit", ("positions",), nnx.Param(0))
    assert not stage.is_trained("t5", ("embedding",), nnx.Param(0))
    assert stage.is_trained("dit", ("patch_in", "kernel"), nnx.Param(0))


def test_new_transformer_starts_as_a_plain_one(bundle):
    """Whatever the timestep: nothing is shifted or scaled, and every gate is open."""
    config = bundle.config.dit
    dit = DiT(config, rngs=nnx.Rngs(0))
    open_gates(dit)
    for path, value in flat_params(nnx.state(dit.layers, nnx.Param)).items():
        if path.endswith("modulation.kernel"):
            assert not np.asarray(value[...]).any()
        elif path.endswith("modulation.bias"):
            bias = np.asarray(value[...]).reshape(config.num_layers, 2, 2, 3, -1)
            assert (bias == np.array([0, 0, 1])[:, None]).all()
    assert not np.asarray(dit.output_modulation.kernel[...]).any()
    random = np.random.default_rng(0)
    shape = (
        config.latent_frames,
        config.latent_height,
        config.latent_width,
        config.latent_channels,
    )
    x = jnp.asarray(random.standard_normal((1, *shape)), jnp.float32)
    context = jnp.ones((1, config.num_context_tokens, config.hidden_size))
    run = jax.jit(lambda t: dit(x, timestep=t, motion=jnp.zeros(1), context=context))
    np.testing.assert_array_equal(run(jnp.array([20.0])), run(jnp.array([900.0])))


def test_captions_are_dropped(bundle, data):
    stage = make(DiTStage, bundle, context_dropout=0.4)
    networks = stage.load(bundle, mesh=one_device())
    batch = jax.tree.map(jnp.asarray, batch_of(stage, data[DiTStage], 8))
    batch = jax.tree.map(lambda x: jnp.tile(x, (100,) + (1,) * (x.ndim - 1)), batch)
    context = np.asarray(jax.jit(stage.conditions)(networks, batch, make_key()).context)
    assert context.shape == (800, bundle.config.dit.num_context_tokens, 32)
    dropped = (context == 0).all((1, 2))
    assert dropped.mean() == pytest.approx(0.4, abs=0.05)
    assert (context[~dropped] != 0).all((1, 2)).all()


# --- arithmetic -----------------------------------------------------------------------------


def test_flops_of_a_step(bundle):
    """Three times what a pass forward has, within a tenth."""
    c = bundle.config
    clip_stage, t5_stage = make(CLIPStage, bundle, pixel_weight=0.0), make(T5Stage, bundle)
    clip, t5 = (s.load(bundle, mesh=one_device()) for s in (clip_stage, t5_stage))
    size, length = c.clip.image_size, c.clip.context_length
    counted = count_matmul_flops(
        lambda clip, x, n: (clip.embed_image(x), clip.embed_text(n)),
        clip["clip"],
        jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
    )
    assert clip_stage.sample_flops(clip) == pytest.approx(3 * counted, rel=0.1)
    ids, seen = (jax.ShapeDtypeStruct((1, 12), kind) for kind in (jnp.int32, bool))
    counted = count_matmul_flops(predict_tokens, t5["t5"], Masked(ids, seen, seen))
    assert t5_stage.sample_flops(t5) == pytest.approx(3 * counted, rel=0.1)
    vae_stage = make(VAEStage, bundle)
    vae = vae_stage.load(bundle, mesh=one_device())
    whole = make(VAEStage, bundle, crop=None).sample_flops(vae)
    assert vae_stage.sample_flops(vae) == pytest.approx(whole / 4, rel=0.01)
    one = make(VAEStage, bundle, pictures=1).sample_flops(vae)
    assert vae_stage.sample_flops(vae) == pytest.approx(4 * one)
    assert make(VAEStage, bundle, pictures=None).sample_flops(vae) > 2 * one
