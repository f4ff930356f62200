"""`animegamer data`: what makes data sets."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from animegamer_jax.errors import UserError

_LINE_EVERY = 20.0  # seconds between lines where there is no terminal
_MOST_BARS = 8


def toyworld(
    *,
    out: Path,
    games: int = 2000,
    test_games: int = 100,
    turns: int = 5,
    height: int = 48,
    width: int = 72,
    seed: int = 0,
    processes: int = 2,
    films: int = 0,
) -> int:
    """Draw games of the toy world: a data set to train on, and three to test on.

    Args:
        out: The folder to write.
        games: Number of training games.
        test_games: Number of games of each held-out split (test, combinations, phrasings).
        turns: Turns of a game.
        height: Rows of a frame.
        width: Columns of a frame.
        seed: Of all games.
        processes: That draw at the same time.
        films: Number of films (shots joined by cuts, with their truth) to write to OUT/films.
    """
    from animegamer_jax.toy.dataset import ToySize, write_toy_games

    size = ToySize(games=games, test_games=test_games, turns=turns, height=height, width=width)
    if films < 0:
        raise UserError(f"films {films}: expected 0 or more")
    with show_progress("games") as tell:
        info = write_toy_games(str(out), size, seed=seed, processes=processes, on_progress=tell)
    if films:
        _write_films(out / "films", films, size=(height, width), seed=seed)
    counts = ", ".join(f"{split} {count}" for split, count in info.splits.items())
    print(f"{out}: {sum(info.splits.values())} turns ({counts})")
    return 0


def _write_films(folder: Path, count: int, *, size: tuple[int, int], seed: int) -> None:
    from animegamer_jax.storage.paths import telling
    from animegamer_jax.toy.films import make_film, write_film

    mend = "free space; the games are whole"
    with telling(folder, "cannot be written", mend=mend), show_progress("films") as tell:
        folder.mkdir(exist_ok=True)
        for number in range(count):
            film = make_film(seed + number, height=size[0], width=size[1])
            write_film(folder / f"film_{number + 1:03d}.mp4", film)
            tell("films", number + 1, count)


def features(
    *,
    model: str,
    data: str,
    out: str,
    frame: Literal["first", "random"] = "first",
    batch: int = 16,
    shard: int = 256,
    size: Literal["toy", "full"] = "toy",
    coordinator: str | None = None,
    hosts: int | None = None,
    host: int | None = None,
    connect_seconds: int = 300,
) -> int:
    """Compute what the networks make of a games set: texts, frames and clips.

    The same command goes on after a stop. Given on several hosts, it shares the work out.

    Args:
        model: The bundle with T5, CLIP and the VAE.
        data: The games set.
        out: The folder to write: a path that all hosts share, or gs://.
        frame: The frame of each clip that CLIP sees; the paper's is the first.
        batch: Turns at a time on a host, a multiple of its devices.
        shard: Turns of a file; a stop loses no more.
        size: Where the bundle has no shot encoder yet, motion texts have this size's tokens.
        coordinator: HOST:PORT of host 0, where JAX does not find the hosts by itself (it does on
            TPU machines and under Slurm).
        hosts: How many there are, with --coordinator.
        host: The number of this one, with --coordinator.
        connect_seconds: To wait for the other hosts.
    """
    from animegamer_jax.distributed import (
        check_agreement,
        join_hosts,
        together,
    )

    join_hosts(coordinator=coordinator, hosts=hosts, host=host, seconds=connect_seconds)
    import jax

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.configs import SIZES
    from animegamer_jax.data.datasets import open_games
    from animegamer_jax.data.features import write_features

    with together():
        bundle, games = Bundle.open(model), open_games(data)
        encoder = bundle.config.encoder or SIZES[size]().encoder
        assert encoder is not None  # each named size has one
    about = {"model": model, "data": data, "out": out, "frame": frame, "shard": shard}
    check_agreement({**about, "size": size})
    with show_progress("turns") as tell:
        info = write_features(
            out,
            bundle=bundle,
            games=games,
            num_text_tokens=encoder.num_text_tokens,
            frame=frame,
            batch_size=batch,
            shard_size=shard,
            on_progress=tell,
        )
    if jax.process_index() == 0:
        counts = ", ".join(f"{split} {count}" for split, count in info.splits.items())
        print(f"{out}: features of {sum(info.splits.values())} turns ({counts})")
    return 0


@contextlib.contextmanager
def show_progress(
    unit: str, *, note: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[str, int, int], None]]:
    """Tells how far each split is, with a note: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        name = TextColumn("{task.description}", markup=False)  # films have brackets in their names
        told = TextColumn(unit + "{task.fields[note]}")
        columns = (name, BarColumn(), MofNCompleteColumn(), told, TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            tasks = {}

            def draw(split: str, done: int, total: int) -> None:
                if split not in tasks:
                    if len(tasks) == _MOST_BARS:  # the first stays
                        bar.remove_task(tasks.pop(list(tasks)[1]))
                    tasks[split] = bar.add_task(split, total=total, note="")
                bar.update(tasks[split], completed=done, note=note())

            yield draw
        return
    last = [time.monotonic()]

    def say(split: str, done: int, total: int) -> None:
        if done == total or time.monotonic() - last[0] > _LINE_EVERY:
            last[0] = time.monotonic()
            print(f"{split}: {done} of {total} {unit}{note()}", file=sys.stderr, flush=True)

    yield say
