"""Embeds a trained toy model into the package, where `make play` finds it, with its model card.

    python scripts/toy/embed.py out/toy --scores out/toy-report ...

Weights are rounded to fewer digits, stored in bfloat16 and packed. The card shows the recipe of
every stage, as its checkpoint keeps it, what changed since, and the scores of the evaluations
given. Those must be of this model: as it was trained (`animegamer evaluate --model
out/toy/picture/model`) or, after a first embedding, as it is embedded (`animegamer evaluate`).
`scores.json` keeps them.
"""

import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from run_script import run_script
from stages import STAGES, deviations, read_run_config

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    Bundle,
    BundleWriter,
)
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.registry import CONTEXT
from animegamer_jax.evaluate.results import Evaluation, SystemResult, read_results
from animegamer_jax.game.openings import round_mantissa
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import move_into_place, refuse_existing

ROOT = Path(__file__).parents[2]
SCORES_FILE = "scores.json"
_MOST_BYTES = 20 * 10**6
_MANTISSA_BITS = {"mllm": 5, "clip": 5, "dit": 4, "picture": 4}
"""Bits of mantissa that large weights keep, of bfloat16's 7: fewer take less space when packed."""
_FEW_WEIGHTS = 4096  # arrays of fewer are kept as they are
_SHOWN = {  # metrics of the card, by turns
    "all turns": (
        *("ACC-S", "MAE-S", "ACC-F", "MAE-F", "character", "place", "time", "CLIP-I"),
        *(
            "accessory kept",
            "variant kept",
            "view kept",
            "details kept",
            "details by chance",
            "looks",
            "looks by chance",
        ),
    ),
    "open turns": ("ACC-S", "character", "place", "time", CONTEXT),
}


