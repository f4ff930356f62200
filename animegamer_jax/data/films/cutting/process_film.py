"""Films to shots: each film is cut into clips of one scene, and what is of no use is dropped.

A film is worked through by one plain function, `process_film`, which depends on nothing but its
arguments: any number of processes may each take another film of one folder.
"""

import collections
import contextlib
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.data.films.clips.store import (
    ClipRow,
    DropReason,
    FilmReport,
    FilmSettings,
    SetAside,
    ShotsFolder,
    film_content,
    film_id,
    path_id,
)
from animegamer_jax.data.films.cutting.analysis import (
    Candidate,
    Plan,
    Survey,
    plan_clips,
    survey_film,
)
from animegamer_jax.data.films.cutting.filters import (
    Repetitions,
    brightness,
    clip_look,
    is_credits,
)
from animegamer_jax.data.films.cutting.letterbox import fitted
from animegamer_jax.data.films.cutting.video_reader import (
    FilmError,
    Footage,
    film_errors,
    open_film,
    printable,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import (
    ClipMotion,
    FlowEstimator,
    clip_motion,
    dis_flow,
)
from animegamer_jax.media.video import encode_mp4
from animegamer_jax.storage.paths import absolute, telling

Clip = UInt8[np.ndarray, "f h w 3"]
Progress = Callable[[str, int, int], None]

SUFFIXES = (".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ogv")
SUFFIXES += (".ts", ".webm", ".wmv")
_PICTURE_ROWS = 160  # of a dropped clip's picture
_PICTURE_QUALITY = 80
_BLOCK = 2**24  # bytes that are copied at a time
_REASON = 160  # letters of a decoder's message


def list_films(paths: Sequence[str]) -> list[epath.Path]:
    """The films that folders, patterns and files name, each once, in order.

    Args:
        paths: of a folder, the files with a film's suffix in it are taken; of a pattern with `*`,
            `?` or `[`, those that fit.

    Raises:
        UserError: nothing is there at one of the paths.
    """
    found: dict[str, epath.Path] = {}
    for text in paths:
        path = absolute(text)
        with telling(path, "cannot be read", mend="check the path"):
            films = _films_at(path)
        if not films:
            what = f"no film ({' '.join(SUFFIXES)}) in it" if path.is_dir() else "nothing there"
            told = printable(str(path))
            raise UserError(f"{told}: expected films, found {what}: check the path")
        found |= {str(film): film for film in films}
    if not found:
        raise UserError("films: expected the path of a film or a folder, found none: name one")
    return list(found.values())


def _films_at(path: epath.Path) -> list[epath.Path]:
    if path.is_dir():
        return sorted(child for child in path.iterdir() if _is_film(child))
    if path.exists():
        return [path]  # before patterns: names of films have brackets
    anchor, *parts = path.parts
    plain = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), None)
    if plain is None:
        return []
    if "**" in parts:
        raise UserError(f"{path}: expected a pattern without **: name folders, or use *")
    folder = epath.Path(anchor).joinpath(*parts[:plain])
    return sorted(child for child in folder.glob("/".join(parts[plain:])) if _is_film(child))


