"""Released files to a bundle and back: tables, files, commands, and what is refused."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from animegamer_jax import cli, progress
from animegamer_jax.bundle.bundle import Bundle, abstract_params, flat_params
from animegamer_jax.configs import (
    CLIPConfig,
    DiTConfig,
    LoRAConfig,
    MistralConfig,
    MLLMConfig,
    NetworkConfig,
    ShotEncoderConfig,
    T5Config,
    VAEConfig,
)
from animegamer_jax.convert import rules as R
from animegamer_jax.convert.export import export_bundle
from animegamer_jax.convert.networks import EMBEDDED, table_of
from animegamer_jax.convert.options import ConvertOptions
from animegamer_jax.convert.released import convert_released
from animegamer_jax.convert.rules import QKV, QKV_BIAS, TRANSPOSE, Rule
from animegamer_jax.convert.sources import (
    Source,
    open_checkpoint,
    open_torch,
    write_safetensors,
    write_torch,
)
from animegamer_jax.errors import UserError
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Linear, QKVLinear
from animegamer_jax.models.norms import LayerNorm

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

FLOAT = NetworkConfig()


# --- tables ---------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        lora = LoRAConfig(rank=2, alpha=1.0)
        self.qkv = QKVLinear(8, config=FLOAT, lora=lora, rngs=rngs)
        self.out = Linear(8, 6, names=("heads", "embed"), config=FLOAT, rngs=rngs)


class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = LayerStack(Block, 3, config=FLOAT, rngs=rngs)
        self.norm = LayerNorm(8, eps=1e-5, config=FLOAT, rngs=rngs)


RULES = (
    Rule("h.{layer}.qkv.weight", "layers.blocks.qkv.kernel", QKV),
    Rule("h.{layer}.qkv.bias", "layers.blocks.qkv.bias", QKV_BIAS),
    Rule("h.{layer}.A.{part}", "layers.blocks.qkv.lora_a", TRANSPOSE),
    Rule("h.{layer}.B.{part}", "layers.blocks.qkv.lora_b", TRANSPOSE),
    Rule("h.{layer}.out.weight", "layers.blocks.out.kernel", TRANSPOSE),
    Rule("h.{layer}.out.bias", "layers.blocks.out.bias"),
    Rule("h.{layer}.out.twin", None, copy_of="h.{layer}.out.bias"),
    Rule("norm.weight", "norm.scale"),
    Rule("norm.bias", "norm.bias"),
    Rule("loss.*", None),
)


def abstract_of(module: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    state = nnx.state(module, nnx.Param)
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in flat_params(state).items()}


def random_values(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(values * 0.1).astype(dtype)


def write_random(path: Path, shapes: dict, *, key: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = ((n, random_values(*entry, seed=i)) for i, (n, entry) in enumerate(shapes.items()))
    write_torch(path, shapes, values, key=key)


@pytest.fixture(scope="module")
def small() -> dict[str, jax.ShapeDtypeStruct]:
    return abstract_of(nnx.eval_shape(lambda: Small(nnx.Rngs(0))))


@pytest.fixture
def small_file(tmp_path, small) -> Path:
    path = tmp_path / "small.pt"
    write_random(path, R.export_shapes(RULES, small), key="module")
    return path


def test_stacks_layers_and_parts(small, small_file):
    source = open_torch(small_file)
    leaves = dict(R.convert(RULES, source, small))
    assert {k: v.shape for k, v in leaves.items()} == {k: v.shape for k, v in small.items()}
    fused = source.read("h.2.qkv.weight").reshape(3, 8, 8)
    np.testing.assert_array_equal(leaves["layers.blocks.qkv.kernel"][2, 1], fused[1].T)
    np.testing.assert_array_equal(
        leaves["layers.blocks.qkv.lora_a"][1, 2], source.read("h.1.A.2").T
    )
    np.testing.assert_array_equal(leaves["layers.blocks.out.bias"][0], source.read("h.0.out.bias"))


def test_export_is_the_inverse(small, small_file):
    source = open_torch(small_file)
    leaves = dict(R.convert(RULES, source, small))
    out = dict(R.export(RULES, leaves.__getitem__, small))
    assert out.keys() == source.shapes.keys()
    for name, value in out.items():
        original = name.replace("twin", "bias")  # a copy takes the value of what it copies
        np.testing.assert_array_equal(value, source.read(original), strict=True)


def test_load_fills_a_module(small_file):
    module = Small(nnx.Rngs(1))
    source = open_torch(small_file)
    R.load(RULES, source, module)
    np.testing.assert_array_equal(module.norm.scale[...], source.read("norm.weight"))
    kernel = module.layers.blocks.out.kernel[...]
    np.testing.assert_array_equal(kernel[2], source.read("h.2.out.weight").T)


def test_every_problem_at_once(small):
    shapes = {name: shape for name, (shape, _) in R.export_shapes(RULES, small).items()}
    del shapes["h.1.A.2"], shapes["norm.bias"]
    shapes |= {"stranger": (2, 3), "h.0.out.weight": (8, 6), "loss.logvar": ()}
    rules = (*RULES, Rule("norm.gain", "norm.scale"), Rule("norm.weight", "nowhere"))
    rules = tuple(rule for rule in rules if rule.target != "layers.blocks.out.bias")
    with pytest.raises(UserError) as caught:
        R.raise_problems({"small.pt": R.find_problems([(rules, small)], shapes)})
    first, *lines = str(caught.value).splitlines()
    assert first == "small.pt: 10 problems, nothing is converted"
    assert {line.strip() for line in lines} == {
        "missing: h.1.A.2 [2, 8], for layers.blocks.qkv.lora_a",
        "missing: norm.bias [8], for norm.bias",
        "unused: stranger [2, 3]",
        "wrong shape: h.0.out.weight: expected [6, 8], found [8, 6]",
        "filled twice: norm.scale, from norm.weight and from norm.gain",
        "no such parameter: nowhere, from norm.weight",
        "never filled: layers.blocks.out.bias",
        *(f"unused: h.{i}.out.bias [6]" for i in range(3)),
    }


def test_a_tensor_read_by_two_tables(small):
    shapes = {name: shape for name, (shape, _) in R.export_shapes(RULES, small).items()}
    other = {"bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    tables = [(RULES, small), ((Rule("norm.bias", "bias"),), other)]
    problems = ["read twice: norm.bias for norm.bias and for bias"]
    assert R.find_problems(tables, shapes) == problems


def test_unknown_placeholder():
    rule = Rule("h.{expert}.weight", "kernel")
    abstract = {"kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    with pytest.raises(ValueError, match="expert"):
        R.find_problems([((rule,), abstract)], {})


def test_mixed_formats_take_the_wider_one(tmp_path):
    bf16, f16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
    shapes = {"w.0": ((2, 3), bf16), "w.1": ((2, 3), f16), "b": ((), bf16)}
    write_random(tmp_path / "mixed.pt", shapes)
    source = open_torch(tmp_path / "mixed.pt")
    abstract = {
        "w": jax.ShapeDtypeStruct((2, 3, 2), jnp.float32),
        "b": jax.ShapeDtypeStruct((), jnp.float32),
    }
    rules = (Rule("w.{layer}", "w", TRANSPOSE), Rule("b", "b"))
    leaves = dict(R.convert(rules, source, abstract))
    assert leaves["w"].dtype == np.float32
    np.testing.assert_array_equal(leaves["w"][0], source.read("w.0").T.astype(np.float32))
    assert leaves["b"].dtype == bf16
    assert leaves["b"].shape == ()


# --- files ----------------------------------------------------------------------------------


def test_torch_files_flat_nested_and_old(tmp_path):
    tensors = {
        "half": torch.randn(3, 4).half(),
        "brain": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(4, 6).T,
        "none": torch.zeros(0, 3),
    }
    torch.save(tensors, tmp_path / "flat.pt")
    torch.save({"module": tensors, "step": 3}, tmp_path / "nested.pt")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, key in (("flat", None), ("nested", "module"), ("old", None)):
        source = open_torch(tmp_path / f"{name}.pt")
        assert source.key == key
        assert source.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
        for tensor, value in tensors.items():
            read = source.read(tensor)
            assert read.dtype == source.tensors[tensor].dtype
            np.testing.assert_array_equal(read.astype(np.float32), value.float().numpy())
            assert read.flags.writeable  # a copy: the file's pages are given back
    assert open_torch(tmp_path / "flat.pt").tensors["brain"].dtype == ml_dtypes.bfloat16


def test_source_views(small_file):
    source = open_torch(small_file)
    assert set(source.under("norm.").tensors) == {"weight", "bias"}
    assert set(source.select(lambda name: name.endswith("A.0")).tensors) == {
        f"h.{i}.A.0" for i in range(3)
    }
    other = Source(
        "other", {"norm.bias": source.tensors["h.0.out.bias"], "x": source.tensors["norm.bias"]}
    )
    joined = source.joined(other)
    assert joined.shapes["norm.bias"] == (8,)
    assert joined.shapes["x"] == (8,)


def test_safetensors_sharded_and_single(tmp_path):
    tensors = {"a": torch.randn(2, 3).bfloat16(), "b": torch.randn(4).half(), "c": torch.zeros(0)}
    save_file({"a": tensors["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "model-2.safetensors")
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    source = open_checkpoint(tmp_path)
    for name, value in tensors.items():
        np.testing.assert_array_equal(source.read(name).astype(np.float32), value.float().numpy())
    write_safetensors(
        tmp_path / "one.safetensors",
        {name: (t.shape, t.dtype) for name, t in source.tensors.items()},
        ((name, source.read(name)) for name in source.tensors),
    )
    again = open_checkpoint(tmp_path / "one.safetensors")
    assert again.shapes == source.shapes
    assert again.read("a").tobytes() == source.read("a").tobytes()
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of 2 shards .* missing: model-2.safetensors"):
        open_checkpoint(tmp_path)


def make_bad_files(folder: Path, small_file: Path) -> None:
    whole = small_file.read_bytes()
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "text.pt").write_text("<html>not found</html>")
    (folder / "empty.pt").write_bytes(b"")
    torch.save([1, 2], folder / "list.pt")
    torch.save({"a": torch.zeros(1), "step": 3}, folder / "mixed.pt")
    save_file({"a": torch.zeros(100)}, folder / "short.safetensors")
    data = (folder / "short.safetensors").read_bytes()
    (folder / "short.safetensors").write_bytes(data[:-100])
    (folder / "text.safetensors").write_text("not found")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated.pt", "not a complete torch.save file: truncated"),
        ("text.pt", "not a complete torch.save file"),
        ("empty.pt", "not a complete torch.save file"),
        ("absent.pt", "no such file"),
        ("list.pt", "expected a dictionary of tensors, found list"),
        ("mixed.pt", "entry 'step' is of type int"),
        ("short.safetensors", "truncated"),
        ("text.safetensors", "not a safetensors file"),
    ],
)
def test_bad_files_in_one_line(tmp_path, small_file, name, message):
    make_bad_files(tmp_path, small_file)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


class Evil:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (Path.write_text, (self.trace, "ran"))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, zipped):
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"
    content = {"a": torch.zeros(2), "b": Evil(trace)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="refused, because it asks to run") as caught:
        open_torch(path)
    assert "\n" not in str(caught.value)
    assert not trace.exists()
    path.write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(UserError, match=r"evil\.pt"):
        open_torch(path)
    assert not trace.exists()


def test_without_torch(small_file):
    program = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'torch': raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch)\n"
        "from animegamer_jax import cli\n"
        f"sys.exit(cli.main(['convert', '--vae', {str(small_file)!r}, '--out', '/tmp/never']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch is not installed" in done.stderr
    assert "pip install -e '.[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


# --- commands -------------------------------------------------------------------------------

MLLM = MLLMConfig(
    mistral=MistralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        lora=LoRAConfig(rank=3, alpha=3.0),
    ),
    representation_size=32,
)
DIT = DiTConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_attention_heads=2,
    latent_channels=4,
    latent_frames=2,
    latent_height=4,
    latent_width=6,
    time_embed_size=8,
    lora=LoRAConfig(rank=3, alpha=1.0),
)
ENCODER = ShotEncoderConfig(text_size=12, image_size=16, representation_size=32)
VAE = VAEConfig(channels=32, multipliers=(1, 1, 2), num_res_blocks=1, latent_channels=4)
CLIP = CLIPConfig(
    image_size=8,
    patch_size=4,
    vision_width=16,
    vision_layers=2,
    vision_heads=2,
    text_width=8,
    text_layers=1,
    text_heads=1,
    vocab_size=11,
    context_length=5,
    embed_size=6,
)
T5 = T5Config(vocab_size=13, d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3)
OPTIONS = {"latent_height": 4, "latent_width": 6, "clip_head_width": 8}


def tensor_shapes(network: str, config, dtype: str, prefix: str = "") -> dict:
    shapes = R.export_shapes(table_of(network).rules(config), abstract_params(network, config))
    return {prefix + name: (shape, np.dtype(dtype)) for name, (shape, _) in shapes.items()}


def decoder_shapes() -> dict:
    prefix = "model.diffusion_model."
    return tensor_shapes("dit", DIT, "float16", prefix) | tensor_shapes(
        "encoder", ENCODER, "float16", prefix
    )


def convert(**options) -> None:
    convert_released(ConvertOptions(**options))


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A tiny released set: CLIP and T5 inside the decoder file, the VAE in a file of its own."""
    folder = tmp_path_factory.mktemp("released")
    write_random(folder / "mllm/pytorch_model.bin", tensor_shapes("mllm", MLLM, "float16"))
    mistral = MLLM.mistral
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    base = {name: getattr(mistral, name) for name in (*fields, "num_key_value_heads", "head_dim")}
    (folder / "mllm/base").mkdir()
    extra = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "sliding_window": None}
    (folder / "mllm/base/config.json").write_text(json.dumps(base | extra))
    inside = decoder_shapes()
    inside |= tensor_shapes("clip", CLIP, "bfloat16", EMBEDDED["clip"])
    inside |= tensor_shapes("t5", T5, "float32", EMBEDDED["t5"])
    write_random(folder / "vdm/1/mp_rank_00_model_states.pt", inside, key="module")
    (folder / "vdm/latest").write_text("1")
    vae = tensor_shapes("vae", VAE, "float32") | {"loss.logvar": ((), np.dtype("float32"))}
    write_random(folder / "vae/3d-vae.pt", vae, key="state_dict")
    return folder


