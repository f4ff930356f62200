"""The shots folder: clips cut from films, with what was measured of them and, later, annotated.

    shots.json                    layout number and settings
    FILM/film.json                the film's report; written last: a film that has one is finished
    FILM/clips.jsonl              a `ClipRow` a line: every candidate, kept or dropped, in order
    FILM/clips.zip                kept clips as 00012.mp4, a picture of each dropped one as
                                  dropped/00013.jpg; stored, not deflated
    FILM/annotations.jsonl        an annotation a line, with its clip's number
    FILM/unannotated.jsonl        clips that the annotation set aside, with the reason
    failed/FILM.json              a film that could not be used, with the reason

FILM is the film's id (`film_id`): it never leads out of the folder, whatever the file was called.
In failed/ it is that of the path (`path_id`).
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.data.films.clips.archive import (
    ArchiveWriter,
    ClipArchive,
    reading_archive,
    writing_archive,
)
from animegamer_jax.data.films.clips.records import ClipRow as ClipRow
from animegamer_jax.data.films.clips.records import DropReason as DropReason
from animegamer_jax.data.films.clips.records import FilmReport as FilmReport
from animegamer_jax.data.films.clips.records import FilmSettings as FilmSettings
from animegamer_jax.data.films.clips.records import SetAside as SetAside
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import (
    as_rows,
    read_json,
    read_lines,
    remove_old,
    write_json,
    write_lines,
)
from animegamer_jax.storage.paths import absolute, telling

LAYOUT = 1  # of all files in the folder
SHOTS_FILE = "shots.json"
FAILED = "failed"
_ID = re.compile(r"[a-z0-9-]+-[0-9a-f]{8}")
# Of reports that were written before there were such fields.
_LATER = {
    field.name: field.default
    for field in dataclasses.fields(FilmReport)
    if field.default is not dataclasses.MISSING
}
_SLUG_LENGTH = 40
_BLOCK, _BLOCKS = 2**18, 32  # bytes of a sample and samples of a film, for its id


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShotsInfo:
    layout: int
    settings: FilmSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failure:
    film: str
    reason: str


def film_content(path: epath.PathLike) -> str:
    """64 digits that tell a film's content; of a large one the size and samples are read.

    Raises:
        UserError: the file cannot be read.
    """
    path = absolute(path)
    with telling(path, "cannot be read", mend="check the path"), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        last = max(0, size - _BLOCK)
        for place in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def film_id(path: epath.PathLike, *, content: str | None = None) -> str:
    """A film's id: its name in a few safe letters, and eight digits of its content.

    A copy under the same name has the same id, another film of that name has another one: as good
    as always, and `FilmReport.content` tells where it has not.

    Args:
        path: of the film.
        content: its `film_content`; None: that is read.

    Raises:
        UserError: the file cannot be read.
    """
    path = absolute(path)
    return f"{_slug(path)}-{(content or film_content(path))[:8]}"


def path_id(path: epath.PathLike) -> str:
    """What stands for the id of a film that cannot be used: made of its path alone.

    Whatever is put in the place of the film has it too.
    """
    path = absolute(path)
    return f"{_slug(path)}-{hashlib.sha256(os.fsencode(os.fspath(path))).hexdigest()[:8]}"


def _slug(path: epath.Path) -> str:
    plain = unicodedata.normalize("NFKD", path.stem).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_SLUG_LENGTH].strip("-") or "film"


class FilmWriter:
    """Takes the clips of one film in order, and at last the report."""

    def __init__(self, archive: ArchiveWriter):
        self._archive = archive
        self.rows: list[ClipRow] = []
        self.report: FilmReport | None = None

    def keep(self, row: ClipRow, mp4: bytes) -> None:
        """Adds a kept clip; its digest is made here."""
        digest = hashlib.sha256(mp4).hexdigest()
        self._add(dataclasses.replace(row, dropped=None, digest=digest))
        self._archive.add_clip(row.clip, mp4)

    def drop(self, row: ClipRow, jpeg: bytes) -> None:
        """Adds a dropped clip by a small picture of its first frame."""
        if row.dropped is None:
            raise ValueError(f"clip {row.clip}: no reason to drop it")
        self._add(dataclasses.replace(row, digest=""))
        self._archive.add_picture(row.clip, jpeg)

    def finish(self, report: FilmReport) -> None:
        """Says that the film is whole; without it nothing that was written counts."""
        self.report = report

    def _add(self, row: ClipRow) -> None:
        if row.clip != len(self.rows):
            raise ValueError(f"clip {row.clip}: expected number {len(self.rows)}")
        self.rows.append(row)


@dataclasses.dataclass(frozen=True)
class ShotsFolder:
    """A shots folder, to write films into and to read them; `open_shots` makes one.

    Attributes:
        path: the folder, local or in a bucket.
        settings: that all its films were cut with.
    """

    path: epath.Path
    settings: FilmSettings

    def films(self) -> list[str]:
        """Ids of the finished films, in order."""
        with telling(self.path, "cannot be read", mend="check the path"):
            names = sorted(child.name for child in self.path.iterdir() if _ID.fullmatch(child.name))
        return [film for film in names if self.is_finished(film)]

    def is_finished(self, film: str) -> bool:
        """Whether the film is there in whole."""
        path = self.folder(film) / "film.json"
        with telling(path, "cannot be read", mend="check the path"):
            return path.exists()

    def report(self, film: str) -> FilmReport:
        """What was found in a finished film.

        Raises:
            UserError: it is not finished, or its file is damaged.
        """
        path = self.folder(film) / "film.json"
        if not self.is_finished(film):
            raise UserError(
                f"{path.parent}: not a finished film: run `animegamer data films` again"
            )
        value = read_json(path)
        if isinstance(value, dict):
            value = {**_LATER, **value}
        report = from_json(FilmReport, value, os.fspath(path))
        if report.film != film:
            raise UserError(f"{path}: film: expected {film!r}, found {report.film!r}")
        return report

    def rows(self, film: str) -> list[ClipRow]:
        """All candidate clips of a finished film, in order.

        Raises:
            UserError: the film is not finished, or a file is damaged.
        """
        report, path = self.report(film), self.folder(film) / "clips.jsonl"
        rows = [from_json(ClipRow, value, where) for value, where in read_lines(path)]
        expected = report.kept, report.kept + sum(report.dropped.values())
        found = sum(row.dropped is None for row in rows), len(rows)
        if found != expected or [row.clip for row in rows] != list(range(len(rows))):
            raise UserError(
                f"{path}: expected {expected[0]} kept of {expected[1]} clips, numbered from 0 in "
                f"order, found {found[0]} of {found[1]}: remove the film's folder and cut it again"
            )
        return rows

    @contextlib.contextmanager
    def clips(self, film: str) -> Iterator[ClipArchive]:
        """The clips and pictures of a finished film, open to read several of them.

        Raises:
            UserError: the film is not finished, or its archive is damaged.
        """
        self.report(film)
        with reading_archive(self.folder(film) / "clips.zip") as archive:
            yield archive

    def read_clip(self, film: str, clip: int) -> bytes:
        """The MP4 of one kept clip; `clips` reads several faster."""
        with self.clips(film) as archive:
            return archive.clip(clip)

    def read_frames(self, film: str, clip: int) -> UInt8[np.ndarray, "f h w 3"]:
        """The frames of one kept clip; `clips` reads several faster."""
        with self.clips(film) as archive:
            return archive.frames(clip)

    def read_picture(self, film: str, clip: int) -> bytes:
        """A small JPEG, the first frame of one dropped clip."""
        with self.clips(film) as archive:
            return archive.picture(clip)

    @contextlib.contextmanager
    def writing(self, film: str) -> Iterator[FilmWriter]:
        """Writes a film; it counts once the block ends after `FilmWriter.finish`.

        Raises:
            UserError: the disk refuses.
        """
        folder = self.folder(film)
        with telling(folder, "cannot be written", mend="free space or choose another place"):
            (folder / "film.json").unlink(missing_ok=True)
            with writing_archive(folder / "clips.zip") as archive:
                writer = FilmWriter(archive)
                yield writer
                if writer.report is None:
                    raise ValueError(f"{film}: the block ended without finish()")
            write_lines(folder / "clips.jsonl", map(to_json, writer.rows))
            write_json(folder / "film.json", to_json(writer.report))
            self.forget(film)

    def set_aside(self, film: SetAside) -> None:
        """Notes that a film cannot be used.

        Raises:
            UserError: the disk refuses.
        """
        self.folder(film.film)  # refuses a strange id
        failure = _Failure(film=film.name, reason=film.reason)
        write_json(self.path / FAILED / f"{film.film}.json", to_json(failure))

    def forget(self, film: str) -> None:
        """Removes the note that a film cannot be used, if there is one."""
        self.folder(film)  # refuses a strange id
        (self.path / FAILED / f"{film}.json").unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes what killed processes left half written, an hour after their last byte.

        Raises:
            UserError: the disk refuses.
        """
        with telling(self.path, "cannot be tidied", mend="check who may write there"):
            for pattern in ("*.part-*", "*/*.part-*"):
                remove_old(self.path.glob(pattern))

    def failed(self) -> list[SetAside]:
        """Films that were set aside, in order of their ids.

        Raises:
            UserError: a file is damaged.
        """
        folder = self.path / FAILED
        with telling(folder, "cannot be read", mend="check the path"):
            there = folder.iterdir() if folder.exists() else ()
            paths = sorted(path for path in there if path.suffix == ".json")
        failures = [from_json(_Failure, read_json(path), os.fspath(path)) for path in paths]
        return [
            SetAside(film=path.stem, name=failure.film, reason=failure.reason)
            for path, failure in zip(paths, failures, strict=True)
        ]

    def annotations(self, film: str) -> list[dict[str, Any]]:
        """Rows of `annotations.jsonl` as they are; empty where there is no such file.

        Raises:
            UserError: the file is damaged.
        """
        return self._read_rows(film, "annotations.jsonl")

    def unannotated(self, film: str) -> list[dict[str, Any]]:
        """Rows of `unannotated.jsonl` as they are; empty where there is no such file.

        Raises:
            UserError: the file is damaged.
        """
        return self._read_rows(film, "unannotated.jsonl")

    def write_annotations(
        self,
        film: str,
        rows: Iterable[Mapping[str, Any]],
        *,
        unannotated: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Replaces both files of annotations of a film; each row names its `clip`.

        Raises:
            UserError: the film is not finished, or the disk refuses.
        """
        self.report(film)
        write_lines(self.folder(film) / "unannotated.jsonl", unannotated)
        write_lines(self.folder(film) / "annotations.jsonl", rows)

    def folder(self, film: str) -> epath.Path:
        """The folder of one film.

        Raises:
            UserError: no film has such an id.
        """
        if not _ID.fullmatch(film):
            raise UserError(
                f"film {film[:80]!r}: expected a film's id: small letters, digits and hyphens, "
                "eight hexadecimal digits at the end"
            )
        return self.path / film

    def _read_rows(self, film: str, name: str) -> list[dict[str, Any]]:
        path = self.folder(film) / name
        with telling(path, "cannot be read", mend="check the path"):
            there = path.exists()
        return as_rows(read_lines(path)) if there else []


def open_shots(path: epath.PathLike, settings: FilmSettings | None = None) -> ShotsFolder:
    """Opens a shots folder; with settings, makes it where there is none.

    Args:
        path: the folder.
        settings: that films are cut with: those that the folder was made with. None: only a folder
            that is there is opened.

    Raises:
        UserError: it is something else, it was made with other settings or by another version of
            this code, or the disk refuses.
    """
    path = absolute(path)
    file = path / SHOTS_FILE
    with telling(path, "cannot be read", mend="check the path"):
        there = file.exists()
        free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not there and (settings is None or not free):
        mend = "choose a new or an empty folder" if settings else "check the path"
        raise UserError(
            f"{path}: no shots folder: expected {SHOTS_FILE} in it, as `animegamer data films` "
            f"writes it: {mend}"
        )
    if not there:
        assert settings is not None
        write_json(file, to_json(_ShotsInfo(layout=LAYOUT, settings=settings)))
        return ShotsFolder(path, settings)
    value = read_json(file)
    layout = value.get("layout") if isinstance(value, dict) else None
    if layout != LAYOUT:
        raise UserError(
            f"{file}: layout: expected {LAYOUT}, found {json.dumps(layout)}: cut the films again "
            "with this version, or update animegamer_jax"
        )
    found = from_json(_ShotsInfo, value, os.fspath(file)).settings
    if settings is not None and settings != found:
        raise UserError(
            f"{path}: made with other settings ({_differences(found, settings)}): use the same, "
            "or choose another folder"
        )
    return ShotsFolder(path, found)


def _differences(found: FilmSettings, asked: FilmSettings) -> str:
    names = [field.name for field in dataclasses.fields(FilmSettings)]
    pairs = ((name, getattr(found, name), getattr(asked, name)) for name in names)
    return ", ".join(f"{n}: there {a!r}, asked for {b!r}" for n, a, b in pairs if a != b)
