"""Trains and scores the paper's ablations on the toy world, and writes a table of them.

The rows go to a page of the docs and to a file that reports of `animegamer evaluate` show.

    python scripts/toy/ablations.py out/toy [--steps 1200]

This needs what `scripts/toy/train.sh` wrote. Each row is trained as the model itself was, with the
recipe in its checkpoints, except for the part that it lacks. `--steps` sets the number of steps of
every row's decoder, including the first, for machines without an hour for each. Training runs and
played games are kept in `out/toy/ablations`, and made again only if their inputs changed.
"""

import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from etils import epath
from run_script import run_script
from stages import (
    command,
    deviations,
    new_fields,
    read_run_config,
    recipe_options,
    xla_flags,
)

from animegamer_jax import cli
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.configs import clip_size
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, write_benchmark
from animegamer_jax.evaluate.evaluation import EvaluationRun
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate_known
from animegamer_jax.evaluate.metrics.registry import CONTEXT
from animegamer_jax.evaluate.metrics.suite import (
    MetricResources,
    MetricSuite,
    load_clip,
    make_suite,
)
from animegamer_jax.evaluate.options import JudgeOptions, MetricFiles, Options
from animegamer_jax.evaluate.play_games import score_clips
from animegamer_jax.evaluate.report.ablations import AblationRow, Ablations, Score, write_ablations
from animegamer_jax.evaluate.results import read_results
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.game.saved.turns import History
from animegamer_jax.storage.files import write_json, write_whole
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scoring.classifier import load_classifier
from animegamer_jax.toy.scoring.decoder_samples import sample_shots, true_representations

FILE = ASSETS / "benchmarks" / "toy-ablations.json"
_TURNS = 5


class Row(NamedTuple):
    """One line of the table.

    `stages` are trained for it, each from the one before, the first from `start`; `data` is the
    name of the features set, `frame` the one of each clip that its representation shows. Games are
    played with `window` and `history`; None: as the model does.
    """

    name: str
    paper: Mapping[str, float]
    start: str
    stages: tuple[tuple[str, tuple[str, ...]], ...] = ()
    data: str = "features"
    frame: Literal["first", "random"] = "first"
    window: int | None = None
    history: History | None = None


_NO_WARMUP = ("--steps", "1", "--optimizer.learning-rate", "0", "--optimizer.warmup-steps", "0")
_RANDOM = "ablations/features-random"
DECODER = (
    Row("decoder alone", {"CLIP-I": 0.8672, "ACC-F": 0.729, "MAE-F": 0.403}, "decoder"),
    Row(
        "random instead of first frame",
        {"CLIP-I": 0.8446, "ACC-F": 0.474, "MAE-F": 0.562},
        "dit",
        (("warmup", ()), ("pictures", ()), ("decoder", ())),
        data=_RANDOM,
        frame="random",
    ),
    Row(
        "no warm-up",
        {"CLIP-I": 0.8306, "ACC-F": 0.703, "MAE-F": 0.458},
        "dit",
        (("warmup", _NO_WARMUP), ("pictures", ()), ("decoder", ())),
    ),
    Row(
        "no motion input",
        {"CLIP-I": 0.8533, "ACC-F": 0.182, "MAE-F": 1.219},
        "pictures",
        (("decoder", ("--motion", "none")),),
    ),
)
GAME = (
    Row("whole game", {"CLIP-I": 0.7856, "ACC-F": 0.672}, "picture"),
    Row("no decoder of pictures", {}, "adapt"),
    Row("no adaptation", {"CLIP-I": 0.6831, "ACC-F": 0.365, "MAE-F": 0.847}, "mllm"),
    Row(
        "no pictures in the history",
        {},
        "captions",
        (("mllm", ("--history-swap", "1")), ("adapt", ()), ("picture", ())),
    ),
    Row("predicted history", {}, "picture", history="predicted"),
    Row("window of 1", {}, "picture", window=1),
)
_METRICS = ("CLIP-I", "ACC-F", "MAE-F", "character", "place", "time", "details kept")
_MADE = "ablation.json"  # in the folder of a stage: its inputs