@pytest.fixture(scope="module")
def bundle(released, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    convert(out=str(path), reference=released, **OPTIONS)
    return path


def all_leaves(path: Path) -> dict[str, np.ndarray]:
    opened = Bundle.open(path)
    return {
        f"{name}/{leaf}": value
        for name in opened.info.weights
        for leaf, value in opened.read_in_order(name, opened.leaves(name))
    }


def test_converts_everything(bundle, released):
    opened = Bundle.open(bundle)
    found = opened.config
    assert found.dit.lora == DIT.lora
    assert found.dit.latent_width == 6
    assert found.mllm.mistral.lora == MLLM.mistral.lora
    assert (found.t5.d_kv, found.clip.vision_heads, found.vae.multipliers) == (4, 2, (1, 1, 2))
    assert found.clip.param_dtype == "bfloat16"
    assert opened.info.released["t5"].prefix == EMBEDDED["t5"]
    assert opened.info.released["vae"].key == "state_dict"
    source = open_torch(released / "vdm/1/mp_rank_00_model_states.pt")
    name = "model.diffusion_model.transformer.layers.1.mlp.dense_h_to_4h.weight"
    kernel = opened.read("dit", "layers.blocks.mlp_in.kernel")
    np.testing.assert_array_equal(kernel[1], source.read(name).T, strict=True)


def test_convert_export_convert_is_the_identity(bundle, released, tmp_path, monkeypatch, capsys):
    export_bundle(str(bundle), tmp_path / "out")
    for name in ("mllm/pytorch_model.bin", "vdm/1/mp_rank_00_model_states.pt", "vae/3d-vae.pt"):
        first, second = open_torch(released / name), open_torch(tmp_path / "out" / name)
        names = [n for n in first.tensors if not n.startswith("loss.")]
        assert sorted(second.tensors) == sorted(names)
        assert first.key == second.key
        for tensor in names:
            # PEFT's untrained norms and T5's second name of its embedding are copies.
            original = tensor.replace("original_module", "modules_to_save.default")
            original = original.replace("encoder.embed_tokens.", "shared.")
            np.testing.assert_array_equal(
                second.read(tensor), first.read(original), strict=True, err_msg=tensor
            )
    assert (tmp_path / "out/vdm/latest").read_text() == "1"
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)  # seconds; it is a short one
    convert(out=str(tmp_path / bundle.name), reference=tmp_path / "out")
    shown = capsys.readouterr().err.splitlines()
    for name in ("mllm", "dit", "vae"):
        number = len(abstract_params(name, getattr(Bundle.open(bundle).config, name)))
        assert any(line.startswith(f"{name}: {number} of {number}") for line in shown)
    first, second = Bundle.open(bundle), Bundle.open(tmp_path / bundle.name)
    assert first.info == second.info
    before, after = all_leaves(bundle), all_leaves(tmp_path / bundle.name)
    assert before.keys() == after.keys()
    for leaf, value in before.items():
        np.testing.assert_array_equal(after[leaf], value, strict=True, err_msg=leaf)


