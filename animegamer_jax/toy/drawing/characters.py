"""The characters of the toy world: their shapes, part by part.

A character is a tuple of pieces in drawing order. Each piece belongs to a part that moves as a
whole, and has coordinates of this part: the origin of the head is the neck, of an arm the shoulder,
of a leg the end of the hip, of the body the middle of the hip. Characters look a little to the
right; those that face left are mirrored.
"""

import dataclasses
from typing import Literal, NamedTuple, cast

from animegamer_jax.toy.drawing.shapes import (
    INK,
    Colour,
    Points,
    Shape,
    blob,
    ellipse,
    limb,
    polygon,
)
from animegamer_jax.toy.scene import OwnCharacter

Part = Literal[
    "far_leg", "near_leg", "far_arm", "near_arm", "body", "head", "tails", "awake", "asleep",
    "mouth",
]  # fmt: skip
Hair = Literal["twin", "spiky", "bob", "flame", "long", "cap", "buns", "hat"]
Clothes = Literal["dress", "suit"]


class Piece(NamedTuple):
    """One shape and the part that it moves with."""

    part: Part
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Looks:
    """Hair, clothes and colours of one character."""

    hair: Hair
    hair_colour: Colour
    eyes: Colour
    clothes: Clothes
    cloth: Colour
    trim: Colour
    legs: Colour
    shoes: Colour
    extra: Colour


SKIN: Colour = (255, 224, 196)
BLUSH: Colour = (255, 170, 160)
WHITE: Colour = (255, 255, 255)
MOUTH: Colour = (200, 70, 80)

LOOKS: dict[str, Looks] = {
    "Mika": Looks("twin", (255, 130, 175), (60, 150, 210), "dress", (70, 120, 220), WHITE, SKIN,
                  (120, 60, 50), (255, 225, 90)),
    "Ren": Looks("spiky", (66, 104, 205), (60, 90, 170), "suit", (215, 50, 55), (250, 240, 225),
                 (60, 60, 80), (240, 240, 240), (215, 50, 55)),
    "Hana": Looks("bob", (135, 80, 45), (110, 70, 40), "dress", (255, 205, 60), WHITE, SKIN,
                  (210, 60, 70), (230, 50, 70)),
    "Kai": Looks("flame", (255, 215, 80), (40, 140, 80), "suit", (60, 165, 85), (225, 245, 200),
                 (120, 90, 60), (90, 60, 40), (255, 140, 50)),
    "Yuki": Looks("long", (225, 228, 245), (150, 90, 200), "dress", (150, 95, 205), (235, 215, 255),
                  (240, 240, 250), (100, 60, 140), (110, 200, 240)),
    "Toma": Looks("cap", (240, 120, 45), (90, 70, 50), "suit", (245, 245, 240), (40, 90, 180),
                  (40, 90, 180), (230, 70, 50), (40, 130, 220)),
    "Suzu": Looks("buns", (70, 175, 120), (190, 60, 90), "dress", (240, 90, 50), (255, 215, 90),
                  (255, 245, 235), (60, 50, 60), (240, 70, 90)),
    "Nori": Looks("hat", (60, 45, 65), (220, 150, 40), "dress", (115, 72, 170), (240, 180, 60),
                  (70, 60, 80), (50, 40, 60), (128, 78, 190)),
}  # fmt: skip


_HAIR_COLOURS: dict[str, Colour] = {
    "pink": (255, 150, 190), "black": (62, 54, 70), "brown": (150, 90, 45),
    "golden": (250, 205, 80), "white": (232, 234, 245), "green": (90, 190, 120),
}  # fmt: skip
_CLOTH_COLOURS: dict[str, Colour] = {
    "red": (220, 55, 60), "yellow": (250, 205, 60), "green": (60, 165, 85),
    "blue": (65, 120, 225), "purple": (150, 90, 205), "grey": (150, 155, 165),
}  # fmt: skip
_ACCESSORY_COLOURS: dict[str, Colour] = {
    "red": (232, 50, 60), "yellow": (255, 220, 50), "green": (45, 170, 75), "blue": (45, 95, 230),
}  # fmt: skip
_ACCESSORY_AT = (-17.0, -23.0)  # of its middle, from the feet; forward is positive


