"""`animegamer evaluate --make`: writes a benchmark of the toy world, of a grammar or of a model."""

import functools
import os
from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import (
    SHIPPED,
    Benchmark,
    write_benchmark,
)
from animegamer_jax.progress import print_status, show_progress

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
    endpoint: str = "http://localhost:8000/v1",
    key_variable: str = "OPENAI_API_KEY",
    parallel: int = 4,
    attempts: int = 3,
    timeout: float = 300.0,
    max_tokens: int = 6000,
    temperature: float | None = 0.0,
    prompt_price: float | None = None,
    completion_price: float | None = None,
    cache: Path | None = None,
) -> int:
    """Write a benchmark.

    Args:
        what: `toy` (the toy world's held-out test games), `paper` (20 characters, 200 games of 10
            turns, from a grammar), or a TOML file of world, characters, motions and places of
            which a language model makes games.
        out: The file to write, JSON; must be free.
        games: How many. Default: 100 of the toy world, else 200.
        turns: Of each game. Default: 5 in the toy world, else 10.
        seed: Number of the first game.
        characters: With `paper`: a text file of names, one a line, instead of our own.
        ask_model: With a TOML file: name of the model at the endpoint.
        endpoint: Address of an OpenAI-compatible server, without /chat/completions.
        key_variable: Environment variable that holds the API key; local servers need none.
        parallel: Number of simultaneous requests.
        attempts: Maximum number of questions for one game until an answer is valid.
        timeout: Seconds to wait for an answer.
        max_tokens: Maximum number of tokens of an answer, which is a whole game.
        temperature: Sampling temperature. None: not sent, for models that accept none.
        prompt_price: Price of a million prompt tokens, in any currency. None: not counted.
        completion_price: Price of a million completion tokens. None: not counted.
        cache: Folder of the answers. Default: OUT with .answers appended.

    Returns:
        The exit status, 0.

    Raises:
        UserError: an option that does not go with `what`, or as the makers, the reader of lists
            and the disk.
    """
    if os.path.lexists(out):
        raise UserError(f"{out}: already there: choose another file")
    if what != "paper" and characters is not None:
        raise UserError("--characters: expected with --make paper; a TOML file holds its own")
    if what in SHIPPED and ask_model is not None:
        raise UserError(
            f"--ask-model: --make {what} asks no model: give a TOML file of characters, motions "
            "and places"
        )
    if what in SHIPPED:
        _write(out, _offline(what, games=games, turns=turns, seed=seed, characters=characters))
        return 0
    from animegamer_jax.evaluate.benchmarks.spec import read_lists

    lists = read_lists(what)
    if ask_model is None:
        raise UserError(f"--make {what}: expected --ask-model NAME, which makes games of the lists")
    from animegamer_jax.evaluate.benchmarks.llm_writer import write_games
    from animegamer_jax.vlm.client import AskSettings

    settings = AskSettings(
        model=ask_model,
        endpoint=endpoint,
        key_variable=key_variable,
        parallel=parallel,
        attempts=attempts,
        timeout=timeout,
        max_tokens=max_tokens,
        temperature=temperature,
        prompt_price=prompt_price,
        completion_price=completion_price,
    )
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
    print(f"{written.usage}, {written.usage.cached} answers from the cache")
    if written.skipped:
        print(f"{len(written.skipped)} games skipped, without a valid answer:")
    for game in written.skipped[:_LISTED]:
        print(f"  game {game.number}: {game.reason}".encode("ascii", "backslashreplace").decode())
    if more := len(written.skipped[_LISTED:]):
        print(f"  and {more} more")
    return 0


def _offline(
    what: str, *, games: int | None, turns: int | None, seed: int, characters: Path | None
) -> Benchmark:
    if what == "toy":
        from animegamer_jax.toy.scoring.benchmark import make_toy_benchmark

        return make_toy_benchmark(
            num_games=100 if games is None else games,
            num_turns=5 if turns is None else turns,
            seed=seed,
        )
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
    from animegamer_jax.storage.paths import telling

    with telling(out.parent, "cannot be made", mend="choose another place"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_benchmark(out, benchmark)
    turns = len(benchmark.games) * benchmark.num_turns
    print(f"{out}: {len(benchmark.games)} games, {turns} turns")
