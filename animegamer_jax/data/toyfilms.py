"""Films of the toy world: shots joined by transitions, with the truth beside them.

What the detection of shots, the measuring of motion and the annotation are tested on: a film
plays like any other, and what it shows is known frame by frame.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from animegamer_jax.data.toydraw import render
from animegamer_jax.data.toyscene import (
    CHARACTERS,
    LEVELS,
    MOTION_VALUES,
    MOTIONS,
    PLACES,
    TIMES,
    Scene,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media import FRAMES_PER_SECOND, encode_mp4, write_whole

Frames = UInt8[np.ndarray, "f h w 3"]
SHORTEST_SECONDS, LONGEST_SECONDS = 2, 6
_CAST_SIZE = 3


@runtime_checkable
class Transition(Protocol):
    """How a shot follows the one before: for `overlap` frames both are on screen."""

    @property
    def name(self) -> str: ...

    @property
    def overlap(self) -> int: ...

    def join(self, before: Frames, after: Frames) -> Frames:
        """The frames that show both: `overlap` of each shot in, as many out."""
        ...


@dataclasses.dataclass(frozen=True)
class Cut:
    """A hard cut: no frame shows both."""

    name: str = "cut"
    overlap: int = 0

    def join(self, before: Frames, after: Frames) -> Frames:
        return after


@dataclasses.dataclass(frozen=True)
class FilmShot:
    """One shot and where it lies in its film.

    Attributes:
        start, end: first frame, and the one after the last; those of a transition belong to the
            shot that it leads to.
        scene: what the shot shows.
        transition: how it follows the shot before; the first follows none.
    """

    start: int
    end: int
    scene: Scene
    transition: Transition | None


@dataclasses.dataclass(frozen=True)
class Film:
    """A film, drawn while it is read.

    Attributes:
        seed: the film is a function of this and the sizes.
        height, width: pixels of a frame.
        shots: the truth.
    """

    seed: int
    height: int
    width: int
    shots: tuple[FilmShot, ...]

    def frames(self) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        """All frames in order, one shot at a time in memory."""
        tail: Frames | None = None
        for shot, following in zip(self.shots, (*self.shots[1:], None), strict=True):
            held = _overlap(following)
            clip = render(
                shot.scene,
                height=self.height,
                width=self.width,
                num_frames=shot.end - shot.start + held,
            )
            if tail is not None and shot.transition is not None and len(tail):
                clip[: len(tail)] = shot.transition.join(tail, clip[: len(tail)])
            tail = clip[len(clip) - held :]
            yield from clip[: len(clip) - held]

    def truth(self) -> dict[str, object]:
        """What the film shows, for JSON; motion values in pixels a frame at 480 x 720."""
        return {
            "seed": self.seed,
            "height": self.height,
            "width": self.width,
            "frames_per_second": FRAMES_PER_SECOND,
            "shots": [
                {
                    "start": shot.start,
                    "end": shot.end,
                    "transition": shot.transition.name if shot.transition else None,
                    "motion_value": MOTION_VALUES[shot.scene.level - 1],
                    **dataclasses.asdict(shot.scene),
                }
                for shot in self.shots
            ],
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
) -> Film:
    """A film of a cast of three; neighbouring shots are in different places.

    Args:
        seed: of everything that is drawn.
        num_shots: shots of 2 to 6 seconds at 8 frames a second.
        height: pixels of a frame.
        width: pixels of a frame.
        transitions: each pair of shots is joined by one of these.

    Raises:
        UserError: no shots.
    """
    if num_shots < 1:
        raise UserError(
            f"a film of {num_shots} shots: expected 1 or more; raise the number of shots"
        )
    rng = np.random.default_rng((7919, seed))
    cast = [str(name) for name in rng.choice(CHARACTERS, _CAST_SIZE, replace=False)]
    shots: list[FilmShot] = []
    for _ in range(num_shots):
        start = shots[-1].end if shots else 0
        length = int(
            rng.integers(
                SHORTEST_SECONDS * FRAMES_PER_SECOND, LONGEST_SECONDS * FRAMES_PER_SECOND + 1
            )
        )
        last_place = shots[-1].scene.place if shots else None
        scene = _draw_scene(rng, cast=cast, places=[p for p in PLACES if p != last_place])
        transition = transitions[int(rng.integers(len(transitions)))] if shots else None
        shots.append(FilmShot(start, start + length, scene, transition))
    return Film(seed, height, width, tuple(shots))


def _draw_scene(rng: np.random.Generator, *, cast: Sequence[str], places: Sequence[str]) -> Scene:
    actor, partner = (str(name) for name in rng.choice(cast, 2, replace=False))
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

    The frames are gathered in memory: a minute at 480 x 720 takes half a gigabyte.

    Raises:
        UserError: the name does not end in `.mp4`.
        OSError: a file cannot be written.
    """
    if path.suffix != ".mp4":
        raise UserError(f"{path}: expected a name that ends in .mp4, found {path.suffix!r}")
    write_whole(path, encode_mp4(np.stack(list(film.frames()))))
    write_whole(path.with_suffix(".json"), (json.dumps(film.truth(), indent=2) + "\n").encode())
