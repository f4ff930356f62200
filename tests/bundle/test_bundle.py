"""Bundles on disk: configuration to JSON and back, weights onto meshes, all or nothing."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from animegamer_jax.bundle import arrays as bundle_arrays
from animegamer_jax.bundle.bundle import (
    Bundle,
    BundleWriter,
    abstract_network,
    abstract_params,
    flat_params,
    make_network,
    param_leaves,
)
from animegamer_jax.bundle.config import BundleConfig, Placement, Weights, with_dtypes
from animegamer_jax.configs import LoRAConfig, MLLMConfig, ShotEncoderConfig, make_full, make_toy
from animegamer_jax.convert.export import export_bundle
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import PAPER, RELEASED
from animegamer_jax.sharding import make_mesh
from animegamer_jax.storage.serialization import from_json, to_json

ENCODER = ShotEncoderConfig(
    num_text_tokens=2, num_image_tokens=3, text_size=8, image_size=16, representation_size=32
)


def leaves_of(config: ShotEncoderConfig, dtype: str = "float16") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        path: rng.standard_normal(leaf.shape, np.float32).astype(dtype)
        for path, leaf in abstract_params("encoder", config).items()
    }


LEAVES = leaves_of(ENCODER)


def write(path: Path, *, leaves=None, config=ENCODER, **options) -> Path:
    with BundleWriter(path, name=path.name, protocol=PAPER, **options) as writer:
        writer.write_network("encoder", config, (leaves or LEAVES).items())
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return Bundle.open(write(tmp_path_factory.mktemp("bundle") / "small"))


# --- config.json ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_full, make_toy])
def test_every_configuration_survives_json(make):
    config = BundleConfig(
        format_version=1,
        name="a name",
        date=None,
        protocol=RELEASED,
        networks=make(),
        weights={"dit": Weights(num_params=3, num_bytes=6, dtypes={"float16": 3})},
        released={"dit": Placement(file="x", merged_lora=LoRAConfig(rank=2, alpha=1.0))},
        stages=("warmup", "decoder"),
    )
    content = json.loads(json.dumps(to_json(config)))
    assert from_json(BundleConfig, content, "config.json") == config
    # Earlier versions wrote neither stages nor checksums.
    del content["stages"], content["weights"]["dit"]["checksum"]
    earlier = from_json(BundleConfig, content, "config.json")
    assert earlier == dataclasses.replace(config, stages=None)


def test_number_formats_reach_nested_configurations():
    config = with_dtypes(MLLMConfig(), dtype="bfloat16", param_dtype="float16")
    assert config.mistral.dtype == config.dtype == "bfloat16"
    assert config.mistral.param_dtype == "float16"
    assert with_dtypes(config) == config


# --- reading --------------------------------------------------------------------------------


def test_what_it_says(bundle):
    assert bundle.name == "small"
    assert bundle.protocol == PAPER
    assert bundle.has("encoder")
    assert not bundle.has("t5")
    assert bundle.config.t5 is None
    assert bundle.config.encoder == dataclasses.replace(ENCODER, param_dtype="float16")
    size = sum(leaf.size for leaf in LEAVES.values())
    weights = bundle.info.weights["encoder"]
    assert dataclasses.replace(weights, checksum=None) == Weights(
        num_params=size, num_bytes=2 * size, dtypes={"float16": size}
    )
    assert bundle.info.stages is None


def test_checksums_tell_contents_apart(bundle, tmp_path):
    """Not the order of writing; but every value, and which parameter has it."""
    path, other = "image.input.bias", "text.input.bias"
    assert LEAVES[path].shape == LEAVES[other].shape
    changed = LEAVES[path].copy()
    changed[-1] += 1
    variants = {
        "same": dict(reversed(LEAVES.items())),
        "value": LEAVES | {path: changed},
        "swapped": LEAVES | {path: LEAVES[other], other: LEAVES[path]},
    }
    found = {
        name: Bundle.open(write(tmp_path / name, leaves=leaves)).info.weights["encoder"].checksum
        for name, leaves in variants.items()
    }
    assert found.pop("same") == bundle.info.weights["encoder"].checksum
    assert len({*found.values(), bundle.info.weights["encoder"].checksum}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_in_chunks(dtype, monkeypatch):
    monkeypatch.setattr(bundle_arrays, "_CHECKED_BYTES", 100)
    array = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(dtype)
    for one in (array, array.T, array[0, 0, 0], array[::2]):
        assert bundle_arrays.array_checksum(np.asarray(one)) == zlib.crc32(one.tobytes())


def values(module: nnx.Module) -> dict[str, jax.Array]:
    return {k: v[...] for k, v in flat_params(nnx.state(module, nnx.Param)).items()}


def test_loads_as_stored(bundle):
    module = bundle.load("encoder")
    assert module.text.input.dtype == jnp.float32
    for path, value in values(module).items():
        assert isinstance(value.sharding, SingleDeviceSharding)
        np.testing.assert_array_equal(value, LEAVES[path], strict=True)


def test_two_loads_are_two_networks(bundle):
    first, second = bundle.load("encoder"), bundle.load("encoder")
    before = np.asarray(first.text.input.kernel[...])
    second.text.input.kernel.set_value(second.text.input.kernel[...] + 1)
    np.testing.assert_array_equal(first.text.input.kernel[...], before)
    shapes = jax.tree.leaves(nnx.state(abstract_network("encoder", ENCODER)))
    assert {type(leaf) for leaf in shapes} == {jax.ShapeDtypeStruct}


def test_loads_with_other_formats(bundle):
    module = bundle.load("encoder", dtype="bfloat16", param_dtype="bfloat16")
    assert module.text.input.dtype == jnp.bfloat16
    for path, value in values(module).items():
        np.testing.assert_array_equal(value, LEAVES[path].astype(ml_dtypes.bfloat16), strict=True)


def test_loads_onto_a_mesh(bundle):
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    found = values(bundle.load("encoder", mesh=mesh, param_dtype="float32"))
    split = 0
    for path, value in found.items():
        assert isinstance(value.sharding, NamedSharding)
        assert value.sharding.mesh == mesh
        split += value.addressable_shards[0].data.size < value.size
        np.testing.assert_array_equal(value, LEAVES[path].astype(np.float32), strict=True)
    assert split
    other = bundle.load(
        "encoder", mesh=mesh, rules=dict.fromkeys(("embed", "mlp", "features", "norm"))
    )
    assert all(value.sharding.is_fully_replicated for value in values(other).values())


def test_reads_single_parameters(bundle):
    assert {k: (v.shape, v.dtype) for k, v in bundle.leaves("encoder").items()} == {
        k: (v.shape, v.dtype) for k, v in LEAVES.items()
    }
    name = "text.input.kernel"
    np.testing.assert_array_equal(bundle.read("encoder", name), LEAVES[name], strict=True)
    order = sorted(LEAVES, reverse=True)
    read = dict(bundle.read_in_order("encoder", order))
    assert list(read) == order
    for path, value in read.items():
        np.testing.assert_array_equal(value, LEAVES[path], strict=True)


def test_is_an_ordinary_orbax_checkpoint(bundle):
    with ocp.PyTreeCheckpointer() as checkpointer:
        plain = checkpointer.restore(bundle.path / "encoder")
    np.testing.assert_array_equal(plain["text"]["input"]["kernel"], LEAVES["text.input.kernel"])
    sharding = NamedSharding(make_mesh(), jax.sharding.PartitionSpec())
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), plain
    )
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(bundle.path / "encoder", wanted)
    kernel = arrays["text"]["input"]["kernel"]
    assert kernel.sharding == sharding
    np.testing.assert_array_equal(kernel, LEAVES["text.input.kernel"], strict=True)


def test_large_and_odd_arrays_are_written_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_arrays, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(bundle_arrays, "BATCH_BYTES", 1000)
    config = dataclasses.replace(ENCODER, text_size=7, representation_size=9)
    leaves = leaves_of(config, "float32")
    opened = Bundle.open(write(tmp_path / "b", leaves=leaves, config=config))
    for path, value in opened.read_in_order("encoder", leaves):
        np.testing.assert_array_equal(value, leaves[path], strict=True)


def test_a_module_survives(tmp_path):
    module = make_network("encoder", ENCODER, rngs=nnx.Rngs(3))
    opened = Bundle.open(write(tmp_path / "b", leaves=dict(param_leaves(module))))
    again = values(opened.load("encoder"))
    for path, value in values(module).items():
        np.testing.assert_array_equal(again[path], value, strict=True)


def copy_with(bundle: Bundle, folder: Path, change) -> Path:
    """The bundle's configuration alone, changed."""
    content = json.loads((Path(bundle.path) / "config.json").read_text())
    change(content)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_bad_bundles_in_one_line(bundle, tmp_path):
    with pytest.raises(UserError, match=r"not a bundle: expected a folder with config\.json"):
        Bundle.open(tmp_path / "nothing")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON: .*: convert again"):
        Bundle.open(tmp_path / "text")
    newer = copy_with(bundle, tmp_path / "newer", lambda c: c.update(format_version=99))
    with pytest.raises(UserError, match="format_version: expected 1, found 99"):
        Bundle.open(newer)
    lacking = copy_with(bundle, tmp_path / "lacking", lambda c: c["protocol"].pop("window"))
    with pytest.raises(UserError, match=r"config\.json: protocol\.window: missing: convert again"):
        Bundle.open(lacking)
    unweighed = copy_with(bundle, tmp_path / "unweighed", lambda c: c["weights"].pop("encoder"))
    with pytest.raises(UserError, match=r"config\.json: weights\.encoder: missing: convert again"):
        Bundle.open(unweighed)
    empty = copy_with(bundle, tmp_path / "empty", lambda c: None)
    with pytest.raises(UserError, match="holds no weights"):
        Bundle.open(empty).load("encoder")
    with pytest.raises(UserError, match="no network t5 in this bundle: it has encoder"):
        bundle.load("t5")
    with pytest.raises(UserError, match="no tokenizer/"):
        _ = bundle.tokenizer_dir