def write_bundle(source: Bundle, path: Path) -> None:
    """Writes the bundle with rounded weights in bfloat16, packed, under the name `toy`."""

    def cast(
        network: str, leaves: Iterator[tuple[str, np.ndarray]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        for name, leaf in leaves:
            value = leaf.astype(np.float32)
            if network in _MANTISSA_BITS and value.ndim > 1 and value.size > _FEW_WEIGHTS:
                value = round_mantissa(value, _MANTISSA_BITS[network])
            yield name, value.astype(jnp.bfloat16)

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
            leaves = cast(name, source.read_in_order(name, source.leaves(name)))
            writer.write_network(name, config, leaves)
        writer.write_tokenizer(Path(str(source.path)) / "tokenizer")
    for marker in path.glob("*/commit_success.txt"):  # names a folder of this machine
        marker.unlink()


def describe_recipes(recipes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Returns a table with a line per stage."""
    yield "| stage | steps | batch | learning rate | number format | seed |"
    yield "|---|---|---|---|---|---|"
    for stage, recipe in recipes.items():
        rate = recipe["optimizer"]["learning_rate"]
        yield (
            f"| {stage} | {recipe['steps']:,} | {recipe['batch_size']} | {rate:g} "
            f"| {recipe['dtype']} | {recipe['seed']} |"
        )


def describe_scores(systems: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Returns a table with a column per system: its settings, then its scores."""
    yield "| score | " + " | ".join(system["name"] for system in systems) + " |"
    yield "|---" * (len(systems) + 1) + "|"
    for name in systems[0]["settings"]:
        yield f"| {name} | " + " | ".join(str(s["settings"][name]) for s in systems) + " |"
    for turns, metrics in _SHOWN.items():
        for name in metrics:
            found = [system[turns].get(name) for system in systems]
            cells = " | ".join("n/a" if one is None else f"{one['mean']:.3f}" for one in found)
            yield f"| {name if turns == 'all turns' else f'{turns}: {name}'} | {cells} |"


def check_scores(digests: Sequence[str | None], *, trained: str, embedded: str) -> str:
    """Returns the digest of the model that was scored.

    Raises:
        UserError: The scores are of another model, or of both.
    """
    for digest in digests:
        if digest not in (trained, embedded):
            raise UserError(
                f"--scores: scores of another model: expected digest {trained} (as trained) or "
                f"{embedded} (as embedded), found {digest}: score this model"
            )
    if len({*digests}) != 1:
        raise UserError(
            "--scores: expected scores of one model, found those of the trained and the embedded "
            "one: score only one of them"
        )
    return str(digests[0])


def compact(evaluation: Evaluation, system: SystemResult) -> dict[str, Any]:
    """Returns what the package keeps of one system's scores."""
    turns = {"all turns": None, "open turns": evaluation.is_open}
    first, last = evaluation.run_config["seeds"]
    return {
        "name": evaluation.benchmark + f", window {system.settings['window']}",
        "settings": {
            "games": len(evaluation.games),
            "turns of each": evaluation.num_turns,
            "seeds": f"{first} to {last}",
            "denoising steps": system.settings["steps"],
        },
        **{
            name: {
                metric: {key: round(x, 5) for key, x in dataclasses.asdict(found).items()}
                for metric in _SHOWN[name]
                if (found := system.estimate(metric, where))
            }
            for name, where in turns.items()
        },
    }


def describe_commit() -> str:
    """Returns the checkout's commit, and whether its code has changed since."""

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
    systems: Sequence[Mapping[str, Any]],
    scored: str,
    commit: str,
    size: int,
) -> None:
    """Writes the model card.

    Args:
        path: The file.
        recipes: Recipe of every stage.
        changes: Differences between the model and what its stages were trained for.
        systems: Scores, the main ones first.
        scored: The model that was scored, in words.
        commit: Commit of the code that embeds.
        size: Size of the model in bytes.
    """
    lines = [
        "# The toy model",
        "",
        "AnimeGamer at toy size, trained from scratch on the toy world with this repository's code",
        "(`scripts/toy/train.sh`): 17 frames of 96 x 144, eight characters, eight",
        "motions, six places by day and night. It knows nothing else; words from outside its world",
        "are unknown tokens. It contains no released weights and no pictures from elsewhere.",
        "",
        f"Written {time.strftime('%Y-%m-%d')} by `scripts/toy/embed.py` of commit {commit}; its",
        f"stages may have been trained by earlier ones. {size / 1e6:.1f} MB: bfloat16, rounded to",
        "fewer bits and packed (`round_mantissa` there). The licence is the",
        "repository's.",
        "",
        "## Recipe",
        "",
        *describe_recipes(recipes),
        "",
    ]
    if changes:
        lines += ["Some stages were trained for another model than this one:", ""]
        lines += [f"- {line}." for line in changes]
    else:
        lines.append(
            "Each stage started from the one before, with this model's networks and protocol."
        )
    lines += [
        "",
        "## Scores",
        "",
        "By `animegamer evaluate` on held-out games, which were never trained on, of the model",
        f"{scored}. `animegamer evaluate --make toy-combinations`, `toy-phrasings` and `toy-own`",
        "make the other held-out benchmarks.",
        "",
        *describe_scores(systems),
    ]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def main(
    folder: Path = Path("out/toy"), /, *, scores: tuple[Path, ...], out: Path = ASSETS / "toy"
) -> None:
    """Embed a trained toy model.

    Args:
        folder: Folder that `scripts/toy/train.sh` wrote.
        scores: Folders of evaluations of this model, the main one first.
        out: Folder of the embedded model in the package.
    """
    out = out.absolute()
    refuse_existing(epath.Path(out), overwrite=True)
    source = Bundle.open(folder / STAGES[-1] / "model")
    recipes = {stage: read_run_config(folder, stage)["recipe"] for stage in STAGES}
    evaluations = [read_results(path) for path in scores]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / out.name
        write_bundle(source, new)
        trained, embedded = source.digest(), Bundle.open(new).digest()
        digests = [system.digest for e in evaluations for system in e.systems]
        digest = check_scores(digests, trained=trained, embedded=embedded)
        kept = [compact(e, system) for e in evaluations for system in e.systems]
        content = {"trained": trained, "embedded": embedded, "scored": digest, "systems": kept}
        write_whole(new / SCORES_FILE, (json.dumps(content, indent=1) + "\n").encode())
        size = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        if size > _MOST_BYTES:
            raise UserError(f"{out}: expected at most {_MOST_BYTES:,} bytes, found {size:,}")
        write_card(
            new / "README.md",
            recipes=recipes,
            changes=deviations(folder, source),
            systems=kept,
            scored="as embedded here" if digest == embedded else "before its weights were rounded",
            commit=describe_commit(),
            size=size,
        )
        move_into_place(epath.Path(new), epath.Path(out))
    print(f"{out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    run_script(main, name="embed")
