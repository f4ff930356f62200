"""AdamW and Muon, their learning-rate schedule and weight decay, and the average of the weights.

The optimizers of the paper's section 4.1 and of the code bases behind the release are AdamW with
clipping by global norm; moments and averages are float32, like the trained weights. Muon is for
models that are trained from scratch.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from animegamer_jax.train.stages.recipe import DECAYED, OptimizerConfig

_MUON_MOMENTUM = 0.95
_MUON_RMS = 0.2  # of an update, as AdamW's typically is


def parameter_path(path: tuple[Any, ...]) -> str:
    """Returns the dotted name of a leaf in a tree of parameters from its JAX key path."""
    dotted = jax.tree_util.keystr(path, simple=True, separator=".")
    return dotted.removesuffix(".value")  # inside the variable


def decays(params: Any) -> Any:
    """Returns a tree like `params` of whether each parameter has weight decay."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: parameter_path(path).rpartition(".")[2] in DECAYED, params
    )


def make_schedule(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step: a linear rise, then constant or cosine.

    Step `warmup_steps - 1` is the first with the full rate, step `steps - 1` the lowest of the
    cosine.
    """
    warmup, top = config.warmup_steps, config.learning_rate
    after = optax.constant_schedule(top)
    if config.decay == "cosine":
        rest = max(steps - warmup, 1)
        after = optax.cosine_decay_schedule(top, rest, alpha=config.final_fraction)
    schedule = optax.join_schedules([optax.linear_schedule(0.0, top, warmup), after], [warmup])
    return lambda step: schedule(step + 1)


class Optimizer(NamedTuple):
    """An optax transformation with its learning rate.

    Attributes:
        init: Maps weights to the optimizer's state.
        update: Maps gradients, state and weights to the weights' updates and the next state.
        learning_rate: Maps a step, counted from 0, to its learning rate.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    learning_rate: optax.Schedule


def make_optimizer(
    config: OptimizerConfig,
    *,
    steps: int,
    rate_factors: Mapping[str, float] = MappingProxyType({}),
) -> Optimizer:
    """Returns the recipe's optimizer on gradients clipped by their global norm, for `steps` steps.

    Args:
        config: Its numbers.
        steps: Length of the run.
        rate_factors: Factor of the learning rate of each trained network, which is then clipped by
            a norm of its own; empty: all are one.
    """
    rate = make_schedule(config, steps=steps)

    scale = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=jnp.float32)
    if config.kind == "muon":
        scale = _by_shape(_scale_by_muon(), scale)

    def chain(factor: float) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            scale,
            optax.add_decayed_weights(config.weight_decay, mask=decays),
            optax.scale_by_learning_rate(lambda step: factor * rate(step)),
        )

    if not rate_factors:
        one = chain(1.0)
        return Optimizer(one.init, one.update, rate)
    chains = {name: chain(factor) for name, factor in rate_factors.items()}

    def init(params: nnx.State) -> dict[str, Any]:
        return {name: part.init(_only(name, params)) for name, part in chains.items()}

    def update(
        gradients: nnx.State, state: dict[str, Any], params: nnx.State
    ) -> tuple[nnx.State, dict[str, Any]]:
        found = {
            name: part.update(_only(name, gradients), state[name], _only(name, params))
            for name, part in chains.items()
        }
        each = {name: cast(nnx.State, updates) for name, (updates, _) in found.items()}
        together = nnx.State({name: updates.raw_mapping[name] for name, updates in each.items()})
        return together, {name: after for name, (_, after) in found.items()}

    return Optimizer(init, update, rate)


def _scale_by_muon() -> optax.GradientTransformation:
    """Returns Muon for kernels [*stack, in, out], with updates as large as AdamW's.

    Source: arXiv 2502.16982, section 2.2.
    """

    def each_matrix(params: Any) -> Any:
        return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), params)

    def resize(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: x * (_MUON_RMS * max(x.shape[-2:]) ** 0.5), updates)

    return optax.chain(
        scale_by_muon(
            beta=_MUON_MOMENTUM, mu_dtype=jnp.float32, weight_dimension_numbers=each_matrix
        ),
        optax.stateless(resize),
    )


def _by_shape(
    matrices: optax.GradientTransformation, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns a transformation of the hidden layers' matrices by one, of all else by another."""
    each = {"matrices": matrices, "others": others}

    def split(tree: Any) -> dict[str, nnx.State]:
        return dict(zip(each, nnx.split_state(tree, _is_hidden_matrix, ...), strict=True))

    def init(params: Any) -> Any:
        return {name: each[name].init(part) for name, part in split(params).items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        found = {
            name: each[name].update(part, state[name]) for name, part in split(updates).items()
        }
        together = nnx.merge_state(*(cast(nnx.State, part) for part, _ in found.values()))
        return together, {name: after for name, (_, after) in found.items()}

    return optax.GradientTransformation(init, update)


def _is_hidden_matrix(path: tuple[Any, ...], variable: nnx.Variable) -> bool:
    """Returns whether Muon trains a parameter: a kernel [*stack, in, out], but not the head's."""
    names = variable.get_metadata().get("out_sharding", ())
    own = [name for name in names if name not in ("layers", "parts")]
    return path[-1] == "kernel" and len(own) == 2 and "vocab" not in own


def _only(name: str, tree: nnx.State) -> nnx.State:
    """Returns the part of a tree that belongs to one network."""
    return nnx.State({name: tree.raw_mapping[name]})


def average_decay(decay: float, step: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the average's decay rate at a step, lower at first, so that the start weighs little.

    It is `min(decay, (1 + t) / (10 + t))`, as in TensorFlow's ExponentialMovingAverage.
    """
    t = step.astype(jnp.float32)
    return jnp.minimum(decay, (1.0 + t) / (10.0 + t))


def update_average(average: Any, params: Any, decay: Float[Array, ""]) -> Any:
    """Updates the exponential moving average of a tree of parameters."""
    return jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), average, params)
