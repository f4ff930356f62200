"""`animegamer evaluate --make`: writes a benchmark of a drawn world, a grammar or a model."""

import functools
import os
from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, write_benchmark
from animegamer_jax.progress import print_line, print_status, show_progress
from animegamer_jax.vlm.options import ServerOptions

_SERVER = ServerOptions(parallel=4, timeout=300.0, max_tokens=6000)  # an answer is a whole game
_LISTED = 5  # games without a valid answer that are listed one by one


def make_command(
    what: Annotated[str, tyro.conf.arg(name="make")],
    *,
    out: Path,
    games: int | None = None,
    turns: int | None = None,
    seed: int = 0,
    characters: Path | None = None,
    ask_model: str | None = None,
    server: Annotated[ServerOptions, tyro.conf.arg(name="")] = _SERVER,
    cache: Path | None = None,
) -> int:
    """Write a benchmark.

    Args:
        what: `toy` for held-out games of the toy world (`toy-combinations`, `toy-phrasings` and
            `toy-own` for its other held-out splits), `paper` for 20 characters from a grammar, or
            a TOML file of a world, characters, motions and places, from which a language model
            writes games.
        out: JSON file to write; must not exist.
        games: Number of games. Default: 100 of the toy world, else 200.
        turns: Number of turns of each game. Default: 5 in the toy world, else 10.
        seed: Number of the first game.
        characters: Text file of names for `paper`, one per line. Default: 20 invented names.
        ask_model: Name of the language model at the endpoint, for a TOML file.
        server: The language model's server, for a TOML file.
        cache: Folder that keeps the answers. Default: OUT.answers.

    Returns:
        The exit status, 0.

    Raises:
        UserError: An option does not fit `what`, an input is wrong, or a file cannot be written.
    """
    if os.path.lexists(out):
        raise UserError(f"{out}: already exists: choose another file")
    if what != "paper" and characters is not None:
        raise UserError("--characters: expected with --make paper; a TOML file holds its own")
    from animegamer_jax.evaluate.worlds import WORLDS

    is_world = what.partition("-")[0] in WORLDS and not Path(what).exists()
    is_offline = what == "paper" or is_world
    if is_offline and ask_model is not None:
        raise UserError(
            f"--ask-model: --make {what} asks no model: give a TOML file of characters, motions "
            "and places"
        )
    if is_offline:
        _write(out, _offline(what, games=games, turns=turns, seed=seed, characters=characters))
        return 0
    from animegamer_jax.evaluate.benchmarks.spec import read_lists

    lists = read_lists(what)
    if ask_model is None:
        raise UserError(f"--make {what}: expected --ask-model NAME, the model that writes games")
    from animegamer_jax.evaluate.benchmarks.llm_writer import write_games
    from animegamer_jax.vlm.client import AskSettings

    settings = AskSettings(model=ask_model, **vars(server))
    with show_progress() as progress:
        written = write_games(
            lists,
            settings,
            cache=cache if cache is not None else out.with_name(f"{out.name}.answers"),
            num_games=200 if games is None else games,
            num_turns=10 if turns is None else turns,
            seed=seed,
            on_progress=functools.partial(progress, "games"),
            on_wait=print_status,
        )
    _write(out, written.benchmark)
    print_line(f"{written.usage}, {written.usage.cached} answers from the cache")
    if written.skipped:
        print_line(f"{len(written.skipped)} games skipped, without a valid answer:")
    for number, reason in list(written.skipped.items())[:_LISTED]:
        print_line(f"  game {number}: {reason}")
    if (more := len(written.skipped) - _LISTED) > 0:
        print_line(f"  and {more} more")
    return 0


def _offline(
    what: str, *, games: int | None, turns: int | None, seed: int, characters: Path | None
) -> Benchmark:
    from animegamer_jax.evaluate.worlds import find_world

    name, _, split = what.partition("-")
    if world := find_world(name):
        return world.make_benchmark(split or "test", num_games=games, num_turns=turns, seed=seed)
    from animegamer_jax.evaluate.benchmarks.paper import make_paper_benchmark
    from animegamer_jax.evaluate.benchmarks.spec import read_names
    from animegamer_jax.evaluate.benchmarks.vocabulary import CHARACTERS

    return make_paper_benchmark(
        characters=CHARACTERS if characters is None else read_names(characters),
        num_games=200 if games is None else games,
        num_turns=10 if turns is None else turns,
        seed=seed,
    )


def _write(out: Path, benchmark: Benchmark) -> None:
    from animegamer_jax.storage.paths import user_errors

    with user_errors(out.parent, "cannot be created", hint="choose another place"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_benchmark(out, benchmark)
    turns = len(benchmark.games) * benchmark.num_turns
    print_line(f"{out}: {len(benchmark.games)} games, {turns} turns")