def test_a_model_of_our_own_comes_back_from_its_export(tiny_bundle, tmp_path):
    """Numbers of tokens, norm groups and protocol are not in tensors: the export records them."""
    export_bundle(str(tiny_bundle), tmp_path / "out")
    convert(out=str(tmp_path / "back"), reference=tmp_path / "out")
    first, second = Bundle.open(tiny_bundle), Bundle.open(tmp_path / "back")
    assert second.config == first.config
    assert second.protocol == first.protocol
    before, after = all_leaves(tiny_bundle), all_leaves(tmp_path / "back")
    assert before.keys() == after.keys()
    for leaf, value in before.items():
        np.testing.assert_array_equal(after[leaf], value, strict=True, err_msg=leaf)
    # An option is believed rather than the export.
    convert(out=str(tmp_path / "released"), reference=tmp_path / "out", protocol="released")
    assert Bundle.open(tmp_path / "released").protocol.name == "released"
    with pytest.raises(UserError, match="position table"):
        convert(out=str(tmp_path / "c"), reference=tmp_path / "out", latent_height=10)
    (tmp_path / "out" / "animegamer.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"animegamer\.json: protocol: missing: export the bundle again"
    ):
        convert(out=str(tmp_path / "c"), reference=tmp_path / "out")


def test_exported_files_load_with_torch_alone(bundle, tmp_path):
    export_bundle(str(bundle), tmp_path / "out", networks=("vae",))
    assert sorted(os.listdir(tmp_path / "out")) == ["animegamer.json", "vae"]
    content = torch.load(tmp_path / "out/vae/3d-vae.pt", weights_only=True)
    assert content["state_dict"]["encoder.conv_in.conv.weight"].shape == (32, 3, 3, 3, 3)


