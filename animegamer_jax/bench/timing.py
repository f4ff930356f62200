"""Stopwatch: calls in turn, their spread, the memory of a call, the peak of this machine.

Other work on a machine meets all that is timed in one run alike, if the calls take turns. So ratios
are of neighbours in one round, and only they can be compared from one day to another.
"""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

REST = 0.02
"""Seconds between two calls: so long threads of some libraries wait awake for more work."""

_PEAK_SIZE = 2048  # rows and columns of the matrices
_PEAK_ROUNDS = 7


class Spread(NamedTuple):
    """The middle of some values, and between which most of them lie: percentiles 10 and 90."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    low, median, high = np.percentile(values, (10, 50, 90)).tolist()
    return Spread(median, low, high)


def alternate(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int, rest: float = REST
) -> dict[str, list[float]]:
    """Seconds of each of `repeats` calls; all have one turn in a round, each round another first.

    A call returns when its work is done. It should have been called once before.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(rest)
            began = time.perf_counter()
            calls[name]()
            taken[name].append(time.perf_counter() - began)
    return taken


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """How many times as long the calls of `over` took as their neighbours of `under`."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def _status(field: str) -> int:
    """Bytes of a field of this process's status, such as VmRSS (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return 1024 * int(line.split()[1])


def call_memory(call: Callable[[], Any]) -> int | None:
    """Bytes by which this process is greater within a call than before it; None: not on Linux.

    What libraries keep for later calls is given back first, as far as they can.
    """
    if not sys.platform.startswith("linux"):
        return None
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)
    except (OSError, StopIteration):
        return None


def measure_peak(*, size: int | None = None, rounds: int = _PEAK_ROUNDS) -> dict[str, float]:
    """FLOP/s of a product of two large float32 matrices, the fastest of some rounds.

    By library: what numpy brings, and XLA's own on the default device. `size` is 2,048 if None.
    """
    size = size or _PEAK_SIZE
    a = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    x = jnp.asarray(a)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"))
    calls: dict[str, Callable[[], Any]] = {
        "numpy": lambda: a @ a,
        "XLA": lambda: jax.block_until_ready(product(x)),
    }
    for call in calls.values():
        call()
    taken = alternate(calls, repeats=rounds)
    return {name: 2.0 * size**3 / min(seconds) for name, seconds in taken.items()}
