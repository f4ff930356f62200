"""Writes the result of a stage: a bundle with the networks that it changed and all others."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    Bundle,
    BundleWriter,
    NetworkName,
    abstract_params,
)
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.bundle.networks import flat_params
from animegamer_jax.bundle.vocabulary import T5_TOKENIZER_FOLDER
from animegamer_jax.configs import Dtype, NetworkConfig
from animegamer_jax.distributed import raise_on_all_hosts
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.step import TrainState

_Leaves = Iterator[tuple[str, np.ndarray]]


def _of_network(name: str, state: nnx.State) -> dict[str, Any]:
    return flat_params(state[name]) if name in state else {}


@functools.cache
def one_layer(everywhere: NamedSharding) -> Callable[[jax.Array, int], jax.Array]:
    """Returns a jitted function that gathers one layer of a stack on all devices."""
    take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return jax.jit(take, out_shardings=everywhere)


def _gather(variable: nnx.Variable) -> np.ndarray:
    """Returns a parameter that may be sharded over several hosts.

    A stack of layers is gathered layer by layer, since all of it may not fit a device's memory.
    """
    array: jax.Array = variable[...]
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    names = tuple(variable.get_metadata().get("out_sharding") or ())
    if names[:1] != ("layers",) or not isinstance(array.sharding, NamedSharding):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    take = one_layer(NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.stack([np.asarray(take(array, layer)) for layer in range(len(array))])


def _gathered(name: NetworkName, state: TrainState, config: NetworkConfig) -> _Leaves:
    """Yields the parameters of a network; each of them waits for all hosts."""
    trained = _of_network(name, state.params if state.ema is None else state.ema)
    frozen = _of_network(name, state.frozen)
    for path in abstract_params(name, config):
        yield path, _gather(trained[path] if path in trained else frozen[path])


def _stored(
    name: NetworkName,
    leaves: _Leaves,
    *,
    bundle: Bundle | None,
    frozen: nnx.State,
    dtype: Dtype,
) -> _Leaves:
    """Yields the parameters in the result's format; frozen ones keep their stored precision."""
    kept = _of_network(name, frozen)
    read = bundle.leaves(name) if bundle is not None and bundle.has(name) else {}
    for path, array in leaves:
        if bundle is not None and path in kept and path in read:
            stored = bundle.read(name, path)
            if np.array_equal(stored.astype(array.dtype), array):  # else: another shape, or new
                array = stored
        yield path, array.astype(jnp.dtype(dtype))


def write_result(
    path: epath.Path,
    state: TrainState,
    *,
    stage: Stage[Any],
    bundle: Bundle | None,
    configs: dict[NetworkName, NetworkConfig],
) -> None:
    """Writes the bundle of a stage completely or not at all, replacing an existing one.

    The networks in `configs` get averaged weights, or trained ones if there is no average, in the
    recipe's number format. The others are copied unchanged from the bundle that the stage started
    from.

    Raises:
        UserError: The folder cannot be written.
    """
    changed: dict[NetworkName, NetworkConfig] = {
        name: with_dtypes(configs[name], remat="none") for name in NETWORKS if name in configs
    }
    # Every host contributes its parts of a weight, and host 0 writes. If writing fails, host 0
    # still gathers the rest, since the others wait for it.
    gathered: dict[NetworkName, _Leaves] = {
        name: _gathered(name, state, config) for name, config in changed.items()
    }
    with raise_on_all_hosts():
        try:
            if jax.process_index() == 0:
                _write(path, gathered, changed, state=state, stage=stage, bundle=bundle)
        finally:
            if jax.process_count() > 1:
                collections.deque(itertools.chain(*gathered.values()), maxlen=0)


def _stages(bundle: Bundle | None, name: str) -> tuple[str, ...] | None:
    """Returns the completed stages, this one included; None if the bundle's are not known."""
    before = () if bundle is None else bundle.info.stages
    return None if before is None else (*(stage for stage in before if stage != name), name)


def _write(
    path: epath.Path,
    gathered: dict[NetworkName, _Leaves],
    changed: dict[NetworkName, NetworkConfig],
    *,
    state: TrainState,
    stage: Stage[Any],
    bundle: Bundle | None,
) -> None:
    dtype = stage.recipe.result_dtype
    stages = _stages(bundle, stage.name)
    with BundleWriter(
        path, name=stage.name, protocol=stage.protocol, overwrite=True, stages=stages
    ) as writer:
        for name in NETWORKS:
            if name in changed:
                config = changed[name]
                leaves = _stored(
                    name, gathered[name], bundle=bundle, frozen=state.frozen, dtype=dtype
                )
            elif bundle is not None and bundle.has(name):
                config = getattr(bundle.config, name)
                leaves = bundle.read_in_order(name, bundle.leaves(name))
            else:
                continue
            released = bundle.info.released.get(name) if bundle is not None else None
            writer.write_network(name, config, leaves, released=released)
        if stage.tokenizer_dir is not None:
            writer.write_tokenizer(stage.tokenizer_dir)
        if bundle is not None and (own := bundle.path / T5_TOKENIZER_FOLDER).is_dir():
            writer.write_tokenizer(own, name=T5_TOKENIZER_FOLDER)
