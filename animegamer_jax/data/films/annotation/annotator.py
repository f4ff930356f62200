"""Annotation by a model (PAPER section 3.1): who does what, where and when, in every kept clip.

A model answers about one clip at a time, in the form of `Annotation`. Each answer is kept on disk
(`cache/`) under a digest of the clip, the question, the model's name and its temperature, so the
same question is not paid for twice, whenever a run ends. A clip without a valid answer is set aside
with the reason.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.bundle.config import to_json
from animegamer_jax.data.characters import NOBODY, Cast
from animegamer_jax.data.films.annotation.labels import (
    FilmAnnotation,
    Label,
    Unannotated,
    clips_digest,
    forget_failure,
    keep_cast,
    read_labels,
    read_report,
    write_labels,
)
from animegamer_jax.data.films.annotation.prompt import VERSION, Question
from animegamer_jax.data.films.annotation.usage_log import UsageFile
from animegamer_jax.data.films.clips.archive import ClipArchive
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import add_json
from animegamer_jax.vlm.client import (
    AskSettings,
    Endpoint,
    NoAnswerError,
    connected,
)
from animegamer_jax.vlm.retry import (
    Asked,
    Requests,
    answer_file,
    ask_until_valid,
    cut_answer,
    kept_answer,
)
from animegamer_jax.vlm.usage import Usage

Progress = Callable[[str, int, int], None]

_CACHE = "cache"
_WRITERS = 4


class FilmError(UserError):
    """A film that cannot be annotated; others can."""


@contextlib.contextmanager
def _of_film() -> Iterator[None]:
    """What goes wrong in the block is of the film."""
    try:
        yield
    except UserError as error:
        raise FilmError(str(error)) from error


class Annotator:
    """A model that is asked about clips of one cast; one is for all films of a process.

    Args:
        cast: with its pictures.
        settings: which model, and how.
        on_progress: called with the film, clips done, and clips.
        on_wait: called with a line about a slow or busy server, now and then.

    Attributes:
        usage: of all films so far.

    Raises:
        UserError: the settings name no model.
    """

    def __init__(
        self,
        cast: Cast,
        settings: AskSettings,
        *,
        on_progress: Progress = lambda film, done, total: None,
        on_wait: Callable[[str], None] = lambda line: None,
    ):
        if settings.model is None:
            raise UserError("model: expected the name of a model at the endpoint, found none")
        self.cast, self.settings = cast, settings
        self.on_progress = on_progress
        self.usage, self.usage_file = Usage(), UsageFile()
        self.requests = Requests(settings, self.usage, on_wait=on_wait)
        self._failures = 0
        self._questions: dict[float, Question] = {}

    def question(self, folder: ShotsFolder) -> Question:
        """What is asked about the clips of a folder."""
        s, seconds = self.settings, folder.settings.clip_seconds
        if seconds not in self._questions:
            made = Question(self.cast, frames=s.frames, side=s.side, seconds=seconds)
            self._questions[seconds] = made
        return self._questions[seconds]

    def asked(self, folder: ShotsFolder) -> str:
        """What an answer depends on beside the clip: question, model, temperature."""
        s = self.settings
        return f"{self.question(folder).digest} {s.model} {s.temperature}"

    def asked_digest(self, folder: ShotsFolder) -> str:
        """SHA-256 of it."""
        return hashlib.sha256(self.asked(folder).encode()).hexdigest()

    async def ask(
        self, endpoint: Endpoint, question: Question, clip: UInt8[np.ndarray, "f h w 3"]
    ) -> Asked:
        """Asks until an answer is valid, or often enough; what is wrong is told to the model.

        Raises:
            NoAnswerError: the server does not answer this.
            UserError: the server answers nothing.
        """
        return await ask_until_valid(
            endpoint,
            await asyncio.to_thread(question.ask, clip),
            schema=question.schema,
            name="annotation",
            read=question.read,
            settings=self.settings,
            usage=self.usage,
        )

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

    What people wrote of a clip stays. A film of which all that was asked is answered stays as it
    is. The files do not depend on the number of questions at a time, nor on how often the run was
    ended and begun again.

    Raises:
        FilmError: a file of the film is damaged, or people wrote of it what does not fit.
        UserError: the server cannot be used, or the disk refuses. Answers that came before are
            kept.
    """
    run = _Run(folder, film, annotator)
    with _of_film():
        rows = [row for row in folder.rows(film) if row.dropped is None]
        report, known = read_report(folder, film), read_labels(folder, film)
        by_people = _labels_by_people(folder, film, rows, annotator.cast, report, known)
    keep_cast(folder, annotator.cast)
    if report is not None and _is_whole(report, rows, run, known):
        forget_failure(folder, film)
        annotator.usage.cached += report.by_model
        annotator.on_progress(film, len(rows), len(rows))
        return report
    try:
        asyncio.run(run.fill(row for row in rows if row.clip not in by_people))
    finally:
        annotator.usage_file.write(folder, annotator.usage)
    labels, aside = dict(by_people), []
    for row in rows:
        if row.clip in by_people:
            continue
        told = run.told[row.digest]
        if isinstance(told, NoAnswerError):
            aside.append(
                Unannotated(clip=row.clip, reason=str(told), answer=cut_answer(told.found))
            )
            continue
        try:
            labels[row.clip] = Label(row.clip, run.question.read(told.answer), "model")
        except ValueError as error:
            reason = told.why(error)
            aside.append(Unannotated(clip=row.clip, reason=reason, answer=told.answer))
    asked = [told for told in run.told.values() if isinstance(told, Asked)]
    report = FilmAnnotation(
        film=film,
        cast=annotator.cast.digest,
        clips=clips_digest(rows),
        model=annotator.settings.model,
        prompt=VERSION,
        asked=run.asked,
        by_model=len(labels) - len(by_people),
        by_people=len(by_people),
        set_aside=len(aside),
        requests=sum(one.attempts for one in asked),
        prompt_tokens=sum(one.prompt_tokens for one in asked),
        completion_tokens=sum(one.completion_tokens for one in asked),
    )
    write_labels(folder, report, labels.values(), unannotated=aside)
    return report


