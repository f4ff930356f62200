"""Changes of a file, as damage or malice may make them; the same seed makes the same change."""

import functools
import io
import json
import os
import pickle
import random
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Mutation(NamedTuple):
    """What is done to a file: its name, and a function that does it."""

    name: str
    apply: Callable[[Path], None]


def mutate(path: Path, form: str, rng: random.Random, canary: Path) -> Mutation:
    """Chooses a change of a file.

    Args:
        path: The file.
        form: Form of the file: json, lines (JSON), text, zip, npz, safetensors, torch, video,
            picture, pickle (of arrays), or binary.
        rng: Source of all choices.
        canary: Folder whose files nobody may read; names of files in it are put into the content.
    """
    if rng.random() < 0.06:
        return _of_place(rng)
    data = path.read_bytes()
    families: list[Callable[..., tuple[str, bytes] | None]] = [_bytes]
    families += _FORMS.get(form, [])
    if form in ("json", "lines", "text"):
        families.append(_text)
    for _ in range(20):
        family = families[0] if rng.random() < 0.3 else rng.choice(families)
        found = family(data, rng, canary)
        if found is not None and found[1] != data:
            name, changed = found
            return Mutation(name, functools.partial(_replace, data=changed))
    return Mutation("emptied", lambda target: _replace(target, b""))


def _replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


# In place of the file, something else


