"""Annotation by a model (PAPER section 3.1): who does what, where and when, in every kept clip.

A model answers about one clip at a time, in the form of `Annotation`. Each answer is kept on disk
(`cache/`) under a digest of the clip, the question and the model's name, so no question is paid
for twice, whenever a run ends. A clip without a valid answer is set aside with the reason.
"""

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.bundle_config import from_json, to_json
from animegamer_jax.data.annotations import (
    FilmAnnotation,
    Label,
    Unannotated,
    clips_digest,
    keep_cast,
    read_labels,
    read_report,
    write_labels,
)
from animegamer_jax.data.cast import NOBODY, Cast
from animegamer_jax.data.endpoint import AskSettings, Endpoint, NoAnswerError, connected
from animegamer_jax.data.question import VERSION, Question
from animegamer_jax.data.shotfiles import ClipArchive, read_json, write_json
from animegamer_jax.data.shots import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage import telling

Progress = Callable[[str, int, int], None]

_CACHE = "cache"
_KEPT = 10_000  # letters of a wrong answer that are kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The last answer about a clip, and what it took to get it.

    Attributes:
        answer: as it came; valid or not.
        attempts: questions asked.
        max_tokens: that the answer could have.
        is_cut: whether it ended there.
        prompt_tokens, completion_tokens: of all attempts.
    """

    answer: str
    attempts: int
    max_tokens: int
    is_cut: bool
    prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass
class Usage:
    """What a run has asked for so far.

    Attributes:
        requests: answered questions.
        prompt_tokens, completion_tokens: as the server counts them.
        cached: answers that were on disk.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: int = 0

    def cost(self, settings: AskSettings) -> float | None:
        """In the currency of the prices; None: there are none."""
        prices = settings.prompt_price, settings.completion_price
        if prices == (None, None):
            return None
        tokens = self.prompt_tokens, self.completion_tokens
        return sum(n * (price or 0.0) / 1e6 for n, price in zip(tokens, prices, strict=True))


