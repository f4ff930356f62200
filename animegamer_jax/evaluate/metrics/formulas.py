"""The paper's metrics (PAPER section 4.2), one value a turn; `estimate` makes a score of them.

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
"""The order of the slots wherever the states' values have an axis of them."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over `count` values, and the interval that resampling gives for it."""

    mean: float
    low: float
    high: float
    count: int


def estimate(
    values: Float[np.ndarray, "g t"],
    *,
    where: Bool[np.ndarray, "g t"] | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Estimate | None:
    """The mean of `values` and its percentile bootstrap interval over games (the first axis).

    A resample draws as many games as there are, with replacement, and takes the mean over all
    chosen values in them, so games with more such values weigh more, as in the mean itself.

    Args:
        values: one a game and turn, finite where chosen.
        where: the chosen ones; all if None.
        confidence: share of resamples inside the interval.
        num_resamples: how many.
        seed: of the resampling.

    Returns:
        None where nothing is chosen.

    Raises:
        ValueError: a chosen value is not finite.
    """
    chosen = np.ones(values.shape, bool) if where is None else where
    kept = np.where(chosen, values, 0.0).astype(np.float64)
    if not np.isfinite(kept).all():
        raise ValueError("a value that an estimate is made of is not finite")
    sums, counts = kept.sum(1), chosen.sum(1)
    if not counts.any():
        return None
    num_games = len(sums)
    random = np.random.default_rng(seed)
    times = random.multinomial(num_games, np.full(num_games, 1 / num_games), size=num_resamples)
    drawn = times @ counts
    means = (times @ sums)[drawn > 0] / drawn[drawn > 0]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()))


def context_accuracy(
    right: Float[np.ndarray, "g t"], is_open: Bool[np.ndarray, "g t"]
) -> Estimate | None:
    """Context accuracy, our own: the share of open turns that show all that they should.

    Open turns leave something to the turns before, so only who remembers can be right. `right` is
    1 where character, place and time read off the clip are all as expected, else 0. The answer is
    `estimate`'s, None where no turn is open.
    """
    return estimate(right, where=is_open)


def seconds_a_turn(seconds: Float[np.ndarray, "g t"]) -> float:
    """Seconds a turn (section 4.2): the mean of what each game's turn took.

    Games that are played side by side share their batch's time equally. First turns, which may
    compile, do not count unless there are no others.
    """
    return float((seconds[:, 1:] if seconds.shape[1] > 1 else seconds).mean())


# States and motion levels


def state_accuracy(
    predicted: Int[np.ndarray, "*n s"], truth: Int[np.ndarray, "*n s"]
) -> Float32[np.ndarray, "*n s"]:
    """ACC-S of each turn and state slot (section 4.2): 1 where `predicted = truth`, else 0.

    Both are changes of states; the mean over turns and slots is a share, 0 to 1.
    """
    return (predicted == truth).astype(np.float32)


def state_error(
    predicted: Int[np.ndarray, "*n s"], truth: Int[np.ndarray, "*n s"]
) -> Float32[np.ndarray, "*n s"]:
    """MAE-S of each turn and state slot (section 4.2): `|predicted - truth|`.

    In steps of the state, of which a character's meter moves by several points.
    """
    return np.abs(predicted.astype(np.int64) - truth).astype(np.float32)


def motion_accuracy(
    measured: Int[np.ndarray, "*n"], requested: Int[np.ndarray, "*n"]
) -> Float32[np.ndarray, "*n"]:
    """ACC-F of each turn (section 4.2): 1 where `measured = requested`, else 0.

    Levels are whole numbers from 1 to 5, measured by optical flow (`data.motion`); the mean over
    turns is a share, 0 to 1.
    """
    return (measured == requested).astype(np.float32)


def motion_error(
    measured: Int[np.ndarray, "*n"], requested: Int[np.ndarray, "*n"]
) -> Float32[np.ndarray, "*n"]:
    """MAE-F of each turn (section 4.2): `|measured - requested|`, in motion levels."""
    return np.abs(measured.astype(np.int64) - requested).astype(np.float32)


# Frames


@jax.jit
def cosine(a: Float[Array, "*n e"], b: Float[Array, "*n e"]) -> Float32[Array, "*n"]:
    """`a . b / (|a| |b|)` of the last axis in float32; 0 where a vector is zero."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.where(lengths > 0, (a * b).sum(-1) / jnp.where(lengths > 0, lengths, 1.0), 0.0)


@jax.jit
def clip_image_similarity(
    frames: Float[Array, "*n f e"], references: Float[Array, "*n f e"]
) -> Float32[Array, "*n"]:
    """CLIP-I of each clip (section 4.2): the mean over frames of `cos(frame, reference)`.

    No unit, -1 to 1; each frame beside the same frame of the reference.

    Args:
        frames: CLIP's embeddings of the generated frames, of any length.
        references: of the true clip's frames.
    """
    return cosine(frames, references).mean(-1)


@jax.jit
def clip_text_similarity(
    frames: Float[Array, "*n f e"], texts: Float[Array, "*n e"]
) -> Float32[Array, "*n"]:
    """CLIP-T of each clip (section 4.2): the mean over frames of `cos(frame, caption)`.

    No unit, -1 to 1. Even true clips stay well below 1: pictures and texts lie apart in CLIP.
    """
    return cosine(frames, jnp.broadcast_to(texts[..., None, :], frames.shape)).mean(-1)


@jax.jit
def psnr(
    frames: UInt8[Array, "*n f h w c"], references: UInt8[Array, "*n f h w c"]
) -> Float32[Array, "*n"]:
    """Peak signal-to-noise ratio of each clip in decibels: `10 log10(255^2 / MSE)`.

    The squared error is the mean over the whole clip. Equal clips would give infinity: the most is
    84 dB, what one value in 4,000 gives that is off by one level.
    """
    error = jnp.square(frames.astype(jnp.float32) - references.astype(jnp.float32))
    mean = error.mean((-4, -3, -2, -1))
    return 10 * jnp.log10(255.0**2 / jnp.maximum(mean, 0.25e-3))


# Shot representations


def squared_error(
    predicted: Float[np.ndarray, "*b n r"], truth: Float[np.ndarray, "*b n r"]
) -> Float32[np.ndarray, "*b"]:
    """Mean squared error of each representation, over its tokens and channels."""
    difference = predicted.astype(np.float32) - truth.astype(np.float32)
    return np.square(difference).mean((-2, -1))


def explained_variance(
    predicted: Float[np.ndarray, "b n r"], truth: Float[np.ndarray, "b n r"]
) -> float:
    """`1 - sum |predicted - truth|^2 / sum |truth - mean(truth)|^2`, the mean over turns.

    The mean is each token's and channel's own, so what is the same in all turns counts for
    nothing: always answering it gives 0, the truth 1, something worse than the mean less than 0.

    Raises:
        ValueError: all true representations are the same.
    """
    predicted, truth = predicted.astype(np.float64), truth.astype(np.float64)
    total = np.square(truth - truth.mean(0)).sum()
    if total == 0:
        raise ValueError("all true representations are the same: nothing varies to be explained")
    return float(1 - np.square(predicted - truth).sum() / total)
