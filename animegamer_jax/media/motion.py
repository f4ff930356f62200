"""Measures the motion of a clip, as in the paper's data: from optical flow, sorted into levels.

The paper takes the length of the flow, drops values below 0.2 pixels as background, and averages
the rest; the mean is sorted into five levels. OpenCV's DIS replaces its flow network; any other
`FlowEstimator` can be used. `film_flow` is for films, where it keeps the flow of what moves and
drops what leaks from it into still surroundings; `dis_flow`, without that step, is what the toy
world's levels and scores are made with. `clip_motion` corrects for repeated drawings in films.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import cv2
import numpy as np
from jaxtyping import Float, Int, UInt8

from animegamer_jax.errors import UserError

PAPER_EDGES = (0.75, 3.5, 12.5, 30.0)
"""Motion values between the levels, in pixels per frame at 480 x 720.

Not published, but consistent with both released tables.
"""
BACKGROUND_BELOW = 0.2
REFERENCE_HEIGHT = 480

FlowEstimator = Callable[[UInt8[np.ndarray, "f h w 3"]], Float[np.ndarray, "f-1 a b 2"]]
"""Returns the flow between neighbouring frames, in pixels at a height `a` of its choice."""

# Of the heights and presets tried (`scripts/bench/bench_films.py flow`), this one with DIS's medium
# preset gets the most levels right and follows motion of 60 pixels; more rows cost more and do not.
_WORKING_HEIGHT = 144
NOISE = 2.0
"""Grey levels up to which a difference between a film's frames is noise."""
_BLUR = 1.2  # deviation in pixels over which frames are compared
_EXPLAINED = 0.8  # largest difference after the flow, as a share of the one before it
_LEAST_EXPLAINED = 0.1  # share of changed pixels that the flow must explain, or all count
_WELL_EXPLAINED = 0.7  # share of changed pixels below which blocks are searched for
_SMALL_ROWS = 48  # height at which blocks are searched for, in
_BLOCK, _STRIDE, _REACH = 8, 4, 10  # pixels: a block's side, distance and longest way
_SAME_BLOCK = 9.0  # squared grey levels by which a block that stays may differ
_FOUND_BLOCK = 0.5  # largest squared difference of a block that was found, as a share
_STAYS = 0.02  # largest share of the usual moving pixels in a pair that repeats a drawing
_LONGEST_HOLD = 2  # repeated pairs in a row; a longer stay is a pause


def dis_flow(
    frames: UInt8[np.ndarray, "f h w 3"],
    *,
    noise: float = NOISE,
    rows: int = _WORKING_HEIGHT,
    preset: int = cv2.DISOPTICAL_FLOW_PRESET_MEDIUM,
) -> Float[np.ndarray, "f-1 a b 2"]:
    """Estimates the flow by dense inverse search (DIS) on brightness, at a working height.

    Small frames are enlarged first (cubic), large ones reduced (by area). Where two frames differ
    only by noise, the second is replaced by the first, so the flicker of a codec or an autoencoder
    is not taken for motion.

    Args:
        frames: Frames of a clip.
        noise: Grey levels up to which a difference is noise; from twice that on it counts fully.
        rows: Working height.
        preset: OpenCV's preset: how thoroughly it searches.
    """
    grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in _resized(frames, rows=rows)]
    dis = cv2.DISOpticalFlow.create(preset)
    flows = []
    for first, second in itertools.pairwise(grey):
        visible = _visible_change(first, second, noise=noise)
        calm = np.rint(first + visible * (second.astype(np.float32) - first))
        still = np.zeros((*first.shape, 2), np.float32)
        flow = dis.calc(first, calm.clip(0, 255).astype(np.uint8), still)
        flows.append(flow * (visible > 0)[..., None])
    return np.stack(flows)


def film_flow(
    frames: UInt8[np.ndarray, "f h w 3"], *, noise: float = NOISE, rows: int = _WORKING_HEIGHT
) -> Float[np.ndarray, "f-1 a b 2"]:
    """Estimates the flow of what visibly moves, by DIS; it is zero everywhere else.

    DIS is smooth: around a character that walks over a still background, the background seems to
    move along, and the clip's mean falls to three quarters of the character's speed. So a pixel
    has flow only where the second frame, moved back along it, is clearly nearer to the first one
    than as it is. Plain areas drop out with the still ones, which does not change a mean of what
    moves. DIS also loses what is narrow and fast, since it begins with whole frames of a few
    pixels: where it explains too little, it is started once more, from blocks of the first frame
    that were searched for in the second. Where hardly anything is explained, as in a storm of
    particles, all of its flow counts.

    Args:
        frames: Frames of a clip.
        noise: Grey levels up to which a difference is noise.
        rows: Working height.
    """
    sized = _resized(frames, rows=rows)
    dis = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    return np.stack(
        [_explained_flow(one, other, dis, noise=noise) for one, other in itertools.pairwise(sized)]
    )


