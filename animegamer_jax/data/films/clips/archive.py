"""Files of the shots folder: JSON that is read strictly, clips in a zip archive, written in whole.

A file is written to a temporary name beside its place and renamed; in a bucket as on a disk.
"""

import contextlib
import dataclasses
import zipfile
from collections.abc import Iterator

import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.storage.files import _AGAIN, replacing
from animegamer_jax.storage.paths import telling

_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's own zero: the same clips give the same archive


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
