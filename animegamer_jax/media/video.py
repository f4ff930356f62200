"""Clips of a game: H.264 files, encoded, joined, read and enlarged.

Functions that read raise `UserError` if a clip is missing or holds no video, functions that write
raise OSError if the clip cannot be written.
"""

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer, OutputContainer
from av.error import FFmpegError
from av.video.reformatter import ColorRange, Colorspace
from jaxtyping import UInt8
from PIL import Image

from animegamer_jax.errors import UserError
from animegamer_jax.media.containers import CLIP_FORMAT, CLIP_OPTIONS, check_codec, open_input
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.untrusted import check_file

FRAMES_PER_SECOND = 8
_MIN_ROWS = 240  # of a saved clip: players show smaller ones as a stamp

_NO_LOOK_AHEAD = {"x264-params": "rc-lookahead=0:mbtree=0"}
# Constant, so that the same frames give the same bytes (`encode_mp4`).
_LOSSLESS_ENCODER = {"qp": "0", "preset": "ultrafast", **_NO_LOOK_AHEAD}
ENCODER = {"crf": "18", "preset": "veryfast", **_NO_LOOK_AHEAD}
"""Options of x264 for clips and films that are watched."""

_MAX_BYTES = 400_000_000  # of a decoded clip: 16 times a clip of the released model
_BT709 = 1  # number of BT.709 in H.264's tables of primaries and transfer functions


def write_bt709(
    container: OutputContainer,
    frames: Iterable[UInt8[np.ndarray, "h w 3"]],
    *,
    height: int,
    width: int,
    fps: int,
    options: Mapping[str, str],
) -> None:
    """Writes frames as a container's only stream: H.264, 4:2:0, BT.709, one encoder thread.

    4:2:0 needs even sides: an odd side is padded by repeating the last row or column.
    """
    stream = container.add_stream("libx264", rate=fps, options=dict(options))
    stream.height, stream.width = height + height % 2, width + width % 2
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.thread_count = 1
    context.colorspace = Colorspace.ITU709
    context.color_range = ColorRange.MPEG
    context.color_primaries = context.color_trc = _BT709
    edges = ((0, height % 2), (0, width % 2), (0, 0))
    for array in frames:
        padded = np.ascontiguousarray(np.pad(array, edges, mode="edge"))
        frame = av.VideoFrame.from_ndarray(padded, format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
        )
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def encode_mp4(
    frames: UInt8[np.ndarray, "f h w 3"], *, fps: int = FRAMES_PER_SECOND, quality: int = 18
) -> bytes:
    """Encodes frames as H.264 (4:2:0, BT.709) in an MP4, at a constant quality: 0 is the best.

    Odd sides are padded (`write_bt709`). The same frames give the same bytes: one encoder thread,
    and no look-ahead, whose macroblock tree gave up to 15 different files for one small clip (x264
    in PyAV 18). Without it a clip is up to half as large again.
    """
    height, width = frames.shape[1:3]
    if frames.shape[0] == 0 or height == 0 or width == 0:
        raise ValueError(f"a clip needs at least one pixel, got frames of shape {frames.shape}")
    return _encode(frames, height=height, width=width, fps=fps, quality=quality)


def _encode(
    frames: Iterable[UInt8[np.ndarray, "h w 3"]],
    *,
    height: int,
    width: int,
    fps: int,
    quality: int = 18,
) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        options = ENCODER | {"crf": str(quality)}
        write_bt709(container, frames, height=height, width=width, fps=fps, options=options)
    return buffer.getvalue()


def encode_film(
    frames: Iterable[UInt8[np.ndarray, "h w 3"]],
    *,
    height: int,
    width: int,
    fps: int = FRAMES_PER_SECOND,
) -> bytes:
    """Encodes frames of one size as `encode_mp4` does, without holding all of them."""
    return _encode(frames, height=height, width=width, fps=fps)


def encode_lossless_mp4(
    frames: UInt8[np.ndarray, "f h w 3"], *, fps: int = FRAMES_PER_SECOND
) -> bytes:
    """Encodes frames as lossless H.264 of RGB in an MP4, for small clips to train on.

    Takes any size; few video players support it. The same frames give the same bytes.
    """
    if 0 in frames.shape:
        raise ValueError(f"a clip needs at least one pixel, got frames of shape {frames.shape}")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=fps, options=_LOSSLESS_ENCODER)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24"
        stream.codec_context.thread_count = 1
        for array in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def write_mp4(
    path: Path, frames: UInt8[np.ndarray, "f h w 3"], *, fps: int = FRAMES_PER_SECOND
) -> None:
    """Encodes a clip and writes it atomically (`encode_mp4`, `write_whole`)."""
    write_whole(path, encode_mp4(frames, fps=fps))


def join_mp4(clips: Sequence[Path], path: Path, *, fps: int = FRAMES_PER_SECOND) -> None:
    """Joins clips of one size to one clip and encodes it again; reads one clip at a time.

    Raises:
        UserError: A clip's size differs from the first.
        ValueError: There are no clips.
    """
    if not clips:
        raise ValueError("no clips to join")
    height, width = read_mp4(clips[0]).shape[1:3]

    def frames() -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        for clip in clips:
            found = read_mp4(clip)
            if found.shape[1:3] != (height, width):
                raise UserError(
                    f"{clip}: expected {width} x {height} pixels, as {clips[0].name} has, found "
                    f"{found.shape[2]} x {found.shape[1]}"
                )
            yield from found

    write_whole(path, _encode(frames(), height=height, width=width, fps=fps))