def own_looks(own: OwnCharacter) -> Looks:
    """Returns the looks of a player's own character."""
    colour, kind = own.clothes.split()
    dress = kind == "dress"
    return Looks(
        hair=cast(Hair, own.hair),
        hair_colour=_HAIR_COLOURS[own.hair_colour],
        eyes=(90, 80, 110),
        clothes="dress" if dress else "suit",
        cloth=_CLOTH_COLOURS[colour],
        trim=WHITE,
        legs=SKIN if dress else (90, 85, 110),
        shoes=(110, 75, 60),
        extra=(250, 245, 240),
    )


def accessory_shapes(accessory: str) -> tuple[Shape, ...]:
    """Returns a thing on a stick, from the feet of the character that carries it."""
    name, kind = accessory.split()
    colour, light = _ACCESSORY_COLOURS[name], (255, 255, 255)
    x, y = _ACCESSORY_AT
    stick = Shape(_bar(x, y, 18.0), (150, 120, 100), 0.3)
    match kind:
        case "balloon":
            shine = Shape(ellipse(x - 1.6, y - 2, rx=1.0, ry=1.5, count=10), light, 0)
            return stick, Shape(ellipse(x, y, rx=5.0, ry=5.8), colour, 0.7), shine
        case "parasol":
            dome = blob((x - 7.4, y + 2.6), (x - 5.4, y - 3.4), (x, y - 6.0), (x + 5.4, y - 3.4),
                        (x + 7.4, y + 2.6), (x + 3.6, y + 1.2), (x, y + 2.4),
                        (x - 3.6, y + 1.2))  # fmt: skip
            return stick, Shape(dome, colour, 0.7)
        case "kite":
            kite = polygon((x, y - 7.2), (x + 5.2, y - 1), (x, y + 6.4), (x - 5.2, y - 1))
            cross = polygon((x - 0.5, y - 6), (x + 0.5, y - 6), (x + 0.5, y + 5), (x - 0.5, y + 5))
            return stick, Shape(kite, colour, 0.7), Shape(cross, light, 0)
        case "flag":
            cloth = polygon((x - 5.2, y - 5.6), (x + 5.2, y - 5.6), (x + 5.2, y + 2.4),
                            (x - 5.2, y + 2.4))  # fmt: skip
            stripe = polygon((x - 5.2, y - 2.9), (x + 5.2, y - 2.9), (x + 5.2, y - 0.3),
                             (x - 5.2, y - 0.3))  # fmt: skip
            return stick, Shape(cloth, colour, 0.7), Shape(stripe, light, 0)
        case _:
            raise ValueError(f"unknown accessory {accessory!r}")


def _bar(x: float, y: float, length: float) -> Points:
    return polygon((x - 0.5, y), (x + 0.5, y), (x + 1.2, y + length), (x + 0.2, y + length))


def pieces(looks: Looks) -> tuple[Piece, ...]:
    """Returns the pieces of one character, the farthest first."""
    return (
        *_back_hair(looks),
        *_limb("far_arm", looks),
        *_leg("far_leg", looks),
        *_leg("near_leg", looks),
        *_body(looks),
        *_limb("near_arm", looks),
        *_head(looks),
        *_front_hair(looks),
    )


def _pieces(part: Part, *shapes: Shape) -> tuple[Piece, ...]:
    return tuple(Piece(part, shape) for shape in shapes)


def _shade(colour: Colour, factor: float) -> Colour:
    red, green, blue = (min(255, int(channel * factor)) for channel in colour)
    return red, green, blue


