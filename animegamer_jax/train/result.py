"""What a finished stage leaves: a bundle with the networks that it changed and all others."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from animegamer_jax.bundle import NETWORKS, Bundle, BundleWriter, NetworkName, abstract_params
from animegamer_jax.bundle_config import with_dtypes
from animegamer_jax.bundle_networks import flat_params
from animegamer_jax.configs import Dtype, NetworkConfig
from animegamer_jax.errors import UserError
from animegamer_jax.train.stage import Stage
from animegamer_jax.train.step import TrainState


def _of_network(name: str, state: nnx.State) -> dict[str, Any]:
    return flat_params(state[name]) if name in state else {}


def _exact(stored: np.ndarray | None, used: np.ndarray) -> np.ndarray:
    """A frozen weight: as it was read, if what was used is that one in fewer digits."""
    if stored is None or stored.shape != used.shape:
        return used
    return stored if np.array_equal(stored.astype(used.dtype), used) else used


def _changed(
    name: NetworkName, state: TrainState, bundle: Bundle | None, config: NetworkConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of a network that the stage changed, one at a time, not yet cast."""
    trained = _of_network(name, state.params if state.ema is None else state.ema)
    frozen = _of_network(name, state.frozen)
    stored = bundle.leaves(name) if bundle is not None and bundle.has(name) else {}
    for path in abstract_params(name, config):
        if path in trained:
            yield path, np.asarray(trained[path][...])
        else:
            read = bundle.read(name, path) if bundle is not None and path in stored else None
            yield path, _exact(read, np.asarray(frozen[path][...]))


def _cast(
    leaves: Iterator[tuple[str, np.ndarray]], dtype: Dtype
) -> Iterator[tuple[str, np.ndarray]]:
    for path, array in leaves:
        yield path, array.astype(jnp.dtype(dtype))


def write_result(
    path: epath.Path,
    state: TrainState,
    *,
    stage: Stage[Any],
    bundle: Bundle | None,
    configs: dict[NetworkName, NetworkConfig],
) -> None:
    """Writes the bundle of a stage: all or nothing, in place of one that stands there.

    Args:
        path: the folder.
        state: its averaged weights are stored, or the trained ones where none are kept.
        stage: which networks it changes, and the number format they are stored in.
        bundle: the one it started from, whose other networks are copied as they are; or None.
        configs: of the changed networks.

    Raises:
        UserError: the folder cannot be written, or the run is spread over several hosts.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"{path}: a bundle is written by one host: start the same command on one host alone, "
            "it takes the last checkpoint and writes the result"
        )
    recipe = stage.recipe
    with BundleWriter(path, name=stage.name, protocol=stage.protocol, overwrite=True) as writer:
        for name in NETWORKS:
            if name in configs:
                config = with_dtypes(configs[name], remat="none")
                leaves = _cast(_changed(name, state, bundle, config), recipe.result_dtype)
            elif bundle is not None and bundle.has(name):
                config = getattr(bundle.config, name)
                leaves = bundle.read_in_order(name, bundle.leaves(name))
            else:
                continue
            released = bundle.info.released.get(name) if bundle is not None else None
            writer.write_network(name, config, leaves, released=released)
        if stage.tokenizer_dir is not None:
            writer.write_tokenizer(stage.tokenizer_dir)
