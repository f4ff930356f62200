"""Puts a trained toy model into the package: what `make play` plays, with its model card.

    python scripts/embed_toy.py out/toy --scores out/toy/scores/test.json ...

Weights are stored in bfloat16 and packed; the card tells the recipe of every stage, as its
checkpoint keeps it, and the scores of the reports given.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from animegamer_jax.bundle import NETWORKS, Bundle, BundleWriter
from animegamer_jax.bundle_config import with_dtypes
from animegamer_jax.errors import UserError
from animegamer_jax.media import write_whole
from animegamer_jax.play import ASSETS

STAGES = ("clip", "vae", "t5", "dit", "warmup", "decoder", "mllm", "adapt")
_MOST_BYTES = 12 * 10**6
_SHOWN = {  # of a report, by the name of its table
    "all_turns": ("ACC-S", "MAE-S", "ACC-F", "MAE-F", "character", "place", "time", "CLIP-I"),
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


def read_recipes(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The recipe of each stage's last checkpoint.

    Raises:
        UserError: a stage has none.
    """
    recipes = {}
    for stage in STAGES:
        found = sorted((folder / stage / "checkpoints").glob("*/about/metadata"), key=_step)
        if not found:
            raise UserError(f"{folder / stage}: expected the stage's checkpoints, found none")
        recipes[stage] = json.loads(found[-1].read_text())["recipe"]
    return recipes


def _step(path: Path) -> int:
    return int(path.parent.parent.name)


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
    """A table, a column a report."""
    names = []
    for report in reports:
        told = report["settings"]
        window = "" if told["window"] is None else f", window {told['window']}"
        names.append(f"{told['split']}{window}")
    yield "| score | " + " | ".join(names) + " |"
    yield "|---" * (len(reports) + 1) + "|"
    for table, rows in _SHOWN.items():
        for row in rows:
            cells = (
                f"{report[table][row]['mean']:.3f}" if row in report[table] else "n/a"
                for report in reports
            )
            yield f"| {_TABLES[table]}{row} | " + " | ".join(cells) + " |"


def write_card(
    path: Path,
    *,
    recipes: Mapping[str, Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any]],
    commit: str,
    size: int,
) -> None:
    """The model card beside the weights."""
    settings = reports[0]["settings"]
    lines = [
        "# The toy model",
        "",
        "AnimeGamer at toy size, trained from nothing on the toy world by this repository's own",
        "code (`scripts/train_toy.sh`) on two CPU cores: 17 frames of 48 x 72, eight characters,",
        "eight motions, six places by day and night. It knows nothing else; words from outside its",
        "world are read as blanks. No released weight and no foreign picture is in it.",
        "",
        f"Written {time.strftime('%Y-%m-%d')} by `scripts/embed_toy.py`, code of commit {commit};",
        f"{size / 1e6:.1f} MB in bfloat16. The licence is the repository's.",
        "",
        "## Recipe",
        "",
        *describe_recipes(recipes),
        "",
        "## Scores",
        "",
        f"On {settings['games']} held-out games of {settings['turns']} turns each (seeds from",
        f"{settings['first_seed']} on, never trained on), {settings['steps']} denoising steps:",
        "`python scripts/score_toy.py toy --split SPLIT`.",
        "",
        *describe_scores(reports),
    ]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def main(
    folder: Path = Path("out/toy"), /, *, scores: tuple[Path, ...], out: Path = ASSETS / "toy"
) -> None:
    """Embed a trained toy model.

    Args:
        folder: What `scripts/train_toy.sh` has written.
        scores: Reports of `scripts/score_toy.py` on this model, the main one first.
        out: Where the package keeps it.
    """
    recipes = read_recipes(folder)
    reports = [json.loads(path.read_text()) for path in scores]
    write_bundle(Bundle.open(folder / STAGES[-1] / "model"), out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if size > _MOST_BYTES:
        raise UserError(f"{out}: expected at most {_MOST_BYTES:,} bytes, found {size:,}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    write_card(out / "README.md", recipes=recipes, reports=reports, commit=commit, size=size)
    print(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main)
    except UserError as error:
        print(f"embed_toy: {error}", file=sys.stderr)
        raise SystemExit(2) from None
