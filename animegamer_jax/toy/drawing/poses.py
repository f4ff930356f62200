"""How the people of the toy world move: every part's place in every frame of a scene.

The scene's level sets one number, the speed in units a frame (a unit is 1/48 of a frame's height,
10 pixels at 480 x 720). The camera stands still. Whoever walks, runs or flies crosses the frame at
that speed and turns round before its edge; whoever stays sways, hops or tosses at it. Every motion
starts at its beginning, so that the first frame and the level tell the rest.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from animegamer_jax.toy.drawing import characters
from animegamer_jax.toy.drawing.places import GROUND, PERIOD
from animegamer_jax.toy.drawing.shapes import (
    INK,
    Colour,
    Number,
    Points,
    Shape,
    blob,
    ellipse,
    outlined,
    polygon,
)
from animegamer_jax.toy.scene import MOTION_VALUES, Scene

Moves = Float[np.ndarray, "f 3 3"]
Curve = Float[np.ndarray, " f"]
Value = Curve | Number


class Layer(NamedTuple):
    """One flat shape in all frames: points in units, x from the frame's middle."""

    points: Float[np.ndarray, "f n 2"]
    colour: Colour


class Shot(NamedTuple):
    """A scene: where in its strip the near scenery is, and everything that moves before it."""

    start: float
    layers: list[Layer]


class Stage(NamedTuple):
    """What no instruction tells of a scene.

    Attributes:
        start: where in the place's near strip the frame begins, in units.
        x: where the character is, units from the middle.
        facing: 1 to the right, -1 to the left.
        pace: the speed as a share of the level's.
    """

    start: float = 20.0
    x: float = 0.0
    facing: int = 1
    pace: float = 1.0


class Beat(NamedTuple):
    """What a seed and a level choose for one clip.

    Attributes:
        speed: units a frame, on the average.
        cycles: of the sway, hop or stride, so far; `rate` more with each frame.
        facing: 1 to the right, -1 to the left.
        x: where the character is, units from the middle.
    """

    speed: float
    cycles: Curve
    rate: float
    facing: Curve
    x: Curve


_SCALE = 0.88
_LEG = 5.0
_STRIDES = {"walk": 0.55, "run": 0.95}  # how far a leg swings, in radians
_CROSSING = ("walk", "run", "fly")
_REACH = 15.0  # how far from the middle who crosses the frame turns round
_HOPS = (0.06, 0.09, 0.13, 0.18, 0.25)
_RATES = (0.06, 0.09, 0.125, 0.16, 0.19)  # cycles a frame of a sway at each level
# What the measured speed is short of or beyond the drawn one (test_motion.py prints the table).
_GAINS: dict[str, tuple[float, float, float, float, float]] = {
    "walk": (1.45, 1.28, 1.24, 1.27, 1.40),
    "run": (1.50, 1.36, 1.29, 1.25, 1.30),
    "jump": (1.38, 1.36, 1.39, 1.38, 1.42),
    "fly": (1.45, 1.28, 1.26, 1.30, 1.27),
    "sit": (1.20, 1.25, 1.28, 1.28, 1.40),
    "wave": (1.14, 1.30, 1.18, 1.33, 1.40),
    "sleep": (0.84, 1.17, 1.16, 1.38, 1.55),
    "talk": (1.36, 1.38, 1.24, 1.30, 1.44),
}


def pose(scene: Scene, *, num_frames: int) -> Shot:
    """All motion of a scene."""
    stage = Stage() if scene.seed is None else _drawn_stage(scene.seed)
    level = scene.level - 1
    speed = MOTION_VALUES[level] / 10 * stage.pace * _GAINS[scene.motion][level]
    frames = np.arange(num_frames)
    rate = (_HOPS if scene.motion == "jump" else _RATES)[level]
    if scene.motion in _STRIDES:  # feet keep pace with the ground, as far as 8 frames a second show
        rate = min(0.22, speed / (4 * _LEG * _STRIDES[scene.motion]))
    way = np.full(num_frames, stage.x)
    facing = np.full(num_frames, float(stage.facing))
    if scene.motion in _CROSSING:
        gone, turned = _crossing(speed * frames, offset=2 + stage.x / 3.5)
        way, facing = stage.facing * gone, stage.facing * turned
    beat = Beat(speed=speed, cycles=frames * rate, rate=rate, facing=facing, x=way)
    return Shot(stage.start, _MOTIONS[scene.motion](scene, beat))


