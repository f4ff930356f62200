"""What can be read off a clip of the toy world: attributes, their values, those of a scene."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from animegamer_jax.toy.scene import (
    ACCESSORIES,
    CHARACTERS,
    CLOTHES,
    DISTANCES,
    HAIR_COLOURS,
    HAIR_STYLES,
    LEVELS,
    MOTIONS,
    NAMES,
    PLACES,
    SIDES,
    TIMES,
    VARIANTS,
    Details,
    OwnCharacter,
    Scene,
)

DETAILS = ("accessory", "variant", "side", "distance")
"""Attributes that no word gives away, and that last."""

VALUES: Mapping[str, tuple[str, ...]] = {
    "character": CHARACTERS,
    "place": PLACES,
    "time": TIMES,
    "accessory": ACCESSORIES,
    "variant": tuple(map(str, VARIANTS)),
    "side": SIDES,
    "distance": DISTANCES,
    "hair colour": HAIR_COLOURS,
    "hair": HAIR_STYLES,
    "clothes": CLOTHES,
}
"""The possible values of each attribute."""


def value_of(scene: Scene, attribute: str) -> str | None:
    """Returns a scene's value of an attribute; None: it has none, as named characters no looks.

    The character, its accessory and looks are those of the one who acts. A quilt hides what a
    sleeper wears, and styles of hair look alike on a pillow.
    """
    own, details = scene.own_looks(scene.character), scene.details
    if scene.motion == "sleep" and attribute in ("hair", "clothes"):
        return None
    match attribute:
        case "character":
            return None if own else scene.character
        case "place" | "time":
            return str(getattr(scene, attribute))
        case "accessory" | "variant" | "side" | "distance":
            return str(getattr(details, attribute))
        case "hair colour":
            return own.hair_colour if own else None
        case "hair":
            return own.hair if own else None
        case "clothes":
            return own.clothes if own else None
        case _:
            raise ValueError(f"unknown attribute {attribute!r}")


def labels(scenes: Sequence[Scene], attribute: str) -> Int[np.ndarray, " n"]:
    """Returns the index of each scene's value of an attribute; -1: it has none."""
    values = (value_of(scene, attribute) for scene in scenes)
    known = VALUES[attribute]
    return np.array([-1 if value is None else known.index(value) for value in values])


def draw_scenes(count: int, *, seed: int) -> tuple[Scene, ...]:
    """Draws scenes with all values of an attribute equally likely; half show an own character."""
    rng = np.random.default_rng([seed, 0x5EED])
    return tuple(_draw_scene(rng) for _ in range(count))


def _draw_scene(rng: np.random.Generator) -> Scene:
    def one(values: Sequence[str]) -> str:
        return str(rng.choice(values))

    own = None
    if rng.random() < 0.5:
        own = OwnCharacter(one(NAMES), one(HAIR_COLOURS), one(HAIR_STYLES), one(CLOTHES))
    character = own.name if own else one(CHARACTERS)
    motion = one(MOTIONS)
    others = [name for name in CHARACTERS if name != character]
    details = Details(
        accessory=one(ACCESSORIES),
        partner_accessory=one(ACCESSORIES),
        variant=int(rng.choice(VARIANTS)),
        side=one(SIDES),
        distance=one(DISTANCES),
    )
    return Scene(
        character=character,
        motion=motion,
        place=one(PLACES),
        time=one(TIMES),
        level=int(rng.choice(LEVELS)),
        partner=one(others) if motion == "talk" else None,
        details=details,
        own=own,
        seed=int(rng.integers(2**31)),
    )
