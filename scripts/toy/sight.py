"""Tests whether a model looks at what it showed, on held-out games of the toy world.

    python scripts/toy/sight.py MODEL [--games 100] [--turns 5]

Every turn is played three times: with its own past shots, with those of another game of as many
turns, and with zeros in their place. The instructions and states of the past stay the game's own.
What the clips show is read by the world's network. A detail that an earlier turn showed is *kept*
if it is read as there. In the exchange it *goes with the pictures* if it is read as in the other
game's clip of that turn, and *with the words* if as in the own game's; only details that differ
between the two count, and only those that are read as one of them: the table says how many are.
The column "another game's" is chance: how often another game's own clip of the turn is read so.
The table is Markdown.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from run_script import run_script

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.formulas import estimate
from animegamer_jax.game.player import Player
from animegamer_jax.game.rollout import Window
from animegamer_jax.progress import show_progress
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scoring.attributes import DETAILS
from animegamer_jax.toy.scoring.reader import load_reader, read_clips

OWN, EXCHANGED, ABSENT = "own", "exchanged", "absent"


class Readings(NamedTuple):
    """What the clips of every turn show, by treatment of the past shots and by attribute."""

    own: Mapping[str, np.ndarray]
    exchanged: Mapping[str, np.ndarray]
    absent: Mapping[str, np.ndarray]


def with_other_shots(window: Window) -> Window:
    """Returns the window with the past shots of the game before."""
    return window._replace(representations=jnp.roll(window.representations, 1, axis=0))


def without_shots(window: Window) -> Window:
    """Returns the window with zeros in place of the past shots."""
    return window._replace(representations=jnp.zeros_like(window.representations))


def play(player: Player, benchmark: Benchmark, *, batch_size: int) -> Readings:
    """Plays all games with each treatment, some side by side, and reads every clip."""
    reader = load_reader()
    found: list[list[Mapping[str, np.ndarray]]] = []
    games, turns = benchmark.games, benchmark.num_turns
    with show_progress() as progress:
        for start in range(0, len(games), batch_size):
            batch = games[start : start + batch_size]
            window, seeds = player.start(len(batch)), [game.seed for game in batch]
            for turn in range(turns):
                asked = [game.turns[turn].instruction for game in batch]
                treated = (window, with_other_shots(window), without_shots(window))
                outputs = [
                    player.play_turn(one, asked, seeds=seeds, turn=turn + 1) for one in treated
                ]
                window = outputs[0][0]
                found.append([read_clips(reader, output.frames) for _, output in outputs])
                progress("turns", start * turns + (turn + 1) * len(batch), len(games) * turns)
    return Readings(*(_stack(found, treatment, turns) for treatment in range(3)))


def _stack(
    found: Sequence[Sequence[Mapping[str, np.ndarray]]], treatment: int, turns: int
) -> dict[str, np.ndarray]:
    batches = [found[i : i + turns] for i in range(0, len(found), turns)]
    return {
        name: np.concatenate(
            [np.stack([one[treatment][name] for one in batch], axis=1) for batch in batches]
        )
        for name in DETAILS
    }


def lines(readings: Readings, benchmark: Benchmark, *, batch_size: int) -> Iterator[str]:
    """Returns the table: a row per attribute, with intervals over games."""
    truth = WORLD.details(benchmark)
    games, turns = len(benchmark.games), benchmark.num_turns
    yield "| detail | kept | without past shots | another game's | goes with the pictures |"
    yield "|---|---|---|---|---|"
    others = np.concatenate(
        [np.roll(np.arange(games)[i : i + batch_size], 1) for i in range(0, games, batch_size)]
    )
    for name in DETAILS:
        first = np.maximum(truth[name].first, 0)
        again = (truth[name].first >= 0) & (truth[name].first < np.arange(turns))
        shown = np.take_along_axis(readings.own[name], first, axis=1)
        other = np.take_along_axis(readings.own[name][others], first, axis=1)
        kept = readings.own[name] == shown
        lost = readings.absent[name] == shown
        chance = readings.own[name][others] == shown
        differ = again & (shown != other)
        exchanged = readings.exchanged[name]
        decided = differ & ((exchanged == shown) | (exchanged == other))
        cells = (
            _cell(kept, again),
            _cell(lost, again),
            _cell(chance, again),
            f"{_cell(exchanged == other, decided)}, {decided.sum()} of {differ.sum()}",
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(right: np.ndarray, where: np.ndarray) -> str:
    found = estimate(right.astype(np.float32), where=where)
    return "none" if found is None else f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def main(
    model: str = "toy", /, *, games: int = 100, turns: int = 5, seed: int = 0, batch_size: int = 10
) -> None:
    """Print a table with a row per untold detail.

    Args:
        model: Model folder, or `toy` for the embedded model.
        games: Number of held-out games.
        turns: Number of turns of each game.
        seed: Number of the first game.
        batch_size: Number of games played side by side, whose past shots are exchanged.
    """
    if games < 2 or turns < 2 or batch_size < 2 or games % batch_size == 1:
        raise UserError(
            f"--games {games}, --turns {turns}, --batch-size {batch_size}: expected at least 2 "
            "games, 2 turns and 2 games in every batch, the last included"
        )
    benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=turns, seed=seed)
    player = Player.from_bundle(Bundle.open(model))
    readings = play(player, benchmark, batch_size=batch_size)
    print("\n".join(lines(readings, benchmark, batch_size=batch_size)))


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="sight.py")
