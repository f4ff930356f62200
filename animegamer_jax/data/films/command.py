"""`animegamer data films`, `annotate`, `games` and `show`: from films to a games set."""

import contextlib
import functools
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from animegamer_jax.data.films import beam
from animegamer_jax.data.films.clips.store import (
    FilmSettings,
    ShotsFolder,
    open_shots,
    path_id,
)
from animegamer_jax.data.films.games.grouping import GamesSettings
from animegamer_jax.errors import UserError
from animegamer_jax.progress import show_progress
from animegamer_jax.storage.paths import is_bucket
from animegamer_jax.vlm.client import AskSettings

if TYPE_CHECKING:
    from animegamer_jax.data.characters import Characters
    from animegamer_jax.data.films.annotation.annotator import Annotator

Unprefixed = tyro.conf.arg(name="")
_FILMS, _GAMES, _HERE, _ASK = FilmSettings(), GamesSettings(), beam.Machines(), AskSettings()
_LOOK_EVERY = 5.0  # seconds between counts of what was asked


def films(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    out: str,
    settings: Annotated[FilmSettings, Unprefixed] = _FILMS,
    threads: int = 1,
    machines: Annotated[beam.Machines, Unprefixed] = _HERE,
) -> int:
    """Cut films into two-second clips, and measure how they move.

    The same command goes on after a stop: a finished film is not cut again. The status is 2 if
    none of the films can be used.

    Args:
        paths: Films, folders of films, or patterns; here or in a bucket.
        out: The shots folder to write, or to add films to.
        settings: Of cutting.
        threads: Of the decoder, in each worker.
        machines: Where the work is done.
    """
    from animegamer_jax.data.films.cutting.process_film import count_done, list_films

    found = list_films(paths)
    folder = open_shots(out, settings)
    folder.tidy()
    cut = functools.partial(_cut, folder=folder, threads=threads)
    with show_progress() as tell:
        beam.for_each(
            [os.fsencode(path) for path in found],  # a name may be no text
            cut,
            machines=machines,
            label="cut",
            done=lambda: count_done(found, folder),
            on_progress=tell,
        )
    reports = [folder.report(film) for film in folder.films()]
    failed = folder.failed()
    dropped = sum(sum(report.dropped.values()) for report in reports)
    damaged = sum(report.damaged for report in reports)
    skipped = sum(report.skipped for report in reports)
    _say(
        f"{out}: {len(reports)} films, {sum(report.kept for report in reports)} clips kept, "
        f"{dropped} dropped; {len(failed)} films set aside"
        + (f"; {damaged} damaged places, {skipped} frames left out" * bool(damaged or skipped))
    )
    for film in failed:
        _say(f"  {film.reason}")
    none_used = {path_id(path) for path in found} <= {film.film for film in failed}
    return 2 if none_used else 0


def _cut(path: bytes, *, folder: ShotsFolder, threads: int) -> None:
    from animegamer_jax.data.films.cutting.process_film import process_film

    process_film(os.fsdecode(path), folder, threads=threads, on_progress=beam.tell)


