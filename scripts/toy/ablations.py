"""Trains and scores what the paper leaves out, on the toy world, and writes its table.

The rows go to a page of the docs and to a file that `animegamer evaluate` prints in its reports.

    python scripts/toy/ablations.py out/toy [--steps 1200]

needs what `scripts/toy/train.sh` has written there. Each row is trained as the model itself was, by
the recipe in its checkpoints, but for what it lacks. With `--steps` the decoder of every row is
trained for so many steps, the first row's too, for machines without an hour for each. Runs and
reports lie in `out/toy/ablations`; what is there is not made again, unless it was made otherwise.
"""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from score import Setting, represent, score_model, set_up
from stages import deviations, new_fields, read_run_config, recipe_options, xla_flags

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.config import to_json
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.report.ablations import (
    TOY_ABLATIONS,
    AblationRow,
    Ablations,
    Score,
    write_ablations,
)
from animegamer_jax.storage.files import write_whole
from animegamer_jax.toy.scoring.decoder_samples import sample_shots
from animegamer_jax.toy.scoring.scores import Judge, summarise

_TURNS, _READER_CLIPS = 5, 960


class Row(NamedTuple):
    """One line of the table: its name, and the paper's figures for it.

    `stages` are trained for it, each from the one before, the first from `start`; `data` is the
    name of the features set.
    """

    name: str
    paper: Mapping[str, float]
    start: str
    stages: tuple[tuple[str, tuple[str, ...]], ...] = ()
    data: str = "features"
    frame: Literal["first", "random"] = "first"
    window: int | None = None


_NO_WARMUP = ("--steps", "1", "--optimizer.learning-rate", "0", "--optimizer.warmup-steps", "0")
_RANDOM = "ablations/features-random"
DECODER = (
    Row("decoder alone", {"CLIP-I": 0.8672, "ACC-F": 0.729, "MAE-F": 0.403}, "decoder"),
    Row(
        "random instead of first frame",
        {"CLIP-I": 0.8446, "ACC-F": 0.474, "MAE-F": 0.562},
        "dit",
        (("warmup", ()), ("decoder", ())),
        data=_RANDOM,
        frame="random",
    ),
    Row(
        "no warm-up",
        {"CLIP-I": 0.8306, "ACC-F": 0.703, "MAE-F": 0.458},
        "dit",
        (("warmup", _NO_WARMUP), ("decoder", ())),
    ),
    Row(
        "no motion input",
        {"CLIP-I": 0.8533, "ACC-F": 0.182, "MAE-F": 1.219},
        "warmup",
        (("decoder", ("--motion", "none")),),
    ),
)
GAME = (
    Row("whole game", {"CLIP-I": 0.7856, "ACC-F": 0.672}, "adapt"),
    Row("no adaptation", {"CLIP-I": 0.6831, "ACC-F": 0.365, "MAE-F": 0.847}, "mllm"),
    Row("window of 1", {}, "adapt", window=1),
)
_COLUMNS = ("CLIP-I", "ACC-F", "MAE-F", "character", "place", "time")
_OPEN = "open turns: all three"
_MADE = "ablation.json"  # beside what was made: of what, and how


def decoder_rows(steps: int | None) -> tuple[Row, ...]:
    """The rows of the decoder alone; where `steps` are told the first is trained like the others.

    Args:
        steps: of the decoder's training; None: the recipe's.
    """
    if steps is None:
        return DECODER
    options = "--steps", str(steps)
    first = DECODER[0]._replace(start="warmup", stages=(("decoder", ()),))
    rows = []
    for row in (first, *DECODER[1:]):
        stages = [(name, (*o, *options) if name == "decoder" else o) for name, o in row.stages]
        rows.append(row._replace(stages=tuple(stages)))
    return tuple(rows)


