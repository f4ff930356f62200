"""The named sizes: `full` is the released files tensor by tensor, `toy` fits together."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from animegamer_jax.bundle.bundle import NETWORKS, NetworkName, abstract_params
from animegamer_jax.configs import (
    SIZES,
    CLIPConfig,
    DiTConfig,
    MLLMConfig,
    ModelConfig,
    ShotEncoderConfig,
    T5Config,
    VAEConfig,
    make_full,
    make_toy,
)
from animegamer_jax.convert.rules import Rule, export_shapes, find_problems
from animegamer_jax.convert.tables import clip as clip_table
from animegamer_jax.convert.tables import dit as dit_table
from animegamer_jax.convert.tables import encoder as encoder_table
from animegamer_jax.convert.tables import mllm as mllm_table
from animegamer_jax.convert.tables import t5 as t5_table
from animegamer_jax.convert.tables import vae as vae_table
from animegamer_jax.game.loading import check_fit

MANIFESTS = Path(__file__).parents[1] / "manifests"
FULL, TOY = make_full(), make_toy()
DECODER, CLIP = "model.diffusion_model.", "clip_img_encoder.model."
Shapes = dict[str, tuple[int, ...]]
Abstract = Mapping[str, jax.ShapeDtypeStruct]

# Millions of scalars in the released files, copies of trained norms not counted.
MILLIONS = {"mllm": 7364, "dit and encoder": 1747, "vae": 216}


def manifest(name: str, prefix: str = "") -> Shapes:
    content = json.loads((MANIFESTS / f"{name}.json").read_text())
    assert all(tensor.startswith(prefix) for tensor in content)
    return {tensor.removeprefix(prefix): tuple(shape) for tensor, shape in content.items()}


def total(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


def of(name: NetworkName) -> Abstract:
    return abstract_params(name, getattr(FULL, name))


def count(abstract: Abstract) -> int:
    return sum(leaf.size for leaf in abstract.values())


def mistral_alone() -> Abstract:
    """A base model's parameters: no low-rank updates, no resamplers."""
    config = dataclasses.replace(
        FULL.mllm, mistral=dataclasses.replace(FULL.mllm.mistral, lora=None)
    )
    params = abstract_params("mllm", config)
    return {path: leaf for path, leaf in params.items() if path.startswith("mistral.")}


FILES = {
    "mllm_agent": ("", lambda: [(mllm_table.rules(FULL.mllm), of("mllm"))]),
    "mistral_7b_base_resized": ("", lambda: [(mllm_table.mistral_rules(), mistral_alone())]),
    "vdm_decoder": (
        DECODER,
        lambda: [
            (dit_table.rules(FULL.dit), of("dit")),
            (encoder_table.rules(FULL.encoder), of("encoder")),
        ],
    ),
    "vae": ("", lambda: [(vae_table.rules(FULL.vae), of("vae"))]),
    "openclip_vit_b_16": (CLIP, lambda: [(clip_table.rules(FULL.clip), of("clip"))]),
    "t5_v1_1_xxl_encoder": ("", lambda: [(t5_table.rules(FULL.t5), of("t5"))]),
}


