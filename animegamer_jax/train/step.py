"""The training step: one pure function of the state, a batch and a key, for every stage.

Trained weights are float32 and differentiated; all others are frozen, in the recipe's number
format, and are returned bit for bit. A step whose loss or gradients are not finite changes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from animegamer_jax.sharding import param_shardings, partition_spec
from animegamer_jax.train.optimizer import (
    Optimizer,
    average_decay,
    make_optimizer,
    parameter_path,
    update_average,
)
from animegamer_jax.train.stages.base import Scalars, Stage, StageNetworks


class TrainState(NamedTuple):
    """Everything that a step reads and writes.

    Attributes:
        step: Number of optimizer steps done.
        graphdef: The networks without their weights; static.
        params: Trained weights, float32.
        frozen: All other weights of the networks.
        opt_state: State of the optimizer.
        ema: Average of `params`; None if the recipe keeps none.
    """

    step: Int[Array, ""]
    graphdef: Any
    params: nnx.State
    frozen: nnx.State
    opt_state: optax.OptState
    ema: nnx.State | None


Metrics = dict[str, Array]
StepFunction = Callable[[TrainState, Any, Key[Array, ""]], tuple[TrainState, Metrics]]


def stage_optimizer(stage: Stage[Any]) -> Optimizer:
    """Returns the optimizer of a stage's recipe."""
    recipe = stage.recipe
    return make_optimizer(recipe.optimizer, steps=recipe.steps, rate_factors=stage.rate_factors())


def split_networks(networks: StageNetworks, stage: Stage[Any]) -> tuple[Any, nnx.State, nnx.State]:
    """Returns the networks' structure, trained weights and frozen weights.

    Raises:
        ValueError: The stage trains none of the weights.
    """

    def trained(path: tuple[Any, ...], variable: Any) -> bool:
        inside = tuple(map(str, path[1:]))
        return isinstance(variable, nnx.Param) and stage.is_trained(path[0], inside, variable)

    graphdef, params, frozen = nnx.split(networks, trained, ...)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"stage {stage.name}: none of the weights of {sorted(networks)} is trained"
        )
    return graphdef, params, frozen


def _cast(tree: Any, dtype: str) -> Any:
    def one(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the shardings of a (possibly abstract) state: weights by the names of their axes.

    Everything else, such as counts, is replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def one(leaf: Any) -> Any:
        return param_shardings(leaf, mesh) if isinstance(leaf, nnx.Variable) else replicated

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: samples over the mesh axes of the batch."""
    return NamedSharding(mesh, partition_spec(("act_batch",)))


def _starter(
    networks: StageNetworks, stage: Stage[Any], optimizer: Optimizer
) -> tuple[Callable[[nnx.State, nnx.State], TrainState], nnx.State, nnx.State]:
    """Returns a function that makes the first state from the weights, and these weights."""
    graphdef, params, frozen = split_networks(networks, stage)
    recipe = stage.recipe

    def start(params: nnx.State, frozen: nnx.State) -> TrainState:
        params = _cast(params, "float32")
        # A copy, since the step cannot be given one buffer twice.
        ema = None if recipe.ema_decay is None else jax.tree.map(jnp.copy, params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            graphdef=graphdef,
            params=params,
            frozen=_cast(frozen, recipe.dtype),
            opt_state=optimizer.init(params),
            ema=ema,
        )

    return start, params, frozen


def make_state(
    networks: StageNetworks, stage: Stage[Any], optimizer: Optimizer, *, mesh: Mesh
) -> TrainState:
    """Returns the state before the first step, created with its sharding.

    The networks must not be used afterwards: the state takes their arrays, and the first step
    donates them.
    """
    start, params, frozen = _starter(networks, stage, optimizer)
    shardings = state_shardings(jax.eval_shape(start, params, frozen), mesh)
    return jax.jit(start, out_shardings=shardings)(params, frozen)


def abstract_state(
    networks: StageNetworks, stage: Stage[Any], optimizer: Optimizer, *, mesh: Mesh
) -> tuple[TrainState, TrainState]:
    """Returns the shapes of `make_state`'s result and their shardings; networks may be shapes."""
    start, params, frozen = _starter(networks, stage, optimizer)
    state = jax.eval_shape(start, params, frozen)
    return state, state_shardings(state, mesh)


def _parts(batch: Any, count: int) -> Any:
    """Splits [b, ...] into [count, b / count, ...], neighbours into different parts.

    So every device splits its own samples, and no sample is sent to another device.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), batch
    )


def _gradients(
    stage: Stage[Any], state: TrainState, batch: Any, key: Key[Array, ""]
) -> tuple[tuple[Float[Array, ""], Scalars], nnx.State]:
    """Returns the mean loss, its terms and the gradients, over the recipe's parts of the batch."""

    def loss(params: nnx.State, batch: Any, key: Key[Array, ""]) -> Any:
        return stage.loss(nnx.merge(state.graphdef, params, state.frozen), batch, key)

    function = jax.value_and_grad(loss, has_aux=True)
    count = stage.recipe.accumulate
    if count == 1:
        return function(state.params, batch, key)
    parts, keys = _parts(batch, count), jax.random.split(key, count)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(state.params, *part)), None

    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (parts, keys))
    shapes = jax.eval_shape(function, state.params, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (parts, keys))
    return jax.tree.map(lambda x: x / count, total)


