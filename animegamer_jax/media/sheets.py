"""Small pictures of clips: one alone, or several side by side in one file; a quick one."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from animegamer_jax.media import video

_QUALITY = 72


def middle_frame(clip: Path) -> UInt8[np.ndarray, "h w 3"]:
    """Returns the frame in the middle of a clip."""
    frames = video.read_mp4(clip)
    return frames[len(frames) // 2]


def encode_small(frames: Sequence[UInt8[np.ndarray, "h w 3"]], *, rows: int) -> bytes:
    """Encodes pictures of one size side by side as a WebP.

    Args:
        frames: The pictures, of which there is at least one.
        rows: Height of the result; widths follow in proportion.
    """
    width = round(frames[0].shape[1] * rows / frames[0].shape[0])
    joined = Image.new("RGB", (width * len(frames), rows))
    for number, frame in enumerate(frames):
        small = Image.fromarray(frame).resize((width, rows), Image.Resampling.LANCZOS)
        joined.paste(small, (width * number, 0))
    buffer = io.BytesIO()
    joined.save(buffer, "WEBP", quality=_QUALITY)
    return buffer.getvalue()


def encode_quick(frame: UInt8[np.ndarray, "h w 3"], *, rows: int, quality: int = 90) -> bytes:
    """Encodes a picture of at most `rows` rows as a JPEG, in a twentieth of a WebP's time."""
    picture = Image.fromarray(frame)
    if picture.height > rows:
        width = max(1, round(picture.width * rows / picture.height))
        picture = picture.resize((width, rows))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()