def sources(rule: Rule, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Every tensor of a rule: its name, its place in the parameter, and that place's shape."""
    names = [(rule.source, ())]
    for key in ("layer", "part"):
        if f"{{{key}}}" in rule.source:
            size = shape[len(names[0][1])]
            names = [
                (name.replace(f"{{{key}}}", str(i)), (*index, i))
                for name, index in names
                for i in range(size)
            ]
    return [(name, index, tuple(shape[len(index) :])) for name, index in names]


@pytest.mark.parametrize("name", FILES)
def test_tables_cover_the_released_file(name):
    prefix, parts = FILES[name]
    shapes = manifest(name, prefix)
    assert not find_problems(parts(), shapes), name
    out = [export_shapes(rules, abstract) for rules, abstract in parts()]
    exported = {tensor: shape for part in out for tensor, (shape, _) in part.items()}
    assert exported == {k: v for k, v in shapes.items() if not k.startswith("loss.")}


@pytest.mark.parametrize("name", FILES)
def test_transforms_agree_with_the_shapes_both_ways(name):
    """Tensors that are one number, broadcast: no memory."""
    prefix, parts = FILES[name]
    shapes, seen = manifest(name, prefix), set()
    for rules, abstract in parts():
        for rule in rules:
            if rule.target is None:
                continue
            for source, _, piece in sources(rule, abstract[rule.target].shape):
                tensor = np.broadcast_to(np.int8(0), shapes[source])
                made = rule.transform.forward(tensor)
                assert made.shape == piece, source
                back = rule.transform.inverse(np.broadcast_to(np.int8(0), piece))
                assert back.shape == shapes[source], source
                seen.add(source)
    # The rest are copies: norms as they were before training, and T5's embedding again.
    assert {name for name in set(shapes) - seen if ".original_module." not in name} == (
        {"encoder.embed_tokens.weight"} if name.startswith("t5") else set()
    )


def test_numbers_of_parameters():
    agent = manifest("mllm_agent")
    copies = {name: shape for name, shape in agent.items() if ".original_module." in name}
    assert len(copies) == 65
    found = {
        "mllm": total(agent) - total(copies),
        "dit and encoder": total(manifest("vdm_decoder", DECODER)),
        "vae": total(manifest("vae")),
    }
    counts = {name: count(of(name)) for name in NETWORKS if getattr(FULL, name) is not None}
    assert counts.keys() == NETWORKS.keys() - {"picture"}  # which the release does not have
    assert counts["mllm"] == found["mllm"]
    assert counts["dit"] + counts["encoder"] == found["dit and encoder"]
    assert counts["vae"] == found["vae"]
    assert counts["clip"] == total(manifest("openclip_vit_b_16", CLIP))
    t5 = manifest("t5_v1_1_xxl_encoder")
    t5.pop("encoder.embed_tokens.weight", None)  # the shared one under another name
    assert counts["t5"] == total(t5)
    assert {name: round(count / 1e6) for name, count in found.items()} == MILLIONS


def test_sizes_that_the_shapes_imply_are_the_configured_ones():
    base = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    }
    decoder = manifest("vdm_decoder", DECODER)
    assert mllm_table.infer_config(manifest("mllm_agent"), base=base) == FULL.mllm
    assert dit_table.infer_config(decoder) == FULL.dit
    assert encoder_table.infer_config(decoder) == FULL.encoder
    assert vae_table.infer_config(manifest("vae")) == FULL.vae
    assert clip_table.infer_config(manifest("openclip_vit_b_16", CLIP)) == FULL.clip
    assert t5_table.infer_config(manifest("t5_v1_1_xxl_encoder")) == FULL.t5


def test_a_position_table_of_another_frame_is_refused():
    with pytest.raises(ValueError, match="not a whole number of frames of 48 x 90"):
        dit_table.infer_config(manifest("vdm_decoder", DECODER), latent_height=48)


@pytest.mark.parametrize("size", SIZES)
def test_the_networks_of_a_size_fit(size):
    config = SIZES[size]()
    check_fit(config)
    mllm, encoder, dit, vae = config.mllm, config.encoder, config.dit, config.vae
    assert encoder.num_tokens == mllm.num_queries == dit.num_context_tokens
    assert encoder.num_image_tokens == config.clip.num_patches
    assert encoder.image_size == config.clip.vision_width
    assert encoder.text_size == config.t5.d_model
    frames = 1 + (dit.latent_frames - 1) * vae.temporal_compression
    pixels = tuple(s * vae.spatial_compression for s in (dit.latent_height, dit.latent_width))
    expected = {"toy": (17, (96, 144)), "full": (17, (480, 720))}
    assert (frames, pixels) == expected[size]
    for network, heads, width in (
        (dit, "num_attention_heads", "hidden_size"),
        (config.clip, "vision_heads", "vision_width"),
        (config.clip, "text_heads", "text_width"),
    ):
        assert getattr(network, width) % getattr(network, heads) == 0
    assert dit.hidden_size % 16 == 0  # quarters and eighths of it encode frame, row and column
    assert mllm.mistral.num_attention_heads % mllm.mistral.num_key_value_heads == 0


def test_full_is_the_default():
    """But for CLIP: the released file leaves out its text tower's layers."""
    defaults = ModelConfig(
        mllm=MLLMConfig(),
        encoder=ShotEncoderConfig(),
        dit=DiTConfig(),
        vae=VAEConfig(),
        clip=CLIPConfig(text_layers=0),
        t5=T5Config(),
    )
    assert defaults == FULL
    assert FULL.dit.num_patches == 6750
    assert FULL.mllm.mistral.lora.scale == 1.0
    assert FULL.dit.lora.scale == 1 / 64


def test_toy_is_small():
    configs = {name: getattr(TOY, name) for name in NETWORKS}
    assert [name for name, config in configs.items() if config is None] == ["picture"]
    configs["picture"] = dataclasses.replace(TOY.dit, memory=2)
    counts = {name: count(abstract_params(name, config)) for name, config in configs.items()}
    assert all(count > 10_000 for count in counts.values())
    assert sum(counts.values()) < 30_000_000
    assert max(counts, key=counts.__getitem__) in ("mllm", "dit", "picture")
