"""Compiles one program for a slice, and reads the compiler's errors if it does not fit."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from animegamer_jax.errors import UserError

if TYPE_CHECKING:
    from animegamer_jax.plan.configurations import Configuration
    from animegamer_jax.plan.estimate import Estimate
    from animegamer_jax.plan.topology import Topology

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


@contextlib.contextmanager
def _not_cached() -> Iterator[None]:
    """Keeps programs out of JAX's persistent cache, which cannot read them back here."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_program(configuration: "Configuration", topology: "Topology") -> "Estimate":
    """Compiles a configuration's program for the slice and estimates its memory and time.

    Raises:
        NoRoomError: the program does not fit a chip.
        UserError: libtpu is missing or does not know the slice.
    """
    from animegamer_jax.plan.estimate import make_estimate
    from animegamer_jax.plan.programs import rollout_program, stage_program
    from animegamer_jax.plan.topology import describe_devices, torus_of
    from animegamer_jax.sharding import PLANS, make_mesh

    c = configuration
    mesh = make_mesh(c.mesh, devices=describe_devices(topology))
    plan = PLANS[c.layout]
    if c.stage == "rollout":
        program = rollout_program(
            mesh=mesh,
            plan=plan,
            size=c.size,
            games=c.games,
            steps=c.denoising_steps,
            part=c.part,
            history=c.history,
        )
    else:
        program = stage_program(c.stage, mesh=mesh, plan=plan, size=c.size, **c.changes)
    try:
        with _not_cached():
            compiled = program.lower(mesh, plan).compile()
    except Exception as error:  # the compiler's errors have no class
        no_room = read_no_room(str(error), limit=topology.chip.usable_gb)
        if no_room is not None:
            raise no_room from None
        if "slice_builder" in str(error):
            raise UserError(f"--topology {topology}: the compiler knows no such slice") from None
        raise
    torus = torus_of(topology, mesh.devices.flat)
    estimate = make_estimate(
        compiled, program, topology=topology, plan=c.layout, mesh=c.mesh, torus=torus
    )
    if not estimate.memory.fits:
        raise TooLargeError(estimate.memory.peak, estimate.memory.chip)
    return estimate
