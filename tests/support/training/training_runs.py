"""Runs of the tiny stage, to train in a test or in a process that it starts."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import grain
import jax
import numpy as np
from helpers import NUM_TEXT
from tiny_stage import RECIPE, TinyRecipe, TinyStage, one_device

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import open_features
from animegamer_jax.storage.paths import absolute
from animegamer_jax.train.run import TrainingRun
from animegamer_jax.train.stages.base import DataSource, StageNetworks

STEPS = 12
LONG = dataclasses.replace(RECIPE, steps=STEPS, save_every=3, eval_every=9, noise=0.1)


class OfShards(TinyStage):
    """Reads every record of a feature dataset, conditions and latents."""

    read: ClassVar[set[int]] = set()

    def samples(self, sources: Any, *, split: str) -> grain.MapDataset:
        features = open_features(sources[0].path)
        turns, latents = features.turns(split), features.latents(split)

        def sample(index: int) -> dict[str, np.ndarray]:
            record, moments = turns[index], latents[index]["moments"]
            self.read.add(int(record["game"]))
            arrays = record["text_features"], record["image_features"], moments
            return {
                name: np.resize(array, spec.shape).astype(spec.dtype)
                for (name, spec), array in zip(self.sample_spec().items(), arrays, strict=True)
            }

        return grain.MapDataset.range(len(turns)).map(sample)


class Measuring(TinyStage):
    """Writes something that it measures into the result's configuration."""

    def finish(self, networks: StageNetworks, batches: Any) -> Any:
        (config,) = self.configs().values()
        batch = next(batches)
        assert batch["text"].shape == (8, NUM_TEXT, 12)
        return {"encoder": dataclasses.replace(config, dtype="bfloat16")}


def make_run(
    out: Path,
    bundle: Bundle,
    *,
    recipe: TinyRecipe = LONG,
    kind: type[TinyStage] = TinyStage,
    mesh: jax.sharding.Mesh | None = None,
    peak: float | None = None,
    export: Literal["last", "best"] = "last",
) -> TrainingRun:
    stage = kind(recipe, bundle.config, bundle.protocol, tokenizer_dir=bundle.tokenizer_dir)
    mesh = one_device() if mesh is None else mesh
    sources = (DataSource("somewhere"),)
    return TrainingRun(
        stage=stage,
        bundle=bundle,
        sources=sources,
        out=absolute(out),
        mesh=mesh,
        peak_tflops=peak,
        export_checkpoint=export,
    )
