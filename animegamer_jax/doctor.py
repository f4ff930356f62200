"""`animegamer doctor`: what is installed, what this machine can hold, and what to do.

It opens no connection, and works without any extra.
"""

import dataclasses
import importlib.metadata
import json as jsonlib
import os
import platform
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from animegamer_jax import __version__, extras
from animegamer_jax.devices import has_tpu, keep_compiled_programs, processor
from animegamer_jax.errors import UserError, first_line

_NAME = "animegamer-jax"
_ROOT = Path(__file__).parents[1]
_PLAYED = ("mllm", "encoder", "dit", "vae")  # the networks that a turn needs
_FORMATS = {"float32": 4, "bfloat16": 2}  # bytes of a weight
_GB = 1e9


def declared() -> dict[str, list[Requirement]]:
    """Returns the requirements of each extra; those of the plain installation under "".

    They are read from `pyproject.toml` in a clone, else from the installed package.

    Raises:
        UserError: There is neither.
    """
    file = _ROOT / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text())["project"]
        found = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: list(map(Requirement, texts)) for extra, texts in found.items()}
    try:
        metadata = importlib.metadata.metadata(_NAME)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "animegamer_jax is not an installed package: install it from a clone"
        ) from None
    all_of_them = list(map(Requirement, metadata.get_all("Requires-Dist") or []))
    names = metadata.get_all("Provides-Extra") or []
    return {"": [r for r in all_of_them if r.marker is None]} | {
        extra: [r for r in all_of_them if r.marker and r.marker.evaluate({"extra": extra})]
        for extra in names
    }


def tested_versions() -> dict[str, str]:
    """Returns the versions that the tests ran with by package; {} outside of a clone."""
    file = _ROOT / extras.CONSTRAINTS
    lines = file.read_text().splitlines() if file.is_file() else []
    pins = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in pins}


def packages_of(extra: str, requirements: Mapping[str, Sequence[Requirement]]) -> list[Requirement]:
    """Returns the packages that an extra brings by itself and by the extras that it names."""
    found: dict[str, Requirement] = {}
    for requirement in requirements[extra]:
        if canonicalize_name(requirement.name) == _NAME:
            packages = [p for name in requirement.extras for p in packages_of(name, requirements)]
        else:
            packages = [requirement, *_extras_of(requirement)]
        for package in packages:
            found.setdefault(canonicalize_name(package.name), package)
    return list(found.values())


def _extras_of(requirement: Requirement) -> list[Requirement]:
    """Returns what the extras of another package bring, such as libtpu in jax[tpu]."""
    try:
        texts = importlib.metadata.requires(requirement.name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        needed
        for needed in map(Requirement, texts)
        if needed.marker and not needed.marker.evaluate({"extra": ""})
        if any(needed.marker.evaluate({"extra": extra}) for extra in requirement.extras)
    ]


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that the installation or an extra needs.

    Attributes:
        name: Name on the index.
        wanted: Versions that `pyproject.toml` allows.
        tested: Version that the tests ran with; None if it is not known here.
        found: Installed version; None if it is missing.
    """

    name: str
    wanted: str
    tested: str | None
    found: str | None

    @property
    def is_good(self) -> bool:
        """Whether it is installed in an allowed version."""
        allowed = Requirement(f"x{self.wanted}").specifier
        return self.found is not None and allowed.contains(self.found, prereleases=True)

    @property
    def is_tested(self) -> bool:
        """Whether the installed version is the tested one, or none is known."""
        if self.tested is None or self.found is None:
            return True
        return Requirement(f"x=={self.tested}").specifier.contains(self.found, prereleases=True)


def find_package(requirement: Requirement, tested: Mapping[str, str]) -> Package:
    """Returns what is installed of a requirement."""
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        found = None
    pin = tested.get(canonicalize_name(requirement.name))
    return Package(requirement.name, str(requirement.specifier), pin, found)


def host_memory() -> int | None:
    """Returns this machine's memory in bytes, or None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def find_devices() -> list[dict[str, Any]]:
    """Returns this machine's devices as JAX sees them, with their memory in bytes if known."""
    import jax

    found = []
    for device in jax.local_devices():
        try:
            memory = (device.memory_stats() or {}).get("bytes_limit")
        except jax.errors.JaxRuntimeError:  # this kind of device does not say
            memory = None
        if device.platform == "cpu":
            memory = host_memory()
        found.append({"platform": device.platform, "kind": device.device_kind, "memory": memory})
    return found


