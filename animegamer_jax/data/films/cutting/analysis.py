"""First pass over a film: its times, bars and cuts, and the clips that can be cut from it.

A film is decoded twice. The places of clips depend on cuts that are found later, and on bars that
only the whole film shows; decoding once would mean keeping all frames in between. The second pass
costs about a fifth of a clip's flow and encoding.
"""

import array
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Bool, Float

from animegamer_jax.data.films.clips.records import FilmSettings
from animegamer_jax.data.films.cutting.cuts import SMALL, Break, CutFinder, merged
from animegamer_jax.data.films.cutting.letterbox import BarFinder, Bars
from animegamer_jax.data.films.cutting.video_reader import FilmError, open_film
from animegamer_jax.errors import UserError
from animegamer_jax.extras import how_to_install

if TYPE_CHECKING:
    from animegamer_jax.data.films.cutting.transnet import TransNet

_BARS_EVERY = 0.25  # seconds between frames in which bars are searched
_LEAST_RATE = 0.95  # of a clip's frames per second, which a film must have
_HOLE = 1.0  # seconds without a frame, at least, and
_HOLE_FRAMES = 4  # usual distances between frames, from which on frames are missing
_MISSING = 0.5  # seconds by which a container may be wrong about its length


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A clip to cut: its scene, the seconds of its start and end, the numbers of its frames."""

    scene: int
    start: float
    end: float
    frames: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FilmAnalysis:
    """What is known of a film before clips are cut.

    Attributes:
        times: Seconds of every frame.
        fps, seconds, missing, height, width, bars: As in `FilmReport`, not rounded.
        scene_bars: Bars of each scene.
        breaks: Cuts and fades between scenes.
        candidates: The clips to cut, in order.
        flashes: Seconds of each flash's first frame, and of the first frame after it.
        short_scenes, damaged, skipped: As in `FilmReport`.
    """

    times: Float[np.ndarray, " n"]
    fps: float
    seconds: float
    missing: float
    height: int
    width: int
    bars: Bars
    scene_bars: tuple[Bars, ...]
    breaks: tuple[Break, ...]
    candidates: tuple[Candidate, ...]
    short_scenes: int
    flashes: tuple[tuple[float, float], ...]
    damaged: int
    skipped: int

    @property
    def scenes(self) -> int:
        """Number of scenes."""
        return len(self.breaks) + 1


def analyze_film(
    path: os.PathLike[str] | str,
    settings: FilmSettings,
    *,
    name: str,
    threads: int = 1,
    on_progress: Callable[[float, float], None] = lambda seconds, total: None,
) -> FilmAnalysis:
    """Decodes a film once, with a few seconds of small frames in memory.

    Args:
        path: A local file.
        settings: How films are cut.
        name: The film's name in messages.
        threads: Number of decoder threads.
        on_progress: Called at each frame with its seconds and the film's, if the file announces
            them.

    Raises:
        FilmError: It is no film, too short for one clip, or has too few frames per second.
    """
    times, cuts, bars = array.array("d"), CutFinder(settings), BarFinder()
    network = _transnet() if settings.detector != "drawn" else None
    with open_film(path, name=name, threads=threads) as reader:
        height, width = reader.height, reader.width
        scale = min(1.0, SMALL / max(height, width))
        rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
        for frame in reader.frames():
            if frame.time >= bars.count * _BARS_EVERY:
                bars.add(frame.grey(), time=frame.time)
            times.append(frame.time)
            small = frame.rgb(height=rows, width=columns)
            cuts.add(frame.time, small)
            if network is not None:
                network.add(frame.time, small)
            if reader.announced:
                on_progress(frame.time, reader.announced)
        announced = reader.announced
    shown = np.array(times)
    fps = _rate(shown)
    seconds = float(shown[-1]) + 1 / fps
    late = (announced or 0.0) - seconds
    _check(name, fps=fps, seconds=seconds, missing=late, settings=settings)
    found = cuts.finish()
    if network is not None:
        found = network.finish() + (found if settings.detector == "both" else [])
        found = list(merged(found, gap=settings.min_scene_seconds))
    changes = bars.changes(height=height, width=width)
    _add_breaks(found, changes, kind="fade", margin=_BARS_EVERY)
    breaks = _with_holes(found, shown)
    starts, ends = [0.0, *(b.end for b in breaks)], [*(b.start for b in breaks), seconds]
    flashing = np.zeros(len(shown), bool)
    for start, end in cuts.flashes:
        flashing |= (shown >= start) & (shown < end)
    times_of = list(zip(starts, ends, strict=True))
    scenes = [
        list(_in_scene(shown, settings, flashing, fps=fps, scene=scene, start=start, end=end))
        for scene, (start, end) in enumerate(times_of)
    ]
    return FilmAnalysis(
        times=shown,
        fps=fps,
        seconds=seconds,
        missing=late if late > _MISSING else 0.0,
        height=height,
        width=width,
        bars=bars.bars(height=height, width=width),
        scene_bars=tuple(
            bars.scene_bars(start, end, height=height, width=width) for start, end in times_of
        ),
        breaks=breaks,
        candidates=tuple(candidate for scene in scenes for candidate in scene),
        short_scenes=sum(not scene for scene in scenes),
        flashes=tuple(cuts.flashes),
        damaged=reader.damaged,
        skipped=reader.skipped,
    )


def _transnet() -> "TransNet":
    """Returns the learned detector.

    Raises:
        UserError: The extra `transnet` is not installed.
    """
    try:
        from animegamer_jax.data.films.cutting.transnet import TransNet

        return TransNet()
    except ModuleNotFoundError as error:
        raise UserError(
            f"--detector: {error.name} is not installed: {how_to_install('transnet')}"
        ) from None


def _steps(times: Float[np.ndarray, " n"]) -> tuple[Float[np.ndarray, " m"], float]:
    """Returns the seconds between frames, and from how many on frames are missing."""
    steps = np.diff(times)
    return steps, max(_HOLE, _HOLE_FRAMES * float(np.median(steps))) if len(steps) else _HOLE


def _rate(times: Float[np.ndarray, " n"]) -> float:
    steps, hole = _steps(times)
    usual = steps[steps < hole]
    return 1 / float(usual.mean()) if len(usual) else 1.0


def _check(
    name: str, *, fps: float, seconds: float, missing: float, settings: FilmSettings
) -> None:
    if fps < _LEAST_RATE * settings.fps:
        raise FilmError(
            f"{name}: expected at least {settings.fps} frames per second, as clips have, found "
            f"{fps:.3g}: leave it out, or ask for clips of fewer frames per second (--fps)"
        )
    if seconds < settings.clip_seconds:
        cut_off = f" of {seconds + missing:.3g} that can be read" if missing > _MISSING else ""
        raise FilmError(
            f"{name}: expected at least {settings.clip_seconds:.3g} seconds, a clip's length, "
            f"found {seconds:.3g}{cut_off}: leave it out" + (" or copy it again" * bool(cut_off))
        )


def _with_holes(breaks: list[Break], times: Float[np.ndarray, " n"]) -> tuple[Break, ...]:
    """Adds a break wherever frames are missing."""
    steps, hole = _steps(times)
    holes = np.flatnonzero(steps >= hole)
    _add_breaks(breaks, [(float(times[k]), float(times[k + 1])) for k in holes], kind="cut")
    return tuple(sorted(breaks, key=lambda one: one.time))


def _add_breaks(
    breaks: list[Break],
    spans: Iterable[tuple[float, float]],
    *,
    kind: Literal["cut", "fade"],
    margin: float = 0.0,
) -> None:
    """Adds a break for each span of seconds, after its first, in which none was found.

    One that was found up to `margin` seconds before or after the span counts as well.
    """
    for before, after in spans:
        if not any(before - margin < one.time <= after + margin for one in breaks):
            time = after if kind == "cut" else (before + after) / 2
            breaks.append(Break(time=time, start=before, end=after, kind=kind))


def _in_scene(
    times: Float[np.ndarray, " n"],
    settings: FilmSettings,
    flashing: Bool[np.ndarray, " n"],
    *,
    fps: float,
    scene: int,
    start: float,
    end: float,
) -> Iterator[Candidate]:
    """Yields clips one after another in a scene, none across a cut or into a fade.

    The frames nearest to a clip's times are taken. At both ends of the scene `guard_seconds` are
    skipped. A clip that would show a flash begins later, if it shows none then.
    """
    early = 0.25 / fps  # times may be rounded
    first = int(np.searchsorted(times, start + settings.guard_seconds - early))
    stop = int(np.searchsorted(times, end - settings.guard_seconds - early))
    offsets = np.arange(settings.num_frames) / settings.fps

    def frames_from(begin: int) -> tuple[int, ...] | None:
        """Returns the numbers of a clip's frames, around flashes where that is half a step or less.

        None if the scene ends before the clip.
        """
        wanted = float(times[begin]) + offsets
        if wanted[-1] > times[stop - 1] + 0.5 / fps:
            return None
        frames = np.clip(_nearest(times, wanted), begin, stop - 1)
        for place in np.flatnonzero(flashing[frames]):
            near = np.abs(times[begin:stop] - wanted[place])
            near[flashing[begin:stop]] = np.inf
            if near.min() <= 0.5 / settings.fps:
                frames[place] = begin + int(near.argmin())
        return tuple(frames.tolist())

    while first < stop and (frames := frames_from(first)) is not None:
        later = first
        while flashing[list(frames)].any() and (moved := frames_from(later := later + 1)):
            if not flashing[list(moved)].any():
                first, frames = later, moved
        begin = float(times[first])
        finish = begin + settings.clip_seconds
        yield Candidate(scene, begin, finish, frames)
        first = max(int(np.searchsorted(times, finish - early)), frames[-1] + 1)


def _nearest(times: Float[np.ndarray, " n"], wanted: Float[np.ndarray, " m"]) -> np.ndarray:
    after = np.clip(np.searchsorted(times, wanted), 1, len(times) - 1)
    return after - (wanted - times[after - 1] <= times[after] - wanted)
