"""`animegamer data films`, `annotate`, `games` and `show`: from films to a game dataset."""

import contextlib
import dataclasses
import functools
import os
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from animegamer_jax.data.films.clips.store import FilmSettings, ShotsFolder, open_shots, path_id
from animegamer_jax.data.films.games.grouping import GamesSettings
from animegamer_jax.data.films.runners import RunnerOptions, for_each, is_loopback
from animegamer_jax.errors import UserError, printable
from animegamer_jax.progress import (
    Progress,
    no_progress,
    print_line,
    print_status,
    show_progress,
)
from animegamer_jax.storage.locks import only_writer
from animegamer_jax.storage.paths import is_bucket
from animegamer_jax.vlm.client import AskSettings

if TYPE_CHECKING:
    from animegamer_jax.data.characters import Characters
    from animegamer_jax.data.films.annotation.annotator import Annotator

Unprefixed = tyro.conf.arg(name="")
_FILMS, _GAMES, _RUNNER, _ASK = FilmSettings(), GamesSettings(), RunnerOptions(), AskSettings()
_COUNT_EVERY = 5.0  # seconds between counts of the requests


def films(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    out: str,
    model: str | None = None,
    settings: Annotated[FilmSettings, Unprefixed] = _FILMS,
    threads: int = 1,
    runner: Annotated[RunnerOptions, Unprefixed] = _RUNNER,
) -> int:
    """Cut films into two-second clips and measure their motion.

    After an interruption, run the same command again: a finished film is not cut again. The exit
    status is 2 if none of the films can be used.

    Args:
        paths: Films, folders of films, or patterns with * ? [], on this machine or in a bucket.
        out: Shots folder to write, or to add films to.
        model: Model that will be trained on the clips, a bundle or `toy`: its clips' height, width
            and number of frames replace those of the options below.
        settings: How films are cut.
        threads: Number of decoder threads in each worker.
        runner: Where the work runs.
    """
    from animegamer_jax.data.films.cutting.process_film import count_done, list_films, process_film

    if model is not None:
        settings = _sized_for(model, settings)
    found = list_films(paths)
    folder = open_shots(out, settings)
    folder.tidy()
    with only_writer(out), show_progress() as progress:
        for_each(
            found,
            functools.partial(
                process_film, folder=folder, threads=threads, on_progress=runner.reporting(progress)
            ),
            options=runner,
            label="films",
            count_done=lambda: count_done(found, folder),
            on_progress=progress,
        )
    reports = [folder.report(film) for film in folder.films()]
    skipped = folder.skipped_films()
    dropped = sum(sum(report.dropped.values()) for report in reports)
    damaged = sum(report.damaged for report in reports)
    frames = sum(report.skipped for report in reports)
    print_line(
        f"{out}: {len(reports)} films, {sum(report.kept for report in reports)} clips kept, "
        f"{dropped} dropped; {len(skipped)} films skipped"
        + (f"; {damaged} damaged places, {frames} frames skipped" * bool(damaged or frames))
    )
    for film in skipped:
        print_line(f"  {film.reason}")
    none_used = {path_id(path) for path in found} <= {film.film for film in skipped}
    return 2 if none_used else 0


def _sized_for(model: str, settings: FilmSettings) -> FilmSettings:
    """Returns the settings with the size of a model's clips.

    Raises:
        UserError: There is no such model, it has no size of clips, or another one was asked for.
    """
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.configs import clip_size

    config = Bundle.open(model).config
    if config.dit is None or config.vae is None:
        raise UserError(
            f"--model {model}: expected a bundle with the networks dit and vae, which decide the "
            "size of clips: give --height, --width and --num-frames instead"
        )
    names = ("num_frames", "height", "width")
    size = dict(zip(names, clip_size(config.dit, config.vae), strict=True))
    for name, value in size.items():
        if (asked := getattr(settings, name)) not in (value, getattr(_FILMS, name)):
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} {asked}: clips for --model {model} have {value}: leave {option} out"
            )
    return dataclasses.replace(settings, **size)


def annotate(
    shots: Annotated[str, tyro.conf.Positional],
    *,
    characters: str,
    manual: str | None = None,
    settings: Annotated[AskSettings, Unprefixed] = _ASK,
    runner: Annotated[RunnerOptions, Unprefixed] = _RUNNER,
) -> int:
    """Annotate every clip with who does what, where and when: by a model, by hand, or both.

    After an interruption, run the same command again: clips that have a valid answer are not asked
    about again. A film that cannot be annotated is skipped and listed at the end; the exit status
    is then 2.

    Args:
        shots: Shots folder to annotate.
        characters: TOML file of the characters, with names, aliases and images.
        manual: CSV or JSONL file of manual annotations, which are added before a model is asked.
            Default: none.
        settings: Which model is asked, and how.
        runner: Where the work runs.
    """
    from animegamer_jax.data.characters import read_characters
    from animegamer_jax.data.films.annotation.manual import add_manual_annotations

    if settings.model is None and manual is None:
        raise UserError("expected --model NAME to ask, or --manual FILE, or both; found neither")
    if settings.model is not None:
        _refuse_out_of_reach(shots, settings.endpoint, runner)
    folder, known = open_shots(shots), read_characters(characters)
    if manual is not None:
        added = add_manual_annotations(folder, manual, known)
        print_line(f"{manual}: {sum(added.values())} annotations of {len(added)} films")
    if settings.model is None:
        return 0
    every = folder.films()
    if not every:
        raise UserError(f"{shots}: no finished films: run `animegamer data films`")
    _annotator.cache_clear()  # of an earlier run in this process
    digest = _annotator(known, settings).key(folder)
    lock = only_writer(shots, what="annotations")
    with lock, show_progress(note=_usage_note(folder)) as progress:
        for_each(
            every,
            functools.partial(
                _annotate,
                folder=folder,
                characters=known,
                settings=settings,
                on_progress=runner.reporting(progress),
            ),
            options=runner,
            label="films",
            count_done=lambda: _count_annotated(folder, every, digest),
            on_progress=progress,
        )
    return _report_annotated(folder, every)


