"""Helpers of several stages: networks from a bundle or new, and their sizes."""

from typing import Any

import jax
from flax import nnx

from animegamer_jax.bundle.bundle import Bundle, NetworkName, make_network
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.sharding import param_shardings
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.stages.recipe import DECAYED


def load_or_make(
    name: NetworkName, stage: Stage[Any], bundle: Bundle | None, *, mesh: jax.sharding.Mesh
) -> Any:
    """Returns a network to train: the bundle's, or a new one from the recipe's seed.

    New weights are created with their sharding on the mesh.
    """
    recipe = stage.recipe
    if bundle is not None and bundle.has(name):
        return bundle.load(name, mesh=mesh, dtype=recipe.dtype, remat=recipe.remat)
    config = with_dtypes(getattr(stage.config, name), dtype=recipe.dtype, remat=recipe.remat)

    def make() -> nnx.Module:
        return make_network(name, config, rngs=nnx.Rngs(recipe.seed))

    graphdef, params = nnx.split(nnx.eval_shape(make))
    shardings = param_shardings(params, mesh)
    if mesh.size == 1:
        # As one program, a small VAE's random numbers alone take minutes to compile.
        return nnx.merge(graphdef, jax.device_put(nnx.state(make()), shardings))
    return nnx.merge(graphdef, jax.jit(lambda: nnx.state(make()), out_shardings=shardings)())


def matrix_size(module: nnx.Module) -> int:
    """Returns the number of weights in the matrices of a (possibly abstract) module."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return sum(variable.size for path, variable in flat if str(path[-1]) in DECAYED)