def _of_place(rng: random.Random) -> Mutation:
    def folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def link(target: str) -> Callable[[Path], None]:
        def apply(path: Path) -> None:
            path.unlink()
            path.symlink_to(target)

        return apply

    def loop(path: Path) -> None:
        path.unlink()
        path.symlink_to(path.name)

    def fifo(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    choices: dict[str, Callable[[Path], None]] = {
        "removed": Path.unlink,
        "emptied": lambda path: _replace(path, b""),
        "a folder": folder,
        "a link to nothing": link("no such file"),
        "a link to itself": loop,
        "a FIFO": fifo,
        "a link to /dev/zero": link("/dev/zero"),
        "a link to /dev/null": link("/dev/null"),
    }
    name = rng.choice(list(choices))
    return Mutation(name, choices[name])


# Bytes

_HUGE = (0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 1 << 40)
_FOREIGN = {
    "ffconcat": b"ffconcat version 1.0\nfile 'turn_001.mp4'\nfile 'turn_001.mp4'\n",
    "SDP": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n",
    "pickle": b"cposix\nsystem\n(S'touch pickled'\ntR.",
    "HTML": b"<html><script>alert(1)</script></html>\n" * 10,
    "gzip": bytes.fromhex("1f8b0800000000000003") + b"\xff" * 100,
    "ELF": b"\x7fELF" + bytes(200),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
}


def _bytes(data: bytes, rng: random.Random, _: Path) -> tuple[str, bytes] | None:
    if not data:
        return "bytes in an empty file", rng.randbytes(20)
    found, size = bytearray(data), len(data)
    place = rng.randrange(size)
    length = min(size, 1 << rng.randrange(1, 13))

    def flip(count: int) -> None:
        for _ in range(count):
            at = rng.randrange(size)
            found[at] ^= 1 << rng.randrange(8)

    match rng.randrange(14):
        case 0 | 1:
            flip(1)
            return "one bit", bytes(found)
        case 2:
            flip(rng.randrange(2, 64))
            return "some bits", bytes(found)
        case 3:
            return f"cut at {place}", data[:place]
        case 4:
            return f"{length} bytes removed", data[:place] + data[place + length :]
        case 5:
            return f"{length} bytes inserted", data[:place] + rng.randbytes(length) + data[place:]
        case 6:
            return f"{length} zeros written", data[:place] + bytes(length) + data[place + length :]
        case 7:
            block = data[place : place + length]
            return "a block twice", data[:place] + block + data[place:]
        case 8 if size > 8:
            a, b = sorted((rng.randrange(size), rng.randrange(size)))
            return "two parts swapped", data[b:] + data[a:b] + data[:a]
        case 9 | 10 if size > 16:
            number, order = rng.choice(_HUGE), rng.choice("<>")
            form = order + rng.choice("IQ")
            number &= 0xFFFFFFFF if form[1] == "I" else 0xFFFFFFFFFFFFFFFF
            at = rng.randrange(min(size, 1 << rng.randrange(5, 30)) - 8)
            struct.pack_into(form, found, at, number)
            return f"{number} at {at}", bytes(found)
        case 11:
            return "random bytes", rng.randbytes(max(1, min(size, 100_000)))
        case 12:
            name = rng.choice(list(_FOREIGN))
            return f"{name} in its place", _FOREIGN[name]
        case _:
            return "bytes at the end", data + rng.randbytes(1 + length)


# Text

_INSERTED = {
    "NUL": "\0",
    "escape sequences": "\x1b]0;title\x07\x1b[31mred\x1b[2J",
    "C1 controls": "\x9b31m\x90",
    "right to left": "\u202egnp.exe",
    "carriage returns": "\r\r",
    "a byte order mark": "\ufeff",
    "a long line": "x" * 3_000_000,
    "many lines": "\n" * 300_000,
    "quotes": "\"'`$(touch touched)<script>",
    "a percent": "%s%n%(x)s{0}{__class__}",
}


def _text(data: bytes, rng: random.Random, _: Path) -> tuple[str, bytes] | None:
    text = data.decode(errors="replace")
    place = rng.randrange(len(text) + 1)
    match rng.randrange(7):
        case 0:
            code = rng.choice(["utf-16", "utf-32", "utf-7", "cp037"])
            return code, text.encode(code, "replace")
        case 1:
            return "Latin-1", text[:place].encode() + b"\xe9\xff" + text[place:].encode()
        case 2 | 3 | 4:
            name = rng.choice(list(_INSERTED))
            return f"{name} at {place}", (text[:place] + _INSERTED[name] + text[place:]).encode()
        case 5:
            numbers = list(re.finditer(r"\d+", text))
            if not numbers:
                return None
            span, new = rng.choice(numbers).span(), rng.choice(_NUMBERS)
            return f"number {new[:20]}", (text[: span[0]] + new + text[span[1] :]).encode()
        case _:
            lines = text.split("\n")
            a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[a], lines[b] = lines[b], lines[a]
            return "two lines swapped", "\n".join(lines).encode()


_NUMBERS = ("-1", "0", "1e999", "-0", "99999999999999999999", "9" * 5000, "1.5", "NaN", "0x10",
            "2147483648", "9223372036854775808", "1_000", "\u0661")  # fmt: skip


# JSON


class _Raw(NamedTuple):
    """Text that is put into JSON as it is."""

    text: str


def _values(rng: random.Random, old: Any, canary: Path) -> tuple[str, Any]:
    suffix = Path(old).suffix if isinstance(old, str) else ""
    choices: dict[str, Any] = {
        "null": None,
        "true": True,
        "zero": 0,
        "minus one": -1,
        "one more": old + 1 if type(old) in (int, float) else 1,
        "a large number": 2**31,
        "a larger number": 2**63,
        "a number of 400 digits": 10**400,
        "a number of 5000 digits": _Raw("9" * 5000),
        "a fraction": 0.5,
        "a huge fraction": 1e308,
        "too large for a float": _Raw("1e999"),
        "NaN": _Raw("NaN"),
        "Infinity": _Raw("-Infinity"),
        "an empty text": "",
        "a text": "x",
        "a text with NUL": f"a\0b{suffix}",
        "a text with escapes": f"\x1b]0;title\x07\x1b[31m{suffix}",
        "half a character": f"\ud800{suffix}",
        "a long text": "x" * 100_000 + suffix,
        "a long name": "n" * 300 + suffix,
        "a path upwards": f"../canary/secret{suffix}",
        "a path far upwards": f"../../../canary/secret{suffix}",
        "an absolute path": f"{canary}/secret{suffix}",
        "a path to a device": "/dev/zero",
        "a number as text": "12",
        "an empty list": [],
        "an empty object": {},
        "nested lists": _Raw("[" * 500 + "]" * 500),
        "deeply nested lists": _Raw("[" * 200_000 + "]" * 200_000),
        "deeply nested objects": _Raw('{"a":' * 100_000 + "1" + "}" * 100_000),
        "a long list": [0] * 300_000,
        "a list around it": [old],
        "an object around it": {"value": old},
    }
    name = rng.choice(list(choices))
    return name, choices[name]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in list(items)[:200]:
        found += _paths(item, (*path, key))
    return found


def _change_json(value: Any, rng: random.Random, canary: Path) -> tuple[str, str]:
    """Returns what was changed at one place of a JSON value, and the new text."""
    paths = _paths(value)
    # Places near the top are few among the many in long lists.
    depth = rng.randrange(1, max(map(len, paths)) + 1) if len(paths) > 1 else 0
    path = rng.choice([p for p in paths if len(p) == depth] or paths)
    where = ".".join(map(str, path)) or "all"
    raws: list[str] = []

    def plain(item: Any) -> Any:
        if isinstance(item, _Raw):
            raws.append(item.text)
            return f"@@{len(raws) - 1}@@"
        return item

    parent, old = None, value
    for key in path:
        parent, old = old, old[key]
    action = rng.randrange(8) if parent is not None else 7
    name = ""
    if action == 0 and isinstance(parent, (dict, list)):
        del parent[path[-1]]
        name = "removed"
    elif action == 1 and isinstance(value, dict) and "tokenizer_class" in value:
        value["auto_map"] = {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}
        value["tokenizer_class"] = "Tokenizer"
        name = "code to run"
    elif action == 1 and isinstance(parent, dict):
        key = rng.choice(["unknown", "", "__class__", "\x1b[31m", "x" * 5000, path[-1] + "_"])
        parent[key] = old
        name = f"also as {key[:20]!a}"
    elif action == 2 and isinstance(parent, dict):
        parent[rng.choice(["renamed", path[-1].upper()])] = parent.pop(path[-1])
        name = "renamed"
    elif action == 3 and isinstance(parent, list):
        parent.insert(path[-1], old)
        name = "twice"
    elif action == 3 and isinstance(parent, dict):
        other = rng.choice(list(parent))
        parent[path[-1]], parent[other] = parent[other], old
        name = f"swapped with {other}"
    else:
        name, new = _values(rng, old, canary)
        if parent is None:
            value = plain(new)
        else:
            parent[path[-1]] = plain(new)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    for number, raw in enumerate(raws):
        text = text.replace(f'"@@{number}@@"', raw)
    if action == 4 and isinstance(value, dict) and value:
        key = next(iter(value))
        text = text.replace("{", f"{{{json.dumps(key)}: 1, ", 1)
        name += ", the first field twice"
    return f"{where[:60]}: {name}", text


def _json(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    name, text = _change_json(json.loads(data), rng, canary)
    return name, text.encode("utf-8", "surrogatepass")


def _lines(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    lines = data.split(b"\n")
    filled = [i for i, line in enumerate(lines) if line.strip()]
    if not filled:
        return None
    chosen = rng.choice(filled)
    found = _json(lines[chosen], rng, canary)
    assert found is not None
    lines[chosen] = found[1]
    return f"line {chosen + 1}: {found[0]}", b"\n".join(lines)


# Zip


def _members(data: bytes) -> list[tuple[zipfile.ZipInfo, bytes]] | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info, archive.read(info)) for info in archive.infolist()]
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError):
        return None


