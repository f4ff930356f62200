"""Compares numbers of denoising steps, and motion values for the decoder, on a toy model.

    python scripts/toy/steps.py MODEL --steps 50 10 5 4 [--values 0.6 3 8.5 19 36]

The language model plays held-out games once, with its own predictions as history. They are then
decoded with each number of steps, and the clips' motion and PSNR are measured. The table is
Markdown. The games are not those of the benchmark `toy`, so that what is chosen here is not scored
on the same games.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from run_script import run_script

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import clip_size
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.game.player import Player
from animegamer_jax.media.motion import FLICKER, measure_motion, motion_level
from animegamer_jax.progress import show_progress
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import LEVELS, MOTION_EDGES
from animegamer_jax.toy.scoring.decoder_samples import sample_shots


def predict(bundle: Bundle, benchmark: Benchmark) -> np.ndarray:
    """Plays all games side by side and returns the predicted shot representations [g, t, k, r].

    The history is predicted whatever the protocol says: a shown one would replace their image
    tokens by those of a clip, here of one denoising step.
    """
    player = Player.from_bundle(bundle, steps=1, history="predicted")
    games, found = benchmark.games, []
    window, seeds = player.start(len(games)), [game.seed for game in games]
    with show_progress() as progress:
        for turn in range(benchmark.num_turns):
            instructions = [game.turns[turn].instruction for game in games]
            window, output = player.play_turn(window, instructions, seeds=seeds, turn=turn + 1)
            found.append(output.representation.astype(np.float32))
            progress("turns", turn + 1, benchmark.num_turns)
    return np.stack(found, axis=1)


def describe(clips: np.ndarray, true_clips: np.ndarray, expected: np.ndarray) -> Iterator[str]:
    """Returns a row's cells: scores of all clips, then each level's median value and accuracy.

    Args:
        clips: Clips [g, t, f, h, w, 3].
        true_clips: The true clips.
        expected: Their motion levels [g, t].
    """
    values = measure_motion(clips.reshape(-1, *clips.shape[2:]), noise=FLICKER)
    levels = np.array([motion_level(value, edges=MOTION_EDGES) for value in values.tolist()])
    expected = expected.ravel()
    right = formulas.accuracy(levels, expected)
    pairs = zip(clips, true_clips, strict=True)  # a game at a time: float32 needs the memory
    yield f"{right.mean():.3f}"
    yield f"{formulas.error(levels, expected).mean():.3f}"
    yield f"{np.mean([formulas.psnr(found, true) for found, true in pairs]):.2f}"
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
    """Print a table with a row per number of steps.

    Args:
        model: Model folder, or `toy` for the embedded model.
        steps: Numbers of denoising steps.
        values: The decoder's motion values for the five levels. Default: the model's.
        games: Number of held-out games.
        seed: Number of the first game.
    """
    if values is not None and len(values) != len(LEVELS):
        raise UserError(f"--values: expected {len(LEVELS)} numbers, found {len(values)}")
    bundle = Bundle.open(model)
    benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
    dit, vae = bundle.config.dit, bundle.config.vae
    assert dit is not None
    assert vae is not None
    size = FrameSize(*clip_size(dit, vae))
    true_clips = WORLD.true_clips(benchmark, size)
    levels = np.array([[turn.motion_level for turn in game.turns] for game in benchmark.games])
    representations = predict(bundle, benchmark)
    inputs = bundle.protocol.motion_values if values is None else tuple(values)
    print(f"{bundle.name}, games {seed} to {seed + games - 1}, motion values {inputs}\n")
    columns = ("ACC-F", "MAE-F", "PSNR", *(f"level {level}" for level in LEVELS), "s a clip")
    print(f"| denoising steps | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 1) + "|")
    for count in (*steps, None):
        began = time.perf_counter()
        clips = true_clips
        if count is not None:
            clips = sample_shots(
                bundle,
                representations=representations,
                levels=levels,
                seeds=range(seed, seed + games),
                steps=count,
                motion_values=inputs,
                predicted=True,
            )
        seconds = (time.perf_counter() - began) / levels.size
        cells = " | ".join(describe(clips, true_clips, levels))
        name, took = ("true clips", "") if count is None else (count, f"{seconds:.2f}")
        print(f"| {name} | {cells} | {took} |", flush=True)


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="steps")