class Annotator:
    """A model that is asked about clips of one cast.

    Args:
        cast: with its pictures.
        settings: which model, and how.
        on_progress: called with the film, clips done, and clips.

    Attributes:
        usage: of all films so far.
    """

    def __init__(
        self,
        cast: Cast,
        settings: AskSettings,
        *,
        on_progress: Progress = lambda film, done, total: None,
    ):
        self.cast, self.settings, self.on_progress = cast, settings, on_progress
        self.usage = Usage()
        self._failures = 0

    def question(self, folder: ShotsFolder) -> Question:
        """What is asked about the clips of a folder."""
        s = self.settings
        seconds = folder.settings.clip_seconds
        return Question(self.cast, frames=s.frames, side=s.side, seconds=seconds)

    async def ask(
        self, endpoint: Endpoint, question: Question, clip: UInt8[np.ndarray, "f h w 3"]
    ) -> Asked:
        """Asks until an answer is valid, or often enough; what is wrong is told to the model.

        Raises:
            NoAnswerError: the server does not answer this.
            UserError: the server answers nothing.
        """
        messages = await asyncio.to_thread(question.ask, clip)
        attempt = prompt = completion = 0
        while True:
            found = await endpoint.ask(messages, question.schema)
            attempt += 1
            prompt, completion = prompt + found.prompt_tokens, completion + found.completion_tokens
            self.usage.requests += 1
            self.usage.prompt_tokens += found.prompt_tokens
            self.usage.completion_tokens += found.completion_tokens
            asked = Asked(
                answer=found.text[:_KEPT],
                attempts=attempt,
                max_tokens=self.settings.max_tokens,
                is_cut=found.is_cut,
                prompt_tokens=prompt,
                completion_tokens=completion,
            )
            try:
                question.read(asked.answer)
            except ValueError as error:
                if attempt == self.settings.attempts:
                    return asked
                messages = [*messages, *question.again(found.text, wrong=str(error))]
            else:
                return asked

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Counts clips in a row without a usable answer.

        Raises:
            UserError: there are too many.
        """
        self._failures += 1
        if self._failures >= self.settings.patience:
            raise UserError(
                f"{self.settings.endpoint}: no usable answer about {self._failures} clips in a "
                f"row, the last: {reason}: check the server and the model, then run the same "
                "command again: finished answers are kept"
            )


def annotate_film(folder: ShotsFolder, film: str, annotator: Annotator) -> FilmAnnotation:
    """Annotates the kept clips of a finished film, and writes what was found when it is whole.

    What people wrote of a clip stays. The files do not depend on the number of workers, nor on how
    often the run was ended and begun again.

    Raises:
        UserError: the server cannot be used, a clip is damaged, the disk refuses. Answers that
            came before are kept.
    """
    rows = [row for row in folder.rows(film) if row.dropped is None]
    by_people = _labels_by_people(folder, film, rows, annotator.cast)
    keep_cast(folder, annotator.cast)
    run = _Run(folder, film, annotator)
    asyncio.run(run.fill(row for row in rows if row.clip not in by_people))
    labels, aside = dict(by_people), []
    for row in rows:
        if row.clip in by_people:
            continue
        told = run.told[row.digest]
        if isinstance(told, NoAnswerError):
            aside.append(Unannotated(clip=row.clip, reason=str(told), answer=_cut(told.found)))
            continue
        try:
            labels[row.clip] = Label(row.clip, run.question.read(told.answer), "model")
        except ValueError as error:
            reason = _why(told, error)
            aside.append(Unannotated(clip=row.clip, reason=reason, answer=told.answer))
    asked = [told for told in run.told.values() if isinstance(told, Asked)]
    report = FilmAnnotation(
        film=film,
        cast=annotator.cast.digest,
        clips=clips_digest(rows),
        model=annotator.settings.model,
        prompt=VERSION,
        by_model=len(labels) - len(by_people),
        by_people=len(by_people),
        set_aside=len(aside),
        requests=sum(one.attempts for one in asked),
        prompt_tokens=sum(one.prompt_tokens for one in asked),
        completion_tokens=sum(one.completion_tokens for one in asked),
    )
    write_labels(folder, report, labels.values(), unannotated=aside)
    return report


def _labels_by_people(
    folder: ShotsFolder, film: str, rows: list[ClipRow], cast: Cast
) -> dict[int, Label]:
    """What people wrote of these clips before.

    Raises:
        UserError: they wrote of other clips, or of somebody who is not of the cast.
    """
    report, labels = read_report(folder, film), read_labels(folder, film).values()
    by_people = {label.clip: label for label in labels if label.source == "people"}
    file = folder.folder(film) / "annotations.jsonl"
    other = report is not None and report.clips != clips_digest(rows)
    if by_people and (other or not by_people.keys() <= {row.clip for row in rows}):
        raise UserError(
            f"{file}: people wrote it of other clips: remove it, and take their file over again"
        )
    for label in by_people.values():
        if (subject := label.annotation.subject) not in (*cast.names, *NOBODY):
            raise UserError(
                f"{file}: clip {label.clip}: subject: {subject!r}, written by people, is not of "
                "the cast: add the character, or remove the line"
            )
    return by_people


def _cut(text: str | None) -> str | None:
    return text[:_KEPT] if text is not None else None


def _why(asked: Asked, error: ValueError) -> str:
    times = f"{asked.attempts} time" + "s" * (asked.attempts > 1)
    cut = f" (cut at {asked.max_tokens} tokens)" if asked.is_cut else ""
    return f"asked {times}, no valid answer{cut}: {error}"


class _Run:
    """The answers about one film's clips, by the clips' digests."""

    def __init__(self, folder: ShotsFolder, film: str, annotator: Annotator):
        self._folder, self._film, self._annotator = folder, film, annotator
        self.question = annotator.question(folder)
        self.told: dict[str, Asked | NoAnswerError] = {}
        s = annotator.settings
        self._about = f"{self.question.digest} {s.model} {s.temperature}"

    async def fill(self, rows: Iterable[ClipRow]) -> None:
        """Gets an answer for every clip, from the disk or from the model.

        Raises:
            UserError: as `annotate_film`.
        """
        clips = {row.digest: row for row in rows}
        for digest in clips:
            if (found := self._cached(digest)) is not None:
                self.told[digest] = found
        self._annotator.usage.cached += len(self.told)
        self._annotator.on_progress(self._film, len(self.told), len(clips))
        missing = [row for digest, row in clips.items() if digest not in self.told]
        if missing:
            await self._ask_about(missing, len(clips))

    async def _ask_about(self, rows: list[ClipRow], total: int) -> None:
        missing = iter(rows)
        settings = self._annotator.settings
        try:
            with self._folder.clips(self._film) as archive:
                async with connected(settings) as endpoint, asyncio.TaskGroup() as group:
                    for _ in range(settings.workers):
                        group.create_task(self._work(endpoint, archive, missing, total))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(
        self, endpoint: Endpoint, archive: ClipArchive, rows: Iterator[ClipRow], total: int
    ) -> None:
        """One worker: clip after clip, while there are some."""
        annotator = self._annotator
        for row in rows:
            clip = await asyncio.to_thread(archive.frames, row.clip)
            try:
                asked = await annotator.ask(endpoint, self.question, clip)
            except NoAnswerError as error:
                self.told[row.digest] = error
                annotator.failed(str(error))
            else:
                self.told[row.digest] = asked
                write_json(self._file(row.digest), to_json(asked))
                self._count(asked)
            annotator.on_progress(self._film, len(self.told), total)

    def _count(self, asked: Asked) -> None:
        try:
            self.question.read(asked.answer)
        except ValueError as error:
            self._annotator.failed(_why(asked, error))
        else:
            self._annotator.succeeded()

    def _file(self, digest: str) -> epath.Path:
        key = hashlib.sha256(f"{self._about} {digest}".encode()).hexdigest()
        return self._folder.path / _CACHE / key[:2] / f"{key}.json"

    def _cached(self, digest: str) -> Asked | None:
        """An answer on disk; None: there is none, or one that further attempts may better."""
        file = self._file(digest)
        with telling(file, "cannot be read", mend="check the path"):
            if not file.exists():
                return None
        try:
            asked = from_json(Asked, read_json(file), os.fspath(file))
        except UserError:  # damaged: asked for again
            return None
        try:
            self.question.read(asked.answer)
        except ValueError:
            s = self._annotator.settings
            more = s.attempts > asked.attempts or s.max_tokens > asked.max_tokens
            return None if more else asked
        return asked