def _train_step(
    stage: Stage[Any], optimizer: Optimizer, state: TrainState, batch: Any, key: Key[Array, ""]
) -> tuple[TrainState, Metrics]:
    """Does one optimizer step on stacked samples of the stage.

    The step's key is derived from its number and `key`, that of the whole run.

    Returns:
        The state after the step, or the same one if `finite` is False; and scalars: `loss` and its
        parts, the norms of gradients (before clipping), updates and weights, `learning_rate`, and
        `finite`.
    """
    key = jax.random.fold_in(key, state.step)
    (loss, parts), grads = _gradients(stage, state, batch, key)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema is not None:
        decay = average_decay(stage.recipe.ema_decay or 0.0, state.step)
        ema = update_average(ema, params, decay)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    after = (state.step + 1, params, opt_state, ema)
    before = (state.step, state.params, state.opt_state, state.ema)
    step, params, opt_state, ema = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), after, before
    )
    metrics = {
        "loss": loss,
        **parts,
        "grad_norm": grad_norm,
        "update_norm": optax.tree.norm(updates),
        "param_norm": optax.tree.norm(params),
        "learning_rate": jnp.asarray(optimizer.learning_rate(state.step), jnp.float32),
        "finite": finite,
    }
    return TrainState(step, state.graphdef, params, state.frozen, opt_state, ema), metrics


def make_train_step(
    stage: Stage[Any], optimizer: Optimizer, *, shardings: TrainState
) -> StepFunction:
    """Returns the jitted step, which donates its state and keeps the shardings.

    Call it under `jax.set_mesh`.
    """
    step = functools.partial(_train_step, stage, optimizer)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def averaged(state: TrainState) -> StageNetworks:
    """Returns the networks with averaged weights, or trained ones if there is no average."""
    params = state.params if state.ema is None else state.ema
    return nnx.merge(state.graphdef, params, state.frozen)


def _all_finite(tree: Any) -> dict[str, Bool[Array, ""]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        parameter_path(path): jnp.isfinite(x).all()
        for path, x in flat
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }


def first_bad_tensor(stage: Stage[Any], state: TrainState, batch: Any, key: Key[Array, ""]) -> str:
    """Returns in a few words which tensor of a step is the first that is not finite.

    It computes the step again. The arguments are those of the step, which did not change the state.
    """

    def check(state: TrainState, batch: Any, key: Key[Array, ""]) -> Any:
        key = jax.random.fold_in(key, state.step)
        (loss, parts), grads = _gradients(stage, state, batch, key)
        trees = batch, state.params, state.frozen, parts, {"loss": loss}, grads
        return tuple(map(_all_finite, trees))

    found = jax.device_get(jax.jit(check)(state, batch, key))
    order = ("the batch's", "the trained weight", "the frozen weight", "the loss's part", "the")
    for what, tensors in zip((*order, "the gradient of"), found, strict=True):
        for name, good in tensors.items():
            if not good:
                return f"{what} {name}"
    return "the norm of the gradients, though each of them is finite"
