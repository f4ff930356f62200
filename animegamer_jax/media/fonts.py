"""Fonts for text in pictures, and text that is cut or wrapped to a width."""

import functools
from typing import Any

import numpy as np
from PIL import ImageFont

# Pillow's own font has Latin characters only; these are searched on the system for others.
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
def _has_character(name: str, character: str) -> bool:
    """Returns whether a font draws a character differently from one that no font has."""
    font = _load_font(name, 16)
    if font is None or character.isspace():
        return font is not None
    drawn, missing = (np.array(font.getmask(text)) for text in (character, "\ufdd0"))
    return not np.array_equal(drawn, missing)


def font_for(text: str, size: int, *, first: str = "") -> Any:
    """Returns the first font that has all characters, else `first`.

    Args:
        text: The text to be written.
        size: Its size in pixels.
        first: Path of the font that is tried first; empty: Pillow's scalable font. After it come
            the fonts of this system.
    """
    for name in (first, *_OTHER_FONTS):
        if all(_has_character(name, character) for character in set(text)):
            return _load_font(name, size)
    return _load_font(first, size)


def fit_text(text: str, font: Any, width: int | float) -> str:
    """Cuts the text and adds dots if it is wider than `width`."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap_text(text: str, font: Any, width: int | float) -> list[str]:
    """Wraps text to `width`; a word that is wider alone is broken between characters."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and font.getlength(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    return lines
