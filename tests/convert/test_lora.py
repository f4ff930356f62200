"""The decoder's low-rank updates as a file that diffusers loads."""

from pathlib import Path

import numpy as np
import pytest
from diffusers import CogVideoXTransformer3DModel
from flax import nnx
from safetensors.torch import load_file

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.models.linear import merge_low_rank


@pytest.fixture(scope="module")
def bundle(tiny_bundle) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture(scope="module")
def file(bundle, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "student.safetensors"
    assert main(["export", "--bundle", str(bundle.path), "--lora", str(path)]) == 0
    return path


def diffusers_transformer(bundle: Bundle) -> CogVideoXTransformer3DModel:
    c = bundle.config.dit
    assert c is not None
    return CogVideoXTransformer3DModel(
        num_attention_heads=c.num_attention_heads,
        attention_head_dim=c.hidden_size // c.num_attention_heads,
        in_channels=c.latent_channels,
        time_embed_dim=c.time_embed_size,
        text_embed_dim=8,
        num_layers=c.num_layers,
        sample_width=c.latent_width,
        sample_height=c.latent_height,
        sample_frames=1 + 4 * (c.latent_frames - 1),
        max_text_seq_length=c.num_context_tokens,
    )


def test_the_updates_are_those_of_the_model(bundle, file):
    """Added to the weights of diffusers' layers of these names, they make the merged decoder."""
    tensors, model = load_file(file), diffusers_transformer(bundle)
    apart, merged = bundle.load("dit"), bundle.load("dit")
    merge_low_rank(merged)

    def kernels(dit: nnx.Module) -> list[np.ndarray]:
        block = dit.layers.blocks
        qkv = np.moveaxis(np.asarray(block.qkv.kernel[...], np.float32), 1, 0)
        return [*qkv, np.asarray(block.out.kernel[...], np.float32)]

    names = ("to_q", "to_k", "to_v", "to_out.0")
    seen = set()
    for name, before, after in zip(names, kernels(apart), kernels(merged), strict=True):
        for layer, (old, new) in enumerate(zip(before, after, strict=True)):
            place = f"transformer_blocks.{layer}.attn1.{name}"
            a, b = (tensors[f"transformer.{place}.lora_{x}.weight"].numpy() for x in "AB")
            assert tuple(model.get_submodule(place).weight.shape) == (b.shape[0], a.shape[1])
            assert np.abs(new - old).max() > 0
            np.testing.assert_allclose((b @ a).T, new - old, atol=1e-6)
            seen |= {f"transformer.{place}.lora_{x}.weight" for x in "AB"}
    assert seen == set(tensors)


def test_diffusers_loads_it(bundle, file):
    """Where the package peft is installed, without which diffusers loads no updates."""
    pytest.importorskip("peft")
    model = diffusers_transformer(bundle)
    model.load_lora_adapter(str(file))
    tensors = load_file(file)
    loaded = dict(model.named_parameters())
    place = "transformer_blocks.0.attn1.to_q"
    for letter in "AB":
        found = loaded[f"{place}.lora_{letter}.default_0.weight"].detach().numpy()
        expected = tensors[f"transformer.{place}.lora_{letter}.weight"].numpy()
        np.testing.assert_array_equal(found, expected)
    assert model.get_submodule(place).scaling == {"default_0": 1.0}


def test_what_cannot_be_written(bundle, file, capsys):
    words = ["export", "--bundle", str(bundle.path)]
    assert main([*words, "--lora", str(file)]) == 2
    assert "expected no such file, found one" in capsys.readouterr().err
    assert main(words) == 2
    assert "--out: expected a folder to write, found none" in capsys.readouterr().err
    assert main(["export", "--bundle", "toy", "--lora", str(file) + "2"]) == 2
    assert "no decoder with low-rank updates" in capsys.readouterr().err
