"""Compiles one program for a slice, and reads the compiler's errors if it does not fit.

python -m animegamer_jax.plan.compiled.compiler FOLDER    # the child process of `compile_program`
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from animegamer_jax.errors import UserError
from animegamer_jax.plan.compiled.estimate import Estimate, make_estimate
from animegamer_jax.plan.compiled.schedule import compiler_flags, read_schedules
from animegamer_jax.plan.configurations import Configuration
from animegamer_jax.storage.serialization import read_json, to_json

if TYPE_CHECKING:
    from animegamer_jax.plan.topology import Topology

_REQUEST, _ANSWER = "request.json", "answer.json"
_SIZE = r"([\d.]+)([KMGT]?)"
# "Ran out of memory in memory space hbm. Used 26.30G of 15.75G hbm.", or
# "Ran out of memory on HBM, the total memory required … (26.30G) exceeds available HBM (15.75G)."
_SPACE = re.compile(r"[Rr]an out of memory (?:in memory space|on) (\w+)")
_SIZES = (
    re.compile(rf"[Uu]sed {_SIZE} of {_SIZE}"),
    re.compile(rf"\({_SIZE}\) exceeds available \w+ \({_SIZE}\)"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class NoRoomError(UserError):
    """A program needs more memory than a chip has."""


class TooLargeError(NoRoomError):
    """A program does not fit a chip's memory (HBM).

    Attributes:
        needed: Memory that it needs, in 10^9 bytes; None: unknown.
        limit: Memory that a program may use, in 10^9 bytes.
    """

    def __init__(self, needed: float | None, limit: float):
        self.needed, self.limit = needed, limit
        amount = "more" if needed is None else f"{needed:.1f} GB"
        super().__init__(f"does not fit: it needs {amount} of a chip's {limit:.1f} GB")


class ScratchError(NoRoomError):
    """An instruction or a kernel needs more of a core's own memory (vmem, smem) than it has."""


def read_no_room(text: str, *, limit: float) -> NoRoomError | None:
    """Converts the compiler's message to an error; None: another kind of failure.

    `limit` is the memory that a program may use, in 10^9 bytes, if the message does not include it.
    """
    space = _SPACE.search(text)
    if "RESOURCE_EXHAUSTED" not in text or space is None:
        return None
    found = next(filter(None, (form.search(text) for form in _SIZES)), None)
    if space[1].lower() == "hbm":
        if found is None:
            return TooLargeError(None, limit)
        needed, had = (float(found[i]) * _UNITS[found[i + 1]] / 1e9 for i in (1, 3))
        return TooLargeError(needed, had)
    amount = "" if found is None else f", {found[1]}{found[2]} of {found[3]}{found[4]}"
    return ScratchError(
        f"an instruction or a kernel needs more of a core's own memory ({space[1]}) than it "
        f"has{amount}: this depends on one operation, not on the chip's HBM"
    )


class CrashError(UserError):
    """The compiler itself failed: its process ended by a signal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What the child process compiles."""

    configuration: Configuration
    topology: str
    slices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answer:
    """The result of the child process: an estimate, or the compiler's message."""

    estimate: Estimate | None = None
    refused: str = ""
    failed: str = ""


def compile_program(configuration: Configuration, topology: "Topology") -> Estimate:
    """Compiles a configuration's program for the slice and estimates its memory and time.

    The compiler runs in a process of its own, where it writes its schedules and may crash.

    Raises:
        NoRoomError: The program does not fit a chip.
        CrashError: The compiler crashed.
        UserError: libtpu is missing or does not know the slice.
    """
    from animegamer_jax.plan.topology import describe_devices, known_shapes

    describe_devices(topology)  # its errors need no other process
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        answer = _ask_child(configuration, topology, folder)
    if answer.estimate is not None:
        if not answer.estimate.memory.fits:
            raise TooLargeError(answer.estimate.memory.peak, answer.estimate.memory.chip)
        return answer.estimate
    no_room = read_no_room(answer.refused, limit=topology.chip.usable_gb)
    if no_room is not None:
        raise no_room
    if "slice_builder" in answer.refused:
        shapes = known_shapes(topology.chip)
        raise UserError(
            f"--topology {topology.name}: the compiler knows no such slice: it knows {shapes}"
        )
    raise UserError(answer.failed or f"{configuration} on {topology}: {_brief(answer.refused)}")


def _ask_child(configuration: Configuration, topology: "Topology", folder: Path) -> _Answer:
    schedules = folder / "schedules"
    schedules.mkdir()
    request = _Request(configuration=configuration, topology=topology.name, slices=topology.slices)
    (folder / _REQUEST).write_text(json.dumps(to_json(request)))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a TPU's program cannot be read back here
        "LIBTPU_INIT_ARGS": compiler_flags(schedules),
    }
    command = [sys.executable, "-m", __name__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise CrashError(
            f"{configuration} on {topology}: the compiler crashed ({name}): a fault of libtpu, or "
            "too little memory on this machine: try other options"
        )
    answer = folder / _ANSWER
    if done.returncode or not answer.exists():
        raise UserError(f"{configuration} on {topology}: {_brief(done.stderr.strip()[-1000:])}")
    return read_json(answer, _Answer, hint="run the command again")


def _brief(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"the compiler failed: {lines[-1][:300] if lines else 'it wrote no message'}"


def _answer(request: _Request, schedules: Path) -> _Answer:
    from animegamer_jax.plan.programs import rollout_program, stage_program
    from animegamer_jax.plan.topology import describe_devices, parse_topology, torus_of
    from animegamer_jax.sharding import make_mesh, play_plan

    c, topology = request.configuration, parse_topology(request.topology, slices=request.slices)
    try:
        mesh = make_mesh(c.mesh, devices=describe_devices(topology))
        plan = play_plan(c.layout, guided=not c.student)
        if c.stage == "rollout":
            program = rollout_program(
                mesh=mesh,
                plan=plan,
                size=c.size,
                games=c.games,
                steps=c.denoising_steps,
                part=c.part,
                history=c.history,
                student=c.student,
                rows=c.rows,
                int8=c.int8,
            )
        else:
            program = stage_program(c.stage, mesh=mesh, plan=plan, size=c.size, **c.changes)
        lowered = program.lower(mesh, plan)
    except UserError as error:
        return _Answer(failed=str(error))
    try:
        compiled = lowered.compile()
    except Exception as error:  # the compiler's errors have no class
        return _Answer(refused=str(error))
    torus = torus_of(topology, mesh.devices.flat)
    estimate = make_estimate(
        compiled,
        program,
        schedules=read_schedules(schedules),
        topology=topology,
        plan=c.layout,
        mesh=c.mesh,
        torus=torus,
    )
    return _Answer(estimate=estimate)


def _run_child(folder: Path) -> None:
    request = read_json(folder / _REQUEST, _Request, hint="run the command again")
    answer = _answer(request, folder / "schedules")
    (folder / _ANSWER).write_text(json.dumps(to_json(answer)))


if __name__ == "__main__":
    _run_child(Path(sys.argv[1]))
