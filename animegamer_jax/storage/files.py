"""Writes files atomically: to a temporary name, then renamed into place."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import telling


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old content or all of the new, never a half.

    The bytes go to `<name>.part` in the same folder and are renamed when they are on the disk;
    after a failure or Ctrl-C the part is removed. A part that a killed process left behind is
    overwritten by the next write.

    Raises:
        OSError: full disk, read-only folder; the old content of `path` is untouched.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


_MEND = "free space or choose another place"


_AGAIN = "remove the film's folder and cut the film again"


_STALE = 3600  # seconds without a byte


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
