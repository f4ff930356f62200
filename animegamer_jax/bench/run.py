"""The measurement: what is compiled, checked and timed, in which order."""

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from animegamer_jax.bench.compare import Difference, check_agreement, compute_differences
from animegamer_jax.bench.model import Model
from animegamer_jax.bench.names import PLAY
from animegamer_jax.bench.programs import Compiled, Outputs, Program, play_programs
from animegamer_jax.bench.report import JAX, Row, Setup, Timing
from animegamer_jax.bench.timing import alternate, call_memory, measure_peak
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import Dtype
from animegamer_jax.devices import find_chip, processor
from animegamer_jax.errors import UserError
from animegamer_jax.progress import print_status

if TYPE_CHECKING:
    from animegamer_jax.bench.torch_backend import TorchModel


class _Other(NamedTuple):
    """A part of a turn on another backend, called once and checked."""

    call: Callable[[], Any]
    first_seconds: float
    differences: tuple[Difference, ...]


def torch_backends(
    model: Model, *, dtype: str, modes: Sequence[str], device: str = "cpu"
) -> dict[str, "TorchModel"]:
    """Builds the networks in PyTorch on a device, for each mode, eager or compiled.

    Keys name backends. Modes share their weights.
    """
    if not modes:
        return {}
    from animegamer_jax.bench.torch_backend import TorchModel

    eager = TorchModel(model, dtype=dtype, device=device)
    makers = {"eager": lambda: eager, "compiled": eager.compiled}
    return {f"torch {mode}": makers[mode]() for mode in dict.fromkeys(modes)}


def time_play(
    model: Model,
    names: Sequence[str],
    *,
    others: Mapping[str, "TorchModel"],
    dtype: str,
    repeats: int,
) -> list[Row]:
    """Times the parts of a turn, after all backends have been checked.

    Raises:
        UserError: The outputs of PyTorch differ.
    """
    programs = play_programs(model)
    checked = []
    for name in names:
        compiled = _compile(programs[name])
        outputs = compiled.outputs()
        checks = {
            backend: _check(
                name,
                backend,
                call,
                outputs if other.has_same_weights else {},
                dtype=dtype,
            )
            for backend, other in others.items()
            if (call := other.calls().get(name)) is not None
        }
        if len(checks) < len(others):
            print_status(f"{name}: not timed in PyTorch, which cannot see the picture drawn first")
        checked.append((compiled, checks))
    return [_time(compiled, checks, repeats=repeats) for compiled, checks in checked]


def time_stage(
    name: str, bundle: Bundle, *, dtype: Dtype | None, batch_size: int | None, repeats: int
) -> Row:
    """Times a stage's training step.

    Raises:
        UserError: The bundle lacks a network of the stage, or there is no recipe for them.
    """
    from animegamer_jax.bench.training import trainable, training_program

    if name not in trainable(bundle):
        known = ", ".join((*PLAY, *trainable(bundle)))
        raise UserError(
            f"--programs {name}: {bundle.name} lacks a network of this stage, or there is no "
            f"recipe for them: expected one of {known}"
        )
    program = training_program(name, bundle, dtype=dtype, batch_size=batch_size)
    return _time(_compile(program), {}, repeats=repeats)


def _compile(program: Program) -> Compiled:
    print_status(f"{program.name}: compiling")
    return Compiled(program)


def _check(
    program: str,
    backend: str,
    call: Callable[[], Mapping[str, Any]],
    expected: Outputs,
    *,
    dtype: str,
) -> _Other:
    print_status(f"{program}: first call of {backend}")
    start = time.perf_counter()
    outputs = call()
    first = time.perf_counter() - start
    found = {name: x.cpu().numpy() for name, x in outputs.items()}
    differences = compute_differences(found, expected, dtype=dtype)
    check_agreement(program, backend, differences)
    return _Other(call, first, tuple(differences))


def _time(compiled: Compiled, others: Mapping[str, _Other], *, repeats: int) -> Row:
    program = compiled.program
    print_status(f"{program.name}: {repeats} calls of {', '.join((JAX, *others))}")
    calls: dict[str, Callable[[], Any]] = {JAX: compiled}
    calls |= {backend: other.call for backend, other in others.items()}
    for call in calls.values():
        call()
    seconds = alternate(calls, repeats=repeats)
    first = {JAX: compiled.compile_seconds} | {b: o.first_seconds for b, o in others.items()}
    timings = (
        Timing(
            backend=backend,
            seconds=seconds[backend],
            compile_seconds=first[backend],
            call_memory=call_memory(call),
            differences=others[backend].differences if backend in others else (),
        )
        for backend, call in calls.items()
    )
    return Row(
        name=program.name,
        description=program.description,
        flops=compiled.flops,
        memory=compiled.memory,
        timings=tuple(timings),
    )


def describe_setup(
    model: str, *, threads: int, dtype: str, repeats: int, libraries: Sequence[str]
) -> Setup:
    """Returns what is measured where; measures the peak of a CPU."""
    device = jax.devices()[0]
    kind = device.device_kind
    peak, source = None, f"{kind} is not in the table of chips"
    if device.platform == "cpu":
        rates = measure_peak()
        best = max(rates, key=rates.__getitem__)
        peak, kind = rates[best], processor()
        measured = ", ".join(f"{library} {rate / 1e9:,.0f}" for library, rate in rates.items())
        source = f"the faster float32 product of 2,048 x 2,048 in this run, GFLOP/s: {measured}"
    elif (chip := find_chip(kind)) is not None:
        peak, source = chip.peak_tflops * 1e12, "bfloat16, by the manufacturer"
    return Setup(
        model=model,
        device=kind,
        threads=threads,
        dtype=dtype,
        repeats=repeats,
        peak=peak,
        peak_source=source,
        versions={library: metadata.version(library) for library in libraries},
    )
