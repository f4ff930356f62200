import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array_source
from jax.sharding import NamedSharding
from random_modules import initialized

from animegamer_jax.configs import SIZES, VAEConfig
from animegamer_jax.convert.rules import load
from animegamer_jax.convert.tables.vae import infer_config, rules
from animegamer_jax.errors import UserError
from animegamer_jax.models import convolution, linear
from animegamer_jax.models import vae as vae_module
from animegamer_jax.models.convolution import CausalConv, conv3d, conv3d_direct, conv3d_planes
from animegamer_jax.models.latents import sample
from animegamer_jax.models.vae import VAE, DecoderCache, chunk_bounds, decode_in_parts, to_uint8
from animegamer_jax.sharding import make_mesh, param_shardings, partition_spec

TESTS = Path(__file__).parents[1]
TINY = VAEConfig(
    channels=8,
    multipliers=(1, 2),
    num_res_blocks=1,
    latent_channels=4,
    temporal_compression=2,
    norm_groups=4,
)

# Decoding: float32 itself. Against diffusers in float64, the recorded chunks are off by 1.03e-5 of
# their RMS and ours by 1.1e-5, so that the two may differ by the sum.
ENCODE_TOLERANCE, DECODE_TOLERANCE = 1e-5, 3e-5


@jax.jit
def _encode(vae: VAE, video: jax.Array) -> jax.Array:
    return vae.encode(video)


@jax.jit
def _decode(vae: VAE, latents: jax.Array) -> jax.Array:
    return vae.decode(latents)


def _params(module: nnx.Module) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): p for path, p in nnx.to_flat_state(nnx.state(module))}