def find_sizes() -> dict[str, dict[str, int]]:
    """Returns the weights that play needs, by size: their number, and bytes in each format."""
    from animegamer_jax.bundle.networks import abstract_params
    from animegamer_jax.configs import SIZES

    found = {}
    for size, make in SIZES.items():
        config = make()
        count = sum(
            leaf.size
            for name in _PLAYED
            for leaf in abstract_params(name, getattr(config, name)).values()
        )
        found[size] = {"weights": count} | {n: count * width for n, width in _FORMATS.items()}
    return found


def folder_size(folder: Path) -> int | None:
    """Returns the bytes of all files below a folder; None if there is no such folder."""
    if not folder.is_dir():
        return None
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # it is gone
                continue
    return total


def find_caches() -> dict[str, dict[str, Any]]:
    """Returns the folders that commands fill and that may be deleted, with their sizes."""
    keep_compiled_programs()
    folders = {
        "compiled programs": Path(os.environ["JAX_COMPILATION_CACHE_DIR"]),
        "plans": Path("out/plans").absolute(),
    }
    return {
        name: {"folder": str(folder), "bytes": folder_size(folder)}
        for name, folder in folders.items()
    }


def examine() -> dict[str, Any]:
    """Returns everything that the command prints, as JSON."""
    keep_compiled_programs()  # before JAX
    requirements, tested = declared(), tested_versions()
    packages = {
        extra: [find_package(r, tested) for r in packages_of(extra, requirements)]
        for extra in requirements
    }
    plain = packages.pop("")
    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "memory": host_memory(),
        "packages": list(map(dataclasses.asdict, plain)),
        "extras": {
            extra: {
                "purpose": extras.PURPOSES.get(extra, ""),
                "installed": all(package.is_good for package in found),
                "missing": [package.name for package in found if not package.is_good],
                "install": extras.how_to_install(extra),
            }
            for extra, found in packages.items()
        },
        "devices": [],
        "sizes": {},
        "caches": find_caches(),
        "programs": {name: shutil.which(name) for name in ("chromium",)},
        "cards": [],
        "todo": [],
    }
    todo: list[str] = report["todo"]
    if bad := [package for package in plain if not package.is_good]:
        wrong = ", ".join(f"{p.name} {p.found or 'missing'} (needs {p.wanted})" for p in bad)
        todo.append(f"nothing runs before these packages are right: {wrong}: {_reinstall()}")
        return report
    try:
        report["devices"], report["sizes"] = find_devices(), find_sizes()
    except (ImportError, RuntimeError) as error:
        todo.append(f"JAX does not start: {first_line(error)}")
        return report
    everything = {package.name: package for found in packages.values() for package in found}
    everything |= {package.name: package for package in plain}
    if other := [p for p in everything.values() if p.is_good and not p.is_tested]:
        names = ", ".join(f"{p.name} {p.found} (tested: {p.tested})" for p in other)
        todo.append(f"if something fails, try the tested versions: {names}: {_reinstall()}")
    todo += _advice(report)
    return report


def _reinstall() -> str:
    return f"pip install -c {extras.CONSTRAINTS} . in a clone (docs/install.md)"


def _advice(report: Mapping[str, Any]) -> list[str]:
    """Returns what to do about devices and memory."""
    found = []
    kinds = {device["platform"] for device in report["devices"]}
    if has_tpu() and "tpu" not in kinds:
        hint = report["extras"]["tpu"]["install"]
        found.append(f"this machine has TPU chips, but JAX does not use them: {hint}")
    if Path("/dev/nvidia0").exists() and not kinds & {"gpu", "cuda"}:
        hint = report["extras"]["gpu"]["install"]
        found.append(f"this machine has a GPU, but JAX does not use it: {hint}")
    if not fits(report, "full", "bfloat16"):
        found.append(
            "the full size does not fit one device here, even in bfloat16: play `--model toy`, or "
            "see docs/pods.md for slices that hold it"
        )
    return found


def fits(report: Mapping[str, Any], size: str, number_format: str) -> bool | None:
    """Returns whether the weights of a size fit one device; None if its memory is not known."""
    memory = [device["memory"] for device in report["devices"]]
    if not memory or None in memory:
        return None
    return report["sizes"][size][number_format] < min(memory)


