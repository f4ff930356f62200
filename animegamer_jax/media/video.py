"""Clips and pictures of a game: H.264 files, the storyboard, and writing that leaves no halves."""

import contextlib
import functools
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from av.container import InputContainer, OutputContainer
from av.error import FFmpegError
from av.video.reformatter import ColorRange, Colorspace
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from animegamer_jax.errors import UserError

FRAMES_PER_SECOND = 8
MAX_PANELS = 60
_LEAST_ROWS = 240  # of a saved clip: players show smaller ones as a stamp

Number = int | float

# Constant, so that the same frames give the same bytes (`encode_mp4`).
_LOSSLESS_ENCODER = {"qp": "0", "preset": "ultrafast", "x264-params": "rc-lookahead=0:mbtree=0"}
_ENCODER = {"crf": "18", "preset": "veryfast", "x264-params": "rc-lookahead=0:mbtree=0"}
_BT709 = 1  # the number of BT.709 in H.264's tables of primaries and transfer functions


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old content or all of the new, never a half.

    The bytes go to `<name>.part` in the same folder and are renamed when they are on the disk;
    after a failure or Ctrl-C the part is removed. A part that a killed process left behind is
    overwritten by the next write.

    Raises:
        OSError: full disk, read-only folder; the old content of `path` is untouched.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_bt709(
    container: OutputContainer,
    frames: Iterable[UInt8[np.ndarray, "h w 3"]],
    *,
    height: int,
    width: int,
    fps: int,
    options: Mapping[str, str],
) -> None:
    """Frames as a container's only stream: H.264, 4:2:0, BT.709, one encoder thread.

    4:2:0 needs even sides: an odd one is made even by repeating the last row or column.
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
        whole = np.ascontiguousarray(np.pad(array, edges, mode="edge"))
        frame = av.VideoFrame.from_ndarray(whole, format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
        )
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def encode_mp4(frames: UInt8[np.ndarray, "f h w 3"], *, fps: int = FRAMES_PER_SECOND) -> bytes:
    """H.264 (4:2:0, BT.709, constant quality 18) in an MP4.

    Odd sides are made even (`write_bt709`). The same frames give the same bytes: one encoder
    thread, and no look-ahead, whose macroblock tree was measured to give up to 15 different files
    for one small clip (x264 as PyAV 18 ships it); a clip without it is up to half as large again.
    """
    height, width = frames.shape[1:3]
    if frames.shape[0] == 0 or height == 0 or width == 0:
        raise ValueError(f"a clip needs at least one pixel, got frames of shape {frames.shape}")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        write_bt709(container, frames, height=height, width=width, fps=fps, options=_ENCODER)
    return buffer.getvalue()


def encode_lossless_mp4(
    frames: UInt8[np.ndarray, "f h w 3"], *, fps: int = FRAMES_PER_SECOND
) -> bytes:
    """H.264 without loss, of red, green and blue as they are, in an MP4: for small clips to learn.

    Any size, odd ones included; few players show it. The same frames give the same bytes.
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
    """Encodes and writes one clip in whole (`encode_mp4`, `write_whole`).

    Raises:
        OSError: the clip cannot be written.
    """
    write_whole(path, encode_mp4(frames, fps=fps))