@contextlib.contextmanager
def _open_mp4(source: Path | io.BytesIO, name: Path | str) -> Iterator[InputContainer]:
    # Only MP4, from this file: FFmpeg would open lists of other files, too.
    if isinstance(source, Path):
        check_file(source, expected="a video")
    try:
        file = str(source.absolute()) if isinstance(source, Path) else source
        with open_input(file, format=CLIP_FORMAT, options=CLIP_OPTIONS) as container:
            if not container.streams.video:
                raise UserError(f"{name}: expected a video, found a file without a video stream")
            stream = container.streams.video[0]
            check_codec(stream, name)
            _check_size(stream.frames, stream.height, stream.width, name)
            stream.codec_context.options = {"max_pixels": str(_MAX_BYTES // 3)}
            yield container
    except FileNotFoundError as error:
        raise UserError(f"{name}: expected a video, found no such file") from error
    except (FFmpegError, OSError) as error:
        raise UserError(f"{name}: expected a video, found: {error.strerror}") from error


def _check_size(num_frames: int, height: int, width: int, name: Path | str) -> None:
    if max(1, num_frames) * height * width * 3 > _MAX_BYTES:
        raise UserError(
            f"{name}: expected a clip of at most {_MAX_BYTES // 1_000_000} MB of pixels, found "
            f"{num_frames} frames of {width} x {height}"
        )


def check_mp4(path: Path) -> None:
    """Checks a clip's header, without decoding its frames."""
    with _open_mp4(path, path):
        pass


def measure_mp4(path: Path) -> tuple[int, int, int]:
    """Returns rows, columns and frames of a clip; counts packets instead of decoding frames."""
    with _open_mp4(path, path) as container:
        stream = container.streams.video[0]
        count = sum(packet.size > 0 for packet in container.demux(stream))
        return stream.height, stream.width, count


def read_mp4(path: Path) -> UInt8[np.ndarray, "f h w 3"]:
    """Reads all frames of a clip."""
    return _read_frames(path, path)


def decode_mp4(
    clip: bytes, *, name: str = "clip", num_frames: int | None = None
) -> UInt8[np.ndarray, "f h w 3"]:
    """Decodes a clip in memory, on one thread.

    Args:
        clip: Bytes of the file.
        name: Name of the clip in error messages.
        num_frames: Number of frames to decode, from the start; None: all.
    """
    return _read_frames(io.BytesIO(clip), name, num_frames)


def _to_rgb(frame: av.VideoFrame) -> UInt8[np.ndarray, "h w 3"]:
    if frame.format.name == "gbrp":  # lossless: same as the general conversion, in half the time
        return frame.to_ndarray()
    return frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709)


def _read_frames(
    source: Path | io.BytesIO, name: Path | str, num_frames: int | None = None
) -> UInt8[np.ndarray, "f h w 3"]:
    with _open_mp4(source, name) as container:
        if isinstance(source, io.BytesIO):
            container.streams.video[0].codec_context.thread_count = 1
        frames: list[UInt8[np.ndarray, "h w 3"]] = []
        for frame in itertools.islice(container.decode(video=0), num_frames):
            _check_size(len(frames) + 1, frame.height, frame.width, name)
            frames.append(_to_rgb(frame))
    if not frames:
        raise UserError(f"{name}: expected a video, found no frames")
    return np.stack(frames)


def enlarged_size(height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of a clip after `enlarge`."""
    factor = max(1, -(-_MIN_ROWS // height))
    return factor * height, factor * width


def enlarge(frames: UInt8[np.ndarray, "f h w 3"]) -> UInt8[np.ndarray, "f y x 3"]:
    """Enlarges a clip of fewer than 240 rows by the smallest whole factor that suffices (cubic)."""
    height, width = enlarged_size(*frames.shape[1:3])
    if height == frames.shape[1]:
        return frames
    size = width, height
    larger = (Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames)
    return np.stack([np.asarray(frame) for frame in larger])


def shrink(frames: UInt8[np.ndarray, "f y x 3"], factor: int) -> UInt8[np.ndarray, "f h w 3"]:
    """Inverts `enlarge`: keeps the middle of each block of `factor` x `factor` pixels.

    Of an even factor the mean of the middle four, so that the finest detail is blurred.
    """
    if factor == 1:
        return frames
    found = frames.astype(np.float32)
    for axis in (1, 2):
        low, high = (factor - 1) // 2, factor // 2
        take = [np.arange(start, frames.shape[axis], factor) for start in (low, high)]
        found = (found.take(take[0], axis) + found.take(take[1], axis)) / 2
    return found.round().astype(np.uint8)


def pick_frames(
    frames: UInt8[np.ndarray, "f h w 3"], *, count: int = 4
) -> UInt8[np.ndarray, "k h w 3"]:
    """Picks `count` frames spread evenly over a clip, including the first and the last."""
    picks = np.linspace(0, len(frames) - 1, num=min(count, len(frames))).round().astype(int)
    return frames[picks]
