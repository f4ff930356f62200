"""The places of the toy world: endless strips of scenery that repeat every `PERIOD` units.

A place has three variants, such as its seasons, and is seen from near or from far. It has two
strips: the far one (sky, sea, wall), whose position is `FAR_SPEED` of the near one's, and the near
one, on which characters stand at `GROUND`. Every window of a frame's width shows which place and
variant it is. A strip is drawn once for each size, and cached.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

from animegamer_jax.toy.drawing.shapes import (
    INK,
    Colour,
    Number,
    Points,
    blob,
    ellipse,
    expand,
    polygon,
)

PERIOD = 144.0
GROUND = 43.0
START = 20.0  # of a frame in a place's near strip, in units
ANCHOR = 45.0  # the height at which things stay when the view is zoomed
ZOOMS = {"near": 1.0, "far": 0.72}
FAR_SPEED = 0.7
HORIZON = 30.0
_DAY_SKY: Colour = (135, 205, 250)
_NIGHT_SKY: Colour = (28, 30, 84)

_NIGHT = np.array([0.34, 0.38, 0.58])


class Pen:
    """Draws on a strip of `PERIOD` units and more, and repeats everything by the period.

    `variant` is that of the place; `choose` picks its colour.
    """

    def __init__(
        self, *, width: Number, unit: Number, night: bool, variant: int, colour: Colour | None
    ):
        self.unit, self.night, self.width, self.variant = unit, night, width, variant
        size = math.ceil((PERIOD + width) * unit) + 1, math.ceil(48 * unit)
        ground = (*INK, 0) if colour is None else (*colour, 255)
        self.image = Image.new("RGBA", size, ground)
        self.draw = ImageDraw.Draw(self.image)

    def choose(self, *colours: Colour) -> Colour:
        """Returns the colour of the place's variant."""
        return colours[self.variant]

    def tone(self, colour: Colour) -> Colour:
        """Returns the colour at this time of day."""
        if not self.night:
            return colour
        red, green, blue = (int(c) for c in np.array(colour) * _NIGHT + (4, 6, 22))
        return red, green, blue

    def fill(self, points: Points, colour: Colour, *, edge: Number = 0.45) -> None:
        """Draws a shape in its colour at this time of day, with an edge."""
        self.light(points, self.tone(colour), edge=edge)

    def light(self, points: Points, colour: Colour, *, edge: Number = 0.0) -> None:
        """Draws a shape in its own colour, such as one that shines at night."""
        first = math.floor((-points[:, 0].max() - 1) / PERIOD)
        last = math.ceil((PERIOD + self.width - points[:, 0].min() + 1) / PERIOD)
        for repeat in range(first, last + 1):
            shifted = points + np.array([repeat * PERIOD, 0.0])
            if edge:
                self._polygon(expand(shifted, edge), self.tone(INK))
            self._polygon(shifted, colour)

    def band(self, top: Number, bottom: Number, colour: Colour) -> None:
        """Draws a horizontal band over the whole strip."""
        box = [0, round(top * self.unit), self.image.width, round(bottom * self.unit)]
        self.draw.rectangle(box, fill=self.tone(colour))

    def _polygon(self, points: Points, colour: Colour) -> None:
        self.draw.polygon(np.rint(points * self.unit).ravel().tolist(), fill=(*colour, 255))


def _rect(x: Number, y: Number, width: Number, height: Number) -> Points:
    return polygon((x, y), (x + width, y), (x + width, y + height), (x, y + height))


