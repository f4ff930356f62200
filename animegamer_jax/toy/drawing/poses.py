"""How the characters of the toy world move: where every part is in every frame of a scene.

Each drawing is held for two frames, as in limited animation, and the first for one, so that a VAE
that halves the frames after the first loses nothing. The scene's level sets one number, how far
drawings are apart in units (a unit is 1/48 of a frame's height, 10 pixels at 480 x 720). The
camera stands still. Characters that walk, run or fly cross the frame and turn round before its
edge; the others go to and fro between two drawings. With which of the two a clip begins is left to
chance; the first frame shows it, and with the level determines the rest.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from animegamer_jax.toy.drawing import characters
from animegamer_jax.toy.drawing.places import ANCHOR, GROUND, ZOOMS
from animegamer_jax.toy.drawing.shapes import (
    INK,
    Colour,
    Number,
    Points,
    Shape,
    blob,
    ellipse,
    fill_layers,
    polygon,
)
from animegamer_jax.toy.scene import MOTION_VALUES, Scene

Transforms = Float[np.ndarray, "f 3 3"]
Curve = Float[np.ndarray, " f"]
Value = Curve | Number


class Layer(NamedTuple):
    """One flat shape in all frames: points in units, x from the middle of the frame."""

    points: Float[np.ndarray, "f n 2"]
    colour: Colour


class PosedScene(NamedTuple):
    """How far the view is zoomed, and all that moves in front of the scenery."""

    zoom: float
    layers: list[Layer]


class Chance(NamedTuple):
    """What is left to chance in each clip.

    Attributes:
        facing: Direction of who crosses the frame: 1 to the right, -1 to the left.
        pace: Speed relative to the level's.
        first: Drawing of a sway, hop or stride with which the clip begins, 1 or -1.
    """

    facing: int = 1
    pace: float = 1.0
    first: int = 1


class Rhythm(NamedTuple):
    """Speed, drawings and position in one clip.

    Attributes:
        speed: Mean speed in units per drawing.
        drawings: Number of each frame's drawing.
        end: Which of the two drawings of a sway, hop or stride each frame shows, 1 or -1.
        facing: 1 to the right, -1 to the left.
        x: Position of the character, in units from the middle.
    """

    speed: float
    drawings: Curve
    end: Curve
    facing: Curve
    x: Curve


_STRIDES = {"walk": 0.55, "run": 0.95}  # amplitude of a leg's swing, in radians
_CROSSING = ("walk", "run", "fly")
_REACH = 12.0  # distance from the middle at which characters turn round, seen from near
_HELD = 2  # frames
# Drawn speed over the speed to be measured (test_motion.py prints the table).
_GAINS: dict[str, tuple[float, float, float, float, float]] = {
    "walk": (0.47, 0.97, 1.26, 1.46, 1.61),
    "run": (0.89, 1.11, 1.29, 1.41, 1.55),
    "jump": (1.35, 1.14, 1.28, 1.35, 1.47),
    "fly": (0.72, 0.74, 0.74, 1.11, 1.52),
    "sit": (0.38, 0.53, 0.73, 0.96, 1.13),
    "wave": (0.46, 0.51, 0.77, 1.05, 1.34),
    "sleep": (0.60, 0.61, 0.94, 1.25, 1.31),
    "talk": (0.54, 0.72, 0.96, 1.13, 1.22),
    "stand": (0.5, 0.5, 0.5, 0.5, 0.5),
}


def pose(scene: Scene, *, num_frames: int) -> PosedScene:
    """Returns all shapes of a scene in every frame, as seen from its distance."""
    chance = Chance() if scene.seed is None else _draw_chance(scene.seed)
    zoom = ZOOMS[scene.details.distance]
    level = scene.level - 1
    speed = MOTION_VALUES[level] / 10 / zoom * chance.pace * _GAINS[scene.motion][level]
    drawings = (np.arange(num_frames) + 1) // _HELD
    x, facing = np.zeros(num_frames), np.ones(num_frames)
    if scene.motion in _CROSSING:
        reach = _REACH / zoom
        offset, direction = _cross(speed * drawings, start=0.8 * reach, reach=reach)
        x, facing = chance.facing * offset, chance.facing * direction
    end = chance.first * (-1.0) ** drawings
    rhythm = Rhythm(speed=speed, drawings=drawings, end=end, facing=facing, x=x)
    layers = [
        Layer(_zoomed(np.broadcast_to(points, (num_frames, *points.shape[1:])), zoom=zoom), colour)
        for points, colour in _MOTIONS[scene.motion](scene, rhythm)
    ]
    return PosedScene(zoom, layers)


def _zoomed(points: Float[np.ndarray, "f n 2"], *, zoom: float) -> Float[np.ndarray, "f n 2"]:
    return (points - (0, ANCHOR)) * zoom + (0, ANCHOR)


def _draw_chance(seed: int) -> Chance:
    rng = np.random.default_rng(seed)
    pace, facing = rng.uniform(0.97, 1.03), int(rng.choice((-1, 1)))
    return Chance(facing=facing, pace=pace, first=int(rng.choice((1, -1))))


def _cross(distance: Curve, *, start: float, reach: float) -> tuple[Curve, Curve]:
    """Returns positions between -`reach` and `reach`, and the direction: 1 out, -1 back."""
    legs = (distance + start) / (2 * reach)
    back = np.floor(legs) % 2
    share = legs % 1
    return reach * (2 * np.abs(back - share) - 1), 1 - 2 * back


# Transforms: 3 x 3 matrices, one for each frame.


def _shift(x: Value, y: Value) -> Transforms:
    x, y = np.broadcast_arrays(np.atleast_1d(x), np.atleast_1d(y))
    transforms = np.tile(np.eye(3), (len(x), 1, 1))
    transforms[:, 0, 2], transforms[:, 1, 2] = x, y
    return transforms


def _turn(angle: Value) -> Transforms:
    """Turns clockwise by a positive angle, as y points down; parts that hang swing back."""
    angle = np.atleast_1d(np.asarray(angle, float))
    transforms = np.tile(np.eye(3), (len(angle), 1, 1))
    transforms[:, 0, 0] = transforms[:, 1, 1] = np.cos(angle)
    transforms[:, 1, 0] = np.sin(angle)
    transforms[:, 0, 1] = -transforms[:, 1, 0]
    return transforms


def _scale(x: Value, y: Value) -> Transforms:
    x, y = np.broadcast_arrays(np.atleast_1d(x), np.atleast_1d(y))
    transforms = np.tile(np.eye(3), (len(x), 1, 1))
    transforms[:, 0, 0], transforms[:, 1, 1] = x, y
    return transforms


def _layers(transforms: Transforms, *shapes: Shape) -> list[Layer]:
    fills = (fill for shape in shapes for fill in fill_layers(shape))
    return [_layer(points, colour, transforms) for points, colour in fills]


def _layer(points: Points, colour: Colour, transforms: Transforms) -> Layer:
    return Layer(points @ transforms[:, :2, :2].swapaxes(1, 2) + transforms[:, None, :2, 2], colour)


class Body(NamedTuple):
    """Angles of a character's parts, each constant or one for each frame; forward is positive.

    `nod` shifts the head, `mouth` and `reach` stretch mouth and arms.
    """

    lean: Value = 0.0
    head: Value = 0.0
    nod: Value = 0.0
    near_arm: Value = 0.15
    far_arm: Value = -0.15
    near_leg: Value = 0.0
    far_leg: Value = 0.0
    tails: Value = 0.0
    mouth: Value = 0.6
    reach: Number = 1.0
    far_shoulder: Number = 2.9


def _accessory(scene: Scene, name: str, root: Transforms) -> list[Layer]:
    """Returns the thing that a character carries, next to its back."""
    details = scene.details
    carried = details.accessory if name == scene.character else details.partner_accessory
    return _layers(root, *characters.accessory_shapes(carried))


def _character(
    scene: Scene, name: str, root: Transforms, body: Body, *, parts: frozenset[str]
) -> list[Layer]:
    hip = root @ _turn(body.lean) @ _shift(0, -6.6)
    head = hip @ _shift(0.3, -8.6 + np.asarray(body.nod)) @ _turn(body.head)
    far_shoulder, stretch = hip @ _shift(body.far_shoulder, -7.4), _scale(1, body.reach)
    transforms = {
        "body": hip,
        "head": head,
        "awake": head,
        "asleep": head,
        "tails": head @ _shift(0, -12) @ _turn(body.tails) @ _shift(0, 12),
        "mouth": head @ _shift(1.4, -2.7) @ _scale(1.0, body.mouth),
        "near_arm": hip @ _shift(-2.9, -7.4) @ _turn(-np.asarray(body.near_arm)) @ stretch,
        "far_arm": far_shoulder @ _turn(-np.asarray(body.far_arm)) @ stretch,
        "near_leg": hip @ _shift(-1.9, 0) @ _turn(-np.asarray(body.near_leg)),
        "far_leg": hip @ _shift(1.9, 0) @ _turn(-np.asarray(body.far_leg)),
    }
    carried = _accessory(scene, name, root) if "body" in parts else []
    drawn = [
        _layer(points, colour, transforms[part])
        for part, points, colour in _flat_pieces(_looks(scene, name))
        if part in parts
    ]
    return [*drawn, *carried]


def _looks(scene: Scene, name: str) -> characters.Looks:
    own = scene.own_looks(name)
    return characters.own_looks(own) if own else characters.LOOKS[name]


@functools.lru_cache(maxsize=1024)
def _flat_pieces(looks: characters.Looks) -> list[tuple[characters.Part, Points, Colour]]:
    return [
        (part, points, colour)
        for part, shape in characters.pieces(looks)
        for points, colour in fill_layers(shape)
    ]


_HEAD = frozenset({"head", "tails", "mouth"})
_LIMBS = frozenset({"far_leg", "near_leg", "far_arm", "near_arm", "body"})
_AWAKE = _HEAD | _LIMBS | {"awake"}


def _stand(rhythm: Rhythm, *, x: Value = 0.0, y: Value = 0.0, scale: Number = 0.88) -> Transforms:
    where = _shift(rhythm.x + np.asarray(x), GROUND + np.asarray(y))
    return where @ _scale(rhythm.facing * scale, scale)


def _sway(rhythm: Rhythm) -> Curve:
    """Returns offsets to and fro, at the rhythm's speed."""
    return rhythm.speed / 2 * rhythm.end


