"""Reading what others made: sizes first, one line for whatever is wrong."""

import io
import os
import socket
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from animegamer_jax import cli
from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import read_instructions
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.media.video import read_mp4
from animegamer_jax.storage import untrusted
from animegamer_jax.storage.serialization import read_json, read_lines
from animegamer_jax.storage.untrusted import open_arrays, read_file, read_member
from animegamer_jax.train import metric_logger


def make_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "a pipe"


def make_socket(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))
    return "a socket"


def make_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "a device"


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    with open_arrays(path, expected="arrays") as arrays:
        return {name: arrays.read(name) for name in arrays.names}


READERS = {
    "text": read_file,
    "JSON": lambda path: read_json(path, dict, hint="write it again"),
    "lines": lambda path: list(read_lines(path, dict, hint="write it again")),
    "instructions": read_instructions,
    "metrics": metric_logger.read_metrics,
    "arrays": load_arrays,
    "clip": read_mp4,
    "picture": read_picture,
}


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_device])
@pytest.mark.parametrize("reader", READERS)
def test_what_never_ends_is_not_read(tmp_path, monkeypatch, reader, make):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "given"
    found = make(path)
    with pytest.raises(UserError, match=f"{path}: expected .*, found {found}$"):
        READERS[reader](path)


def test_a_command_does_not_wait_for_a_pipe(tmp_path, capsys):
    (tmp_path / "game").mkdir()
    make_pipe(tmp_path / "game" / "game.json")
    (tmp_path / "lines").write_text("Mika waves.\n")
    argv = ["play", "--out", str(tmp_path / "game"), "--resume"]
    assert cli.main([*argv, "--instructions", str(tmp_path / "lines")]) == 2
    assert "game.json: expected a file, found a pipe" in capsys.readouterr().err


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert len(read_file(path, most=1 << 20)) == 1 << 20
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(UserError, match=r"expected a file of at most 1 MB, found a larger one"):
        read_file(path, most=1 << 20)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"at most 16 MB"):
        read_json(path, dict, hint="write it again")


# Arrays


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(descr: object, shape: object) -> bytes:
    file = io.BytesIO()
    content = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, content)
    return file.getvalue()


def raw_header(text: str) -> bytes:
    data = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data


DAMAGED = {
    "no array": (b"a text", "x has no array's header"),
    "nothing": (b"", "x has no array's header"),
    "version": (b"\x93NUMPY\x09\x00" + b"x" * 100, "x has no array's header .*version"),
    "no header": (raw_header("x"), "x has no array's header"),
    "deep header": (raw_header("(" * 9000), "x has no array's header"),
    "objects": (npy(np.array([1, "a", None], object)), "none of numbers or texts"),
    "fields": (header([("a", "<f4")], (2,)) + b"x" * 8, "none of numbers or texts"),
    "dates": (npy(np.zeros(2, "datetime64[s]")), "none of numbers or texts"),
    "giant": (header("<f4", (1 << 40, 1 << 20)), "which is not the size"),
    "giant text": (header("<U1000000", (1 << 20,)), "which is not the size"),
    "negative": (header("<f4", (-1, 2)), "the shape"),
    "cut": (npy(np.zeros(9, np.float32))[:-1], "which is not the size"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_member_that_is_no_array(tmp_path, kind):
    content, message = DAMAGED[kind]
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("good.npy", npy(np.arange(3)))
        archive.writestr("x.npy", content)
    pattern = rf"^{path}: expected arrays, found: [^\n]*({message})[^\n]*$"
    with pytest.raises(UserError, match=pattern):
        load_arrays(path)


def test_arrays_come_back(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.int8).reshape(2, 3), "b": np.array(["x", "yz"])}
    arrays |= {"c": np.array(1.5), "d": np.zeros((0, 3), np.float32), "e": np.array([True])}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = load_arrays(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_small_file_of_large_arrays_is_not_unpacked(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.zeros(1 << 25, np.float32))
    assert path.stat().st_size < 1 << 18
    tracemalloc.start()
    with pytest.raises(UserError, match=r"expected arrays, found: [\d,]+ bytes that unpack to 134"):
        load_arrays(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_a_member_is_unpacked_up_to_its_stated_size(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"x" * 1000)
    with zipfile.ZipFile(path) as archive:
        assert read_member(archive, "a", most=1000) == b"x" * 1000
        with pytest.raises(ValueError, match="a would take 1,000 bytes, more than 999"):
            read_member(archive, "a", most=999)


def test_folders_and_missing_files_are_left_to_the_reader(tmp_path):
    untrusted.check_file(tmp_path)
    untrusted.check_file(tmp_path / "missing")
    untrusted.check_file("gs://bucket/file")
