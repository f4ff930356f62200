"""Changes of archives and of files of weights; the same seed makes the same change."""

import io
import json
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from byte_mutations import HUGE, change_bytes
from text_mutations import changed_json


def _members(data: bytes) -> list[tuple[zipfile.ZipInfo, bytes]] | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info, archive.read(info)) for info in archive.infolist()]
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError):
        return None


_BOMB = 600 << 20  # bytes


def change_zip(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    members = _members(data)
    if not members:
        return None
    chosen = rng.randrange(len(members))
    info, content = members[chosen]
    names = [member.filename for member, _ in members]
    action = rng.randrange(12)
    new, renamed, kind, name = content, info.filename, info.compress_type, ""
    mode = info.external_attr
    extra: list[tuple[str, bytes]] = []
    if action == 0:
        renamed = rng.choice([f"../{info.filename}", f"/tmp/{info.filename}", f"{canary}/x.mp4",
                              "a/../../x.npz", "..\\x.mp4", "x" * 300 + ".mp4", "\x1b[31m.mp4",
                              "C:x.mp4", "turn_001.mp4/x", "a\0b.mp4", "."])  # fmt: skip
        name = f"renamed {renamed[:40]!a}"
    elif action == 1:
        new, kind, name = bytes(_BOMB), zipfile.ZIP_DEFLATED, f"{_BOMB >> 20} MB of zeros"
    elif action == 2:
        extra, name = [(info.filename, content)], "a member twice"
    elif action == 3:
        extra = [(f"m{i}.npz", b"") for i in range(25_000)]
        name = "25,000 more members"
    elif action == 4:
        mode, new, name = 0o120777 << 16, str(canary / "secret.mp4").encode(), "a link"
    elif action == 5:
        new, name = b"", "an empty member"
    elif action == 6:
        new, name = content[: rng.randrange(len(content) + 1)], "a member cut"
    elif action == 7:
        del members[chosen]
        name = "a member removed"
    elif action == 8:
        kind, name = rng.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]), "another compression"
    elif action == 9:
        other = members[rng.randrange(len(members))][1]
        new, name = other, "another member's content"
    else:
        found = change_bytes(content, rng, canary)
        if found is None:
            return None
        name, new = found
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, (member, old) in enumerate(members):
            is_it = number == chosen and action != 7
            entry = zipfile.ZipInfo(renamed if is_it else member.filename)
            entry.filename = renamed if is_it else member.filename
            entry.external_attr = mode if is_it else member.external_attr
            entry.compress_type = kind if is_it else member.compress_type
            archive.writestr(entry, new if is_it else old)
        with warnings.catch_warnings(action="ignore"):
            for filename, content in extra:
                archive.writestr(filename, content)
    found = buffer.getvalue()
    if action == 10 and (at := found.find(b"PK\x01\x02")) >= 0:  # sizes that are not true
        found = (
            found[: at + 20]
            + struct.pack("<II", 40, rng.choice(HUGE) & 0xFFFFFFFF)
            + found[at + 28 :]
        )
        name = "an untrue size"
    return f"{names[chosen % len(names)]}: {name}", found


