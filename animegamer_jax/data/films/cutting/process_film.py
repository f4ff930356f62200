"""From a film to clips: it is cut into clips of one scene each, and useless ones are dropped.

`process_film` depends on nothing but its arguments, so any number of processes may each take
another film of one folder.
"""

import collections
import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from etils import epath
from jaxtyping import UInt8

from animegamer_jax.data.films.clips.records import (
    ClipRow,
    DropReason,
    FilmReport,
    FilmSettings,
    SkippedFilm,
)
from animegamer_jax.data.films.clips.store import ShotsFolder, film_content, film_id, path_id
from animegamer_jax.data.films.cutting.analysis import Candidate, FilmAnalysis, analyze_film
from animegamer_jax.data.films.cutting.filters import (
    PerceptualHash,
    brightness,
    is_credits,
    is_duplicate,
    perceptual_hash,
)
from animegamer_jax.data.films.cutting.letterbox import fitted
from animegamer_jax.data.films.cutting.video_reader import (
    FilmError,
    VideoReader,
    film_errors,
    open_film,
)
from animegamer_jax.errors import UserError, printable
from animegamer_jax.media.motion import ClipMotion, FlowEstimator, clip_motion, film_flow
from animegamer_jax.media.sheets import encode_quick
from animegamer_jax.media.video import encode_mp4
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.storage.paths import absolute, is_bucket, user_errors

Clip = UInt8[np.ndarray, "f h w 3"]

SUFFIXES = (".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ogv")
SUFFIXES += (".ts", ".webm", ".wmv")
_PICTURE_ROWS = 160  # of a dropped clip's picture
_PICTURE_QUALITY = 80
_BLOCK = 2**24  # bytes that are copied at a time
_MAX_REASON = 160  # characters of a decoder's message


def list_films(paths: Sequence[str]) -> list[epath.Path]:
    """Returns the films at some paths, each once, in order, by absolute paths.

    Args:
        paths: Files, folders (their files with the suffix of a film), or patterns with `*`, `?` or
            `[`.

    Raises:
        UserError: There is nothing at one of the paths.
    """
    found: dict[str, epath.Path] = {}
    for text in paths:
        path = absolute(text)
        with user_errors(path, "cannot be read", hint="check the path"):
            films = _films_at(path)
        if not films:
            what = f"no film ({' '.join(SUFFIXES)}) in it" if path.is_dir() else "nothing there"
            name = printable(str(path))
            raise UserError(f"{name}: expected films, found {what}: check the path")
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


def count_done(paths: Sequence[epath.Path], folder: ShotsFolder) -> int:
    """Returns how many of these films are finished or skipped, judged by their names alone."""
    ids = [path_id(path) for path in paths]
    digits = -len("-01234567")
    wanted = collections.Counter(film[:digits] for film in ids)
    finished = collections.Counter(film[:digits] for film in folder.films())
    skipped = {film.film for film in folder.skipped_films()} & {*ids}
    return (wanted & finished).total() + len(skipped)


def process_film(
    path: epath.Path,
    folder: ShotsFolder,
    *,
    threads: int = 1,
    estimate: FlowEstimator = film_flow,
    on_progress: Progress = no_progress,
) -> FilmReport | SkippedFilm:
    """Cuts one film into clips and writes them; only reads a film that is finished already.

    The same film and settings give the same rows and bytes, in any process. In memory are a few
    seconds of small frames, or one clip.

    Args:
        path: The film's absolute path, local or in a bucket.
        folder: Shots folder to write into, with the settings.
        threads: Number of decoder threads.
        estimate: Function that estimates the optical flow.
        on_progress: Called with the part of the work, and its seconds of film so far and in total.

    Returns:
        The film's report; or why it cannot be used, which is noted in the folder too.

    Raises:
        UserError: The folder cannot be written.
    """
    cv2.setNumThreads(1)
    try:
        with film_errors():
            content = film_content(path)
        film = film_id(path, content=content)
        folder.unskip(path_id(path))
        if folder.is_finished(film):
            if (report := folder.report(film)).content == content:
                return report
            raise FilmError(  # 32 bits of the contents agree
                f"{path}: its id {film} is that of another film that was cut before, "
                f"{report.name}: give it another name, in Latin letters or digits"
            )
        with _local(path) as local:
            cutter = _Cutter(path, local, folder.settings, threads=threads, flow=estimate)
            analysis = cutter.analyze(on_progress)
            with folder.writing(film) as writer:
                for row, data in cutter.clips(analysis, on_progress):
                    writer.add(row, data)
                report = cutter.report(analysis, writer.rows, film=film, content=content)
                writer.report = report
            return report
    except FilmError as error:
        skipped = SkippedFilm(film=path_id(path), name=printable(path.name), reason=str(error))
        folder.skip(skipped)
        return skipped


