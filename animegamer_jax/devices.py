"""TPU chips and this machine's processor: one table of chips, for MFU and `animegamer plan`.

Sources: Google Cloud's pages on v4, v5e, v5p and v6e for peaks, memory and bandwidths. A clock is
peak / (2 x rows x columns x matrix units). The usable memory is what libtpu's compiler reports for
programs that are too large; whether gathers need SparseCores, from the schedules of `animegamer
plan`.
"""

import dataclasses
import glob
import importlib.util
import os
import platform
from pathlib import Path

_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of TPU chip.

    Attributes:
        name: Name in a topology, as in `v5p:4x4x4`.
        kinds: JAX's names for the device (`device_kind`).
        peak_tflops: Peak TFLOP/s of bfloat16 matrix products, all cores of the chip together.
        usable_gib: Memory that a program may use, in 2^30 bytes; the system reserves the rest.
        hbm_gb_per_second: Memory bandwidth, in 10^9 bytes a second.
        clock_ghz: Clock of the cores.
        link_gb_per_second: Bandwidth of one link to a neighbour, each way.
        matrix_width: Rows and columns of a matrix unit.
        dimensions: Dimensions of the torus.
        cores: Cores that share a device's work.
        overlaps_by_sparse_cores: Whether gathers overlap the computation only if SparseCores carry
            them out.
        devices: JAX's devices on a chip; all other numbers are of one device.
    """

    name: str
    kinds: tuple[str, ...]
    peak_tflops: float
    usable_gib: float
    hbm_gb_per_second: float
    clock_ghz: float
    link_gb_per_second: float
    matrix_width: int
    dimensions: int
    cores: int
    overlaps_by_sparse_cores: bool
    devices: int = 1

    @property
    def usable_gb(self) -> float:
        """Memory that a program may use, in 10^9 bytes."""
        return self.usable_gib * 2**30 / 1e9


# In the order of the attributes.
_CHIPS = (
    Chip("v4", ("TPU v4",), 275.0, 30.5, 1228.0, 1.05, 45.0, 128, 3, 2, False),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197.0, 15.75, 819.0, 1.5, 45.0, 128, 2, 1, False),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459.0, 95.74, 2765.0, 1.75, 90.0, 128, 3, 2, True),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918.0, 31.25, 1640.0, 1.75, 90.0, 256, 2, 1, True),
    # A chip has two devices; its links, of 100 GB/s each way, are shared by both.
    Chip(
        "tpu7x", ("TPU7x", "TPU v7x"), 1153.5, 94.75, 3690.0, 2.2, 50.0, 256, 3, 1, False, devices=2
    ),
)
# Chips to plan for. libtpu describes the two cores of a v4 chip as two devices, so no plan fits it.
CHIPS = {chip.name: chip for chip in _CHIPS if chip.name != "v4"}


def find_chip(kind: str) -> Chip | None:
    """Returns the chip that JAX calls `kind`, or None if it is not in the table."""
    return next((chip for chip in _CHIPS if kind in chip.kinds), None)


def processor() -> str:
    """Returns the operating system's name for this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def keep_compiled_programs() -> None:
    """Makes JAX cache compiled programs in the user's cache folder, unless another one is set.

    The next game on this machine then starts without compiling. Call before JAX is imported.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(caches) / "animegamer_jax"))


def has_tpu() -> bool:
    """Returns whether this machine has TPU chips, by their device files."""
    return any(map(glob.glob, _TPU_FILES))


def quiet_libtpu() -> None:
    """Keeps libtpu from printing errors on a machine without a TPU.

    JAX loads libtpu wherever it is installed (`animegamer plan` needs its compiler). Without a TPU,
    libtpu misses the accelerator type and the host names that a metadata server would give it, and
    prints lines about both whatever the log level. So they are set here. On a machine with a TPU
    nothing is set. Call before JAX is imported.
    """
    if not has_tpu() and importlib.util.find_spec("libtpu") is not None:
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
