"""One block repeated: stacked parameters, a scan over them, and rematerialization."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from animegamer_jax.configs import NetworkConfig, Remat
from animegamer_jax.models.kernels.splash import SAVED
from animegamer_jax.models.linear import PRODUCT, fusion_barrier, has_many_tokens
from animegamer_jax.sharding import platform

_UNROLLED_LAYERS = 8  # at most
_UNROLLED_TOKENS = 1024  # at least, of a device


class LayerStack(nnx.Module):
    """Blocks of one kind: each parameter has a leading `layers` axis, over which a scan runs.

    On a CPU, a scan copies what it saves for the backward pass in and out of stacks, which in
    bfloat16 it also converts: few layers with many tokens are unrolled.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        config: NetworkConfig,
        rngs: nnx.Rngs,
    ):
        self.remat: Remat = config.remat
        make = nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")(make_block)
        self.blocks = jax.vmap(make)(rngs.split(num_layers))

    def __call__(self, x: jax.Array, *args: Any, per_layer: Any = None) -> tuple[jax.Array, Any]:
        """Runs `x, y = block(x, *args, per_layer[layer])` for each layer; returns x and stacked y.

        Args:
            x: Activations [..., t, d].
            args: Further arguments, the same for all layers.
            per_layer: A pytree with a leading axis of layers (a KV cache). If None, a block is
                called without it and returns x alone.
        """
        batch, length = math.prod(x.shape[:-2]), x.shape[-2]
        many = has_many_tokens(batch, length)
        num_layers = jax.tree.leaves(self.blocks)[0].shape[0]
        unrolls = (
            platform() == "cpu"
            and num_layers <= _UNROLLED_LAYERS
            and has_many_tokens(batch, length, least=_UNROLLED_TOKENS)
        )

        def body(x: jax.Array, step: Any) -> tuple[jax.Array, Any]:
            layer, block, extra = step
            if many:
                block = jax.tree.map(fusion_barrier, block)
            elif platform() == "tpu":
                block = _slice_parts(block, self.blocks, layer)
            return (block(x, *args), None) if extra is None else block(x, *args, extra)

        steps = (jnp.arange(num_layers), self.blocks, per_layer)
        return jax.lax.scan(remat(body, self.remat), x, steps, unroll=unrolls)

    def first(self, num_layers: int) -> "LayerStack":
        """Returns the first layers, which share their weights with this stack."""
        graph, state = nnx.split(self)
        return nnx.merge(graph, jax.tree.map(lambda x: x[:num_layers], state))


def remat(function: Callable[..., Any], policy: Remat) -> Callable[..., Any]:
    """Makes the backward pass of a layer recompute what `policy` does not save."""
    if policy == "none":
        return function
    if policy == "full":
        return jax.checkpoint(function)
    # By name: a policy for all products would save their float32 sums.
    saved = jax.checkpoint_policies.save_only_these_names(PRODUCT, SAVED)
    return jax.checkpoint(function, policy=saved)


def _slice_parts(block: nnx.Module, stack: nnx.Module, layer: jax.Array) -> nnx.Module:
    """Returns a layer whose kernels in parts are sliced from the stack part by part.

    A product then reads its part from the stack; a slice of all three parts would be copied first.
    The gradient of such a kernel would be summed over the layers, so this is for playing.
    """

    def slice_one(one: nnx.Variable, every: nnx.Variable) -> nnx.Variable:
        names = every.get_metadata().get("out_sharding") or ()
        if names[1:2] != ("parts",):
            return one
        stacked = every[...]
        rows = stacked.reshape(-1, *stacked.shape[2:])
        first, parts = layer * stacked.shape[1], range(stacked.shape[1])
        return one.replace(
            jnp.stack([jax.lax.dynamic_index_in_dim(rows, first + i, 0, False) for i in parts])
        )

    return jax.tree.map(slice_one, block, stack, is_leaf=lambda x: isinstance(x, nnx.Variable))
