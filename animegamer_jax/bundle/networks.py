"""The networks that a bundle may hold, and the paths and shapes of their parameters."""

import functools
import importlib
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from animegamer_jax.configs import NetworkConfig, NetworkName
from animegamer_jax.errors import UserError, first_line

NETWORKS: Mapping[NetworkName, str] = {
    "mllm": "animegamer_jax.models.mllm:MLLM",
    "encoder": "animegamer_jax.models.encoder:ShotEncoder",
    "dit": "animegamer_jax.models.dit:DiT",
    "vae": "animegamer_jax.models.vae:VAE",
    "clip": "animegamer_jax.models.clip:CLIP",
    "t5": "animegamer_jax.models.t5:T5Encoder",
    "picture": "animegamer_jax.models.dit:DiT",
}

_MAX_ELEMENTS = 1 << 40  # of a parameter; NumPy's sizes end at 1 << 63


def make_network(name: NetworkName, config: NetworkConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """Makes a network by its name in a bundle."""
    module, class_name = NETWORKS[name].split(":")
    return getattr(importlib.import_module(module), class_name)(config, rngs=rngs)


def abstract_network(name: NetworkName, config: NetworkConfig) -> nnx.Module:
    """Makes a network whose parameters are only shapes, without memory.

    Raises:
        UserError: There is no network of these sizes.
    """
    try:
        structure, shapes = _shapes(name, config, jax.sharding.get_abstract_mesh())
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"networks.{name}: sizes that make no network ({first_line(error)}): convert the "
            "weights again"
        ) from error
    return nnx.merge(structure, shapes, copy=True)  # whoever loads weights sets them in their copy


@functools.lru_cache(maxsize=32)
def _shapes(name: NetworkName, config: NetworkConfig, mesh: AbstractMesh) -> tuple[Any, Any]:
    """Returns a network's structure and its shapes: tracing it takes half of a small one's load."""
    del mesh  # which flax looks at
    network = nnx.eval_shape(lambda: make_network(name, config, rngs=nnx.Rngs(0)))
    for path, variable in flat_params(nnx.state(network, nnx.Param)).items():
        if math.prod(variable.shape) > _MAX_ELEMENTS:
            raise ValueError(f"{path} would have the shape {variable.shape}")
    return nnx.split(network)


def flat_params(state: nnx.State) -> dict[str, nnx.Variable]:
    """Returns the parameters of a (possibly abstract) state by dotted path."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@functools.lru_cache(maxsize=32)
def abstract_params(name: NetworkName, config: NetworkConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Returns shape and format of each parameter of a network by dotted path.

    Raises:
        UserError: There is no network of these sizes.
    """
    state = nnx.state(abstract_network(name, config), nnx.Param)
    shapes = {
        path: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in flat_params(state).items()
    }
    return types.MappingProxyType(shapes)


def param_leaves(module: nnx.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and array of each parameter, as `BundleWriter.write_network` takes them."""
    for path, variable in flat_params(nnx.state(module, nnx.Param)).items():
        yield path, np.asarray(variable[...])
