"""Reading a film as a stream of frames with their times, whatever its container and codec.

Frames come one by one, as the decoder keeps them; pixels are made where they are asked for. A
damaged place is left out: what lies behind it is read, as far as the decoder finds its way. Where
the film's clock jumps, as in streams that were joined, its time goes on.
"""

import contextlib
import dataclasses
import itertools
import os
import unicodedata
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

from animegamer_jax.errors import UserError

_HD_ROWS = 720  # a film that does not say so has BT.709 colours from here on, BT.601 below
_MEND = "copy it again, or convert it to H.264 in MP4"
_UNSPECIFIED = 2  # libav's number of a colour space that is not told
_BACK, _AHEAD = 1.0, 3600.0  # seconds by which a clock that goes on may jump


def printable(text: str) -> str:
    """A name in one line that can be written anywhere: names of files are any bytes."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":  # wide spaces
        return character
    return character.encode("unicode_escape").decode()


class FilmError(UserError):
    """A film that cannot be used; the message says why, in one line that can be printed."""

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
        time: seconds since the first frame.
        footage: that it belongs to.
        frame: as the decoder gave it.
    """

    time: float
    footage: "Footage"
    frame: av.VideoFrame

    def rgb(
        self, *, height: int | None = None, width: int | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        """The picture as it is shown; of another size where that is asked for."""
        return self.footage.picture(self.frame, height=height, width=width, kind="rgb24")

    def grey(self) -> UInt8[np.ndarray, "h w"]:
        """Its brightness, 0 to 255, as it is shown."""
        return self.footage.picture(self.frame, height=None, width=None, kind="gray")


class Footage:
    """An open film.

    Attributes:
        name: what messages call it.
        height, width: of the picture as it is shown: turned, and its pixels square.
        announced: seconds that the file says it lasts; None: it does not say, or its clock jumped.
        damaged: number of places so far that could not be read.
        skipped: number of frames so far that were left out: damaged, or out of order.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, name: str):
        self.name, self.damaged, self.skipped = name, 0, 0
        self._container, self._stream = container, stream
        self._scalers: dict[tuple[int, int, str], VideoReformatter] = {}
        self._frames = self._decoded()
        self._first = next(self._frames, None)
        if self._first is None:
            raise FilmError(f"{name}: expected a film, found no frame that can be read: {_MEND}")
        self._turns = round(self._first.rotation / 90) % 4
        self._stored = self._first.height, _square(self._first.width, stream)
        self.height, self.width = self._stored[:: -1 if self._turns % 2 else 1]
        self.announced = _announced(container, stream)

    def frames(self) -> Iterator[FilmFrame]:
        """All frames that can be read, in order of time; once."""
        zero, last = 0.0, -np.inf  # the clock at the film's start
        usual = 1 / float(self._stream.average_rate or 25)
        for frame in itertools.chain([self._first], self._frames):
            assert frame is not None
            seconds = last + usual if frame.time is None else frame.time - zero
            if last < 0:
                zero, seconds = frame.time or 0.0, 0.0
            elif not last - _BACK <= seconds <= last + _AHEAD:
                zero, seconds = zero + seconds - (last + usual), last + usual
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
        """Pixels of a decoder's frame: coloured, scaled, turned."""
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

    def _decoded(self) -> Iterator[av.VideoFrame]:
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
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except InvalidDataError:
                self.damaged += 1
                packet = None
            except FFmpegError as error:
                raise FilmError(f"{self.name}: cannot be read: {error.strerror}") from error
            if packet is None:
                return
            yield packet


def _square(width: int, stream: VideoStream) -> int:
    """The width with square pixels: films on DVD have others."""
    ratio = stream.sample_aspect_ratio
    return max(1, round(width * Fraction(ratio))) if ratio else width


def _announced(container: InputContainer, stream: VideoStream) -> float | None:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration else None


@contextlib.contextmanager
def open_film(
    path: os.PathLike[str] | str, *, name: str | None = None, threads: int = 1
) -> Iterator[Footage]:
    """Opens a film: a local file of any container and codec that PyAV reads.

    Args:
        path: the file.
        name: what messages call it; None: its path.
        threads: of the decoder; the frames are the same.

    Raises:
        FilmError: it is no film, or holds no pictures.
    """
    name, file = name or os.fspath(path), os.path.abspath(path)
    av.logging.set_level(av.logging.PANIC)  # errors are raised or counted: no lines beside ours
    if os.path.isfile(file) and not os.path.getsize(file):
        raise FilmError(f"{name}: expected a film, found an empty file: {_MEND}")
    try:
        # A playlist that calls itself a film may not fetch anything.
        container = av.open(file, mode="r", options={"protocol_whitelist": "file"})
    except (FFmpegError, OSError) as error:
        raise FilmError(f"{name}: expected a film, found: {error.strerror}: {_MEND}") from error
    with container:
        moving = [s for s in container.streams.video if not s.disposition & _PICTURES]
        if not moving:
            found = "sound only" if container.streams.audio else "no pictures"
            raise FilmError(f"{name}: expected a film, found {found}: leave it out")
        moving[0].codec_context.thread_count = threads
        yield Footage(container, moving[0], name)


_PICTURES = Disposition.attached_pic | Disposition.timed_thumbnails  # the cover of an album