def test_a_file_of_its_own_wins(released, tmp_path, capsys):
    shapes = tensor_shapes("t5", T5, "float16")
    write_safetensors(
        tmp_path / "t5.safetensors",
        shapes,
        ((name, random_values(*entry, seed=99)) for name, entry in shapes.items()),
    )
    out = tmp_path / "b"
    convert(out=str(out), reference=released, t5=tmp_path / "t5.safetensors", **OPTIONS)
    assert "also holds t5, not used, because --t5 is given" in capsys.readouterr().out
    opened = Bundle.open(out)
    assert opened.config.t5.param_dtype == "float16"
    assert opened.info.released["t5"].file == "t5/t5.safetensors"
    np.testing.assert_array_equal(opened.read("t5", "embedding"), random_values((13, 12), "f2", 99))
    export_bundle(str(out), tmp_path / "out", networks=("t5",))
    assert open_checkpoint(tmp_path / "out/t5/t5.safetensors").shapes == {
        name: shape for name, (shape, _) in shapes.items()
    }


def test_merge_folds_the_updates_in(bundle, released, tmp_path):
    out = tmp_path / "merged"
    convert(out=str(out), reference=released, merge=True, **OPTIONS)
    plain, merged = Bundle.open(bundle), Bundle.open(out)
    assert merged.config.dit.lora is None
    assert merged.config.mllm.mistral.lora is None
    assert not any("lora" in leaf for leaf in merged.leaves("dit"))
    for network, stem, scale in (
        ("dit", "layers.blocks.qkv", 1 / 3),
        ("mllm", "mistral.layers.blocks.down", 1.0),
    ):
        w, a, b = (
            plain.read(network, f"{stem}.{part}").astype(np.float32)
            for part in ("kernel", "lora_a", "lora_b")
        )
        expected = (w + a @ b * np.float32(scale)).astype(np.float16)
        found = merged.read(network, f"{stem}.kernel")
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
        assert (found != w).any()
    export_bundle(str(out), tmp_path / "out", networks=("dit", "encoder", "mllm"))
    decoder = open_torch(tmp_path / "out/vdm/1/mp_rank_00_model_states.pt")
    assert decoder.shapes == {name: shape for name, (shape, _) in decoder_shapes().items()}
    layer = "model.diffusion_model.transformer.layers.0.attention.query_key_value."
    assert not decoder.read(f"{layer}matrix_A.0").any()
    np.testing.assert_array_equal(
        decoder.read(f"{layer}original.weight").reshape(3, 32, 32).transpose(0, 2, 1),
        merged.read("dit", "layers.blocks.qkv.kernel")[0],
    )


