"""Reads files that others made: sizes are bounded before anything is read or unpacked.

What a file states about itself is compared with its size on disk first. JSON is checked by
`storage.serialization`, pictures by `media.pictures`, clips and films by `media.containers`, and
checkpoints of other programs by `convert.sources`; all of them read through this module.
"""

import contextlib
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from etils import epath

from animegamer_jax.errors import UserError, first_line
from animegamer_jax.storage.paths import is_bucket

MAX_DOCUMENT = 16 << 20  # bytes of a JSON or TOML file: parsing takes up to 40 times as much
MAX_TEXT = 256 << 20  # bytes of a file that is read line by line, and of a picture

_MAX_MEMBERS = 20_000
# Floating-point numbers hardly shrink, so a small file of large arrays is made to fill the memory.
_FREE_BYTES, _MAX_RATIO = 64 << 20, 100
_KINDS = "biufcSUV"  # of NumPy's types; V: numbers that NumPy does not know, such as bfloat16


def check_file(path: epath.PathLike, *, expected: str = "a file") -> None:
    """Refuses what blocks or never ends when it is read: pipes, devices, sockets.

    Says nothing about missing files and folders, which fail when they are opened.

    Raises:
        UserError: There is something that is neither a file nor a folder.
    """
    if is_bucket(path):
        return
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    kinds = {"a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}
    kinds |= {"a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode)}
    for found, is_kind in kinds.items():
        if is_kind(mode):
            raise UserError(f"{os.fspath(path)}: expected {expected}, found {found}")


def read_file(path: epath.PathLike, *, most: int = MAX_DOCUMENT) -> bytes:
    """Reads a file, local or in a bucket, of at most `most` bytes.

    Raises:
        UserError: It is larger, or a pipe, a device or a socket.
        OSError: It cannot be read.
    """
    check_file(path)
    with epath.Path(path).open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise UserError(
            f"{os.fspath(path)}: expected a file of at most {most >> 20} MB, found a larger one"
        )
    return found


# Archives

DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""Errors of `zipfile` for archives that are damaged, or of a kind that it does not read."""


def read_member(archive: zipfile.ZipFile, name: str, *, most: int) -> bytes:
    """Unpacks one file of a zip archive, of at most `most` bytes.

    Raises:
        ValueError: It is larger, or not of the size that the archive states.
        KeyError: There is no such file.
    """
    size = archive.getinfo(name).file_size
    if size > most:
        raise ValueError(f"{name} would take {size:,} bytes, more than {most:,}")
    with archive.open(name) as file:
        found = file.read(most + 1)
    if len(found) != size:
        raise ValueError(f"{name} is not of the size that the archive states")
    return found


class ArrayFile:
    """An open `.npz` file, of which nothing is unpacked yet.

    Attributes:
        names: Names of the arrays.
    """

    def __init__(self, archive: zipfile.ZipFile, *, num_bytes: int):
        self._archive = archive
        members = archive.infolist()
        if len(members) > _MAX_MEMBERS:
            raise ValueError(f"{len(members):,} arrays, more than {_MAX_MEMBERS:,}")
        unpacked = sum(member.file_size for member in members)
        if unpacked > max(_FREE_BYTES, _MAX_RATIO * num_bytes):
            raise ValueError(f"{num_bytes:,} bytes that unpack to {unpacked:,}")
        self.names = tuple(member.filename.removesuffix(".npy") for member in members)

    def header(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Returns type and shape of an array as its header states them.

        Raises:
            Exception: NumPy's errors, ValueError if it is no array of numbers or texts.
        """
        return self._header(name)[:2]

    def read(self, name: str) -> np.ndarray:
        """Returns an array, after comparing its header with the size of its file.

        Raises:
            Exception: As `header`.
        """
        kind, shape, start = self._header(name)
        size = self._member(name).file_size
        if size - start != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{name} has {size:,} bytes, which is not the size of {shape}")
        with self._archive.open(self._member(name)) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    def _member(self, name: str) -> zipfile.ZipInfo:
        return self._archive.getinfo(f"{name}.npy")

    def _header(self, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
        with self._archive.open(self._member(name)) as file:
            try:
                kind, shape, start = _read_header(file)
            except Exception as error:  # of Python's own parser, too
                raise ValueError(f"{name} has no array's header ({first_line(error)})") from error
        if kind.hasobject or kind.fields or kind.kind not in _KINDS:
            raise ValueError(f"{name} is of type {kind}, which is none of numbers or texts")
        if any(size < 0 for size in shape):
            raise ValueError(f"{name} has the shape {shape}")
        return kind, shape, start


@contextlib.contextmanager
def open_arrays(path: Path, *, expected: str) -> Iterator[ArrayFile]:
    """Opens an `.npz` file; whatever goes wrong in the block is the file's fault.

    Args:
        path: The file.
        expected: What it should be, for errors.

    Raises:
        UserError: It is missing, damaged or of another kind, or would fill the memory.
    """
    check_file(path, expected=expected)
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            yield ArrayFile(archive, num_bytes=os.fstat(file.fileno()).st_size)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected {expected}, found no such file") from error
    except Exception as error:  # by zipfile, its decompressors or NumPy
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: expected {expected}, found: {reason}") from error


def _read_header(file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns type and shape of an array in NumPy's format, and the size of its header."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"version {version} of NumPy's format")
    shape, _, kind = readers[version](file)
    return kind, shape, file.tell()
