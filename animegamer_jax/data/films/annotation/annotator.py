"""Annotation by a model (paper, section 3.1): who does what, where and when, in every kept clip.

The model answers one question per clip, in the form of `Annotation`. Replies are cached in
`cache/` of the shots folder.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping

from animegamer_jax.data.characters import Characters
from animegamer_jax.data.films.annotation.labels import (
    Annotation,
    FilmAnnotation,
    Label,
    Unannotated,
    clips_digest,
    forget_failure,
    read_labels,
    read_report,
    save_characters,
    write_labels,
)
from animegamer_jax.data.films.annotation.prompt import VERSION, ClipPrompt
from animegamer_jax.data.films.annotation.usage_log import UsageFile
from animegamer_jax.data.films.clips.archive import ClipArchive
from animegamer_jax.data.films.clips.store import ClipRow, ShotsFolder
from animegamer_jax.data.films.cutting.video_reader import film_errors
from animegamer_jax.errors import UserError
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.vlm.ask_many import AskMany
from animegamer_jax.vlm.client import AskSettings
from animegamer_jax.vlm.messages import Message
from animegamer_jax.vlm.retry import Prompt

_CACHE = "cache"


class Annotator:
    """Asks a model about clips; one annotator serves all films of a process.

    Args:
        characters: With their pictures.
        settings: Which model is asked, and how.
        on_progress: Receives the numbers of finished and of all clips of a film.
        on_wait: Called with a line about a slow or busy server, once a minute at most.

    Attributes:
        ask: The connection to the model.
        usage: Requests, tokens and costs of all films so far.

    Raises:
        UserError: The settings name no model.
    """

    def __init__(
        self,
        characters: Characters,
        settings: AskSettings,
        *,
        on_progress: Progress = no_progress,
        on_wait: Callable[[str], None] = lambda line: None,
    ):
        self.characters, self.settings = characters, settings
        self.on_progress = on_progress
        self.ask = AskMany(settings, noun="clips", on_wait=on_wait)
        self.usage, self.usage_file = self.ask.usage, UsageFile()
        self._prompts: dict[float, ClipPrompt] = {}

    def prompt(self, folder: ShotsFolder) -> ClipPrompt:
        """Returns the prompt for clips of this folder's length."""
        s, seconds = self.settings, folder.settings.clip_seconds
        if seconds not in self._prompts:
            prompt = ClipPrompt(self.characters, frames=s.frames, side=s.side, seconds=seconds)
            self._prompts[seconds] = prompt
        return self._prompts[seconds]

    def key(self, folder: ShotsFolder, *clip: str) -> str:
        """Returns the SHA-256 of what an answer depends on: prompt, model, temperature, clip."""
        parts = [self.prompt(folder).digest, self.settings.model, self.settings.temperature, *clip]
        return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def annotate_film(folder: ShotsFolder, film: str, annotator: Annotator) -> FilmAnnotation:
    """Annotates the kept clips of a finished film, and writes the files when all are answered.

    Manual annotations stay. A film that is annotated already is not changed. The files do not
    depend on the number of simultaneous requests, nor on interruptions.

    Raises:
        FilmError: A file of the film is damaged, or its manual annotations do not fit.
        UserError: The model cannot be asked, or a file cannot be written. Answers received so far
            are cached.
    """
    with film_errors():
        rows = [row for row in folder.rows(film) if row.dropped is None]
        report, known = read_report(folder, film), read_labels(folder, film)
        manual = _manual_labels(folder, film, rows, annotator.characters, report, known)
    save_characters(folder, annotator.characters)
    digest = annotator.key(folder)
    if (
        report is not None
        and report.prompt_digest == digest
        and report.clips == clips_digest(rows)
        and not report.num_unannotated
        and known.keys() == {row.clip for row in rows}
    ):
        forget_failure(folder, film)
        annotator.usage.cached += report.num_model
        annotator.on_progress(f"{film}: clips", len(rows), len(rows))
        return report
    todo = {row.digest: row for row in rows if row.clip not in manual}

    def on_progress(done: int, total: int) -> None:
        annotator.usage_file.update(folder, annotator.usage)
        annotator.on_progress(f"{film}: clips", done, total)

    with contextlib.ExitStack() as stack:
        stack.callback(annotator.usage_file.write, folder, annotator.usage)
        with film_errors():
            archive = stack.enter_context(folder.clips(film))
        makers = [functools.partial(_prompt, annotator, folder, archive, r) for r in todo.values()]
        found = annotator.ask(makers, cache=folder.path / _CACHE, on_progress=on_progress)
    answers = dict(zip(todo, found, strict=True))
    labels, unannotated = dict(manual), []
    for row in rows:
        if row.clip in manual:
            continue
        answer = answers[row.digest]
        if answer.value is not None:
            labels[row.clip] = Label(row.clip, answer.value, "model")
        else:
            reason = str(answer.reason)
            unannotated.append(Unannotated(clip=row.clip, reason=reason, answer=answer.text))
    replies = [answer.reply for answer in found if answer.reply is not None]
    report = FilmAnnotation(
        film=film,
        characters=annotator.characters.digest,
        clips=clips_digest(rows),
        model=annotator.settings.model,
        prompt_version=VERSION,
        prompt_digest=digest,
        num_model=len(labels) - len(manual),
        num_manual=len(manual),
        num_unannotated=len(unannotated),
        requests=sum(reply.attempts for reply in replies),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        completion_tokens=sum(reply.completion_tokens for reply in replies),
    )
    write_labels(folder, report, labels.values(), unannotated=unannotated)
    return report


def _prompt(
    annotator: Annotator, folder: ShotsFolder, archive: ClipArchive, row: ClipRow
) -> Prompt[Annotation]:
    prompt = annotator.prompt(folder)

    def messages() -> list[Message]:
        with film_errors():
            clip = archive.frames(row.clip)
        return prompt.messages(clip)

    key = annotator.key(folder, row.digest)
    return Prompt(key=key, messages=messages, schema=prompt.schema, parse=prompt.parse)


def _manual_labels(
    folder: ShotsFolder,
    film: str,
    rows: list[ClipRow],
    characters: Characters,
    report: FilmAnnotation | None,
    labels: Mapping[int, Label],
) -> dict[int, Label]:
    """Returns the manual annotations of these clips.

    Raises:
        UserError: They belong to other clips, or name somebody who is not among the characters.
    """
    manual = {clip: label for clip, label in labels.items() if label.source == "manual"}
    file = folder.folder(film) / "annotations.jsonl"
    other = report is not None and report.clips != clips_digest(rows)
    if manual and (other or not manual.keys() <= {row.clip for row in rows}):
        raise UserError(
            f"{file}: its manual annotations belong to other clips: remove it, and add them again"
        )
    for label in manual.values():
        if (subject := label.annotation.subject) not in characters.subjects:
            raise UserError(
                f"{file}: clip {label.clip}: subject: {subject!r} of a manual annotation is not "
                "among the characters: add the character, or remove the line"
            )
    return manual