def _make(config: VAEConfig, seed: int = 0) -> VAE:
    """A VAE of random numbers, norms and maps too (made by numpy: nothing to compile)."""
    vae = nnx.eval_shape(lambda: VAE(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    for name, param in _params(vae).items():
        fan_in = int(np.prod(param.shape[:-1]))
        scale = fan_in**-0.5 if name.endswith("kernel") else 0.1
        center = 1.0 if name.endswith(("scale", "conv_y.bias")) else 0.0
        value = center + scale * rng.normal(size=param.shape)
        param.set_value(jnp.asarray(value.astype(np.float32), param.dtype))
    return vae


def _error(value: jax.Array, expected: np.ndarray) -> float:
    """Largest difference over the RMS of `expected`, a PyTorch array (channels second)."""
    expected = np.moveaxis(expected, 1, -1)
    assert value.shape == expected.shape
    return float(np.abs(np.asarray(value) - expected).max() / np.sqrt(np.square(expected).mean()))


def _channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


def _normal(*shape: int, seed: int) -> np.ndarray:
    """Drawn, cut and compared by numpy: each operation of JAX would be compiled for its shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Names and shapes


@pytest.fixture(scope="module")
def manifest() -> dict[str, tuple[int, ...]]:
    names = json.loads((TESTS / "manifests" / "vae.json").read_text())
    return {name: tuple(shape) for name, shape in names.items()}


def test_rules_cover_the_released_file(manifest):
    config = infer_config(manifest)
    assert config == VAEConfig()
    vae = nnx.eval_shape(lambda: VAE(config, rngs=nnx.Rngs(0)))
    shapes = {name: p.shape for name, p in _params(vae).items()}
    table = [rule for rule in rules(config) if rule.target is not None]
    assert sorted(rule.source for rule in table) == sorted(manifest)
    assert sorted(rule.target for rule in table) == sorted(shapes)
    for rule in table:
        tensor = np.broadcast_to(np.float32(0), manifest[rule.source])  # one number: no memory
        assert rule.transform.forward(tensor).shape == shapes[rule.target], rule
        assert rule.transform.inverse(rule.transform.forward(tensor)).shape == tensor.shape
    assert [rule.source for rule in rules(config) if rule.target is None] == ["loss.*"]
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(vae, nnx.Param)))
    assert size == sum(int(np.prod(shape)) for shape in manifest.values())


@pytest.mark.parametrize("config", [SIZES["toy"]().vae, TINY])
def test_rules_fit_other_sizes(config):
    vae = nnx.eval_shape(lambda: VAE(config, rngs=nnx.Rngs(0)))
    params = _params(vae)
    table = [rule for rule in rules(config) if rule.target is not None]
    assert sorted(rule.target for rule in table) == sorted(params)
    shapes = {}
    for rule in table:
        value = np.broadcast_to(np.float32(0), params[rule.target].shape)
        shapes[rule.source] = rule.transform.inverse(value).shape
    found = infer_config(shapes)
    reported = ("channels", "multipliers", "num_res_blocks", "latent_channels", "image_channels")
    assert [getattr(found, name) for name in reported] == [
        getattr(config, name) for name in reported
    ]


def test_every_parameter_has_an_axis_name_a_dimension():
    vae = nnx.eval_shape(lambda: VAE(TINY, rngs=nnx.Rngs(0)))
    for name, param in _params(vae).items():
        names = param.get_metadata()["out_sharding"]
        assert len(names) == len(param.shape), name
        partition_spec(names)


def test_other_checkpoints_are_refused(manifest):
    with pytest.raises(UserError, match=r"conv_in\.conv\.weight'.*no such tensor.*3D VAE"):
        infer_config({"model.weight": (3, 3)})
    shapes = manifest | {"encoder.down.1.block.0.conv1.conv.weight": (200, 128, 3, 3, 3)}
    with pytest.raises(UserError, match="200 channels"):
        infer_config(shapes)


# Third-party truth


def test_recorded_numbers():
    torch = pytest.importorskip("torch")
    folder = TESTS / "reference" / "vae"
    checkpoint = torch.load(folder / "3d-vae.pt", weights_only=True)["state_dict"]
    tensors = {name: value.float().numpy() for name, value in checkpoint.items()}
    vae = _make(infer_config({k: v.shape for k, v in tensors.items()}))
    load(rules(vae.config), array_source(tensors), vae)
    recorded = np.load(folder / "vae.npz")
    video, latents = (_channels_last(recorded[name]) for name in ("video", "latents"))
    assert chunk_bounds(latents.shape[1]) == [tuple(row) for row in recorded["chunk_bounds"]]

    assert _error(_encode(vae, video), recorded["moments"]) <= ENCODE_TOLERANCE
    assert _error(_encode(vae, video[:, :1]), recorded["image_moments"]) <= ENCODE_TOLERANCE
    assert _error(_decode(vae, latents), recorded["decoded_in_chunks"]) <= DECODE_TOLERANCE
    first = recorded["decoded_first_latent_only"]
    assert _error(_decode(vae, latents[:, :1]), first) <= DECODE_TOLERANCE


def _released_name(name: str, num_levels: int) -> str:
    """Diffusers' name to the released file's; it counts the decoder's levels from the coarsest."""

    def level(match: re.Match) -> str:
        return f"up.{num_levels - 1 - int(match[1])}"

    name = re.sub(r"up_blocks\.(\d+)", level, name).replace("down_blocks", "down")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    name = re.sub(r"(down|up)samplers\.0", r"\1sample", name)
    return name.replace("resnets", "block").replace("conv_shortcut", "nin_shortcut")


def test_diffusers_autoencoder():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusers = pytest.importorskip("diffusers")
        theirs = diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 3,
            up_block_types=("CogVideoXUpBlock3D",) * 3,
            block_out_channels=(8, 16, 16),
            layers_per_block=1,
            latent_channels=3,
            norm_num_groups=4,
        )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    state = theirs.state_dict()
    tensors = {_released_name(name, 3): value.numpy() for name, value in state.items()}
    config = infer_config({name: value.shape for name, value in tensors.items()})
    assert config.multipliers == (1, 2, 2)
    assert config.num_res_blocks == 1
    vae = _make(dataclasses.replace(config, norm_groups=4))
    load(rules(vae.config), array_source(tensors), vae)

    rng = np.random.default_rng(0)
    # 9 frames: diffusers encodes longer clips in pieces. 7 latents: three chunks, the same as ours.
    video = rng.uniform(-1, 1, (2, 3, 9, 8, 12)).astype(np.float32)
    latents = rng.normal(size=(2, 3, 7, 2, 3)).astype(np.float32)
    with torch.no_grad():
        expected_moments = theirs.encode(torch.tensor(video)).latent_dist.parameters.numpy()
        expected_frames = theirs.decode(torch.tensor(latents)).sample.numpy()
    assert _error(_encode(vae, _channels_last(video)), expected_moments) <= ENCODE_TOLERANCE
    assert _error(_decode(vae, _channels_last(latents)), expected_frames) <= DECODE_TOLERANCE


# Chunks


@pytest.fixture(scope="module")
def tiny() -> VAE:
    return _make(TINY)


def test_chunk_bounds():
    assert chunk_bounds(1) == [(0, 1)]
    assert chunk_bounds(3) == [(0, 3)]
    assert chunk_bounds(7) == [(0, 3), (3, 5), (5, 7)]
    for number in (0, 2, 4, -1):
        with pytest.raises(ValueError, match="odd number"):
            chunk_bounds(number)


def test_decode_walks_the_chunks_with_their_cache(tiny):
    step = jax.jit(lambda vae, latents, cache: vae.decode_chunk(latents, cache))
    latents = _normal(2, 5, 3, 2, 4, seed=1)
    first, cache = step(tiny, latents[:, :3], None)
    assert isinstance(cache, DecoderCache)
    assert cache.conv_in.shape == (2, 2, 3, 2, 4)
    assert cache.conv_out.shape == (2, 2, 6, 4, 8)
    rest, last_cache = step(tiny, latents[:, 3:], cache)
    assert jax.tree.map(jnp.shape, last_cache) == jax.tree.map(jnp.shape, cache)
    frames = _decode(tiny, latents)
    assert (first.shape[1], rest.shape[1]) == (5, 4)
    assert frames.shape == (2, 9, 6, 4, 3)
    np.testing.assert_allclose(frames, np.concatenate([first, rest], 1), atol=1e-5)
    nothing = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), cache)
    blank, _ = step(tiny, latents[:, 3:], nothing)
    assert np.abs(np.asarray(blank) - np.asarray(rest)).max() > 1e-2


