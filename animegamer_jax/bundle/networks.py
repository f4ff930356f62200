"""The networks that a bundle may hold, and the paths and shapes of their parameters."""

import functools
import importlib
import types
from collections.abc import Iterator, Mapping
from typing import Literal

import jax
import numpy as np
from flax import nnx

from animegamer_jax.configs import NetworkConfig

NetworkName = Literal["mllm", "encoder", "dit", "vae", "clip", "t5"]
NETWORKS: Mapping[NetworkName, str] = {
    "mllm": "animegamer_jax.models.mllm:MLLM",
    "encoder": "animegamer_jax.models.encoder:ShotEncoder",
    "dit": "animegamer_jax.models.dit:DiT",
    "vae": "animegamer_jax.models.vae:VAE",
    "clip": "animegamer_jax.models.clip:CLIP",
    "t5": "animegamer_jax.models.t5:T5Encoder",
}


def make_network(name: NetworkName, config: NetworkConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """A network of a bundle, by its name there."""
    module, class_name = NETWORKS[name].split(":")
    return getattr(importlib.import_module(module), class_name)(config, rngs=rngs)


def abstract_network(name: NetworkName, config: NetworkConfig) -> nnx.Module:
    """The same without any memory: its parameters are shapes."""
    return nnx.eval_shape(lambda: make_network(name, config, rngs=nnx.Rngs(0)))


def flat_params(state: nnx.State) -> dict[str, nnx.Variable]:
    """The parameters of a (possibly abstract) state by their dotted paths."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


@functools.lru_cache(maxsize=32)
def abstract_params(name: NetworkName, config: NetworkConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and format of each parameter of a network, by its dotted path."""
    state = nnx.state(abstract_network(name, config), nnx.Param)
    shapes = {
        path: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in flat_params(state).items()
    }
    return types.MappingProxyType(shapes)


def param_leaves(module: nnx.Module) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of a module as `BundleWriter.write_network` takes them, one at a time."""
    for path, variable in flat_params(nnx.state(module, nnx.Param)).items():
        yield path, np.asarray(variable[...])
