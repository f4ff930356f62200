"""Files of weights: what is read, and what is refused."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from animegamer_jax.convert.sources import Source, open_checkpoint, open_torch, write_safetensors
from animegamer_jax.errors import UserError

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file


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
