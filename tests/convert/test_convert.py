"""Released files to a bundle and back: the commands, and what they refuse."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import random_leaves, tiny_config
from small_network import random_values, write_random

from animegamer_jax import cli, progress
from animegamer_jax.bundle.bundle import Bundle, BundleWriter, abstract_params
from animegamer_jax.configs import (
    CLIPConfig,
    DiTConfig,
    LoRAConfig,
    MistralConfig,
    MLLMConfig,
    ShotEncoderConfig,
    T5Config,
    VAEConfig,
)
from animegamer_jax.convert import rules as R
from animegamer_jax.convert.export import export_bundle
from animegamer_jax.convert.networks import EMBEDDED, table_of
from animegamer_jax.convert.options import ConvertOptions
from animegamer_jax.convert.released import convert_released
from animegamer_jax.convert.sources import (
    open_checkpoint,
    open_torch,
    write_safetensors,
    write_torch,
)
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import RELEASED

torch = pytest.importorskip("torch")


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
    file = tmp_path / "out" / "animegamer.json"
    sizes = json.loads(file.read_text())
    for size in (-1, 10**20):
        sizes["networks"]["mllm"]["mistral"]["intermediate_size"] = size
        file.write_text(json.dumps(sizes))
        with pytest.raises(UserError, match=r"networks\.mllm: sizes that make no network"):
            convert(out=str(tmp_path / "c"), reference=tmp_path / "out")
    file.write_text("{}")
    with pytest.raises(
        UserError, match=r"animegamer\.json: protocol: missing: export the bundle again"
    ):
        convert(out=str(tmp_path / "c"), reference=tmp_path / "out")


@pytest.mark.parametrize(
    ("network", "change", "message"),
    [
        ("dit", {"output": "clean"}, "dit: the released code has neither patches of several"),
        ("vae", {"kernel_frames": 1}, "vae: the released code has kernels of 3 frames, this one"),
    ],
)
def test_what_the_released_code_cannot_run_is_not_exported(network, change, message, tmp_path):
    config = dataclasses.replace(getattr(tiny_config(64), network), **change)
    with BundleWriter(tmp_path / "model", name="tiny", protocol=RELEASED) as writer:
        writer.write_network(network, config, random_leaves(network, config, 0))
    with pytest.raises(UserError, match=message):
        export_bundle(str(tmp_path / "model"), tmp_path / "out", networks=(network,))
    assert not (tmp_path / "out").exists()


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


def test_a_full_disk_is_reported(released, bundle, tmp_path):
    """Files may not grow beyond 20 kB: as a full disk, in a process of its own."""
    code = (
        "import json, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from animegamer_jax import cli\n"
        "sys.dont_write_bytecode = True\n"  # truncated without a word: other processes read it
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
