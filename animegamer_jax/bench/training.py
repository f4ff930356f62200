"""The training step of each stage, ready to compile: real networks, random samples."""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from animegamer_jax.bench.programs import Program
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import SIZES, Dtype
from animegamer_jax.data.samples import (
    CaptionSample,
    ClipSample,
    TextSample,
)
from animegamer_jax.plan.abstract_inputs import write_features
from animegamer_jax.sharding import PLANS, make_mesh, use_plan
from animegamer_jax.train.command import find_stage
from animegamer_jax.train.optimizer import make_optimizer
from animegamer_jax.train.stages.base import DataSource, Stage
from animegamer_jax.train.step import make_state, make_train_step, state_shardings

# By name of the program: stage, part, and the networks that the stage loads.
STAGES: Mapping[str, tuple[str, str | None, tuple[NetworkName, ...]]] = {
    "train-clip": ("foundations", "clip", ("clip",)),
    "train-t5": ("foundations", "t5", ("t5",)),
    "train-vae": ("foundations", "vae", ("vae", "clip")),
    "train-dit": ("foundations", "dit", ("dit", "t5", "vae")),
    "train-warmup": ("warmup", None, ("encoder", "dit", "vae")),
    "train-decoder": ("decoder", None, ("encoder", "dit", "vae")),
    "train-mllm": ("mllm", None, ("mllm", "encoder")),
    "train-adapt": ("adapt", None, ("mllm", "encoder", "dit", "vae")),
}


def trainable(bundle: Bundle) -> tuple[str, ...]:
    """Returns the stages that have a recipe for the bundle and all of whose networks it has."""
    has_recipe = _recipe_size(bundle) == "toy"  # at released size the foundations are pre-trained
    return tuple(
        name
        for name, (_, part, needed) in STAGES.items()
        if all(map(bundle.has, needed)) and (part is None or has_recipe)
    )


def _recipe_size(bundle: Bundle) -> Literal["toy", "full"]:
    """Returns the size of the recipe: "full" is for low-rank updates of pre-trained networks."""
    dit = bundle.config.dit
    return "toy" if dit is None or dit.lora is None else "full"


def training_program(
    name: str, bundle: Bundle, *, dtype: Dtype | None, batch_size: int | None
) -> Program:
    """Returns a stage's training step on this bundle's networks, on the first device.

    Args:
        name: One of `STAGES`.
        bundle: The bundle, with the stage's networks.
        dtype: Number format of activations and frozen weights; the recipe's if None.
        batch_size: Samples of a step; the recipe's if None.
    """
    stage_name, part, _ = STAGES[name]
    stage_class, recipe = find_stage(stage_name, part=part, size=_recipe_size(bundle))
    changes: dict[str, Any] = {"dtype": dtype, "batch_size": batch_size, "accumulate": 1}
    recipe = dataclasses.replace(
        recipe, **{field: value for field, value in changes.items() if value is not None}
    )
    stage = stage_class(recipe, bundle.config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)
    batch = _batch(stage, part=part)
    mesh, plan = make_mesh(devices=jax.devices()[:1]), PLANS["replicated"]
    with use_plan(plan):
        networks = stage.load(bundle, mesh=mesh)
        optimizer = make_optimizer(recipe.optimizer, steps=recipe.steps)
        state = make_state(networks, stage, optimizer, mesh=mesh)
        step = make_train_step(stage, optimizer, shardings=state_shardings(state, mesh))
    return Program(
        name=name,
        description=f"{recipe.batch_size} {stage.unit}, {recipe.dtype}, remat {recipe.remat}",
        function=step,
        arguments=(state, batch, jax.random.key(0)),
        carries_state=True,
        context=lambda: jax.set_mesh(mesh),
    )


def _batch(stage: Stage[Any], *, part: str | None) -> Any:
    """Makes a batch of the shapes that the stage reads, filled with random numbers."""
    random = np.random.default_rng(2)
    count, config = stage.recipe.batch_size, stage.config
    if part in _SAMPLES:
        return _SAMPLES[part](config, stage.recipe, count, random)
    toy = SIZES["toy"]()  # the dataset must name the networks that made its features
    complete = dataclasses.replace(config, t5=config.t5 or toy.t5, clip=config.clip or toy.clip)
    with tempfile.TemporaryDirectory() as folder:
        features = write_features(Path(folder), complete, stage.protocol)
        samples = stage.samples([DataSource(str(features))], split="train")
        found = [samples[number % len(samples)] for number in range(count)]

    def one(*leaves: Any) -> Any:
        array = np.stack(leaves)
        if array.dtype != np.float32 or array.ndim < 3:
            return array
        return random.normal(size=array.shape).astype(np.float32)

    return jax.tree.map(one, *found)


def _clips(config: Any, recipe: Any, count: int, random: np.random.Generator) -> ClipSample:
    del recipe
    dit, vae = config.dit, config.vae
    frames = 1 + (dit.latent_frames - 1) * vae.temporal_compression
    size = (dit.latent_height * vae.spatial_compression, dit.latent_width * vae.spatial_compression)
    return ClipSample(_bytes(random, count, frames, *size, 3))


def _captions(config: Any, recipe: Any, count: int, random: np.random.Generator) -> CaptionSample:
    del recipe
    clip = config.clip
    frame = _bytes(random, count, clip.image_size, clip.image_size, 3)
    tokens = random.integers(1, clip.vocab_size, (count, clip.context_length), np.int32)
    return CaptionSample(frame, tokens)


def _texts(config: Any, recipe: Any, count: int, random: np.random.Generator) -> TextSample:
    return TextSample(random.integers(1, config.t5.vocab_size, (count, recipe.length), np.int32))


def _bytes(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(0, 256, shape, np.uint8)


_SAMPLES: Mapping[Any, Callable[..., Any]] = {"vae": _clips, "clip": _captions, "t5": _texts}