def train_row(row: Row, folder: Path, *, home: Path) -> Path:
    """The row's bundle, trained if it is not there, or was trained otherwise.

    Args:
        row: what to train.
        folder: with the stages of the model itself.
        home: where the rows' runs lie.

    Raises:
        UserError: the training failed, or was stopped.
    """
    model = folder / row.start / "model"
    for stage, options in row.stages:
        out = home / _file_name(row) / stage
        told = [*recipe_options(folder, stage), *options]
        made = {"options": told, "data": row.data, "model": digest(model)}
        _clear_if_other(out, out / _MADE, made)
        if not (out / "model" / "config.json").exists():
            data = str(folder / row.data)
            _run("train", stage, "--data", data, "--model", str(model), "--out", str(out), *told)
            if not (out / "model" / "config.json").exists():
                raise UserError(f"{out}: stopped before its end: the same command goes on")
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        model = out / "model"
    return model


def make_random_features(folder: Path) -> None:
    """The features set in which CLIP saw any frame of a clip, if it is not there.

    Raises:
        UserError: the command failed.
    """
    out, model = folder / _RANDOM, folder / "vae" / "model"
    note = out.with_name(f"{out.name}.json")
    _clear_if_other(out, note, {"model": digest(model)})
    if not (out / "set.json").exists():
        data = str(folder / "games")
        options = ("--frame", "random", "--out", str(out))
        _run("data", "features", "--model", str(model), "--data", data, *options)


def _clear_if_other(out: Path, note: Path, made: Mapping[str, Any]) -> None:
    """Removes what was made otherwise than `made`, and notes `made`."""
    if _read(note) == made:
        return
    if out.exists():
        print(f"{out}: made otherwise: anew", file=sys.stderr)
        shutil.rmtree(out)
    note.parent.mkdir(parents=True, exist_ok=True)
    _write(note, made)


def digest(model: Path) -> str:
    """Of a model that this process does not change any more."""
    return _digest(model.resolve())


@functools.cache
def _digest(model: Path) -> str:
    return Bundle.open(model).digest()


def _file_name(row: Row) -> str:
    return row.name.replace(" ", "-")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _run(*arguments: str) -> None:
    """One `animegamer` command; a SIGTERM goes to it, which saves, and so does a Ctrl-C.

    Raises:
        UserError: it did not end well.
    """
    command = [sys.executable, "-m", "animegamer_jax.cli", *arguments]
    print(" ".join(command), file=sys.stderr)
    flags = {"XLA_FLAGS": xla_flags()} if arguments[0] == "train" else {}
    child = subprocess.Popen(command, env=os.environ | flags)
    stopped: list[str] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number).name)
        if number == signal.SIGTERM:  # a terminal's Ctrl-C comes to the child as well
            child.terminate()

    former = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = child.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    name = f"animegamer {' '.join(arguments[:2])}"
    if stopped:
        raise UserError(f"{name}: {stopped[0]}: stopped: the same command goes on")
    if status:
        raise UserError(f"{name}: left with status {status}")


@functools.cache
def make_setting(model: Path, *, games: int, seed: int) -> Setting:
    """One for all rows: no stage that a row trains changes what judges it."""
    bundle = Bundle.open(model)
    return set_up(
        bundle, split="test", games=games, turns=_TURNS, seed=seed, reader_clips=_READER_CLIPS
    )


def score_decoder(model: Path, row: Row, setting: Setting) -> dict[str, Any]:
    """The decoder on true shot representations of held-out games."""
    bundle = Bundle.open(model)
    representations = represent(bundle, setting, frame=row.frame)
    if representations is None:
        raise UserError(f"{model}: expected a model with the networks t5 and clip")
    clips = sample_shots(
        bundle,
        setting.truth,
        representations=representations,
        seeds=setting.seeds,
        steps=bundle.protocol.denoising_steps,
    )
    values = Judge(setting.reader, setting.embedder).values(clips, setting.truth)
    return {"all_turns": to_json(summarise(values))}


def score_game(model: Path, row: Row, setting: Setting) -> dict[str, Any]:
    """Whole games, played from their instructions."""
    return to_json(score_model(Bundle.open(model), setting, window=row.window)[0])


