"""Writes files atomically: under a temporary name, then renamed.

All functions but `write_whole` raise `UserError` if the file cannot be written.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from etils import epath

from animegamer_jax.storage.paths import is_bucket, temporary_name, user_errors

_STALE = 3600  # seconds without a write, after which a temporary file belongs to a killed process


def write_whole(path: Path, data: bytes) -> None:
    """Writes a local file so that a reader sees the old content or all of the new.

    The bytes go to `<name>.part` in the same folder, which is renamed once they are on disk, and
    removed after a failure or Ctrl-C. The next write replaces a part that a killed process left.

    Raises:
        OSError: Full disk, read-only folder; the old content of `path` is untouched.
    """
    with _renaming(path.with_name(f"{path.name}.part"), path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[IO[bytes]]:
    """Opens a file that replaces `path` at the end of the block, if nothing was raised.

    If two processes write the same file, one of their versions remains. A killed process leaves a
    temporary file (`remove_stale`).
    """
    part = path.parent / temporary_name(path.name)
    with user_errors(path, "cannot be written", hint="free space or choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _renaming(part, path) as file:
            yield file


@contextlib.contextmanager
def _renaming(part: Path | epath.Path, path: Path | epath.Path) -> Iterator[IO[bytes]]:
    """Opens `part`, which becomes `path` once it is on disk, or is removed after an error."""
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            if not is_bucket(path):
                os.fsync(file.fileno())
        if is_bucket(path):  # buckets cannot rename files
            epath.Path(part).copy(path, overwrite=True)
        else:
            part.replace(path)
    finally:
        if part.exists():
            with contextlib.suppress(FileNotFoundError):  # of a bucket, an answer was lost
                part.unlink(missing_ok=True)


def remove_stale(parts: Iterable[epath.Path]) -> None:
    """Removes the temporary files to which nothing was written for an hour."""
    for part in parts:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - part.stat().mtime > _STALE:
                part.unlink()


def write_json(path: epath.PathLike, value: Any, *, indent: int | None = 1) -> None:
    """Writes a value as JSON, with each item on a line of its own unless `indent` is None.

    Raises:
        UserError: The file cannot be written.
        ValueError: A number is not finite.
    """
    text = json.dumps(value, indent=indent, allow_nan=False)
    with replacing(epath.Path(path)) as file:
        file.write((text + "\n").encode())


def write_lines(path: epath.Path, values: Iterable[Any]) -> None:
    """Writes a value as JSON on each line."""
    with replacing(path) as file:
        for value in values:
            file.write((json.dumps(value) + "\n").encode())
