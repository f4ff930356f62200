"""Pre-trained networks to a bundle to train: small random ones in the formats of the full size."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_sets
from helpers import tiny_config

from animegamer_jax import cli
from animegamer_jax.bundle.bundle import Bundle, abstract_params
from animegamer_jax.configs import MLLMConfig, ModelConfig, NetworkConfig
from animegamer_jax.convert.export import export_bundle
from animegamer_jax.convert.initialise import initialise_bundle
from animegamer_jax.convert.networks import EMBEDDED, table_of
from animegamer_jax.convert.options import ConvertOptions, InitialiseOptions
from animegamer_jax.convert.released import convert_released
from animegamer_jax.convert.rules import Rule, convert, export_shapes
from animegamer_jax.convert.sources import open_checkpoint, write_safetensors, write_torch
from animegamer_jax.convert.tables.mllm import mistral_rules
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import position_table
from animegamer_jax.tokenizer import T5Tokenizer

TINY = tiny_config(0)
SIZES = ModelConfig(
    mllm=dataclasses.replace(TINY.mllm, num_queries=16),  # pyright: ignore
    dit=TINY.dit,
)
OLD_ROWS = 50  # of the language model, before the game's tokens
PREFIX = "model.diffusion_model."
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def base_config(name: str, config: Any, *, rows: int = OLD_ROWS) -> NetworkConfig:
    """The network as it was pre-trained."""
    if name == "mllm":
        mistral = dataclasses.replace(config.mistral, vocab_size=rows, lora=None)
        return dataclasses.replace(config, mistral=mistral)
    return dataclasses.replace(config, lora=None) if name == "dit" else config


def shapes_of(name: Any, config: Any, rules: tuple[Rule, ...], dtype: Any) -> dict[str, Any]:
    """Names and shapes of a table's tensors, those that fill something."""
    abstract = abstract_params(name, config)
    known = tuple(rule for rule in rules if rule.target in abstract)
    shapes = export_shapes(known, abstract)
    return {tensor: (shape, np.dtype(dtype)) for tensor, (shape, _) in shapes.items()}


def values(shapes: Shapes) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        name: (random.normal(size=shape) * 0.1 + 0.05).astype(dtype)
        for name, (shape, dtype) in shapes.items()
    }