def _limb(part: Part, looks: Looks) -> tuple[Piece, ...]:
    sleeve = _shade(looks.cloth, 0.92)
    hand = Shape(ellipse(0, 6.2, rx=1.5, ry=1.5, count=14), SKIN)
    return _pieces(part, hand, Shape(limb(4.6, top=1.4, bottom=1.6), sleeve))


def _leg(part: Part, looks: Looks) -> tuple[Piece, ...]:
    dark = 0.85 if part == "far_leg" else 1.0
    shoe = blob((-1.5, 4.9), (0.6, 4.4), (2.7, 5.6), (2.4, 6.8), (-1.6, 6.8))
    leg = Shape(limb(5.0, top=1.5, bottom=1.4), _shade(looks.legs, dark))
    return _pieces(part, leg, Shape(shoe, _shade(looks.shoes, dark)))


def _body(looks: Looks) -> tuple[Piece, ...]:
    if looks.clothes == "dress":
        skirt = polygon((-2.9, -8.8), (2.9, -8.8), (3.4, -4.5), (6.0, 2.0), (3.0, 2.6), (-3.0, 2.6),
                        (-6.0, 2.0), (-3.4, -4.5))  # fmt: skip
        hem = polygon((-5.4, 0.4), (5.4, 0.4), (5.9, 1.8), (3.0, 2.4), (-3.0, 2.4), (-5.9, 1.8))
        collar = polygon((-2.9, -8.8), (2.9, -8.8), (0, -5.2))
        trims = Shape(hem, looks.trim, 0), Shape(collar, looks.trim, 0)
        return _pieces("body", Shape(skirt, looks.cloth), *trims)
    jacket = polygon((-3.4, -8.8), (3.4, -8.8), (4.0, -0.5), (3.6, 0.8), (-3.6, 0.8), (-4.0, -0.5))
    shirt = polygon((-1.2, -8.8), (1.8, -8.8), (1.6, 0.6), (-0.8, 0.6))
    belt = polygon((-3.8, -1.2), (3.8, -1.2), (3.6, 0.7), (-3.6, 0.7))
    front = Shape(shirt, looks.trim, 0), Shape(belt, looks.legs, 0)
    return _pieces("body", Shape(jacket, looks.cloth), *front)


def _head(looks: Looks) -> tuple[Piece, ...]:
    face = blob((-9.0, -9), (-8.2, -4.4), (-4.5, -0.8), (0.6, 0.3), (5.2, -0.8), (8.6, -4.4),
                (9.0, -9), (6, -15), (0, -17), (-6, -15))  # fmt: skip
    mouth = blob((-1.1, -0.9), (1.1, -0.9), (0.8, 0.7), (-0.8, 0.7))
    result = [
        Piece("head", Shape(face, SKIN)),
        Piece("head", Shape(ellipse(-5.3, -3.4, rx=1.5, ry=0.9, count=12), BLUSH, 0)),
        Piece("head", Shape(ellipse(7.2, -3.4, rx=1.1, ry=0.9, count=12), BLUSH, 0)),
        Piece("mouth", Shape(mouth, MOUTH, 0.35)),
    ]
    for x, rx in ((-2.6, 1.75), (5.0, 1.55)):
        lid = blob((x - 1.9, -6.2), (x, -4.9), (x + 1.9, -6.2), (x, -5.7))
        result += [
            Piece("awake", Shape(ellipse(x, -6.4, rx=rx, ry=2.7, count=16), INK, 0.15)),
            Piece("awake", Shape(ellipse(x, -5.5, rx=rx * 0.75, ry=1.5, count=14), looks.eyes, 0)),
            Piece("awake", Shape(ellipse(x - 0.5, -7.5, rx=0.8, ry=0.9, count=12), WHITE, 0)),
            Piece("asleep", Shape(lid, INK, 0.15)),
        ]
    return tuple(result)


