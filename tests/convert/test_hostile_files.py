"""Checkpoints and tokenizers that somebody else made: one line for whatever is wrong."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from random_model import write_tokenizer

from animegamer_jax import cli
from animegamer_jax.convert.released import decoder_file
from animegamer_jax.convert.sources import open_checkpoint, open_safetensors, write_safetensors
from animegamer_jax.errors import UserError
from animegamer_jax.tokenizer import T5Tokenizer, Tokenizer

torch = pytest.importorskip("torch")


def write_header(path: Path, header: object) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


GOOD = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
HEADERS = {
    "list": ([1], "not a safetensors file"),
    "text": ({"x": "y"}, r"tensor x: expected an object, found \"y\""),
    "no dtype": ({"x": {"shape": [], "data_offsets": [0, 4]}}, r"tensor x: dtype: missing"),
    "number": ({"x": GOOD | {"dtype": 4}}, r"tensor x: dtype: expected a valid string"),
    "shape": ({"x": GOOD | {"shape": 4}}, r"tensor x: shape: "),
    "shape of texts": (
        {"x": GOOD | {"shape": ["4"]}},
        r"tensor x: shape\[0\]: expected a valid int",
    ),
    "negative": ({"x": GOOD | {"shape": [-4, -4]}}, r"tensor x: shape\[0\]: expected"),
    "offsets": ({"x": GOOD | {"data_offsets": [0]}}, r"tensor x: data_offsets"),
    "before": ({"x": GOOD | {"data_offsets": [-64, 0]}}, r"tensor x: data_offsets\[0\]"),
    "huge": ({"x": GOOD | {"shape": [0, 10**30]}}, r"tensor x: shape\[1\]"),
    "long": ({"x" * 9999: GOOD | {"dtype": "y" * 9999}}, r"tensor x{80} has the format y{80}: "),
    "deep": (b"[" * 60_000, "not a safetensors file"),
    "number of 5,000 digits": (b'{"x": 1' + b"0" * 5000 + b"}", "not a safetensors file"),
    "not UTF-8": (b'{"\xff": 1}', "not a safetensors file"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_safetensors_header_of_another_shape(tmp_path, kind):
    header, message = HEADERS[kind]
    path = tmp_path / "model.safetensors"
    write_header(path, header)
    with pytest.raises(UserError, match=rf"^{path}: [^\n]*{message}[^\n]{{,300}}$"):
        open_safetensors(path)


def make_index(folder: Path, content: object) -> Path:
    value = np.zeros(2, np.float32)
    folder.mkdir(exist_ok=True)
    shape = (value.shape, value.dtype)
    for path in (folder / "a.safetensors", folder.parent / "outside.safetensors"):
        write_safetensors(path, {"x": shape}, [("x", value)])
    index = folder / "model.safetensors.index.json"
    index.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return index


INDICES = {
    "numbers": ({"weight_map": {"x": 1}}, r"weight_map: x: expected a valid string, found 1"),
    "list": ({"weight_map": ["a.safetensors"]}, r"weight_map: expected"),
    "no map": ({}, r"weight_map: expected"),
    "text": (b'"x"', "expected an object"),
    "not UTF-8": (b'{"\xff": 1}', "is not UTF-8"),
    "deep": (b"[" * 60_000, "nested too deeply"),
    "long": ({"weight_map": {"x": "n" * 5000}}, r"expected a name inside .*, found 'n{79}$"),
    "above": ({"weight_map": {"x": "../outside.safetensors"}}, r"expected a name inside"),
    "below and above": ({"weight_map": {"x": "b/../../outside.safetensors"}}, r"a name inside"),
    "absolute": ({"weight_map": {"x": "{parent}/outside.safetensors"}}, r"expected a name inside"),
    "other separator": ({"weight_map": {"x": "..\\a.safetensors"}}, r"expected a name inside"),
    "empty": ({"weight_map": {"x": ""}}, r"expected a name inside"),
    "terminal": ({"weight_map": {"x": "\x1b[2J"}}, r"expected a name inside .*\\x1b\[2J"),
    "nul": ({"weight_map": {"x": "a\0"}}, r"expected a name inside"),
    "many": (
        {"weight_map": {f"x{i}": f"{i}.bin" for i in range(5000)}},
        r"5000 of 5000 .*, \.\.\.",
    ),
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_that_names_something_else(tmp_path, kind):
    content, message = INDICES[kind]
    if kind == "absolute":
        content = json.loads(json.dumps(content).replace("{parent}", str(tmp_path)))
    index = make_index(tmp_path / "model", content)
    with pytest.raises(UserError, match=rf"^{index.parent}[^\n]*{message}[^\n]{{,300}}$"):
        open_checkpoint(index.parent)


def test_an_index_over_links_is_read(tmp_path):
    """The Hugging Face hub's own folders are links to files in another one."""
    index = make_index(tmp_path / "model", {"metadata": {}, "weight_map": {"x": "b.safetensors"}})
    (index.parent / "b.safetensors").symlink_to("a.safetensors")
    np.testing.assert_array_equal(open_checkpoint(index.parent).read("x"), np.zeros(2))


