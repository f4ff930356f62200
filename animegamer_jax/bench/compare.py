"""Whether two implementations answer the same, and by how much they do not."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from animegamer_jax.errors import UserError

# The RMS of the difference over that of what is expected; of frames, in levels of 255. In float32
# sums in another order leave 1e-5 at most; with fewer digits a mistake is told only if it is large.
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
FRAME_TOLERANCES: Mapping[str, float] = {"float32": 0.1, "bfloat16": 12.0, "float16": 4.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one array.

    Attributes:
        what: its name.
        largest: absolute.
        rms: over the RMS of what was expected; of frames, in levels of 255; of states, the share
            that is another.
        tolerance: of `rms`.
    """

    what: str
    largest: float
    rms: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return bool(np.isfinite(self.largest)) and self.rms <= self.tolerance


def differences(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, dtype: str
) -> list[Difference]:
    """Of all arrays that both have, by kind: states are equal or not, frames are levels."""
    told = []
    for what in expected:
        a, b = (np.asarray(side[what], np.float64) for side in (found, expected))
        if a.shape != b.shape:
            raise ValueError(f"{what}: shape {a.shape} beside {b.shape}")
        apart = np.abs(a - b)
        rms = float(np.sqrt(np.square(apart).mean()))
        if what == "states":
            rms, tolerance = float((a != b).mean()), 0.0
        elif expected[what].dtype == np.uint8:
            tolerance = FRAME_TOLERANCES[dtype]
        else:
            rms, tolerance = rms / float(np.sqrt(np.square(b).mean())), TOLERANCES[dtype]
        told.append(Difference(what=what, largest=float(apart.max()), rms=rms, tolerance=tolerance))
    return told


def check_agreement(program: str, side: str, told: list[Difference]) -> None:
    """Refuses to time what does not do the same.

    Raises:
        UserError: an array differs by more than its tolerance.
    """
    for one in told:
        if not one.agrees:
            raise UserError(
                f"{program}: {side} answers otherwise: {one.what} differs by {one.rms:.2g} (RMS), "
                f"{one.largest:.2g} at most: expected {one.tolerance:.2g} or less: nothing is timed"
            )
