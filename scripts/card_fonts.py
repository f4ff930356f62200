"""Cuts the fonts of the card of the day from Noto Sans CJK: only the characters of its texts.

Run `python scripts/card_fonts.py NotoSansCJK-Regular.ttc` after a change of these.
"""

import json
import string
import sys
from typing import Any

from fontTools import subset, ttLib

from animegamer_jax.game.saved.card import LANGUAGES, font_path, read_texts

_NUMBERS = {"ja": 0, "zh": 2}  # of the fonts in the collection: Japan's and simplified Chinese


def main(collection: str) -> None:
    """Writes the font of each language that has one, from a collection of Noto Sans CJK."""
    for language in LANGUAGES:
        path = font_path(language)
        if path is None:
            continue
        options: Any = subset.Options(
            desubroutinize=True, hinting=False, layout_features=[], name_IDs=[0, 1, 2, 13, 14]
        )
        font = ttLib.TTFont(collection, fontNumber=_NUMBERS[language])
        subsetter = subset.Subsetter(options)
        text = json.dumps(read_texts()[language], ensure_ascii=False)
        subsetter.populate(text=text + string.printable + "\u2026")
        subsetter.subset(font)
        font.save(path)
        print(f"{path.name}: {len(font.getGlyphOrder())} glyphs, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