@pytest.mark.parametrize("name", ["../1", "{parent}/1", "a/../../1", "", "\x1b[2J", "n" * 5000])
def test_latest_leads_nowhere_else(tmp_path, name):
    folder = tmp_path / "vdm"
    folder.mkdir()
    (folder / "latest").write_text(name.replace("{parent}", str(tmp_path)))
    with pytest.raises(UserError, match=r"latest: expected a name inside [^\n\x1b]*$"):
        decoder_file(folder)
    (folder / "latest").write_text("1\n")
    assert decoder_file(folder) == folder / "1" / "mp_rank_00_model_states.pt"
    (folder / "latest").write_bytes(b"\xff\xfe1")
    with pytest.raises(UserError, match=r"latest: expected UTF-8 text"):
        decoder_file(folder)


def test_torch_files_that_state_more_than_they_hold(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"x": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(UserError, match=r"tensor x of shape \[1099511627776\] is larger than the"):
        open_checkpoint(path)
    torch.save({"x": torch.zeros(3, device="meta")}, path)
    with pytest.raises(UserError, match=r"tensor x of shape \[3\] is larger than the file"):
        open_checkpoint(path)
    torch.save({"x" * 9999: 1}, path)
    with pytest.raises(UserError, match=r"entry 'x{79} is of type int: expected tensors only"):
        open_checkpoint(path)


def test_a_torch_file_with_flipped_bytes_is_one_line(tmp_path):
    """Among the errors are IndexError and others that no reader of pickles documents."""
    path, rng = tmp_path / "a.pt", np.random.default_rng(0)
    torch.save({f"layer{i}": torch.zeros(i) for i in range(1, 5)}, path)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    start = path.read_bytes().find(b"data.pkl")
    for _ in range(400):
        damaged = whole.copy()
        damaged[start + rng.integers(0, 500, size=rng.integers(1, 4))] = rng.integers(0, 256)
        path.write_bytes(damaged.tobytes())
        problem = f"{path}: "
        try:
            for tensor in open_checkpoint(path).tensors.values():
                assert tensor.read().nbytes <= len(whole)
        except UserError as error:
            problem = str(error)
        assert problem.startswith(f"{path}: ")
        assert "\n" not in problem


@pytest.mark.parametrize("option", ["vae", "clip", "t5", "agent", "decoder"])
def test_a_pipe_for_a_checkpoint_is_refused(tmp_path, capsys, option):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 1, "intermediate_size": 1, "num_hidden_layers": 1}'
    )
    argv = ["convert", "--out", str(tmp_path / "b"), f"--{option}", f"{tmp_path}/pipe.safetensors"]
    assert cli.main([*argv, "--mistral", str(tmp_path)]) == 2
    assert "pipe.safetensors: expected a checkpoint, found a pipe" in capsys.readouterr().err


# Tokenizers


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return json.loads((folder / "tokenizer.json").read_text())


def text_token(content: dict) -> None:
    content["added_tokens"][0] = "text"


def huge_id(content: dict) -> None:
    content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 4_000_000_000


def negative_id(content: dict) -> None:
    content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (text_token, "not a tokenizer file"),
        (huge_id, "has the id 4000000000, and there are"),
        (negative_id, "not a tokenizer file"),
        (lambda content: content.pop("model"), "not a tokenizer file"),
    ],
)
def test_a_tokenizer_file_of_another_form(tmp_path, content, change, message):
    changed = json.loads(json.dumps(content))
    change(changed)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=rf"^[^\n]*{tmp_path}[^\n]*{message}[^\n]*$"):
        Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match=rf"^[^\n]*{tmp_path}[^\n]*$"):
        T5Tokenizer.load(tmp_path, vocab_size=1000)


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b"[" * 100_000, b"", b"{}", b'{"x": 1e999}'])
def test_a_tokenizer_file_that_is_none(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer.json: [^\n]*$"):
        Tokenizer.load(tmp_path)


def test_a_text_where_an_added_token_is_expected(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x03abc")
    for added in ({"0": "text"}, {"x": {"content": "a"}}, ["a"], "a"):
        config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"^{tmp_path}: the tokenizer cannot be read [^\n]*$"):
            Tokenizer.load(tmp_path)
