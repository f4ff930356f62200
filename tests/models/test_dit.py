"""The diffusion transformer and the shot encoder: recorded numbers, and diffusers' CogVideoX."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import NUM_QUERIES, WIDTH, random_leaves, tiny_config
from random_modules import build

from animegamer_jax.bundle.bundle import (
    abstract_network,
    abstract_params,
)
from animegamer_jax.configs import DiTConfig
from animegamer_jax.convert.rules import convert
from animegamer_jax.convert.sources import open_torch
from animegamer_jax.convert.tables import dit as dit_table
from animegamer_jax.convert.tables import encoder as encoder_table
from animegamer_jax.diffusion import Schedule
from animegamer_jax.models.dit import DiT, position_table, sinusoid, tabulate_modulation
from animegamer_jax.models.encoder import ShotEncoder

torch = pytest.importorskip("torch")

RECORDED = Path(__file__).parents[1] / "reference" / "vdm"
TINY = dataclasses.replace(
    tiny_config(8).dit, intermediate_size=4 * WIDTH, spatial_interpolation=1.875
)
PLAIN = dataclasses.replace(TINY, lora=None)


def error(found: Any, expected: Any) -> float:
    """Largest difference over the RMS of `expected`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.sqrt(np.square(expected).mean()))


@jax.jit
def run(dit: DiT, x: jax.Array, timestep: jax.Array, motion: jax.Array, context: jax.Array):
    return dit(x, timestep=timestep, motion=motion, context=context)


def inputs(config: DiTConfig, batch: int = 2) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(5)
    c = config
    x = (batch, c.latent_frames, c.latent_height, c.latent_width, c.latent_channels)
    return (
        jnp.asarray(random.normal(size=x), jnp.float32),
        jnp.linspace(999.0, 19.0, batch),
        jnp.linspace(0.5, 40.0, batch),
        jnp.asarray(random.normal(size=(batch, c.num_context_tokens, c.hidden_size)), jnp.float32),
    )


@pytest.fixture(scope="module")
def tiny() -> DiT:
    return build("dit", TINY, random_leaves("dit", TINY, 0))


@pytest.fixture(scope="module")
def diffusers() -> Any:
    """The library, which takes long to import."""
    return pytest.importorskip("diffusers")


def test_a_tabulated_modulation_is_the_computed_one():
    """At its own timesteps and motion values, without the weights that it was computed with."""
    dit = build("dit", PLAIN, random_leaves("dit", PLAIN, 0))
    shapes = abstract_network("dit", PLAIN)
    x, _, _, context = inputs(PLAIN)
    given = jnp.array([500.0, 999.0]), jnp.array([42.0, 0.6])
    expected = run(dit, x, *given, context)
    other = run(dit, x, given[0], given[1][::-1], context)
    for network in (dit, shapes):
        tabulate_modulation(network, (999, 500), (0.6, 5.5, 42.0))
    assert error(run(dit, x, *given, context), expected) < 1e-5 < 1e-2 < error(other, expected)
    found, abstract = (nnx.to_flat_state(nnx.state(network)) for network in (dit, shapes))
    assert [(path, leaf.shape, leaf.dtype) for path, leaf in found] == [
        (path, leaf.shape, leaf.dtype) for path, leaf in abstract
    ]
    names = {str(part) for path, _ in found for part in path}
    assert not names & {"time_embed", "motion_embed", "modulation", "output_modulation"}


# --- recorded numbers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def source():
    return open_torch(RECORDED / "1" / "mp_rank_00_model_states.pt").under("model.diffusion_model.")


@pytest.fixture(scope="module")
def dit(source) -> DiT:
    config = dit_table.infer_config(source.shapes, latent_height=8, latent_width=12)
    leaves = convert(dit_table.rules(config), source, abstract_params("dit", config))
    return build("dit", config, leaves)


@pytest.fixture(scope="module")
def encoder(source) -> ShotEncoder:
    config = encoder_table.infer_config(source.shapes)
    leaves = convert(encoder_table.rules(config), source, abstract_params("encoder", config))
    return build("encoder", config, leaves)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED / "dit_forward.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ["out_encoder", "out_mllm", "out_mllm_train"])
