"""Records of the shots folder: settings, one row for each clip, one report for each film."""

import dataclasses
from typing import Literal

from animegamer_jax.errors import UserError, check_at_least

_SMALLEST = 16  # rows or columns of a clip

DropReason = Literal["black", "still", "duplicate", "credits", "flash"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilmSettings:
    """Everything that decides which clips come out of a film.

    Attributes:
        height: Rows of a clip in pixels, an even number.
        width: Columns of a clip in pixels, an even number.
        num_frames: Frames of a clip.
        fps: Frames per second of a clip.
        fit: How a frame gets the shape of a clip: `crop` cuts off what exceeds it, `pad` adds
            black.
        detector: Scene detector: `drawn`, the rules for drawn films that the next options
            set; `transnet`, the network TransNet V2 (extra `transnet`); `both`, either of them.
        adaptive_threshold: Least change at a hard cut, as a multiple of the changes around it.
        min_content: Least change at a hard cut, 0 to 255, as the mean of hue, saturation and
            brightness.
        window: Frames before and after a change that it is compared with.
        min_scene_seconds: Least seconds between two cuts; of nearer ones only the first counts.
        hold_seconds: Longest time in seconds for which a held drawing (animation on twos or threes)
            counts as one frame when cuts are searched.
        flash_seconds: Longest flash in seconds, after which the picture is as before; it is no cut.
        min_fade: Least change of a fade or cross-fade, 0 to 255, as the mean of red, green and
            blue.
        guard_seconds: Seconds skipped at both ends of a scene.
        black_below: Mean brightness, 0 to 255, below which a clip is dropped as black.
        still_share: Share of moving pixels, 0 to 1, below which a clip is dropped as still.
        duplicate_difference: Difference between the perceptual hashes of two clips, in standard
            deviations, below which the later one is dropped as a duplicate.
        credits_letters: Number of letter-like shapes on a plain background, standing still or
            rolling, from which a clip is dropped as credits.

    Raises:
        UserError: A number is out of range.
    """

    height: int = 480
    width: int = 720
    num_frames: int = 17
    fps: int = 8
    fit: Literal["crop", "pad"] = "crop"
    detector: Literal["drawn", "transnet", "both"] = "drawn"
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
            check_at_least(name, getattr(self, name), least)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise UserError(f"{field.name} {value}: expected 0 or more")

    @property
    def clip_seconds(self) -> float:
        """Seconds from the first frame of a clip to the end of its last."""
        return self.num_frames / self.fps


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipRow:
    """One candidate clip, kept or dropped.

    Attributes:
        clip: Its number in the film, from 0, counting kept and dropped clips.
        scene: Number of its scene (the part between two cuts), from 0.
        start: Seconds in the film at which it starts.
        end: Seconds in the film at which its last frame ends.
        dropped: Why it was dropped; None if it was kept.
        motion_value: Mean optical flow in pixels per frame at 480 x 720 (`media.motion`).
        flow: The same for each pair of neighbouring frames, to draw a curve.
        digest: SHA-256 of the MP4's bytes; empty if dropped.
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
        film: The film's id.
        name: Name of the file, without its folder.
        seconds: Seconds that could be read.
        missing: Seconds that the file announces beyond those; 0 for a whole film.
        fps: Mean frames per second.
        height: Rows as shown, after rotation.
        width: Columns as shown, after rotation.
        bars: Black rows and columns that were removed: top, bottom, left, right.
        other_bars: Number of scenes with other bars, which were removed instead.
        cuts: Seconds at which a new scene starts; for a fade, its middle.
        scenes: Number of scenes.
        short_scenes: Number of scenes too short for a clip.
        kept: Number of kept clips.
        dropped: Number of dropped clips by reason.
        damaged: Number of places that could not be read.
        skipped: Number of frames skipped because they were damaged or out of order.
        content: 64 hexadecimal digits that identify the film's content.
        flow: Name of the function that estimated the optical flow.
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
    other_bars: int = 0
    damaged: int = 0
    skipped: int = 0
    content: str = ""
    flow: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippedFilm:
    """A film that could not be used.

    Attributes:
        film: Its id, made from its path.
        name: Name of the file, without its folder.
        reason: Why, in one line.
    """

    film: str
    name: str
    reason: str
