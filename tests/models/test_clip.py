"""OpenCLIP's towers against the released numbers, transformers, and the released file's names."""

import dataclasses
import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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
TINY = CLIPConfig(
    image_size=24,
    patch_size=8,
    vision_width=32,
    vision_layers=3,
    vision_heads=4,
    text_width=16,
    text_layers=2,
    text_heads=2,
    vocab_size=40,
    context_length=12,
    embed_size=20,
)


def _error(actual, expected) -> float:
    expected = np.asarray(expected)
    return float(np.abs(np.asarray(actual) - expected).max() / np.sqrt(np.square(expected).mean()))


def _filled(config: CLIPConfig, tensors: dict[str, np.ndarray]) -> CLIP:
    module = CLIP(config, rngs=nnx.Rngs(0))
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


def test_infer_config_tells_what_is_wrong():
    shapes = _manifest()
    with pytest.raises(UserError, match="768 is no multiple of the head width 100"):
        infer_config(shapes, head_width=100)
    del shapes["visual.proj"]
    with pytest.raises(UserError, match=r"'visual\.proj'.*no such tensor among"):
        infer_config(shapes)


@pytest.fixture(scope="module")
def released():
    """The released code's tiny image tower (its text tower has no layers) and its numbers."""
    import torch

    file = torch.load(REFERENCE / "clip_module_states.pt", weights_only=True, map_location="cpu")
    tensors = {k.removeprefix(PREFIX): v.float().numpy() for k, v in file["module"].items()}
    head_width = json.loads((REFERENCE / "config.json").read_text())["head_width"]
    config = infer_config({k: v.shape for k, v in tensors.items()}, head_width=head_width)
    assert (config.vision_layers, config.vision_heads, config.text_layers) == (3, 4, 0)
    with np.load(REFERENCE / "clip.npz") as arrays:
        return _filled(config, tensors), dict(arrays)


def test_released_preprocessing_and_features(released):
    model, arrays = released
    pixels = model.preprocess(jnp.asarray(arrays["image"].transpose(0, 2, 3, 1)))
    expected = arrays["preprocessed"].transpose(0, 2, 3, 1)
    assert _error(pixels, expected) < 1e-5
    features = jax.jit(lambda model, x: model.image_features(x))(model, jnp.asarray(expected))
    assert _error(features, arrays["features"]) < 1e-5
    # From the image on, the resize's last bits pass through the layers as well.
    assert _error(model.image_features(pixels), arrays["features"]) < 2e-5


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
    pixels = CLIP(TINY, rngs=nnx.Rngs(0)).preprocess(jnp.asarray(frames / 127.5 - 1, jnp.float32))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    assert _error(pixels, ((resized + 1) / 2 - np.asarray(mean)) / np.asarray(std)) < 1e-5


def _openclip_names(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """transformers' state dict of a CLIPModel in OpenCLIP's names."""
    out = {
        "logit_scale": state["logit_scale"],
        "visual.class_embedding": state["vision_model.embeddings.class_embedding"],
        "visual.conv1.weight": state["vision_model.embeddings.patch_embedding.weight"],
        "visual.positional_embedding": state["vision_model.embeddings.position_embedding.weight"],
        "visual.proj": state["visual_projection.weight"].T,
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "text_projection": state["text_projection.weight"].T,
    }
    for kind in ("weight", "bias"):
        out[f"visual.ln_pre.{kind}"] = state[f"vision_model.pre_layrnorm.{kind}"]
        out[f"visual.ln_post.{kind}"] = state[f"vision_model.post_layernorm.{kind}"]
        out[f"ln_final.{kind}"] = state[f"text_model.final_layer_norm.{kind}"]
        for ours, theirs, layers in (
            ("visual.transformer", "vision_model", TINY.vision_layers),
            ("transformer", "text_model", TINY.text_layers),
        ):
            for i in range(layers):
                a, b = f"{ours}.resblocks.{i}", f"{theirs}.encoder.layers.{i}"
                qkv = [state[f"{b}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                out[f"{a}.attn.in_proj_{kind}"] = np.concatenate(qkv)
                out[f"{a}.attn.out_proj.{kind}"] = state[f"{b}.self_attn.out_proj.{kind}"]
                out[f"{a}.ln_1.{kind}"] = state[f"{b}.layer_norm1.{kind}"]
                out[f"{a}.ln_2.{kind}"] = state[f"{b}.layer_norm2.{kind}"]
                out[f"{a}.mlp.c_fc.{kind}"] = state[f"{b}.mlp.fc1.{kind}"]
                out[f"{a}.mlp.c_proj.{kind}"] = state[f"{b}.mlp.fc2.{kind}"]
    return out


def test_transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        torch.manual_seed(0)
        common = {"hidden_act": "gelu", "projection_dim": TINY.embed_size}
        theirs = transformers.CLIPModel(
            transformers.CLIPConfig(
                vision_config=dict(
                    hidden_size=TINY.vision_width,
                    intermediate_size=4 * TINY.vision_width,
                    num_hidden_layers=TINY.vision_layers,
                    num_attention_heads=TINY.vision_heads,
                    image_size=TINY.image_size,
                    patch_size=TINY.patch_size,
                    **common,
                ),
                text_config=dict(
                    vocab_size=TINY.vocab_size,
                    hidden_size=TINY.text_width,
                    intermediate_size=4 * TINY.text_width,
                    num_hidden_layers=TINY.text_layers,
                    num_attention_heads=TINY.text_heads,
                    max_position_embeddings=TINY.context_length,
                    bos_token_id=TINY.vocab_size - 2,
                    eos_token_id=TINY.vocab_size - 1,
                    **common,
                ),
                projection_dim=TINY.embed_size,
            )
        ).eval()
        for param in theirs.parameters():
            torch.nn.init.normal_(param, std=0.2)
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    tensors = _openclip_names(state)
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
    half, full = CLIP(config, rngs=nnx.Rngs(0)), CLIP(TINY, rngs=nnx.Rngs(0))
    pixels = jax.random.normal(jax.random.key(0), (1, 24, 24, 3))
    features = half.image_features(pixels)
    assert features.dtype == jnp.bfloat16
    assert _error(features.astype(jnp.float32), full.image_features(pixels)) < 0.1
