"""Reads a film as a stream of frames with their times, whatever its container and codec are.

Frames arrive one by one, as the decoder keeps them; pixels are made when they are asked for. A
damaged place is skipped, and reading continues behind it if the decoder can. Where the film's
clock jumps, as in streams that were joined, its time continues.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from fractions import Fraction

import av
import av.logging
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError, InvalidDataError
from av.stream import Disposition
from av.video.reformatter import Colorspace, Interpolation, VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import UInt8

from animegamer_jax.errors import UserError, printable
from animegamer_jax.media.containers import OPTIONS, check_codec, open_input

_HD_ROWS = 720  # untagged films have BT.709 colours from here on, BT.601 below
_HINT = "copy it again, or convert it to H.264 in MP4"
_UNSPECIFIED = 2  # libav's number of an untagged colour space
_BACK, _AHEAD = 1.0, 3600.0  # seconds; a larger jump is another clock
_STILL_PICTURES = Disposition.attached_pic | Disposition.timed_thumbnails  # an album's cover


class FilmError(UserError):
    """A film cannot be used; the message says why, in one printable line."""

    def __init__(self, message: str):
        super().__init__(printable(message))


@contextlib.contextmanager
def film_errors() -> Iterator[None]:
    """Turns errors into FilmError, so that this film is skipped and the run continues."""
    try:
        yield
    except UserError as error:
        raise FilmError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class FilmFrame:
    """One frame of a film.

    Attributes:
        time: Seconds since the first frame.
        reader: The film's reader.
        frame: The decoder's frame.
    """

    time: float
    reader: "VideoReader"
    frame: av.VideoFrame

    def rgb(
        self, *, height: int | None = None, width: int | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the picture as it is shown, scaled to a size if one is given."""
        return self.reader.picture(self.frame, height=height, width=width, kind="rgb24")

    def grey(self) -> UInt8[np.ndarray, "h w"]:
        """Returns its brightness as it is shown, 0 to 255."""
        return self.reader.picture(self.frame, height=None, width=None, kind="gray")


class VideoReader:
    """An open film.

    Attributes:
        name: The film's name in messages.
        height, width: Rows and columns as shown, after rotation and with square pixels.
        announced: Seconds that the file announces; None if it does not, or its clock jumped.
        damaged: Number of places so far that could not be read.
        skipped: Number of frames skipped so far because they were damaged or out of order.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, name: str):
        self.name, self.damaged, self.skipped = name, 0, 0
        self._container, self._stream = container, stream
        self._scalers: dict[tuple[int, int, str], VideoReformatter] = {}
        self._frames = self._decode()
        self._first = next(self._frames, None)
        if self._first is None:
            raise FilmError(f"{name}: expected a film, found no frame that can be read: {_HINT}")
        self._turns = round(self._first.rotation / 90) % 4
        self._stored = self._first.height, _square_width(self._first.width, stream)
        self.height, self.width = self._stored[:: -1 if self._turns % 2 else 1]
        self.announced = _announced(container, stream)

    def frames(self) -> Iterator[FilmFrame]:
        """Yields all frames that can be read, in order of time; only once."""
        start, last = 0.0, -np.inf  # the clock at the film's start
        usual = 1 / float(self._stream.average_rate or 25)
        for frame in itertools.chain([self._first], self._frames):
            assert frame is not None
            seconds = last + usual if frame.time is None else frame.time - start
            if last < 0:
                start, seconds = frame.time or 0.0, 0.0
            elif not last - _BACK <= seconds <= last + _AHEAD:
                start, seconds = start + seconds - (last + usual), last + usual
                self.announced = None  # by the same clock
            if seconds > last:
                last = seconds
                yield FilmFrame(float(seconds), self, frame)
            else:
                self.skipped += 1
        self._first = None

    def picture(
        self, frame: av.VideoFrame, *, height: int | None, width: int | None, kind: str
    ) -> np.ndarray:
        """Converts a decoder's frame to pixels: colours, size and rotation."""
        height, width = height or self.height, width or self.width
        rows, columns = (width, height) if self._turns % 2 else (height, width)
        guess = Colorspace.ITU709 if min(self._stored) >= _HD_ROWS else Colorspace.ITU601
        smaller = rows < frame.height
        scaler = self._scalers.setdefault((rows, columns, kind), VideoReformatter())
        scaled = scaler.reformat(
            frame,
            width=columns,
            height=rows,
            format=kind,
            src_colorspace=guess if frame.colorspace == _UNSPECIFIED else None,
            interpolation=Interpolation.AREA if smaller else Interpolation.BICUBIC,
            threads=1,
        )
        return np.ascontiguousarray(np.rot90(scaled.to_ndarray(), self._turns))

    def _decode(self) -> Iterator[av.VideoFrame]:
        for packet in self._packets():
            try:
                frames = packet.decode()
            except FFmpegError:
                self.damaged += 1
                continue
            for frame in frames:
                if not isinstance(frame, av.VideoFrame):
                    continue
                if frame.is_corrupt:
                    self.skipped += 1
                else:
                    yield frame

    def _packets(self) -> Iterator[av.Packet]:
        try:
            yield from self._container.demux(self._stream)
        except InvalidDataError:
            self.damaged += 1
        except FFmpegError as error:
            raise FilmError(f"{self.name}: cannot be read: {error.strerror}") from error


def _square_width(width: int, stream: VideoStream) -> int:
    """Returns the width with square pixels; films on DVD have others."""
    ratio = stream.sample_aspect_ratio
    return max(1, round(width * Fraction(ratio))) if ratio else width


def _announced(container: InputContainer, stream: VideoStream) -> float | None:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration else None


@contextlib.contextmanager
def open_film(
    path: os.PathLike[str] | str, *, name: str | None = None, threads: int = 1
) -> Iterator[VideoReader]:
    """Opens a film: a local file in a usual container and codec, see `media.containers`.

    Args:
        path: The file, by an absolute path.
        name: The film's name in messages; None for its path.
        threads: Number of decoder threads; the frames are the same.

    Raises:
        FilmError: It is no film, or has no pictures.
    """
    name = name or os.fspath(path)
    av.logging.set_level(av.logging.PANIC)  # errors are raised or counted, not printed
    if os.path.isfile(path) and not os.path.getsize(path):
        raise FilmError(f"{name}: expected a film, found an empty file: {_HINT}")
    try:
        container = open_input(os.fspath(path), options=OPTIONS)
    except (FFmpegError, OSError) as error:
        raise FilmError(f"{name}: expected a film, found: {error.strerror}: {_HINT}") from error
    with container:
        moving = [s for s in container.streams.video if not s.disposition & _STILL_PICTURES]
        if not moving:
            found = "sound only" if container.streams.audio else "no pictures"
            raise FilmError(f"{name}: expected a film, found {found}: leave it out")
        with film_errors():
            check_codec(moving[0], name)
        moving[0].codec_context.thread_count = threads
        yield VideoReader(container, moving[0], name)
