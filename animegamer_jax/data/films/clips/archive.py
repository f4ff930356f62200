"""Files of the shots folder: JSON that is read strictly, clips in a zip archive, written in whole.

A file is written to a temporary name beside its place and renamed; in a bucket as on a disk.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.storage.paths import telling

_MEND = "free space or choose another place"
_AGAIN = "remove the film's folder and cut the film again"
_STALE = 3600  # seconds without a byte
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's own zero: the same clips give the same archive


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes its place when the block ends without an error.

    Two processes may write the same file: one of theirs stays, in whole. What a killed process
    left of it is removed after an hour.

    Raises:
        UserError: the disk refuses.
    """
    with telling(path, "cannot be written", mend=_MEND):
        remove_old(path.parent.glob(f"{path.name}.part-*"))
    with _placing(path) as file:
        yield file


@contextlib.contextmanager
def _placing(path: epath.Path) -> Iterator[IO[bytes]]:
    part = path.parent / f"{path.name}.part-{secrets.token_hex(4)}"
    with telling(path, "cannot be written", mend=_MEND):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                if "://" not in os.fspath(path):
                    os.fsync(file.fileno())
            part.replace(path)
        finally:
            if part.exists():
                part.unlink(missing_ok=True)


def remove_old(parts: Iterable[epath.Path]) -> None:
    """Removes those to which nothing was written for an hour."""
    for part in parts:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - part.stat().mtime > _STALE:
                part.unlink()


def write_json(path: epath.Path, value: Any) -> None:
    """Writes one value in whole.

    Raises:
        UserError: the disk refuses.
    """
    with replacing(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def add_json(path: epath.Path, value: Any) -> None:
    """`write_json` for one of very many files: it does not look for what killed processes left.

    Raises:
        UserError: the disk refuses.
    """
    with _placing(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def write_lines(path: epath.Path, values: Iterable[Any]) -> None:
    """Writes one value a line, in whole.

    Raises:
        UserError: the disk refuses.
    """
    with replacing(path) as file:
        for value in values:
            file.write((json.dumps(value) + "\n").encode())


def read_json(path: epath.Path) -> Any:
    """The value of a file.

    Raises:
        UserError: the file is missing or damaged.
    """
    with telling(path, "cannot be read", mend=_AGAIN):
        data = path.read_bytes()
    return _parsed(data, os.fspath(path))


def read_lines(path: epath.Path) -> Iterator[tuple[Any, str]]:
    """The value of each line, and what a message calls the line.

    Raises:
        UserError: the file is missing or damaged.
    """
    with telling(path, "cannot be read", mend=_AGAIN):
        lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        raise UserError(f"{path}: expected a line break at the end, found none: {_AGAIN}")
    for number, line in enumerate(lines[:-1], start=1):
        where = f"{path}, line {number}"
        yield _parsed(line, where), where


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error}): {_AGAIN}") from None


def _clip_name(clip: int) -> str:
    return f"{clip:05d}.mp4"


def _picture_name(clip: int) -> str:
    return f"dropped/{clip:05d}.jpg"


@dataclasses.dataclass(frozen=True)
class ArchiveWriter:
    """A film's archive while it is written: clips and pictures by their clip's number."""

    archive: zipfile.ZipFile

    def add_clip(self, clip: int, mp4: bytes) -> None:
        self.archive.writestr(zipfile.ZipInfo(_clip_name(clip), _EPOCH), mp4)

    def add_picture(self, clip: int, jpeg: bytes) -> None:
        self.archive.writestr(zipfile.ZipInfo(_picture_name(clip), _EPOCH), jpeg)


@contextlib.contextmanager
def writing_archive(path: epath.Path) -> Iterator[ArchiveWriter]:
    """An archive to write; it takes its place when the block ends without an error.

    Raises:
        UserError: the disk refuses.
    """
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        yield ArchiveWriter(archive)


@dataclasses.dataclass(frozen=True)
class ClipArchive:
    """The open archive of a film."""

    archive: zipfile.ZipFile
    path: epath.Path

    def clip(self, clip: int) -> bytes:
        """The MP4 of a kept clip.

        Raises:
            UserError: there is none of that number, or it is damaged.
        """
        return self._read(_clip_name(clip), "kept clip")

    def frames(self, clip: int) -> UInt8[np.ndarray, "f h w 3"]:
        """The frames of a kept clip.

        Raises:
            UserError: there is none of that number, or it is damaged.
        """
        return decode_mp4(self.clip(clip), name=f"{self.path}, clip {clip}")

    def picture(self, clip: int) -> bytes:
        """A small JPEG: the first frame of a dropped clip.

        Raises:
            UserError: there is none of that number, or it is damaged.
        """
        return self._read(_picture_name(clip), "picture of a dropped clip")

    def _read(self, name: str, what: str) -> bytes:
        with telling(self.path, "cannot be read", mend=_AGAIN):
            try:
                return self.archive.read(name)
            except KeyError:
                raise UserError(f"{self.path}: expected the {what} {name}, found none") from None
            except (zipfile.BadZipFile, EOFError) as error:
                raise UserError(f"{self.path}: {name} is damaged ({error}): {_AGAIN}") from None


@contextlib.contextmanager
def reading_archive(path: epath.Path) -> Iterator[ClipArchive]:
    """An archive to read.

    Raises:
        UserError: it is missing or damaged.
    """
    with contextlib.ExitStack() as stack:
        with telling(path, "cannot be read", mend=_AGAIN):
            file = stack.enter_context(path.open("rb"))
            try:
                archive = stack.enter_context(zipfile.ZipFile(file))
            except zipfile.BadZipFile as error:
                raise UserError(f"{path}: no zip archive ({error}): {_AGAIN}") from None
        yield ClipArchive(archive, path)


def as_rows(values: Iterable[tuple[Any, str]]) -> list[dict[str, Any]]:
    """Lines that are each an object with the number of a clip.

    Raises:
        UserError: one is not.
    """
    rows: list[dict[str, Any]] = []
    for value, where in values:
        if not isinstance(value, Mapping) or type(value.get("clip")) is not int:
            raise UserError(f"{where}: expected an object with the number of its `clip`")
        rows.append(dict(value))
    return rows