def _back_hair(looks: Looks) -> tuple[Piece, ...]:
    colour = _shade(looks.hair_colour, 0.85)
    match looks.hair:
        case "twin":
            far = blob((-8, -13), (-12, -14), (-15.5, -8), (-14.5, 1), (-12, 5), (-11, -1),
                       (-8.5, -8))  # fmt: skip
            near = blob((8, -13), (11.5, -14), (14, -8), (13, 0), (10.8, 4), (10.5, -2), (8.3, -8))
            return _pieces("tails", Shape(far, colour), Shape(near, colour))
        case "long":
            mane = blob((-9.5, -12), (-11, -4), (-11, 5), (-8, 9), (-2, 8), (5, 9), (9.5, 5),
                        (10, -4), (9.5, -12), (0, -17))  # fmt: skip
            return _pieces("tails", Shape(mane, colour))
        case "bob":
            bell = blob((-9.5, -12), (-11, -5), (-10.5, 0.8), (-5, 1.6), (5, 1.6), (10, 0.8),
                        (10.4, -5), (9.4, -12), (0, -17))  # fmt: skip
            return _pieces("head", Shape(bell, colour))
        case "hat":
            locks = blob((-9.3, -11), (-10.6, -4), (-10.8, 3), (-7, 5), (-4, 2), (4, 2), (7, 4.5),
                         (10, 3), (9.8, -4), (9.2, -11))  # fmt: skip
            return _pieces("tails", Shape(locks, colour))
        case "buns":
            buns = (ellipse(x, -16.4, rx=3.9, ry=3.7) for x in (-7.4, 7.0))
            return _pieces("head", *(Shape(bun, looks.hair_colour) for bun in buns))
        case _:
            nape = blob((-9.4, -12), (-10.0, -6), (-8, -2.5), (8, -2.5), (9.8, -6), (9.4, -12))
            return _pieces("head", Shape(nape, colour))