def test_adapter_alone_takes_the_base_model_from_its_folder(bundle, released, tmp_path):
    whole = open_torch(released / "mllm/pytorch_model.bin")
    adapter = whole.select(lambda name: ".base_layer." not in name)
    entries = {name: (t.shape, t.dtype) for name, t in adapter.tensors.items()}
    write_torch(tmp_path / "agent.bin", entries, ((n, adapter.read(n)) for n in entries))
    plain = {
        name.removeprefix("llm.base_model.model.").replace(".base_layer", ""): whole.read(name)
        for name in whole.tensors
        if ".base_layer." in name
    }
    (tmp_path / "base").mkdir()
    write_safetensors(
        tmp_path / "base/model.safetensors",
        {name: (value.shape, value.dtype) for name, value in plain.items()},
        plain.items(),
    )
    config = (released / "mllm/base/config.json").read_text()
    (tmp_path / "base/config.json").write_text(config)
    out = tmp_path / "b"
    convert(out=str(out), agent=tmp_path / "agent.bin", mistral=tmp_path / "base")
    path = "mistral.layers.blocks.gate.kernel"
    found, expected = Bundle.open(out).read("mllm", path), Bundle.open(bundle).read("mllm", path)
    np.testing.assert_array_equal(found, expected, strict=True)


