"""A tiny model and tiny games for the stages that read histories."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny_sets
from helpers import random_leaves, tiny_config
from jax.sharding import Mesh
from tiny_stage import one_device

from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.configs import ModelConfig
from animegamer_jax.protocol import Protocol
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.optimizer import make_optimizer
from animegamer_jax.train.stages.base import DataSource, Stage
from animegamer_jax.train.step import TrainState, make_state, make_train_step, state_shardings

PROTOCOL = dataclasses.replace(tiny_sets.PROTOCOL, window=3)
NUM_QUERIES = tiny_sets.TEXT[0] + tiny_sets.IMAGE[0]


def make_key() -> jax.Array:
    """The same one every time: a key may be used once."""
    return jax.random.key(7)


def make_config(vocab_size: int) -> ModelConfig:
    """The networks of `helpers`, for features of `tiny_sets`."""
    config: Any = tiny_config(vocab_size)
    return ModelConfig(
        mllm=dataclasses.replace(config.mllm, num_queries=NUM_QUERIES),
        encoder=dataclasses.replace(
            config.encoder,
            num_text_tokens=tiny_sets.TEXT[0],
            text_size=tiny_sets.TEXT[1],
            num_image_tokens=tiny_sets.IMAGE[0],
            image_size=tiny_sets.IMAGE[1],
        ),
        dit=dataclasses.replace(config.dit, num_context_tokens=NUM_QUERIES),
        vae=dataclasses.replace(config.vae, scaling_factor=0.7),
        t5=tiny_sets.CONFIG.t5,
        clip=tiny_sets.CONFIG.clip,
    )


def write_model(
    folder: Path,
    *,
    networks: tuple[str, ...] = ("mllm", "encoder", "dit", "vae"),
    protocol: Protocol = PROTOCOL,
    seed: int = 3,
    memory: int = 0,
) -> Bundle:
    """A bundle of random weights, whose decoder may remember first frames."""
    tokenizer = folder / "tokenizer"
    config: Any = make_config(len(tiny_sets.make_tokenizer(tokenizer)))
    config = dataclasses.replace(config, dit=dataclasses.replace(config.dit, memory=memory))
    with BundleWriter(folder / "model", name="tiny", protocol=protocol) as writer:
        for name in networks:
            leaves = random_leaves(name, getattr(config, name), seed)
            writer.write_network(name, getattr(config, name), leaves)
        writer.write_tokenizer(tokenizer)
    return Bundle.open(folder / "model")


def make_stage(kind: type[Stage[Any]], recipe: Any, bundle: Bundle) -> Stage[Any]:
    """A stage as the command makes it: networks that the bundle lacks get their sizes here."""
    config = bundle.config
    if config.mllm is None:
        tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=NUM_QUERIES)
        config = dataclasses.replace(config, mllm=make_config(len(tokenizer)).mllm)
    return kind(recipe, config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)


def batch_of(stage: Stage[Any], features: Path, size: int) -> Any:
    """Turns 0, 1, 2, ... of the set as one batch of arrays, whose shapes the stage must know."""

    def shapes(sample: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), sample)

    samples = stage.samples([DataSource(str(features))], split="train")
    assert shapes(stage.sample_spec()) == shapes(samples[0])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(samples[i] for i in range(size)))


def run(
    stage: Stage[Any],
    bundle: Bundle,
    batch: Any,
    *,
    steps: int,
    mesh: Mesh | None = None,
    between: Callable[[TrainState], TrainState] = lambda state: state,
) -> tuple[TrainState, TrainState, list[dict[str, float]]]:
    """The state before and after some steps on one batch, and the steps' metrics.

    `between` changes the state between two steps.
    """
    mesh = mesh or one_device()
    optimizer = make_optimizer(
        stage.recipe.optimizer, steps=steps, rate_factors=stage.rate_factors()
    )
    state = make_state(stage.load(bundle, mesh=mesh), stage, optimizer, mesh=mesh)
    before = jax.device_get(state)
    step = make_train_step(stage, optimizer, shardings=state_shardings(state, mesh))
    history, key = [], make_key()
    with jax.set_mesh(mesh):
        for number in range(steps):
            state = between(state) if number else state
            state, metrics = step(state, batch, key)
            history.append({name: float(value) for name, value in metrics.items()})
    assert step._cache_size() == 1
    return before, jax.device_get(state), history
