"""Annotations that people wrote: a table (.csv, .tsv) or a line a clip (.jsonl) for many films."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from typing import Any

from etils import epath

from animegamer_jax.data.characters import NOBODY, Cast
from animegamer_jax.data.films.annotation.labels import (
    FIELDS,
    FilmAnnotation,
    Label,
    clips_digest,
    keep_cast,
    read_labels,
    read_report,
    read_unannotated,
    validated,
    write_labels,
)
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, telling

COLUMNS = ("film", "clip", *FIELDS)
_NUMBERS = ("clip", "motion_level", "social", "entertainment", "stamina")
_TABLES = (".csv", ".tsv")
_LINES = (".jsonl", ".ndjson")


@dataclasses.dataclass(frozen=True)
class _Line:
    """One row of the file, and where it stands."""

    where: str
    fields: dict[str, Any]


def annotate_by_people(folder: ShotsFolder, path: epath.PathLike, cast: Cast) -> dict[str, int]:
    """Takes people's annotations over; they replace a model's of the same clips.

    The file names films by their ids or by their files' names. It is checked to its end before
    anything is written.

    Returns:
        Number of annotations of each film in the file.

    Raises:
        UserError: names the file, the line and what is wrong there, or the disk refuses.
    """
    films = _Films(folder)
    found: dict[str, dict[int, Label]] = {}
    lines: dict[tuple[str, int], str] = {}
    for line in _read(absolute(path)):
        film = films.find(line)
        label = _label(line, films.rows(film), cast)
        if (before := lines.get((film, label.clip))) is not None:
            raise UserError(f"{line.where}: clip {label.clip}: expected once, is also at {before}")
        lines[film, label.clip] = line.where
        found.setdefault(film, {})[label.clip] = label
    keep_cast(folder, cast)
    for film, labels in found.items():
        _merge(folder, film, labels, rows=films.rows(film), cast=cast)
    return {film: len(labels) for film, labels in sorted(found.items())}


def _merge(
    folder: ShotsFolder,
    film: str,
    labels: dict[int, Label],
    *,
    rows: dict[int, ClipRow],
    cast: Cast,
) -> None:
    """Adds people's annotations to a film's; a model's that were made for another cast go."""
    report, digest = read_report(folder, film), clips_digest(rows.values())
    same_clips = report is None or report.clips == digest
    if report is not None and (not same_clips or report.cast != cast.digest):
        report = None
    subjects = (*cast.names, *NOBODY)
    old = {
        clip: label
        for clip, label in read_labels(folder, film).items()
        if report
        or (same_clips and label.source == "people" and label.annotation.subject in subjects)
    }
    aside = read_unannotated(folder, film) if report else []
    aside = [row for row in aside if row.clip not in labels]
    merged = old | labels
    by_people = sum(label.source == "people" for label in merged.values())
    counted = dataclasses.replace(
        report or FilmAnnotation(film=film, cast=cast.digest, clips=digest),
        by_model=len(merged) - by_people,
        by_people=by_people,
        set_aside=len(aside),
    )
    write_labels(folder, counted, merged.values(), unannotated=aside)


class _Films:
    """The finished films of a shots folder, by id and by name."""

    def __init__(self, folder: ShotsFolder):
        self._folder = folder
        self._ids = folder.films()
        self._names: dict[str, list[str]] = {}
        for film in self._ids:
            self._names.setdefault(folder.report(film).name, []).append(film)
        self._rows: dict[str, dict[int, ClipRow]] = {}

    def find(self, line: _Line) -> str:
        called = str(line.fields["film"])
        if called in self._ids:
            return called
        films = self._names.get(called, [])
        if len(films) > 1:
            raise UserError(
                f"{line.where}: film: {called!r} is the name of {' and '.join(films)}: use the id"
            )
        if not films:
            there = ", ".join(self._ids[:5]) + (", ..." if len(self._ids) > 5 else "")
            raise UserError(
                f"{line.where}: film: expected the id or the file's name of a film in "
                f"{self._folder.path} ({there or 'none'}), found {called[:60]!a}"
            )
        return films[0]

    def rows(self, film: str) -> dict[int, ClipRow]:
        if film not in self._rows:
            self._rows[film] = {row.clip: row for row in self._folder.rows(film)}
        return self._rows[film]


def _label(line: _Line, rows: dict[int, ClipRow], cast: Cast) -> Label:
    clip = line.fields["clip"]
    if type(clip) is not int or clip not in rows:
        raise UserError(
            f"{line.where}: clip: expected a number from 0 to {len(rows) - 1}, found {clip!a:.60}"
        )
    if (reason := rows[clip].dropped) is not None:
        raise UserError(f"{line.where}: clip {clip} was dropped ({reason}): remove the line")
    try:
        annotation = validated({name: line.fields[name] for name in FIELDS}, cast)
    except ValueError as error:
        raise UserError(f"{line.where}: {error}") from None
    return Label(clip, annotation, "people")


# The file


def _read(file: epath.Path) -> Iterator[_Line]:
    if file.suffix.lower() not in (*_TABLES, *_LINES):
        raise UserError(
            f"{file}: expected a name that ends in {', '.join((*_TABLES, *_LINES))}: save the "
            "annotations as one of these"
        )
    with telling(file, "cannot be read", mend="check the path"):
        content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: expected UTF-8 text: save it as UTF-8") from None
    found = 0
    for line in _table(file, text) if file.suffix.lower() in _TABLES else _objects(file, text):
        found += 1
        yield line
    if not found:
        raise UserError(f"{file}: no annotations: expected a line for each clip")


def _table(file: epath.Path, text: str) -> Iterator[_Line]:
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)  # spreadsheets write all three
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        columns = [name.strip() for name in next(rows, [])]
        _check_columns(columns, f"{file}, line 1")
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{file}, line {rows.line_num}"
            if len(cells) != len(columns):
                raise UserError(f"{where}: expected {len(columns)} cells, found {len(cells)}")
            fields = dict(zip(columns, (cell.strip() for cell in cells), strict=True))
            yield _Line(where, fields | {name: _whole(fields[name]) for name in _NUMBERS})
    except csv.Error as error:
        raise UserError(f"{file}, line {rows.line_num}: no table ({error}): save it anew") from None


def _whole(cell: str) -> int | str:
    """A cell's number; a text that is none is refused by name later."""
    try:
        return int(cell)
    except ValueError:
        return cell


def _objects(file: epath.Path, text: str) -> Iterator[_Line]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: no JSON ({error}): expected an object a line") from None
        if not isinstance(fields, dict):
            raise UserError(f"{where}: expected an object, found {line[:40]!a}")
        _check_columns(list(fields), where)
        yield _Line(where, fields)


def _check_columns(columns: list[str], where: str) -> None:
    known = ", ".join(COLUMNS)
    if missing := [name for name in COLUMNS if name not in columns]:
        raise UserError(f"{where}: missing {', '.join(missing)}: expected the columns {known}")
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise UserError(f"{where}: unknown column {unknown[0]!a:.60}: expected {known}")
    if len(columns) != len(COLUMNS):
        raise UserError(f"{where}: a column stands there twice: expected {known}")
