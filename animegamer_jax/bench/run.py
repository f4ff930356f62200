"""The measurement itself: what is compiled, checked and timed in which order."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from animegamer_jax.bench.compare import Difference, check_agreement, differences
from animegamer_jax.bench.model import Model
from animegamer_jax.bench.programs import PLAY, Compiled, Outputs, Program, play_programs
from animegamer_jax.bench.report import OURS, About, Row, Side
from animegamer_jax.bench.timing import alternate, call_memory, measure_peak
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import Dtype
from animegamer_jax.devices import find_chip, processor
from animegamer_jax.errors import UserError

if TYPE_CHECKING:
    from animegamer_jax.bench.torch_side import TorchModel


class _Other(NamedTuple):
    """A part of a turn in PyTorch that was called once and answers as ours does."""

    call: Callable[[], Any]
    first_seconds: float
    differences: tuple[Difference, ...]


def torch_sides(
    model: Model, folder: Path, *, dtype: str, names: Sequence[str]
) -> dict[str, "TorchModel"]:
    """The networks in PyTorch, once for each of "eager" and "compiled".

    Args:
        model: ours.
        folder: for exported weights: the caller's to remove.
        dtype: of weights and computation.
        names: the sides.
    """
    from animegamer_jax.bench.torch_side import TorchModel

    sides = {}
    for name in dict.fromkeys(names):
        place = folder / name
        place.mkdir()
        sides[name] = TorchModel(model, place, dtype=dtype)
        if name == "compiled":
            sides[name].compile()
    return sides


def time_play(
    model: Model,
    names: Sequence[str],
    *,
    sides: Mapping[str, "TorchModel"],
    dtype: str,
    repeats: int,
) -> list[Row]:
    """The parts of a turn. All sides are checked before any is timed.

    Raises:
        UserError: PyTorch answers otherwise.
    """
    programs = play_programs(model)
    checked = []
    for name in names:
        ours = _compile(programs[name])
        found = ours.outputs()
        others = {
            side: _check(name, side, torch_model.calls()[name], found, dtype=dtype)
            for side, torch_model in sides.items()
        }
        checked.append((ours, others))
    return [_time(ours, others, repeats=repeats) for ours, others in checked]


def time_stage(
    name: str, bundle: Bundle, *, dtype: Dtype | None, batch_size: int | None, repeats: int
) -> Row:
    """A stage's training step.

    Raises:
        UserError: the bundle has not the networks, or there is no recipe for them.
    """
    from animegamer_jax.bench.training import trainable, training_program

    if name not in trainable(bundle):
        known = ", ".join((*PLAY, *trainable(bundle)))
        raise UserError(
            f"--programs {name}: {bundle.name} has not its networks, or there is no recipe for "
            f"them: expected one of {known}"
        )
    program = training_program(name, bundle, dtype=dtype, batch_size=batch_size)
    return _time(_compile(program), {}, repeats=repeats)


def _compile(program: Program) -> Compiled:
    _tell(f"{program.name}: compiling")
    return Compiled(program)


def _check(
    program: str,
    side: str,
    call: Callable[[], Mapping[str, Any]],
    ours: Outputs,
    *,
    dtype: str,
) -> _Other:
    _tell(f"{program}: PyTorch, {side}: the first call")
    began = time.perf_counter()
    outputs = call()
    first = time.perf_counter() - began
    told = differences({name: x.numpy() for name, x in outputs.items()}, ours, dtype=dtype)
    check_agreement(program, f"PyTorch, {side},", told)
    return _Other(call, first, tuple(told))


def _time(ours: Compiled, others: Mapping[str, _Other], *, repeats: int) -> Row:
    program = ours.program
    _tell(f"{program.name}: {repeats} calls of {', '.join((OURS, *others))}")
    calls: dict[str, Callable[[], Any]] = {OURS: ours}
    calls |= {name: other.call for name, other in others.items()}
    for call in calls.values():
        call()
    taken = alternate(calls, repeats=repeats)
    own = Side(
        name=OURS,
        seconds=taken[OURS],
        before_seconds=ours.compile_seconds,
        call_memory=call_memory(ours),
    )
    beside = (
        Side(
            name=name,
            seconds=taken[name],
            before_seconds=other.first_seconds,
            call_memory=call_memory(other.call),
            differences=other.differences,
        )
        for name, other in others.items()
    )
    return Row(
        name=program.name,
        about=program.about,
        flops=ours.flops,
        memory=ours.memory,
        sides=(own, *beside),
    )


def describe(
    model: str, *, threads: int, dtype: str, repeats: int, libraries: Sequence[str]
) -> About:
    """What is measured where; on a CPU its peak is measured now."""
    device = jax.devices()[0]
    kind = device.device_kind
    peak, source = None, f"{kind} is in no table of ours"
    if device.platform == "cpu":
        rates = measure_peak()
        best = max(rates, key=rates.__getitem__)
        peak, kind = rates[best], processor()
        told = ", ".join(f"{library} {rate / 1e9:,.0f}" for library, rate in rates.items())
        source = f"the faster of float32 products of 2,048 x 2,048 just now, GFLOP/s: {told}"
    elif (chip := find_chip(kind)) is not None:
        peak, source = chip.peak_tflops * 1e12, "bfloat16, by the maker"
    return About(
        model=model,
        device=kind,
        threads=threads,
        dtype=dtype,
        repeats=repeats,
        peak=peak,
        peak_source=source,
        versions={library: metadata.version(library) for library in libraries},
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