def _drawn_stage(seed: int) -> Stage:
    rng = np.random.default_rng(seed)
    pace, facing = rng.uniform(0.92, 1.08), int(rng.choice((-1, 1)))
    x, start = rng.uniform(-7, 7), rng.uniform(0, PERIOD)
    return Stage(start=start, x=x, facing=facing, pace=pace)


def _crossing(gone: Curve, *, offset: float) -> tuple[Curve, Curve]:
    """Places between -`_REACH` and `_REACH` after so many units, and 1 on the way out, -1 back."""
    legs = (gone + offset) / (2 * _REACH)
    back = np.floor(legs) % 2
    share = legs % 1
    return _REACH * (2 * np.abs(back - share) - 1), 1 - 2 * back


# Moves: 3 x 3 matrices, one a frame.


def _to(x: Value, y: Value) -> Moves:
    x, y = np.broadcast_arrays(np.atleast_1d(x), np.atleast_1d(y))
    moves = np.tile(np.eye(3), (len(x), 1, 1))
    moves[:, 0, 2], moves[:, 1, 2] = x, y
    return moves


def _turn(angle: Value) -> Moves:
    """Clockwise for a positive angle, as y points down; what hangs swings back."""
    angle = np.atleast_1d(np.asarray(angle, float))
    moves = np.tile(np.eye(3), (len(angle), 1, 1))
    moves[:, 0, 0] = moves[:, 1, 1] = np.cos(angle)
    moves[:, 1, 0] = np.sin(angle)
    moves[:, 0, 1] = -moves[:, 1, 0]
    return moves


def _size(x: Value, y: Value) -> Moves:
    x, y = np.broadcast_arrays(np.atleast_1d(x), np.atleast_1d(y))
    moves = np.tile(np.eye(3), (len(x), 1, 1))
    moves[:, 0, 0], moves[:, 1, 1] = x, y
    return moves


def _layers(shape: Shape, moves: Moves, num_frames: int) -> list[Layer]:
    return [_layer(points, colour, moves, num_frames) for points, colour in outlined(shape)]


def _layer(points: Points, colour: Colour, moves: Moves, num_frames: int) -> Layer:
    moves = np.broadcast_to(moves, (num_frames, 3, 3))
    return Layer(points @ moves[:, :2, :2].swapaxes(1, 2) + moves[:, None, :2, 2], colour)


