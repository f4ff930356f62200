"""Films of the toy world: shots joined by transitions, with their true annotations.

Shot detection, motion measurement and annotation are tested on them: a film plays like any other,
and its content is known frame by frame.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np
from jaxtyping import UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.media.video import ENCODER, FRAMES_PER_SECOND, write_bt709
from animegamer_jax.storage.files import write_whole
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.drawing.style import PLAIN, Cut, FilmStyle, Frames, Pan, Transition
from animegamer_jax.toy.scene import (
    ACCESSORIES,
    CHARACTERS,
    DISTANCES,
    LEVELS,
    MOTION_VALUES,
    MOTIONS,
    PLACES,
    SIDES,
    TIMES,
    VARIANTS,
    Details,
    Scene,
)

_SHORTEST, _LONGEST = 2, 6  # seconds of a shot
_NUM_CHARACTERS = 3
_PAN_SPEEDS = (15.0, 60.0)  # fast camera moves, in pixels per drawing at 480 x 720


@dataclasses.dataclass(frozen=True)
class FilmShot:
    """One shot and its frames in the film.

    Attributes:
        start, end: Index of the first frame, and of the one after the last; frames of a transition
            belong to the shot that it leads to.
        scene: Content of the shot.
        transition: Transition from the shot before; None for the first shot.
        pan: Move of the camera, if any.
        flash: Index of the first white frame, if any.
    """

    start: int
    end: int
    scene: Scene
    transition: Transition | None
    pan: Pan | None = None
    flash: int | None = None


@dataclasses.dataclass(frozen=True)
class Film:
    """A film, drawn while it is read.

    Attributes:
        seed: Seed of the film.
        height, width: Pixels of a frame.
        shots: The shots, in order.
        style: Frame rate, held drawings, pans, flashes and bars.
    """

    seed: int
    height: int
    width: int
    shots: tuple[FilmShot, ...]
    style: FilmStyle = PLAIN

    def frames(self) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        """Yields all frames in order, with one shot's drawings in memory at a time."""
        tail: Frames | None = None
        for shot, following in zip(self.shots, (*self.shots[1:], None), strict=True):
            length, held = shot.end - shot.start, _overlap(following)
            shown = np.arange(length + held) // self.style.hold
            drawings = self._draw(shot, int(shown[-1]) + 1)
            joined = drawings[:0]
            if tail is not None and shot.transition is not None and len(tail):
                joined = shot.transition.join(tail, drawings[shown[: len(tail)]])
            for number in range(length):
                lead = number < len(joined)
                frame = joined[number] if lead else drawings[shown[number]]
                yield self._finished(frame, shot, shot.start + number)
            tail = drawings[shown[length:]]

    def _draw(self, shot: FilmShot, num_drawings: int) -> Frames:
        if shot.pan is None:
            return render(shot.scene, height=self.height, width=self.width, num_frames=num_drawings)
        offsets = np.rint(shot.pan.offsets(num_drawings) * self.height / 480).astype(int)
        wide = render(
            shot.scene,
            height=self.height,
            width=self.width + int(offsets.max()),
            num_frames=num_drawings,
        )
        return np.stack(
            [frame[:, x : x + self.width] for frame, x in zip(wide, offsets, strict=True)]
        )

    def _finished(
        self, frame: UInt8[np.ndarray, "h w 3"], shot: FilmShot, number: int
    ) -> UInt8[np.ndarray, "h w 3"]:
        style = self.style
        if shot.flash is not None and 0 <= number - shot.flash < style.flash_frames:
            frame = np.full_like(frame, 255)
        if any(style.bars):
            top, bottom, left, right = style.bars
            frame = np.pad(
                frame[top : self.height - bottom, left : self.width - right],
                ((top, bottom), (left, right), (0, 0)),
            )
        return frame

    def truth(self) -> dict[str, object]:
        """Returns the true annotations, as a JSON object.

        Motion values are in pixels per frame at 8 frames per second and 480 x 720; they are None
        for shots in which the camera moves, or that play faster than they were drawn for.
        """
        return {
            "seed": self.seed,
            "height": self.height,
            "width": self.width,
            "frames_per_second": self.style.fps,
            "hold": self.style.hold,
            "bars": list(self.style.bars),
            "shots": [self._shot_truth(shot) for shot in self.shots],
        }

    def _shot_truth(self, shot: FilmShot) -> dict[str, object]:
        known = shot.pan is None and self.style.speed == 1
        flash = None if shot.flash is None else [shot.flash, shot.flash + self.style.flash_frames]
        return {
            "start": shot.start,
            "end": shot.end,
            "transition": shot.transition.name if shot.transition else None,
            "transition_frames": _overlap(shot),
            "motion_value": MOTION_VALUES[shot.scene.level - 1] if known else None,
            "pan": dataclasses.asdict(shot.pan) if shot.pan else None,
            "flash": flash,
            **dataclasses.asdict(shot.scene),
        }