@contextlib.contextmanager
def _local(path: epath.Path) -> Iterator[Path]:
    """Makes a film a local file: copies it temporarily if it is in a bucket."""
    if not is_bucket(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"film{path.suffix}"
        with (
            film_errors(),
            user_errors(path, "cannot be copied", hint="check the path and the free space"),
            path.open("rb") as source,
            copy.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _BLOCK)
        yield copy


class _Cutter:
    """Cuts one film in two passes: `analyze`, then `clips`."""

    def __init__(
        self,
        path: epath.Path,
        local: Path,
        settings: FilmSettings,
        *,
        threads: int,
        flow: FlowEstimator,
    ):
        self._path, self._local, self._settings = path, local, settings
        self._threads, self._flow = threads, flow
        self._name = printable(path.name)

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turns whatever a decoder or a filter raises into FilmError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")[:_MAX_REASON]
            raise FilmError(
                f"{self._path}: cannot be decoded ({type(error).__name__}: {reason}): copy it "
                "again, or convert it"
            ) from error

    def analyze(self, on_progress: Progress) -> FilmAnalysis:
        """Makes the first pass."""
        what = f"{self._name}: pass 1 of 2 (cuts), seconds of film"
        with self._decoding():
            analysis = analyze_film(
                self._local,
                self._settings,
                name=str(self._path),
                threads=self._threads,
                on_progress=lambda done, total: on_progress(what, int(done), math.ceil(total)),
            )
        on_progress(what, whole := math.ceil(analysis.seconds), whole)
        return analysis

    def clips(
        self, analysis: FilmAnalysis, on_progress: Progress
    ) -> Iterator[tuple[ClipRow, bytes]]:
        """Yields the row of each candidate with its MP4, or with a picture if it is dropped."""
        what, whole = (
            f"{self._name}: pass 2 of 2 (clips), seconds of film",
            math.ceil(analysis.seconds),
        )
        settings = self._settings
        kept: list[PerceptualHash] = []  # 8 kilobytes each
        with (
            self._decoding(),
            open_film(self._local, name=str(self._path), threads=self._threads) as reader,
        ):
            for number, (candidate, frames) in enumerate(self._cut(reader, analysis)):
                motion, look = clip_motion(frames, estimate=self._flow), perceptual_hash(frames)
                reason = self._drop_reason(frames, candidate, motion, analysis)
                if reason is None and is_duplicate(
                    look, kept, difference=settings.duplicate_difference
                ):
                    reason = "duplicate"
                row = ClipRow(
                    clip=number,
                    scene=candidate.scene,
                    start=round(candidate.start, 4),
                    end=round(candidate.end, 4),
                    dropped=reason,
                    motion_value=round(motion.value, 4),
                    flow=tuple(round(value, 4) for value in motion.flow),
                    digest="",
                )
                if reason is None:
                    kept.append(look)
                    yield row, encode_mp4(frames, fps=settings.fps)
                else:
                    picture = encode_quick(frames[0], rows=_PICTURE_ROWS, quality=_PICTURE_QUALITY)
                    yield row, picture
                on_progress(what, int(row.end), whole)
        on_progress(what, whole, whole)

    def _cut(self, reader: VideoReader, analysis: FilmAnalysis) -> Iterator[tuple[Candidate, Clip]]:
        """Yields the fitted frames of each clip; pixels of other frames are not made."""
        frames, settings = enumerate(reader.frames()), self._settings
        for candidate in analysis.candidates:
            pictures: dict[int, UInt8[np.ndarray, "h w 3"]] = {}
            wanted = set(candidate.frames)
            while wanted:
                number, frame = next(frames, (-1, None))
                if frame is None or frame.time != analysis.times[number]:
                    raise FilmError(
                        f"{reader.name}: expected the same frames when it is read again, found "
                        f"others from {analysis.times[number]:.3f} seconds on: copy or convert it"
                    )
                if number in wanted:
                    wanted.remove(number)
                    pictures[number] = fitted(
                        frame.rgb(),
                        bars=analysis.scene_bars[candidate.scene],
                        height=settings.height,
                        width=settings.width,
                        fit=settings.fit,
                    )
            yield candidate, np.stack([pictures[number] for number in candidate.frames])

    def _drop_reason(
        self, frames: Clip, candidate: Candidate, motion: ClipMotion, analysis: FilmAnalysis
    ) -> DropReason | None:
        """Returns why a clip is useless by itself, or None."""
        times = analysis.times[list(candidate.frames)]
        if is_credits(frames, letters=self._settings.credits_letters):
            return "credits"  # most of them are nearly black
        if brightness(frames) < self._settings.black_below:
            return "black"
        if any(((times >= start) & (times < end)).any() for start, end in analysis.flashes):
            return "flash"
        return "still" if motion.share < self._settings.still_share else None

    def report(
        self, analysis: FilmAnalysis, rows: Sequence[ClipRow], *, film: str, content: str
    ) -> FilmReport:
        """Returns the report of the film."""
        reasons, flow = collections.Counter(row.dropped for row in rows), self._flow
        return FilmReport(
            film=film,
            name=self._name,
            seconds=round(analysis.seconds, 4),
            missing=round(analysis.missing, 4),
            fps=round(analysis.fps, 4),
            height=analysis.height,
            width=analysis.width,
            bars=analysis.bars,
            other_bars=sum(bars != analysis.bars for bars in analysis.scene_bars),
            cuts=tuple(round(one.time, 4) for one in analysis.breaks),
            scenes=analysis.scenes,
            short_scenes=analysis.short_scenes,
            kept=reasons.pop(None, 0),
            dropped={str(reason): count for reason, count in sorted(reasons.items())},
            damaged=analysis.damaged,
            skipped=analysis.skipped,
            content=content,
            flow=getattr(getattr(flow, "func", flow), "__qualname__", type(flow).__qualname__),
        )
