"""The decoder's updates in a file, loaded by diffusers into its own transformer."""

from typing import Any

import numpy as np
import pytest
from helpers import random_leaves, tiny_config
from safetensors.numpy import load_file

from animegamer_jax import cli
from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.protocol import PAPER


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    """A decoder with random low-rank updates."""
    folder, config = tmp_path_factory.mktemp("lora") / "model", tiny_config(0)
    assert config.dit is not None
    assert config.dit.lora is not None
    with BundleWriter(folder, name="tiny", protocol=PAPER) as writer:
        writer.write_network("dit", config.dit, random_leaves("dit", config.dit, 0))
    return Bundle.open(folder)


def expected_updates(bundle: Bundle) -> dict[str, np.ndarray]:
    """The change of every matrix, [out, in], under diffusers' names."""
    dit: Any = bundle.config.dit
    changes = {}
    for leaf, names in (("qkv", ("to_q", "to_k", "to_v")), ("out", ("to_out.0",))):
        a, b = (bundle.read("dit", f"layers.blocks.{leaf}.lora_{side}") for side in "ab")
        product = dit.lora.scale * (a @ b)
        for layer in range(dit.num_layers):
            parts = product[layer] if leaf == "qkv" else product[layer][None]
            for name, part in zip(names, parts, strict=True):
                changes[f"transformer_blocks.{layer}.attn1.{name}.weight"] = part.T
    return changes


def test_diffusers_adds_the_same_updates(bundle, tmp_path):
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    file = tmp_path / "lora.safetensors"
    assert cli.main(["export", "--bundle", str(bundle.path), "--out", str(file), "--lora"]) == 0
    dit: Any = bundle.config.dit
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=dit.num_attention_heads,
        attention_head_dim=dit.hidden_size // dit.num_attention_heads,
        num_layers=dit.num_layers,
        time_embed_dim=dit.time_embed_size,
        text_embed_dim=8,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=4,
    )
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_lora_adapter(load_torch(file, torch), prefix="transformer")
    model.fuse_lora()
    model.unload_lora()
    after, expected = model.state_dict(), expected_updates(bundle)
    changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert changed == set(expected)
    for name, change in expected.items():
        found = (after[name] - before[name]).numpy()
        assert np.abs(found - change).max() < 1e-5 * max(1, np.abs(change).max()), name


def load_torch(file, torch) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in load_file(file).items()}


def test_what_has_no_updates(bundle, tmp_path, capsys):
    words = ["export", "--bundle", "toy", "--out", str(tmp_path / "a.safetensors"), "--lora"]
    assert cli.main(words) == 2
    assert "its decoder has no low-rank updates: they were merged" in capsys.readouterr().err
    file = tmp_path / "b.safetensors"
    file.write_text("mine")
    words = ["export", "--bundle", str(bundle.path), "--out", str(file), "--lora"]
    assert cli.main(words) == 2
    assert "already there" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert cli.main([*words, "--networks", "dit"]) == 2
    assert "leave --networks out" in capsys.readouterr().err