def decoder_rows(steps: int | None) -> tuple[Row, ...]:
    """Returns the rows of the decoder alone; with `steps` the first is trained like the others.

    Args:
        steps: Number of steps of the decoder's training; None: the recipe's.
    """
    if steps is None:
        return DECODER
    options = "--steps", str(steps)
    first = DECODER[0]._replace(start="pictures", stages=(("decoder", ()),))
    rows = []
    for row in (first, *DECODER[1:]):
        stages = [(name, (*o, *options) if name == "decoder" else o) for name, o in row.stages]
        rows.append(row._replace(stages=tuple(stages)))
    return tuple(rows)


# Training


def train_row(row: Row, folder: Path, *, home: Path) -> Path:
    """Returns the row's bundle; trains it if it is missing or its inputs changed.

    Args:
        row: The row.
        folder: Folder with the stages of the model itself.
        home: Folder of the rows' runs.

    Raises:
        UserError: The training failed or was stopped.
    """
    model = folder / row.start / "model"
    for stage, options in row.stages:
        out = home / row.name.replace(" ", "-") / stage
        words = [*recipe_options(folder, stage), *options]
        _clear_if_other(
            out, out / _MADE, {"options": words, "data": row.data, "model": digest(model)}
        )
        if not (out / "model" / "config.json").exists():
            data = str(folder / row.data)
            paths = ("--data", data, "--model", str(model), "--out", str(out))
            _run("train", command(stage), *paths, *words)
            if not (out / "model" / "config.json").exists():
                raise UserError(f"{out}: stopped before its end: the same command continues")
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        model = out / "model"
    return model


def make_random_features(folder: Path) -> None:
    """Makes the features set in which CLIP saw any frame of a clip, if it is missing.

    Raises:
        UserError: The command failed.
    """
    out, model = folder / _RANDOM, folder / "vae" / "model"
    _clear_if_other(out, out.with_name(f"{out.name}.json"), {"model": digest(model)})
    if not (out / "set.json").exists():
        data = str(folder / "games")
        options = ("--frame", "random", "--out", str(out))
        _run("data", "features", "--model", str(model), "--data", data, *options)


def _clear_if_other(out: Path, note: Path, fingerprint: Mapping[str, Any]) -> None:
    """Removes what was made from other inputs, and writes down the inputs."""
    if _read(note) == fingerprint:
        return
    if out.exists():
        print(f"{out}: its inputs changed: it is made again", file=sys.stderr)
        shutil.rmtree(out)
    write_json(epath.Path(note), fingerprint)


def digest(model: Path) -> str:
    """Returns the digest of a model that this process does not change any more."""
    return _digest(model.resolve())


@functools.cache
def _digest(model: Path) -> str:
    return Bundle.open(model).digest()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _run(*arguments: str) -> None:
    """Runs one `animegamer` command in this process.

    Raises:
        UserError: The command failed.
    """
    print(f"animegamer {' '.join(arguments)}", file=sys.stderr)
    if status := cli.main(list(arguments)):
        raise UserError(f"animegamer {' '.join(arguments[:2])}: failed with status {status}")


# Scoring


def make_decoder_suite(model: Path, benchmark: Benchmark) -> MetricSuite:
    """Builds the scorers of the decoder's clips, for all rows: none trains the VAE or CLIP."""
    bundle = Bundle.open(model)
    d, v = bundle.config.dit, bundle.config.vae
    if d is None or v is None:
        raise UserError(f"{model}: expected a model with the networks dit and vae")
    size = FrameSize(*clip_size(d, v))
    resources = MetricResources(groups=("motion", "clip", "truth"), clip=load_clip(str(model)))
    return make_suite(benchmark, resources, size, vae=bundle.load("vae"))


def score_decoder(
    model: Path, row: Row, *, benchmark: Benchmark, suite: MetricSuite
) -> dict[str, Estimate]:
    """Scores the decoder on true shot representations of held-out games."""
    bundle, true = Bundle.open(model), suite.true_clips
    assert true is not None
    seeds = [game.seed for game in benchmark.games]
    shown = np.zeros(true.shape[:2], int)
    if row.frame == "random":
        shown = np.random.default_rng(seeds[0]).integers(true.shape[2], size=shown.shape)
    frames = np.take_along_axis(true, shown[:, :, None, None, None, None], axis=2)[:, :, 0]
    texts = [str(turn.full_motion) for game in benchmark.games for turn in game.turns]
    found = true_representations(bundle, texts, frames.reshape(-1, *frames.shape[2:]))
    clips = sample_shots(
        bundle,
        representations=found.reshape(*shown.shape, *found.shape[1:]),
        levels=np.array([[turn.motion_level for turn in g.turns] for g in benchmark.games]),
        seeds=seeds,
        steps=bundle.protocol.denoising_steps,
    )
    values = score_clips(lambda turn: clips[:, turn], benchmark, suite)
    return {name: score for name in _METRICS if (score := estimate_known(values[name]))}