def change_npz(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    """Another array or another header in an .npz or .npy."""
    members = _members(data)
    if not members:
        return None
    chosen = rng.randrange(len(members))
    action = rng.randrange(10)
    if action < 5:
        shapes = ("(1073741824, 4)", "(99999999999999999999,)", "(0, 0)", "(-1, 8)", "(16, 32, 0)",
                  "(3000000000,)", "'x'", "(4,)*9", "(True, False)", "(16.0, 32)")  # fmt: skip
        kinds = (
            "'<f4'",
            "'|O'",
            "'<f8'",
            "'<U1000000000'",
            "[('a', '<f4')]",
            "'V99999999'",
            "None",
        )
        shape = rng.choice(shapes) if action < 4 else "(16, 32)"
        kind = "'<f4'" if action < 3 else rng.choice(kinds)
        header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}"
        if action == 0:
            header = rng.choice(["{", "[" * 2000, "{}", "9" * 5000, "\0", header + "x" * 20_000])
        version = rng.choice([(1, 0)] * 4 + [(2, 0), (3, 0), (9, 9)])
        encoded = header.encode() + b"\n"
        size = struct.pack("<H" if version == (1, 0) else "<I", min(len(encoded), 65535))
        new = b"\x93NUMPY" + bytes(version) + size + encoded + bytes(64)
        name = f"header {header[:70]!a}"
    else:
        arrays: dict[str, Any] = {
            "infinities": np.full((16, 32), np.inf, np.float32),
            "objects": np.array([{"a": 1}], object),
            "float16": np.zeros((16, 32), np.float16),
            "an array of another shape": np.zeros((3, 5), np.float32),
            "a scalar": np.float32(1),
            "transposed": np.zeros((16, 32), np.float32).T,
            "many zeros": np.zeros((100 << 20) // 4 * 6, np.float32),
        }
        name = rng.choice(list(arrays))
        buffer = io.BytesIO()
        np.save(buffer, arrays[name], allow_pickle=True)
        new = buffer.getvalue()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (member, old) in enumerate(members):
            archive.writestr(member.filename, new if number == chosen else old)
    return name, buffer.getvalue()


def change_safetensors(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.15:
        size = rng.choice([0, 1, length + 1, 1 << 40, (1 << 64) - 1])
        return f"header of {size} bytes", size.to_bytes(8, "little") + header + rest
    name, text = changed_json(json.loads(header), rng, canary)
    encoded = text.encode("utf-8", "surrogatepass")
    return name, len(encoded).to_bytes(8, "little") + encoded + rest


class _Call:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class _Touch(_Call):
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path):
        super().__init__(os.mkdir, (str(path),))


def change_torch(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    import torch

    if rng.random() < 0.5:
        return change_zip(data, rng, canary)
    tensor = torch.zeros(2, 3)
    contents: dict[str, Any] = {
        "code": {"state_dict": {"a": _Touch(canary / "run")}},
        "a list": [tensor],
        "numbers as names": {1: tensor, 2: tensor},
        "nothing": {},
        "a text among tensors": {"a": tensor, "b": "x\x1b[31m"},
        "names with escapes": {"a\x1b[31m\x07": tensor},
        "a sparse tensor": {"a": tensor.to_sparse()},
        "complex numbers": {"a": tensor.to(torch.complex64)},
        "not a number": {"state_dict": {"a": tensor * float("nan")}},
        "an expanded tensor": {"a": torch.zeros(1).expand(1 << 33)},
        "a tensor on no device": {"a": torch.empty(1 << 40, device="meta")},
        "nested dictionaries": {"state_dict": {"state_dict": {"a": tensor}}},
        "a scalar": tensor[0, 0],
    }
    name = rng.choice(list(contents))
    buffer = io.BytesIO()
    torch.save(contents[name], buffer, _use_new_zipfile_serialization=rng.random() < 0.7)
    return name, buffer.getvalue()


_NESTED = b"\x80\x02" + b"}U\x01a" * 20_000 + b"}" + b"s" * 20_000 + b"."  # dictionaries


def change_pickle(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    if rng.random() < 0.5:
        content = pickle.loads(data)
        part, key = content, rng.choice(list(content))
        while isinstance(part[key], dict):
            part = part[key]
            key = rng.choice(list(part))
        old = part[key]
        choices: dict[str, Any] = {
            "objects": old.astype(object),
            "texts": old.astype(str),
            "complex numbers": old.astype(complex),
            "dates": np.zeros(old.shape, "datetime64[s]"),
            "whole numbers": old.astype(np.int8),
            "not a number": old * np.nan,
            "another shape": old[..., None],
            "no array": "x\x1b[31m",
            "the whole content": content,
            "code": _Touch(canary / "run"),
        }
        name = rng.choice(list(choices))
        part[key] = choices[name]
        return f"{key}: {name}", pickle.dumps(content)
    shared: dict[str, Any] = {"a": np.zeros(3)}
    for _ in range(40):
        shared = dict.fromkeys(map(str, range(40)), shared)
    contents: dict[str, Any] = {
        "code": {"a": _Touch(canary / "run")},
        "a list": [np.zeros(3)],
        "nothing": {},
        "numbers as names": {1: np.zeros(3), 2: np.zeros(3)},
        "names with escapes": {"a\x1b[31m\x07": np.zeros(3)},
        "a long name": {"a" * 100_000: {"b": np.zeros(3)}},
        "dictionaries that are shared": shared,
        "an array of 4 TB": {"a": _Call(np.ndarray, ((1 << 40,), np.dtype("f4")))},
    }
    name = rng.choice([*contents, "deep dictionaries"])
    return name, pickle.dumps(contents[name]) if name in contents else _NESTED