def _is_film(path: epath.Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def count_done(paths: Sequence[epath.PathLike], folder: ShotsFolder) -> int:
    """How many of these films are finished or set aside, by their names alone."""
    ids = [path_id(path) for path in paths]
    digits = -len("-01234567")
    wanted = collections.Counter(film[:digits] for film in ids)
    finished = collections.Counter(film[:digits] for film in folder.films())
    return (wanted & finished).total() + len({aside.film for aside in folder.failed()} & {*ids})


def process_film(
    path: epath.PathLike,
    folder: ShotsFolder,
    *,
    threads: int = 1,
    estimate: FlowEstimator = dis_flow,
    on_progress: Progress = lambda what, done, total: None,
) -> FilmReport | SetAside:
    """Cuts one film into clips and writes them; a film that is finished already is only read.

    The same film and settings give the same rows and bytes, in any process. In memory are some
    seconds of small frames, or one clip.

    Args:
        path: of the film, local or in a bucket.
        folder: with the settings.
        threads: of the decoder; in several processes, 1.
        estimate: optical flow.
        on_progress: called with a word on the work, its seconds of film so far, and in all.

    Returns:
        The film's report; or why it cannot be used, which is noted in the folder as well.

    Raises:
        UserError: the folder cannot be written.
    """
    cv2.setNumThreads(1)
    path = absolute(path)
    try:
        with film_errors():
            content = film_content(path)
        film = film_id(path, content=content)
        for note in (path_id(path), film):  # older versions noted the film's id
            folder.forget(note)
        if folder.is_finished(film):
            return _same(folder.report(film), content=content, path=path)
        with _local(path) as local:
            source = _Source(film=film, content=content, path=path, local=local, threads=threads)
            return _process(source, folder, flow=estimate, on_progress=on_progress)
    except FilmError as error:
        aside = SetAside(film=path_id(path), name=printable(path.name), reason=str(error))
        folder.set_aside(aside)
        return aside


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """A film to cut: its id and content, what it is called, the file that is read, and how."""

    film: str
    content: str
    path: epath.Path
    local: Path
    threads: int


def _same(report: FilmReport, *, content: str, path: epath.Path) -> FilmReport:
    """The report of a finished film, if it is this one's: an id has 32 bits of the content."""
    if report.content not in ("", content):
        raise FilmError(
            f"{path}: its id {report.film} is that of another film that was cut before, "
            f"{report.name}: give it another name, in Latin letters or digits"
        )
    return report


@contextlib.contextmanager
def _decoding(path: epath.Path) -> Iterator[None]:
    """What a decoder or a filter raises here is the film's fault, whatever it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:_REASON]
        kind = type(error).__name__
        raise FilmError(
            f"{path}: cannot be decoded ({kind}: {reason}): copy it again, or convert it"
        ) from error


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[Path]:
    """A film as a local file: in a bucket, a copy for the time being."""
    if "://" not in str(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / f"film{path.suffix}"
        mend = "check the path and the free space"
        with (
            film_errors(),
            telling(path, "cannot be copied", mend=mend),
            path.open("rb") as source,
            copy.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _BLOCK)
        yield copy


def _process(
    source: _Source, folder: ShotsFolder, *, flow: FlowEstimator, on_progress: Progress
) -> FilmReport:
    name = printable(source.path.name)
    with _decoding(source.path):
        survey = survey_film(
            source.local,
            folder.settings,
            name=str(source.path),
            threads=source.threads,
            on_progress=_in_seconds(f"{name}, cuts", on_progress),
        )
        plan = plan_clips(survey, folder.settings)
    tell = _in_seconds(f"{name}, clips", on_progress)
    with folder.writing(source.film) as writer:
        for row, data in _clips(source, plan, survey, folder.settings, flow=flow):
            if row.dropped is None:
                writer.keep(row, data)
            else:
                writer.drop(row, data)
            tell(row.end, survey.seconds)
        report = _report(source, survey=survey, plan=plan, rows=writer.rows, flow=flow)
        writer.finish(report)
    return report


def _in_seconds(what: str, on_progress: Progress) -> Callable[[float, float], None]:
    """Tells each second once, never that all are done: what comes next tells that."""
    last = -1

    def tell(seconds: float, total: float) -> None:
        nonlocal last
        whole = math.ceil(total)
        if int(seconds) > last and seconds < whole:
            last = int(seconds)
            on_progress(what, last, whole)

    return tell


def _clips(
    source: _Source, plan: Plan, survey: Survey, settings: FilmSettings, *, flow: FlowEstimator
) -> Iterator[tuple[ClipRow, bytes]]:
    """The row of each candidate, with its MP4, or a picture where it is dropped."""
    repetitions = Repetitions(difference=settings.duplicate_difference)
    with (
        _decoding(source.path),
        open_film(source.local, name=str(source.path), threads=source.threads) as footage,
    ):
        clips = _cut(footage, plan, survey, settings)
        for number, (candidate, frames) in enumerate(clips):
            motion, look = clip_motion(frames, estimate=flow), clip_look(frames)
            reason = _reason(frames, candidate, motion=motion, survey=survey, settings=settings)
            if reason is None and repetitions.has(look):
                reason = "duplicate"
            row = _row(number, candidate, motion=motion, dropped=reason)
            if reason is None:
                repetitions.keep(look)
                yield row, encode_mp4(frames, fps=settings.fps)
            else:
                yield row, _picture(frames[0])


def _cut(
    footage: Footage, plan: Plan, survey: Survey, settings: FilmSettings
) -> Iterator[tuple[Candidate, Clip]]:
    """The frames of each clip, fitted to its size; other frames pass undrawn."""
    frames = enumerate(footage.frames())
    for candidate in plan.candidates:
        pictures: dict[int, UInt8[np.ndarray, "h w 3"]] = {}
        wanted = set(candidate.frames)
        while wanted:
            number, frame = next(frames, (-1, None))
            if frame is None or frame.time != survey.times[number]:
                raise FilmError(
                    f"{footage.name}: expected the same frames when it is read again, found others "
                    f"from {survey.times[number]:.3f} seconds on: copy or convert it"
                )
            if number in wanted:
                wanted.remove(number)
                pictures[number] = fitted(
                    frame.rgb(),
                    bars=survey.bars,
                    height=settings.height,
                    width=settings.width,
                    fit=settings.fit,
                )
        yield candidate, np.stack([pictures[number] for number in candidate.frames])


def _reason(
    frames: Clip,
    candidate: Candidate,
    *,
    motion: ClipMotion,
    survey: Survey,
    settings: FilmSettings,
) -> DropReason | None:
    """Why a clip is of no use by itself."""
    times = survey.times[list(candidate.frames)]
    if is_credits(frames, letters=settings.credits_letters):
        return "credits"  # most of them are nearly black
    if brightness(frames) < settings.black_below:
        return "black"
    if any(((times >= start) & (times < end)).any() for start, end in survey.flashes):
        return "flash"
    return "still" if motion.share < settings.still_share else None


def _row(
    number: int, candidate: Candidate, *, motion: ClipMotion, dropped: DropReason | None
) -> ClipRow:
    return ClipRow(
        clip=number,
        scene=candidate.scene,
        start=round(candidate.start, 4),
        end=round(candidate.end, 4),
        dropped=dropped,
        motion_value=round(motion.value, 4),
        flow=tuple(round(value, 4) for value in motion.flow),
        digest="",
    )


def _report(
    source: _Source, *, survey: Survey, plan: Plan, rows: Sequence[ClipRow], flow: FlowEstimator
) -> FilmReport:
    reasons = collections.Counter(row.dropped for row in rows)
    return FilmReport(
        film=source.film,
        name=printable(source.path.name),
        seconds=round(survey.seconds, 4),
        missing=round(survey.missing, 4),
        fps=round(survey.fps, 4),
        height=survey.height,
        width=survey.width,
        bars=survey.bars,
        cuts=tuple(round(one.time, 4) for one in survey.breaks),
        scenes=plan.scenes,
        short_scenes=plan.short_scenes,
        kept=reasons.pop(None, 0),
        dropped={str(reason): count for reason, count in sorted(reasons.items())},
        damaged=survey.damaged,
        skipped=survey.skipped,
        content=source.content,
        flow=getattr(getattr(flow, "func", flow), "__qualname__", type(flow).__qualname__),
    )


def _picture(frame: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """A small JPEG."""
    height, width = frame.shape[:2]
    rows = min(height, _PICTURE_ROWS)
    size = max(1, round(width * rows / height)), rows
    small = cv2.resize(frame, size, interpolation=cv2.INTER_AREA)
    _, data = cv2.imencode(
        ".jpg", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _PICTURE_QUALITY]
    )
    return data.tobytes()
