"""Changes of a file, as damage or malice may make them; the same seed makes the same change."""

import functools
import io
import os
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from archive_mutations import (
    change_npz,
    change_pickle,
    change_safetensors,
    change_torch,
    change_zip,
)
from byte_mutations import HUGE, change_bytes
from text_mutations import change_json, change_lines, change_text


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
    families: list[Callable[..., tuple[str, bytes] | None]] = [change_bytes]
    families += _FORMS.get(form, [])
    if form in ("json", "lines", "text"):
        families.append(change_text)
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
                rng.choice(HUGE) & 0xFFFFFFFF,
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
    "json": [change_json, change_json, change_json, change_json],
    "lines": [change_lines, change_lines, change_lines],
    "text": [change_text],
    "zip": [change_zip, change_zip, change_zip],
    "npz": [change_npz, change_npz, change_zip],
    "safetensors": [change_safetensors, change_safetensors],
    "torch": [change_torch, change_torch],
    "pickle": [change_pickle, change_pickle],
    "video": [_video],
    "picture": [_picture, _picture],
}
