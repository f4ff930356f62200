"""OpenCLIP's towers against the released numbers, transformers, and the released file's names."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_modules import initialized
from tiny_clip import TINY, make_transformers_clip, openclip_tensors

from animegamer_jax.bundle.bundle import abstract_params
from animegamer_jax.configs import CLIPConfig
from animegamer_jax.convert.rules import find_problems, load
from animegamer_jax.convert.sources import Source, Tensor
from animegamer_jax.convert.tables.clip import infer_config, rules
from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP

TESTS = Path(__file__).parents[1]
REFERENCE = TESTS / "reference" / "clip"
PREFIX = "clip_img_encoder.model."


@jax.jit
def _preprocess(model: CLIP, images: jax.Array) -> jax.Array:
    return model.preprocess(images)


@jax.jit
def _image_features(model: CLIP, pixels: jax.Array) -> jax.Array:
    return model.image_features(pixels)


def _error(actual, expected) -> float:
    expected = np.asarray(expected)
    return float(np.abs(np.asarray(actual) - expected).max() / np.sqrt(np.square(expected).mean()))


def _filled(config: CLIPConfig, tensors: dict[str, np.ndarray]) -> CLIP:
    module = nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0)))
    source = {name: Tensor(value.shape, value.dtype, value.copy) for name, value in tensors.items()}
    load(rules(config), Source("tiny", source), module)
    return module


def _manifest() -> dict[str, tuple[int, ...]]:
    text = (TESTS / "manifests" / "openclip_vit_b_16.json").read_text()
    return {name.removeprefix(PREFIX): tuple(shape) for name, shape in json.loads(text).items()}


@pytest.mark.parametrize("text_layers", [0, 12])
def test_table_is_the_released_file(text_layers):
    # The released decoder file leaves out the text tower's layers; OpenCLIP's own file has them.
    shapes = _manifest()
    for name, shape in list(shapes.items()):
        if "resblocks" in name:
            text = tuple(size * 512 // 768 for size in shape)
            if int(name.split(".")[3]) < text_layers:
                shapes[name.removeprefix("visual.")] = text
    config = infer_config(shapes)
    assert config == CLIPConfig(text_layers=text_layers)
    assert find_problems([(rules(config), abstract_params("clip", config))], shapes) == []
    module = nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0)))
    for path, param in nnx.to_flat_state(nnx.state(module)):
        assert len(param.get_metadata()["out_sharding"]) == param.ndim, path


def test_infer_config_says_what_is_wrong():
    shapes = _manifest()
    with pytest.raises(UserError, match="768 is not a multiple of the head width 100"):
        infer_config(shapes, head_width=100)
    del shapes["visual.proj"]
    with pytest.raises(UserError, match=r"'visual\.proj'.*no such tensor among"):
        infer_config(shapes)


@pytest.fixture(scope="module")
def released():
    """The released code's tiny image tower (its text tower has no layers) and its numbers."""
    torch = pytest.importorskip("torch")

    file = torch.load(REFERENCE / "clip_module_states.pt", weights_only=True, map_location="cpu")
    tensors = {k.removeprefix(PREFIX): v.float().numpy() for k, v in file["module"].items()}
    head_width = json.loads((REFERENCE / "config.json").read_text())["head_width"]
    config = infer_config({k: v.shape for k, v in tensors.items()}, head_width=head_width)
    assert (config.vision_layers, config.vision_heads, config.text_layers) == (3, 4, 0)
    with np.load(REFERENCE / "clip.npz") as arrays:
        return _filled(config, tensors), dict(arrays)


def test_released_preprocessing_and_features(released):
    model, arrays = released
    pixels = _preprocess(model, arrays["image"].transpose(0, 2, 3, 1))
    expected = arrays["preprocessed"].transpose(0, 2, 3, 1)
    assert _error(pixels, expected) < 1e-5
    assert _error(_image_features(model, expected), arrays["features"]) < 1e-5
    # From the image on, the resize's last bits pass through the layers as well.
    assert _error(_image_features(model, pixels), arrays["features"]) < 2e-5


def test_a_text_tower_without_layers_says_so(released):
    with pytest.raises(UserError, match="convert OpenCLIP's own file"):
        released[0].embed_text(jnp.asarray([[1, 2, 63, 0]]))


@pytest.mark.parametrize("case", ["shrunk", "mixed"])
def test_preprocessing_that_shrinks(case):
    """A real frame is larger than the square: then the release blurs first.

    `kornia_resize.npz` holds kornia 0.9.0's `resize(x, (24, 24), interpolation="bicubic",
    align_corners=True, antialias=True)` of two random pictures.
    """
    with np.load(REFERENCE / "kornia_resize.npz") as arrays:
        frames, resized = arrays[case], arrays[f"{case}_resized"]
    model = nnx.eval_shape(lambda: CLIP(TINY, rngs=nnx.Rngs(0)))
    pixels = jax.jit(model.preprocess)((frames / 127.5 - 1).astype(np.float32))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    assert _error(pixels, ((resized + 1) / 2 - np.asarray(mean)) / np.asarray(std)) < 1e-5


def test_transformers():
    torch = pytest.importorskip("torch")

    theirs = make_transformers_clip(TINY)
    tensors = openclip_tensors(theirs, TINY)
    assert infer_config({k: v.shape for k, v in tensors.items()}, head_width=8) == TINY
    model = _filled(TINY, tensors)

    rng = np.random.default_rng(2)
    pixels = rng.standard_normal((2, 24, 24, 3), dtype=np.float32)
    tokens = rng.integers(1, TINY.vocab_size - 1, (2, 9))
    tokens[0, 5], tokens[1, 8], tokens[0, 6:] = TINY.vocab_size - 1, TINY.vocab_size - 1, 0
    with torch.no_grad():
        torch_pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2))
        vision = theirs.vision_model(torch_pixels, output_hidden_states=True)
        text = theirs.text_model(torch.from_numpy(tokens))
        image_embed = theirs.visual_projection(vision.pooler_output).numpy()
        text_embed = theirs.text_projection(text.pooler_output).numpy()
        penultimate = vision.hidden_states[-2][:, 1:].numpy()

    run = jax.jit(
        lambda model, pixels, tokens: (
            model.image_features(pixels),
            model.embed_image(pixels),
            model.embed_text(tokens),
        )
    )
    outputs = run(model, jnp.asarray(pixels), jnp.asarray(tokens))
    for actual, expected in zip(outputs, (penultimate, image_embed, text_embed), strict=True):
        assert actual.shape == expected.shape
        assert _error(actual, expected) < 1e-5


def test_half_precision_and_recomputation():
    config = dataclasses.replace(TINY, dtype="bfloat16", remat="full")
    half, full = (initialized(lambda c=c: CLIP(c, rngs=nnx.Rngs(0))) for c in (config, TINY))
    pixels = np.random.default_rng(0).normal(size=(1, 24, 24, 3)).astype(np.float32)
    features = _image_features(half, pixels)
    assert features.dtype == jnp.bfloat16
    found = np.asarray(features).astype(np.float32)
    assert _error(found, _image_features(full, pixels)) < 0.1
