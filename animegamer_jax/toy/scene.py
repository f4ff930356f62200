"""The toy world's characters, motions and places, and the scene: all that a clip shows."""

import dataclasses

CHARACTERS = ("Mika", "Ren", "Hana", "Kai", "Yuki", "Toma", "Suzu", "Nori")
MOTIONS = ("walk", "run", "jump", "fly", "sit", "wave", "sleep", "talk")
PLACES = ("meadow", "beach", "town", "forest", "bedroom", "snow")
TIMES = ("day", "night")
LEVELS = (1, 2, 3, 4, 5)

NUM_FRAMES = 17
MOTION_VALUES = (0.6, 3.0, 8.5, 17.0, 32.0)
"""Mean optical flow at each level, in pixels per frame at 480 x 720."""
MOTION_EDGES = (1.4, 5.0, 12.0, 22.0)
"""Motion values that separate the levels."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """Everything that a clip shows.

    Attributes:
        character: Name of the acting (and, in a talk, speaking) character, one of `CHARACTERS`.
        motion: Name of the motion, one of `MOTIONS`.
        place: Name of the place, one of `PLACES`.
        time: Time of day, one of `TIMES`.
        level: Motion level, 1 to 5.
        partner: Name of the character who listens in a talk; None for every other motion.
        seed: Seed of what no instruction mentions: the view of the place, where characters stand
            and look, their speed within the level. None: the one view that games show.

    Raises:
        ValueError: A name is not one of the toy world's, or a partner is given without a talk.
    """

    character: str
    motion: str
    place: str
    time: str
    level: int
    partner: str | None
    seed: int | None = None

    def __post_init__(self):
        for name, options in (
            ("character", CHARACTERS),
            ("motion", MOTIONS),
            ("place", PLACES),
            ("time", TIMES),
            ("level", LEVELS),
            ("partner", CHARACTERS if self.motion == "talk" else (None,)),
        ):
            if getattr(self, name) not in options:
                choices = ", ".join(map(str, options))
                found = getattr(self, name)
                raise ValueError(
                    f"{name} of a {self.motion} scene: expected {choices}, found {found}"
                )