def _refuse_out_of_reach(shots: str, endpoint: str, runner: RunnerOptions) -> None:
    """Makes sure that other machines can reach the folder and the server."""
    if runner.is_on_this_machine:
        return
    if is_loopback(urllib.parse.urlsplit(endpoint).hostname or ""):
        raise UserError(
            f"--endpoint {endpoint}: expected an address that the machines of {runner.runner} can "
            "reach, found one of this machine only"
        )
    if not is_bucket(shots):
        raise UserError(
            f"{printable(shots)}: expected a folder that the machines of {runner.runner} can "
            "reach, such as gs://bucket/shots, found one of this machine"
        )


def _report_annotated(folder: ShotsFolder, films: Sequence[str]) -> int:
    """Prints what is annotated and which films were skipped; returns the exit status.

    Raises:
        UserError: No clip was annotated.
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
    print_line(
        f"{folder.path}: {num_model} clips annotated by a model, {num_manual} by hand, "
        f"{sum(report.num_unannotated for report in incomplete)} without a valid answer; "
        f"{len(failures)} films skipped; over all runs {read_usage(folder)}"
    )
    for film, reason in failures.items():
        print_line(f"  {film}: {reason}")
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
        if time.monotonic() - looked > _COUNT_EVERY:
            found, looked = read_usage(folder) - before, time.monotonic()
        return f"; {found}" if found.requests else ""

    return note


@functools.lru_cache(maxsize=1)
def _annotator(
    characters: "Characters", settings: AskSettings, on_progress: Progress = no_progress
) -> "Annotator":
    """Returns the annotator of this process, which counts failures over all films."""
    from animegamer_jax.data.films.annotation.annotator import Annotator

    return Annotator(characters, settings, on_progress=on_progress, on_wait=print_status)


def _annotate(
    film: str,
    *,
    folder: ShotsFolder,
    characters: "Characters",
    settings: AskSettings,
    on_progress: Progress = no_progress,
) -> None:
    from animegamer_jax.data.films.annotation.annotator import annotate_film
    from animegamer_jax.data.films.annotation.labels import note_failure
    from animegamer_jax.data.films.cutting.video_reader import FilmError

    try:
        annotate_film(folder, film, _annotator(characters, settings, on_progress))
    except FilmError as error:
        note_failure(folder, film, str(error).replace(f"{folder.path}/", ""))


def games(
    shots: Annotated[str, tyro.conf.Positional],
    *,
    out: str,
    settings: Annotated[GamesSettings, Unprefixed] = _GAMES,
    films_a_shard: int | None = None,
    runner: Annotated[RunnerOptions, Unprefixed] = _RUNNER,
) -> int:
    """Make games of annotated clips: a game dataset to train on, with a data card.

    After an interruption, run the same command again.

    Args:
        shots: Shots folder with annotations.
        out: Game dataset to write.
        settings: Which clips make a game.
        films_a_shard: Number of films whose games go into one file. Default: one, or more where
            there are more than 4,096 films.
        runner: Where the work runs.
    """
    from animegamer_jax.data.films.games.writer import write_film_games

    with only_writer(out), show_progress() as progress:
        info = write_film_games(
            out,
            open_shots(shots),
            settings,
            films_a_shard=films_a_shard,
            for_each=functools.partial(
                for_each, options=runner, label="shards", on_progress=progress
            ),
            on_progress=progress,
        )
    counts = ", ".join(f"{split} {count}" for split, count in info.splits.items())
    print_line(f"{out}: {sum(info.splits.values())} turns ({counts}); see {out}/card.md")
    return 0


def show(
    data: Annotated[str, tyro.conf.Positional], *, out: str | None = None, clips: int = 96
) -> int:
    """Write an HTML page that shows what is in a shots folder or a game dataset.

    Its clips can be filtered, sorted and searched; they are written into a folder next to the page.

    Args:
        data: Shots folder or game dataset.
        out: File of the page. Default: the folder's name with .html, next to it; in the current
            folder for one in a bucket.
        clips: Number of clips to show, evenly spread; a few more for rare levels, characters and
            reasons, or to show whole games.
    """
    from animegamer_jax.data.films.gallery import default_page, write_page

    page = default_page(data) if out is None else out
    with show_progress() as progress:
        write_page(data, page, clips=clips, on_progress=progress)
    print_line(f"{os.fspath(page)}: written")
    return 0