def _explained_flow(
    before: UInt8[np.ndarray, "a b 3"],
    after: UInt8[np.ndarray, "a b 3"],
    dis: cv2.DISOpticalFlow,
    *,
    noise: float,
) -> Float[np.ndarray, "a b 2"]:
    """Returns the flow of what visibly moves between two frames (`film_flow`)."""
    first, second = (cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in (before, after))
    stays = _difference(before, after)
    changed = (stays > noise) & (_visible_change(first, second, noise=noise) > 0)
    flow = dis.calc(first, second, np.zeros((*first.shape, 2), np.float32))
    moved = _difference_moved(before, after, flow)
    explained = changed & (moved < _EXPLAINED * stays)
    if explained.sum() < _WELL_EXPLAINED * changed.sum():
        other = dis.calc(first, second, _block_flow(first, second))
        moved_other = _difference_moved(before, after, other)
        better = changed & (moved_other < np.where(explained, moved, _EXPLAINED * stays))
        flow = np.where(better[..., None], other, flow)
        explained |= better
    enough = explained.sum() >= max(1.0, _LEAST_EXPLAINED * changed.sum())
    return flow * (explained if enough else changed)[..., None]


def _block_flow(
    first: UInt8[np.ndarray, "a b"], second: UInt8[np.ndarray, "a b"]
) -> Float[np.ndarray, "a b 2"]:
    """Returns a coarse flow of blocks that are elsewhere in the second frame, zero of others."""
    rows, columns = first.shape
    size = max(_BLOCK, round(columns * _SMALL_ROWS / rows)), _SMALL_ROWS
    one, other = (cv2.resize(f, size, interpolation=cv2.INTER_AREA) for f in (first, second))
    around = np.pad(other, _REACH)
    inside = np.pad(np.zeros(other.shape, np.float32), _REACH, constant_values=1e9)
    ys, xs = (range(0, n - _BLOCK + 1, _STRIDE) for n in one.shape)
    found = np.zeros((len(ys), len(xs), 2), np.float32)
    for (row, y), (column, x) in itertools.product(enumerate(ys), enumerate(xs)):
        block = one[y : y + _BLOCK, x : x + _BLOCK]
        stays = np.square(block.astype(np.float32) - other[y : y + _BLOCK, x : x + _BLOCK]).mean()
        if stays < _SAME_BLOCK:
            continue
        window = slice(y, y + 2 * _REACH + _BLOCK), slice(x, x + 2 * _REACH + _BLOCK)
        errors = cv2.matchTemplate(around[window], block, cv2.TM_SQDIFF)
        reach = 2 * _REACH + 1
        errors += inside[window][:reach, :reach] + inside[window][-reach:, -reach:]
        best = int(errors.argmin())
        if errors.flat[best] < _FOUND_BLOCK * stays * _BLOCK**2:
            found[row, column] = best % reach - _REACH, best // reach - _REACH
    whole = cv2.resize(found, (columns, rows), interpolation=cv2.INTER_NEAREST)
    return np.ascontiguousarray(whole * (rows / _SMALL_ROWS))


def _resized(frames: UInt8[np.ndarray, "f h w 3"], *, rows: int) -> list[np.ndarray]:
    height, width = frames.shape[1:3]
    size = max(16, round(width * rows / height)), rows
    how = cv2.INTER_CUBIC if rows > height else cv2.INTER_AREA
    return [cv2.resize(frame, size, interpolation=how) for frame in frames]


def _difference(
    one: UInt8[np.ndarray, "a b 3"], other: UInt8[np.ndarray, "a b 3"]
) -> Float[np.ndarray, "a b"]:
    """Returns the mean difference of two frames around each pixel, in grey levels."""
    difference = cv2.absdiff(one, other).astype(np.float32).mean(axis=-1)
    return cv2.GaussianBlur(difference, (0, 0), _BLUR)