def test_weights_of_another_size_are_refused(bundle, tmp_path):
    def widen(content):
        content["networks"]["encoder"]["text_size"] = 9

    folder = copy_with(bundle, tmp_path / "wide", widen)
    (folder / "encoder").symlink_to(Path(bundle.path) / "encoder")
    with pytest.raises(UserError, match=r"text\.input\.kernel: expected the shape \(9, 32\)"):
        Bundle.open(folder).load("encoder")


def flip_a_bit(folder: Path, leaf: str) -> None:
    """Changes a bit of a parameter's first value, which OCDBT stores without a checksum."""
    content = LEAVES[leaf].tobytes()
    (file,) = (
        file for file in folder.rglob("*") if file.is_file() and content in file.read_bytes()
    )
    data = bytearray(file.read_bytes())
    data[data.index(content)] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("leaf", ["text.output.kernel", "image.output.kernel"])
def test_a_flipped_bit_is_one_line(tmp_path, leaf):
    folder = write(tmp_path / "b")
    flip_a_bit(folder / "encoder", leaf)
    flipped = Bundle.open(folder)
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    for load in (
        lambda: flipped.load("encoder"),
        lambda: flipped.load("encoder", param_dtype="bfloat16"),
        lambda: flipped.load("encoder", mesh=mesh),
        lambda: dict(flipped.read_in_order("encoder", LEAVES)),
        lambda: export_bundle(str(folder), tmp_path / "exported"),
    ):
        with pytest.raises(UserError, match=rf"^{folder}/encoder: the weights differ from their "):
            load()
    assert not (tmp_path / "exported").exists()
    # Bundles of earlier versions have no checksum to compare.
    content = json.loads((folder / "config.json").read_text())
    content["weights"]["encoder"]["checksum"] = None
    (folder / "config.json").write_text(json.dumps(content))
    Bundle.open(folder).load("encoder")
    Bundle.open(folder).load("encoder", mesh=mesh)


