"""Manual annotations of many films: a table (.csv, .tsv), or one JSON object a line (.jsonl)."""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from animegamer_jax.data.characters import Characters
from animegamer_jax.data.films.annotation.labels import (
    FIELDS,
    FilmAnnotation,
    Label,
    clips_digest,
    read_labels,
    read_report,
    read_unannotated,
    save_characters,
    validated,
    write_labels,
)
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, user_errors
from animegamer_jax.storage.untrusted import MAX_TEXT, read_file

COLUMNS = ("film", "clip", *FIELDS)
_NUMBERS = ("clip", "motion_level", "social", "entertainment", "stamina")
_TABLES = (".csv", ".tsv")
_LINES = (".jsonl", ".ndjson")


def add_manual_annotations(
    folder: ShotsFolder, path: epath.PathLike, characters: Characters
) -> dict[str, int]:
    """Adds manual annotations; they replace a model's annotations of the same clips.

    The whole file is checked before anything is written.

    Returns:
        Number of annotations of each film in the file.

    Raises:
        UserError: Names the file, the line and what is wrong there; or the folder cannot be
            written.
    """
    films = _Films(folder)
    found: dict[str, dict[int, Label]] = {}
    lines: dict[tuple[str, int], str] = {}
    for where, row in _read(absolute(path)):
        try:
            film = films.find(str(row.pop("film")))
            label = _label(row, films.rows(film), characters)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if (before := lines.setdefault((film, label.clip), where)) != where:
            raise UserError(f"{where}: clip {label.clip}: expected once, is also at {before}")
        found.setdefault(film, {})[label.clip] = label
    if not found:
        raise UserError(f"{path}: no annotations: expected a line for each clip")
    save_characters(folder, characters)
    for film, labels in found.items():
        _merge(folder, film, labels, rows=films.rows(film), characters=characters)
    return {film: len(labels) for film, labels in sorted(found.items())}


def _merge(
    folder: ShotsFolder,
    film: str,
    labels: dict[int, Label],
    *,
    rows: dict[int, ClipRow],
    characters: Characters,
) -> None:
    """Adds manual annotations to a film's; removes a model's that knew other characters."""
    report, digest = read_report(folder, film), clips_digest(rows.values())
    same_clips = report is None or report.clips == digest
    if report is not None and (not same_clips or report.characters != characters.digest):
        report = None
    old = {
        clip: label
        for clip, label in read_labels(folder, film).items()
        if report
        or (
            same_clips
            and label.source == "manual"
            and label.annotation.subject in characters.subjects
        )
    }
    unannotated = read_unannotated(folder, film) if report else []
    unannotated = [row for row in unannotated if row.clip not in labels]
    merged = old | labels
    num_manual = sum(label.source == "manual" for label in merged.values())
    report = dataclasses.replace(
        report or FilmAnnotation(film=film, characters=characters.digest, clips=digest),
        num_model=len(merged) - num_manual,
        num_manual=num_manual,
        num_unannotated=len(unannotated),
    )
    write_labels(folder, report, merged.values(), unannotated=unannotated)


class _Films:
    """The finished films of a shots folder, by id and by file name."""

    def __init__(self, folder: ShotsFolder):
        self._folder = folder
        self._ids = folder.films()
        self._names: dict[str, list[str]] = {}
        for film in self._ids:
            self._names.setdefault(folder.report(film).name, []).append(film)
        self._rows: dict[str, dict[int, ClipRow]] = {}

    def find(self, name: str) -> str:
        """Returns the id of a film.

        Raises:
            ValueError: There is none of this name, or more than one.
        """
        if name in self._ids:
            return name
        films = self._names.get(name, [])
        if len(films) > 1:
            raise ValueError(
                f"film: {name[:60]!r} is the name of {' and '.join(films)}: use the id"
            )
        if not films:
            known = ", ".join(self._ids[:5]) + (", ..." if len(self._ids) > 5 else "")
            raise ValueError(
                f"film: expected the id or the file's name of a film in {self._folder.path} "
                f"({known or 'none'}), found {name[:60]!a}"
            )
        return films[0]

    def rows(self, film: str) -> dict[int, ClipRow]:
        if film not in self._rows:
            self._rows[film] = {row.clip: row for row in self._folder.rows(film)}
        return self._rows[film]


def _label(row: dict[str, Any], clips: dict[int, ClipRow], characters: Characters) -> Label:
    clip = row.pop("clip")
    if type(clip) is not int or clip not in clips:
        raise ValueError(f"clip: expected a number from 0 to {len(clips) - 1}, found {clip!a:.60}")
    if (reason := clips[clip].dropped) is not None:
        raise ValueError(f"clip {clip} was dropped ({reason}): remove the line")
    return Label(clip, validated(row, characters), "manual")


def _read(file: epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the fields of each annotation, and the place of its line for messages."""
    kind = file.suffix.lower()
    if kind not in (*_TABLES, *_LINES):
        raise UserError(
            f"{file}: expected a name that ends in {', '.join((*_TABLES, *_LINES))}: save the "
            "annotations as one of these"
        )
    with user_errors(file, "cannot be read", hint="check the path"):
        content = read_file(file, most=MAX_TEXT)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: expected UTF-8 text: save it as UTF-8") from None
    for line, row in _table(file, text) if kind in _TABLES else _objects(file, text):
        where = f"{file}, line {line}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected a JSON object, found {row!a:.60}")
        _check_columns(list(row), where)
        yield where, row


def _table(file: epath.Path, text: str) -> Iterator[tuple[int, Any]]:
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)  # spreadsheets write all three
    lines = io.StringIO(text, newline="")
    rows = csv.DictReader(lines, delimiter=delimiter, restkey="(extra cells)", restval="")
    try:
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        _check_columns(rows.fieldnames, f"{file}, line 1")
        for row in rows:
            cells = {name: str(cell).strip() for name, cell in row.items()}
            numbers = {n: int(cells[n]) for n in _NUMBERS if re.fullmatch(r"-?\d{1,18}", cells[n])}
            if any(cells.values()):
                yield rows.line_num, cells | numbers
    except csv.Error as error:
        raise UserError(f"{file}, line {rows.reader.line_num}: not a table ({error})") from None


def _objects(file: epath.Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: not valid JSON ({error})") from None


def _check_columns(found: Sequence[str], where: str) -> None:
    if sorted(found) != sorted(COLUMNS):
        missing = [name for name in COLUMNS if name not in found]
        wrong = {name for name in found if name not in COLUMNS or found.count(name) > 1}
        text = f"missing {', '.join(missing)}" if missing else f"unexpected {min(wrong)!a:.60}"
        raise UserError(f"{where}: {text}: expected the columns {', '.join(COLUMNS)}, each once")