def test_recorded_outputs(dit, recorded, name):
    context = {
        "out_encoder": recorded["context"],
        "out_mllm": np.concatenate([recorded["context"][:1], recorded["mllm"]]),
        "out_mllm_train": recorded["mllm_train"][:, 0],
    }[name]
    x = np.moveaxis(recorded["x"], 2, -1)
    found = run(dit, x, recorded["timestep"], recorded["flow"], context)
    assert error(found, np.moveaxis(recorded[name], 2, -1)) < 1e-5


def test_recorded_context(encoder, recorded):
    encode = jax.jit(lambda encoder, text, image: encoder(text, image))
    found = encode(encoder, recorded["text"], recorded["clip"])
    assert error(found, recorded["context"]) < 1e-5


def test_the_unconditional_context_is_that_of_zeros(encoder):
    c = encoder.config
    found, expected = jax.jit(
        lambda encoder: (
            encoder.unconditional(),
            encoder(
                jnp.zeros((2, c.num_text_tokens, c.text_size)),
                jnp.zeros((2, c.num_image_tokens, c.image_size)),
            ),
        )
    )(encoder)
    assert found.shape == (226, 64)
    np.testing.assert_allclose(found, expected[1], atol=1e-6)
    # One row for all text tokens, and another one for all image tokens.
    assert np.ptp(found[:30], axis=0).max() < 1e-6
    assert np.ptp(found[30:], axis=0).max() < 1e-6
    assert np.abs(found[0] - found[30]).max() > 0.1


def test_the_position_table_is_the_checkpoints(source, dit):
    stored = source.read("mixins.pos_embed.pos_embedding")[0]
    found = position_table(dit.config)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, stored)
    assert not found[:226].any()


def test_the_position_table_is_diffusers_at_full_width(diffusers):
    config = DiTConfig(latent_frames=2, latent_height=6, latent_width=8, num_context_tokens=3)
    theirs = diffusers.models.embeddings.get_3d_sincos_pos_embed(
        1920, (4, 3), 2, spatial_interpolation_scale=1.875, output_type="pt"
    )
    found = position_table(config)[3:]
    np.testing.assert_allclose(found, theirs.flatten(0, 1).numpy(), atol=2e-6)