class Body(NamedTuple):
    """Angles of one person's parts, each a number or one a frame; forward is positive.

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


def _person(
    name: str, root: Moves, body: Body, *, parts: frozenset[str], num_frames: int
) -> list[Layer]:
    hip = root @ _turn(body.lean) @ _to(0, -6.6)
    head = hip @ _to(0.3, -8.6 + np.asarray(body.nod)) @ _turn(body.head)
    stretch = _size(1, body.reach)
    moves = {
        "body": hip,
        "head": head,
        "awake": head,
        "asleep": head,
        "tails": head @ _to(0, -12) @ _turn(body.tails) @ _to(0, 12),
        "mouth": head @ _to(1.4, -2.7) @ _size(1.0, body.mouth),
        "near_arm": hip @ _to(-2.9, -7.4) @ _turn(-np.asarray(body.near_arm)) @ stretch,
        "far_arm": hip @ _to(body.far_shoulder, -7.4) @ _turn(-np.asarray(body.far_arm)) @ stretch,
        "near_leg": hip @ _to(-1.9, 0) @ _turn(-np.asarray(body.near_leg)),
        "far_leg": hip @ _to(1.9, 0) @ _turn(-np.asarray(body.far_leg)),
    }
    return [
        _layer(points, colour, moves[part], num_frames)
        for part, points, colour in _flat_pieces(name)
        if part in parts
    ]


@functools.cache
def _flat_pieces(name: str) -> list[tuple[characters.Part, Points, Colour]]:
    return [
        (part, points, colour)
        for part, shape in characters.pieces(characters.LOOKS[name])
        for points, colour in outlined(shape)
    ]


_HEAD = frozenset({"head", "tails", "mouth"})
_LIMBS = frozenset({"far_leg", "near_leg", "far_arm", "near_arm", "body"})
_AWAKE = _HEAD | _LIMBS | {"awake"}


def _stand(beat: Beat, *, x: Value = 0.0, y: Value = 0.0, scale: Number = _SCALE) -> Moves:
    return _to(beat.x + np.asarray(x), GROUND + np.asarray(y)) @ _size(beat.facing * scale, scale)


def _sine(beat: Beat, *, lag: float = 0.0) -> Curve:
    return np.sin(2 * np.pi * (beat.cycles - lag))


def _sway(beat: Beat) -> Curve:
    """To and fro at the beat's speed, with rounded turns: a triangle wave more than a sine."""
    bent = 0.96
    return beat.speed / (4 * beat.rate) * np.arcsin(bent * _sine(beat)) / np.arcsin(bent)


def _shadow(beat: Beat, *, x: Value = 0.0, width: Value = 1.0) -> list[Layer]:
    moves = _to(beat.x + np.asarray(x), GROUND) @ _size(width, 1.0)
    return _layers(Shape(ellipse(0, 0.6, rx=8, ry=1.6), (70, 70, 90), 0), moves, len(beat.cycles))


def _walk(scene: Scene, beat: Beat) -> list[Layer]:
    stride = _STRIDES["walk"] * _sine(beat)
    bob = -0.5 * np.abs(_sine(beat)) * min(1.0, beat.speed)
    body = Body(lean=0.03, near_leg=stride, far_leg=-stride, near_arm=-stride, far_arm=stride,
                tails=0.06 * _sine(beat, lag=0.1))  # fmt: skip
    n = len(beat.cycles)
    return [
        *_shadow(beat),
        *_person(scene.character, _stand(beat, y=bob), body, parts=_AWAKE, num_frames=n),
    ]


def _run(scene: Scene, beat: Beat) -> list[Layer]:
    stride = _STRIDES["run"] * _sine(beat)
    bob = -1.6 * np.abs(_sine(beat, lag=0.25)) * min(1.0, beat.speed)
    body = Body(lean=0.3, head=-0.18, near_leg=stride, far_leg=-stride,
                near_arm=-1.5 + 0.15 * stride, far_arm=-1.7 - 0.15 * stride,
                tails=0.35 + 0.08 * min(1.0, beat.speed) * _sine(beat, lag=0.1),
                mouth=1.3)  # fmt: skip
    n = len(beat.cycles)
    dust = []
    for index in range(3):
        age = (beat.speed / 9 * np.arange(n) + index / 3) % 1
        moves = _to(beat.x - beat.facing * (6 + 9 * age), GROUND - 0.5 - 2.5 * age) @ _size(
            0.5 + age, 0.5 + age
        )
        dust += _layers(
            Shape(ellipse(0, 0, rx=1.7, ry=1.4, count=12), (245, 240, 230), 0.3), moves, n
        )
    root = _stand(beat, x=-2 * beat.facing, y=bob - 0.5)
    return [
        *_shadow(beat),
        *dust,
        *_person(scene.character, root, body, parts=_AWAKE, num_frames=n),
    ]


def _jump(scene: Scene, beat: Beat) -> list[Layer]:
    bent = 0.98
    hop = np.arcsin(bent * np.abs(np.sin(np.pi * beat.cycles))) / np.arcsin(bent)
    y = -3.0 - beat.speed / (2 * beat.rate) * hop
    swing = 0.2 * min(1.0, beat.speed) * hop
    body = Body(near_arm=-1.9 - swing, far_arm=1.9 + swing, reach=1.3, near_leg=-0.5, far_leg=0.6,
                mouth=1.5)  # fmt: skip
    n = len(beat.cycles)
    root = _stand(beat, y=y, scale=0.84)
    return [
        *_shadow(beat, width=0.7),
        *_person(scene.character, root, body, parts=_AWAKE, num_frames=n),
    ]


