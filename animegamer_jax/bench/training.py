"""The training step of each stage, ready to compile: real networks, random samples."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from animegamer_jax.bench.programs import Program
from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import SIZES, Dtype
from animegamer_jax.sharding import PLANS, make_mesh, use_plan
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.step import (
    make_state,
    make_train_step,
    stage_optimizer,
    state_shardings,
)

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
    """Returns the training step of one of `STAGES` on this bundle's networks, on the first device.

    The number format and the number of samples are the recipe's if None.
    """
    stage_name, part, _ = STAGES[name]
    stage_class, recipe = find_stage(stage_name, part=part, size=_recipe_size(bundle))
    changes: dict[str, Any] = {"dtype": dtype, "batch_size": batch_size, "accumulate": 1}
    recipe = dataclasses.replace(
        recipe, **{field: value for field, value in changes.items() if value is not None}
    )
    toy = SIZES["toy"]()  # for the shapes of samples that networks make which the bundle lacks
    own = {name: network for name, network in vars(bundle.config).items() if network is not None}
    config = dataclasses.replace(toy, **own)
    stage = stage_class(recipe, config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)
    batch = _batch(stage)
    mesh, plan = make_mesh(devices=jax.devices()[:1]), PLANS["replicated"]
    with use_plan(plan):
        networks = stage.load(bundle, mesh=mesh)
        optimizer = stage_optimizer(stage)
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


def _batch(stage: Stage[Any]) -> Any:
    """Makes a batch of the shapes that the stage reads, filled with random numbers."""
    random, count = np.random.default_rng(2), stage.recipe.batch_size

    def one(spec: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = (count, *spec.shape)
        if spec.dtype == np.uint8:
            return random.integers(0, 256, shape, np.uint8)
        if spec.dtype == np.int32:  # valid as token ids, lengths, states and numbers of turns
            return random.integers(1, 3, shape, np.int32)
        return random.normal(size=shape).astype(spec.dtype)

    return jax.tree.map(one, stage.sample_spec())
