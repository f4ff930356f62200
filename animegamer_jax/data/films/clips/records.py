"""What the shots folder holds of films and clips: settings, rows and reports."""

import dataclasses
from typing import Literal

from animegamer_jax.errors import UserError

_SMALLEST = 16  # rows or columns of a clip

DropReason = Literal["black", "still", "duplicate", "credits", "flash"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmSettings:
    """Everything that decides which clips come out of a film.

    Attributes:
        height, width: of a clip; even numbers.
        num_frames: of a clip.
        fps: frames a second of a clip.
        fit: "crop" cuts what sticks out of the clip's shape, "pad" adds black.
        adaptive_threshold: a cut changes so many times as much as the frames around it.
        min_content: the least change of a cut: mean of hue, saturation and brightness, 0 to 255.
        window: frames before and after that a change is compared with.
        min_scene_seconds: of two cuts that are nearer, the first counts.
        hold_seconds: a drawing shown so long is one frame for the cut detector (on twos, threes).
        flash_seconds: what looks as before after at most so long was a flash and no cut.
        min_fade: the least change of a fade or cross-fade: mean of red, green and blue.
        guard_seconds: left out at both ends of a scene.
        black_below: clips of a mean brightness below this are dropped; 0 to 255.
        still_share: clips with a smaller share of moving pixels are dropped.
        duplicate_difference: clips that differ nowhere by so much from one that was kept are
            dropped; in standard deviations of the tiny pictures that are compared.
        credits_letters: clips with so many shapes like letters on a plain ground, still or rolling
            upwards, are dropped.

    Raises:
        UserError: a number out of range.
    """

    height: int = 480
    width: int = 720
    num_frames: int = 17
    fps: int = 8
    fit: Literal["crop", "pad"] = "crop"
    adaptive_threshold: float = 2.7
    min_content: float = 15.0
    window: int = 2
    min_scene_seconds: float = 0.5
    hold_seconds: float = 0.17
    flash_seconds: float = 0.25
    min_fade: float = 20.0
    guard_seconds: float = 0.125
    black_below: float = 16.0
    still_share: float = 0.001
    duplicate_difference: float = 0.4
    credits_letters: int = 24

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            if (size := getattr(self, name)) < _SMALLEST or size % 2:
                raise UserError(f"{name} {size}: expected an even number from {_SMALLEST}")
        for name, least in (("num_frames", 2), ("fps", 1), ("window", 1), ("credits_letters", 1)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"{name} {value}: expected {least} or more")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise UserError(f"{field.name} {value}: expected 0 or more")

    @property
    def clip_seconds(self) -> float:
        """From the first frame of a clip to the end of its last."""
        return self.num_frames / self.fps


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipRow:
    """One candidate clip.

    Attributes:
        clip: number in the film, from 0, over kept and dropped.
        scene: number of the scene (between two cuts), from 0.
        start, end: seconds in the film; the end is one frame's time after the last frame.
        dropped: why the clip was dropped; None: it was kept.
        motion_value: pixels a frame at 480 x 720, mean over the clip (see `motion`).
        flow: the same for each pair of neighbouring frames, for a curve.
        digest: SHA-256 of the MP4's bytes; empty where dropped.
    """

    clip: int
    scene: int
    start: float
    end: float
    dropped: DropReason | None
    motion_value: float
    flow: tuple[float, ...]
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmReport:
    """What was found in one film.

    Attributes:
        film: the id.
        name: of the file, without its folder.
        seconds: that could be read.
        missing: seconds that the file announces beyond those; 0 for a whole film.
        fps: frames a second, on the average.
        height, width: of the source as it is shown, after rotation.
        bars: black rows and columns that were removed: top, bottom, left, right.
        cuts: seconds at which a new scene starts; of a fade, its middle.
        scenes: number of scenes.
        short_scenes: those too short for a clip.
        kept: number of kept clips.
        dropped: number of dropped clips by reason.
        damaged: number of places that could not be read.
        skipped: number of frames that were left out: damaged, or out of order.
        content: 64 digits of the film's content; empty in reports of earlier versions.
        flow: the function that estimated the optical flow; empty as above.
    """

    film: str
    name: str
    seconds: float
    missing: float
    fps: float
    height: int
    width: int
    bars: tuple[int, int, int, int]
    cuts: tuple[float, ...]
    scenes: int
    short_scenes: int
    kept: int
    dropped: dict[str, int]
    damaged: int = 0
    skipped: int = 0
    content: str = ""
    flow: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetAside:
    """A film that could not be used: its id, the file's name, and the reason in one line."""

    film: str
    name: str
    reason: str