def report_row(row: Row, folder: Path, *, home: Path, games: int, seed: int) -> dict[str, Any]:
    """The row's scores: those on disk if they are of this model, these games and this measure."""
    model = train_row(row, folder, home=home)
    made: dict[str, Any] = {"games": games, "turns": _TURNS, "first_seed": seed}
    made |= {"steps": Bundle.open(model).protocol.denoising_steps}
    made |= {"reader_clips": _READER_CLIPS, "window": row.window, "frame": row.frame}
    made["model_digest"] = digest(model)
    path = home / f"{_file_name(row)}.json"
    report = _read(path)
    if not isinstance(report, dict) or report.get("made") != made:
        score = score_game if row in GAME else score_decoder
        setting = make_setting(folder / "warmup" / "model", games=games, seed=seed)
        report = {"made": made, **score(model, row, setting)}
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, report)
    return report


def describe(rows: Sequence[Row], reports: Mapping[str, Any], *, context: bool) -> list[str]:
    """A table: every score, and the paper's in brackets where it has one."""
    names = (*_COLUMNS, *(("ACC-S", _OPEN) if context else ()))
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        report = reports[row.name]
        cells = []
        for name in names:
            table = report["open_turns" if ": " in name else "all_turns"]
            cell = f"{table[name.split(': ')[-1]]['mean']:.3f}"
            cells.append(cell + (f" ({row.paper[name]:g})" if name in row.paper else ""))
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return lines


def judge_signs(rows: Sequence[Row], reports: Mapping[str, Any]) -> list[str]:
    """A line for each row: whether it is worse than the first where the paper's is."""
    first, lines = rows[0], []
    for row in rows[1:]:
        said = []
        for name in row.paper.keys() & first.paper.keys():
            tables = (reports[r.name]["all_turns"][name] for r in (row, first))
            ours, low, high = difference(*tables)
            theirs = row.paper[name] - first.paper[name]
            verdict = "as in the paper" if ours * theirs > 0 else "NOT as in the paper"
            verdict = "within noise" if low <= 0 <= high else verdict
            said.append(f"{name} {ours:+.3f} ({theirs:+.3f}), {verdict}")
        if said:
            lines.append(f"- {row.name}: " + "; ".join(sorted(said)) + ".")
    return lines


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, float, float]:
    """One mean less the other, and an interval for it from theirs.

    By the method of variance estimates recovery (Zou and Donner, Statistics in Medicine, 2008), as
    if the two were independent: of the same games they are not, so it is rather too wide.
    """
    mean = one["mean"] - other["mean"]
    low = mean - math.hypot(one["mean"] - one["low"], other["high"] - other["mean"])
    high = mean + math.hypot(one["high"] - one["mean"], other["mean"] - other["low"])
    return mean, low, high


def describe_training(folder: Path, *, steps: int | None) -> list[str]:
    """How the decoders of the rows were trained, and in what the model's own was otherwise."""
    own = read_run_config(folder, "decoder")["recipe"]["steps"]
    stages = ("warmup", "decoder") if steps is None else ("warmup",)
    lines = [
        f"The first row is the model's own decoder; those of the other rows were trained by the "
        f"same recipe, {own:,} steps."
        if steps is None
        else f"The decoder of every row, the first included, was trained for {steps:,} steps; the "
        f"model's own was for {own:,}."
    ]
    told = deviations(folder, Bundle.open(folder / "decoder" / "model"), stages)
    for stage in stages:
        if fields := new_fields(folder, stage):
            told.append(f"fields that the recipe had not: {', '.join(fields)}: {stage}")
    if told:
        lines += [
            "What the model itself was trained with has changed since; rows that were trained for "
            "this page had what it has now:",
            "",
            *(f"- {line}." for line in told),
        ]
    return lines


