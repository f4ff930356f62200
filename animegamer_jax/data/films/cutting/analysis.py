"""The first look at a film: its times, bars and cuts, and the clips that can be cut from it.

A film is decoded twice. Where clips may lie depends on cuts that are found later and on bars that
only the whole film tells; to decode once, all frames in between would have to be kept. The second
time costs about a fifth of what a clip's flow and encoding cost.
"""

import array
import dataclasses
import os
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from animegamer_jax.data.films.clips.records import FilmSettings
from animegamer_jax.data.films.cutting.cuts import (
    SMALL,
    Break,
    CutFinder,
)
from animegamer_jax.data.films.cutting.letterbox import BarFinder, Bars
from animegamer_jax.data.films.cutting.video_reader import FilmError, open_film

_BARS_EVERY = 0.5  # seconds between frames in which bars are sought
_SLOWER = 0.95  # of a clip's frames a second: what a film must have
_HOLE = 1.0  # seconds without a frame, and more than
_HOLE_FRAMES = 4  # usual ones, after which nothing is known of what lay between
_MISSING = 0.5  # seconds by which a container may be wrong about its length


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is known of a film before clips are cut.

    Attributes:
        times: seconds of every frame.
        fps: frames a second, on the average.
        seconds: that could be read.
        missing: seconds that the file announces beyond those.
        height, width: as it is shown.
        bars: black rows and columns.
        breaks: between scenes.
        flashes: seconds of each flash's first frame, and of the first after it.
        damaged: number of places that could not be read.
        skipped: number of frames that were left out.
    """

    times: Float[np.ndarray, " n"]
    fps: float
    seconds: float
    missing: float
    height: int
    width: int
    bars: Bars
    breaks: tuple[Break, ...]
    flashes: tuple[tuple[float, float], ...]
    damaged: int
    skipped: int


def survey_film(
    path: os.PathLike[str] | str,
    settings: FilmSettings,
    *,
    name: str,
    threads: int = 1,
    on_progress: Callable[[float, float], None] = lambda seconds, total: None,
) -> Survey:
    """Decodes a film once; in memory are some seconds of small frames.

    Args:
        path: a local file.
        settings: of the cuts.
        name: what messages call the film.
        threads: of the decoder.
        on_progress: called at each frame with its seconds and those of the film, if it tells them.

    Raises:
        FilmError: it is no film, too short for one clip, or has too few frames a second.
    """
    times, cuts, bars = array.array("d"), CutFinder(settings), BarFinder()
    with open_film(path, name=name, threads=threads) as footage:
        height, width = footage.height, footage.width
        scale = min(1.0, SMALL / max(height, width))
        rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
        for frame in footage.frames():
            if frame.time >= bars.count * _BARS_EVERY:
                bars.add(frame.grey())
            times.append(frame.time)
            cuts.add(frame.time, frame.rgb(height=rows, width=columns))
            if footage.announced:
                on_progress(frame.time, footage.announced)
        announced = footage.announced
    shown = np.array(times)
    fps = _rate(shown)
    seconds = float(shown[-1]) + 1 / fps
    late = (announced or 0.0) - seconds
    _check(name, fps=fps, seconds=seconds, missing=late, settings=settings)
    return Survey(
        times=shown,
        fps=fps,
        seconds=seconds,
        missing=late if late > _MISSING else 0.0,
        height=height,
        width=width,
        bars=bars.bars(height=height, width=width),
        breaks=_with_holes(cuts.finish(), shown),
        flashes=tuple(cuts.flashes),
        damaged=footage.damaged,
        skipped=footage.skipped,
    )


def _steps(times: Float[np.ndarray, " n"]) -> tuple[Float[np.ndarray, " m"], float]:
    """Seconds from frame to frame, and those from which on they are a hole."""
    steps = np.diff(times)
    return steps, max(_HOLE, _HOLE_FRAMES * float(np.median(steps))) if len(steps) else _HOLE


def _rate(times: Float[np.ndarray, " n"]) -> float:
    steps, hole = _steps(times)
    usual = steps[steps < hole]
    return 1 / float(usual.mean()) if len(usual) else 1.0


def _check(
    name: str, *, fps: float, seconds: float, missing: float, settings: FilmSettings
) -> None:
    if fps < _SLOWER * settings.fps:
        raise FilmError(
            f"{name}: expected at least {settings.fps} frames a second, as clips have them, found "
            f"{fps:.3g}: leave it out, or ask for clips of fewer frames a second"
        )
    if seconds < settings.clip_seconds:
        cut_off = f" of {seconds + missing:.3g} that can be read" if missing > _MISSING else ""
        raise FilmError(
            f"{name}: expected at least {settings.clip_seconds:.3g} seconds, a clip's length, "
            f"found {seconds:.3g}{cut_off}: leave it out" + (" or copy it again" * bool(cut_off))
        )


def _with_holes(breaks: list[Break], times: Float[np.ndarray, " n"]) -> tuple[Break, ...]:
    """The breaks, and one at each place where frames are missing."""
    steps, hole = _steps(times)
    for index in np.flatnonzero(steps >= hole):
        before, after = float(times[index]), float(times[index + 1])
        if not any(before < one.time <= after for one in breaks):
            breaks.append(Break(time=after, start=before, end=after, kind="cut"))
    return tuple(sorted(breaks, key=lambda one: one.time))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A clip to cut: its scene, seconds of its start and end, and its frames' numbers."""

    scene: int
    start: float
    end: float
    frames: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The clips of a film in order, its number of scenes, and those too short for a clip."""

    candidates: tuple[Candidate, ...]
    scenes: int
    short_scenes: int


def plan_clips(survey: Survey, settings: FilmSettings) -> Plan:
    """Clips side by side from the start of each scene on, none across a cut or into a fade.

    The frames nearest to a clip's times are taken. At both ends of a scene `guard_seconds` are
    left out.
    """
    starts = [0.0, *(one.end for one in survey.breaks)]
    ends = [*(one.start for one in survey.breaks), survey.seconds]
    candidates: list[Candidate] = []
    short = 0
    for scene, (start, end) in enumerate(zip(starts, ends, strict=True)):
        found = _in_scene(survey, settings, scene=scene, start=start, end=end)
        candidates += found
        short += not found
    return Plan(tuple(candidates), len(starts), short)


def _in_scene(
    survey: Survey, settings: FilmSettings, *, scene: int, start: float, end: float
) -> list[Candidate]:
    times, early = survey.times, 0.25 / survey.fps  # times may be rounded
    first = np.searchsorted(times, start + settings.guard_seconds - early)
    stop = np.searchsorted(times, end - settings.guard_seconds - early)
    found: list[Candidate] = []
    while first < stop:
        begin = float(times[first])
        wanted = begin + np.arange(settings.num_frames) / settings.fps
        if wanted[-1] > times[stop - 1] + 0.5 / survey.fps:
            break
        frames = np.clip(_nearest(times, wanted), first, stop - 1)
        finish = begin + settings.clip_seconds
        found.append(Candidate(scene, begin, finish, tuple(int(index) for index in frames)))
        first = max(np.searchsorted(times, finish - early), frames[-1] + 1)
    return found


def _nearest(times: Float[np.ndarray, " n"], wanted: Float[np.ndarray, " m"]) -> np.ndarray:
    after = np.clip(np.searchsorted(times, wanted), 1, len(times) - 1)
    return after - (wanted - times[after - 1] <= times[after] - wanted)