def _sky(pen: Pen) -> None:
    """Draws sun and clouds, or moon and stars, once in half a period."""
    for x in (20, 92):
        if pen.night:
            pen.light(ellipse(x, 9, rx=5.2, ry=5.2), (255, 244, 190))
            pen.light(ellipse(x + 2.4, 7.8, rx=4.3, ry=4.3), _NIGHT_SKY)
        else:
            pen.light(ellipse(x, 9, rx=5.4, ry=5.4), (255, 238, 130), edge=0.3)
    if pen.night:
        for x, y in ((4, 5), (11, 16), (33, 5), (40, 14), (50, 7), (58, 17), (66, 4)):
            for shift in (0, 72):
                pen.light(_star(x + shift, y), (250, 245, 215))
        return
    for x, y, scale in ((42, 9, 1.0), (62, 16, 0.8), (112, 8, 0.9), (136, 15, 1.0)):
        knots = np.array([(-8, 2), (-6, -1.5), (-2, -3.6), (3, -3.2), (6, -0.8), (8, 2), (0, 2.8)])
        pen.light(blob(*map(tuple, knots * scale + (x, y))), (255, 255, 255))


def _star(x: Number, y: Number) -> Points:
    angle = np.arange(8) * np.pi / 4
    radius = np.where(np.arange(8) % 2, 0.45, 1.25)
    return np.stack([x + radius * np.sin(angle), y - radius * np.cos(angle)], axis=1)


def _hills(pen: Pen, colour: Colour, *, top: Number, height: Number, wave: int) -> None:
    x = np.linspace(-2, PERIOD + 2, 80)
    y = top + height * (1 - np.sin(2 * np.pi * wave * x / PERIOD)) / 2
    pen.fill(np.stack([np.r_[x, PERIOD + 2, -2], np.r_[y, 50, 50]], axis=1), colour, edge=0)


def _meadow(far: Pen, near: Pen) -> None:
    _sky(far)
    _hills(far, (150, 205, 120), top=22, height=6, wave=2)
    near.band(HORIZON, 48, near.choose((120, 200, 80), (175, 215, 120), (225, 190, 95)))
    leaves = near.choose((50, 150, 60), (255, 160, 205), (240, 120, 40))  # summer, spring, autumn
    for x in (8, 56, 104):
        near.fill(_rect(x + 6, 24, 3, 9), (130, 85, 50))
        near.fill(ellipse(x + 7.5, 18, rx=9.5, ry=9), leaves)
    petals = ((235, 70, 90), (255, 250, 240), (255, 215, 60))
    for index, x in enumerate(range(4, 144, 12)):
        y = (35, 40.5, 45, 37.5)[index % 4]
        near.fill(ellipse(x, y, rx=1.9, ry=1.7, count=10), petals[index % 3], edge=0.3)
        near.fill(ellipse(x, y, rx=0.7, ry=0.7, count=8), (250, 180, 40), edge=0)


def _beach(far: Pen, near: Pen) -> None:
    _sky(far)
    far.band(22, 48, far.choose((60, 150, 225), (70, 205, 190), (95, 105, 200)))
    for x in (30, 78, 126):
        far.fill(polygon((x - 5, 21), (x + 5, 21), (x + 3, 24), (x - 3, 24)), (190, 80, 60))
        far.fill(polygon((x, 12), (x + 4.5, 20), (x, 20)), (255, 255, 255), edge=0.3)
    for index, x in enumerate(range(2, 144, 16)):
        far.fill(_rect(x, 25 + 2 * (index % 2), 7, 0.9), (200, 235, 255), edge=0)
    _hills(near, (235, 250, 255), top=30, height=1.2, wave=6)
    sand = near.choose((250, 222, 150), (250, 240, 215), (225, 185, 150))
    _hills(near, sand, top=31.4, height=1.2, wave=6)
    for x in (6, 78):
        near.fill(blob((x, 35), (x + 1.4, 26), (x + 1, 17), (x + 3.4, 17), (x + 4, 26),
                       (x + 3.4, 35)), (165, 115, 65))  # fmt: skip
        for tip_x, tip_y in ((-9, 19), (-6, 11), (3, 9), (10, 12), (12, 20)):
            root, middle, drop = x + 2.2, x + 2.2 + tip_x * 0.5, tip_y - 17
            leaf = blob((root, 17), (middle, 14 + drop * 0.8), (root + tip_x, tip_y),
                        (middle, 17 + drop / 2))  # fmt: skip
            near.fill(leaf, (70, 170, 80), edge=0.35)
    for x in (44, 116):
        near.fill(_rect(x + 7.5, 24, 1, 11), (240, 240, 240), edge=0.3)
        near.fill(blob((x, 25), (x + 3, 20), (x + 8, 18), (x + 13, 20), (x + 16, 25), (x + 8, 24)),
                  near.choose((240, 80, 90), (250, 200, 60), (90, 120, 230)))  # fmt: skip
        near.fill(polygon((x + 6.5, 18.3), (x + 9.5, 18.3), (x + 10.5, 24), (x + 5.5, 24)),
                  (255, 245, 235), edge=0)  # fmt: skip
    for x in range(0, 144, 24):
        near.fill(_star(x + 4, 45), (235, 120, 80), edge=0.4)
        near.fill(ellipse(x + 16, 39, rx=1.6, ry=1, count=10), (225, 190, 120), edge=0)