def score_games(
    row: Row,
    model: Path,
    *,
    out: Path,
    benchmark: Benchmark,
    classifier_clips: int = MetricFiles.classifier_clips,
) -> dict[str, Estimate]:
    """Returns a game row's scores by `animegamer evaluate`, which plays a game only once.

    Args:
        row: The row.
        model: The row's bundle (`train_row`).
        out: Folder of the evaluation.
        benchmark: Held-out games.
        classifier_clips: Number of true clips on which the classifier is checked.
    """
    file = out.with_suffix(".benchmark.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_benchmark(file, benchmark)
    options = Options(
        model=(f"{row.name}={model}",),
        benchmark=str(file),
        out=out,
        metrics=("states", "motion", "clip", "truth"),
        window=() if row.window is None else (row.window,),
        history=() if row.history is None else (row.history,),
        files=MetricFiles(classifier_clips=classifier_clips),
    )
    EvaluationRun(options, JudgeOptions()).run()
    evaluation = read_results(out)
    (system,) = evaluation.systems
    scores = {name: system.estimate(name) for name in (*_METRICS, "ACC-S")}
    scores[f"open turns: {CONTEXT}"] = system.estimate(CONTEXT, evaluation.is_open)
    return {name: score for name, score in scores.items() if score is not None}


def _row(row: Row, part: Literal["decoder", "game"], scores: Mapping[str, Estimate]) -> AblationRow:
    return AblationRow(
        name=row.name,
        part=part,
        scores={name: Score(x.mean, x.low, x.high) for name, x in scores.items()},
        paper={name: float(value) for name, value in row.paper.items()},
    )


# The table


def describe(rows: Sequence[AblationRow]) -> list[str]:
    """Returns a table with every score, and the paper's in brackets where it has one."""
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [
            f"{row.scores[name].mean:.3f}"
            + (f" ({row.paper[name]:g})" if name in row.paper else "")
            for name in names
        ]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return lines


def compare(rows: Sequence[AblationRow]) -> list[str]:
    """Returns a line per row: whether it is worse than the first where the paper's is."""
    first, lines = rows[0], []
    for row in rows[1:]:
        texts = []
        for name in row.paper.keys() & first.paper.keys():
            ours, low, high = difference(row.scores[name], first.scores[name])
            theirs = row.paper[name] - first.paper[name]
            result = "as in the paper" if ours * theirs > 0 else "NOT as in the paper"
            result = "within noise" if low <= 0 <= high else result
            texts.append(f"{name} {ours:+.3f} ({theirs:+.3f}), {result}")
        if texts:
            lines.append(f"- {row.name}: " + "; ".join(sorted(texts)) + ".")
    return lines


def difference(one: Score, other: Score) -> tuple[float, float, float]:
    """Returns the difference of two means, and an interval for it from theirs.

    By the method of variance estimates recovery (Zou and Donner, Statistics in Medicine, 2008), as
    if the two were independent; they share their games, so the interval is rather too wide.
    """
    mean = one.mean - other.mean
    low = mean - math.hypot(one.mean - one.low, other.high - other.mean)
    high = mean + math.hypot(one.high - one.mean, other.mean - other.low)
    return mean, low, high


def describe_training(folder: Path, *, steps: int | None) -> list[str]:
    """Describes how the rows' decoders were trained, and what differs from the model's own."""
    own = read_run_config(folder, "decoder")["recipe"]["steps"]
    stages = ("warmup", "pictures", *(("decoder",) if steps is None else ()))
    lines = [
        f"The first row is the model's own decoder; those of the other rows were trained by the "
        f"same recipe, {own:,} steps."
        if steps is None
        else f"The decoder of every row, the first included, was trained for {steps:,} steps; the "
        f"model's own was for {own:,}."
    ]
    changes = deviations(folder, Bundle.open(folder / "decoder" / "model"), stages)
    for stage in stages:
        if fields := new_fields(folder, stage):
            changes.append(f"fields that the recipe did not have: {', '.join(fields)}: {stage}")
    if changes:
        lines += [
            "The model's own settings have changed since it was trained; the rows trained for this "
            "page have the current ones:",
            "",
            *(f"- {line}." for line in changes),
        ]
    return lines


def write_table(
    path: Path, ablations: Ablations, *, denoising_steps: int, training: Sequence[str]
) -> None:
    """Writes the page of the docs.

    Args:
        path: The page.
        ablations: All rows.
        denoising_steps: Number of denoising steps of a clip.
        training: The lines of `describe_training`.
    """
    decoder, game = ([r for r in ablations.rows if r.part == part] for part in ("decoder", "game"))
    lines = [
        "# The paper's ablations on the toy world",
        "",
        f"Written by {ablations.made}, {denoising_steps} denoising steps. In brackets: the paper's "
        "score of the same row, on its own films and benchmark and with another CLIP, so only the "
        "direction may be compared. A difference is within noise if its interval (95 %, over "
        "games) contains zero.",
        "",
        "## The decoder alone, on true shot representations",
        "",
        *training,
        "",
        *describe(decoder),
        "",
        *compare(decoder),
        "",
        "## Whole games",
        "",
        "The row without a decoder of pictures draws the picture that comes first with the clips' "
        "decoder, which remembers nothing. The row without adaptation has neither. The row without "
        "pictures in the history was trained like the first, but every past shot in the language "
        "model's training was that of another game. \"Predicted history\" is the first row's model "
        'with its own predictions of past shots in place of what was shown; "window of 1" is the '
        "first row's model, which sees only the current turn.",
        "",
        *describe(game),
        "",
        *compare(game),
    ]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def main(
    folder: Path = Path("out/toy"),
    /,
    *,
    steps: int | None = None,
    games: int = 100,
    seed: int = 0,
    page: Path = Path("docs/toy-ablations.md"),
    rows: Path = FILE,
) -> None:
    """Train and score the ablations.

    Args:
        folder: Folder that `scripts/toy/train.sh` wrote.
        steps: Number of steps of every row's decoder. Default: the model's own, whose decoder is
            then the first row.
        games: Number of held-out games to score.
        seed: Number of the first game.
        page: Page for the table.
        rows: File for `animegamer evaluate`.
    """
    for option, number in {"--steps": steps, "--games": games}.items():
        if number is not None and number < 1:
            raise UserError(f"{option}: expected 1 or more, found {number}")
    load_classifier()  # before hours of training: without it no score says what clips show
    make_random_features(folder)
    home = folder / "ablations"
    trained = home if steps is None else home / f"{steps}-steps"
    benchmark = WORLD.make_benchmark("test", num_games=games, num_turns=_TURNS, seed=seed)
    played = home / f"games-{seed}-{games}"
    suite = make_decoder_suite(folder / "warmup" / "model", benchmark)
    decoder = []
    for row in decoder_rows(steps):
        model = train_row(row, folder, home=trained)
        scores = score_decoder(model, row, benchmark=benchmark, suite=suite)
        decoder.append(_row(row, "decoder", scores))
    game = []
    for row in GAME:
        model = train_row(row, folder, home=home)
        scores = score_games(row, model, out=played, benchmark=benchmark)
        game.append(_row(row, "game", scores))
    option = "" if steps is None else f" --steps {steps}"
    made = (
        f"`python scripts/toy/ablations.py out/toy{option}`, {time.strftime('%Y-%m-%d')}: {games} "
        f"held-out games of {_TURNS} turns, seeds {seed} to {seed + games - 1}"
    )
    signs = (*compare(decoder), *compare(game))
    ablations = Ablations(made=made, rows=(*decoder, *game), signs=signs)
    write_table(
        page,
        ablations,
        denoising_steps=Bundle.open(folder / "picture" / "model").protocol.denoising_steps,
        training=describe_training(folder, steps=steps),
    )
    rows.parent.mkdir(parents=True, exist_ok=True)
    write_ablations(rows, ablations)
    print(f"{page}, {rows}: written")


if __name__ == "__main__":
    keep_compiled_programs()
    os.environ["XLA_FLAGS"] = xla_flags()
    run_script(main, name="ablations")