def rewrite(source: Path, target: Path, change) -> None:
    content = torch.load(source, weights_only=True)
    change(content["module"])
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, target)


def test_all_bad_tensors_are_listed_and_nothing_is_written(released, tmp_path, capsys):
    prefix = "model.diffusion_model."

    def change(tensors):
        del tensors[f"{prefix}time_embed.2.bias"]
        tensors[f"{prefix}stranger"] = torch.zeros(2)
        tensors["elsewhere"] = torch.zeros(3)
        name = f"{prefix}transformer.final_layernorm.weight"
        tensors[name] = torch.zeros(31)

    rewrite(released / "vdm/1/mp_rank_00_model_states.pt", tmp_path / "bad.pt", change)
    options = ["--latent-height", "4", "--latent-width", "6", "--clip-head-width", "8"]
    status = cli.main(
        ["convert", "--decoder", str(tmp_path / "bad.pt"), "--out", str(tmp_path / "b"), *options]
    )
    error = capsys.readouterr().err
    assert status == 2
    assert f"{tmp_path / 'bad.pt'}: 4 problems" in error
    assert f"missing: {prefix}time_embed.2.bias [8]" in error
    assert f"unused: {prefix}stranger [2]" in error
    assert "unused: elsewhere [3]" in error
    assert (
        f"wrong shape: {prefix}transformer.final_layernorm.weight: expected [32], found [31]"
        in error
    )
    assert [p.name for p in tmp_path.iterdir()] == ["bad.pt"]