def join_mp4(clips: Sequence[Path], path: Path, *, fps: int = FRAMES_PER_SECOND) -> None:
    """Clips of one size as one clip, encoded anew; only one is in memory at a time.

    Raises:
        UserError: a clip cannot be read, or differs in size from the first.
        ValueError: no clips.
        OSError: the clip cannot be written.
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

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        write_bt709(container, frames(), height=height, width=width, fps=fps, options=_ENCODER)
    write_whole(path, buffer.getvalue())


@contextlib.contextmanager
def _open_mp4(source: Path | io.BytesIO, name: Path | str) -> Iterator[InputContainer]:
    try:
        file = str(source) if isinstance(source, Path) else source
        with av.open(file, mode="r") as container:
            if not container.streams.video:
                raise UserError(f"{name}: expected a video, found a file without a video stream")
            yield container
    except FileNotFoundError as error:
        raise UserError(f"{name}: expected a video, found no such file") from error
    except (FFmpegError, OSError) as error:
        raise UserError(f"{name}: expected a video, found: {error.strerror}") from error


def check_mp4(path: Path) -> None:
    """Reads a clip's head, not its frames.

    Raises:
        UserError: the file is missing or holds no video.
    """
    with _open_mp4(path, path):
        pass


def measure_mp4(path: Path) -> tuple[int, int, int]:
    """Rows, columns and number of packets, which is that of frames, without decoding one.

    Raises:
        UserError: the file is missing or holds no video.
    """
    with _open_mp4(path, path) as container:
        stream = container.streams.video[0]
        count = sum(packet.size > 0 for packet in container.demux(stream))
        return stream.height, stream.width, count


def read_mp4(path: Path) -> UInt8[np.ndarray, "f h w 3"]:
    """All frames of a clip.

    Raises:
        UserError: the file is missing or holds no video.
    """
    return _read_frames(path, path)


def decode_mp4(
    clip: bytes, *, name: str = "clip", num_frames: int | None = None
) -> UInt8[np.ndarray, "f h w 3"]:
    """Frames of a clip in memory, on one thread.

    Args:
        clip: the file's bytes.
        name: what a message calls it.
        num_frames: at most so many, from the start; None: all.

    Raises:
        UserError: the bytes hold no video.
    """
    return _read_frames(io.BytesIO(clip), name, num_frames)


def _to_rgb(frame: av.VideoFrame) -> UInt8[np.ndarray, "h w 3"]:
    if frame.format.name == "gbrp":  # lossless: what a general conversion gives, in half the time
        return frame.to_ndarray()
    return frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709)


def _read_frames(
    source: Path | io.BytesIO, name: Path | str, num_frames: int | None = None
) -> UInt8[np.ndarray, "f h w 3"]:
    with _open_mp4(source, name) as container:
        if isinstance(source, io.BytesIO):
            container.streams.video[0].codec_context.thread_count = 1
        decoded = itertools.islice(container.decode(video=0), num_frames)
        frames = [_to_rgb(frame) for frame in decoded]
    if not frames:
        raise UserError(f"{name}: expected a video, found no frames")
    return np.stack(frames)


class Panel(NamedTuple):
    """One turn on the storyboard.

    `frames` are the three or four pictures to show. `changes` and `meters` hold the same names
    in the order of drawing; changes are signed steps, meters run from 0 to 100.
    """

    turn: int
    instruction: str
    frames: UInt8[np.ndarray, "k h w 3"]
    motion_level: int
    changes: Mapping[str, int]
    meters: Mapping[str, int]


def enlarged_size(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a clip after `enlarge`."""
    factor = max(1, -(-_LEAST_ROWS // height))
    return factor * height, factor * width


def enlarge(frames: UInt8[np.ndarray, "f h w 3"]) -> UInt8[np.ndarray, "f y x 3"]:
    """A clip of fewer than 240 rows, enlarged a whole number of times to that or more (cubic)."""
    height, width = enlarged_size(*frames.shape[1:3])
    if height == frames.shape[1]:
        return frames
    size = width, height
    larger = (Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames)
    return np.stack([np.asarray(frame) for frame in larger])


def pick_frames(
    frames: UInt8[np.ndarray, "f h w 3"], *, count: int = 4
) -> UInt8[np.ndarray, "k h w 3"]:
    """`count` frames spread evenly over a clip, its first and last among them."""
    picks = np.linspace(0, len(frames) - 1, num=min(count, len(frames))).round().astype(int)
    return frames[picks]


def storyboard(panels: Sequence[Panel], *, title: str = "Game", note: str = "") -> bytes:
    """A game at a glance, as a PNG: a row a turn, in up to three columns read downwards.

    Of a longer game the last `MAX_PANELS` turns are drawn.
    """
    omitted = max(0, len(panels) - MAX_PANELS)
    cards = [_card(panel) for panel in panels[omitted:]]
    columns = max(1, min(3, -(-len(cards) // 10)))
    rows = -(-len(cards) // columns)
    width = max((card.width for card in cards), default=900)
    height = max((card.height for card in cards), default=0)
    margin, gap, header = 48, 16, 92
    picture = Image.new(
        "RGB",
        (
            2 * margin + columns * width + (columns - 1) * 2 * gap,
            margin + header + rows * (height + gap) - gap * (rows > 0) + margin,
        ),
        _PAPER,
    )
    draw = ImageDraw.Draw(picture)
    if omitted:
        note = f"turns {omitted + 1} to {len(panels)}" + (f"  ·  {note}" if note else "")
    for text, size, top, ink in ((title, 34, margin - 10, _INK), (note, 18, margin + 38, _SOFT)):
        font = _font(text, size)
        draw.text((margin, top), _fit(text, font, picture.width - 2 * margin), fill=ink, font=font)
    for index, card in enumerate(cards):
        column, row = divmod(index, rows)
        left = margin + column * (width + 2 * gap)
        picture.paste(card, (left, margin + header + row * (height + gap)))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


_PAPER, _CARD, _EDGE = (246, 246, 243), (255, 255, 255), (228, 228, 223)
_INK, _SOFT, _TRACK = (34, 37, 44), (122, 126, 136), (233, 234, 236)
_UP, _DOWN = (31, 138, 91), (204, 73, 63)
_ACCENT = (74, 94, 190)
_METER_INKS = {"stamina": (226, 138, 58), "social": (74, 134, 206), "entertainment": (150, 98, 190)}

_SCALE = 2  # cards are drawn at twice their size and halved, which smooths corners and bars
_FRAME_BOX = (216, 200)
_TEXT_WIDTH, _METERS_WIDTH = 372, 330
_LABELLED = re.compile(r"\s*([^:;]{1,14}):\s*([^;]*?)[\s.]*(?:;|$)")


def _card(panel: Panel) -> Image.Image:
    """One turn: its number, the frames, the instruction, the motion level and the meters."""
    frame_height, frame_width = panel.frames.shape[1:3]
    zoom = min(_FRAME_BOX[0] / frame_width, _FRAME_BOX[1] / frame_height)
    size = max(1, round(frame_width * zoom)), max(1, round(frame_height * zoom))
    pad, gap, number = 18, 8, 64
    height = 2 * pad + max(144, size[1])
    text_left = number + len(panel.frames) * (size[0] + gap) - gap + 30
    meters_left = text_left + _TEXT_WIDTH + 30
    canvas = _Canvas(meters_left + _METERS_WIDTH + 24, height)
    canvas.box(0, 0, canvas.width - 1, height - 1, radius=14, fill=_CARD, edge=_EDGE)
    canvas.text(number / 2, height / 2, str(panel.turn), size=26, ink=_SOFT, anchor="mm")
    for index, frame in enumerate(panel.frames):
        canvas.picture(number + index * (size[0] + gap), (height - size[1]) / 2, frame, size=size)
    top = (height - 144) / 2
    _draw_instruction(canvas, text_left, top, panel.instruction)
    _draw_state(canvas, meters_left, top, panel)
    return canvas.finished()


def _draw_instruction(canvas: "_Canvas", left: Number, top: Number, instruction: str) -> None:
    """Labels beside values where the text has that form, plain wrapped text otherwise."""
    parts = _LABELLED.findall(instruction)
    labelled = len(parts) >= 2 and len(parts) == len(instruction.rstrip("; ").split(";"))
    lines: list[tuple[str, str]] = []
    indent = 100 if labelled else 0
    for label, value in parts if labelled else [("", instruction)]:
        wrapped = _wrap(value, _font(value, 19 * _SCALE), (_TEXT_WIDTH - indent) * _SCALE)
        lines += [(label if i == 0 else "", line) for i, line in enumerate(wrapped)]
    if len(lines) > 6:
        lines = [*lines[:5], (lines[5][0], lines[5][1] + " …")]
    pitch = 24
    top += (144 - pitch * len(lines)) / 2
    for index, (label, line) in enumerate(lines):
        y = top + (index + 0.5) * pitch
        canvas.text(left, y, label, size=15, ink=_SOFT)
        canvas.text(left + indent, y, line, size=19, ink=_INK, width=_TEXT_WIDTH - indent + 12)


def _draw_state(canvas: "_Canvas", left: Number, top: Number, panel: Panel) -> None:
    """The motion level as five pips, then a bar a meter with its value and change."""
    bar_left, bar_right = left + 122, left + _METERS_WIDTH - 72
    right = left + _METERS_WIDTH
    y = top + 18
    canvas.text(left, y, "Motion level", size=15, ink=_SOFT)
    for pip in range(5):
        x = bar_left + pip * 19
        lit = pip < panel.motion_level
        canvas.box(x, y - 6, x + 13, y + 6, radius=4, fill=_ACCENT if lit else _TRACK)
    canvas.text(right - 36, y, str(panel.motion_level), size=17, ink=_INK, anchor="rm")
    for row, (name, meter) in enumerate(panel.meters.items(), start=1):
        y = top + 18 + row * 36
        change = panel.changes[name]
        canvas.text(left, y, name.capitalize(), size=15, ink=_SOFT)
        canvas.box(bar_left, y - 5, bar_right, y + 5, radius=5, fill=_TRACK)
        if meter > 0:
            end = bar_left + max(10, (bar_right - bar_left) * meter / 100)
            canvas.box(bar_left, y - 5, end, y + 5, radius=5, fill=_METER_INKS.get(name, _ACCENT))
        canvas.text(right - 36, y, str(meter), size=17, ink=_INK, anchor="rm")
        ink = _UP if change > 0 else _DOWN if change < 0 else _SOFT
        canvas.text(right, y, f"{change:+d}" if change else "0", size=15, ink=ink, anchor="rm")


class _Canvas:
    """A drawing in final pixels that keeps `_SCALE` times as many."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def box(
        self,
        left: Number,
        top: Number,
        right: Number,
        bottom: Number,
        *,
        radius: Number,
        fill,
        edge=None,
    ) -> None:
        corners = [value * _SCALE for value in (left, top, right, bottom)]
        self.draw.rounded_rectangle(
            corners, radius * _SCALE, fill=fill, outline=edge, width=_SCALE if edge else 0
        )

    def text(
        self,
        x: Number,
        y: Number,
        text: str,
        *,
        size: int,
        ink,
        anchor: str = "lm",
        width: Number = 0,
    ) -> None:
        font = _font(text, size * _SCALE)
        if width:
            text = _fit(text, font, width * _SCALE)
        self.draw.text((x * _SCALE, y * _SCALE), text, fill=ink, font=font, anchor=anchor)

    def picture(self, x: Number, y: Number, frame: np.ndarray, *, size: tuple[int, int]) -> None:
        width, height = size[0] * _SCALE, size[1] * _SCALE
        picture = Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)
        mask = Image.new("L", (width, height))
        ImageDraw.Draw(mask).rounded_rectangle((0, 0, width - 1, height - 1), 8 * _SCALE, fill=255)
        self.image.paste(picture, (round(x * _SCALE), round(y * _SCALE)), mask)

    def finished(self) -> Image.Image:
        return self.image.reduce(_SCALE)


# Pillow's own font knows English only; these are looked for on the system for other letters.
_OTHER_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJKjp-Regular.otf",
    "Hiragino Sans GB.ttc",
    "YuGothM.ttc",
    "msgothic.ttc",
    "DejaVuSans.ttf",
    "Arial Unicode.ttf",
    "arial.ttf",
)


@functools.lru_cache(maxsize=64)
def _load_font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont | None:
    try:
        return ImageFont.truetype(name, size) if name else ImageFont.load_default(size=size)
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _has_letter(name: str, letter: str) -> bool:
    """Whether a font draws this letter otherwise than one that no font has."""
    font = _load_font(name, 16)
    if font is None or letter.isspace():
        return font is not None
    drawn, missing = (np.array(font.getmask(text)) for text in (letter, "\ufdd0"))
    return not np.array_equal(drawn, missing)


def _font(text: str, size: int):
    """Pillow's scalable font, or the first on this system that has all letters of the text."""
    for name in ("", *_OTHER_FONTS):
        if all(_has_letter(name, letter) for letter in set(text)):
            return _load_font(name, size)
    return _load_font("", size)


def _fit(text: str, font, width: Number) -> str:
    """The text, cut with dots where it is wider than `width`."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _wrap(text: str, font, width: Number) -> list[str]:
    """Lines no wider than `width`; a word that is wider alone is broken between letters."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines
