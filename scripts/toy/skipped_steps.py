"""Compares clips with skipped denoising steps with those of all steps, on a toy model.

    python scripts/toy/skipped_steps.py MODEL --steps 50 --times-fewer 2 3

The language model plays held-out games once. Their shot representations are then decoded with all
steps, and with those that `animegamer calibrate` chooses on three instructions of the demo game.
The table is Markdown: PSNR and SSIM are against the clips with all steps, from the same noise.
"""

import time
from collections.abc import Sequence

import cv2
import numpy as np
from run_script import run_script
from steps import predict

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.game.instructions import parse_instructions
from animegamer_jax.game.player import Player
from animegamer_jax.game.skipped_steps import (
    SkippedSteps,
    choose_rows,
    count_evaluations,
    measure_errors,
    scales,
)
from animegamer_jax.media.motion import FLICKER, measure_motion, motion_level
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import MOTION_EDGES
from animegamer_jax.toy.scoring.decoder_samples import sample_shots

_CALIBRATED_ON = 3  # instructions of the demo game


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the structural similarity of two frames (Wang et al., 2004; sigma 1.5)."""

    def blur(x: np.ndarray) -> np.ndarray:
        return cv2.GaussianBlur(x, (11, 11), 1.5)

    a, b = a.astype(np.float64), b.astype(np.float64)
    mean_a, mean_b = blur(a), blur(b)
    variances = blur(a * a) - mean_a**2 + blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    top = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((top / ((mean_a**2 + mean_b**2 + c1) * (variances + c2))).mean())


def main(
    model: str = "toy",
    /,
    *,
    steps: int = 50,
    times_fewer: Sequence[float] = (2.0, 3.0),
    games: int = 20,
    seed: int = 1000,
) -> None:
    """Print a table with a row per choice of steps.

    Args:
        model: Model folder, or `toy` for the embedded model.
        steps: Denoising steps.
        times_fewer: How many times fewer evaluations.
        games: Number of held-out games.
        seed: Number of the first game.
    """
    bundle = Bundle.open(model)
    player = Player.from_bundle(bundle, steps=steps)
    benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
    expected = np.array([[turn.motion_level for turn in game.turns] for game in benchmark.games])
    file = ASSETS / "instructions" / "toy.txt"
    lines = [line.text for line in parse_instructions(file.read_bytes(), file.name)]
    errors = measure_errors(player, lines[:_CALIBRATED_ON])
    guided = player.num_rows == 2
    guidance = scales(player) if guided else None
    representations = predict(bundle, benchmark)

    def clips_of(skipped: SkippedSteps | None) -> tuple[np.ndarray, float]:
        began = time.process_time()
        clips = sample_shots(
            bundle,
            representations=representations,
            levels=expected,
            seeds=range(seed, seed + games),
            steps=steps,
            skipped=skipped,
            predicted=True,
        )
        return clips, (time.process_time() - began) / expected.size

    print(f"{bundle.name}, {steps} steps, games {seed} to {seed + games - 1}\n")
    print("| evaluations of a clip | times fewer | PSNR, dB | SSIM | ACC-F | CPU s a clip |")
    print("|---|---|---|---|---|---|")
    dense, seconds = clips_of(None)
    full = count_evaluations(player)
    print(f"| {full} | 1 | | | {right(dense, expected):.3f} | {seconds:.2f} |", flush=True)
    for fewer in times_fewer:
        rows, _ = choose_rows(errors, guidance=guidance, most=int(full / fewer))
        skipped = SkippedSteps(
            model=bundle.name,
            digest="",
            steps=steps,
            guided=guided,
            rows=rows,
            error=0.0,
            dense=full,
        )
        clips, seconds = clips_of(skipped)
        pairs = list(zip(*(x.reshape(-1, *x.shape[2:]) for x in (clips, dense)), strict=True))
        ratio = np.mean([float(formulas.psnr(*pair)) for pair in pairs])
        alike = np.mean([similarity(a, b) for pair in pairs for a, b in zip(*pair, strict=True)])
        print(
            f"| {skipped.evaluations} | {skipped.speedup:.2f} | {ratio:.1f} | {alike:.3f} | "
            f"{right(clips, expected):.3f} | {seconds:.2f} |",
            flush=True,
        )
        print(f"rows of {fewer:g}: {' '.join(map(str, rows))}", flush=True)


def right(clips: np.ndarray, expected: np.ndarray) -> float:
    """Returns the share of clips whose motion level is the expected one (ACC-F)."""
    values = measure_motion(clips.reshape(-1, *clips.shape[2:]), noise=FLICKER)
    levels = np.array([motion_level(value, edges=MOTION_EDGES) for value in values.tolist()])
    return float(formulas.accuracy(levels, expected.ravel()).mean())


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="skipped_steps")