def test_all_non_finite_tensors_are_listed_and_nothing_is_written(released, tmp_path, capsys):
    prefix = "model.diffusion_model."

    def change(tensors):
        tensors[f"{prefix}time_embed.2.bias"][3] = float("nan")
        tensors[f"{EMBEDDED['clip']}visual.proj"][1, :2] = float("inf")

    rewrite(released / "vdm/1/mp_rank_00_model_states.pt", tmp_path / "bad.pt", change)
    with pytest.raises(UserError) as caught:
        convert(out=str(tmp_path / "b"), decoder=tmp_path / "bad.pt", **OPTIONS)
    message = str(caught.value)
    assert "2 problems" in message
    assert f"not finite: {prefix}time_embed.2.bias (1 of 8 values)" in message
    assert f"not finite: {EMBEDDED['clip']}visual.proj (2 of 96 values)" in message
    assert [p.name for p in tmp_path.iterdir()] == ["bad.pt"]


def test_refuses_what_cannot_work(released, bundle, tmp_path):
    with pytest.raises(UserError, match="already there"):
        convert(out=str(bundle), reference=released, **OPTIONS)
    with pytest.raises(UserError, match="nothing to convert"):
        convert(out=str(tmp_path / "b"))
    with pytest.raises(UserError, match="pass --mistral DIR"):
        convert(out=str(tmp_path / "b"), agent=released / "mllm/pytorch_model.bin")
    with pytest.raises(UserError, match="not a whole number of frames"):
        convert(out=str(tmp_path / "b"), reference=released, **(OPTIONS | {"latent_width": 10}))
    with pytest.raises(UserError, match=r"found tensors of the 3D VAE: pass it with --vae"):
        convert(out=str(tmp_path / "b"), decoder=released / "vae/3d-vae.pt")
    with pytest.raises(
        UserError, match=r"found tensors of the language model: pass it with --agent"
    ):
        convert(out=str(tmp_path / "b"), vae=released / "mllm/pytorch_model.bin")
    convert(out=str(tmp_path / "v"), vae=released / "vae/3d-vae.pt")
    with pytest.raises(UserError, match="no network mllm"):
        export_bundle(str(tmp_path / "v"), tmp_path / "out", networks=("mllm",))
    with pytest.raises(UserError, match="already there"):
        export_bundle(str(bundle), released)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v"]


def test_a_foreign_bundle_cannot_write_elsewhere(released, tmp_path):
    convert(out=str(tmp_path / "v"), vae=released / "vae/3d-vae.pt")
    file = tmp_path / "v/config.json"
    file.write_text(file.read_text().replace('"vae/3d-vae.pt"', '"../../victim.pt"'))
    with pytest.raises(UserError, match="expected a path inside a folder"):
        export_bundle(str(tmp_path / "v"), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["v"]


def test_a_foreign_bundle_with_sizes_of_no_network(bundle, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bundle.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "config.json").unlink()
    config = json.loads((bundle / "config.json").read_text())
    config["networks"]["dit"]["patch_size"] = -1
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: networks\.dit: does not fit"):
        export_bundle(str(copy), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_files_that_do_not_belong_together(released, tmp_path):
    config = VAEConfig(channels=32, multipliers=(1, 1, 2), num_res_blocks=1, latent_channels=6)
    write_random(tmp_path / "vae.pt", tensor_shapes("vae", config, "float32"))
    with pytest.raises(UserError, match="latent channels: dit 4, vae 6"):
        convert(out=str(tmp_path / "b"), reference=released, vae=tmp_path / "vae.pt", **OPTIONS)


def test_the_reference_folder(reference, tmp_path):
    out = tmp_path / "b"
    assert cli.main(["convert", "--reference", str(reference), "--out", str(out)]) == 0
    opened = Bundle.open(out)
    assert opened.config.clip.vision_heads == 4
    assert opened.protocol.name == "released"
    assert (opened.tokenizer_dir / "tokenizer.json").is_file()
    assert cli.main(["export", "--bundle", str(out), "--out", str(tmp_path / "e")]) == 0
    assert (
        cli.main(["convert", "--reference", str(tmp_path / "e"), "--out", str(tmp_path / "c/b")])
        == 0
    )
    assert Bundle.open(tmp_path / "c/b").info == opened.info


PROGRAM = """
import re, sys
from pathlib import Path
from animegamer_jax.convert.options import ConvertOptions
from animegamer_jax.convert.released import convert_released
convert_released(ConvertOptions(out=sys.argv[2], decoder=Path(sys.argv[1])))
# Not getrusage's ru_maxrss, which begins with what the parent held.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.slow
def test_memory_stays_small(tmp_path):
    """A 2 GB decoder file: one stacked parameter at a time, and the file's pages given back."""
    config = DiTConfig(num_layers=17, param_dtype="float16")
    prefix = "model.diffusion_model."
    shapes = tensor_shapes("dit", config, "float16", prefix)
    shapes |= tensor_shapes("encoder", ShotEncoderConfig(), "float16", prefix)
    holes = {name: torch.empty(shape, dtype=torch.float16) for name, (shape, _) in shapes.items()}
    path = tmp_path / "decoder.pt"
    with torch.serialization.skip_data():  # the file reads as zeros
        torch.save({"module": holes}, path)
    try:
        assert path.stat().st_size > 2e9
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "b")],
            capture_output=True,
            text=True,
            check=True,
        )
        peak = int(done.stdout.split()[-1])
        largest = max(leaf.size * 2 for leaf in abstract_params("dit", config).values())
        assert peak < 1e9 + largest, f"{peak / 1e6:.0f} MB, largest leaf {largest / 1e6:.0f} MB"
    finally:  # pytest would keep 4 GB
        path.unlink()
        if (tmp_path / "b").exists():
            Bundle.open(tmp_path / "b").path.rmtree()


