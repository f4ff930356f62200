"""A day of a game as a card to share, in the player's language."""

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image, ImageDraw

from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.game.rules import Day
from animegamer_jax.game.saved.film import picture_size
from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.scene_words import read_scene
from animegamer_jax.media import video
from animegamer_jax.media.fonts import fit_text, font_for
from animegamer_jax.storage.files import write_whole

Number = int | float
Language = Literal["en", "ja", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

_FOLDER = ASSETS / "card"
_PANEL_WIDTH, _GAP, _MARGIN, _TOP, _BOTTOM = 300, 14, 40, 150, 190
_INK, _SOFT, _PAPER, _ACCENT = (255, 255, 255), (176, 182, 200), (24, 27, 38), (255, 196, 87)
_METERS = {
    "stamina": (236, 148, 72),
    "social": (98, 160, 232),
    "entertainment": (180, 124, 232),
}


@functools.cache
def read_texts() -> dict[Language, dict[str, Any]]:
    """Returns the card's texts by language, with fields in braces."""
    return json.loads((_FOLDER / "texts.json").read_text())


def font_path(language: Language) -> Path | None:
    """Returns the font with the characters of the card's texts; None: Pillow's own has them."""
    return None if language == "en" else _FOLDER / f"{language}.otf"


def save_card(
    game: Game, path: Path, *, day: Day | None, words: Vocabulary, language: Language = "en"
) -> None:
    """Writes a card of the current day of a game as a PNG: pictures, meters, goal, stars.

    Args:
        game: The game.
        path: Path of the card.
        day: Its current day; None: a card of the last turns.
        words: The words of the model's world.
        language: Language of the card's own texts; names are as in the instructions.

    Raises:
        UserError: The game has no turns, or a clip cannot be read.
        OSError: The file cannot be written.
    """
    height, width = picture_size(game)
    turns = game.turns[day.first - 1 :] if day and day.played else game.turns[-10:]
    panel = _PANEL_WIDTH, round(height * _PANEL_WIDTH / width)
    texts = read_texts()[language]
    title, note = _headings(turns, day, words, texts)
    shown = [
        turns[n] for n in np.linspace(0, len(turns) - 1, min(6, len(turns))).round().astype(int)
    ]
    columns = max(2, min(3, len(turns)))
    rows = -(-len(shown) // columns)
    size = (
        2 * _MARGIN + columns * panel[0] + (columns - 1) * _GAP,
        _TOP + rows * (panel[1] + _GAP) + _BOTTOM,
    )
    card = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(card)
    write = functools.partial(_write, draw, font=font_path(language), width=size[0] - 2 * _MARGIN)
    write((_MARGIN, 62), title, size=44, fill=_INK)
    write((_MARGIN, 112), note, size=22, fill=_SOFT)
    for number, turn in enumerate(shown):
        row, column = divmod(number, columns)
        frames = video.read_mp4(game.folder / turn.clip)
        picture = Image.fromarray(frames[len(frames) // 2])
        place = _MARGIN + column * (panel[0] + _GAP), _TOP + row * (panel[1] + _GAP)
        card.paste(picture.resize(panel, Image.Resampling.LANCZOS), place)
    for number, (name, ink) in enumerate(_METERS.items()):
        y, value = size[1] - _BOTTOM + 34 + 40 * number, getattr(game.meters, name)
        write((_MARGIN, y), texts[name], size=20, fill=_SOFT)
        left, right = _MARGIN + 170, size[0] - _MARGIN - 60
        draw.rounded_rectangle((left, y - 8, right, y + 8), 8, fill=(52, 57, 74))
        if value:
            end = left + max(16, (right - left) * value / 100)
            draw.rounded_rectangle((left, y - 8, end, y + 8), 8, fill=ink)
        write((size[0] - _MARGIN, y), str(value), size=20, fill=_INK, anchor="rm")
    for star in range(0 if day is None else 3):
        centre = size[0] - _MARGIN - 30 - (2 - star) * 56, 62
        _draw_star(draw, *centre, lit=day is not None and star < day.stars)
    buffer = io.BytesIO()
    card.save(buffer, "PNG")
    write_whole(path, buffer.getvalue())


def _write(
    draw: ImageDraw.ImageDraw,
    place: tuple[Number, Number],
    text: str,
    *,
    font: Path | None,
    width: int,
    size: int,
    fill: tuple[int, int, int],
    anchor: str = "lm",
) -> None:
    """Writes one line, cut at `width`."""
    chosen = font_for(text, size, first="" if font is None else str(font))
    draw.text(place, fit_text(text, chosen, width), fill=fill, font=chosen, anchor=anchor)


def _headings(
    turns: Sequence[Turn], day: Day | None, words: Vocabulary, texts: dict[str, Any]
) -> tuple[str, str]:
    """Returns the title and the line below it."""
    names = [read_scene(turn.instruction, words).character for turn in turns]
    who = ", ".join(dict.fromkeys(name for name in names if name)) or texts["nobody"]
    count = texts["one_turn" if len(turns) == 1 else "turns"].format(count=len(turns))
    if day is None:
        return who, count
    goal = day.goal
    state = texts["reached" if goal.met else "so_far"]
    note = texts["note"].format(
        end=texts[day.ending] if day.ending else count,
        goal=texts["goals"][goal.kind].format(target=goal.target),
        state=state.format(reached=goal.reached, target=goal.target),
    )
    return texts["day"].format(number=day.number, who=who), note


def _draw_star(draw: ImageDraw.ImageDraw, x: Number, y: Number, *, lit: bool) -> None:
    angles = np.pi / 5 * np.arange(10) - np.pi / 2
    radii = np.where(np.arange(10) % 2, 11.0, 25.0)
    points = [(x + r * np.cos(a), y + r * np.sin(a)) for r, a in zip(radii, angles, strict=True)]
    draw.polygon(points, fill=_ACCENT if lit else (58, 63, 82))
