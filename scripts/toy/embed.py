"""Puts a trained toy model into the package: what `make play` plays, with its model card.

    python scripts/toy/embed.py out/toy --scores out/toy/scores/test.json ...

Weights are stored in bfloat16 and packed; the card tells the recipe of every stage, as its
checkpoint keeps it, what was changed since, and the scores of the reports given. Those must be
scores of this model: either as it was trained (`score_toy.py out/toy/adapt/model`) or, after a
first embedding, as it is embedded (`score_toy.py toy`); `scores.json` beside the card keeps them.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from stages import STAGES, deviations, read_run_config

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    Bundle,
    BundleWriter,
)
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import FLICKER, NOISE
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import move_into_place, refuse_existing
from animegamer_jax.toy.scoring.scores import DATA_NOISE

ROOT = Path(__file__).parents[2]
SCORES_FILE = "scores.json"
_MOST_BYTES = 12 * 10**6
_SETTINGS = {  # of a report, as the card calls them
    "games": "games",
    "turns": "turns of each",
    "first_seed": "first seed",
    "steps": "denoising steps",
    "reader_clips": "clips that readers learnt from",
}
_SHOWN = {  # of a report, by the name of its table
    "all_turns": (
        "ACC-S",
        "MAE-S",
        "ACC-F",
        "MAE-F",
        f"ACC-F{DATA_NOISE}",
        f"MAE-F{DATA_NOISE}",
        "character",
        "place",
        "time",
        "CLIP-I",
    ),
    "open_turns": ("ACC-S", "character", "place", "time", "all three"),
}
_TABLES = {"all_turns": "", "open_turns": "open turns: "}


def write_bundle(source: Bundle, path: Path) -> None:
    """The bundle in bfloat16, packed, under the name `toy`."""

    def cast(leaves: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        for name, leaf in leaves:
            yield name, leaf.astype(jnp.bfloat16)

    with BundleWriter(
        path,
        name="toy",
        protocol=source.protocol,
        overwrite=True,
        packing="bytes",
        stages=source.info.stages,
    ) as writer:
        for name in NETWORKS:
            if not source.has(name):
                continue
            config = with_dtypes(getattr(source.config, name), param_dtype="bfloat16")
            leaves = cast(source.read_in_order(name, source.leaves(name)))
            writer.write_network(name, config, leaves)
        writer.write_tokenizer(Path(str(source.path)) / "tokenizer")
    for told in path.glob("*/commit_success.txt"):  # names a folder of this machine
        told.unlink()


def describe_recipes(recipes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table, a line a stage."""
    yield "| stage | steps | batch | learning rate | number format | seed |"
    yield "|---|---|---|---|---|---|"
    for stage, recipe in recipes.items():
        rate = recipe["optimizer"]["learning_rate"]
        yield (
            f"| {stage} | {recipe['steps']:,} | {recipe['batch_size']} | {rate:g} "
            f"| {recipe['dtype']} | {recipe['seed']} |"
        )