def _decode_chunks(vae: VAE, latents: jax.Array) -> list[Any]:
    """Returns frames and cache of the first two chunks; each call traces them again."""

    def decode(vae: VAE, latents: jax.Array) -> tuple[Any, Any]:
        first, cache = vae.decode_chunk(latents[:, :3])
        return (first, cache), vae.decode_chunk(latents[:, 3:], cache)

    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(decode)(vae, latents))]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_few_frames_at_a_time_equal_all_at_once(dtype, tolerance, monkeypatch):
    vae = _make(dataclasses.replace(TINY, dtype=dtype, param_dtype=dtype))
    latents = _normal(2, 5, 3, 2, 4, seed=1)
    whole = _decode_chunks(vae, latents)
    # The finest level's five frames one by one, four in pairs; the coarse level's all at once.
    monkeypatch.setattr(vae_module, "_MOST_NUMBERS", 4 * 6 * 4 * 8)
    for few, all_ in zip(_decode_chunks(vae, latents), whole, strict=True):
        error = np.sqrt(np.square(few - all_).mean() / np.square(all_).mean())
        assert error <= tolerance


def test_only_large_arrays_are_made_a_few_frames_at_a_time(tiny, monkeypatch):
    def count_loops(most: int, num_latents: int = 3) -> int:
        monkeypatch.setattr(vae_module, "_MOST_NUMBERS", most)
        latents = jax.ShapeDtypeStruct((1, num_latents, 3, 2, 4), jnp.float32)
        return str(jax.make_jaxpr(lambda x: tiny.decode_chunk(x)[0])(latents)).count("scan[")

    frame = 6 * 4 * 16  # numbers in a frame that enters the finest level
    assert count_loops(7 * frame) == 0  # five frames and two before them
    assert count_loops(7 * frame - 1) == 1
    assert count_loops(3 * frame - 1) == 6  # upsampling, two blocks, the last convolution
    assert count_loops(1, num_latents=1) == 0


