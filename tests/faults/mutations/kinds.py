"""The kinds of files that commands read: which file is changed, and which command reads it."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from animegamer_jax import cli


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file, and the command that reads it.

    Attributes:
        name: Name in the table.
        files: Pattern of the files below the seeds, of which one is changed.
        form: Form of their content, see `mutations`.
        needs: Files and folders of the seeds that the command needs.
        words: The command line; `{}` is the folder of the case.
        outputs: What may exist after success only.
        exact: Whether a change that is not refused must not change what is printed.
        weight: How often it is chosen, next to others.
        follows: Whether the user's own file may name files elsewhere.
        lists: Whether a refusal lists all problems, one a line.
    """

    name: str
    files: str
    form: str
    needs: Sequence[str]
    words: Sequence[str]
    outputs: Sequence[str] = ()
    exact: bool = False
    weight: float = 1.0
    follows: bool = False
    lists: bool = False

    def prepare(self, seeds: Path, case: Path) -> None:
        """Copies what the command needs."""
        for name in self.needs:
            source, target = seeds / name, case / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy(source, target)

    def candidates(self, seeds: Path) -> list[Path]:
        """Returns the files that may be changed, relative to the seeds."""
        found = sorted(path for path in seeds.glob(self.files) if path.is_file())
        return [path.relative_to(seeds) for path in found]

    def command(self, case: Path) -> Callable[[], int]:
        words = [word.replace("{}", str(case)) for word in self.words]
        return lambda: cli.main(words)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PLAY = _words("play --model {}/bundle --instructions {}/lines.txt --out {}/game --resume")
_NEW = _words(
    "play --model {}/bundle --instructions {}/lines.txt --out {}/new --steps 2 "
    "--picture-text Hana --picture"
)
_GAME = ("bundle", "game", "lines.txt")
_ANNOTATE = _words("data annotate {}/shots --characters {}/characters.toml --manual")
_MANUAL = ("shots", "characters.toml", "mika.png", "ren.png", "manual.jsonl", "manual.csv")
_GROUP = _words("data games {}/shots --out {}/games --test-share 0.3 --min-turns 1")
_CONVERT = _words("convert --out {}/converted --reference {}/released")


def _game(name: str, files: str, form: str, weight: float = 1) -> Kind:
    return Kind(
        name=f"saved game: {name}",
        files=f"game/{files}",
        form=form,
        needs=_GAME,
        words=_PLAY,
        weight=weight,
    )


def _shots(name: str, files: str, form: str, weight: float = 1) -> Kind:
    return Kind(
        name=f"shots: {name}",
        files=f"shots/{files}",
        form=form,
        needs=("shots",),
        words=_GROUP,
        outputs=("games/set.json",),
        weight=weight,
    )


def _released(name: str, files: str, form: str, weight: float = 0.5) -> Kind:
    return Kind(
        name=f"released: {name}",
        files=f"released/{files}",
        form=form,
        needs=("released",),
        words=_CONVERT,
        outputs=("converted",),
        weight=weight,
        lists=True,
    )


def _read(name: str, file: str, form: str, words: str, *, need: str = "", **options) -> Kind:
    return Kind(
        name=name, files=file, form=form, needs=(need or file,), words=_words(words), **options
    )


def _picture(suffix: str, form: str) -> Kind:
    name = "clip.mp4" if suffix == "mp4" else f"picture.{suffix}"
    return Kind(
        name=f"own picture: {suffix}",
        files=name,
        form=form,
        needs=("bundle", "lines.txt", name),
        words=(*_NEW, f"{{}}/{name}"),
        outputs=("new/game.json",),
        weight=0.8,
    )