def describe_scores(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table, a column a report: how it was made, then the scores."""
    names = []
    for report in reports:
        told = report["settings"]
        window = "" if told["window"] is None else f", window {told['window']}"
        names.append(f"{told['split']}{window}")
    yield "| score | " + " | ".join(names) + " |"
    yield "|---" * (len(reports) + 1) + "|"
    for key, name in _SETTINGS.items():
        cells = (str(report["settings"].get(key, "n/a")) for report in reports)
        yield f"| {name} | " + " | ".join(cells) + " |"
    for table, rows in _SHOWN.items():
        for row in rows:
            cells = (
                f"{report[table][row]['mean']:.3f}" if row in report[table] else "n/a"
                for report in reports
            )
            yield f"| {_TABLES[table]}{row} | " + " | ".join(cells) + " |"


def read_report(path: Path) -> dict[str, Any]:
    """A report of `scripts/toy/score.py`.

    Raises:
        UserError: it is missing, or something else.
    """
    try:
        report = json.loads(path.read_text())
        lacking = {"settings", *_SHOWN} - report.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: no report of scripts/toy/score.py: {error}") from None
    if lacking:
        raise UserError(f"{path}: no report of scripts/toy/score.py: no {', '.join(lacking)}")
    return report


def check_scores(reports: Mapping[Path, Mapping[str, Any]], *, trained: str, embedded: str) -> str:
    """Which of the two models the reports are of.

    Raises:
        UserError: of none, or not all of the same.
    """
    found = set()
    for path, report in reports.items():
        digest = report["settings"].get("model_digest")
        if digest not in (trained, embedded):
            raise UserError(
                f"{path}: scores of another model: expected model_digest {trained} (as trained) or "
                f"{embedded} (as embedded), found {digest}: score this model"
            )
        found.add(digest)
    if len(found) != 1:
        raise UserError(
            f"--scores: expected reports of one model, found {len(reports)} of {len(found)}: score "
            "either the trained or the embedded one"
        )
    return found.pop()


def compact(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the package keeps of a report."""
    tables = {name: report[name] for name in _SHOWN}
    rounded = json.loads(json.dumps(tables), parse_float=lambda text: round(float(text), 5))
    settings = {k: v for k, v in report["settings"].items() if k != "model"}  # a folder's name
    return {"settings": settings, **rounded}


def describe_commit() -> str:
    """The checkout's commit, and whether its code was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    paths = "animegamer_jax", "scripts", ":!animegamer_jax/assets/toy", ":!animegamer_jax/assets/.*"
    changed = git("status", "--porcelain", "--", *paths)
    return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")


def write_card(
    path: Path,
    *,
    recipes: Mapping[str, Mapping[str, Any]],
    changes: Sequence[str],
    reports: Sequence[Mapping[str, Any]],
    scored: str,
    commit: str,
    size: int,
) -> None:
    """The model card beside the weights.

    Args:
        path: the file.
        recipes: of every stage.
        changes: in what stages were trained for another model.
        reports: the main one first.
        scored: which model they are of.
        commit: of the code that embeds.
        size: of the model, in bytes.
    """
    told = ["Each stage started from what the one before it left, with the networks and the",
            "protocol that the model has."]  # fmt: skip
    if changes:
        told = ["Not all of the model is as its stages were trained:", ""]
        told += [f"- {line}." for line in changes]
    lines = [
        "# The toy model",
        "",
        "AnimeGamer at toy size, trained from nothing on the toy world by this repository's own",
        "code (`scripts/toy/train.sh`) on two CPU cores: 17 frames of 48 x 72, eight characters,",
        "eight motions, six places by day and night. It knows nothing else; words from outside its",
        "world are read as blanks. No released weight and no foreign picture is in it.",
        "",
        f"Written {time.strftime('%Y-%m-%d')} by `scripts/toy/embed.py` of commit {commit}; the",
        f"stages may have been trained by earlier ones. {size / 1e6:.1f} MB in bfloat16. The "
        "licence is the",
        "repository's.",
        "",
        "## Recipe",
        "",
        *describe_recipes(recipes),
        "",
        *told,
        "",
        "## Scores",
        "",
        "On held-out games, never trained on (`python scripts/toy/score.py toy --split SPLIT`),",
        f"of the model {scored}. ACC-F and MAE-F measure motion above a flicker of",
        f"{FLICKER:g} grey levels; those{DATA_NOISE} above {NOISE:g}, as training clips were "
        "measured.",
        "",
        *describe_scores(reports),
    ]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def main(
    folder: Path = Path("out/toy"), /, *, scores: tuple[Path, ...], out: Path = ASSETS / "toy"
) -> None:
    """Embed a trained toy model.

    Args:
        folder: What `scripts/toy/train.sh` has written.
        scores: Reports of `scripts/toy/score.py` on this model, the main one first.
        out: Where the package keeps it.
    """
    out = out.absolute()
    refuse_existing(epath.Path(out), overwrite=True)
    source = Bundle.open(folder / STAGES[-1] / "model")
    recipes = {stage: read_run_config(folder, stage)["recipe"] for stage in STAGES}
    reports = {path: read_report(path) for path in scores}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / out.name
        write_bundle(source, new)
        trained, embedded = source.digest(), Bundle.open(new).digest()
        digest = check_scores(reports, trained=trained, embedded=embedded)
        kept = [compact(report) for report in reports.values()]
        content = {"trained": trained, "embedded": embedded, "reports": kept}
        write_whole(new / SCORES_FILE, (json.dumps(content, indent=1) + "\n").encode())
        size = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        if size > _MOST_BYTES:
            raise UserError(f"{out}: expected at most {_MOST_BYTES:,} bytes, found {size:,}")
        write_card(
            new / "README.md",
            recipes=recipes,
            changes=deviations(folder, source),
            reports=kept,
            scored="as it is here" if digest == embedded else "before it was cast to bfloat16",
            commit=describe_commit(),
            size=size,
        )
        move_into_place(epath.Path(new), epath.Path(out))
    print(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main)
    except UserError as error:
        print(f"embed_toy: {error}", file=sys.stderr)
        raise SystemExit(2) from None
