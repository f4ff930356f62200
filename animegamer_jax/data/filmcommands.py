"""`animegamer data films`, `annotate`, `games` and `show`: from films to a games set."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.data import beam
from animegamer_jax.data.command import show_progress
from animegamer_jax.data.endpoint import AskSettings
from animegamer_jax.data.filmgames import GamesSettings
from animegamer_jax.data.shots import FilmSettings, ShotsFolder, open_shots
from animegamer_jax.errors import UserError

Unprefixed = tyro.conf.arg(name="")
_FILMS, _GAMES, _HERE = FilmSettings(), GamesSettings(), beam.Machines()


def films(
    paths: Annotated[tuple[str, ...], tyro.conf.Positional],
    *,
    out: str,
    settings: Annotated[FilmSettings, Unprefixed] = _FILMS,
    threads: int = 1,
    machines: Annotated[beam.Machines, Unprefixed] = _HERE,
) -> int:
    """Cut films into two-second clips, and measure how they move.

    The same command goes on after a stop: a finished film is not cut again.

    Args:
        paths: Films, folders of films, or patterns; here or in a bucket.
        out: The shots folder to write, or to add films to.
        settings: Of cutting.
        threads: Of the decoder, in each worker.
        machines: Where the work is done.
    """
    from animegamer_jax.data.films import list_films

    found = [str(path) for path in list_films(paths)]
    folder = open_shots(out, settings)
    cut = functools.partial(_cut, folder=folder, threads=threads)
    with show_progress("films") as tell:
        beam.for_each(
            found,
            cut,
            machines=machines,
            label="cut",
            done=lambda: len(folder.films()) + len(folder.failed()),
            on_progress=tell,
        )
    reports = [folder.report(film) for film in folder.films()]
    failed = folder.failed()
    dropped = sum(sum(report.dropped.values()) for report in reports)
    print(
        f"{out}: {len(reports)} films, {sum(report.kept for report in reports)} clips kept, "
        f"{dropped} dropped; {len(failed)} films set aside"
    )
    for film in failed:
        print(f"  {film.name}: {film.reason}")
    return 0


def _cut(path: str, *, folder: ShotsFolder, threads: int) -> None:
    from animegamer_jax.data.films import process_film

    process_film(path, folder, threads=threads)


def annotate(
    shots: Annotated[str, tyro.conf.Positional],
    *,
    characters: str,
    model: str | None = None,
    people: str | None = None,
    endpoint: str = "http://localhost:8000/v1",
    key_variable: str = "OPENAI_API_KEY",
    parallel: int = 8,
    attempts: int = 3,
    timeout: float = 120.0,
    prompt_price: float | None = None,
    completion_price: float | None = None,
    machines: Annotated[beam.Machines, Unprefixed] = _HERE,
) -> int:
    """Say of every clip who does what, where and when: by a model, by people, or by both.

    The same command goes on after a stop: no answer is asked for twice.

    Args:
        shots: The shots folder.
        characters: TOML file of the characters: name, aliases, images.
        model: To ask, by its name at the endpoint.
        people: CSV or JSONL file of annotations that people wrote; taken over first.
        endpoint: OpenAI-compatible: the address before /chat/completions.
        key_variable: Environment variable that holds the endpoint's key; local servers need none.
        parallel: Questions at a time, in each worker.
        attempts: Questions about one clip while its answers are not valid.
        timeout: Of an answer, in seconds.
        prompt_price: Of a million tokens, to show what the answers cost.
        completion_price: Of a million tokens.
        machines: Where the work is done.
    """
    from animegamer_jax.data.annotate import Usage
    from animegamer_jax.data.annotations import read_report
    from animegamer_jax.data.cast import read_cast
    from animegamer_jax.data.people import annotate_by_people

    if model is None and people is None:
        raise UserError("expected --model NAME to ask, or --people FILE, or both; found neither")
    folder, cast = open_shots(shots), read_cast(characters)
    if people is not None:
        taken = annotate_by_people(folder, people, cast)
        print(f"{people}: {sum(taken.values())} annotations of {len(taken)} films")
    if model is None:
        return 0
    settings = AskSettings(
        model=model,
        endpoint=endpoint,
        key_variable=key_variable,
        workers=parallel,
        attempts=attempts,
        timeout=timeout,
        prompt_price=prompt_price,
        completion_price=completion_price,
    )
    every = folder.films()
    if not every:
        raise UserError(f"{shots}: no finished films: run `animegamer data films`")
    ask = functools.partial(_ask, folder=folder, characters=characters, settings=settings)
    with show_progress("films and clips") as tell:
        beam.for_each(
            every,
            ask,
            machines=machines,
            label="annotate",
            on_progress=tell,
        )
    reports = [report for film in every if (report := read_report(folder, film))]
    usage = Usage(
        requests=sum(report.requests for report in reports),
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        completion_tokens=sum(report.completion_tokens for report in reports),
    )
    cost = usage.cost(settings)
    print(
        f"{shots}: {sum(report.by_model for report in reports)} clips by {model}, "
        f"{sum(report.by_people for report in reports)} by people, "
        f"{sum(report.set_aside for report in reports)} set aside; over all runs "
        f"{usage.requests:,} requests, {usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens"
        + (f", cost {cost:,.2f}" if cost is not None else "")
    )
    return 0


def _ask(film: str, *, folder: ShotsFolder, characters: str, settings: AskSettings) -> None:
    from animegamer_jax.data.annotate import Annotator, annotate_film
    from animegamer_jax.data.cast import read_cast

    annotate_film(folder, film, Annotator(read_cast(characters), settings, on_progress=beam.tell))


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
    from animegamer_jax.data.games import write_film_games

    with show_progress("shards") as tell:

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
    data: Annotated[str, tyro.conf.Positional], *, out: Path | None = None, clips: int = 48
) -> int:
    """Write an HTML page that shows what is in a shots folder or a games set.

    Args:
        data: The shots folder or the games set.
        out: The page. Default: the folder's name with .html, beside it.
        clips: How many to show, evenly spread.
    """
    from animegamer_jax.data.show import write_page

    page = Path(data.rstrip("/") + ".html") if out is None else out
    write_page(data, page, clips=clips)
    print(f"{page}: written")
    return 0