def test_a_batch_is_its_clips_one_by_one(tiny):
    latents = _normal(2, 1, 3, 2, 4, seed=2)
    together = _decode(tiny, latents)
    alone = [_decode(tiny, latents[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


def test_causal_convolution():
    conv = initialized(lambda: CausalConv(4, 8, config=TINY, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda x, cache=None: conv(x, cache))
    x = _normal(1, 4, 4, 3, 4, seed=3)
    whole, _ = run(x)
    first, cache = run(x[:, :2])
    np.testing.assert_array_equal(cache, x[:, :2])
    rest, cache = run(x[:, 2:], cache)
    np.testing.assert_array_equal(cache, x[:, -2:])
    np.testing.assert_allclose(whole, np.concatenate([first, rest], 1), atol=1e-5)
    picture, cache = run(x[:, :1])  # one plane for all three; a chunk shorter than the cache
    np.testing.assert_allclose(picture, np.asarray(whole)[:, :1], atol=1e-5)
    np.testing.assert_array_equal(cache, x[:, [0, 0]])


def test_a_kernel_of_one_frame_is_a_causal_one_without_a_past():
    causal = initialized(lambda: CausalConv(4, 8, config=TINY, rngs=nnx.Rngs(0)))
    config = dataclasses.replace(TINY, kernel_frames=1)
    alone = initialized(lambda: CausalConv(4, 8, config=config, rngs=nnx.Rngs(0)), seed=1)
    causal.kernel.set_value(causal.kernel[...].at[:2].set(0))
    alone.kernel.set_value(causal.kernel[2:])
    alone.bias.set_value(causal.bias[...])
    run = jax.jit(lambda conv, x, cache=None: conv(x, cache))
    x = _normal(1, 4, 4, 3, 4, seed=3)
    expected, _ = run(causal, x)
    first, cache = run(alone, x[:, :1])
    assert cache.shape == (1, 0, 4, 3, 4)
    rest, cache = run(alone, x[:, 1:], cache)
    assert cache.shape == (1, 0, 4, 3, 4)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), expected, atol=1e-5)


def test_sizes_that_do_not_fit_are_refused(tiny):
    for shape in [(1, 4, 4, 4, 3), (1, 3, 5, 4, 3), (1, 3, 4, 7, 3)]:
        with pytest.raises(ValueError, match="frames of"):
            tiny.encode(jnp.asarray(np.zeros(shape, np.float32)))
    with pytest.raises(ValueError, match="norm groups"):
        VAE(dataclasses.replace(TINY, norm_groups=3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="temporal compression 3"):
        VAE(dataclasses.replace(TINY, temporal_compression=3), rngs=nnx.Rngs(0))


# Pixels


def test_to_uint8():
    levels = jnp.asarray(np.arange(256, dtype=np.float32) / 255 * 2 - 1)
    np.testing.assert_array_equal(to_uint8(levels), np.arange(256))
    values = jnp.array([-3.0, -1.0, 0.0, 0.999, 1.0, 7.0])
    np.testing.assert_array_equal(to_uint8(values), [0, 0, 128, 255, 255, 255])


# Convolutions, gradients, number formats, meshes


def test_both_forms_of_the_convolution_agree():
    x, kernel = _normal(2, 5, 6, 4, 8, seed=0), _normal(3, 3, 3, 8, 12, seed=1)

    @jax.jit
    def everything(x: jax.Array, kernel: jax.Array) -> list[list[jax.Array]]:
        def loss(x, kernel, form):
            y = form(x, kernel)
            return jnp.square(y).mean(), y

        forms = (conv3d, conv3d_planes, conv3d_direct)
        both = [jax.grad(loss, (0, 1), has_aux=True)(x, kernel, form) for form in forms]
        return [jax.tree.leaves(values) for values in both]

    chosen, planes, direct = jax.device_get(everything(x, kernel))
    for a, b, c in zip(chosen, planes, direct, strict=True):
        np.testing.assert_array_equal(a, b)  # on a CPU
        scale = float(np.sqrt(np.square(c).mean()))
        np.testing.assert_allclose(b / scale, c / scale, atol=1e-5)


def test_what_a_tpu_computes_first_changes_no_number(tiny, monkeypatch):
    latents = jnp.asarray(_normal(1, 3, 4, 6, 4, seed=7))
    frames = []
    for platform in ("gpu", "tpu"):
        for module in (convolution, linear):
            monkeypatch.setattr(module, "platform", lambda platform=platform: platform)
        decode = jax.jit(lambda vae, latents: vae.decode(latents))
        frames.append(decode(tiny, latents))
        barriers = decode.lower(tiny, latents).as_text().count("optimization_barrier")
        assert (barriers > 0) == (platform == "tpu")
    np.testing.assert_allclose(frames[1], frames[0], atol=1e-5)


@pytest.mark.slow
def test_gradients():
    video = jax.random.uniform(jax.random.key(1), (1, 5, 4, 4, 3), minval=-1)
    graphdef, params = nnx.split(_make(TINY))

    @jax.jit
    @jax.grad
    def run(params: nnx.State) -> jax.Array:
        vae = nnx.merge(graphdef, params)
        latents = sample(vae.encode(video), key=jax.random.key(2))
        return jnp.square(vae.decode(latents) - video).mean()

    gradients = nnx.to_flat_state(run(params))
    assert len(gradients) == len(jax.tree.leaves(params))
    for path, gradient in gradients:
        assert bool(jnp.isfinite(gradient[...]).all()), path
        assert bool((gradient[...] != 0).any()), path


def test_recomputed_gradients_equal_saved_ones():
    config = dataclasses.replace(TINY, multipliers=(1,), temporal_compression=1)
    video = np.random.default_rng(1).uniform(-1, 1, (1, 2, 4, 4, 3))
    video = jnp.asarray(video.astype(np.float32))

    def gradients(remat: str) -> list[np.ndarray]:
        graphdef, params = nnx.split(_make(dataclasses.replace(config, remat=remat)).encoder)
        loss = jax.jit(jax.grad(lambda p: jnp.square(nnx.merge(graphdef, p)(video)).mean()))
        return jax.tree.leaves(jax.device_get(loss(params)))

    for saved, recomputed in zip(gradients("none"), gradients("full"), strict=True):
        scale = float(np.abs(saved).max())
        np.testing.assert_allclose(saved, recomputed, atol=1e-4 * scale)


def test_bfloat16(tiny):
    half = _make(dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16"))
    latents = _normal(2, 1, 3, 2, 4, seed=2)
    frames, expected = (np.asarray(_decode(vae, latents)) for vae in (half, tiny))
    assert frames.dtype == np.float32
    error = np.sqrt(np.square(frames - expected).mean() / np.square(expected).mean())
    assert 1e-5 < error < 0.05
    moments = np.asarray(_encode(half, np.zeros((1, 1, 4, 4, 3), np.float32)))
    assert moments.dtype == np.float32
    assert np.isfinite(moments).all()


def test_eight_devices_compute_what_one_does(tiny):
    latents = _normal(4, 3, 4, 2, 4, seed=5)
    expected = _decode(tiny, latents)
    mesh = make_mesh({"data": 2, "fsdp": 2, "context": 2})
    graphdef, params = nnx.split(tiny)
    names = ("act_batch", "act_frames", "act_rows", "act_columns", None)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, param_shardings(params, mesh))
        latents = jax.device_put(latents, NamedSharding(mesh, partition_spec(names)))
        frames = jax.jit(lambda params, z: nnx.merge(graphdef, params).decode(z))(params, latents)
    assert not frames.sharding.is_fully_replicated
    np.testing.assert_allclose(frames, expected, atol=1e-5)


def test_two_devices_decode_a_few_frames_at_a_time(tiny, monkeypatch):
    latents = _normal(1, 3, 4, 2, 4, seed=5)
    expected = _decode(tiny, latents)
    monkeypatch.setattr(vae_module, "_MOST_NUMBERS", 1)
    with jax.set_mesh(make_mesh({"context": 2}, devices=jax.devices()[:2])):  # rows in two parts
        frames = jax.jit(decode_in_parts)(tiny, latents)
    assert not frames.sharding.is_fully_replicated
    np.testing.assert_allclose(frames, expected, atol=1e-5)
