"""Detail scores: whether a game keeps what no instruction says.

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
    read = {name: values[READ + name] for name in truth if READ + name in values}
    if not {*_VIEW, *DETAILS} - {"view"} <= read.keys():
        return {}
    right = {name: _as_before(value, truth[name]) for name, value in read.items()}
    alike = {name: _as_in_another_game(value, truth[name]) for name, value in read.items()}
    for shares in (right, alike):
        shares["view"] = shares[_VIEW[0]] * shares[_VIEW[1]]
    found = {f"{name} kept": right[name] for name in DETAILS}
    found["details kept"] = _mean_of_known([right[name] for name in DETAILS])
    several = len(read[DETAILS[0]]) > 1
    if several:
        found["details by chance"] = _mean_of_known([alike[name] for name in DETAILS])
    looks = [right[name] for name in LOOKS if name in right]
    if len(looks) == len(LOOKS) and np.isfinite(looks).any():
        found |= dict(zip(LOOKS, looks, strict=True))
        found["looks"] = _all_of_known(looks)
        if several:
            found["looks by chance"] = _all_of_known([alike[name] for name in LOOKS])
    return {name: value.astype(np.float32) for name, value in found.items()}


def _as_before(read: np.ndarray, truth: DetailTruth) -> np.ndarray:
    """Returns 1 where a thing is read as it was shown first, else 0; NaN where nothing counts."""
    shown = np.take_along_axis(read, np.maximum(truth.first, 0), axis=1)
    right = read == np.where(truth.value >= 0, truth.value, shown)
    return np.where(_counts(read, truth), right.astype(float), np.nan)


def _as_in_another_game(read: np.ndarray, truth: DetailTruth) -> np.ndarray:
    """Returns as `_as_before`, of the same thing's first showing in the next game that has it.

    A model that derives a detail from what the instruction says, as the accessory from the
    character's name, is right here too. NaN where no other game shows the thing.
    """
    games, turns = read.shape
    begins = truth.first == np.arange(turns)
    counts = _counts(read, truth)
    found = np.full(read.shape, np.nan)
    for game, turn in np.argwhere(counts):
        others = (game + np.arange(1, games)) % games
        same = begins[others] & (truth.thing[others] == truth.thing[game, turn])
        if same.any():
            other, first = np.argwhere(same)[0]
            found[game, turn] = read[game, turn] == read[others[other], first]
    return found


def _counts(read: np.ndarray, truth: DetailTruth) -> np.ndarray:
    is_first = truth.first == np.arange(read.shape[1])
    return (truth.first >= 0) & ((truth.value >= 0) | ~is_first) & np.isfinite(read)


def _mean_of_known(parts: list[np.ndarray]) -> np.ndarray:
    stacked = np.stack(parts)
    count = np.isfinite(stacked).sum(0)
    total = np.nansum(stacked, axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _all_of_known(parts: list[np.ndarray]) -> np.ndarray:
    stacked = np.stack(parts)
    known = np.isfinite(stacked)
    return np.where(known.any(0), np.where(known, stacked, 1.0).prod(0), np.nan)