def _fly(scene: Scene, beat: Beat) -> list[Layer]:
    n = len(beat.cycles)
    bob = 0.8 * min(1.0, beat.speed) * _sine(beat)
    root = _to(beat.x, GROUND - 8.5 + bob) @ _size(beat.facing * 0.84, 0.84)
    body = Body(lean=0.12, head=-0.1, near_arm=0.95, far_arm=0.95, near_leg=1.0, far_leg=0.75,
                tails=0.3 + 0.1 * min(1.0, beat.speed) * _sine(beat, lag=0.2),
                mouth=1.2)  # fmt: skip
    broom = root @ _turn(-0.1) @ _to(0, -6)
    stick = Shape(polygon((-12, 0.2), (19, -0.6), (19, 0.9), (-12, 1.8)), (170, 110, 60))
    brush = Shape(blob((-10.5, -1), (-13.5, -2.6), (-21.5, -3.4), (-20.4, 0.8), (-21.5, 5.2),
                       (-13.5, 4.2),
                       (-10.5, 2.6)), (240, 195, 80))  # fmt: skip
    ring = Shape(
        polygon((-12.4, -1.8), (-10.8, -1.4), (-10.8, 2.8), (-12.4, 3.2)), (200, 60, 60), 0.3
    )
    return [
        *_shadow(beat, width=0.6),
        *_person(
            scene.character, root, body, parts=frozenset({"far_arm", "far_leg"}), num_frames=n
        ),
        *(layer for shape in (brush, stick, ring) for layer in _layers(shape, broom, n)),
        *_person(scene.character, root, body, parts=_AWAKE - {"far_arm", "far_leg"}, num_frames=n),
    ]


def _sit(scene: Scene, beat: Beat) -> list[Layer]:
    n = len(beat.cycles)
    sway = _sway(beat)
    legs = 0.3 * min(1.0, 0.2 + beat.speed) * _sine(beat, lag=0.15)
    body = Body(lean=0.0, near_leg=0.25 + legs, far_leg=0.45 - legs, near_arm=0.5, far_arm=0.5)
    bench = [
        Shape(polygon((-14, -8), (14, -8), (14, -5), (-14, -5)), (190, 130, 75)),
        Shape(polygon((-12, -5), (-9, -5), (-9, 1), (-12, 1)), (150, 95, 55)),
        Shape(polygon((9, -5), (12, -5), (12, 1), (9, 1)), (150, 95, 55)),
    ]
    seat = _to(beat.x + sway, GROUND)
    root = _stand(beat, x=sway, y=-3.6)
    return [
        *_shadow(beat, x=sway, width=1.7),
        *(layer for shape in bench for layer in _layers(shape, seat, n)),
        *_person(scene.character, root, body, parts=_AWAKE, num_frames=n),
    ]


def _wave(scene: Scene, beat: Beat) -> list[Layer]:
    n = len(beat.cycles)
    sway = _sway(beat)
    swing = 0.27 * min(1.0, 0.1 + beat.speed) * _sine(beat, lag=0.1)
    body = Body(near_arm=0.2, far_arm=2.3 + swing, far_shoulder=3.8, reach=1.7, mouth=1.4)
    root = _stand(beat, x=sway)
    arm = frozenset({"far_arm"})
    return [
        *_shadow(beat, x=sway),
        *_person(scene.character, root, body._replace(reach=1.0), parts=_AWAKE - arm, num_frames=n),
        *_person(scene.character, root, body, parts=arm, num_frames=n),
    ]