def write_table(
    path: Path,
    reports: Mapping[str, Any],
    *,
    games: int,
    seed: int,
    steps: int | None,
    denoising_steps: int,
    training: Sequence[str],
) -> None:
    """The page of the docs.

    Args:
        path: the file.
        reports: of every row, by its name.
        games: that were scored.
        seed: the first one's number.
        steps: of the decoders' training, as told.
        denoising_steps: of a clip.
        training: see `describe_training`.
    """
    option = "" if steps is None else f" --steps {steps}"
    lines = [
        "# What the paper leaves out, left out on the toy world",
        "",
        f"Written by `python scripts/toy/ablations.py out/toy{option}`, "
        f"{time.strftime('%Y-%m-%d')}: {games} held-out games of {_TURNS} turns, seeds {seed} to "
        f"{seed + games - 1}, {denoising_steps} denoising steps. In brackets the paper's figure "
        "for the same row, on its own films and benchmark, where CLIP is another: only the "
        "direction may be compared. A difference is within noise where its interval (95 %, over "
        "games) holds zero.",
        "",
        "## The decoder alone, on true shot representations",
        "",
        *training,
        "",
        *describe(DECODER, reports, context=False),
        "",
        *judge_signs(DECODER, reports),
        "",
        "## Whole games",
        "",
        'The row "window of 1" is the first row\'s model, which was trained on windows of up to '
        "five turns, and sees only the turn itself; none was trained that way.",
        "",
        *describe(GAME, reports, context=True),
        "",
        *judge_signs(GAME, reports),
    ]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def write_rows(path: Path, reports: Mapping[str, Any], *, made: str) -> None:
    """The file for `animegamer evaluate`."""
    signs = (*judge_signs(DECODER, reports), *judge_signs(GAME, reports))
    rows = []
    for row in (*DECODER, *GAME):
        report, whole = reports[row.name], row in GAME
        names = (*_COLUMNS, "ACC-S") if whole else _COLUMNS
        found = {name: report["all_turns"][name] for name in names}
        if whole:
            found[_OPEN] = report["open_turns"][_OPEN.split(": ")[-1]]
        rows.append(
            AblationRow(
                name=row.name,
                part="game" if whole else "decoder",
                scores={n: Score(x["mean"], x["low"], x["high"]) for n, x in found.items()},
                paper={name: float(value) for name, value in row.paper.items()},
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_ablations(path, Ablations(made=made, rows=tuple(rows), signs=signs))


def main(
    folder: Path = Path("out/toy"),
    /,
    *,
    steps: int | None = None,
    games: int = 100,
    seed: int = 0,
    page: Path = Path("docs/toy-ablations.md"),
    rows: Path = TOY_ABLATIONS,
) -> None:
    """Train and score the ablations.

    Args:
        folder: What `scripts/toy/train.sh` has written.
        steps: Of the decoder's training in every row, the first included. Default: the model's
            own, whose decoder is the first row.
        games: Held-out games to score.
        seed: The first one's number.
        page: Where the table goes.
        rows: Where the file for `animegamer evaluate` goes.
    """
    for option, number in {"--steps": steps, "--games": games}.items():
        if number is not None and number < 1:
            raise UserError(f"{option}: expected 1 or more, found {number}")
    make_random_features(folder)
    home = folder / "ablations"
    trained = home if steps is None else home / f"{steps}-steps"
    plan = [(row, trained) for row in decoder_rows(steps)] + [(row, home) for row in GAME]
    reports = {
        row.name: report_row(row, folder, home=place, games=games, seed=seed) for row, place in plan
    }
    training = describe_training(folder, steps=steps)
    write_table(
        page,
        reports,
        games=games,
        seed=seed,
        steps=steps,
        denoising_steps=Bundle.open(folder / "adapt" / "model").protocol.denoising_steps,
        training=training,
    )
    command = "python scripts/toy/ablations.py out/toy" + (
        "" if steps is None else f" --steps {steps}"
    )
    made = f"{command}, {games} held-out games, first seed {seed}, {time.strftime('%Y-%m-%d')}"
    write_rows(rows, reports, made=made)
    print(f"{page}, {rows}: written")


if __name__ == "__main__":
    import tyro

    keep_compiled_programs()
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"toy_ablations: {error}", file=sys.stderr)
        raise SystemExit(2) from None
