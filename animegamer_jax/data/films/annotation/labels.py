"""Annotations (paper, section 3.1): the record of a clip, and the files in the shots folder.

    FILM/annotations.jsonl    {"clip": n, FIELDS, "source": "model" or "manual"} a line
    FILM/unannotated.jsonl    {"clip": n, "reason": ..., "answer": ...} a line
    FILM/annotation.json      a `FilmAnnotation`, written last: a film that has one is annotated
    FILM/annotation-failed.json   {"reason": ...}, if the last attempt failed
    characters.json           the characters

FILM is the film's id, FIELDS are those of `Annotation`. Functions that read raise `UserError` if a
file is damaged or cannot be read, functions that write if it cannot be written or removed.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic
from etils import epath

from animegamer_jax.data.characters import MAX_NAME, Character, Characters
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_json, write_lines
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import from_json, read_json, read_lines, to_json
from animegamer_jax.vlm.fields import LOWER, LOWER_FIRST, WHOLE, explain, text_of

CHARACTERS_FILE = "characters.json"
LABELS_FILE, UNANNOTATED_FILE = "annotations.jsonl", "unannotated.jsonl"
REPORT_FILE = "annotation.json"
FAILURE_FILE = "annotation-failed.json"

_AGAIN = "correct it, or remove the file and annotate again"

Source = Literal["model", "manual"]


class Annotation(pydantic.BaseModel):
    """What one clip shows; the prompt shows the fields' descriptions.

    With characters in the context of the validation (`{"characters": characters}`), the subject
    becomes the name of one of them.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    subject: Annotated[str, text_of(MAX_NAME)] = pydantic.Field(
        description="whom the clip is about: the name of one of the characters, `other` for "
        "somebody else, `none` where nobody is seen"
    )
    motion: Annotated[str, text_of(60), LOWER_FIRST] = pydantic.Field(
        description="what the subject does, in one to six words that begin with an -ing form, "
        "such as `riding a bicycle`"
    )
    adverb: Annotated[str, text_of(24), LOWER] = pydantic.Field(
        description="one word for the manner of it, such as `slowly`"
    )
    motion_level: Annotated[Literal[1, 2, 3, 4, 5], WHOLE] = pydantic.Field(
        description="how much moves in the pictures: 1 almost nothing, 2 a little, 3 clearly, "
        "4 much, 5 nearly everything and fast"
    )
    environment: Annotated[str, text_of(32), LOWER] = pydantic.Field(
        description="where it is, in one or two words, such as `harbour`"
    )
    time: Annotated[str, text_of(24), LOWER] = pydantic.Field(
        description="the time of day, in one word, such as `day`, `evening` or `night`"
    )
    social: Annotated[Literal[0, 1], WHOLE] = pydantic.Field(
        description="1 where the subject deals with somebody (speaks, greets, helps, hugs), "
        "otherwise 0"
    )
    entertainment: Annotated[Literal[0, 1], WHOLE] = pydantic.Field(
        description="1 where the subject enjoys itself (plays, dances, explores), otherwise 0"
    )
    stamina: Annotated[Literal[-1, 1], WHOLE] = pydantic.Field(
        description="-1 where this costs the subject strength, 1 where it rests or eats"
    )

    @pydantic.field_validator("subject")
    @classmethod
    def _resolve(cls, subject: str, info: Any) -> str:
        characters = (info.context or {}).get("characters")
        return subject if characters is None else characters.resolve(subject)


FIELDS = tuple(Annotation.model_fields)


def validated(fields: Mapping[str, Any], characters: Characters | None = None) -> Annotation:
    """Returns the annotation of these fields; the subject is one of the characters, if given.

    Raises:
        ValueError: In one line, what is wrong.
    """
    try:
        return Annotation.model_validate(dict(fields), context={"characters": characters})
    except pydantic.ValidationError as error:
        raise ValueError(explain(error)) from None


@dataclasses.dataclass(frozen=True)
class Label:
    """The annotation of one clip, and where it comes from."""

    clip: int
    annotation: Annotation
    source: Source

    def to_row(self) -> dict[str, Any]:
        return {"clip": self.clip, **self.annotation.model_dump(), "source": self.source}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unannotated:
    """A clip without a valid answer: the reason, and what the model answered, if anything."""

    clip: int
    reason: str
    answer: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmAnnotation:
    """How one film was annotated.

    Attributes:
        film: id of the film.
        characters: Digest of the characters (`Characters.digest`).
        clips: Digest of the clips (`clips_digest`).
        model: Name of the model; None if all annotations are manual.
        prompt_version: Version of the prompt's wording.
        prompt_digest: Digest of prompt, model and temperature; None if all is manual.
        num_model, num_manual: Number of annotations of each source.
        num_unannotated: Number of clips in `unannotated.jsonl`.
        requests, prompt_tokens, completion_tokens: Cost of the model's answers.
    """

    film: str
    characters: str
    clips: str
    model: str | None = None
    prompt_version: int | None = None
    prompt_digest: str | None = None
    num_model: int = 0
    num_manual: int = 0
    num_unannotated: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedCharacters:
    layout: Literal[1] = 1
    characters: tuple[Character, ...]