def _difference_moved(
    before: UInt8[np.ndarray, "a b 3"],
    after: UInt8[np.ndarray, "a b 3"],
    flow: Float[np.ndarray, "a b 2"],
) -> Float[np.ndarray, "a b"]:
    """Returns the difference of two frames after the flow; infinity where it leaves the picture."""
    height, width = flow.shape[:2]
    y, x = np.mgrid[:height, :width].astype(np.float32)
    x, y = x + flow[..., 0], y + flow[..., 1]
    inside = (x >= -0.5) & (y >= -0.5) & (x <= width - 0.5) & (y <= height - 0.5)
    back = cv2.remap(after, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return np.where(inside, _difference(before, back), np.inf)


def _visible_change(
    first: UInt8[np.ndarray, "a b"], second: UInt8[np.ndarray, "a b"], *, noise: float
) -> Float[np.ndarray, "a b"]:
    """Returns 0 where two frames differ only by noise, 1 where they differ clearly."""
    change = np.abs(cv2.GaussianBlur(second.astype(np.float32) - first, (0, 0), 2))
    around = cv2.dilate(change, np.ones((9, 9), np.uint8))
    return np.clip(around / noise - 1, 0, 1)


def motion_value(
    frames: UInt8[np.ndarray, "f h w 3"], *, estimate: FlowEstimator = dis_flow
) -> float:
    """Returns the mean flow of moving pixels, in pixels per frame at a height of 480; 0 if none."""
    return _mean_of_moving(_lengths(frames, estimate))


@dataclasses.dataclass(frozen=True)
class ClipMotion:
    """The motion of a film's clip.

    Attributes:
        value: Mean flow of moving pixels, in pixels per frame at a height of 480.
        flow: The same for each pair of neighbouring frames.
        share: Share of moving pixels in all pairs.
    """

    value: float
    flow: tuple[float, ...]
    share: float


def clip_motion(
    frames: UInt8[np.ndarray, "f h w 3"], *, estimate: FlowEstimator = dis_flow
) -> ClipMotion:
    """Measures motion as `motion_value` does, for clips that may hold a drawing for some frames.

    A pair of frames with the same drawing has no flow, and the next pair has the flow of several
    frames, which is divided among them. So a film with fewer drawings than frames has the motion
    of its speed; without repeated drawings the value is that of `motion_value`.
    """
    lengths = _lengths(frames, estimate)
    share = float((lengths >= BACKGROUND_BELOW).mean())
    lengths = _shared_out(lengths)
    return ClipMotion(_mean_of_moving(lengths), tuple(map(_mean_of_moving, lengths)), share)


def _lengths(
    frames: UInt8[np.ndarray, "f h w 3"], estimate: FlowEstimator
) -> Float[np.ndarray, "f-1 a b"]:
    """Returns the lengths of the flow, in pixels at a height of 480."""
    flow = estimate(frames)
    return np.linalg.norm(flow, axis=-1) * (REFERENCE_HEIGHT / flow.shape[1])


def _mean_of_moving(lengths: Float[np.ndarray, "*p a b"]) -> float:
    moving = lengths[lengths >= BACKGROUND_BELOW]
    return float(moving.mean()) if moving.size else 0.0


def _shared_out(lengths: Float[np.ndarray, "p a b"]) -> Float[np.ndarray, "p a b"]:
    """Divides the flow of each pair after repeated drawings among them.

    At the end of a swing, a pair moves little but everywhere, which is no repetition.
    """
    moving = (lengths >= BACKGROUND_BELOW).mean(axis=(1, 2))
    stays = moving <= _STAYS * moving.mean()
    shared, start = lengths.copy(), 0
    for pair in np.flatnonzero(~stays):
        if 0 < pair - start <= _LONGEST_HOLD:
            shared[start : pair + 1] = lengths[pair] / (pair + 1 - start)
        start = pair + 1
    return shared


def motion_level(value: float, *, edges: Sequence[float] = PAPER_EDGES) -> int:
    """Returns the motion level, from 1: one more than the number of edges up to the value."""
    return 1 + sum(value >= edge for edge in edges)


def quantile_edges(values: Sequence[float], *, levels: int = 5) -> tuple[float, ...]:
    """Returns edges that sort the values into equally frequent levels.

    Args:
        values: Motion values of all clips of a dataset.
        levels: Number of levels, one more than edges.

    Raises:
        UserError: There are too few different values.
    """
    edges: tuple[float, ...] = ()
    if len(values):
        edges = tuple(float(e) for e in np.quantile(values, np.arange(1, levels) / levels))
    if len({motion_level(value, edges=edges) for value in values}) != levels:
        raise UserError(
            f"motion of {len(values)} clips: expected enough different values for {levels} levels, "
            f"found {len(set(values))}: add films, or use the paper's edges"
        )
    return edges


FLICKER = 6.0
"""Noise of generated clips for `dis_flow`, in grey levels.

Generated scenery shimmers where nothing moves, and would count as slow motion. At this value nearly
all true clips still have their own levels (the reference "true clips" of an evaluation).
"""


def measure_motion(
    clips: UInt8[np.ndarray, "n f h w 3"],
    *,
    noise: float = NOISE,
    estimate: Callable[..., Float[np.ndarray, "f-1 a b 2"]] = dis_flow,
) -> Float[np.ndarray, " n"]:
    """Returns the motion value of each clip, in pixels a frame.

    Args:
        clips: The clips.
        noise: Grey levels up to which a difference is noise, for the estimator.
        estimate: `dis_flow` or `film_flow`.
    """
    flow = functools.partial(estimate, noise=noise)
    return np.array([motion_value(clip, estimate=flow) for clip in clips])


def measure_levels(
    clips: UInt8[np.ndarray, "n f h w 3"],
    *,
    edges: Sequence[float] = PAPER_EDGES,
    noise: float = NOISE,
    estimate: Callable[..., Float[np.ndarray, "f-1 a b 2"]] = dis_flow,
) -> Int[np.ndarray, " n"]:
    """Returns the motion level of each clip, 1 to 5; the rest is as in `measure_motion`."""
    values = measure_motion(clips, noise=noise, estimate=estimate).tolist()
    return np.array([motion_level(value, edges=edges) for value in values])
