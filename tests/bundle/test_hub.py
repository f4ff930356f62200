"""Models on a hub: uploaded, downloaded, revisions, without a connection, and hostile files."""

import json
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from stand_in_hub import using_hub

from animegamer_jax import cli
from animegamer_jax.bundle import safetensors_files
from animegamer_jax.bundle.bundle import Bundle, param_leaves
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.bundle.hub import fetch
from animegamer_jax.bundle.publishing import save_model
from animegamer_jax.errors import UserError
from animegamer_jax.sharding import make_mesh


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with using_hub(monkeypatch, tmp_path / "cache") as found:
        yield found


@pytest.fixture(scope="module")
def content(tiny_bundle, tmp_path_factory) -> dict[str, bytes]:
    """The files of a tiny model as they are uploaded."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_model(Bundle.open(tiny_bundle), folder, licence="apache-2.0")
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def leaves(bundle: Bundle, name, **options) -> dict[str, np.ndarray]:
    return dict(param_leaves(bundle.load(name, **options)))


def test_what_was_uploaded_is_what_is_downloaded(hub, tiny_bundle):
    bundle = Bundle.open(tiny_bundle)
    address = bundle.push_to_hub("me/tiny", licence="apache-2.0")
    assert address.startswith(f"{hub.url}/me/tiny/commit/")
    assert hub.created[0]["visibility"] == "private"
    found = Bundle.from_pretrained("me/tiny")
    assert found.digest() == bundle.digest()
    assert found.info == bundle.info
    for name in ("mllm", "dit"):
        ours, theirs = leaves(bundle, name), leaves(found, name)
        assert all(np.array_equal(ours[path], theirs[path]) for path in ours)
    card = (Path(found.path) / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "animegamer play --model hub:me/tiny" in card
    assert "| dit |" in card
    # The same name where a command takes a model.
    assert Path(model_folder("hub:me/tiny")) == Path(found.path)


def test_only_files_of_a_model_are_downloaded(hub, content):
    evil = {"dit/weights.pkl": b"x", "setup.py": b"x", "../../evil.json": b"x", ".hidden": b"x"}
    evil |= {
        "tokenizer/../../evil": b"x",
        "dit/model.safetensors/../x": b"x",
        "a/config.json": b"x",
    }
    hub.commit("me/tiny", content | evil)
    folder = fetch("hub:me/tiny")
    there = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert there == set(content)
    assert not any(name in request for request in hub.requests for name in ("evil", "pkl", "setup"))


def test_revisions(hub, content):
    first = hub.commit("me/tiny", content)
    changed = content | {"README.md": b"second"}
    hub.commit("me/tiny", changed)
    hub.commit("me/tiny", content | {"README.md": b"branch"}, branch="trial/one")
    readme = lambda address, **more: (fetch(address, **more) / "README.md").read_bytes()  # noqa: E731
    assert readme("hub:me/tiny") == b"second"
    assert readme(f"hub:me/tiny@{first}") == content["README.md"]
    assert readme("hub:me/tiny@trial/one") == b"branch"
    assert readme("hub:me/tiny", revision="trial/one") == b"branch"
    with pytest.raises(UserError, match="hub:me/tiny@other: no such revision: see"):
        fetch("hub:me/tiny@other")
    with pytest.raises(UserError, match="hub:me/nothing: no such model or dataset"):
        fetch("hub:me/nothing")


def test_without_a_connection(hub, content, monkeypatch):
    hub.commit("me/tiny", content | {".gitattributes": b"which every repository has"})
    with pytest.raises(UserError, match="was not downloaded before: try once without"):
        Bundle.from_pretrained("me/tiny", offline=True)
    there = fetch("hub:me/tiny")
    asked = len(hub.requests)
    assert Path(Bundle.from_pretrained("me/tiny", offline=True).path) == there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("hub:me/tiny") == there
    assert len(hub.requests) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch("hub:me/tiny")  # asks for the revision, and downloads nothing again
    assert not any("resolve" in request for request in hub.requests[asked:])


def test_a_hub_that_is_not_there(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the hub does not answer: .*HF_HUB_OFFLINE=1 uses"):
        fetch("hub:me/tiny")


@pytest.mark.parametrize(
    "bad", ["hub:", "hub:tiny", "hub:a/b/c", "hub:a/b@", "hub:../x y", "hub:a/b@-"]
)
def test_addresses(bad, hub):
    with pytest.raises(UserError, match=r"expected hub:OWNER/NAME|no such|does not answer"):
        fetch(bad)
    assert not [request for request in hub.requests if "resolve" in request]


def test_what_is_not_a_model(hub, content):
    hub.commit("me/other", {"model.bin": b"x", "README.md": b"x"})
    with pytest.raises(UserError, match="hub:me/other: not a model of animegamer_jax"):
        fetch("hub:me/other")


def header(tensors: dict, size: int = 0) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


HUGE = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
HOSTILE = {
    "empty": b"",
    "text": b"<html>not found</html>",
    "no end": struct.pack("<Q", 1 << 60),
    "larger than the file": header(HUGE),
    "another network": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4),
    "overlapping": header(
        {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, 4
    ),
    "unknown type": header({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, 1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_weights(kind, hub, content):
    hub.commit("me/tiny", content | {"dit/model.safetensors": HOSTILE[kind]})
    with pytest.raises(UserError, match="dit") as caught:
        Bundle.from_pretrained("me/tiny").load("dit")
    assert "\n" not in str(caught.value)


def test_changed_weights(hub, content):
    data = bytearray(content["dit/model.safetensors"])
    data[-1] ^= 1
    hub.commit("me/tiny", content | {"dit/model.safetensors": bytes(data)})
    with pytest.raises(UserError, match="the weights differ from their checksum"):
        Bundle.from_pretrained("me/tiny").load("dit")


@pytest.mark.parametrize(
    ("index", "reported"),
    [
        (b"[]", "expected"),
        (b'{"weight_map": {"a": "../../../etc/passwd"}}', "names the file '../../../etc/passwd'"),
        (b'{"weight_map": {"a": 3}}', "weight_map"),
        (b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}', "dit"),
    ],
)
def test_hostile_index(index, reported, tiny_bundle, tmp_path):
    save_model(Bundle.open(tiny_bundle), tmp_path / "model", licence="other")
    (tmp_path / "model" / "dit" / safetensors_files.INDEX).write_bytes(index)
    with pytest.raises(UserError, match=reported):
        Bundle.open(tmp_path / "model").load("dit")


def test_several_files_and_their_parts(tiny_bundle, tmp_path):
    """Read in parts by a mesh, from files in the form of other libraries."""
    bundle = Bundle.open(tiny_bundle)
    save_model(bundle, tmp_path / "model", licence="other")
    folder = tmp_path / "model" / "dit"
    arrays = dict(bundle.read_in_order("dit", sorted(bundle.leaves("dit"))))
    (folder / safetensors_files.SINGLE).unlink()
    folder.rmdir()
    largest = max(array.nbytes for array in arrays.values())
    safetensors_files.write_tensors(folder, arrays.items(), shard_bytes=largest)
    files = sorted(file.name for file in folder.iterdir())
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors"
    assert json.loads((folder / files[-1]).read_text())["metadata"]["total_size"] == sum(
        array.nbytes for array in arrays.values()
    )
    found = Bundle.open(tmp_path / "model")
    mesh = make_mesh({"fsdp": 4}, devices=jax.devices()[:4])
    sharded = leaves(found, "dit", mesh=mesh)
    assert all(np.array_equal(sharded[path], arrays[path]) for path in arrays)
    assert found.digest("dit") == bundle.digest("dit")
    half = leaves(found, "dit", param_dtype="bfloat16")
    assert all(array.dtype == ml_dtypes.bfloat16 for array in half.values())


def test_play_from_the_hub(hub, content, tmp_path, capsys):
    hub.commit("me/tiny", content)
    game = tmp_path / "game.txt"
    game.write_text("Character: Mika; Motion: waving; Background: day town.\n")
    words = ("--instructions", str(game), "--out", str(tmp_path / "out"), "--steps", "2")
    assert cli.main(["play", "--model", "hub:me/tiny", *words]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "turn_001.mp4").stat().st_size > 0