def _overlap(shot: FilmShot | None) -> int:
    return shot.transition.overlap if shot and shot.transition else 0


def make_film(
    seed: int,
    *,
    num_shots: int = 12,
    height: int = 480,
    width: int = 720,
    transitions: Sequence[Transition] = (Cut(),),
    style: FilmStyle = PLAIN,
) -> Film:
    """Returns a film with three characters; neighbouring shots are in different places.

    Args:
        seed: Seed of everything that is drawn.
        num_shots: Number of shots, of 2 to 6 seconds each.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        transitions: Transitions to choose from for each pair of shots.
        style: Frame rate, held drawings, pans, flashes and bars; scenes do not depend on it.

    Raises:
        UserError: The number of shots is below 1.
    """
    if num_shots < 1:
        raise UserError(f"a film of {num_shots} shots: expected 1 or more")
    rng = np.random.default_rng((7919, seed))
    names = [str(name) for name in rng.choice(CHARACTERS, _NUM_CHARACTERS, replace=False)]
    shots: list[FilmShot] = []
    for _ in range(num_shots):
        start = shots[-1].end if shots else 0
        length = int(rng.integers(_SHORTEST * FRAMES_PER_SECOND, _LONGEST * FRAMES_PER_SECOND + 1))
        last_place = shots[-1].scene.place if shots else None
        scene = _draw_scene(rng, names=names, places=[p for p in PLACES if p != last_place])
        transition = transitions[int(rng.integers(len(transitions)))] if shots else None
        end = start + length * style.fps // FRAMES_PER_SECOND
        shots.append(FilmShot(start, end, scene, transition))
    return Film(seed, height, width, _with_moves(seed, shots, style), style)


def _with_moves(seed: int, shots: Sequence[FilmShot], style: FilmStyle) -> tuple[FilmShot, ...]:
    """Adds pans and flashes; a flash stays away from a shot's ends and transitions."""
    rng = np.random.default_rng((7919, seed, 1))
    moved = []
    for shot in shots:
        pans, flashes = rng.random(2) < (style.pans, style.flashes)
        speed, position = rng.uniform(*_PAN_SPEEDS), rng.uniform(0.3, 0.6)
        length = shot.end - shot.start
        drawings = length // style.hold
        pan = Pan(drawings // 4, max(1, drawings // 3), speed) if pans else None
        flash = shot.start + _overlap(shot) + int(position * (length - _overlap(shot)))
        moved.append(dataclasses.replace(shot, pan=pan, flash=flash if flashes else None))
    return tuple(moved)


def _draw_scene(rng: np.random.Generator, *, names: Sequence[str], places: Sequence[str]) -> Scene:
    actor, partner = (str(name) for name in rng.choice(names, 2, replace=False))
    motion = str(rng.choice(MOTIONS))
    details = Details(
        accessory=str(rng.choice(ACCESSORIES)),
        partner_accessory=str(rng.choice(ACCESSORIES)),
        variant=int(rng.choice(VARIANTS)),
        side=str(rng.choice(SIDES)),
        distance=str(rng.choice(DISTANCES)),
    )
    return Scene(
        character=actor,
        motion=motion,
        place=str(rng.choice(places)),
        time=str(rng.choice(TIMES)),
        level=int(rng.choice(LEVELS)),
        partner=partner if motion == "talk" else None,
        details=details,
        seed=int(rng.integers(2**31)),
    )


def write_film(path: Path, film: Film) -> None:
    """Writes `path` (H.264 in mp4), and its true annotations with the suffix `.json`; atomically.

    Frames are encoded as they are drawn: a film of any length takes the memory of one shot.

    Raises:
        UserError: The name does not end in `.mp4`.
        OSError: A file cannot be written.
    """
    if path.suffix != ".mp4":
        raise UserError(f"{path}: expected a name that ends in .mp4, found {path.suffix!r}")
    part = path.with_name(path.name + ".part")
    try:
        _encode(part, film)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    write_whole(path.with_suffix(".json"), (json.dumps(film.truth(), indent=2) + "\n").encode())


def _encode(path: Path, film: Film) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        fps = film.style.fps
        write_bt709(
            container, film.frames(), height=film.height, width=film.width, fps=fps, options=ENCODER
        )