def _sleep(scene: Scene, beat: Beat) -> list[Layer]:
    n = len(beat.cycles)
    looks = characters.LOOKS[scene.character]
    sway = _sway(beat)
    bed = _to(0.4 * beat.x + sway, GROUND) @ _size(beat.facing, 1)
    futon = Shape(
        blob((-24, -2), (-22, -5), (22, -5), (25, -2), (23, 3), (-22, 3)), (250, 250, 245)
    )
    pillow = Shape(
        blob((-24, -5), (-22, -9), (-8, -9), (-6, -5), (-9, -2), (-21, -2)), (255, 245, 250)
    )
    head = bed @ _to(-10, -1.0) @ _size(0.8, 0.8) @ _turn(-0.55)
    breath = 1 + 0.012 * scene.level * _sine(beat)
    cover = bed @ _size(1, breath)
    quilt = Shape(
        blob((-8, -1), (-7.5, -7), (-2, -10), (8, -9), (18, -7.5), (22, -3), (22, 2), (-7, 2)),
        looks.cloth,
    )
    hem = Shape(
        blob((-8.6, -1), (-8, -6.5), (-4, -9.6), (-2.4, -9), (-4.6, -5), (-5, 1.8), (-7.6, 1.8)),
        looks.trim,
        0.3,
    )
    zed = polygon(
        (-1.5, -1.8),
        (1.5, -1.8),
        (1.5, -0.9),
        (-0.3, 1),
        (1.5, 1),
        (1.5, 1.9),
        (-1.5, 1.9),
        (-1.5, 1),
        (0.3, -0.9),
        (-1.5, -0.9),
    )
    letters = []
    for index, scale in enumerate((1.0, 1.35, 1.7)):
        letters += _layers(
            Shape(zed, (255, 255, 255), 0.5),
            _to(beat.x * 0.4 + beat.facing * (3.0 + 6 * index) + sway, 27 - 6.0 * index)
            @ _size(scale, scale),
            n,
        )
    body = Body(mouth=0.5)
    lying = head @ _to(0, 15.2)
    return [
        *(layer for shape in (futon, pillow) for layer in _layers(shape, bed, n)),
        *_person(scene.character, lying, body, parts=_HEAD | {"asleep"}, num_frames=n),
        *(layer for shape in (quilt, hem) for layer in _layers(shape, cover, n)),
        *letters,
    ]


def _talk(scene: Scene, beat: Beat) -> list[Layer]:
    n = len(beat.cycles)
    partner = scene.partner
    assert partner is not None
    sway = _sway(beat)
    middle = beat.x * 0.3
    speaker = beat._replace(x=middle - beat.facing * 14)
    listener = beat._replace(x=middle + beat.facing * 17, facing=-beat.facing)
    talking = Body(
        far_arm=1.3 + 0.5 * _sine(beat, lag=0.1) * min(1.0, beat.speed),
        near_arm=0.2,
        mouth=0.4 + 0.9 * np.abs(np.sin(2.3 * np.arange(n))),
    )
    bubble_at = _to(speaker.x + beat.facing * 17 + sway, 7.5)
    bubble = Shape(
        blob(
            (-9, 0),
            (-7.5, -4.6),
            (0, -5.4),
            (7.5, -4.6),
            (9, 0),
            (7.5, 4.2),
            (0, 5),
            (-4.0, 4.6),
            (-9.5, 7.5),
            (-7.6, 3.6),
        ),
        (255, 255, 255),
        0.6,
    )
    dots = [Shape(ellipse(x, 0, rx=1.3, ry=1.3, count=12), INK, 0) for x in (-4.2, 0, 4.2)]
    bubble_at = bubble_at @ _size(beat.facing, 1)
    return [
        *_shadow(listener, x=0.8 * sway),
        *_person(
            partner,
            _stand(listener, x=0.8 * sway, scale=0.74),
            Body(near_arm=0.3, far_arm=-0.1),
            parts=_AWAKE,
            num_frames=n,
        ),
        *_shadow(speaker, x=sway),
        *_person(scene.character, _stand(speaker, x=sway), talking, parts=_AWAKE, num_frames=n),
        *(layer for shape in (bubble, *dots) for layer in _layers(shape, bubble_at, n)),
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
}