def _front_hair(looks: Looks) -> tuple[Piece, ...]:
    colour = looks.hair_colour
    crown = [(9.6, -9.5), (8.8, -14), (5, -17.4), (0, -18.4), (-5, -17.4), (-9.2, -14),
             (-9.9, -9.5)]  # fmt: skip
    match looks.hair:
        case "spiky":
            hair = polygon((9.8, -5), (10.6, -10), (12.8, -12.5), (9.6, -14), (10.5, -18.5),
                           (5.6, -17.5), (3.5, -21.5), (-0.5, -18.4), (-5, -21), (-6, -17),
                           (-11.5, -18), (-9.6, -13.5), (-13, -11), (-10.3, -8.5), (-11, -4.5),
                           (-8.4, -6), (-6.6, -10), (-4.5, -7.8), (-2.5, -11), (0.5, -8), (3, -11),
                           (5.5, -8), (7.6, -10.5))  # fmt: skip
            return _pieces("head", Shape(hair, colour))
        case "flame":
            hair = polygon((9.6, -6), (10.4, -11), (12.6, -16), (9.4, -15.5), (9.8, -21.5),
                           (5.4, -18.5), (2.6, -25), (-1, -19.5), (-5.5, -24), (-6, -18.5),
                           (-11.5, -20.5), (-9.6, -14.5), (-12.6, -13), (-10.3, -9.5), (-9.8, -6),
                           (-7.8, -9), (-6, -12.5), (0, -13.8), (5, -12.8), (8, -9.5))  # fmt: skip
            scarf = blob((-6, -0.8), (-3, 0.4), (0.6, 1), (4, 0.4), (6.4, -0.8), (6, 1.6),
                         (0.6, 2.8), (-5.6, 1.6))  # fmt: skip
            return _pieces("head", Shape(hair, colour), Shape(scarf, looks.extra))
        case "cap":
            fringe = polygon((9.6, -6), (9.6, -12), (-9.6, -12), (-10.2, -5), (-8.4, -7),
                             (-7, -10.5), (6.5, -10.5), (8.4, -7.5))  # fmt: skip
            dome = blob((-10, -11.5), (-9.6, -16), (-5, -19.6), (1, -20.2), (6.5, -18.6),
                        (10, -14.5), (10.2, -11.4), (0, -12))  # fmt: skip
            peak = blob((1, -13.2), (9, -13.6), (15.4, -11.8), (16, -10.2), (9, -10.8), (1, -11))
            badge = ellipse(1, -16.2, rx=2.1, ry=2.1, count=14)
            cap = Shape(dome, looks.extra), Shape(peak, _shade(looks.extra, 0.8))
            return _pieces("head", Shape(fringe, colour), *cap, Shape(badge, WHITE, 0))
        case "hat":
            fringe = polygon(*crown, (-10.2, -4), (-7.6, -7), (-5.8, -9.5), (-3.2, -8.4),
                             (-0.6, -9.8), (2.4, -8.4), (5, -9.8), (7.6, -7.6),
                             (9.8, -4.6))  # fmt: skip
            cone = blob((-8, -13), (-6.4, -18), (-3.6, -22.5), (-4.6, -26), (-9.5, -27),
                        (-3, -29.4), (2.2, -26), (5.4, -20), (7.8, -13))  # fmt: skip
            brim = blob((-15, -12), (-9, -15), (0, -15.8), (9, -15), (15, -12), (8, -11.2),
                        (0, -12.2), (-8, -11.2))  # fmt: skip
            ribbon = polygon((-7.4, -16.4), (7.0, -16.4), (7.7, -14.2), (-7.9, -14.2))
            hat = Shape(cone, looks.extra), Shape(ribbon, looks.trim, 0.2), Shape(brim, looks.extra)
            return _pieces("head", Shape(fringe, colour), *hat)
        case "bob" | "buns":
            hair = polygon(*crown, (-10.2, -5), (-8.4, -6.5), (-7.4, -9.3), (7.2, -9.3),
                           (8.6, -6.5), (9.8, -5))  # fmt: skip
            if looks.hair == "buns":
                flower = ellipse(6.6, -12.4, rx=2.1, ry=2.0, count=12)
                heart = ellipse(6.6, -12.4, rx=0.8, ry=0.8, count=8)
                flower_shapes = Shape(flower, looks.extra, 0.4), Shape(heart, looks.trim, 0)
                return _pieces("head", Shape(hair, colour), *flower_shapes)
            bow = (
                blob((-5.5, -17.5), (-10.5, -21.5), (-12, -17), (-10, -13.5)),
                blob((-4.5, -17.5), (-0.5, -22), (1.6, -18.4), (-0.5, -14.8)),
                ellipse(-5, -17.4, rx=1.5, ry=1.6, count=12),
            )
            loops = (Shape(loop, looks.extra) for loop in bow)
            return _pieces("head", Shape(hair, colour), *loops)
        case "long":
            hair = polygon(*crown, (-10.4, -3), (-8.2, -5.5), (-6.8, -9.6), (-2.8, -11.4),
                           (0.6, -14), (3, -11), (7, -9.4), (8.6, -5.5), (10, -3))  # fmt: skip
            band = polygon((-9.4, -13.6), (-5, -17.2), (0, -18.4), (5, -17.2), (9, -13.6),
                           (8.2, -12), (4.6, -15.4), (0, -16.6), (-4.8, -15.4),
                           (-8.8, -12))  # fmt: skip
            return _pieces("head", Shape(hair, colour), Shape(band, looks.extra, 0.2))
        case "twin":
            hair = polygon(*crown, (-10, -5), (-8.2, -7), (-6.8, -9.6), (-4.2, -7.8), (-1.2, -10.4),
                           (1.8, -8.2), (4.6, -10.4), (7.4, -8), (9.6, -5))  # fmt: skip
            ties = (ellipse(x, -13.2, rx=1.7, ry=1.9) for x in (-9.2, 8.8))
            return _pieces("head", Shape(hair, colour), *(Shape(t, looks.extra, 0.4) for t in ties))