def _say(text: str) -> None:
    """Prints what a terminal of any encoding takes: names of files are any letters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def annotate(
    shots: Annotated[str, tyro.conf.Positional],
    *,
    characters: str,
    manual: str | None = None,
    settings: Annotated[AskSettings, Unprefixed] = _ASK,
    machines: Annotated[beam.Machines, Unprefixed] = _HERE,
) -> int:
    """Annotate every clip with who does what, where and when: by a model, by hand, or both.

    After an interruption, run the same command again: no answer is asked for twice. A film that
    cannot be annotated is skipped and listed at the end; the exit status is then 2.

    Args:
        shots: Shots folder to annotate.
        characters: TOML file of the characters, with names, aliases and images.
        manual: CSV or JSONL file of manual annotations, which are added before a model is asked.
        settings: Which model is asked, and how.
        machines: Where the work is done.
    """
    from animegamer_jax.data.characters import read_characters
    from animegamer_jax.data.films.annotation.manual import add_manual_annotations

    if settings.model is None and manual is None:
        raise UserError("expected --model NAME to ask, or --manual FILE, or both; found neither")
    if settings.model is not None:
        _refuse_out_of_reach(shots, settings, machines)
    folder, known = open_shots(shots), read_characters(characters)
    if manual is not None:
        added = add_manual_annotations(folder, manual, known)
        print(f"{manual}: {sum(added.values())} annotations of {len(added)} films")
    if settings.model is None:
        return 0
    every = folder.films()
    if not every:
        raise UserError(f"{shots}: no finished films: run `animegamer data films`")
    _annotator.cache_clear()  # of an earlier run in this process
    digest = _annotator(known, settings).key(folder)
    with show_progress(note=_usage_note(folder)) as tell:
        beam.for_each(
            every,
            functools.partial(_annotate, folder=folder, characters=known, settings=settings),
            machines=machines,
            label="annotate",
            done=lambda: _count_annotated(folder, every, digest),
            on_progress=tell,
        )
    return _report_annotated(folder, every)


def _refuse_out_of_reach(shots: str, settings: AskSettings, machines: beam.Machines) -> None:
    """Makes sure that other machines can reach the folder and the server."""
    if machines.is_local:
        return
    host = urllib.parse.urlsplit(settings.endpoint).hostname or ""
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        raise UserError(
            f"--endpoint {settings.endpoint}: expected an address that the machines of "
            f"{machines.runner} can reach, found one of this machine only"
        )
    if not is_bucket(shots):
        raise UserError(
            f"{shots}: expected a folder that the machines of {machines.runner} can reach, such as "
            "gs://bucket/shots, found one of this machine"
        )


def _report_annotated(folder: ShotsFolder, films: Sequence[str]) -> int:
    """Prints what is annotated and which films were skipped; returns the exit status.

    Raises:
        UserError: no clip was annotated.
    """
    from animegamer_jax.data.films.annotation.labels import (
        read_failure,
        read_report,
        read_unannotated,
    )
    from animegamer_jax.data.films.annotation.usage_log import read_usage

    failures = {film: reason for film in films if (reason := read_failure(folder, film))}
    found = [read_report(folder, film) for film in films if film not in failures]
    reports = [report for report in found if report is not None]
    num_model = sum(report.num_model for report in reports)
    num_manual = sum(report.num_manual for report in reports)
    incomplete = [report for report in reports if report.num_unannotated]
    print(
        f"{folder.path}: {num_model} clips annotated by a model, {num_manual} by hand, "
        f"{sum(report.num_unannotated for report in incomplete)} without a valid answer; "
        f"{len(failures)} films skipped; over all runs {read_usage(folder)}"
    )
    for film, reason in failures.items():
        print(f"  {film}: {reason}")
    if incomplete and not num_model + num_manual:
        first = read_unannotated(folder, incomplete[0].film)[0]
        raise UserError(
            f"{folder.path}: no clip has a usable answer, the first: {first.reason}: check the "
            "server and the model, then run the same command again"
        )
    return 2 if failures else 0


def _count_annotated(folder: ShotsFolder, films: Sequence[str], digest: str) -> int:
    """Returns the number of films that are annotated with the prompt of this digest."""
    from animegamer_jax.data.films.annotation.labels import read_report

    count = 0
    for film in films:
        with contextlib.suppress(UserError):  # raised again when the film is annotated
            report = read_report(folder, film)
            count += report is not None and report.prompt_digest == digest
    return count


def _usage_note(folder: ShotsFolder) -> Callable[[], str]:
    """Returns a function that formats the usage since now, reading the files now and then."""
    from animegamer_jax.data.films.annotation.usage_log import read_usage
    from animegamer_jax.vlm.usage import Usage

    before, found = read_usage(folder), Usage()
    looked = time.monotonic()

    def note() -> str:
        nonlocal found, looked
        if time.monotonic() - looked > _LOOK_EVERY:
            found, looked = read_usage(folder) - before, time.monotonic()
        return f"; {found}" if found.requests else ""

    return note


@functools.lru_cache(maxsize=1)
def _annotator(characters: "Characters", settings: AskSettings) -> "Annotator":
    """Returns the annotator of this process, which counts failures over all films."""
    from animegamer_jax.data.films.annotation.annotator import Annotator

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return Annotator(characters, settings, on_progress=beam.tell, on_wait=say)


def _annotate(
    film: str, *, folder: ShotsFolder, characters: "Characters", settings: AskSettings
) -> None:
    from animegamer_jax.data.films.annotation.annotator import annotate_film
    from animegamer_jax.data.films.annotation.labels import note_failure
    from animegamer_jax.data.films.cutting.video_reader import FilmError

    try:
        annotate_film(folder, film, _annotator(characters, settings))
    except FilmError as error:
        note_failure(folder, film, str(error).replace(f"{folder.path}/", ""))


def games(
    shots: Annotated[str, tyro.conf.Positional],
    *,
    out: str,
    settings: Annotated[GamesSettings, Unprefixed] = _GAMES,
    films_a_shard: int = 1,
    machines: Annotated[beam.Machines, Unprefixed] = _HERE,
) -> int:
    """Make games of annotated clips: a data set to train on, with a data card.

    The same command goes on after a stop.

    Args:
        shots: The shots folder, annotated.
        out: The games set to write.
        settings: Which clips make a game.
        films_a_shard: Films whose games go into one file.
        machines: Where the work is done.
    """
    from animegamer_jax.data.films.games.writer import write_film_games

    with show_progress() as tell:

        def share(
            numbers: Sequence[int], function: Callable[[int], None], done: Callable[[], int]
        ) -> None:
            beam.for_each(
                numbers, function, machines=machines, label="games", done=done, on_progress=tell
            )

        info = write_film_games(
            out, open_shots(shots), settings, films_a_shard=films_a_shard, share=share
        )
    counts = ", ".join(f"{split} {count}" for split, count in info.splits.items())
    print(f"{out}: {sum(info.splits.values())} turns ({counts}); see {out}/card.md")
    return 0


def show(
    data: Annotated[str, tyro.conf.Positional], *, out: str | None = None, clips: int = 48
) -> int:
    """Write an HTML page that shows what is in a shots folder or a games set.

    Args:
        data: The shots folder or the games set.
        out: The page. Default: the folder's name with .html, beside it; of a bucket, here.
        clips: How many to show, evenly spread.
    """
    from animegamer_jax.data.films.gallery import default_page, write_page

    page = default_page(data) if out is None else out
    write_page(data, page, clips=clips)
    _say(f"{os.fspath(page)}: written")
    return 0
