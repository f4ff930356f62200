"""What the toy world is made of, and the scene: everything that one of its clips shows."""

import dataclasses

CHARACTERS = ("Mika", "Ren", "Hana", "Kai", "Yuki", "Toma", "Suzu", "Nori")
MOTIONS = ("walk", "run", "jump", "fly", "sit", "wave", "sleep", "talk")
PLACES = ("meadow", "beach", "town", "forest", "bedroom", "snow")
TIMES = ("day", "night")
LEVELS = (1, 2, 3, 4, 5)

NUM_FRAMES = 17
MOTION_VALUES = (0.6, 3.0, 8.5, 17.0, 32.0)
"""Mean optical flow of each level, in pixels a frame at 480 x 720."""
MOTION_EDGES = (1.4, 5.0, 12.0, 22.0)
"""Values between the levels."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """Everything that a clip shows.

    Attributes:
        character: one of `CHARACTERS`, who acts (and speaks, in a talk).
        motion: one of `MOTIONS`.
        place: one of `PLACES`.
        time: one of `TIMES`.
        level: the motion level, 1 to 5.
        partner: who is talked to; None for every other motion.
        seed: the variety that no instruction tells: the view of the place, where people stand and
            look, how fast they are within their level. None: the one view that games show.

    Raises:
        ValueError: a name that the toy world does not have, or a partner without a talk.
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
