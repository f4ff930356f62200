"""Counts a function's matmul and convolution FLOPs from its jaxpr.

Other operations do not count, as is usual for model FLOPs.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def count_matmul_flops(function: Callable[..., Any], *args: Any) -> float:
    """Returns the FLOPs of the matrix products and convolutions in `function(*args)`.

    The arguments may be shapes. The function is traced, not compiled; a loop's body counts as often
    as it runs.
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
