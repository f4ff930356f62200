"""Films of the toy world: shots joined by transitions, with the truth beside them.

What the detection of shots, the measuring of motion and the annotation are tested on: a film
plays like any other, and what it shows is known frame by frame.
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
from animegamer_jax.media.video import FRAMES_PER_SECOND, write_bt709
from animegamer_jax.storage.files import write_whole
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.drawing.style import PLAIN as PLAIN
from animegamer_jax.toy.drawing.style import CrossFade as CrossFade
from animegamer_jax.toy.drawing.style import Cut as Cut
from animegamer_jax.toy.drawing.style import FadeThroughBlack as FadeThroughBlack
from animegamer_jax.toy.drawing.style import FilmStyle as FilmStyle
from animegamer_jax.toy.drawing.style import Frames as Frames
from animegamer_jax.toy.drawing.style import Pan as Pan
from animegamer_jax.toy.drawing.style import Transition as Transition
from animegamer_jax.toy.scene import (
    CHARACTERS,
    LEVELS,
    MOTION_VALUES,
    MOTIONS,
    PLACES,
    TIMES,
    Scene,
)

SHORTEST_SECONDS, LONGEST_SECONDS = 2, 6
_NUM_CHARACTERS = 3
_PAN_SPEEDS = (15.0, 60.0)  # pixels a drawing at 480 x 720: fast camera moves


@dataclasses.dataclass(frozen=True)
class FilmShot:
    """One shot and where it lies in its film.

    Attributes:
        start, end: first frame, and the one after the last; those of a transition belong to the
            shot that it leads to.
        scene: what the shot shows.
        transition: how it follows the shot before; the first follows none.
        pan: a move of the camera.
        flash: first white frame.
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
        seed: the film is a function of this and the sizes.
        height, width: pixels of a frame.
        shots: the truth.
        style: what the film does with the drawings of its shots.
    """

    seed: int
    height: int
    width: int
    shots: tuple[FilmShot, ...]
    style: FilmStyle = PLAIN

    def frames(self) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        """All frames in order, one shot's drawings at a time in memory."""
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
        """What the film shows, for JSON.

        Motion values are in pixels a frame at 8 frames a second and 480 x 720; they are not known
        where the camera moves or scenes play faster than they were drawn for.
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
    """A film of three characters; neighbouring shots are in different places.

    Args:
        seed: of everything that is drawn.
        num_shots: shots of 2 to 6 seconds.
        height: pixels of a frame.
        width: pixels of a frame.
        transitions: each pair of shots is joined by one of these.
        style: its frames a second, held drawings, pans, flashes and bars; the scenes are the same.

    Raises:
        UserError: no shots.
    """
    if num_shots < 1:
        raise UserError(
            f"a film of {num_shots} shots: expected 1 or more; raise the number of shots"
        )
    rng = np.random.default_rng((7919, seed))
    characters = [str(name) for name in rng.choice(CHARACTERS, _NUM_CHARACTERS, replace=False)]
    shots: list[FilmShot] = []
    for _ in range(num_shots):
        start = shots[-1].end if shots else 0
        length = int(
            rng.integers(
                SHORTEST_SECONDS * FRAMES_PER_SECOND, LONGEST_SECONDS * FRAMES_PER_SECOND + 1
            )
        )
        last_place = shots[-1].scene.place if shots else None
        scene = _draw_scene(
            rng, characters=characters, places=[p for p in PLACES if p != last_place]
        )
        transition = transitions[int(rng.integers(len(transitions)))] if shots else None
        end = start + length * style.fps // FRAMES_PER_SECOND
        shots.append(FilmShot(start, end, scene, transition))
    return Film(seed, height, width, _with_moves(seed, shots, style), style)


def _with_moves(seed: int, shots: Sequence[FilmShot], style: FilmStyle) -> tuple[FilmShot, ...]:
    """Shots with pans and flashes; a flash keeps away from the shot's ends and transitions."""
    rng = np.random.default_rng((7919, seed, 1))
    moved = []
    for shot in shots:
        pans, flashes = rng.random(2) < (style.pans, style.flashes)
        speed, place = rng.uniform(*_PAN_SPEEDS), rng.uniform(0.3, 0.6)
        length = shot.end - shot.start
        drawings = length // style.hold
        pan = Pan(drawings // 4, max(1, drawings // 3), speed) if pans else None
        flash = shot.start + _overlap(shot) + int(place * (length - _overlap(shot)))
        moved.append(dataclasses.replace(shot, pan=pan, flash=flash if flashes else None))
    return tuple(moved)


def _draw_scene(
    rng: np.random.Generator, *, characters: Sequence[str], places: Sequence[str]
) -> Scene:
    actor, partner = (str(name) for name in rng.choice(characters, 2, replace=False))
    motion = str(rng.choice(MOTIONS))
    return Scene(
        character=actor,
        motion=motion,
        place=str(rng.choice(places)),
        time=str(rng.choice(TIMES)),
        level=int(rng.choice(LEVELS)),
        partner=partner if motion == "talk" else None,
        seed=int(rng.integers(2**31)),
    )


def write_film(path: Path, film: Film) -> None:
    """Writes `path` (H.264 in mp4) and the truth beside it, as `.json`; each in whole.

    Frames are encoded as they are drawn: a film of any length takes the memory of one shot.

    Raises:
        UserError: the name does not end in `.mp4`.
        OSError: a file cannot be written.
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
        options = {"crf": "18", "preset": "veryfast"}
        fps = film.style.fps
        write_bt709(
            container, film.frames(), height=film.height, width=film.width, fps=fps, options=options
        )
