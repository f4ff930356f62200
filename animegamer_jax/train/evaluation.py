"""Evaluation of a stage on held-out data during training."""

from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from animegamer_jax.data.loader import on_mesh, rows_here
from animegamer_jax.train.stages.base import Evaluation, Stage
from animegamer_jax.train.step import TrainState, averaged


class Evaluator:
    """Some batches of held-out data, spread evenly over it, kept in memory.

    Args:
        stage: The stage; its recipe gives the number and size of the batches.
        samples: The held-out samples.
        mesh: The devices.

    Raises:
        UserError: A sample cannot be read, or the mesh does not divide the batch.
    """

    def __init__(self, stage: Stage[Any], samples: grain.MapDataset, mesh: Mesh):
        self._stage, self._mesh = stage, mesh
        size = stage.recipe.batch_size
        count = stage.recipe.eval_batches * size
        stride = max(1, len(samples) // max(count, 1))
        rows = rows_here(mesh, batch_size=size)
        read = [
            [samples[(start + k) * stride % len(samples)] for k in rows]
            for start in range(0, count, size)
        ]
        self._batches = [jax.tree.map(lambda *leaves: np.stack(leaves), *batch) for batch in read]

        def loss(state: TrainState, batch: Any, key: jax.Array) -> Any:
            return stage.loss(averaged(state), batch, key)

        self._loss = jax.jit(loss)

    def evaluate(self, state: TrainState, key: jax.Array) -> Evaluation:
        """Returns the means over the batches, and clips of the first one.

        The same key gives the same draws.

        Raises:
            ValueError: The stage returns no score of the name in `best`.
        """
        found: list[Mapping[str, float]] = []
        clips: Mapping[str, Any] = {}
        networks = averaged(state)
        with jax.set_mesh(self._mesh):
            for number, arrays in enumerate(self._batches):
                batch = on_mesh(arrays, self._mesh)
                loss_key, stage_key = jax.random.split(jax.random.fold_in(key, number))
                loss, parts = self._loss(state, batch, loss_key)
                result = self._stage.evaluate(networks, batch, stage_key)
                clips = result.clips if number == 0 else clips
                scalars = {"loss": loss, **parts, **result.scalars}
                found.append({name: float(value) for name, value in scalars.items()})
        means = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
        best, _ = self._stage.best
        if best not in means:
            raise ValueError(f"stage {self._stage.name}: no score {best!r} in {means}")
        return Evaluation(means, clips)
