"""Trains and scores what the paper leaves out, on the toy world, and writes its table.

    python scripts/toy_ablations.py out/toy

needs what `scripts/train_toy.sh` has written there. Each row is trained as the model itself was,
but for what it lacks. Runs and reports lie in `out/toy/ablations`; what is there is not made again.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from score_toy import score_model

from animegamer_jax.bundle import Bundle
from animegamer_jax.bundle_config import to_json
from animegamer_jax.data.toyworld import make_game
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.readers import ClipEmbedder, make_readers
from animegamer_jax.evaluate.toyshots import sample_shots
from animegamer_jax.evaluate.toytruth import make_truth
from animegamer_jax.evaluate.toyworld import Judge, summarise, true_representations
from animegamer_jax.media import write_whole
from animegamer_jax.play import keep_compiled_programs
from animegamer_jax.tokenizer import Tokenizer

_STEPS, _READER_CLIPS = 50, 960


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
DECODER = (
    Row("decoder alone", {"CLIP-I": 0.8672, "ACC-F": 0.729, "MAE-F": 0.403}, "decoder"),
    Row(
        "random instead of first frame",
        {"CLIP-I": 0.8446, "ACC-F": 0.474, "MAE-F": 0.562},
        "dit",
        (("warmup", ()), ("decoder", ())),
        data="ablations/features-random",
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


def train_row(row: Row, folder: Path) -> Path:
    """The row's bundle, trained if it is not there."""
    model = folder / row.start / "model"
    for stage, options in row.stages:
        out = folder / "ablations" / row.name.replace(" ", "-") / stage
        if not (out / "model" / "config.json").exists():
            data = str(folder / row.data)
            _run("train", stage, "--data", data, "--model", str(model), "--out", str(out), *options)
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        model = out / "model"
    return model


def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "animegamer_jax.cli", *arguments]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True)


def score_decoder(model: Path, row: Row, *, games: int, seed: int) -> dict[str, Any]:
    """The decoder on true shot representations of held-out games."""
    bundle = Bundle.open(model)
    t5, clip, encoder = (bundle.load(name) for name in ("t5", "clip", "encoder"))
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=encoder.config.num_tokens)
    d, v = bundle.config.dit, bundle.config.vae
    assert d is not None
    assert v is not None
    size = {
        "height": d.latent_height * v.spatial_compression,
        "width": d.latent_width * v.spatial_compression,
        "num_frames": 1 + (d.latent_frames - 1) * v.temporal_compression,
    }
    seeds = range(seed, seed + games)
    drawn = [make_game(number, num_turns=5, split="test") for number in seeds]
    truth = make_truth(drawn, **size)
    shown = None
    if row.frame == "random":
        shown = np.random.default_rng(seed).integers(size["num_frames"], size=truth.levels.shape)
    representations = true_representations(
        truth, encoder=encoder, t5=t5, clip=clip, tokenizer=tokenizer, shown=shown
    )
    clips = sample_shots(bundle, truth, representations=representations, seeds=seeds, steps=_STEPS)
    embedder = ClipEmbedder(clip, tokenizer)
    reader = make_readers(embedder, **size, num_truth=_READER_CLIPS, num_checked=_READER_CLIPS // 3)
    return {"all_turns": to_json(summarise(Judge(reader, embedder).values(clips, truth)))}


def score_game(model: Path, row: Row, *, games: int, seed: int) -> dict[str, Any]:
    """Whole games, played from their instructions."""
    scores, _, _ = score_model(
        str(model),
        split="test",
        games=games,
        turns=5,
        window=row.window,
        steps=_STEPS,
        seed=seed,
        batch_size=10,
        reader_clips=_READER_CLIPS,
    )
    return to_json(scores)


def describe(rows: Sequence[Row], reports: Mapping[str, Any], *, context: bool) -> list[str]:
    """A table: every score, and the paper's in brackets where it has one."""
    names = (*_COLUMNS, *(("ACC-S", "open turns: all three") if context else ()))
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
            ours = (
                reports[row.name]["all_turns"][name]["mean"]
                - reports[first.name]["all_turns"][name]["mean"]
            )
            theirs = row.paper[name] - first.paper[name]
            agree = "as in the paper" if ours * theirs > 0 else "NOT as in the paper"
            said.append(f"{name} {ours:+.3f} ({theirs:+.3f}), {agree}")
        if said:
            lines.append(f"- {row.name}: " + "; ".join(sorted(said)) + ".")
    return lines


def write_table(path: Path, reports: Mapping[str, Any], *, games: int, seed: int) -> None:
    """The page of the docs."""
    lines = [
        "# What the paper leaves out, left out on the toy world",
        "",
        f"Written by `python scripts/toy_ablations.py out/toy`, {time.strftime('%Y-%m-%d')}: "
        f"{games} held-out games of 5 turns, seeds {seed} to {seed + games - 1}, {_STEPS} "
        "denoising steps. In brackets the paper's figure for the same row, on its own films and "
        "benchmark, where CLIP is another: only the direction may be compared.",
        "",
        "## The decoder alone, on true shot representations",
        "",
        *describe(DECODER, reports, context=False),
        "",
        *judge_signs(DECODER, reports),
        "",
        "## Whole games",
        "",
        *describe(GAME, reports, context=True),
        "",
        *judge_signs(GAME, reports),
    ]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def main(
    folder: Path = Path("out/toy"),
    /,
    *,
    games: int = 100,
    seed: int = 0,
    page: Path = Path("docs/toy-ablations.md"),
) -> None:
    """Train and score the ablations.

    Args:
        folder: What `scripts/train_toy.sh` has written.
        games: Held-out games to score.
        seed: The first one's number.
        page: Where the table goes.
    """
    random = folder / "ablations" / "features-random"
    if not (random / "set.json").exists():
        model, data = str(folder / "vae" / "model"), str(folder / "games")
        options = ("--frame", "random", "--out", str(random))
        _run("data", "features", "--model", model, "--data", data, *options)
    reports = {}
    for row in (*DECODER, *GAME):
        path = folder / "ablations" / f"{row.name.replace(' ', '-')}.json"
        if not path.exists():
            model = train_row(row, folder)
            score = score_decoder if row in DECODER else score_game
            report = score(model, row, games=games, seed=seed)
            write_whole(path, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
        reports[row.name] = json.loads(path.read_text())
    write_table(page, reports, games=games, seed=seed)
    print(f"{page}: written")


if __name__ == "__main__":
    import tyro

    keep_compiled_programs()
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"toy_ablations: {error}", file=sys.stderr)
        raise SystemExit(2) from None
