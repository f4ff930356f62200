"""Scores of sight: whether a game keeps what it showed where no word says it.

The world's classifier reads each clip (`TruthScorer`). A detail is right where it is as in the
game's first clip that shows the thing, or as in the player's own picture.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32

from animegamer_jax.evaluate.metrics.registry import DETAILS, LOOKS
from animegamer_jax.evaluate.metrics.scorers import READ
from animegamer_jax.evaluate.worlds import DetailTruth

Values = Mapping[str, Float32[np.ndarray, "g t"]]


_VIEW = ("side", "distance")


def with_details(values: Values, truth: Mapping[str, DetailTruth]) -> dict[str, np.ndarray]:
    """Returns values with the scores of details in place of what the classifier read."""
    scores = {name: value for name, value in values.items() if not name.startswith(READ)}
    return {**scores, **score_details(values, truth)}


def score_details(values: Values, truth: Mapping[str, DetailTruth]) -> Values:
    """Returns a value per game and turn for each metric of details.

    NaN where a turn does not show the thing, and where it shows it first.

    Args:
        values: What the classifier read, as `TruthScorer` keeps it; without it, nothing is scored.
        truth: Which turns show the same thing, by attribute (`World.details`).
    """
    right = {
        name: _as_before(values[READ + name], one)
        for name, one in truth.items()
        if READ + name in values
    }
    if not {*_VIEW, *DETAILS} - {"view"} <= right.keys():
        return {}
    right["view"] = right[_VIEW[0]] * right[_VIEW[1]]
    found = {f"{name} kept": right[name] for name in DETAILS}
    found["details kept"] = _mean_of_known([right[name] for name in DETAILS])
    looks = [right[name] for name in LOOKS if name in right]
    if len(looks) == len(LOOKS) and np.isfinite(looks).any():
        found |= dict(zip(LOOKS, looks, strict=True))
        found["looks"] = np.prod(looks, axis=0)
    return {name: value.astype(np.float32) for name, value in found.items()}


def _as_before(read: np.ndarray, truth: DetailTruth) -> np.ndarray:
    """Returns 1 where a thing is read as it was shown first, else 0; NaN where nothing counts."""
    turns = read.shape[1]
    shown = np.take_along_axis(read, np.maximum(truth.first, 0), axis=1)
    known = truth.value >= 0
    right = (read == np.where(known, truth.value, shown)).astype(float)
    is_first = truth.first == np.arange(turns)
    counts = (truth.first >= 0) & (known | ~is_first) & np.isfinite(read)
    return np.where(counts, right, np.nan)


def _mean_of_known(parts: list[np.ndarray]) -> np.ndarray:
    stacked = np.stack(parts)
    count = np.isfinite(stacked).sum(0)
    total = np.nansum(stacked, axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
