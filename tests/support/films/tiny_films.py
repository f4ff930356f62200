"""Small films in files, made frame by frame, that several tests share."""

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
from av.stream import Disposition
from av.video.reformatter import ColorRange, Colorspace

_MILLISECOND = Fraction(1, 1000)


def write_frames(
    path: Path,
    frames: Iterable[np.ndarray],
    *,
    fps: int = 24,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    colours: Colorspace = Colorspace.ITU709,
    tagged: bool = True,
    options: dict[str, str] | None = None,
    rotation: int = 0,
    aspect: Fraction | None = None,
) -> Path:
    """A film of these frames in the container of the path's suffix; `times` are in seconds.

    Colours are converted as `colours` says, and the file says so if it is `tagged`.
    """
    frames = iter(frames)
    first = next(frames)
    fast = {"preset": "ultrafast", "crf": "18"} if codec == "libx264" else {}
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=fast)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.thread_count, context.bit_rate = 1, 4_000_000
        context.time_base = _MILLISECOND if times else Fraction(1, fps)
        if aspect:
            context.sample_aspect_ratio = aspect
        if tagged:
            context.colorspace, context.color_range = colours, ColorRange.MPEG
        if rotation:
            stream.set_display_rotation(rotation)
        shown = iter(times) if times else itertools.count()
        for array in itertools.chain([first], frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            frame = frame.reformat(
                format="yuv420p",
                dst_colorspace=colours,
                dst_color_range=ColorRange.MPEG,
            )
            frame.pts = round(next(shown) * 1000) if times else next(shown)
            frame.time_base = context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def texture(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """A smooth coloured picture that is another one for each seed."""
    rng = np.random.default_rng(seed)
    light, colour = rng.uniform(40, 215, (6, 9, 1)), rng.uniform(-40, 40, (6, 9, 3))
    coarse = (light + colour).clip(0, 255).astype(np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def moving(
    num_frames: int, *, height: int = 48, width: int = 72, speed: int = 1, seed: int = 0
) -> list[np.ndarray]:
    """A picture that passes by, `speed` pixels a frame."""
    wide = texture(height, width + speed * num_frames, seed=seed)
    return [wide[:, speed * k : speed * k + width] for k in range(num_frames)]


def rolling(num_frames: int = 17, *, speed: int, ground: int = 0, ink: int = 255) -> np.ndarray:
    """Credits: lines of names that roll upwards by `speed` rows a frame, 240 x 360."""
    lines = 40
    rng = np.random.default_rng(0)
    sheet = np.full((lines * 20 + 300, 360, 3), ground, np.uint8)
    for line in range(lines):
        text = " ".join("".join(rng.choice(list("abcdefghiklmnoprstu"), 6)) for _ in range(2))
        place = 80, 20 * line + 20
        cv2.putText(sheet, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.5, (ink,) * 3, 1, cv2.LINE_AA)
    return np.stack([sheet[20 + speed * k :][:240] for k in range(num_frames)])


def write_sound(path: Path, *, cover: bool) -> Path:
    """A file of sound, with a picture of its cover or without."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=8000, layout="mono")
        picture = container.add_stream("mjpeg", rate=1) if cover else None
        if picture:
            picture.height, picture.width, picture.pix_fmt = 48, 72, "yuvj420p"
            picture.disposition = Disposition.attached_pic
        silence = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        silence.sample_rate = 8000
        for packet in [*sound.encode(silence), *sound.encode()]:
            container.mux(packet)
        if picture:
            image = av.VideoFrame.from_ndarray(texture(48, 72), format="rgb24")
            container.mux(picture.encode(image.reformat(format="yuvj420p")))
            container.mux(picture.encode())
    return path
