"""The shots folder: clips cut from films, their measurements and, later, their annotations.

    shots.json                    layout number and settings
    FILM/film.json                the film's report, written last: a film that has one is finished
    FILM/clips.jsonl              one `ClipRow` a line: every candidate, kept or dropped, in order
    FILM/clips.zip                the clips and pictures (`archive`)
    FILM/annotation*              what the clips show (`annotation.labels`)
    skipped/FILM.json             a `SkippedFilm`: a film that could not be used

FILM is the film's id (`film_id`), which never points out of the folder, whatever the file's name.
In skipped/ it is made from the path (`path_id`).

Methods that read raise `UserError` if the film is not finished or a file is damaged, methods that
write if the folder cannot be written.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

from etils import epath

from animegamer_jax.data.films.clips.archive import (
    AGAIN,
    ClipArchive,
    reading_archive,
    writing_archive,
)
from animegamer_jax.data.films.clips.records import ClipRow, FilmReport, FilmSettings, SkippedFilm
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import remove_stale, write_json, write_lines
from animegamer_jax.storage.paths import absolute, is_free, user_errors
from animegamer_jax.storage.serialization import read_json, read_lines, to_json
from animegamer_jax.storage.untrusted import check_file

SHOTS_FILE = "shots.json"
_SKIPPED = "skipped"
_ID = re.compile(r"[a-z0-9-]+-[0-9a-f]{8}")
_SLUG_LENGTH = 40
_BLOCK, _BLOCKS = 2**18, 32  # bytes of a sample and samples of a film, for its id
_CHECK = "check the path"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShotsInfo:
    layout: Literal[1] = 1  # of all files in the folder
    settings: FilmSettings


def film_content(path: epath.Path) -> str:
    """Returns 64 hexadecimal digits that identify a film's content: its size and samples of it.

    Raises:
        UserError: The file cannot be read.
    """
    check_file(path, expected="a film")
    with user_errors(path, "cannot be read", hint=_CHECK), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        last = max(0, size - _BLOCK)
        for place in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def film_id(path: epath.Path, *, content: str) -> str:
    """Returns a film's id: its name in safe letters, and eight digits of its `film_content`.

    A copy under the same name has the same id; another film of that name has another one, unless
    32 bits of the contents agree, which `FilmReport.content` shows.
    """
    return f"{_slug(path)}-{content[:8]}"


def path_id(path: epath.Path) -> str:
    """Returns an id made from an absolute path, for a film that cannot be used.

    Whatever file takes the film's place has the same one.
    """
    return f"{_slug(path)}-{hashlib.sha256(os.fsencode(os.fspath(path))).hexdigest()[:8]}"


def _slug(path: epath.Path) -> str:
    plain = unicodedata.normalize("NFKD", path.stem).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_SLUG_LENGTH].strip("-") or "film"


class FilmWriter:
    """Takes the clips of one film in order, and at last the report.

    Attributes:
        rows: Rows of the clips so far.
        report: The film's report; set last, because without it nothing that was written counts.
    """

    def __init__(self, archive: ClipArchive):
        self._archive = archive
        self.rows: list[ClipRow] = []
        self.report: FilmReport | None = None

    def add(self, row: ClipRow, content: bytes) -> None:
        """Adds a clip with its MP4, or a dropped one with a small picture of its first frame."""
        if row.clip != len(self.rows):
            raise ValueError(f"clip {row.clip}: expected number {len(self.rows)}")
        is_kept = row.dropped is None
        digest = hashlib.sha256(content).hexdigest() if is_kept else ""
        self.rows.append(dataclasses.replace(row, digest=digest))
        self._archive.add(row.clip, content, is_kept=is_kept)


@dataclasses.dataclass(frozen=True)
class ShotsFolder:
    """A shots folder, to write films into and to read them; `open_shots` makes one.

    Attributes:
        path: The folder, local or in a bucket.
        settings: The settings of all its films.
    """

    path: epath.Path
    settings: FilmSettings

    def films(self) -> list[str]:
        """Returns the ids of the finished films, in order."""
        with user_errors(self.path, "cannot be read", hint=_CHECK):
            names = sorted(child.name for child in self.path.iterdir() if _ID.fullmatch(child.name))
        return [film for film in names if self.is_finished(film)]

    def is_finished(self, film: str) -> bool:
        """Returns whether the film is complete."""
        path = self.folder(film) / "film.json"
        with user_errors(path, "cannot be read", hint=_CHECK):
            return path.exists()

    def report(self, film: str) -> FilmReport:
        """Returns the report of a finished film."""
        path = self.folder(film) / "film.json"
        if not self.is_finished(film):
            raise UserError(
                f"{path.parent}: not a finished film: run `animegamer data films` again"
            )
        report = read_json(path, FilmReport, hint=AGAIN)
        if report.film != film:
            raise UserError(f"{path}: film: expected {film!r}, found {report.film!r}")
        return report

    def rows(self, film: str) -> list[ClipRow]:
        """Returns all candidate clips of a finished film, in order."""
        report, path = self.report(film), self.folder(film) / "clips.jsonl"
        rows = [line.value for line in read_lines(path, ClipRow, hint=AGAIN)]
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
        """Opens the clips and pictures of a finished film."""
        self.report(film)
        with reading_archive(self.folder(film) / "clips.zip") as archive:
            yield archive

    def read_clip(self, film: str, clip: int) -> bytes:
        """Returns the MP4 of one kept clip; `clips` reads several faster."""
        with self.clips(film) as archive:
            return archive.clip(clip)

    def read_picture(self, film: str, clip: int) -> bytes:
        """Returns a small JPEG, the first frame of one dropped clip."""
        with self.clips(film) as archive:
            return archive.picture(clip)

    @contextlib.contextmanager
    def writing(self, film: str) -> Iterator[FilmWriter]:
        """Writes a film; it counts once the block ends with a report."""
        folder = self.folder(film)
        with user_errors(folder, "cannot be written", hint="free space or choose another place"):
            (folder / "film.json").unlink(missing_ok=True)
            with writing_archive(folder / "clips.zip") as archive:
                writer = FilmWriter(archive)
                yield writer
                if writer.report is None:
                    raise ValueError(f"{film}: the block ended without a report")
            write_lines(folder / "clips.jsonl", map(to_json, writer.rows))
            write_json(folder / "film.json", to_json(writer.report))

    def skip(self, film: SkippedFilm) -> None:
        """Notes that a film cannot be used."""
        write_json(self._skipped(film.film), to_json(film))

    def unskip(self, film: str) -> None:
        """Removes the note that a film cannot be used, if there is one."""
        self._skipped(film).unlink(missing_ok=True)

    def _skipped(self, film: str) -> epath.Path:
        return self.path / _SKIPPED / f"{self.folder(film).name}.json"

    def tidy(self) -> None:
        """Removes what killed processes left half written, an hour after the last write."""
        with user_errors(self.path, "cannot be tidied", hint="check who may write there"):
            for pattern in ("*.part-*", "*/*.part-*"):
                remove_stale(self.path.glob(pattern))

    def skipped_films(self) -> list[SkippedFilm]:
        """Returns the films that cannot be used, in order of their ids."""
        with user_errors(self.path, "cannot be read", hint=_CHECK):
            paths = sorted(self.path.glob(f"{_SKIPPED}/*.json"))
        return [read_json(path, SkippedFilm, hint="remove the file") for path in paths]

    def folder(self, film: str) -> epath.Path:
        """Returns the folder of one film.

        Raises:
            UserError: No film has such an id.
        """
        if not _ID.fullmatch(film):
            raise UserError(
                f"film {film[:80]!r}: expected a film's id: small letters, digits and hyphens, "
                "eight hexadecimal digits at the end"
            )
        return self.path / film


def open_shots(path: epath.PathLike, settings: FilmSettings | None = None) -> ShotsFolder:
    """Opens a shots folder; with settings, makes it if there is none.

    Args:
        path: The folder.
        settings: Settings to cut films with, which must be those of the folder; None to open a
            folder only if it exists.

    Raises:
        UserError: It is something else, was made with other settings or by another version of
            this code, or cannot be written.
    """
    path = absolute(path)
    file = path / SHOTS_FILE
    with user_errors(path, "cannot be read", hint=_CHECK):
        there = file.exists()
        free = is_free(path)
    if not there and (settings is None or not free):
        hint = "choose a new or an empty folder" if settings else _CHECK
        raise UserError(
            f"{path}: no shots folder: expected {SHOTS_FILE} in it, as `animegamer data films` "
            f"writes it: {hint}"
        )
    if not there:
        assert settings is not None
        write_json(file, to_json(_ShotsInfo(settings=settings)))
        return ShotsFolder(path, settings)
    hint = "cut the films again with this version"
    found = read_json(file, _ShotsInfo, hint=hint).settings
    if settings is not None and settings != found:
        pairs = zip(to_json(found).items(), to_json(settings).items(), strict=True)
        different = ", ".join(
            f"{n}: there {a!r}, asked for {b!r}" for (n, a), (_, b) in pairs if a != b
        )
        raise UserError(
            f"{path}: made with other settings ({different}): use the same, or choose another "
            "folder"
        )
    return ShotsFolder(path, found)