_BOMB = 600 << 20  # bytes


def _zip(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
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
        found = _bytes(content, rng, canary)
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
            + struct.pack("<II", 40, rng.choice(_HUGE) & 0xFFFFFFFF)
            + found[at + 28 :]
        )
        name = "an untrue size"
    return f"{names[chosen % len(names)]}: {name}", found


def _npz(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
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


# Weights of others


def _safetensors(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.15:
        size = rng.choice([0, 1, length + 1, 1 << 40, (1 << 64) - 1])
        return f"header of {size} bytes", size.to_bytes(8, "little") + header + rest
    name, text = _change_json(json.loads(header), rng, canary)
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


def _torch(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    import torch

    if rng.random() < 0.5:
        return _zip(data, rng, canary)
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


def _pickle(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
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


# Pictures and videos


def _video(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    found = bytearray(data)
    match rng.randrange(4):
        case 0:  # the size of a box
            boxes = [
                m.start()
                for m in re.finditer(
                    rb"(moov|trak|mdat|stsz|stts|stco|avcC|stsd|mvhd|tkhd|stsc)", data
                )
            ]
            if not boxes:
                return None
            at = rng.choice(boxes)
            size = rng.choice([0, 1, 7, 8, 0x7FFFFFFF, 0xFFFFFFFF])
            struct.pack_into(">I", found, max(0, at - 4), size)
            return f"box {data[at : at + 4].decode()} of {size} bytes", bytes(found)
        case 1:  # numbers inside
            at = rng.choice(
                [m.end() for m in re.finditer(rb"(stsz|stts|stco|stsc|tkhd|mvhd|avc1|ctts)", data)]
                or [8]
            )
            struct.pack_into(
                ">I",
                found,
                min(len(found) - 4, at + 4 * rng.randrange(8)),
                rng.choice(_HUGE) & 0xFFFFFFFF,
            )
            return "a huge number in a box", bytes(found)
        case 2:
            name = rng.choice(["turn_001.mp4", str(canary / "secret.mp4")])
            return "a list of films", f"ffconcat version 1.0\nfile '{name}'\n".encode()
        case _:
            return "a second film behind it", data + data


def _picture(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    from PIL import Image

    match rng.randrange(5):
        case 0:  # a PNG of any size, with little data
            sides = rng.choice(
                [(50_000, 50_000), (2**31 - 1, 1), (1, 100_000_000), (0, 5), (20_000, 20_000)]
            )
            head = struct.pack(">IIBBBBB", *sides, 8, 2, 0, 0, 0)

            def chunk(kind: bytes, content: bytes) -> bytes:
                return (
                    struct.pack(">I", len(content))
                    + kind
                    + content
                    + struct.pack(">I", zlib.crc32(kind + content))
                )

            body = zlib.compress(bytes(1 << 20))
            return f"a PNG of {sides}", b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(
                b"IDAT", body
            ) + chunk(b"IEND", b"")
        case 1:
            form = rng.choice(
                ["BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "PDF", "GIF", "WEBP", "JPEG", "EPS"]
            )
            buffer = io.BytesIO()
            Image.new("RGB", (64, 48), "red").save(buffer, form)
            return form, buffer.getvalue()
        case 2:
            buffer = io.BytesIO()
            frames = [Image.new("P", (200, 200), i) for i in range(100)]
            frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
            return "a GIF of many pictures", buffer.getvalue()
        case 3:
            buffer = io.BytesIO()
            mode = rng.choice(["1", "L", "P", "RGBA", "CMYK", "I;16", "LA", "F", "I", "YCbCr"])
            Image.new(mode, (40, 30)).save(buffer, "TIFF")
            return f"a TIFF of mode {mode}", buffer.getvalue()
        case _:
            return "sizes of two pixels", data[:16] + struct.pack(">II", 30_000, 30_000) + data[24:]


_FORMS: dict[str, list[Callable[..., tuple[str, bytes] | None]]] = {
    "json": [_json, _json, _json, _json],
    "lines": [_lines, _lines, _lines],
    "text": [_text],
    "zip": [_zip, _zip, _zip],
    "npz": [_npz, _npz, _zip],
    "safetensors": [_safetensors, _safetensors],
    "torch": [_torch, _torch],
    "pickle": [_pickle, _pickle],
    "video": [_video],
    "picture": [_picture, _picture],
}
