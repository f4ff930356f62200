"""Whether two implementations compute the same, and by how much they differ."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from animegamer_jax.errors import UserError

# Limits of the RMS of the difference over the RMS of the expected array; of frames, in levels of
# 255. In float32, sums in another order differ by at most 1e-5; in formats with fewer digits only
# a large mistake can be detected.
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
FRAME_TOLERANCES: Mapping[str, float] = {"float32": 0.1, "bfloat16": 12.0, "float16": 4.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one array.

    Attributes:
        what: Name of the array.
        largest: Largest absolute difference.
        rms: RMS over the RMS of the expected array; of frames, in levels of 255; of states, the
            share that differs.
        tolerance: Largest allowed `rms`.
    """

    what: str
    largest: float
    rms: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return bool(np.isfinite(self.largest)) and self.rms <= self.tolerance


def compute_differences(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, dtype: str
) -> list[Difference]:
    """Compares all expected arrays: states for equality, frames by levels, others by RMS."""
    differences = []
    for what in expected:
        a, b = (np.asarray(arrays[what], np.float64) for arrays in (found, expected))
        if a.shape != b.shape:
            raise ValueError(f"{what}: shape {a.shape}, expected {b.shape}")
        error = np.abs(a - b)
        rms = float(np.sqrt(np.square(error).mean()))
        if what == "states":
            rms, tolerance = float((a != b).mean()), 0.0
        elif expected[what].dtype == np.uint8:
            tolerance = FRAME_TOLERANCES[dtype]
        else:
            rms, tolerance = rms / float(np.sqrt(np.square(b).mean())), TOLERANCES[dtype]
        largest = float(error.max())
        differences.append(Difference(what=what, largest=largest, rms=rms, tolerance=tolerance))
    return differences


def check_agreement(program: str, backend: str, differences: list[Difference]) -> None:
    """Checks that two implementations agree, before any is timed.

    Raises:
        UserError: An array differs by more than its tolerance.
    """
    for one in differences:
        if not one.agrees:
            raise UserError(
                f"{program}: the outputs of {backend} differ: {one.what} by {one.rms:.2g} (RMS), "
                f"at most {one.largest:.2g}: expected {one.tolerance:.2g} or less: nothing was "
                "timed"
            )
