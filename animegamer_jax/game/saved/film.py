"""A game as one film with captions, as MP4 or GIF, and a day of it as a card to share."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import UserError
from animegamer_jax.game.rules import Day
from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.scene_words import read_scene
from animegamer_jax.media import video
from animegamer_jax.media.fonts import fit_text, font_for, wrap_text
from animegamer_jax.storage.files import write_whole

Number = int | float

_GIF_WIDTH = 360
_TEXT_SHARE = 0.055  # of a frame's height: the size of a caption
_INK, _SOFT, _PAPER, _ACCENT = (255, 255, 255), (176, 182, 200), (24, 27, 38), (255, 196, 87)
_METERS = {  # as the page calls them
    "stamina": ("Stamina", (236, 148, 72)),
    "social": ("Social", (98, 160, 232)),
    "entertainment": ("Fun", (180, 124, 232)),
}


def film_mp4(game: Game, path: Path, *, captions: bool = True) -> None:
    """Writes the current line of a game as one MP4, each turn with its instruction as a caption.

    Raises:
        UserError: the game has no turns, or a clip cannot be read.
        OSError: the file cannot be written.
    """
    height, width = _size(game)
    frames = _frames(game, captions=captions)
    write_whole(path, video.encode_film(frames, height=height, width=width))


def film_gif(game: Game, path: Path, *, captions: bool = True) -> None:
    """Writes the current line of a game as an animated GIF, at most 360 pixels wide.

    Raises:
        UserError: the game has no turns, or a clip cannot be read.
        OSError: the file cannot be written.
    """
    height, width = _size(game)
    small = min(width, _GIF_WIDTH), round(height * min(width, _GIF_WIDTH) / width)

    def pictures() -> Iterator[Image.Image]:
        for frame in _frames(game, captions=captions):
            picture = Image.fromarray(frame).resize(small, Image.Resampling.LANCZOS)
            yield picture.quantize(128, dither=Image.Dither.NONE)

    first, *rest = pictures()
    buffer = io.BytesIO()
    first.save(
        buffer, "GIF", save_all=True, append_images=rest, loop=0,
        duration=1000 // video.FRAMES_PER_SECOND,
    )  # fmt: skip
    write_whole(path, buffer.getvalue())


def _size(game: Game) -> tuple[int, int]:
    if not game.turns:
        raise UserError("the game has no turns yet: play one first")
    height, width, _ = video.measure_mp4(game.folder / game.turns[0].clip)
    return height, width


def _frames(game: Game, *, captions: bool) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Yields the frames of all clips of the current line; reads one clip at a time."""
    for turn in game.turns:
        frames = video.read_mp4(game.folder / turn.clip)
        if not captions:
            yield from frames
            continue
        strip, mask = _caption(plain_text(turn.instruction), *frames.shape[1:3])
        for frame in frames:
            picture = Image.fromarray(frame)
            picture.paste(strip, (0, picture.height - strip.height), mask)
            yield np.asarray(picture)


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


def save_card(game: Game, path: Path, *, day: Day | None, words: Vocabulary) -> None:
    """Writes a card of the current day of a game as a PNG: pictures, meters, goal, stars.

    It is in English, as the instructions are: a server need not have a font for other languages.

    Args:
        game: The game.
        path: Path of the card.
        day: Its current day; None: a card of the last turns.
        words: The words of the model's world.

    Raises:
        UserError: the game has no turns, or a clip cannot be read.
        OSError: the file cannot be written.
    """
    height, width = _size(game)
    turns = game.turns[day.first - 1 :] if day and day.played else game.turns[-10:]
    write_whole(path, _draw_card(game, turns, day=day, words=words, size=(height, width)))


def _draw_card(
    game: Game, turns: Sequence[Turn], *, day: Day | None, words: Vocabulary, size: tuple[int, int]
) -> bytes:
    panel_width, gap, margin = 300, 14, 40
    panel_height = round(size[0] * panel_width / size[1])
    columns = min(3, len(turns))
    shown = [
        turns[n] for n in np.linspace(0, len(turns) - 1, min(6, len(turns))).round().astype(int)
    ]
    columns, rows = max(columns, 2), -(-len(shown) // max(columns, 2))
    width = 2 * margin + columns * panel_width + (columns - 1) * gap
    top, bottom = 150, 190
    card = Image.new("RGB", (width, top + rows * (panel_height + gap) + bottom), _PAPER)
    draw = ImageDraw.Draw(card)
    title, note = _card_title(turns, day, words)
    inner = width - 2 * margin
    font = font_for(title, 44)
    draw.text((margin, 62), fit_text(title, font, inner), fill=_INK, font=font, anchor="lm")
    font = font_for(note, 22)
    draw.text((margin, 112), fit_text(note, font, inner), fill=_SOFT, font=font, anchor="lm")
    for number, turn in enumerate(shown):
        row, column = divmod(number, columns)
        frames = video.read_mp4(game.folder / turn.clip)
        picture = Image.fromarray(frames[len(frames) // 2])
        place = margin + column * (panel_width + gap), top + row * (panel_height + gap)
        card.paste(picture.resize((panel_width, panel_height), Image.Resampling.LANCZOS), place)
    y = card.height - bottom + 34
    for name, (label, ink) in _METERS.items():
        value = getattr(game.meters, name)
        font = font_for(label, 20)
        draw.text((margin, y), label, fill=_SOFT, font=font, anchor="lm")
        left, right = margin + 170, width - margin - 60
        draw.rounded_rectangle((left, y - 8, right, y + 8), 8, fill=(52, 57, 74))
        if value:
            end = left + max(16, (right - left) * value / 100)
            draw.rounded_rectangle((left, y - 8, end, y + 8), 8, fill=ink)
        draw.text((width - margin, y), str(value), fill=_INK, font=font, anchor="rm")
        y += 40
    if day is not None:
        for star in range(3):
            centre = width - margin - 30 - (2 - star) * 56, 62
            _draw_star(draw, *centre, lit=star < day.stars)
    buffer = io.BytesIO()
    card.save(buffer, "PNG")
    return buffer.getvalue()


def _card_title(turns: Sequence[Turn], day: Day | None, words: Vocabulary) -> tuple[str, str]:
    names = [read_scene(turn.instruction, words).character for turn in turns]
    who = ", ".join(dict.fromkeys(name for name in names if name)) or "A game"
    count = f"{len(turns)} turn" + "s" * (len(turns) != 1)
    if day is None:
        return who, count
    goals = {
        "social": f"social {day.goal.target}",
        "entertainment": f"fun {day.goal.target}",
        "balance": f"all meters at {day.goal.target} in the second half",
        "places": f"{day.goal.target} places",
        "people": f"{day.goal.target} people",
        "motions": f"{day.goal.target} different things done",
    }
    state = "reached" if day.goal.met else f"{day.goal.reached} of {day.goal.target}"
    end = {"exhausted": "fell asleep on the spot", "evening": "a whole day", None: count}
    return (
        f"Day {day.number}: {who}",
        f"{end[day.ending]}  \u00b7  goal: {goals[day.goal.kind]}, {state}",
    )


def _draw_star(draw: ImageDraw.ImageDraw, x: Number, y: Number, *, lit: bool) -> None:
    angles = np.pi / 5 * np.arange(10) - np.pi / 2
    radii = np.where(np.arange(10) % 2, 11.0, 25.0)
    points = [(x + r * np.cos(a), y + r * np.sin(a)) for r, a in zip(radii, angles, strict=True)]
    draw.polygon(points, fill=_ACCENT if lit else (58, 63, 82))