def test_a_small_folder_of_giant_weights_is_refused(tmp_path):
    config = dataclasses.replace(ENCODER, text_size=1 << 30)
    folder = write(tmp_path / "b")

    def giant(text: str) -> str:
        return text.replace('"text_size": 8', '"text_size": 1073741824')

    path = folder / "config.json"
    path.write_text(giant(path.read_text()))
    shapes = {leaf: shape.shape for leaf, shape in abstract_params("encoder", config).items()}
    for leaf in ("text.input.kernel",):
        store = bundle_arrays._open(epath.Path(folder / "encoder"), leaf, context=ts.Context())
        store = store.result()
        store.resize(exclusive_max=shapes[leaf], expand_only=True).result()
    with pytest.raises(UserError, match="encoder: expected files that hold the weights"):
        Bundle.open(folder).load("encoder")


# --- writing --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), ValueError("no")])
def test_nothing_is_left_after_an_error(tmp_path, error):
    def leaves():
        yield from list(LEAVES.items())[:2]
        raise error

    with (
        pytest.raises(type(error)),
        BundleWriter(tmp_path / "b", name="b", protocol=PAPER) as writer,
    ):
        writer.write_network("encoder", ENCODER, leaves())
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_safe(tmp_path):
    path = write(tmp_path / "b")
    with pytest.raises(UserError, match=r"already there: .* --overwrite"):
        write(path)
    other = {key: value + 1 for key, value in LEAVES.items()}
    with pytest.raises(ValueError, match="no values for"):
        write(path, leaves=dict(list(other.items())[:2]), overwrite=True)
    name = "text.input.kernel"
    np.testing.assert_array_equal(Bundle.open(path).read("encoder", name), LEAVES[name])
    write(path, leaves=other, overwrite=True)
    np.testing.assert_array_equal(Bundle.open(path).read("encoder", name), other[name])
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home/precious").write_text("text")
    with pytest.raises(UserError, match=r"holds no config\.json: choose another folder"):
        write(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home/precious").exists()
    (tmp_path / "free").mkdir()
    write(tmp_path / "free")


def test_wrong_leaves_are_refused(tmp_path):
    for change, message in (
        (lambda leaves: leaves.update(more=np.zeros(1)), "more is unknown or occurs twice"),
        (
            lambda leaves: leaves.update({"text.input.bias": np.zeros(3)}),
            r"expected the shape \(32,\)",
        ),
        (lambda leaves: leaves.pop("text.input.bias"), r"no values for \['text.input.bias'\]"),
    ):
        leaves = dict(LEAVES)
        change(leaves)
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "b", leaves=leaves)
    assert list(tmp_path.iterdir()) == []