def _town(far: Pen, near: Pen) -> None:
    _sky(far)
    walls = ((245, 205, 170), (200, 220, 235), (245, 230, 170), (235, 180, 175))
    roof = near.choose((205, 65, 55), (70, 110, 205), (75, 155, 90))
    for index in range(8):
        x, top = index * 18, (15, 19, 12)[index % 3]
        near.fill(_rect(x + 1, top, 16, 22), walls[index % 4])
        near.fill(polygon((x - 0.5, top), (x + 9, top - 8), (x + 18.5, top)), roof)
        for dx in (3.5, 10.5):
            shine = near.tone((120, 175, 215)) if not near.night else (255, 220, 110)
            near.light(_rect(x + dx, top + 4, 4, 4.6), shine, edge=0.35)
        near.fill(_rect(x + 7, top + 12, 4, 24), (125, 80, 55), edge=0.35)
    near.band(33, 48, (190, 185, 190))
    near.band(33, 34.2, (120, 115, 130))
    for row, y in enumerate((37.5, 41.5, 45.5)):
        near.band(y, y + 0.45, (140, 135, 150))
        for x in range(0, 144, 12):
            near.fill(_rect(x + 6 * (row % 2), y, 0.5, 4), (140, 135, 150), edge=0)
    for x in (0, 72):
        near.fill(_rect(x - 0.6, 14, 1.4, 21), (70, 75, 95), edge=0.3)
        near.light(ellipse(x, 12.5, rx=2.6, ry=2.6), (255, 245, 180), edge=0.5)


def _forest(far: Pen, near: Pen) -> None:
    far.band(0, 48, far.choose((150, 205, 160), (235, 215, 150), (190, 200, 235)))
    for x in range(0, 144, 18):
        far.fill(_rect(x, 0, 5, 40), (100, 160, 120), edge=0)
    for index, x in enumerate(range(2, 144, 12)):
        colour = (255, 250, 190) if far.night else (215, 240, 190)
        far.light(ellipse(x, 8 + 9 * (index % 3), rx=0.8, ry=0.8, count=10), colour)
    near.band(33, 48, (120, 130, 65))
    _hills(near, (85, 140, 70), top=31, height=2.6, wave=8)
    near.band(36, 48, (140, 115, 70))
    leaves = near.choose((50, 125, 65), (225, 120, 40), (235, 240, 250))
    for x in (3, 39, 75, 111):
        near.fill(polygon((x, -2), (x + 8, -2), (x + 7.5, 28), (x + 10, 36), (x - 2, 36),
                          (x + 0.5, 28)), (120, 80, 50))  # fmt: skip
        near.fill(ellipse(x + 4, 16, rx=1.3, ry=2.2, count=14), (85, 55, 40), edge=0)
        near.fill(blob((x - 12, 2), (x - 6, 9), (x, 6), (x + 4, 10), (x + 9, 6), (x + 15, 9),
                       (x + 20, 2), (x + 4, -6)), leaves)  # fmt: skip
    for x in (26, 62, 98, 134):
        near.fill(_rect(x - 1, 34, 2, 4), (250, 235, 210), edge=0.35)
        near.fill(blob((x - 3.4, 34), (x, 29.6), (x + 3.4, 34), (x, 34.6)), (225, 60, 60))
        near.fill(ellipse(x - 0.8, 32.3, rx=0.8, ry=0.7, count=10), (255, 255, 255), edge=0)
    for x in range(8, 144, 18):
        near.fill(polygon((x, 45), (x + 0.7, 41.5), (x + 1.8, 44), (x + 3.2, 41), (x + 4, 45)),
                  (90, 150, 60), edge=0.3)  # fmt: skip


