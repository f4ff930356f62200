"""Outlines of flat shapes: closed curves as arrays of points, in units of 1/48 of a frame's height.

y points down, as in images.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Colour = tuple[int, int, int]
Number = int | float
Points = Float[np.ndarray, "n 2"]

INK: Colour = (46, 36, 58)
"""The colour of all outlines."""


class Shape(NamedTuple):
    """A filled curve with a dark edge, `edge` units wide, outside of the curve."""

    points: np.ndarray
    fill: Colour
    edge: Number = 0.6


def ellipse(x: Number, y: Number, *, rx: Number, ry: Number, count: int = 22) -> Points:
    """Returns an ellipse around (x, y)."""
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1)


def polygon(*corners: tuple[Number, Number]) -> Points:
    """Returns straight lines between corners."""
    return np.array(corners, dtype=float)


def blob(*knots: tuple[Number, Number], steps: int = 4) -> Points:
    """Returns a smooth closed curve through the knots (Catmull-Rom)."""
    p1 = np.array(knots, dtype=float)
    p0, p2, p3 = np.roll(p1, 1, axis=0), np.roll(p1, -1, axis=0), np.roll(p1, -2, axis=0)
    t = (np.arange(steps) / steps)[None, :, None]
    p0, p1, p2, p3 = (p[:, None] for p in (p0, p1, p2, p3))
    curve = p1 + 0.5 * t * (
        p2 - p0 + t * (2 * p0 - 5 * p1 + 4 * p2 - p3 + t * (3 * (p1 - p2) + p3 - p0))
    )
    return curve.reshape(-1, 2)


def limb(length: Number, *, top: Number, bottom: Number) -> Points:
    """Returns a rounded bar that hangs from the origin, with half-widths `top` and `bottom`."""
    upper = np.linspace(np.pi, 2 * np.pi, 7)
    lower = np.linspace(0, np.pi, 7)
    return np.concatenate(
        [
            np.stack([top * np.cos(upper), top * np.sin(upper)], axis=1),
            np.stack([bottom * np.cos(lower), length + bottom * np.sin(lower)], axis=1),
        ]
    )


def expand(points: Points, width: Number) -> Points:
    """Returns the curve moved outwards by `width`; corners move at most twice as far."""
    before, after = points - np.roll(points, 1, axis=0), np.roll(points, -1, axis=0) - points
    area = np.sum(
        points[:, 0] * np.roll(points[:, 1], -1) - np.roll(points[:, 0], -1) * points[:, 1]
    )
    normals = [
        np.stack([side[:, 1], -side[:, 0]], axis=1)
        / np.maximum(np.linalg.norm(side, axis=1, keepdims=True), 1e-9)
        for side in (before, after)
    ]
    middle = normals[0] + normals[1]
    squared = np.sum(middle**2, axis=1, keepdims=True)
    return points + np.sign(area) * width * 2 * middle / np.maximum(squared, 1.0)


def fill_layers(shape: Shape) -> list[tuple[Points, Colour]]:
    """Returns what to fill, in order: the ink around the shape if it has an edge, and the shape."""
    inside = (shape.points, shape.fill)
    return [(expand(shape.points, shape.edge), INK), inside] if shape.edge else [inside]
