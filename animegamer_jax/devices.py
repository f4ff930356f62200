"""What TPU chips can do, by the makers' figures: one table for the MFU and for `animegamer plan`.

Sources: Google Cloud's pages on v4, v5e, v5p and v6e (peaks, memory, bandwidths); clocks follow
from peak / (2 x rows x columns x matrix units); the memory that a program may use
is what libtpu's compiler says of programs that are too large.
"""

import dataclasses
import os
import platform
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip.

    Attributes:
        name: as in `v5p:4x4x4`.
        kinds: what JAX calls such a device.
        peak_tflops: of products in bfloat16.
        usable_gib: memory that a program may use, in 2^30 bytes: the rest is the system's.
        hbm_gb_per_second: the memory's bandwidth, in 10^9 bytes.
        clock_ghz: of the cores.
        link_gb_per_second: of one link to a neighbour, each direction.
        matrix_width: rows and columns of a matrix unit.
        dimensions: of the torus.
        cores: that share a chip's work; the peak is theirs together.
        flash_cycles: what 1,024 scores of `kernels/flash.py` take a core, with heads of 64, by the
            compiler's schedule of that kernel (`scripts/bench/attention_schedule.py`).
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
    flash_cycles: float | None

    @property
    def usable_gb(self) -> float:
        """Memory that a program may use, in 10^9 bytes."""
        return self.usable_gib * 2**30 / 1e9


# Not planned for: libtpu describes the two cores of such a chip as devices of their own.
_V4 = Chip(
    name="v4",
    kinds=("TPU v4",),
    peak_tflops=275.0,
    usable_gib=30.5,
    hbm_gb_per_second=1228.0,
    clock_ghz=1.05,
    link_gb_per_second=45.0,
    matrix_width=128,
    dimensions=3,
    cores=2,
    flash_cycles=None,
)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            kinds=("TPU v5 lite", "TPU v5e"),
            peak_tflops=197.0,
            usable_gib=15.75,
            hbm_gb_per_second=819.0,
            clock_ghz=1.5,
            link_gb_per_second=45.0,
            matrix_width=128,
            dimensions=2,
            cores=1,
            flash_cycles=3.12,
        ),
        Chip(
            name="v5p",
            kinds=("TPU v5", "TPU v5p"),
            peak_tflops=459.0,
            usable_gib=95.74,
            hbm_gb_per_second=2765.0,
            clock_ghz=1.75,
            link_gb_per_second=90.0,
            matrix_width=128,
            dimensions=3,
            cores=2,
            flash_cycles=3.12,
        ),
        Chip(
            name="v6e",
            kinds=("TPU v6 lite", "TPU v6e"),
            peak_tflops=918.0,
            usable_gib=31.25,
            hbm_gb_per_second=1640.0,
            clock_ghz=1.75,
            link_gb_per_second=90.0,
            matrix_width=256,
            dimensions=2,
            cores=1,
            flash_cycles=1.69,
        ),
    )
}


def find_chip(kind: str) -> Chip | None:
    """The chip that JAX calls `kind`; None: it is in no table."""
    return next((chip for chip in (*CHIPS.values(), _V4) if kind in chip.kinds), None)


def processor() -> str:
    """What the system calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs in the user's cache folder, unless another one is set.

    The first turn of the next game on this machine then need not compile again. To be called
    before JAX is imported.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(caches) / "animegamer_jax"))
