"""Helpers of several stages: networks from a bundle or new, their sizes, FLOPs of a function."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.extend import core

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


def count_matmul_flops(function: Callable[..., Any], *args: Any) -> float:
    """Returns the FLOPs of the matrix products and convolutions in `function(*args)`.

    Other operations do not count, as is usual for model FLOPs. The arguments may be shapes. The
    function is traced, not compiled; a loop's body counts as often as it runs.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> float:
    return float(sum(map(_count_one, jaxpr.eqns)))


def _count_one(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * inner * eqn.outvars[0].aval.size
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * eqn.outvars[0].aval.size * kernel.size / features
    times = params["length"] if name == "scan" else 1
    return float(times) * sum(_count(inner) for inner in _inner_jaxprs(params.values()))


def _inner_jaxprs(values: Any) -> Iterator[core.Jaxpr]:
    """Yields the jaxprs among an operation's parameters: of calls, loops, conditionals."""
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _inner_jaxprs(value)
