"""TPU slices, described to the compiler in libtpu; no TPU is needed."""

import dataclasses
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import jax
from packaging.requirements import Requirement

from animegamer_jax.devices import CHIPS, Chip
from animegamer_jax.errors import UserError, check_at_least, first_line
from animegamer_jax.extras import how_to_install
from animegamer_jax.plan.interconnect import Torus

# By dimensions of the chip's torus; smallest first.
_RENTED = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: (
        (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8),
        (8, 8, 16), (8, 16, 16),
    ),
}  # fmt: skip
_FORM = re.compile(r"([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: its chip, and the number of chips in each dimension; or several such slices."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"

    @property
    def name(self) -> str:
        """The name of one slice, as libtpu knows it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def num_devices(self) -> int:
        """The number of JAX's devices: on some chips there are two."""
        return self.num_chips * self.chip.devices


def parse_topology(text: str, *, slices: int = 1) -> Topology:
    """Parses a topology such as `v5p:4x4x4`: a chip, and chips in each dimension of its torus.

    Raises:
        UserError: Another form, an unknown chip, or a wrong number of dimensions or slices.
    """
    check_at_least("--slices", slices, 1)
    found = _FORM.fullmatch(text)
    if found is None:
        raise UserError(f"--topology {text}: expected CHIP:AxB or CHIP:AxBxC, such as v5e:4x4")
    if found[1] not in CHIPS:
        raise UserError(
            f"--topology {text}: unknown chip {found[1]!r}: expected one of {', '.join(CHIPS)}"
        )
    chip, shape = CHIPS[found[1]], tuple(map(int, found[2].split("x")))
    if len(shape) != chip.dimensions or 0 in shape:
        form = "x".join("ABC"[: chip.dimensions])
        raise UserError(f"--topology {text}: expected {chip.name}:{form}, one chip or more each")
    return Topology(chip, shape, slices)


def describe_devices(topology: Topology) -> list[Any]:
    """Returns the slice's devices; programs can be compiled for them, not run.

    Raises:
        UserError: libtpu is missing, does not fit this jax, or does not know the slice.
    """
    version = check_libtpu()
    # Without these, libtpu queries a missing metadata server, or refuses a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    options: dict[str, Any] = {} if topology.slices == 1 else {"num_slices": topology.slices}
    reason = ""
    # By default a host has four or eight chips; a smaller slice needs the option.
    for more in ({}, {"chips_per_host_bounds": (*topology.shape, 1, 1)[:3]}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = topologies.get_topology_desc(
                    platform="tpu", topology_name=topology.name, **options, **more
                )
            return list(found.devices)
        except Exception as error:
            reason = first_line(error, most=200)
    raise UserError(
        f"--topology {topology.name}: libtpu {version} with jax {jax.__version__} cannot describe "
        f"it: {reason}: it knows {known_shapes(topology.chip)}"
    )


def known_shapes(chip: Chip) -> str:
    """Returns, in words, the shapes of a chip's slices that libtpu compiles programs for.

    A host has a square of four chips, or eight in a row of two squares; programs for a part of a
    host compile for up to three chips in a dimension. Programs for larger slices compile if they
    consist of whole hosts.
    """
    one, even = ("1x1", "AxB") if chip.dimensions == 2 else ("1x1x1", "AxBxC")
    rented = ", ".join(f"{chip.name}:{'x'.join(map(str, shape))}" for shape in rented_shapes(chip))
    return f"{chip.name}:{one} and {chip.name}:{even} with A and B even; rented are {rented}"


def rented_shapes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the slices that Google rents, the smallest first."""
    return _RENTED[chip.dimensions]


def torus_of(topology: Topology, devices: Iterable[Any]) -> Torus:
    """Returns the places of devices; in a flat slice their third coordinate is 0."""
    rank, two = len(topology.shape), topology.chip.devices == 2

    def place(d: Any) -> tuple[int, ...]:
        core = (d.core_on_chip,) if two else ()
        slice_ = (d.slice_index,) if topology.slices > 1 else ()
        return (*d.coords[:rank], *core, *slice_)

    return Torus(topology.shape, tuple(map(place, devices)), topology.chip.devices)


def check_libtpu() -> str:
    """Returns the version of libtpu, if it is the one that this jax requires.

    Raises:
        UserError: libtpu is missing or has another version.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"libtpu, which holds the TPU's compiler, is not installed: {how_to_install('plan')}"
        )
    name, version = _installed()
    for wanted in map(Requirement, metadata.requires("jax") or ()):
        if wanted.name != "libtpu":
            continue
        if name != "libtpu" or not wanted.specifier.contains(version, prereleases=True):
            raise UserError(
                f"{name} {version} with jax {jax.__version__}: expected libtpu{wanted.specifier}: "
                f"pip install 'libtpu{wanted.specifier}'"
            )
    return version


def _installed() -> tuple[str, str]:
    """Returns the distribution that contains libtpu, and its version."""
    for name in ("libtpu", "libtpu-nightly"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "libtpu", "0"