KINDS: tuple[Kind, ...] = (
    _game("game.json", "game.json", "json", 2.5),
    _game("representation", "*.npz", "npz", 2),
    _game("clip", "turn_*.mp4", "video", 1.5),
    _game("picture", "picture.png", "picture", 0.6),
    Kind(
        name="uploaded archive",
        files="game.zip",
        form="zip",
        needs=("game.zip",),
        words=_words("read-archive --file {}/game.zip --out {}/unpacked"),
        outputs=("unpacked",),
        weight=3,
    ),
    Kind(
        name="instructions",
        files="lines.txt",
        form="text",
        needs=("bundle", "lines.txt"),
        words=_words("play --model {}/bundle --instructions {}/lines.txt --out {}/new --steps 2"),
        weight=1.2,
    ),
    _picture("png", "picture"),
    _picture("jpg", "picture"),
    _picture("gif", "picture"),
    _picture("webp", "picture"),
    _picture("mp4", "video"),
    Kind(
        name="bundle: config.json",
        files="bundle/config.json",
        form="json",
        needs=("bundle",),
        words=_words("export --bundle {}/bundle --out {}/exported"),
        outputs=("exported",),
        weight=2,
    ),
    Kind(
        name="bundle: config.json, loaded",
        files="bundle/config.json",
        form="json",
        needs=("bundle",),
        words=_words("read-weights --folder {}/bundle"),
        weight=0.6,
    ),
    _read(
        "bundle: weights",
        "bundle/encoder/**/*",
        "binary",
        "read-weights --folder {}/bundle",
        need="bundle",
        exact=True,
        weight=1.2,
    ),
    Kind(
        name="bundle: weights, exported",
        files="bundle/encoder/**/*",
        form="binary",
        needs=("bundle",),
        exact=False,
        outputs=("exported",),
        weight=1,
        words=_words("export --bundle {}/bundle --out {}/exported --networks encoder"),
    ),
    _read(
        "bundle: tokenizer",
        "bundle/tokenizer/*.json",
        "json",
        "read-tokenizer --folder {}/bundle/tokenizer",
        need="bundle/tokenizer",
        weight=1.5,
    ),
    _read(
        "bundle: T5's tokenizer",
        "t5_tokenizer/*[ln]",
        "binary",
        "read-t5-tokenizer --folder {}/t5_tokenizer",
        need="t5_tokenizer",
        weight=0.6,
    ),
    _read(
        "bundle: words.json",
        "bundle/words.json",
        "json",
        "read-words --folder {}/bundle",
        need="bundle/words.json",
    ),
    _released("animegamer.json", "animegamer.json", "json"),
    _released("config.json", "*/**/config.json", "json"),
    _released("latest", "vdm/latest", "text", 0.3),
    _released("torch files", "**/*.[bp][it]*", "torch", 0.9),
    _released("tokenizer", "tokenizer/*.json", "json", 0.3),
    Kind(
        name="Hugging Face: index",
        files="sharded/*.index.json",
        form="json",
        needs=("sharded",),
        words=_words("convert --t5 {}/sharded --out {}/converted"),
        outputs=("converted",),
        lists=True,
        weight=1.5,
    ),
    Kind(
        name="Hugging Face: safetensors",
        files="sharded/*.safetensors",
        form="safetensors",
        needs=("sharded",),
        words=_words("convert --t5 {}/sharded --out {}/converted"),
        outputs=("converted",),
        lists=True,
        weight=1.5,
    ),
    _read("parity arrays", "parity.npz", "npz", "read-parity --file {}/parity.npz", weight=1.2),
    Kind(
        name="film",
        files="film.mp4",
        form="video",
        needs=("film.mp4",),
        weight=0.8,
        words=_words("data films {}/film.mp4 --out {}/cut --height 16 --width 24 --num-frames 9"),
    ),
    _shots("shots.json", "shots.json", "json", 0.6),
    _shots("film.json", "*/film.json", "json"),
    _shots("clips.jsonl", "*/clips.jsonl", "lines"),
    _shots("clips.zip", "*/clips.zip", "zip", 1.2),
    _shots("annotations", "*/annotation*", "lines"),
    _shots("characters", "characters.json", "json", 0.5),
    Kind(
        name="shots: shown",
        files="shots/*/*",
        form="zip",
        needs=("shots",),
        words=_words("data show {}/shots --out {}/shown.html --clips 4"),
        outputs=("shown.html",),
    ),
    Kind(
        name="characters.toml",
        files="characters.toml",
        form="text",
        needs=_MANUAL,
        follows=True,
        words=(*_ANNOTATE, "{}/manual.jsonl"),
        weight=1.2,
    ),
    Kind(
        name="reference pictures",
        files="mika.png",
        form="picture",
        needs=_MANUAL,
        words=(*_ANNOTATE, "{}/manual.jsonl"),
    ),
    Kind(
        name="manual.jsonl",
        files="manual.jsonl",
        form="lines",
        needs=_MANUAL,
        words=(*_ANNOTATE, "{}/manual.jsonl"),
        weight=1.2,
    ),
    Kind(
        name="manual.csv",
        files="manual.csv",
        form="text",
        needs=_MANUAL,
        words=(*_ANNOTATE, "{}/manual.csv"),
    ),
    _read(
        "games: set.json",
        "toyworld/set.json",
        "json",
        "read-games --folder {}/toyworld",
        need="toyworld",
    ),
    _read(
        "games: TFDS files",
        "toyworld/games/*/*.json",
        "json",
        "read-games --folder {}/toyworld",
        need="toyworld",
    ),
    _read(
        "games: records",
        "toyworld/games/*/*array_record*",
        "binary",
        "read-games --folder {}/toyworld",
        need="toyworld",
        exact=True,
        weight=1.5,
    ),
    Kind(
        name="games: shown",
        files="toyworld/**/*",
        form="binary",
        needs=("toyworld",),
        weight=0.6,
        words=_words("data show {}/toyworld --out {}/shown.html --clips 4"),
        outputs=("shown.html",),
    ),
    _read(
        "features: set.json",
        "features/set.json",
        "json",
        "read-features --folder {}/features",
        need="features",
    ),
    _read(
        "features: records",
        "features/*/*/*array_record*",
        "binary",
        "read-features --folder {}/features",
        need="features",
        exact=True,
        weight=1.2,
    ),
    _read(
        "benchmark", "benchmark.json", "json", "read-benchmark --file {}/benchmark.json", weight=2
    ),
    _read(
        "results.json",
        "results/results.json",
        "json",
        "read-results --folder {}/results",
        need="results",
        weight=1.5,
    ),
    _read(
        "ablations", "ablations.json", "json", "read-ablations --file {}/ablations.json", weight=1
    ),
    Kind(
        name="evaluation: an earlier one",
        files="evaluated/**/*.json",
        form="json",
        needs=("bundle", "benchmark.json", "evaluated"),
        words=_words(
            "evaluate --model {}/bundle --benchmark {}/benchmark.json --out {}/evaluated "
            "--steps 2 --batch-size 1 --games 1 --metrics states motion"
        ),
    ),
    _read(
        "evaluation: reference", "reference.json", "json", "read-reference --file {}/reference.json"
    ),
    _read("evaluation: lists", "lists.toml", "text", "read-lists --file {}/lists.toml"),
    _read(
        "evaluation: CLIP",
        "clip/*",
        "torch",
        "read-clip --file {}/clip/open_clip_pytorch_model.bin",
        need="clip",
        lists=True,
        weight=0.3,
    ),
    _read(
        "evaluation: LPIPS",
        "lpips/*.pth",
        "torch",
        "read-lpips --alexnet {}/lpips/alexnet.pth --linear {}/lpips/alex.pth",
        need="lpips",
        lists=True,
        weight=0.3,
    ),
    _read(
        "evaluation: LPIPS's package",
        "lpips/alexnet.ckpt",
        "pickle",
        "read-lpips-package --file {}/lpips/alexnet.ckpt",
        need="lpips",
        lists=True,
        weight=0.4,
    ),
    _read(
        "published bundle: weights",
        "published/*/*.safetensors",
        "safetensors",
        "read-weights --folder {}/published",
        need="published",
        exact=True,
    ),
    _read(
        "published bundle: index",
        "published/*/*.index.json",
        "json",
        "read-weights --folder {}/published",
        need="published",
    ),
    _read(
        "openings.json",
        "published/openings/openings.json",
        "json",
        "read-openings --folder {}/published",
        need="published",
    ),
    Kind(
        name="unfinished.json",
        files="begun/unfinished.json",
        form="json",
        needs=("shots", "begun"),
        words=_words("data games {}/shots --out {}/begun --test-share 0.3 --min-turns 1"),
        outputs=("begun/set.json",),
    ),
    _read(
        "metrics.jsonl", "run/metrics.jsonl", "lines", "read-metrics --folder {}/run", need="run"
    ),
    Kind(
        name="steps to skip",
        files="skip.json",
        form="json",
        needs=("bundle", "skip.json"),
        words=_words("read-skipped-steps --folder {}/bundle --file {}/skip.json"),
    ),
    _read(
        "checkpoint",
        "checkpoints/**/*",
        "binary",
        "read-checkpoint --folder {}/checkpoints",
        need="checkpoints",
        weight=1.2,
    ),
    _read(
        "checkpoint: scores.json",
        "checkpoints/scores.json",
        "json",
        "read-checkpoint --folder {}/checkpoints",
        need="checkpoints",
        weight=0.6,
    ),
    _read(
        "checkpoint: JSON",
        "checkpoints/*/*/metadata",
        "json",
        "read-checkpoint --folder {}/checkpoints",
        need="checkpoints",
        weight=0.6,
    ),
)