def _bedroom(far: Pen, near: Pen) -> None:
    far.band(0, 48, (150, 210, 245))
    near.band(0, 34, near.choose((250, 215, 200), (200, 225, 245), (215, 240, 200)))
    stripe = near.choose((245, 195, 185), (175, 205, 235), (190, 225, 170))
    for x in range(0, 144, 12):
        near.fill(_rect(x, 0, 3.5, 34), stripe, edge=0)
    near.band(33, 48, (205, 150, 100))
    near.band(32.4, 34, (250, 245, 235))
    for row, y in enumerate((38, 43)):
        near.band(y, y + 0.45, (150, 100, 65))
        for x in range(0, 144, 18):
            near.fill(_rect(x + 9 * (row % 2), y, 0.5, 5), (150, 100, 65), edge=0)
    curtain = near.choose((235, 110, 130), (80, 120, 210), (90, 170, 90))
    for x in (6, 78):
        near.fill(_rect(x, 4, 18, 17), (255, 255, 255))
        near.light(
            _rect(x + 1.5, 5.5, 15, 14), (24, 28, 84) if near.night else (130, 205, 250), edge=0.3
        )
        if near.night:
            near.light(ellipse(x + 6, 10, rx=2.8, ry=2.8), (255, 244, 190))
            near.light(_star(x + 13, 9), (255, 250, 220))
        else:
            near.light(ellipse(x + 9, 14, rx=5, ry=2.2), (255, 255, 255))
        near.fill(_rect(x + 8.6, 5, 0.8, 15), (255, 255, 255), edge=0)
        for dx in (-3, 16.5):
            near.fill(polygon((x + dx, 3), (x + dx + 4.5, 3), (x + dx + 3.6, 23),
                              (x + dx + 0.4, 23)), curtain, edge=0.4)  # fmt: skip
    for x in (32, 104):
        near.fill(_rect(x, 12, 3, 22), (150, 100, 65))
        near.fill(_rect(x, 24, 34, 8), (250, 250, 250))
        near.fill(blob((x + 3, 25), (x + 4, 20), (x + 9, 19), (x + 11, 24)), (255, 250, 225))
        near.fill(_rect(x + 11, 23, 24, 9.5), (110, 150, 225))
        near.fill(_rect(x + 34, 19, 2.6, 15), (150, 100, 65))
    for x in (70, 142):
        near.fill(_rect(x + 0.6, 22, 1, 12), (110, 80, 60), edge=0.3)
        near.light(polygon((x - 2, 22), (x - 0.6, 16), (x + 2.8, 16), (x + 4.2, 22)),
                   (255, 226, 130), edge=0.45)  # fmt: skip


