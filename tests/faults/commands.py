"""The commands that write, what each needs, and what two equal results have in common."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from annotated_shots import says_of
from stand_in_server import says, serving

from animegamer_jax import cli

_EACH = 3.0  # share of a command that 600 kills strike at each of its operations
Content = Mapping[str, Any]


def file_content(out: Path) -> Content:
    """Returns a digest of every file but temporary ones, which are removed after an hour."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".part-" not in path.name
    }


def bundle_content(out: Path) -> Content:
    """Returns a bundle's tokenizer and config.json but its date, with the checksums of the weights.

    Orbax chooses other names for the files of weights each time. Their values are compared with
    the checksums in `config.json` by reading them.
    """
    from animegamer_jax.bundle.bundle import NETWORKS, Bundle

    bundle = Bundle.open(out)
    config = json.loads((out / "config.json").read_text())
    del config["date"]
    found: dict[str, Any] = {"config.json": config}
    found |= file_content(out / "tokenizer")
    for name in filter(bundle.has, NETWORKS):
        for path, array in bundle.read_in_order(name, sorted(bundle.leaves(name))):
            found[f"{name}.{path}"] = hashlib.sha256(array.tobytes()).hexdigest()
    return found


def training_content(out: Path) -> Content:
    """Returns weights and curve of a training; times in it differ."""
    from check_resume import curve

    scores = (out / "checkpoints/scores.json").read_text()
    return {**bundle_content(out / "model"), "curve": curve(out), "scores": scores}


def _annotations(out: Path) -> Content:
    """Returns all files but the counts of requests, of which a run that was killed lost some."""
    return {
        name: digest for name, digest in file_content(out).items() if not name.startswith("usage/")
    }


def _evaluation(out: Path) -> Content:
    """Returns the games, and all values but times. What is made of `results.json` has its date."""
    from animegamer_jax.evaluate.results import read_results

    found = {
        name: digest
        for name, digest in file_content(out).items()
        if name.startswith("games/") and not name.endswith("values.json")
    }
    for system in read_results(out).systems:
        values = {name: array.tolist() for name, array in system.values.items()}
        values.pop("seconds", None)
        found[system.name] = repr((values, system.reference, system.settings, system.folders))
    assert (out / "report.html").exists()
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A command that writes.

    Attributes:
        name: Name in the table.
        run: Given the seeds and the output, returns the command.
        again: Given the same, the command that continues; None: the same one.
        content: Returns what two equal results have in common.
        share: Share of the kills; those of small commands take at most one an operation.
        needs: What it needs of the seeds.
        first: Pattern of the operations that are struck first.
    """

    name: str
    run: Callable[[Path, Path], Callable[[], int]]
    again: Callable[[Path, Path], Callable[[], int]] | None = None
    content: Callable[[Path], Content] = file_content
    share: float = 1.0
    needs: tuple[str, ...] = ("bundle",)
    first: str | None = None


def command(text: str, **places: str) -> Callable[[Path, Path], Callable[[], int]]:
    """Returns a command whose text has {seeds}, {out}, {case} (out's folder's name) and places."""

    def make(seeds: Path, out: Path) -> Callable[[], int]:
        known = {"seeds": seeds, "out": out, "case": out.parent.name, **places}
        words = [word.format(**known) for word in text.split()]
        return lambda: cli.main(words)

    return make


def _annotate(seeds: Path, out: Path) -> Callable[[], int]:
    """Annotates a copy of the shots without annotations, by a server in the same process."""
    if not out.exists():
        shutil.copytree(seeds / "shots", out)
        names = ("annotation.json", "annotations.jsonl", "unannotated.jsonl", "characters.json")
        for path in [path for path in out.rglob("*") if path.name in names]:
            path.unlink()

    def run() -> int:
        with serving(lambda question: says(json.dumps(says_of()))) as server:
            words = ["data", "annotate", out, "--characters", seeds / "characters.toml"]
            words += ["--endpoint", server.endpoint, "--model", "stand-in", "--parallel", 1]
            return cli.main(list(map(str, words)))

    return run


_PLAY = "play --model {seeds}/bundle --instructions {seeds}/lines.txt --steps 2 --out {out}"
_PICTURE = " --picture {seeds}/picture.png --picture-text Hana"
SUBJECTS: tuple[Subject, ...] = (
    Subject(
        name="play",
        needs=("bundle", "lines.txt"),
        run=command(_PLAY),
        again=command(f"{_PLAY} --resume"),
        share=_EACH,
    ),
    Subject(
        name="play, own picture",
        needs=("bundle", "lines.txt", "picture.png"),
        run=command(_PLAY + _PICTURE),
        again=command(_PLAY + _PICTURE + " --resume"),
        share=_EACH,
    ),
    Subject(
        name="data films",
        needs=("film.mp4",),
        run=command(
            "data films {seeds}/film.mp4 --out {out} --height 16 --width 24 --num-frames 9"
        ),
        share=_EACH,
    ),
    Subject(
        name="data annotate",
        needs=("shots", "characters.toml", "mika.png"),
        run=_annotate,
        content=_annotations,
    ),
    Subject(
        name="evaluate",
        needs=("bundle", "benchmark.json"),
        run=command(
            "evaluate --model {seeds}/bundle --benchmark {seeds}/benchmark.json --out {out} "
            "--steps 2 --batch-size 1 --metrics states motion speed"
        ),
        content=_evaluation,
        share=0.3,
    ),
    Subject(
        name="data games",
        needs=("shots",),
        run=command("data games {seeds}/shots --out {out} --test-share 0.3 --min-turns 1"),
        share=_EACH,
    ),
    Subject(
        name="data toyworld",
        needs=(),
        run=command(
            "data toyworld --out {out} --games 2 --test-games 1 --turns 2 --height 16 "
            "--width 24 --processes 1"
        ),
        share=_EACH,
    ),
    Subject(
        name="data features",
        needs=("networks", "toyworld"),
        run=command(
            "data features --model {seeds}/networks/model --data {seeds}/toyworld --out {out} "
            "--batch 1 --shard 2"
        ),
        share=_EACH,
    ),
    Subject(
        name="convert",
        needs=("released",),
        run=command("convert --out {out} --reference {seeds}/released"),
        content=bundle_content,
        share=0.6,
    ),
    Subject(name="export", run=command("export --out {out} --bundle {seeds}/bundle")),
    Subject(
        name="training",
        run=command("train-tiny --bundle {seeds}/bundle --out {out}"),
        content=training_content,
        share=0.4,
        first=r"/checkpoints/4|(unlink|rmdir) .*/checkpoints/2/",  # the second of three saves
    ),
)