def write(path: Path, shapes: Shapes, *, key: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_torch(path, shapes, values(shapes).items(), key=key)
    return path


def cogvideox_shapes() -> dict[str, Any]:
    """As released: one linear text projection, positions of 13 latent frames, no motion input."""
    rules = table_of("dit").rules(base_config("dit", SIZES.dit))
    shapes = shapes_of("dit", base_config("dit", SIZES.dit), rules, np.float16)
    shapes = {name: entry for name, entry in shapes.items() if not name.startswith("flow_embed")}
    half = np.dtype(np.float16)
    shapes["mixins.pos_embed.pos_embedding"] = ((1, 16 + 13 * 2 * 3, 32), half)
    shapes["mixins.patch_embed.text_proj.weight"] = ((32, 12), half)
    shapes["mixins.patch_embed.text_proj.bias"] = ((32,), half)
    return {f"{PREFIX}{name}": entry for name, entry in shapes.items()}


def write_cogvideox(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    shapes = cogvideox_shapes()
    if change is not None:
        change(shapes)
    write(folder / "1" / "mp_rank_00_model_states.pt", shapes, key="module")
    (folder / "latest").write_text("1")
    return folder


def write_mistral(folder: Path, *, rows: int = OLD_ROWS) -> Path:
    config: Any = base_config("mllm", SIZES.mllm, rows=rows)
    bf16 = ml_dtypes.bfloat16
    shapes = shapes_of("mllm", config, mistral_rules(), bf16)
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", shapes, values(shapes).items())
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pretrained")
    found = {
        "cogvideox": write_cogvideox(folder / "transformer"),
        "mistral": write_mistral(folder / "mistral"),
    }
    networks: dict[str, Any] = {
        "t5": tiny_sets.CONFIG.t5,
        "clip": tiny_sets.CONFIG.clip,
        # 32 norm groups are the full size's.
        "vae": dataclasses.replace(TINY.vae, channels=32, multipliers=(1, 1, 1)),
    }
    networks["clip"] = dataclasses.replace(networks["clip"], vision_width=64, text_layers=0)
    for name, config in networks.items():
        shapes = shapes_of(name, config, table_of(name).rules(config), np.float32)
        prefix = EMBEDDED[name] if name == "clip" else ""
        named = {f"{prefix}{tensor}": entry for tensor, entry in shapes.items()}
        found[name] = write(folder / f"{name}.pt", named, key="state_dict")
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_sets.make_tokenizer(folder)
    return folder


def initialise(out: Path, files: Mapping[str, Path], **options: Any) -> None:
    initialise_bundle(InitialiseOptions(out=str(out), **files, **options), SIZES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, files, tokenizer) -> Bundle:
    out = tmp_path_factory.mktemp("out") / "start"
    initialise(out, files, tokenizer=tokenizer)
    return Bundle.open(out)


def test_everything_is_there(bundle):
    assert {name for name in ("mllm", "dit", "vae", "clip", "t5") if bundle.has(name)} == {
        *("mllm", "dit", "vae", "clip", "t5")
    }
    assert not bundle.has("encoder")  # its own stage makes it
    assert bundle.protocol.name == "paper"
    assert bundle.info.stages == ()
    dit = bundle.config.dit
    assert dataclasses.replace(dit, param_dtype="float32", spatial_interpolation=1.875) == SIZES.dit
    mllm: MLLMConfig = bundle.config.mllm
    assert (mllm.num_queries, mllm.representation_size) == (16, 32)
    mistral = mllm.mistral
    assert (mistral.vocab_size, mistral.lora, mistral.rotary_dtype) == (
        len(tiny_sets.Tokenizer.load(bundle.tokenizer_dir, num_queries=1)),
        SIZES.mllm.mistral.lora,
        "float32",
    )


def test_the_decoder_starts_as_cogvideox(bundle, files):
    source = open_checkpoint(files["cogvideox"] / "1" / "mp_rank_00_model_states.pt")
    fused = source.read(f"{PREFIX}transformer.layers.1.attention.query_key_value.weight")
    kernel = bundle.read("dit", "layers.blocks.qkv.kernel")
    np.testing.assert_array_equal(kernel[1], fused.reshape(3, 32, 32).transpose(0, 2, 1))
    assert kernel.dtype == np.float16
    np.testing.assert_array_equal(
        bundle.read("dit", "time_embed.input.bias"), source.read(f"{PREFIX}time_embed.0.bias")
    )
    # Positions of the frames of a clip here, not of the file's.
    np.testing.assert_array_equal(
        bundle.read("dit", "positions"), position_table(bundle.config.dit)
    )
    for path in ("qkv.lora_b", "out.lora_b"):
        assert not bundle.read("dit", f"layers.blocks.{path}").any()
    a = bundle.read("dit", "layers.blocks.qkv.lora_a")
    np.testing.assert_allclose(a.std(), 32**-0.5, rtol=0.2)
    assert (a[0] != a[1]).all()


def test_the_motion_input_says_nothing_yet(bundle):
    dit = bundle.load("dit", dtype="float32")
    run = jax.jit(lambda dit, motion: dit.motion_embed(motion))
    assert not np.asarray(run(dit, jnp.asarray([0.5, 40.0]))).any()
    assert bundle.read("dit", "motion_embed.input.kernel").std() > 0.1


def test_the_vocabulary_grows_by_means(bundle, files):
    source = open_checkpoint(files["mistral"])
    embedding = bundle.read("mllm", "mistral.embedding")
    old = source.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(embedding[:OLD_ROWS], old)
    assert embedding.shape[0] == bundle.config.mllm.mistral.vocab_size > OLD_ROWS
    mean = old.astype(np.float32).mean(axis=0).astype(ml_dtypes.bfloat16)
    for row in embedding[OLD_ROWS:]:
        np.testing.assert_array_equal(row, mean)
    head, old = bundle.read("mllm", "mistral.head.kernel"), source.read("lm_head.weight")
    np.testing.assert_array_equal(head[:, :OLD_ROWS], old.T)
    mean = (3 * old.astype(np.float32).mean(axis=0)).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(
        head[:, OLD_ROWS:].astype(np.float32),
        np.broadcast_to(mean[:, None], head[:, OLD_ROWS:].shape).astype(np.float32),
        rtol=1e-2,
    )


def test_the_language_model_starts_as_mistral(bundle, files):
    source = open_checkpoint(files["mistral"])
    for path, name in (("q.kernel", "self_attn.q_proj"), ("down.kernel", "mlp.down_proj")):
        found = bundle.read("mllm", f"mistral.layers.blocks.{path}")
        np.testing.assert_array_equal(found[1], source.read(f"model.layers.1.{name}.weight").T)
    for linear in ("q", "k", "v", "o", "gate", "up", "down"):
        assert not bundle.read("mllm", f"mistral.layers.blocks.{linear}.lora_b").any()
        assert bundle.read("mllm", f"mistral.layers.blocks.{linear}.lora_a").all()
    for side in ("input", "output"):
        kernel = bundle.read("mllm", f"{side}_resampler.input.kernel")
        np.testing.assert_allclose(kernel.std(), 32**-0.5, rtol=0.1)
        assert not bundle.read("mllm", f"{side}_resampler.input.bias").any()


def test_the_others_are_taken_as_they_are(bundle, files):
    for name in ("t5", "clip", "vae"):
        config = getattr(bundle.config, name)
        source = open_checkpoint(files[name]).under(EMBEDDED[name] if name == "clip" else "")
        expected = dict(
            convert(table_of(name).rules(config), source, abstract_params(name, config))
        )
        assert expected.keys() == bundle.leaves(name).keys()
        for path, leaf in bundle.read_in_order(name, expected):
            np.testing.assert_array_equal(leaf, expected[path], strict=True)


def test_new_weights_depend_on_the_seed_alone(files, tmp_path, tokenizer, bundle):
    some = {"mistral": files["mistral"]}
    path = "input_resampler.output.kernel"
    for seed in (0, 1):
        initialise(tmp_path / str(seed), some, tokenizer=tokenizer, seed=seed)
        found = Bundle.open(tmp_path / str(seed)).read("mllm", path)
        assert (found == bundle.read("mllm", path)).all() == (seed == 0)


# --- what is refused ------------------------------------------------------------------------


def refusal(tmp_path: Path, files: Mapping[str, Path], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        initialise(tmp_path / "out", files, **options)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_every_problem_of_every_file(files, tmp_path):
    def change(shapes: dict[str, Any]) -> None:
        del shapes[f"{PREFIX}time_embed.2.bias"]
        shapes[f"{PREFIX}flow_embed.0.bias"] = ((16,), np.dtype(np.float16))
        shapes["stranger"] = ((3,), np.dtype(np.float16))

    folder = write_cogvideox(tmp_path / "changed", change)
    message = refusal(tmp_path, {"cogvideox": folder})
    assert f"missing: {PREFIX}time_embed.2.bias [16], for time_embed.output.bias" in message
    assert f"unused: {PREFIX}flow_embed.0.bias [16]" in message
    assert "unused: stranger [3]" in message
    assert "3 problems" in message


def test_wrong_files(files, tmp_path, tokenizer):
    one_line = {
        "nothing to initialise from": refusal(tmp_path, {}),
        "pass --tokenizer": refusal(tmp_path, {"mistral": files["mistral"]}),
        "expected tensors whose names start with 'model.diffusion_model.'": refusal(
            tmp_path, {"cogvideox": files["vae"]}
        ),
        "pass it with --t5": refusal(tmp_path, {"vae": files["t5"]}),
        "no such file": refusal(tmp_path, {"clip": tmp_path / "nowhere"}),
    }
    for expected, message in one_line.items():
        assert expected in message
        assert "\n" not in message


def test_t5_may_have_its_own_tokenizer(files, tmp_path, tokenizer):
    out = tmp_path / "start"
    initialise(out, {"t5": files["t5"]}, t5_tokenizer=tokenizer)  # it has T5's end and padding
    found = Bundle.open(out)
    assert isinstance(found.load_t5_tokenizer(), T5Tokenizer)
    export_bundle(str(out), tmp_path / "export")
    convert_released(ConvertOptions(out=str(tmp_path / "again"), reference=tmp_path / "export"))
    files_of = [
        {file.name: file.read_bytes() for file in (folder / "t5_tokenizer").iterdir()}
        for folder in (out, tmp_path / "export", tmp_path / "again")
    ]
    assert files_of[0] == files_of[1] == files_of[2]
    message = refusal(tmp_path, {"clip": files["clip"]}, t5_tokenizer=tokenizer)
    assert "--t5-tokenizer: expected T5 with it" in message


def test_a_tokenizer_without_the_old_vocabulary(tmp_path, tokenizer):
    folder = write_mistral(tmp_path / "large", rows=500)
    message = refusal(tmp_path, {"mistral": folder}, tokenizer=tokenizer)
    assert "the language model 500 already" in message


def test_the_command(files, tmp_path, capsys):
    out = tmp_path / "start"
    words = ["initialise", "--out", str(out), "--t5", str(files["t5"]), "--size", "toy"]
    assert cli.main(words) == 0
    assert "t5" in capsys.readouterr().out
    assert Bundle.open(out).config.t5 is not None
    assert cli.main(words) == 2
    assert "already there" in capsys.readouterr().err
