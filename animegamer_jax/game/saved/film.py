"""A game as one film with captions, as MP4 or GIF."""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media import video
from animegamer_jax.media.fonts import font_for, wrap_text
from animegamer_jax.storage.files import write_whole

_GIF_WIDTH = 360
_COLOURS = 255  # of a GIF's palette, which has one more
_TEXT_SHARE = 0.055  # of a frame's height: the size of a caption
_INK = (255, 255, 255)


def film_mp4(game: Game, path: Path, *, captions: bool = True) -> None:
    """Writes the current line of a game as one MP4, each turn with its instruction as a caption.

    Raises:
        UserError: The game has no turns, or a clip cannot be read.
        OSError: The file cannot be written.
    """
    height, width = picture_size(game)
    frames = itertools.chain.from_iterable(_clips(game, captions=captions))
    write_whole(path, video.encode_film(frames, height=height, width=width))


def film_gif(game: Game, path: Path, *, captions: bool = True) -> None:
    """Writes the current line of a game as an animated GIF, at most 360 pixels wide.

    Raises:
        UserError: The game has no turns, or a clip cannot be read.
        OSError: The file cannot be written.
    """
    height, width = picture_size(game)
    small = min(width, _GIF_WIDTH), round(height * min(width, _GIF_WIDTH) / width)

    def pictures() -> Iterator[Image.Image]:
        for clip in _clips(game, captions=captions):
            yield from _share_palette(
                [Image.fromarray(frame).resize(small, Image.Resampling.BILINEAR) for frame in clip]
            )

    first, *rest = pictures()
    buffer = io.BytesIO()
    first.save(
        buffer, "GIF", save_all=True, append_images=rest, loop=0,
        duration=1000 // video.FRAMES_PER_SECOND,
    )  # fmt: skip
    write_whole(path, buffer.getvalue())


def picture_size(game: Game) -> tuple[int, int]:
    """Returns height and width of a game's clips.

    Raises:
        UserError: The game has no turns, or a clip cannot be read.
    """
    if not game.turns:
        raise UserError("the game has no turns yet: play one first")
    height, width, _ = video.measure_mp4(game.folder / game.turns[0].clip)
    return height, width


def _share_palette(pictures: Sequence[Image.Image]) -> list[Image.Image]:
    """Returns pictures of one clip in the colours of its first, middle and last one.

    Choosing them for each picture takes six times as long, and makes still scenery flicker.
    """
    few = [pictures[number].reduce(2) for number in (0, len(pictures) // 2, -1)]
    mosaic = Image.fromarray(np.concatenate([np.asarray(picture) for picture in few]))
    palette = mosaic.quantize(_COLOURS, dither=Image.Dither.NONE)
    return [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]


def _clips(game: Game, *, captions: bool) -> Iterator[UInt8[np.ndarray, "f h w 3"]]:
    """Yields the clips of the current line, with their captions."""
    for turn in game.turns:
        frames = video.read_mp4(game.folder / turn.clip)
        if captions:
            strip, mask = _caption(plain_text(turn.instruction), *frames.shape[1:3])
            pictures = [Image.fromarray(frame) for frame in frames]
            for picture in pictures:
                picture.paste(strip, (0, picture.height - strip.height), mask)
            frames = np.stack([np.asarray(picture) for picture in pictures])
        yield frames


def plain_text(instruction: str) -> str:
    """Returns an instruction without the labels of the released form."""
    parts = [part.partition(":")[2].strip(" .") for part in instruction.split(";")]
    if all(":" in part for part in instruction.split(";")) and all(parts):
        return " \u00b7 ".join(parts)
    return instruction


def _caption(text: str, height: int, width: int) -> tuple[Image.Image, Image.Image]:
    """Draws a caption on a dark strip that fades to its upper edge; returns it and its mask."""
    size = max(12, round(height * _TEXT_SHARE))
    font = font_for(text, size)
    lines = wrap_text(text, font, 0.9 * width)[:3]
    pitch, pad = round(1.35 * size), round(0.8 * size)
    strip = Image.new("RGB", (width, pitch * len(lines) + 2 * pad), (8, 9, 14))
    fade = np.linspace(0, 200, strip.height) ** 0.5 * 200**0.5
    mask = Image.fromarray(np.repeat(fade.astype(np.uint8)[:, None], width, axis=1))
    draw, opaque = ImageDraw.Draw(strip), ImageDraw.Draw(mask)
    for number, line in enumerate(lines):
        place = width / 2, pad + pitch * (number + 0.5)
        draw.text(place, line, fill=_INK, font=font, anchor="mm")
        opaque.text(place, line, fill=255, font=font, anchor="mm")
    return strip, mask
