"""Formulas of the paper's metrics (paper, section 4.2): one value per turn, and their means.

ACC-S and MAE-S compare predicted states, ACC-F and MAE-F motion levels, CLIP-I and CLIP-T frames
with a reference and with text. A metric's score is the mean of its values over turns; its interval
comes from resampling whole games, because the turns of one game are not independent.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8

STATE_SLOTS = ("social", "entertainment", "stamina")
"""The order of the states wherever an array has an axis of them."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of `count` values and its interval."""

    mean: float
    low: float
    high: float
    count: int


def estimate(
    values: Float[np.ndarray, "g t"],
    *,
    where: Bool[np.ndarray, "g t"] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Estimate | None:
    """Returns the mean of `values` and its 95 % percentile bootstrap interval over games (axis 0).

    A resample draws as many games as there are, with replacement, and averages all their selected
    values, so games with more of them weigh more, as in the mean itself.

    Args:
        values: One value per game and turn, finite where selected.
        where: The selected values; None: all.
        num_resamples: Number of resamples.
        seed: Seed of the resampling.

    Returns:
        None if nothing is selected.

    Raises:
        ValueError: A selected value is not finite.
    """
    selected = np.ones(values.shape, bool) if where is None else where
    kept = np.where(selected, values, 0.0).astype(np.float64)
    if not np.isfinite(kept).all():
        raise ValueError("a selected value is not finite")
    sums, counts = kept.sum(1), selected.sum(1)
    if not counts.any():
        return None
    num_games = len(sums)
    random = np.random.default_rng(seed)
    times = random.multinomial(num_games, np.full(num_games, 1 / num_games), size=num_resamples)
    drawn = times @ counts
    means = (times @ sums)[drawn > 0] / drawn[drawn > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()))


def estimate_known(
    values: Float[np.ndarray, "g t"], where: Bool[np.ndarray, "g t"] | None = None
) -> Estimate | None:
    """Returns `estimate` of the finite values; None if there are none."""
    known = np.isfinite(values)
    return estimate(values, where=known if where is None else known & where)


# States and motion levels


def accuracy(
    found: Int[np.ndarray, "*n"], expected: Int[np.ndarray, "*n"]
) -> Float32[np.ndarray, "*n"]:
    """Returns ACC-S of changes of states, ACC-F of motion levels: 1 if `found = expected`, else 0.

    The mean over turns (and states) is a share, 0 to 1 (section 4.2).
    """
    return (found == expected).astype(np.float32)


def error(
    found: Int[np.ndarray, "*n"], expected: Int[np.ndarray, "*n"]
) -> Float32[np.ndarray, "*n"]:
    """Returns MAE-S of changes of states, MAE-F of motion levels: `|found - expected|`.

    The unit is a step of the state, which moves a character's meter by several points, or a motion
    level, an integer from 1 to 5 (section 4.2).
    """
    return np.abs(found.astype(np.int64) - expected).astype(np.float32)


# Frames


@jax.jit
def cosine(a: Float[Array, "*n e"], b: Float[Array, "*n e"]) -> Float32[Array, "*n"]:
    """Returns `a . b / (|a| |b|)` over the last axis in float32; 0 where a vector is zero."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.where(lengths > 0, (a * b).sum(-1) / jnp.where(lengths > 0, lengths, 1.0), 0.0)


@jax.jit
def clip_image_similarity(
    frames: Float[Array, "*n f e"], references: Float[Array, "*n f e"]
) -> Float32[Array, "*n"]:
    """Returns CLIP-I of each clip (section 4.2): the mean over frames of `cos(frame, reference)`.

    No unit, -1 to 1; each frame is compared with the same frame of the reference.

    Args:
        frames: CLIP embeddings of the generated frames, of any length.
        references: CLIP embeddings of the true clip's frames.
    """
    return cosine(frames, references).mean(-1)


@jax.jit
def clip_text_similarity(
    frames: Float[Array, "*n f e"], texts: Float[Array, "*n e"]
) -> Float32[Array, "*n"]:
    """Returns CLIP-T of each clip (section 4.2): the mean over frames of `cos(frame, caption)`.

    No unit, -1 to 1. True clips also stay well below 1: in CLIP's space, pictures and texts form
    separate clusters.
    """
    return cosine(frames, jnp.broadcast_to(texts[..., None, :], frames.shape)).mean(-1)


@jax.jit
def psnr(
    frames: UInt8[Array, "*n f h w c"], references: UInt8[Array, "*n f h w c"]
) -> Float32[Array, "*n"]:
    """Returns the peak signal-to-noise ratio of each clip in dB: `10 log10(255^2 / MSE)`.

    The squared error is the mean over the whole clip. Equal clips would give infinity, so the
    maximum is 84 dB, which one value in 4,000 that is off by one grey level gives.
    """
    error = jnp.square(frames.astype(jnp.float32) - references.astype(jnp.float32))
    mean = error.mean((-4, -3, -2, -1))
    return 10 * jnp.log10(255.0**2 / jnp.maximum(mean, 0.25e-3))
