"""A film's clips and pictures in one zip archive.

Kept clips are stored as 00012.mp4, a picture of each dropped one as dropped/00013.jpg. Functions
that read raise `UserError` if the archive or what is asked for is missing or damaged.
"""

import contextlib
import dataclasses
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.errors import UserError, first_line
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.storage.files import replacing
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.untrusted import DAMAGED_ZIP, check_file, read_member

AGAIN = "remove the film's folder and cut the film again"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's own zero: the same clips give the same archive
_MOST = 1 << 28  # bytes of a clip
_CLIP, _PICTURE = "{:05d}.mp4", "dropped/{:05d}.jpg"


@dataclasses.dataclass(frozen=True)
class ClipArchive:
    """The open archive of a film."""

    archive: zipfile.ZipFile
    path: epath.Path

    def add(self, clip: int, content: bytes, *, is_kept: bool) -> None:
        """Adds the MP4 of a kept clip, or a JPEG of a dropped one."""
        name = (_CLIP if is_kept else _PICTURE).format(clip)
        self.archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)

    def clip(self, clip: int) -> bytes:
        """Returns the MP4 of a kept clip."""
        return self._read(_CLIP.format(clip), "kept clip")

    def frames(self, clip: int) -> UInt8[np.ndarray, "f h w 3"]:
        """Returns the frames of a kept clip."""
        return decode_mp4(self.clip(clip), name=f"{self.path}, clip {clip}")

    def picture(self, clip: int) -> bytes:
        """Returns a small JPEG, the first frame of a dropped clip."""
        return self._read(_PICTURE.format(clip), "picture of a dropped clip")

    def _read(self, name: str, what: str) -> bytes:
        with user_errors(self.path, "cannot be read", hint=AGAIN):
            try:
                return read_member(self.archive, name, most=_MOST)
            except KeyError:
                raise UserError(f"{self.path}: expected the {what} {name}, found none") from None
            except (*DAMAGED_ZIP, ValueError) as error:
                raise UserError(
                    f"{self.path}: {name} is damaged ({first_line(error)}): {AGAIN}"
                ) from None


@contextlib.contextmanager
def writing_archive(path: epath.Path) -> Iterator[ClipArchive]:
    """Opens an archive to write; it takes its place when the block ends without an error.

    It has the same bytes on a disk as in a bucket, whose files cannot be corrected afterwards.
    """
    with replacing(path) as file:
        stream: Any = _Stream(file)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            yield ClipArchive(archive, path)


class _Stream:
    """A file that can only be written from its start to its end."""

    def __init__(self, file: IO[bytes]):
        self.write, self.flush = file.write, file.flush


@contextlib.contextmanager
def reading_archive(path: epath.Path) -> Iterator[ClipArchive]:
    """Opens an archive to read."""
    check_file(path, expected="a film's clips")
    with contextlib.ExitStack() as stack:
        with user_errors(path, "cannot be read", hint=AGAIN):
            file = stack.enter_context(path.open("rb"))
            try:
                archive = stack.enter_context(zipfile.ZipFile(file))
            except zipfile.BadZipFile as error:
                raise UserError(f"{path}: no zip archive ({first_line(error)}): {AGAIN}") from None
        yield ClipArchive(archive, path)