def test_context_of_a_picture_is_over_the_frame():
    """A cell's position is the mean of those of the patches that it covers, and so is its code."""
    config = dataclasses.replace(
        PLAIN, latent_height=8, latent_width=12, num_context_tokens=7, context_grid=(2, 3)
    )
    plain = position_table(dataclasses.replace(config, context_grid=None))
    found = position_table(config)
    np.testing.assert_array_equal(found[7:], plain[7:])
    assert not found[0].any()  # not a picture's
    per_frame = (8 // 2) * (12 // 2)
    patches = found[7 : 7 + per_frame].reshape(4, 6, -1)
    middle = patches.reshape(2, 2, 3, 2, -1).mean(axis=(1, 3)).reshape(6, -1)
    cosine = (found[1:7] * middle).sum(1) / np.linalg.norm(found[1:7], axis=1)
    np.testing.assert_array_less(0.99, cosine / np.linalg.norm(middle, axis=1))
    # Nearest, of all patches of all frames, are the four beneath.
    distance = np.linalg.norm(found[1:7, None] - found[None, 7:], axis=-1)
    cells = np.arange(6).reshape(2, 3).repeat(2, 0).repeat(2, 1).ravel()
    for cell in range(6):
        nearest = np.argsort(distance[cell])[:4]
        assert (nearest < per_frame).all()
        assert (cells[nearest] == cell).all()
    with pytest.raises(ValueError, match="grid of 4 x 2: more than 7 tokens"):
        position_table(dataclasses.replace(config, context_grid=(4, 2)))


def test_sinusoid_is_diffusers(diffusers):
    x = np.array([0.0, 0.5, 2.5, 640.0, 999.0], np.float32)
    theirs = diffusers.models.embeddings.get_timestep_embedding(
        torch.from_numpy(x), 64, flip_sin_to_cos=True, downscale_freq_shift=0
    )
    # At 999 an angle's last digit is worth 6e-5.
    np.testing.assert_allclose(sinusoid(jnp.asarray(x), 64), theirs.numpy(), atol=1e-4)


# --- diffusers ------------------------------------------------------------------------------


def randomize(theirs: torch.nn.Module) -> dict[str, np.ndarray]:
    """Random weights in a module of theirs; its state in numpy."""
    random = np.random.default_rng(7)
    out = {}
    for name, parameter in theirs.named_parameters():
        shape = tuple(parameter.shape)
        is_norm = len(shape) == 1 and name.endswith("weight")
        scale = 0.1 if len(shape) == 1 else np.prod(shape[1:]) ** -0.5
        out[name] = (random.normal(size=shape) * scale + is_norm).astype(np.float32)
        parameter.data = torch.from_numpy(out[name].copy())
    return out


def map_linear(state: dict[str, np.ndarray], theirs: str, ours: str) -> dict[str, np.ndarray]:
    return {f"{ours}.kernel": state[f"{theirs}.weight"].T, f"{ours}.bias": state[f"{theirs}.bias"]}


def map_norm(state: dict[str, np.ndarray], theirs: str, ours: str) -> dict[str, np.ndarray]:
    return {f"{ours}.scale": state[f"{theirs}.weight"], f"{ours}.bias": state[f"{theirs}.bias"]}


def map_block(state: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """A block of theirs: two modulations of six vectors each, and three separate projections."""
    p, out = prefix, {}
    for kind in ("weight", "bias"):
        first, second = (
            np.split(state[f"{p}norm{i}.linear.{kind}"], 2) for i in (1, 2)
        )  # of the patches, of the context
        vectors = np.concatenate([first[0], second[0], first[1], second[1]])
        out[f"modulation.{'kernel' if kind == 'weight' else 'bias'}"] = vectors.T
        parts = [state[f"{p}attn1.to_{part}.{kind}"] for part in "qkv"]
        out[f"qkv.{'kernel' if kind == 'weight' else 'bias'}"] = np.stack([x.T for x in parts])
    return {
        **out,
        **map_norm(state, f"{p}norm1.norm", "attention_norm"),
        **map_norm(state, f"{p}attn1.norm_q", "query_norm"),
        **map_norm(state, f"{p}attn1.norm_k", "key_norm"),
        **map_linear(state, f"{p}attn1.to_out.0", "out"),
        **map_norm(state, f"{p}norm2.norm", "mlp_norm"),
        **map_linear(state, f"{p}ff.net.0.proj", "mlp_in"),
        **map_linear(state, f"{p}ff.net.2", "mlp_out"),
    }


def map_transformer(state: dict[str, np.ndarray], config: DiTConfig) -> dict[str, np.ndarray]:
    blocks = [map_block(state, f"transformer_blocks.{i}.") for i in range(config.num_layers)]
    stacked = {
        f"layers.blocks.{path}": np.stack([block[path] for block in blocks]) for path in blocks[0]
    }
    size = config.time_embed_size
    patch = state["patch_embed.proj.weight"]  # [width, channels, p, q]
    return {
        **stacked,
        "positions": position_table(config),
        "patch_in.kernel": patch.transpose(2, 3, 1, 0).reshape(-1, len(patch)),
        "patch_in.bias": state["patch_embed.proj.bias"],
        **map_linear(state, "time_embedding.linear_1", "time_embed.input"),
        **map_linear(state, "time_embedding.linear_2", "time_embed.output"),
        # They have no motion input: ours says nothing, as it does before training.
        "motion_embed.input.kernel": np.ones((config.hidden_size, size), np.float32),
        "motion_embed.input.bias": np.ones(size, np.float32),
        "motion_embed.output.kernel": np.zeros((size, size), np.float32),
        "motion_embed.output.bias": np.zeros(size, np.float32),
        **map_norm(state, "norm_final", "final_norm"),
        **map_norm(state, "norm_out.norm", "output_norm"),
        **map_linear(state, "norm_out.linear", "output_modulation"),
        **map_linear(state, "proj_out", "patch_out"),
    }


def test_is_diffusers_transformer(diffusers):
    c = PLAIN
    theirs = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=c.num_attention_heads,
        attention_head_dim=c.hidden_size // c.num_attention_heads,
        in_channels=c.latent_channels,
        out_channels=c.latent_channels,
        time_embed_dim=c.time_embed_size,
        text_embed_dim=c.hidden_size,
        num_layers=c.num_layers,
        sample_width=c.latent_width,
        sample_height=c.latent_height,
        sample_frames=4 * (c.latent_frames - 1) + 1,
        max_text_seq_length=c.num_context_tokens,
    ).eval()
    state = randomize(theirs)
    theirs.norm_out.norm.eps = 1e-6  # the released code's; theirs takes 1e-5
    theirs.patch_embed.text_proj.weight.data = torch.eye(c.hidden_size)  # ours is the encoder's
    theirs.patch_embed.text_proj.bias.data.zero_()
    x, timestep, motion, context = inputs(c)
    with torch.no_grad():
        expected = theirs(
            hidden_states=torch.from_numpy(np.array(jnp.moveaxis(x, -1, 2))),
            encoder_hidden_states=torch.from_numpy(np.array(context)),
            timestep=torch.from_numpy(np.array(timestep)),
        ).sample.numpy()
    ours = build("dit", c, map_transformer(state, c).items())
    found = run(ours, x, timestep, motion, context)
    assert error(found, np.moveaxis(expected, 2, -1)) < 1e-5


def test_one_block_is_diffusers(diffusers):
    c = dataclasses.replace(PLAIN, num_layers=1)
    transformer_3d = diffusers.models.transformers.cogvideox_transformer_3d
    theirs = transformer_3d.CogVideoXBlock(
        dim=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        attention_head_dim=c.hidden_size // c.num_attention_heads,
        time_embed_dim=c.time_embed_size,
        attention_bias=True,
    ).eval()
    mapped = map_block(randomize(theirs))
    random = np.random.default_rng(8)
    context, patches, emb = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((2, NUM_QUERIES, WIDTH), (2, 18, WIDTH), (2, c.time_embed_size))
    )
    with torch.no_grad():
        arrays = (torch.from_numpy(array) for array in (patches, context, emb))
        expected = [part.numpy() for part in theirs(*arrays)]
    leaves = dict(random_leaves("dit", c, 0))
    leaves |= {f"layers.blocks.{path}": value[None] for path, value in mapped.items()}
    ours = build("dit", c, leaves.items())
    x = np.concatenate([context, patches], axis=1)

    @jax.jit
    def layers(ours, x, emb):
        modulation = ours.layers.blocks.modulation
        made = jax.vmap(lambda linear: linear(jax.nn.silu(emb)))(modulation)
        return ours.layers(x, NUM_QUERIES, x.shape[1], per_layer=made)[0]

    found = layers(ours, x, emb)
    assert error(found, np.concatenate(expected[::-1], axis=1)) < 1e-5


