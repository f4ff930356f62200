"""How many denoising steps suit a toy model, and what motion its decoder should be told of.

    python scripts/toy/steps.py MODEL --steps 50 10 5 4 [--values 0.6 3 8.5 19 36]

The language model plays held-out games once; their shot representations are then drawn with each
number of steps, and the clips' motion and likeness measured. The table is Markdown. The games are
others than those that `scripts/toy/score.py` scores, so that what is chosen by them is not judged
by them.
"""

import functools
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.game.player import Player
from animegamer_jax.media.motion import levels_of, measure_motion
from animegamer_jax.progress import show_progress
from animegamer_jax.toy.scoring.decoder_samples import sample_shots
from animegamer_jax.toy.scoring.scores import play_games, psnr_by_game
from animegamer_jax.toy.scoring.truth import Truth, make_truth
from animegamer_jax.toy.world import LEVELS, make_game

_TURNS = 5


def describe(clips: np.ndarray, truth: Truth) -> Iterator[str]:
    """The cells of a row: of all clips, then a level's median value and its share of right ones."""
    values, expected = measure_motion(clips.reshape(-1, *clips.shape[2:])), truth.levels.ravel()
    levels = levels_of(values)
    right = formulas.motion_accuracy(levels, expected)
    yield f"{right.mean():.3f}"
    yield f"{formulas.motion_error(levels, expected).mean():.3f}"
    yield f"{psnr_by_game(clips, truth.clips).mean():.2f}"
    for level in LEVELS:
        here = expected == level
        yield f"{np.median(values[here]):.1f} ({right[here].mean():.2f})" if here.any() else "none"


def main(
    model: str = "toy",
    /,
    *,
    steps: Sequence[int] = (50, 10, 8, 6, 5, 4),
    values: Sequence[float] | None = None,
    games: int = 40,
    seed: int = 1000,
) -> None:
    """Print a table, a row a number of steps.

    Args:
        model: A model folder, or `toy` for the embedded one.
        steps: Numbers of denoising steps.
        values: Motion values that the decoder is told for the five levels. Default: the model's.
        games: Held-out games.
        seed: Number of the first.
    """
    if values is not None and len(values) != len(LEVELS):
        raise UserError(f"--values: expected {len(LEVELS)} numbers, found {len(values)}")
    bundle = Bundle.open(model_folder(model))
    player = Player.from_bundle(bundle, steps=1)
    drawn = [make_game(seed + i, num_turns=_TURNS, split="test") for i in range(games)]
    truth = make_truth(
        drawn, height=player.height, width=player.width, num_frames=player.num_frames
    )
    seeds = range(seed, seed + games)
    with show_progress() as progress:
        on_turn = functools.partial(progress, "turns")
        played = play_games(player, drawn, seeds=seeds, on_turn=on_turn)
    told = bundle.protocol.motion_values if values is None else tuple(values)
    print(f"{bundle.name}, games {seed} to {seed + games - 1}, told of motion {told}\n")
    columns = ("ACC-F", "MAE-F", "PSNR", *(f"level {level}" for level in LEVELS), "s a clip")
    print(f"| denoising steps | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 1) + "|")
    for count in (*steps, None):
        began = time.perf_counter()
        clips = truth.clips
        if count is not None:
            clips = sample_shots(
                bundle,
                truth,
                representations=played.representations,
                seeds=seeds,
                steps=count,
                motion_values=told,
            )
        seconds = (time.perf_counter() - began) / truth.levels.size
        cells = " | ".join(describe(clips, truth))
        name, took = ("true clips", "") if count is None else (count, f"{seconds:.2f}")
        print(f"| {name} | {cells} | {took} |", flush=True)


if __name__ == "__main__":
    import tyro

    keep_compiled_programs()
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"toy_steps: {error}", file=sys.stderr)
        raise SystemExit(2) from None
