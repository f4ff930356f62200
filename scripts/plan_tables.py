"""Makes the tables of `docs/pods.md` with the TPU's compiler: all programs of play and training.

    python scripts/plan_tables.py [--only NAME ...] [--write docs/pods.md]

Each program is compiled in a process of its own, which takes one to five minutes. Results are
cached in `out/plans` while the package's code and the compiler stay the same, so the command can be
stopped and run again. It ends at the first program that neither fits nor is refused by the compiler
for its size.
"""

import argparse
import functools
import hashlib
import json
import math
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PLAY = {
    "50 steps with guidance, one game": [
        (topology, ["--part", "decoder"])
        for topology in (
            *("v6e:1x1", "v5e:1x1", "v5p:1x1x1", "v6e:2x4", "v5e:2x4", "v5p:2x2x2"),
            "tpu7x:2x2x1",
        )
    ],
    "game state (language model), one game": [
        (chips, ["--part", "mllm"]) for chips in ("v6e:1x1", "v6e:2x4")
    ],
    "frames (VAE decode), one game": [
        (chips, ["--part", "vae"]) for chips in ("v6e:1x1", "v6e:2x4")
    ],
    "whole turn, one game": [("v6e:1x1", []), ("v6e:2x4", [])],
    "whole turn of a student, one game": [
        ("v6e:1x1", ["--student"]),
        ("v6e:2x4", ["--student"]),
        ("v5e:1x1", ["--student", "--int8"]),
    ],
    "whole turns, two or eight games": [("v5e:4x4", []), ("v6e:4x4", []), ("v5p:4x4x4", [])],
}
_DOTS = ["--remat", "dots"]
_DENOISER = [
    ("v5p:4x4x4", ["--batch", "64", *_DOTS]),
    ("v6e:4x4", []),
    ("v5e:4x4", []),
    ("v6e:2x4", ["--batch", "16", "--accumulate", "2"]),
    ("v5e:2x4", ["--batch", "16", "--accumulate", "2"]),
]
TRAIN = {
    "decoder": [
        ("v5p:4x4x4", ["--batch", "64", *_DOTS]),
        ("v6e:4x4", ["--batch", "16", *_DOTS]),
        ("v5e:4x4", ["--batch", "16"]),
        ("v6e:2x4", ["--batch", "16", "--accumulate", "2"]),
        ("v5e:2x4", ["--batch", "16", "--accumulate", "2"]),
        ("v5e:16x16", ["--batch", "256"]),
    ],
    "mllm": [
        ("v5p:4x4x4", ["--batch", "256", *_DOTS]),
        ("v5p:4x4x4", ["--batch", "256", "--layout", "sharded", "--mesh", "data=32", "fsdp=2"]),
        ("v6e:4x4", ["--batch", "64"]),
        ("v5e:4x4", ["--batch", "64", "--mesh", "fsdp=16"]),
        ("v6e:2x4", ["--batch", "64", "--accumulate", "2"]),
        ("v5e:2x4", ["--batch", "64", "--accumulate", "8"]),
        ("v5e:16x16", ["--batch", "256"]),
    ],
    "warmup": _DENOISER,
    "adapt": _DENOISER,
    "distill": [
        ("v5p:4x4x4", ["--batch", "64"]),
        ("v5e:4x4", ["--batch", "64", "--accumulate", "4"]),
    ],
}
FROM_FILMS = ("decoder", "mllm", "warmup", "adapt")  # the stages that see every clip
FILMS = (10, 1_000, 100_000)
CLIPS_PER_FILM = 2_000  # the average of the paper's ten films
CACHE = Path("out/plans")
PACKAGE = Path(__file__).parent.parent / "animegamer_jax"
_PACKAGES = ("bundle", "convert", "game", "models", "plan", "train")
_FILMS_NOTE = (
    f"Films of {CLIPS_PER_FILM:,} clips each; a stage sees as many as in the paper's recipe, or\n"
    "each clip once if there are more. Chip-hours:"
)
BEGIN, END = "<!-- plan_tables.py -->", "<!-- /plan_tables.py -->"