def clips_digest(rows: Iterable[ClipRow]) -> str:
    """Returns the SHA-256 of the kept clips; annotations belong to these clips only."""
    lines = (f"{row.clip} {row.digest}\n" for row in rows if row.dropped is None)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_labels(folder: ShotsFolder, film: str) -> dict[int, Label]:
    """Returns the annotations of a film by clip; empty if there are none."""
    labels: dict[int, Label] = {}
    for row, where in _read_rows(folder.folder(film) / LABELS_FILE):
        try:
            clip = row.pop("clip")
            source = from_json(Source, row.pop("source", None), f"{where}: source", hint=_AGAIN)
            if clip in labels:
                raise ValueError(f"clip {clip} appears twice")
            labels[clip] = Label(clip, validated(row), source)
        except ValueError as error:
            raise UserError(f"{where}: {error}: {_AGAIN}") from None
    return labels


def write_labels(
    folder: ShotsFolder,
    report: FilmAnnotation,
    labels: Iterable[Label],
    *,
    unannotated: Iterable[Unannotated],
) -> None:
    """Replaces the annotations of a finished film, the report last; removes the failure note."""
    out = folder.folder(report.film)
    rows = [label.to_row() for label in sorted(labels, key=lambda label: label.clip)]
    others = [to_json(row) for row in sorted(unannotated, key=lambda row: row.clip)]
    folder.report(report.film)  # only a finished film has annotations
    _remove(out / REPORT_FILE)
    write_lines(out / UNANNOTATED_FILE, others)
    write_lines(out / LABELS_FILE, rows)
    write_json(out / REPORT_FILE, to_json(report))
    forget_failure(folder, report.film)


def read_report(folder: ShotsFolder, film: str) -> FilmAnnotation | None:
    """Returns how a film was annotated; None if it was not, or not to its end."""
    return _read(FilmAnnotation, folder.folder(film) / REPORT_FILE)


def note_failure(folder: ShotsFolder, film: str, reason: str) -> None:
    """Notes that a film cannot be annotated."""
    write_json(folder.folder(film) / FAILURE_FILE, {"reason": reason})


def read_failure(folder: ShotsFolder, film: str) -> str | None:
    """Returns why the last attempt to annotate a film failed; None if it did not."""
    found = _read(dict[str, str], folder.folder(film) / FAILURE_FILE)
    return None if found is None else found.get("reason", "?")


def forget_failure(folder: ShotsFolder, film: str) -> None:
    """Removes the note that a film cannot be annotated, if there is one."""
    _remove(folder.folder(film) / FAILURE_FILE)


def read_unannotated(folder: ShotsFolder, film: str) -> list[Unannotated]:
    """Returns the clips of a film without a valid answer."""
    rows = _read_rows(folder.folder(film) / UNANNOTATED_FILE)
    return [from_json(Unannotated, row, where, hint=_AGAIN) for row, where in rows]


def read_saved_characters(folder: ShotsFolder) -> Characters | None:
    """Returns the characters of the last annotation, without pictures; None if there was none."""
    saved = _read(_SavedCharacters, folder.path / CHARACTERS_FILE)
    return None if saved is None else Characters(saved.characters)


def save_characters(folder: ShotsFolder, characters: Characters) -> None:
    """Writes the characters into the shots folder, without pictures, if they are not there yet."""
    with contextlib.suppress(UserError):  # a damaged file is written again
        if read_saved_characters(folder) == characters:
            return
    saved = _SavedCharacters(characters=characters.entries)
    write_json(folder.path / CHARACTERS_FILE, to_json(saved))


def _read_rows(file: epath.Path) -> list[tuple[dict[str, Any], str]]:
    """Reads a file of rows, which need not be there; returns each with its place."""
    with user_errors(file, "cannot be read", hint="check the path"):
        lines = list(read_lines(file, dict[str, Any], hint=_AGAIN)) if file.exists() else []
    for line in lines:
        if type(line.value.get("clip")) is not int:
            raise UserError(f"{line.where}: expected an object with the number of its `clip`")
    return [(line.value, line.where) for line in lines]


def _read(kind: Any, file: epath.Path) -> Any:
    """Reads a file that need not be there."""
    with user_errors(file, "cannot be read", hint="check the path"):
        if not file.exists():
            return None
    return read_json(file, kind, hint="remove the file and annotate again")


def _remove(file: epath.Path) -> None:
    with user_errors(file, "cannot be removed", hint="check the path"):
        file.unlink(missing_ok=True)
