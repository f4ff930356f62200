"""What is said of a clip (PAPER section 3.1): the record, and how it lies in the shots folder.

    FILM/annotations.jsonl    {"clip": n, FIELDS, "source": "model" or "people"} a line
    FILM/unannotated.jsonl    {"clip": n, "reason": ..., "answer": ...} a line
    FILM/annotation.json      a `FilmAnnotation`; written last: a film that has one is annotated
    FILM/annotation-failed.json   {"reason": ...}, where the last attempt ended with it
    characters.json           the cast

FILM is the film's id, FIELDS are those of `Annotation`.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.data.characters import (
    MAX_NAME,
    Cast,
    parse_cast,
)
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import read_json, replacing, write_json
from animegamer_jax.storage.paths import telling
from animegamer_jax.vlm.fields import (
    BEGIN_SMALL,
    LOWER,
    WHOLE,
    explain,
    text_of,
)

CAST_FILE = "characters.json"
REPORT_FILE = "annotation.json"
FAILURE_FILE = "annotation-failed.json"

_AGAIN = "correct it, or remove the file and annotate again"

Source = Literal["model", "people"]


class Annotation(pydantic.BaseModel):
    """What one clip shows; the descriptions are what a model is told of each field.

    Validated with a cast in the context (`{"cast": cast}`), the subject is one of it, by its name.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    subject: Annotated[str, text_of(MAX_NAME)] = pydantic.Field(
        description="whom the clip is about: the name of one of the characters, `other` for "
        "somebody else, `none` where nobody is seen"
    )
    motion: Annotated[str, text_of(60), BEGIN_SMALL] = pydantic.Field(
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
    def _of_the_cast(cls, subject: str, info: Any) -> str:
        cast = (info.context or {}).get("cast")
        return cast.resolve(subject) if cast is not None else subject


FIELDS = tuple(Annotation.model_fields)


@dataclasses.dataclass(frozen=True)
class Label:
    """The annotation of one clip, and who made it."""

    clip: int
    annotation: Annotation
    source: Source

    def to_row(self) -> dict[str, Any]:
        return {"clip": self.clip, **self.annotation.model_dump(), "source": self.source}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unannotated:
    """A clip that was set aside: why, and what the model had answered, if it did."""

    clip: int
    reason: str
    answer: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmAnnotation:
    """How one film was annotated.

    Attributes:
        film: the id.
        cast: digest of the cast (`Cast.digest`).
        clips: digest of the clips (`clips_digest`).
        model: that was asked; None: nobody but people.
        prompt: version of the question.
        asked: digest of all that was asked but the clips: question, model, temperature; None: of
            people, or by a version that did not note it.
        by_model, by_people: number of annotations from each.
        set_aside: number of clips in `unannotated.jsonl`.
        requests, prompt_tokens, completion_tokens: that the model's answers took.
    """

    film: str
    cast: str
    clips: str
    model: str | None = None
    prompt: int | None = None
    asked: str | None = None
    by_model: int = 0
    by_people: int = 0
    set_aside: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def clips_digest(rows: Iterable[ClipRow]) -> str:
    """SHA-256 of the numbers and digests of the kept clips: annotations belong to these only."""
    lines = (f"{row.clip} {row.digest}\n" for row in rows if row.dropped is None)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_labels(folder: ShotsFolder, film: str) -> dict[int, Label]:
    """The annotations of a film by clip; none where there are none.

    Raises:
        UserError: the file is damaged.
    """
    labels: dict[int, Label] = {}
    for number, row in enumerate(folder.annotations(film), start=1):
        where = f"{folder.folder(film) / 'annotations.jsonl'}, line {number}"
        fields = {name: value for name, value in row.items() if name not in ("clip", "source")}
        source = from_json(Source, row.get("source"), f"{where}: source")
        try:
            annotation = Annotation.model_validate(fields)
        except pydantic.ValidationError as error:
            raise UserError(f"{where}: {explain(error)}: {_AGAIN}") from None
        if row["clip"] in labels:
            raise UserError(f"{where}: clip {row['clip']} once more: {_AGAIN}")
        labels[row["clip"]] = Label(row["clip"], annotation, source)
    return labels


def write_labels(
    folder: ShotsFolder,
    report: FilmAnnotation,
    labels: Iterable[Label],
    *,
    unannotated: Iterable[Unannotated],
) -> None:
    """Replaces what is said of a film, by clip; the report comes last, and no failure is left.

    Raises:
        UserError: the disk refuses.
    """
    file = folder.folder(report.film) / REPORT_FILE
    with telling(file, "cannot be written", mend="check the path"):
        file.unlink(missing_ok=True)
    folder.write_annotations(
        report.film,
        [label.to_row() for label in sorted(labels, key=lambda label: label.clip)],
        unannotated=[to_json(row) for row in sorted(unannotated, key=lambda row: row.clip)],
    )
    write_json(file, to_json(report))
    forget_failure(folder, report.film)


def read_report(folder: ShotsFolder, film: str) -> FilmAnnotation | None:
    """How a film was annotated; None: it was not, or not to its end.

    Raises:
        UserError: the file is damaged.
    """
    file = folder.folder(film) / REPORT_FILE
    with telling(file, "cannot be read", mend="check the path"):
        there = file.exists()
    if not there:
        return None
    value = read_json(file)
    if isinstance(value, dict):
        value = {"asked": None, **value}  # older files lack it
    return from_json(FilmAnnotation, value, os.fspath(file))


def note_failure(folder: ShotsFolder, film: str, reason: str) -> None:
    """Notes that a film cannot be annotated.

    Raises:
        UserError: the disk refuses.
    """
    write_json(folder.folder(film) / FAILURE_FILE, {"reason": reason})


def read_failure(folder: ShotsFolder, film: str) -> str | None:
    """Why a film could not be annotated; None: no attempt failed since it was.

    Raises:
        UserError: the file is damaged.
    """
    file = folder.folder(film) / FAILURE_FILE
    with telling(file, "cannot be read", mend="check the path"):
        there = file.exists()
    if not there:
        return None
    return from_json(dict[str, str], read_json(file), os.fspath(file)).get("reason", "?")


def forget_failure(folder: ShotsFolder, film: str) -> None:
    """Removes the note that a film could not be annotated, if there is one.

    Raises:
        UserError: the disk refuses.
    """
    file = folder.folder(film) / FAILURE_FILE
    with telling(file, "cannot be written", mend="check the path"):
        file.unlink(missing_ok=True)


def read_unannotated(folder: ShotsFolder, film: str) -> list[Unannotated]:
    """The clips of a film that were set aside.

    Raises:
        UserError: the file is damaged.
    """
    where = os.fspath(folder.folder(film) / "unannotated.jsonl")
    return [from_json(Unannotated, row, where) for row in folder.unannotated(film)]


def read_kept_cast(folder: ShotsFolder) -> Cast | None:
    """The cast that annotation used, without its pictures; None: nothing was annotated.

    Raises:
        UserError: the file is damaged.
    """
    file = folder.path / CAST_FILE
    with telling(file, "cannot be read", mend="check the path"):
        text = file.read_text() if file.exists() else None
    return parse_cast(text, where=os.fspath(file)) if text is not None else None


def keep_cast(folder: ShotsFolder, cast: Cast) -> None:
    """Notes the cast in the shots folder.

    Raises:
        UserError: the disk refuses.
    """
    file, content = folder.path / CAST_FILE, cast.to_text().encode()
    with telling(file, "cannot be read", mend="check the path"):
        kept = file.read_bytes() if file.exists() else None
    if kept != content:
        with replacing(file) as new:
            new.write(content)


def validated(fields: Mapping[str, Any], cast: Cast) -> Annotation:
    """A record of a clip whose subject is of the cast.

    Raises:
        ValueError: in one line, what is wrong.
    """
    try:
        return Annotation.model_validate(dict(fields), context={"cast": cast})
    except pydantic.ValidationError as error:
        raise ValueError(explain(error)) from None
