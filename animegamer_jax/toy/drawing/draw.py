"""Draws scenes of the toy world: 17 frames at 8 per second, at any size, with sub-pixel motion.

A unit is 1/48 of the frame's height. Characters are drawn without smoothing on a canvas of at least
`_MIN_CANVAS_HEIGHT` rows and reduced by averaging; scenery (`places.strips`) is drawn
once, and characters move by less than a pixel. Canvases hold premultiplied
colours in Pillow's mode RGBX, which resampling treats as four independent channels.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from animegamer_jax.toy.drawing.places import FAR_SPEED, PERIOD, START, strip_scale, strips
from animegamer_jax.toy.drawing.poses import Layer, pose
from animegamer_jax.toy.drawing.shapes import Colour
from animegamer_jax.toy.scene import NUM_FRAMES, Scene

_MIN_CANVAS_HEIGHT = 384
_NIGHT_TINT = (36, 40, 110)
_TINT_AMOUNT = {"day": 0.0, "night": 0.16}


def render(
    scene: Scene, *, height: int = 96, width: int = 144, num_frames: int = NUM_FRAMES
) -> UInt8[np.ndarray, "f h w 3"]:
    """Returns the clip of a scene; another size changes nothing but the resolution.

    Args:
        scene: Content of the clip.
        height: Height of a frame in pixels; everything scales with it.
        width: Width of a frame in pixels; wider than 3:2, it shows more of the world on both sides.
        num_frames: Number of frames, 8 per second.
    """
    posed = pose(scene, num_frames=num_frames)
    scenery = _scenery(scene, posed.zoom, height=height, width=width)
    frames = np.repeat(scenery[None], num_frames, axis=0)
    colours = [(*_tinted(layer.colour, _TINT_AMOUNT[scene.time]), 255) for layer in posed.layers]
    _paint(frames, posed.layers, colours)
    return frames if scene.details.side == "left" else np.ascontiguousarray(frames[:, :, ::-1])


def _tinted(colour: Colour, amount: float) -> Colour:
    red, green, blue = (
        round(c + amount * (v - c)) for c, v in zip(colour, _NIGHT_TINT, strict=True)
    )
    return red, green, blue


def _scenery(scene: Scene, zoom: float, *, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    size = {"zoom": zoom, "height": height, "width": width}
    far, near = strips(scene.place, scene.time, variant=scene.details.variant, **size)
    frame = np.array(_window(far, START * FAR_SPEED, **size))
    _cover(frame, _window(near, START, **size))
    return frame[..., :3]


def _window(strip: Image.Image, x: float, *, zoom: float, height: int, width: int) -> np.ndarray:
    scale = strip_scale(height)
    left = x % PERIOD * scale * height / 48
    box = (left, 0.0, left + width * scale / zoom, height)
    return np.asarray(strip.resize((width, height), Image.Resampling.HAMMING, box=box))


def _cover(frame: UInt8[np.ndarray, "*f h w _"], layer: UInt8[np.ndarray, "*f h w 4"]) -> None:
    """Composites premultiplied colours over frames, in place."""
    clear = 255 - layer[..., 3:].astype(np.uint16)
    frame[..., :3] = layer[..., :3] + ((frame[..., :3] * clear + 127) // 255).astype(np.uint8)


def _paint(
    frames: UInt8[np.ndarray, "f h w 3"],
    layers: Sequence[Layer],
    colours: Sequence[tuple[int, int, int, int]],
) -> None:
    """Paints polygons over frames, in place, and supersamples only their bounding box."""
    height, width = frames.shape[1:3]
    supersample = max(2, math.ceil(_MIN_CANVAS_HEIGHT / height))
    points = np.concatenate([layer.points for layer in layers], axis=1) * (height / 48)
    points[..., 0] += width / 2
    ends = 2 * np.cumsum([layer.points.shape[1] for layer in layers])
    slices = [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
    low = np.clip(np.floor(points.min(axis=1)), 0, (width, height)).astype(int)
    high = np.clip(np.ceil(points.max(axis=1)) + 1, 0, (width, height)).astype(int)
    corners = np.rint((points - low[:, None]) * supersample).astype(int)
    for frame, polygons, (left, top), (right, bottom) in zip(
        frames, corners, low, high, strict=True
    ):
        if right <= left or bottom <= top:
            continue
        box = int(right - left) * supersample, int(bottom - top) * supersample
        canvas = Image.new("RGBX", box)
        draw = ImageDraw.Draw(canvas)
        flat = polygons.ravel().tolist()
        for where, colour in zip(slices, colours, strict=True):
            draw.polygon(flat[where], fill=colour)
        _cover(frame[top:bottom, left:right], np.asarray(canvas.reduce(supersample)))