def _lean(rhythm: Rhythm) -> Curve:
    """Returns the angle of a head that leans to where its owner has swayed."""
    return 0.16 * min(1.0, rhythm.speed) * rhythm.end


def _shadow(rhythm: Rhythm, *, x: Value = 0.0, width: Value = 1.0) -> list[Layer]:
    transforms = _shift(rhythm.x + np.asarray(x), GROUND) @ _scale(width, 1.0)
    return _layers(transforms, Shape(ellipse(0, 0.6, rx=8, ry=1.6), (70, 70, 90), 0))


def _walk(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    stride = _STRIDES["walk"] * min(1.0, 2 * rhythm.speed) * rhythm.end
    body = Body(lean=0.03, near_leg=stride, far_leg=-stride, near_arm=-stride, far_arm=stride,
                tails=0.049 * rhythm.end)  # fmt: skip
    root = _stand(rhythm, y=-0.5 * min(1.0, rhythm.speed))
    return [
        *_shadow(rhythm),
        *_character(scene, scene.character, root, body, parts=_AWAKE),
    ]


def _standing(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    sway = _sway(rhythm)
    root = _stand(rhythm, x=sway)
    body = Body(head=_lean(rhythm), near_arm=0.2, far_arm=-0.2)
    return [
        *_shadow(rhythm, x=sway),
        *_character(scene, scene.character, root, body, parts=_AWAKE),
    ]


def _run(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    stride = _STRIDES["run"] * min(1.0, 2 * rhythm.speed) * rhythm.end
    body = Body(lean=0.3, head=-0.18, near_leg=stride, far_leg=-stride,
                near_arm=-1.5 + 0.15 * stride, far_arm=-1.7 - 0.15 * stride,
                tails=0.35 + 0.065 * min(1.0, rhythm.speed) * rhythm.end,
                mouth=1.3)  # fmt: skip
    cloud, dust = Shape(ellipse(0, 0, rx=1.7, ry=1.4, count=12), (245, 240, 230), 0.3), []
    for index in range(3):
        age = (rhythm.speed / 9 * rhythm.drawings + index / 3) % 1
        where = _shift(rhythm.x - rhythm.facing * (6 + 9 * age), GROUND - 0.5 - 2.5 * age)
        dust += _layers(where @ _scale(0.5 + age, 0.5 + age), cloud)
    root = _stand(rhythm, x=-2 * rhythm.facing, y=-0.5)
    return [
        *_shadow(rhythm),
        *dust,
        *_character(scene, scene.character, root, body, parts=_AWAKE),
    ]


def _jump(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    hop = (1 + rhythm.end) / 2
    y = -3.0 - rhythm.speed * hop
    swing = 0.2 * min(1.0, rhythm.speed) * hop
    kick = 0.5 * min(1.0, rhythm.speed) * hop
    body = Body(near_arm=-1.9 - swing, far_arm=1.9 + swing, reach=1.3, near_leg=-0.5 - kick,
                far_leg=0.6 + kick, mouth=1.5)  # fmt: skip
    root = _stand(rhythm, y=y, scale=0.84)
    return [
        *_shadow(rhythm, width=0.7),
        *_character(scene, scene.character, root, body, parts=_AWAKE),
    ]


def _fly(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    bob = 0.8 * min(1.0, rhythm.speed) * rhythm.end
    root = _shift(rhythm.x, GROUND - 8.5 + bob) @ _scale(rhythm.facing * 0.84, 0.84)
    body = Body(lean=0.12, head=-0.1, near_arm=0.95, far_arm=0.95, near_leg=1.0, far_leg=0.75,
                tails=0.3 + 0.031 * min(1.0, rhythm.speed) * rhythm.end,
                mouth=1.2)  # fmt: skip
    broom = root @ _turn(-0.1) @ _shift(0, -6)
    stick = Shape(polygon((-12, 0.2), (19, -0.6), (19, 0.9), (-12, 1.8)), (170, 110, 60))
    brush = Shape(blob((-10.5, -1), (-13.5, -2.6), (-21.5, -3.4), (-20.4, 0.8), (-21.5, 5.2),
                       (-13.5, 4.2), (-10.5, 2.6)), (240, 195, 80))  # fmt: skip
    band = polygon((-12.4, -1.8), (-10.8, -1.4), (-10.8, 2.8), (-12.4, 3.2))
    ring = Shape(band, (200, 60, 60), 0.3)
    return [
        *_shadow(rhythm, width=0.6),
        *_character(scene, scene.character, root, body, parts=frozenset({"far_arm", "far_leg"})),
        *_layers(broom, brush, stick, ring),
        *_character(scene, scene.character, root, body, parts=_AWAKE - {"far_arm", "far_leg"}),
    ]


def _sit(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    sway = _sway(rhythm)
    legs = 0.176 * min(1.0, rhythm.speed) * rhythm.end
    body = Body(
        head=_lean(rhythm), near_leg=0.25 + legs, far_leg=0.45 - legs, near_arm=0.5, far_arm=0.5
    )
    bench = [
        Shape(polygon((-14, -8), (14, -8), (14, -5), (-14, -5)), (190, 130, 75)),
        Shape(polygon((-12, -5), (-9, -5), (-9, 1), (-12, 1)), (150, 95, 55)),
        Shape(polygon((9, -5), (12, -5), (12, 1), (9, 1)), (150, 95, 55)),
    ]
    seat = _shift(rhythm.x + sway, GROUND)
    root = _stand(rhythm, x=sway, y=-3.6)
    return [
        *_shadow(rhythm, x=sway, width=1.7),
        *_layers(seat, *bench),
        *_character(scene, scene.character, root, body, parts=_AWAKE),
    ]


def _wave(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    sway = _sway(rhythm)
    swing = 0.218 * min(1.0, rhythm.speed) * rhythm.end
    body = Body(head=_lean(rhythm), near_arm=0.2, far_arm=2.3 + swing, far_shoulder=3.8,
                reach=1.7, mouth=1.4)  # fmt: skip
    root = _stand(rhythm, x=sway)
    arm = frozenset({"far_arm"})
    return [
        *_shadow(rhythm, x=sway),
        *_character(scene, scene.character, root, body._replace(reach=1.0), parts=_AWAKE - arm),
        *_character(scene, scene.character, root, body, parts=arm),
    ]


def _sleep(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    looks = _looks(scene, scene.character)
    sway = _sway(rhythm)
    bed = _shift(sway, GROUND)
    futon = blob((-24, -2), (-22, -5), (22, -5), (25, -2), (23, 3), (-22, 3))
    pillow = blob((-24, -5), (-22, -9), (-8, -9), (-6, -5), (-9, -2), (-21, -2))
    head = bed @ _shift(-10, -1.0) @ _scale(0.8, 0.8) @ _turn(_lean(rhythm) - 0.55)
    breath = 1 + 0.04 * min(1.0, rhythm.speed) * rhythm.end
    cover = bed @ _scale(1, breath)
    quilt = blob((-8, -1), (-7.5, -7), (-2, -10), (8, -9), (18, -7.5), (22, -3), (22, 2), (-7, 2))
    hem = blob((-8.6, -1), (-8, -6.5), (-4, -9.6), (-2.4, -9), (-4.6, -5), (-5, 1.8), (-7.6, 1.8))
    zed = polygon((-1.5, -1.8), (1.5, -1.8), (1.5, -0.9), (-0.3, 1), (1.5, 1), (1.5, 1.9),
                  (-1.5, 1.9), (-1.5, 1), (0.3, -0.9), (-1.5, -0.9))  # fmt: skip
    zs = []
    for index, scale in enumerate((1.0, 1.35, 1.7)):
        where = _shift(3.0 + 6 * index + sway, 27 - 6.0 * index) @ _scale(scale, scale)
        zs += _layers(where, Shape(zed, (255, 255, 255), 0.5))
    body = Body(mouth=0.5)
    lying = head @ _shift(0, 15.2)
    post = bed @ _shift(39, 0) @ _scale(0.88, 0.88)
    return [
        *_accessory(scene, scene.character, post),
        *_layers(bed, Shape(futon, (250, 250, 245)), Shape(pillow, (255, 245, 250))),
        *_character(scene, scene.character, lying, body, parts=_HEAD | {"asleep"}),
        *_layers(cover, Shape(quilt, looks.cloth), Shape(hem, looks.trim, 0.3)),
        *zs,
    ]


def _talk(scene: Scene, rhythm: Rhythm) -> list[Layer]:
    partner = scene.partner
    assert partner is not None
    sway = _sway(rhythm)
    speaker = rhythm._replace(x=rhythm.x - 12)
    listener = rhythm._replace(x=rhythm.x + 16, facing=-rhythm.facing)
    talking = Body(
        head=_lean(rhythm),
        far_arm=1.3 + 0.405 * rhythm.end * min(1.0, rhythm.speed),
        near_arm=0.2,
        mouth=0.85 + 0.45 * rhythm.end,
    )
    bubble_at = _shift(speaker.x + 17 + sway, 7.5)
    outline = blob((-9, 0), (-7.5, -4.6), (0, -5.4), (7.5, -4.6), (9, 0), (7.5, 4.2), (0, 5),
                   (-4.0, 4.6), (-9.5, 7.5), (-7.6, 3.6))  # fmt: skip
    bubble = Shape(outline, (255, 255, 255), 0.6)
    dots = [Shape(ellipse(x, 0, rx=1.3, ry=1.3, count=12), INK, 0) for x in (-4.2, 0, 4.2)]
    listening = Body(near_arm=0.3, far_arm=-0.1)
    root = _stand(listener, x=0.8 * sway, scale=0.74)
    return [
        *_shadow(listener, x=0.8 * sway),
        *_character(scene, partner, root, listening, parts=_AWAKE),
        *_shadow(speaker, x=sway),
        *_character(scene, scene.character, _stand(speaker, x=sway), talking, parts=_AWAKE),
        *_layers(bubble_at, bubble, *dots),
    ]


_MOTIONS = {
    "walk": _walk,
    "run": _run,
    "jump": _jump,
    "fly": _fly,
    "sit": _sit,
    "wave": _wave,
    "sleep": _sleep,
    "talk": _talk,
    "stand": _standing,
}
