"""Pictures of players: read whatever is in the file, bounded before it is decoded.

Files come from strangers. The size in a file's header is checked before any pixel is decoded, and
only formats are opened that hold pictures or video and read no other file.
"""

import io
import warnings
from pathlib import Path
from typing import IO, NamedTuple

import av
import av.logging
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import Colorspace
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from animegamer_jax.errors import UserError, first_line
from animegamer_jax.media.containers import OPTIONS, check_codec, open_input
from animegamer_jax.storage.untrusted import check_file

MAX_PIXELS = 50_000_000  # of a picture: 150 MB decoded
MIN_SIDE = 16  # of a picture in pixels: less shows nothing

_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_SEVERAL = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")  # formats whose further pictures matter
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_EXPECTED = "expected a picture (PNG, JPEG, WebP, GIF, AVIF, TIFF, BMP) or a video"
_UNSPECIFIED = 2  # libav's number of an untagged colour space
_HD_ROWS = 720  # untagged videos have BT.709 colours from here on, BT.601 below


class Picture(NamedTuple):
    """A picture, upright and without transparency.

    Attributes:
        pixels: The picture.
        note: What was left out of the file, as a sentence; empty if nothing.
        is_video: Whether it is a frame of a video.
    """

    pixels: UInt8[np.ndarray, "h w 3"]
    note: str = ""
    is_video: bool = False


def read_picture(path: Path, *, name: str | None = None) -> Picture:
    """Reads a picture, or the first frame of a video or an animation.

    A picture is turned upright as its EXIF data says and put on white where it is transparent; grey
    ones and those of 16 bits a channel become RGB of 8 bits.

    Args:
        path: The file.
        name: The file's name in messages; None for its path.

    Raises:
        UserError: There is no such file, it is neither a picture nor a video, is damaged, or has
            too few or too many pixels.
    """
    name = name or str(path)
    check_file(path, expected="a picture")
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise UserError(f"{name}: {_EXPECTED}, found {found}")
    try:
        with open(path, "rb") as file:
            try:
                picture = _read_still(file, name)
            except UnidentifiedImageError:
                file.seek(0)
                start = file.read(12)
                if start[4:8] == b"ftyp" and start[8:] in _HEIF:  # libav sees one of its tiles
                    raise UserError(f"{name}: {_EXPECTED}, found HEIC: save as JPEG") from None
                picture = _read_video(path, name)
    except OSError as error:
        raise UserError(f"{name}: {_EXPECTED}, found: {error.strerror or error}") from error
    height, width = picture.pixels.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise UserError(
            f"{name}: expected a picture of at least {MIN_SIDE} x {MIN_SIDE} pixels, found "
            f"{width} x {height}"
        )
    return picture


def _read_still(file: IO[bytes], name: str) -> Picture:
    with _open_still(file, name) as image:
        _check_size(image.width, image.height, name)
        try:
            several = image.format in _SEVERAL and getattr(image, "is_animated", False)
            image.seek(0)
            pixels = np.array(upright(image))
        except Exception as error:  # Pillow's readers raise types of their own
            raise UserError(f"{name}: a damaged picture: {failure_reason(error)}") from error
    note = f"{name} holds several pictures: the first is used." if several else ""
    return Picture(pixels, note)


def decode_picture(content: bytes, *, name: str) -> Image.Image:
    """Decodes the bytes of a picture to RGB, upright, on white, after a check of its size.

    Raises:
        UserError: They are no picture, damaged, or of too many pixels.
    """
    try:
        with _open_still(io.BytesIO(content), name) as image:
            _check_size(image.width, image.height, name)
            return upright(image)
    except UserError:
        raise
    except Exception as error:  # Pillow's readers raise types of their own
        raise UserError(f"{name}: not an image ({failure_reason(error)})") from None


def _open_still(file: IO[bytes] | io.BytesIO, name: str) -> Image.Image:
    """Opens a picture without decoding it.

    Raises:
        OSError: It cannot be read, or is no picture.
        UserError: Its header is damaged, or names too many pixels.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return Image.open(file, formats=_FORMATS)
        except Image.DecompressionBombError:
            raise _too_large(name, "many more") from None
        except OSError:  # among them UnidentifiedImageError
            raise
        except Exception as error:  # Pillow's readers raise types of their own
            raise UserError(f"{name}: a damaged picture: {failure_reason(error)}") from error


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width} x {height}")


def _too_large(name: str, found: str) -> UserError:
    return UserError(
        f"{name}: expected a picture of at most {MAX_PIXELS // 1_000_000} million pixels, found "
        f"{found}: save it smaller"
    )


def failure_reason(error: Exception) -> str:
    """Returns why Pillow could not read a picture, in a few words."""
    first = first_line(error).partition("<_io")[0].rstrip()
    return first[:80] or type(error).__name__


def upright(image: Image.Image) -> Image.Image:
    """Decodes an opened image to RGB, upright as its EXIF data says, on white."""
    picture = ImageOps.exif_transpose(image)
    if picture.mode == "F":
        raise ValueError("expected 8 or 16 bits a channel, found floating-point numbers")
    if picture.mode == "I" or picture.mode.startswith("I;16"):  # 16 bits of grey
        grey = np.asarray(picture).clip(0, 65535).astype(np.uint32)
        grey *= 255
        grey += 32895
        grey >>= 16  # the whole number nearest to a 257th, in place: pictures may be large
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


def _read_video(path: Path, name: str) -> Picture:
    av.logging.set_level(av.logging.PANIC)  # errors are raised, not printed
    try:
        with open_input(str(path.absolute()), options=OPTIONS) as container:
            if not container.streams.video:
                raise UserError(f"{name}: {_EXPECTED}, found a file without pictures")
            stream = container.streams.video[0]
            check_codec(stream, name)
            _check_size(stream.width, stream.height, name)
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
            stream.codec_context.thread_count = 1
            frame = next(container.decode(stream), None)
            ratio = stream.sample_aspect_ratio or 1
    except FFmpegError as error:
        raise UserError(f"{name}: {_EXPECTED}, found neither ({error.strerror})") from error
    if frame is None:
        raise UserError(f"{name}: {_EXPECTED}, found a video without frames")
    width = max(1, round(frame.width * ratio))
    _check_size(width, frame.height, name)
    guess = Colorspace.ITU709 if frame.height >= _HD_ROWS else Colorspace.ITU601
    rgb = frame.reformat(
        format="rgb24",
        width=width,
        src_colorspace=guess if frame.colorspace == _UNSPECIFIED else None,
    )
    pixels = np.ascontiguousarray(np.rot90(rgb.to_ndarray(), round(frame.rotation / 90) % 4))
    return Picture(pixels, f"{name} is a video: its first frame is used.", is_video=True)


def encode_png(pixels: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Encodes a picture as a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def fit_picture(picture: Picture, *, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Scales a picture to a clip's size, keeping its proportions.

    One that is wider than the clip loses what exceeds it on both sides, as films do by default when
    clips are cut from them. A taller one is kept whole between white margins, since cutting it
    would take heads and feet away; a frame of a video is cut.
    """
    image = Image.fromarray(picture.pixels)
    resample = Image.Resampling.LANCZOS
    if picture.is_video or image.width * height >= image.height * width:
        return np.array(ImageOps.fit(image, (width, height), resample))
    return np.array(ImageOps.pad(image, (width, height), resample, color="white"))