def test_number_formats_that_nothing_computes_in(tmp_path):
    with pytest.raises(UserError, match="network encoder: its weights are float64"):
        write(tmp_path / "b", leaves=leaves_of(ENCODER, "float64"))
    assert list(tmp_path.iterdir()) == []


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("b"))
    assert Bundle.open("b").path == Bundle.open(tmp_path / "b").path


def test_tokenizer_folder(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    with (
        pytest.raises(UserError, match="expected a folder with the files of a tokenizer"),
        BundleWriter(tmp_path / "b", name="b", protocol=PAPER) as writer,
    ):
        writer.write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    with BundleWriter(tmp_path / "b", name="b", protocol=PAPER) as writer:
        writer.write_tokenizer(tmp_path / "tokenizer")
    assert (Bundle.open(tmp_path / "b").tokenizer_dir / "tokenizer.json").read_text() == "{}"


PROGRAM = """
import sys, time
import numpy as np
from animegamer_jax.bundle.writer import BundleWriter
from animegamer_jax.bundle.networks import abstract_params
from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.protocol import PAPER

def leaves(config):
    for path, leaf in abstract_params("encoder", config).items():
        print("writing", flush=True)
        time.sleep(60 if path == "text.input.kernel" else 0)
        yield path, np.zeros(leaf.shape, np.float16)

config = ShotEncoderConfig(text_size=8, image_size=16, representation_size=32)
with BundleWriter(sys.argv[1], name="b", protocol=PAPER) as writer:
    writer.write_network("encoder", config, leaves(config))
"""


def test_control_c_leaves_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "b")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        assert [p.name.startswith("b.tmp-") for p in tmp_path.iterdir()] == [True]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_reported_in_one_line(tmp_path):
    def damaged(name, damage):
        path = tmp_path / name
        write(path)
        damage(path / "encoder")
        with pytest.raises(UserError, match="convert again") as reported:
            Bundle.open(path).load("encoder")
        assert "\n" not in str(reported.value)

    def cut(folder):  # the ends of these files may hold only what was written since
        for file in folder.glob("**/d/*"):
            os.truncate(file, file.stat().st_size // 8)

    damaged("cut", cut)
    damaged("lost", lambda folder: shutil.rmtree(folder / "d"))
    damaged("manifest", lambda folder: (folder / "manifest.ocdbt").unlink())
    damaged("store", lambda folder: (folder / "manifest.ocdbt").write_bytes(b"{" * 40))
    gc.collect()  # nothing may complain after that one line


def test_an_earlier_bundle_opens(tmp_path):
    """One of 2026-11-23: its fields have their meaning, its weights the names of today."""
    earlier = json.loads(Path(__file__).with_name("bundle_of_november.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(earlier["config"]))
    bundle = Bundle.open(tmp_path)
    assert bundle.protocol == dataclasses.replace(
        PAPER,
        caption_length=32,
        stamina=(-2, -1, 1),
        motion_values=(0.6, 3.0, 8.5, 17.0, 32.0),
        guidance_scale=0.0,
        denoising_steps=4,
    )
    for name, weights in earlier["weights"].items():
        network = abstract_params(name, getattr(bundle.config, name))
        assert {path: list(leaf.shape) for path, leaf in network.items()} == weights, name