# --- properties -----------------------------------------------------------------------------


def test_modulation_may_be_made_before(tiny):
    x, timestep, motion, context = inputs(TINY)

    @jax.jit
    def both(dit, x, timestep, motion, context):
        asked = {"timestep": timestep, "motion": motion, "context": context}
        made = dit.modulation(timestep, motion)
        return dit(x, **asked), dit(x, **asked, modulation=made), made

    found, expected, made = both(tiny, x, timestep, motion, context)
    np.testing.assert_array_equal(found, expected)
    assert made.layers.shape == (TINY.num_layers, len(x), 12 * TINY.hidden_size)
    assert made.output.shape == (len(x), 2 * TINY.hidden_size)


def test_motion_and_timestep_and_context_matter(tiny):
    x, timestep, motion, context = inputs(TINY)
    base = run(tiny, x, timestep, motion, context)
    for other in (
        run(tiny, x, timestep - 10, motion, context),
        run(tiny, x, timestep, motion + 2, context),
        run(tiny, x, timestep, motion, context[:, ::-1] * 2),
    ):
        assert error(other, base) > 1e-3


def test_low_rank_updates_start_at_nothing(tiny):
    """With B zero, as it is made, the function is that without LoRA, whatever A is."""
    leaves = dict(random_leaves("dit", TINY, 0))
    assert sum(path.endswith("lora_b") for path in leaves) == 2
    zero = {p: np.zeros_like(v) if p.endswith("lora_b") else v for p, v in leaves.items()}
    plain = {path: value for path, value in leaves.items() if ".lora_" not in path}
    args = inputs(TINY)
    expected = run(build("dit", PLAIN, plain.items()), *args)
    assert error(run(build("dit", TINY, zero.items()), *args), expected) < 1e-6
    assert error(run(tiny, *args), expected) > 1e-2


