"""TPU slices that are not there, described to the compiler that is in libtpu."""

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
from animegamer_jax.errors import UserError
from animegamer_jax.plan.links import Torus

_FORM = re.compile(r"([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: its chip and how many of them in each direction."""

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)


def parse_topology(text: str) -> Topology:
    """`v5p:4x4x4`: a chip, and chips in each direction of its torus.

    Raises:
        UserError: another form, an unknown chip, or another number of directions.
    """
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
    return Topology(chip, shape)


def describe(topology: Topology) -> list[Any]:
    """The slice's devices, which can be compiled for and nothing else.

    Raises:
        UserError: libtpu is missing, does not fit this jax, or knows no such slice.
    """
    version = check_libtpu()
    # Without these, libtpu asks a metadata server that is not there, or refuses a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    bounds = (*topology.shape, 1, 1)[:3]
    problem: Exception | None = None
    # One host of a slice has four chips or eight by default; a smaller slice must say so.
    for options in ({}, {"chips_per_host_bounds": bounds}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = topologies.get_topology_desc(
                    platform="tpu", topology_name=str(topology), **options
                )
            return list(found.devices)
        except Exception as error:
            problem = error
    told = str(problem).splitlines()[0][:200]
    raise UserError(
        f"--topology {topology}: libtpu {version} with jax {jax.__version__} cannot describe it: "
        f"{told}"
    )


def torus_of(topology: Topology, devices: Iterable[Any]) -> Torus:
    """Where some of a slice's devices are; a flat slice's have a third coordinate, 0."""
    directions = len(topology.shape)
    return Torus(topology.shape, tuple(tuple(d.coords[:directions]) for d in devices))


def check_libtpu() -> str:
    """The version of libtpu, once it is known to be the one that this jax asks for.

    Raises:
        UserError: it is missing, or another.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu, which holds the TPU's compiler, is not installed: "
            "pip install 'animegamer-jax[plan]'"
        )
    name, version = _installed()
    asked = [Requirement(text) for text in metadata.requires("jax") or ()]
    for wanted in (requirement for requirement in asked if requirement.name == "libtpu"):
        if name != "libtpu" or not wanted.specifier.contains(version, prereleases=True):
            raise UserError(
                f"{name} {version} with jax {jax.__version__}: expected libtpu{wanted.specifier}: "
                f"pip install 'libtpu{wanted.specifier}'"
            )
    return version


def _installed() -> tuple[str, str]:
    """The distribution that brings libtpu, and its version."""
    for name in ("libtpu", "libtpu-nightly"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "libtpu", "0"
