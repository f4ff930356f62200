"""Motion magnitude of a clip and its level, as in the paper's data: from optical flow.

The paper takes the absolute flow, drops what is below 0.2 pixels as background, and averages the
rest; the mean is sorted into five levels. Its flow network is replaced by OpenCV's DIS; any other
`FlowEstimator` can take its place.
"""

import itertools
from collections.abc import Callable, Sequence

import cv2
import numpy as np
from jaxtyping import Float, UInt8

PAPER_EDGES = (0.75, 3.5, 12.5, 30.0)
"""Values between the levels, in pixels at 480 x 720: not published; both released tables fit."""
BACKGROUND_BELOW = 0.2
REFERENCE_HEIGHT = 480

FlowEstimator = Callable[[UInt8[np.ndarray, "f h w 3"]], Float[np.ndarray, "f-1 a b 2"]]
"""Flow between neighbouring frames, in pixels of its own height `a`, which is free."""

_WORKING_HEIGHT = 144
_NOISE = 2.0


def dis_flow(frames: UInt8[np.ndarray, "f h w 3"]) -> Float[np.ndarray, "f-1 a b 2"]:
    """Dense inverse search on brightness, at a working height of about `_WORKING_HEIGHT` rows.

    Small frames are enlarged first (cubic), large ones reduced (by areas). Where two frames differ
    by no more than noise, the second is replaced by the first, so that the flicker of a codec or
    an autoencoder is not taken for motion.
    """
    height, width = frames.shape[1:3]
    scale = _WORKING_HEIGHT / height
    size = max(16, round(width * scale)), _WORKING_HEIGHT
    how = cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA
    grey = [
        cv2.resize(cv2.cvtColor(f, cv2.COLOR_RGB2GRAY), size, interpolation=how) for f in frames
    ]
    dis = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    flows = []
    for first, second in itertools.pairwise(grey):
        visible = _visible_change(first, second)
        calm = np.rint(first + visible * (second.astype(np.float32) - first))
        still = np.zeros((*first.shape, 2), np.float32)
        flow = dis.calc(first, calm.clip(0, 255).astype(np.uint8), still)
        flows.append(flow * (visible > 0)[..., None])
    return np.stack(flows)


def _visible_change(
    first: UInt8[np.ndarray, "a b"], second: UInt8[np.ndarray, "a b"]
) -> Float[np.ndarray, "a b"]:
    """0 where two frames differ by no more than noise, 1 where they differ clearly."""
    change = np.abs(cv2.GaussianBlur(second.astype(np.float32) - first, (0, 0), 2))
    around = cv2.dilate(change, np.ones((9, 9), np.uint8))
    return np.clip(around / _NOISE - 1, 0, 1)


def motion_value(
    frames: UInt8[np.ndarray, "f h w 3"], *, estimate: FlowEstimator = dis_flow
) -> float:
    """Mean flow of what moves, in pixels a frame at a height of 480; 0 where nothing moves."""
    flow = estimate(frames)
    lengths = np.linalg.norm(flow, axis=-1) * (REFERENCE_HEIGHT / flow.shape[1])
    moving = lengths[lengths >= BACKGROUND_BELOW]
    return float(moving.mean()) if moving.size else 0.0


def motion_level(value: float, *, edges: Sequence[float] = PAPER_EDGES) -> int:
    """1 to 5: the number of edges at or below the value, and one."""
    return 1 + sum(value >= edge for edge in edges)