def test_recomputing_changes_no_gradient(tiny):
    """Gradients of the low-rank updates of every layer, and of what the layers read."""
    random = np.random.default_rng(9)
    x = jnp.asarray(random.normal(size=(1, NUM_QUERIES + 18, WIDTH)), jnp.float32)
    shape = (TINY.num_layers, 1, 12 * WIDTH)
    modulation = jnp.asarray(random.normal(size=shape), jnp.float32)
    lora, rest = nnx.split_state(nnx.state(tiny.layers), nnx.LoRAParam, ...)
    gradients = {}
    for remat in ("none", "full", "dots"):
        layers = abstract_network("dit", dataclasses.replace(TINY, remat=remat)).layers
        graphdef = nnx.graphdef(layers)

        @jax.jit
        def gradient(lora, x, rest, graphdef=graphdef):
            def loss(lora, x):
                y, _ = nnx.merge(graphdef, lora, rest)(
                    x, NUM_QUERIES, x.shape[1], per_layer=modulation
                )
                return jnp.square(y).mean()

            return jax.grad(loss, argnums=(0, 1))(lora, x)

        gradients[remat] = [np.asarray(g) for g in jax.tree.leaves(gradient(lora, x, rest))]
    assert len(gradients["none"]) == 5
    for expected, *others in zip(*gradients.values(), strict=True):
        for found in others:
            assert error(found, expected) < 1e-5


@pytest.mark.parametrize("change", [(1, 0, 0), (0, 2, 0), (0, 0, -2)])
def test_another_latent_shape_is_refused(tiny, change):
    x, timestep, motion, context = inputs(TINY)
    shape = [size + more for size, more in zip(x.shape[1:4], change, strict=True)]
    with pytest.raises(ValueError, match="has positions for 3 x 4 x 6"):
        tiny(jnp.zeros((2, *shape, x.shape[-1])), timestep=timestep, motion=motion, context=context)


def test_a_picture_has_the_positions_of_the_first_frame(tiny):
    """As a transformer of one frame with the same weights."""
    x, timestep, motion, context = inputs(TINY)
    leaves = {
        name: leaf[: NUM_QUERIES + 6] if name == "positions" else leaf
        for name, leaf in random_leaves("dit", TINY, 0)
    }
    alone = build("dit", dataclasses.replace(TINY, latent_frames=1), leaves.items())
    assert TINY.latent_frames > TINY.patch_frames == 1
    found = run(tiny, x[:, :1], timestep, motion, context)
    assert found.shape == (2, 1, *x.shape[2:])
    expected = run(alone, x[:, :1], timestep, motion, context)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_runs_in_bfloat16(tiny):
    config = dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16")
    half = build("dit", config, random_leaves("dit", TINY, 0))
    args = inputs(TINY)
    found = run(half, *args)
    assert found.dtype == jnp.bfloat16
    assert 1e-4 < error(found, run(tiny, *args)) < 0.15


def test_patches_of_several_frames_are_patches_of_more_channels():
    """The frames of a patch are distinguished as further channels would be."""
    frames, c, p = 3, PLAIN.latent_channels, PLAIN.patch_size
    deep = dataclasses.replace(PLAIN, latent_frames=6, patch_frames=frames)
    flat = dataclasses.replace(PLAIN, latent_frames=2, latent_channels=frames * c)
    assert deep.num_patches == flat.num_patches
    leaves = dict(random_leaves("dit", deep, 0))
    kernel = leaves["patch_in.kernel"].reshape(frames, p, p, c, -1)
    moved = kernel.transpose(1, 2, 0, 3, 4).reshape(leaves["patch_in.kernel"].shape)
    x, *rest = inputs(deep)
    found = run(build("dit", deep, leaves.items()), x, *rest)
    b, _, h, w, _ = x.shape
    folded = x.reshape(b, 2, frames, h, w, c).transpose(0, 1, 3, 4, 2, 5).reshape(b, 2, h, w, -1)
    expected = run(build("dit", flat, {**leaves, "patch_in.kernel": moved}.items()), folded, *rest)
    expected = expected.reshape(b, 2, h, w, frames, c).transpose(0, 1, 4, 2, 3, 5)
    assert error(found, expected.reshape(x.shape)) < 1e-5


def test_an_output_of_clean_latents_is_turned_into_v(tiny):
    config = dataclasses.replace(TINY, output="clean")
    clean = build("dit", config, random_leaves("dit", TINY, 0))  # the same weights
    x, timestep, *rest = inputs(TINY)
    raw, v = run(tiny, x, timestep, *rest), run(clean, x, timestep, *rest)
    level = Schedule().signal_levels()[np.asarray(timestep, int)].reshape(-1, 1, 1, 1, 1)
    assert error(level * x - np.sqrt(1 - level**2) * v, raw) < 1e-4
