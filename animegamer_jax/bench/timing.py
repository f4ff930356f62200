"""Stopwatch: alternating calls, their spread, the memory of a call, the peak of this machine.

Calls of all backends alternate, so that other load on the machine affects all of them alike. Ratios
are of neighbouring calls, and only ratios can be compared between days.
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
"""Seconds between two calls, until idle threads of the libraries go to sleep."""

_PEAK_SIZE = 2048  # rows and columns of the matrices
_PEAK_ROUNDS = 7


class Spread(NamedTuple):
    """The median of some values, and their percentiles 10 and 90."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Returns the spread of one value or more."""
    low, median, high = np.percentile(values, (10, 50, 90)).tolist()
    return Spread(median, low, high)


def alternate(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int, rest: float = REST
) -> dict[str, list[float]]:
    """Times `repeats` rounds in which each call runs once; each round starts with another call.

    A call must return when its work is done, and should have run once before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(rest)
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Returns how many times as long the calls of `over` took as their neighbours of `under`."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def read_status(field: str, process: int | str = "self") -> int:
    """Returns the bytes of a field of a process's status, such as VmRSS (Linux)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    line = next(line for line in lines if field in line)
    return 1024 * int(line.split()[1])


def release_memory() -> None:
    """Releases the memory that libraries keep for later calls, as far as possible (Linux)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def call_memory(call: Callable[[], Any]) -> int | None:
    """Returns the bytes by which this process grows during a call; None if not on Linux.

    Memory is released first (`release_memory`).
    """
    if not sys.platform.startswith("linux"):
        return None
    release_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = read_status("VmRSS")
        call()
        return max(0, read_status("VmHWM") - before)
    except (OSError, StopIteration):
        return None


def measure_peak(*, size: int | None = None, rounds: int = _PEAK_ROUNDS) -> dict[str, float]:
    """Measures the FLOP/s of a product of two large float32 matrices, the best of some rounds.

    With numpy's library, and with XLA on the default device. `size` is 2,048 if None.
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
    seconds = alternate(calls, repeats=rounds)
    return {name: 2.0 * size**3 / min(found) for name, found in seconds.items()}