@functools.cache
def code_digest() -> str:
    """Returns a digest of the package's code and the versions of libtpu and jax."""
    digest = hashlib.sha256()
    for name in ("libtpu", "jax"):
        digest.update(f"{name} {metadata.version(name)}\n".encode())
    folders = [PACKAGE / name for name in _PACKAGES]
    files = [*PACKAGE.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    for file in sorted(files):
        digest.update(f"{file.relative_to(PACKAGE)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def ask(stage: str, topology: str, options: list[str]) -> tuple[str, dict[str, Any]]:
    """Returns the command, and the object that it prints.

    Raises:
        SystemExit: It failed for another reason than a program that does not fit.
    """
    words = ["plan", "--stage", stage, "--topology", topology, *options]
    command = f"animegamer {' '.join(words)}"
    key = hashlib.sha256(f"{command}\n{code_digest()}".encode()).hexdigest()[:16]
    file = CACHE / f"{key}.json"
    if not file.exists():
        print(command, file=sys.stderr, flush=True)
        run = [sys.executable, "-m", "animegamer_jax.cli", *words, "--json"]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        parse_plan(done.stdout, status=done.returncode, command=command, errors=done.stderr)
        CACHE.mkdir(parents=True, exist_ok=True)
        file.write_text(done.stdout)
    return command, json.loads(file.read_text())


def parse_plan(text: str, *, status: int, command: str, errors: str) -> dict[str, Any]:
    """Returns what `animegamer plan --json` printed: a plan that fits, or an explicit refusal.

    Raises:
        SystemExit: It is neither.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        fits, needed = found.get("fits"), found.get("needed_gb")
        if (fits is True and status == 0) or (fits is False and needed is not None):
            return found
    raise SystemExit(f"{command}: status {status}, no plan and no refusal:\n{errors[-2000:]}")


def seconds_of(record: dict[str, Any]) -> str:
    """Returns the cells of the total time and of its parts."""
    s = record["seconds"]
    parts = " + ".join(f"{s[name]:.2g}" for name in ("matmuls", "other", "collectives", "kernels"))
    return f"{s['total']:.2f} | {parts}"


def peak_of(record: dict[str, Any]) -> str:
    """Returns the cell of a chip's memory."""
    memory = record["memory"]
    return f"{memory['peak']:.1f} of {memory['chip']:.1f}"


def speed_of(record: dict[str, Any]) -> str:
    """Returns the cell of samples per second, or of tokens if samples consist of tokens."""
    if record["sample_tokens"] is not None:
        return f"{record['sample_tokens'] * record['samples_per_second']:,.0f} tokens"
    return f"{record['samples_per_second']:.3g} {record['unit']}"


def missing_of(found: dict[str, Any]) -> str:
    """Returns the cell of a program that does not fit."""
    return f"does not fit: {found['needed_gb']:.1f} GB"


def play_table(only: list[str]) -> list[str]:
    """Returns the lines of the table of a turn's programs."""
    lines = [
        "| program | slice | seconds | matmuls + other + sent + kernels | peak GB |",
        "|---|---|---|---|---|",
    ]
    for name, cases in PLAY.items():
        if only and not any(word in name for word in only):
            continue
        for topology, options in cases:
            _, found = ask("rollout", topology, options)
            if found["fits"]:
                (record,) = found["plans"]
                cells = f"{seconds_of(record)} | {peak_of(record)}"
            else:
                cells = f"{missing_of(found)} | | "
            lines.append(f"| {name} | {topology} | {cells} |")
    return lines


def train_table(only: list[str]) -> list[str]:
    """Returns the lines of the table of training stages."""
    lines = [
        "| stage | command | seconds | matmuls + other + sent + kernels | "
        "peak GB | a second | of the peak | the recipe, chip-hours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage, cases in TRAIN.items():
        if only and stage not in only:
            continue
        for topology, options in cases:
            command, found = ask(stage, topology, options)
            if not found["fits"]:
                lines.append(f"| {stage} | `{command}` | {missing_of(found)} | | | | | |")
                continue
            (record,) = found["plans"]
            lines.append(
                f"| {stage} | `{command}` | {seconds_of(record)} | {peak_of(record)} | "
                f"{speed_of(record)} | {record['peak_share']:.0%} | "
                f"{record['recipe']['chip_hours']:,.0f} |"
            )
    return lines


def films_table() -> list[str]:
    """Returns the lines of the table of chip-hours, on the first slice of each stage's rows.

    A stage sees as many clips as in the paper's recipe, or each clip once if there are more.
    """
    slices = {TRAIN[stage][0][0] for stage in FROM_FILMS}
    (topology,) = slices
    plans = {}
    for stage in FROM_FILMS:
        first = TRAIN[stage][0]
        _, found = ask(stage, *first)
        if not found["fits"]:
            raise SystemExit(f"{stage} does not fit on {topology}: expected a first row that fits")
        (plans[stage],) = found["plans"]
    lines = [
        f"| films | clips | {' | '.join(plans)} | chip-hours in all | days on one {topology} |",
        "|---|---|" + "---|" * len(plans) + "---|---|",
    ]
    for films in FILMS:
        clips, hours = films * CLIPS_PER_FILM, []
        for record in plans.values():
            work = record["recipe"]
            hours.append(work["chip_hours"] * max(1.0, clips / work["samples"]))
        (chips,) = {math.prod(record["mesh"].values()) for record in plans.values()}
        cells = " | ".join(f"{h:,.0f}" for h in (*hours, sum(hours)))
        lines.append(f"| {films:,} | {clips:,} | {cells} | {sum(hours) / chips / 24:,.1f} |")
    return lines


def main() -> None:
    """Prints the tables, or writes them into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[], help="stages, or words in the names of play's programs"
    )
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error(
            "--only prints some rows, and --write would remove all others: pass one of them"
        )
    tables = [*play_table(options.only), "", *train_table(options.only)]
    if not options.only:
        tables += ["", _FILMS_NOTE, "", *films_table()]
    text = "\n".join(tables)
    if options.write is None:
        print(text)
        return
    page = options.write.read_text()
    before, rest = page.split(BEGIN)
    options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