def fits_card(report: Mapping[str, Any], memory: float) -> dict[str, Any]:
    """Returns the room that the weights of each size leave on a card, in bytes; less is too little.

    A twentieth is left out: the driver and the libraries take some.
    """
    usable = 0.95 * memory
    room = {
        size: {name: usable - found[name] for name in _FORMATS}
        for size, found in report["sizes"].items()
    }
    return {"memory": memory, "room": room}


def doctor(*, memory: tuple[float, ...] = (), json: bool = False) -> int:
    """Show what is installed, what this machine can hold, and what to do.

    Args:
        memory: Memory of cards that are not in this machine, in GB, such as 24 80: shows which
            sizes fit them. Default: none.
        json: Print one JSON object and nothing else.

    Returns:
        The exit status: 1 if a package that every command needs is missing or too old, or JAX does
        not start; else 0.
    """
    if wrong := [size for size in memory if not 0 < size < float("inf")]:
        raise UserError(f"--memory {wrong[0]:g}: expected GB, a number above 0")
    report = examine()
    report["cards"] = [fits_card(report, float(size * _GB)) for size in memory if report["sizes"]]
    if json:
        print(jsonlib.dumps(report, indent=1))
    else:
        print("\n".join(_lines(report)))
    return 0 if report["devices"] else 1


def _gb(number: int | float | None) -> str:
    return "unknown" if number is None else f"{number / _GB:.3g} GB"


def _lines(report: Mapping[str, Any]) -> list[str]:
    """Returns the report as text."""
    packages = [Package(**package) for package in report["packages"]]
    lines = [
        f"animegamer_jax {report['version']}, Python {report['python']}, {report['system']}",
        f"{report['processor']}, {_gb(report['memory'])} of memory",
        "",
        "Packages",
    ]
    for package in packages:
        note = "" if package.is_tested else f" (tested: {package.tested})"
        note = note if package.is_good else f" (needs {package.wanted})"
        if note or package.name in ("jax", "flax"):
            lines.append(f"  {package.name:<20} {package.found or 'missing'}{note}")
    good = sum(package.is_good and package.is_tested for package in packages)
    has_tests = any(package.tested for package in packages)
    how = "as tested" if has_tests else "in versions that are allowed"
    lines += [f"  {good} of {len(packages)} {how}", "", "Extras"]
    for extra, found in report["extras"].items():
        state = "installed" if found["installed"] else f"needs {', '.join(found['missing'])}"
        lines.append(f"  {extra:<9} {found['purpose']}: {state}")
    lines += ["", "Devices"]
    for device in report["devices"]:
        lines.append(f"  {device['platform']} {device['kind']}: {_gb(device['memory'])}")
    lines += [
        "",
        "Weights for play (a turn also needs room for its activations: `animegamer plan`)",
    ]
    for size, found in report["sizes"].items():
        text = []
        for name in _FORMATS:
            answer = {True: "fits", False: "does not fit", None: "memory unknown"}
            text.append(f"{name} {_gb(found[name])} ({answer[fits(report, size, name)]})")
        lines.append(f"  {size:<5} {found['weights'] / 1e6:,.0f} M: {', '.join(text)}")
    for card in report["cards"]:
        lines += ["", f"A card of {_gb(card['memory'])}, 95 % of it usable"]
        for size, found in card["room"].items():
            text = (
                f"{name} {f'leaves {_gb(room)} for activations' if room > 0 else 'does not fit'}"
                for name, room in found.items()
            )
            lines.append(f"  {size:<5} {', '.join(text)}")
    lines += ["", "Caches (may be deleted)"]
    for name, found in report["caches"].items():
        size = "empty" if found["bytes"] is None else f"{found['bytes'] / 1e6:,.0f} MB"
        lines.append(f"  {name}: {found['folder']}: {size}")
    lines += ["", "Programs", "  ffmpeg: not needed (PyAV contains what it needs)"]
    browser = report["programs"]["chromium"] or "missing; only `make test` wants it, for the page"
    lines += [f"  chromium: {browser}", "", "What to do"]
    lines += [f"  {line}" for line in report["todo"]] or ["  nothing: `make play` should work"]
    return lines
