"""The toy world's characters, motions and places, and the scene: all that a clip shows."""

import dataclasses
import itertools

CHARACTERS = ("Mika", "Ren", "Hana", "Kai", "Yuki", "Toma", "Suzu", "Nori")
NAMES = (
    "Aru", "Bex", "Cio", "Dov", "Emi", "Fen", "Gil", "Hux", "Ivo", "Jun", "Kez", "Lio",
    "Mav", "Nel", "Oki", "Pim", "Quo", "Rua", "Sol", "Tev", "Uma", "Vio", "Wex", "Zan",
)  # fmt: skip
"""Names of players' own characters, which say nothing about how one looks."""
MOTIONS = ("walk", "run", "jump", "fly", "sit", "wave", "sleep", "talk")
STANDING = "stand"
"""The motion of a picture's turn, which no other turn has."""
PLACES = ("meadow", "beach", "town", "forest", "bedroom", "snow")
TIMES = ("day", "night")
LEVELS = (1, 2, 3, 4, 5)

ACCESSORIES = tuple(
    f"{colour} {kind}"
    for kind, colour in itertools.product(
        ("balloon", "parasol", "kite", "flag"), ("red", "yellow", "green", "blue")
    )
)
VARIANTS = (0, 1, 2)
SIDES = ("left", "right")
DISTANCES = ("near", "far")

HAIR_COLOURS = ("pink", "black", "brown", "golden", "white", "green")
HAIR_STYLES = ("spiky", "twin", "bob", "long", "buns")
CLOTHES = tuple(
    f"{colour} {kind}"
    for kind, colour in itertools.product(
        ("dress", "suit"), ("red", "yellow", "green", "blue", "purple", "grey")
    )
)

NUM_FRAMES = 17
MOTION_VALUES = (0.6, 3.0, 8.5, 17.0, 32.0)
"""Mean optical flow at each level, in pixels from drawing to drawing at 480 x 720."""
MOTION_EDGES = (1.4, 5.0, 12.0, 22.0)
"""Motion values that separate the levels."""


def _check_one_of(name: str, found: object, options: tuple[object, ...]) -> None:
    if found not in options:
        raise ValueError(f"{name}: expected {', '.join(map(str, options))}, found {found}")


@dataclasses.dataclass(frozen=True)
class OwnCharacter:
    """A player's own character, known by a picture only.

    Attributes:
        name: Name, one of `NAMES`.
        hair_colour: Colour of the hair, one of `HAIR_COLOURS`.
        hair: Style of the hair, one of `HAIR_STYLES`.
        clothes: Colour and kind of the clothes, one of `CLOTHES`.
    """

    name: str
    hair_colour: str
    hair: str
    clothes: str

    def __post_init__(self):
        for field, options in (
            ("name", NAMES),
            ("hair_colour", HAIR_COLOURS),
            ("hair", HAIR_STYLES),
            ("clothes", CLOTHES),
        ):
            _check_one_of(field, getattr(self, field), options)

    @property
    def is_held_out(self) -> bool:
        """Whether no training game shows this combination: one in three."""
        return sum(self._numbers) % 3 == 0

    @property
    def _numbers(self) -> tuple[int, int, int]:
        colour, style = HAIR_COLOURS.index(self.hair_colour), HAIR_STYLES.index(self.hair)
        return colour, style, CLOTHES.index(self.clothes)


@dataclasses.dataclass(frozen=True)
class Details:
    """What no instruction says, and lasts.

    Attributes:
        accessory: Thing that the character carries, one of `ACCESSORIES`.
        partner_accessory: The same of the listener in a talk.
        variant: Variant of the place, such as its season, one of `VARIANTS`.
        side: Side from which the place is seen, one of `SIDES`.
        distance: Distance from which it is seen, one of `DISTANCES`.
    """

    accessory: str = ACCESSORIES[0]
    partner_accessory: str = ACCESSORIES[0]
    variant: int = 0
    side: str = SIDES[0]
    distance: str = DISTANCES[0]

    def __post_init__(self):
        for field, options in (
            ("accessory", ACCESSORIES),
            ("partner_accessory", ACCESSORIES),
            ("variant", VARIANTS),
            ("side", SIDES),
            ("distance", DISTANCES),
        ):
            _check_one_of(field, getattr(self, field), options)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Everything that a clip shows.

    Attributes:
        character: Name of the acting (and, in a talk, speaking) character, one of `CHARACTERS` or
            that of `own`.
        motion: Name of the motion, one of `MOTIONS` or `STANDING`.
        place: Name of the place, one of `PLACES`.
        time: Time of day, one of `TIMES`.
        level: Motion level, 1 to 5.
        partner: Name of the character who listens in a talk; None for every other motion.
        details: What no instruction says, and lasts.
        own: The player's own character, if the scene shows one.
        seed: Seed of what is left to chance in each clip: the phase of a motion, its direction,
            its speed within the level. None: a fixed one.

    Raises:
        ValueError: A name is not one of the toy world's, or a partner is given without a talk.
    """

    character: str
    motion: str
    place: str
    time: str
    level: int
    partner: str | None
    details: Details = Details()
    own: OwnCharacter | None = None
    seed: int | None = None

    def __post_init__(self):
        names = (*CHARACTERS, *((self.own.name,) if self.own else ()))
        for name, options in (
            ("character", names),
            ("motion", (*MOTIONS, STANDING)),
            ("place", PLACES),
            ("time", TIMES),
            ("level", LEVELS),
            ("partner", names if self.motion == "talk" else (None,)),
        ):
            _check_one_of(f"{name} of a {self.motion} scene", getattr(self, name), options)

    def own_looks(self, name: str) -> OwnCharacter | None:
        """Returns the player's own character if that is its name."""
        return self.own if self.own and self.own.name == name else None