def _snow(far: Pen, near: Pen) -> None:
    _sky(far)
    for x in (10, 58, 106):
        far.fill(polygon((x - 20, 34), (x + 4, 11), (x + 28, 34)), (150, 170, 205), edge=0.3)
        far.fill(polygon((x - 3, 17.7), (x + 4, 11), (x + 11, 17.7), (x + 7, 20), (x + 4, 17.5),
                         (x, 20.5)), (255, 255, 255), edge=0)  # fmt: skip
    _hills(near, (238, 245, 255), top=29, height=3, wave=3)
    needles = near.choose((60, 130, 110), (175, 115, 60), (80, 105, 190))
    hat = near.choose((70, 70, 90), (225, 60, 70), (250, 200, 60))
    for x in (6, 54, 102):
        near.fill(_rect(x + 5, 29, 2.4, 6), (120, 80, 60), edge=0.35)
        for top, width in ((21, 8.5), (16, 7), (11, 5)):
            near.fill(polygon((x + 6.2, top - 4), (x + 6.2 + width, top + 9),
                              (x + 6.2 - width, top + 9)), needles, edge=0.4)  # fmt: skip
            cap = polygon((x + 6.2, top - 4), (x + 6.2 + width * 0.5, top + 2.5),
                          (x + 6.2, top + 1), (x + 6.2 - width * 0.5, top + 2.5))  # fmt: skip
            near.fill(cap, (255, 255, 255), edge=0)
    for x in (36, 84, 132):
        near.fill(ellipse(x, 33, rx=4.6, ry=4.4), (255, 255, 255))
        near.fill(ellipse(x, 26, rx=3.3, ry=3.2), (255, 255, 255))
        near.fill(_rect(x - 2.6, 19.4, 5.2, 4), hat, edge=0.3)
        near.fill(
            polygon((x + 0.5, 26), (x + 4.6, 26.8), (x + 0.5, 27.4)), (255, 140, 40), edge=0.2
        )
        for dx in (-1.2, 1.2):
            near.fill(ellipse(x + dx, 25, rx=0.5, ry=0.6, count=8), INK, edge=0)
    for index, x in enumerate(range(2, 144, 12)):
        near.fill(
            ellipse(x, (37, 45, 40.5)[index % 3], rx=2.4, ry=0.8, count=12), (190, 210, 240), edge=0
        )


_DRAW: dict[str, Callable[[Pen, Pen], None]] = {
    "meadow": _meadow,
    "beach": _beach,
    "town": _town,
    "forest": _forest,
    "bedroom": _bedroom,
    "snow": _snow,
}


@functools.lru_cache(maxsize=96)
def strips(
    place: str, time: str, *, variant: int, zoom: float, height: int, width: int
) -> tuple[Image.Image, Image.Image]:
    """Returns the far and the near strip, in premultiplied colours (mode RGBX).

    A strip is `strip_scale(height)` times finer from left to right than a frame, where it is
    sampled between pixels. From top to bottom it has the rows of a frame as it is seen with the
    zoom; what is above or below the drawn units repeats the first or last row.
    """
    unit = strip_scale(height) * height / 48
    night = time == "night"
    sky = _NIGHT_SKY if night else _DAY_SKY
    pen = functools.partial(
        Pen, width=width * 48 / height / zoom, unit=unit, night=night, variant=variant
    )
    far, near = pen(colour=sky), pen(colour=None)
    _DRAW[place](far, near)
    finished = functools.partial(_finished, zoom=zoom, unit=unit, height=height)
    return finished(far.image), finished(near.image)


def _finished(image: Image.Image, *, zoom: float, unit: float, height: int) -> Image.Image:
    rows = np.asarray(Image.frombytes("RGBX", image.size, image.convert("RGBa").tobytes()))
    top, bottom = ANCHOR / zoom - ANCHOR, (48 - ANCHOR) / zoom - (48 - ANCHOR)
    pad = round(top * unit), round(bottom * unit)
    seen = Image.fromarray(np.pad(rows, (pad, (0, 0), (0, 0)), mode="edge"), mode="RGBX")
    return seen.resize((seen.width, height), Image.Resampling.BOX)


def strip_scale(height: int) -> int:
    """Returns how much finer than a frame of this height a strip is from left to right."""
    return max(2, min(4, math.ceil(192 / height)))
