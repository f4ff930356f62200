"""Compares numbers of denoising steps, students and motion values on a toy model.

    python scripts/toy/steps.py MODEL --steps 50 10 5 4 [--values 0.6 3 8.5 19 36]
    python scripts/toy/steps.py MODEL --steps 50 6 4 --students out/distill-4/model

The language model plays held-out games once, with its own predictions as history. They are then
decoded with each number of steps, and by students in their own steps. The table is Markdown: motion
and PSNR of the clips; the *distance* of their distribution from that of true clips (Fréchet
distance of the mean of CLIP's embeddings of a clip's frames, times 1,000); their *diversity* (root
mean square difference of the clips of two seeds, in grey levels). The games are not those of the
benchmark `toy`, so that what is chosen here is not scored on the same games.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from run_script import run_script

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import clip_size
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.evaluate.metrics.suite import load_clip
from animegamer_jax.evaluate.metrics.video_distance import frechet_distance
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.game.player import Player
from animegamer_jax.media.motion import FLICKER, measure_motion, motion_level
from animegamer_jax.progress import show_progress
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scene import LEVELS, MOTION_EDGES
from animegamer_jax.toy.scoring.decoder_samples import sample_shots

Embed = Callable[[np.ndarray], np.ndarray]


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


class Comparison:
    """Describes clips of the benchmark's turns next to the true clips.

    Args:
        true_clips: The true clips [g, t, f, h, w, 3].
        levels: Their motion levels [g, t].
        embed: Returns CLIP's embeddings [n, f, e] of clips [n, f, h, w, 3].
    """

    columns = ("ACC-F", "MAE-F", "PSNR", "distance", "diversity", *(f"level {n}" for n in LEVELS))

    def __init__(self, true_clips: np.ndarray, levels: np.ndarray, embed: Embed):
        self._true, self._levels, self._embed = true_clips, levels, embed
        self._true_features = self._features(true_clips)

    def _features(self, clips: np.ndarray) -> np.ndarray:
        return self._embed(clips.reshape(-1, *clips.shape[2:])).mean(1)

    def describe(self, clips: np.ndarray, others: np.ndarray | None) -> Iterator[str]:
        """Returns a row's cells: scores of all clips, then each level's median value and accuracy.

        Args:
            clips: Clips [g, t, f, h, w, 3].
            others: The clips of other seeds; None: true clips, which have none.
        """
        values = measure_motion(clips.reshape(-1, *clips.shape[2:]), noise=FLICKER)
        levels = np.array([motion_level(value, edges=MOTION_EDGES) for value in values.tolist()])
        expected = self._levels.ravel()
        right = formulas.accuracy(levels, expected)
        estimate = formulas.estimate(right.reshape(self._levels.shape))
        assert estimate is not None
        yield f"{estimate.mean:.3f} ({estimate.low:.2f} to {estimate.high:.2f})"
        yield f"{formulas.error(levels, expected).mean():.3f}"
        if others is None:
            yield from ("", "", "")
        else:  # a game at a time: float32 needs the memory
            pairs = zip(clips, self._true, strict=True)
            yield f"{np.mean([formulas.psnr(found, true) for found, true in pairs]):.2f}"
            features = self._features(clips)
            yield f"{1000 * frechet_distance(features, self._true_features, least=2):.0f}"
            pairs = zip(clips, others, strict=True)
            squares = [np.square(a.astype(np.float32) - b).mean() for a, b in pairs]
            yield f"{np.sqrt(np.mean(squares)):.1f}"
        for level in LEVELS:
            here = expected == level
            found = values[here]
            yield f"{np.median(found):.1f} ({right[here].mean():.2f})" if here.any() else "none"


def main(
    model: str = "toy",
    /,
    *,
    steps: Sequence[int] = (50, 10, 8, 6, 5, 4),
    students: Sequence[str] = (),
    values: Sequence[float] | None = None,
    games: int = 40,
    seed: int = 1000,
) -> None:
    """Print a table with a row per number of steps.

    Args:
        model: Model folder, or `toy` for the embedded model.
        steps: Numbers of denoising steps.
        students: Model folders of students, as `animegamer train distill` writes them.
        values: The decoder's motion values for the five levels. Default: the model's.
        games: Number of held-out games.
        seed: Number of the first game.
    """
    if values is not None and len(values) != len(LEVELS):
        raise UserError(f"--values: expected {len(LEVELS)} numbers, found {len(values)}")
    bundle = Bundle.open(model)
    teacher = [(f"{count} steps", bundle, count) for count in steps]
    systems = [*teacher, *map(open_student, students)]
    benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=5, seed=seed)
    dit, vae = bundle.config.dit, bundle.config.vae
    assert dit is not None
    assert vae is not None
    true_clips = WORLD.true_clips(benchmark, FrameSize(*clip_size(dit, vae)))
    levels = np.array([[turn.motion_level for turn in game.turns] for game in benchmark.games])
    comparison = Comparison(true_clips, levels, load_clip(model).embedder.frames)
    representations = predict(bundle, benchmark)
    inputs = bundle.protocol.motion_values if values is None else tuple(values)

    def sample(bundle: Bundle, count: int, *, first: int) -> np.ndarray:
        return sample_shots(
            bundle,
            representations=representations,
            levels=levels,
            seeds=range(first, first + games),
            steps=count,
            motion_values=inputs,
            predicted=True,
        )

    print(f"{bundle.name}, games {seed} to {seed + games - 1}, motion values {inputs}\n")
    columns = *Comparison.columns, "s a clip"
    print(f"| | {' | '.join(columns)} |\n" + "|---" * (len(columns) + 1) + "|")
    for name, system, count in systems:
        others = sample(system, count, first=seed + games)  # compiles, too
        began = time.perf_counter()
        clips = sample(system, count, first=seed)
        seconds = (time.perf_counter() - began) / levels.size
        cells = " | ".join(comparison.describe(clips, others))
        print(f"| {name} | {cells} | {seconds:.2f} |", flush=True)
    print(f"| true clips | {' | '.join(comparison.describe(true_clips, None))} | |", flush=True)


def open_student(model: str) -> tuple[str, Bundle, int]:
    """Returns a student's name, its bundle and its number of steps.

    Raises:
        UserError: It is none.
    """
    bundle = Bundle.open(model)
    if not (count := len(bundle.protocol.student_timesteps)):
        raise UserError(f"--students {model}: expected a model of animegamer train distill")
    return f"student of {count}", bundle, count


if __name__ == "__main__":
    keep_compiled_programs()
    run_script(main, name="steps")