def _is_whole(
    report: FilmAnnotation, rows: list[ClipRow], run: "_Run", labels: Mapping[int, Label]
) -> bool:
    """Whether nothing is left to ask of a film."""
    return (
        report.asked == run.asked
        and report.clips == clips_digest(rows)
        and not report.set_aside
        and labels.keys() == {row.clip for row in rows}
    )


def _labels_by_people(
    folder: ShotsFolder,
    film: str,
    rows: list[ClipRow],
    cast: Cast,
    report: FilmAnnotation | None,
    labels: Mapping[int, Label],
) -> dict[int, Label]:
    """What people wrote of these clips before.

    Raises:
        UserError: they wrote of other clips, or of somebody who is not of the cast.
    """
    by_people = {clip: label for clip, label in labels.items() if label.source == "people"}
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


class _Run:
    """The answers about one film's clips, by the clips' digests."""

    def __init__(self, folder: ShotsFolder, film: str, annotator: Annotator):
        self._folder, self._film, self._annotator = folder, film, annotator
        self.question = annotator.question(folder)
        self.told: dict[str, Asked | NoAnswerError] = {}
        self._about = annotator.asked(folder)
        self.asked = annotator.asked_digest(folder)

    async def fill(self, rows: Iterable[ClipRow]) -> None:
        """Gets an answer for every clip, from the disk or from the model.

        Raises:
            UserError: as `annotate_film`.
        """
        clips = {row.digest: row for row in rows}
        found = await asyncio.gather(*(asyncio.to_thread(self._cached, d) for d in clips))
        self.told.update((d, one) for d, one in zip(clips, found, strict=True) if one is not None)
        self._annotator.usage.cached += len(self.told)
        self._annotator.on_progress(self._film, len(self.told), len(clips))
        missing = [row for digest, row in clips.items() if digest not in self.told]
        if missing:
            await self._ask_about(missing, len(clips))

    async def _ask_about(self, rows: list[ClipRow], total: int) -> None:
        missing, annotator = iter(rows), self._annotator
        settings = annotator.settings
        try:
            with contextlib.ExitStack() as stack:
                with _of_film():
                    archive = stack.enter_context(self._folder.clips(self._film))
                writers = stack.enter_context(ThreadPoolExecutor(_WRITERS))  # waits for the last
                async with (
                    connected(settings, on_request=annotator.requests.sent) as endpoint,
                    asyncio.TaskGroup() as group,
                ):
                    for _ in range(settings.parallel):
                        group.create_task(self._work(endpoint, archive, missing, writers, total))
        except BaseExceptionGroup as errors:
            of_run = [error for error in errors.exceptions if not isinstance(error, FilmError)]
            raise (of_run or errors.exceptions)[0] from None

    async def _work(
        self,
        endpoint: Endpoint,
        archive: ClipArchive,
        rows: Iterator[ClipRow],
        writers: ThreadPoolExecutor,
        total: int,
    ) -> None:
        """One worker: clip after clip, while there are some."""
        annotator = self._annotator
        for row in rows:
            with _of_film():
                clip = await asyncio.to_thread(archive.frames, row.clip)
            try:
                asked = await annotator.ask(endpoint, self.question, clip)
            except NoAnswerError as error:
                self.told[row.digest] = error
                annotator.failed(str(error))
            else:
                self.told[row.digest] = asked
                # Beside the questions, and to its end even where the run ends now.
                kept = writers.submit(self._keep, row.digest, asked)
                await asyncio.shield(asyncio.wrap_future(kept))
                self._count(asked)
            annotator.on_progress(self._film, len(self.told), total)

    def _count(self, asked: Asked) -> None:
        try:
            self.question.read(asked.answer)
        except ValueError as error:
            self._annotator.failed(asked.why(error))
        else:
            self._annotator.succeeded()

    def _keep(self, digest: str, asked: Asked) -> None:
        add_json(self._file(digest), to_json(asked))
        self._annotator.usage_file.update(self._folder, self._annotator.usage)

    def _file(self, digest: str) -> epath.Path:
        key = hashlib.sha256(f"{self._about} {digest}".encode()).hexdigest()
        return answer_file(self._folder.path / _CACHE, key)

    def _cached(self, digest: str) -> Asked | None:
        """An answer on disk; None: there is none, or one that further attempts may better."""
        asked = kept_answer(self._file(digest))
        if asked is None:
            return None
        try:
            self.question.read(asked.answer)
        except ValueError:
            return None if asked.may_be_bettered(self._annotator.settings) else asked
        return asked
