"""`animegamer data toyworld`: draws games and films of the toy world."""

from pathlib import Path

from animegamer_jax.errors import check_at_least
from animegamer_jax.progress import print_line, show_progress, track
from animegamer_jax.storage.locks import only_writer


def toyworld(
    *,
    out: Path,
    games: int = 2000,
    test_games: int | None = None,
    turns: int = 5,
    height: int = 96,
    width: int = 144,
    seed: int = 0,
    processes: int = 2,
    films: int = 0,
) -> int:
    """Draw games of the toy world: a dataset with a training split and four test splits.

    Args:
        out: Folder to write.
        games: Number of training games.
        test_games: Number of games in each test split (test, combinations, phrasings, own).
            Default: a tenth of the training games, from 4 to 100.
        turns: Number of turns in a game.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        seed: Seed of all games.
        processes: Number of drawing processes.
        films: Number of films (shots joined by cuts, with their true annotations) to write to
            OUT/films.

    Returns:
        The exit status, 0.

    Raises:
        UserError: A number is out of range, the folder exists, or the disk is full.
    """
    from animegamer_jax.toy.dataset import ToySize, write_toy_games

    if test_games is None:
        test_games = min(max(games // 10, 4), 100)
    size = ToySize(games=games, test_games=test_games, turns=turns, height=height, width=width)
    check_at_least("films", films, 0)
    with only_writer(out):
        with show_progress() as progress:
            info = write_toy_games(
                str(out), size, seed=seed, processes=processes, on_progress=progress
            )
        if films:
            _write_films(out / "films", films, size=(height, width), seed=seed)
    counts = ", ".join(f"{split} {count}" for split, count in info.splits.items())
    print_line(f"{out}: {sum(info.splits.values())} turns ({counts})")
    return 0


def _write_films(folder: Path, count: int, *, size: tuple[int, int], seed: int) -> None:
    from animegamer_jax.storage.paths import user_errors
    from animegamer_jax.toy.films import make_film, write_film

    hint = "free space; the games are complete"
    with user_errors(folder, "cannot be written", hint=hint), show_progress() as progress:
        folder.mkdir(exist_ok=True)
        for number in track(range(count), progress, "films", total=count):
            film = make_film(seed + number, height=size[0], width=size[1])
            write_film(folder / f"film_{number + 1:03d}.mp4", film)