def test_files_of_another_network_are_recognised(released, tmp_path):
    out = str(tmp_path / "b")
    torch.save({"visual.conv1.weight": torch.zeros(2, 3, 2, 2)}, tmp_path / "clip.pt")
    with pytest.raises(UserError, match=r"--vae: expected the 3D VAE, found tensors of OpenCLIP"):
        convert(out=out, vae=tmp_path / "clip.pt")
    decoder = released / "vdm/1/mp_rank_00_model_states.pt"
    with pytest.raises(UserError, match=r"found tensors of the decoder: pass it with --decoder"):
        convert(out=out, vae=decoder)
    with pytest.raises(UserError, match=r"--latent-height: expected a whole number, 1 or more"):
        convert(out=out, decoder=decoder, latent_height=0)
    with pytest.raises(UserError, match=r"--latent-width: expected a multiple of the patch"):
        convert(out=out, decoder=decoder, latent_width=3)
    with pytest.raises(UserError, match=r"no tokenizer there"):
        convert(out=out, vae=released / "vae/3d-vae.pt", tokenizer=released / "vae")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.pt"]


def test_blocked_code_and_odd_formats_are_named(tmp_path):
    class Wants:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save({"state_dict": {"a": Wants()}}, tmp_path / "code.pt")
    with pytest.raises(UserError, match=r"refused, because it asks to run posix\.system"):
        open_torch(tmp_path / "code.pt")
    torch.save({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / "f8.pt")
    with pytest.raises(UserError, match=r"tensor a is a torch\.float8_e4m3fn"):
        open_torch(tmp_path / "f8.pt")


def test_a_full_disk_is_reported(released, bundle, tmp_path):
    """Files may not grow beyond 20 kB: as a full disk, in a process of its own."""
    code = (
        "import json, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from animegamer_jax import cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "for words in json.loads(sys.argv[1]): print(cli.main(words))"
    )
    commands = (
        ["convert", "--out", str(tmp_path / "b"), "--vae", str(released / "vae/3d-vae.pt")],
        ["export", "--out", str(tmp_path / "e"), "--bundle", str(bundle), "--networks", "vae"],
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["2", "2"], done.stderr
    for words, line in zip(commands, done.stderr.splitlines(), strict=True):
        assert line.startswith(f"animegamer {words[0]}: ")
        assert re.search("cannot be written: (File too large|the disk is full)", line)
    assert list(tmp_path.iterdir()) == []
