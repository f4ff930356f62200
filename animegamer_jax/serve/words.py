"""Instructions from fields, and the words that a model knows for each."""

import json
from pathlib import Path
from typing import NamedTuple

from animegamer_jax.errors import UserError

WORDS_FILE = "words.json"


class Words(NamedTuple):
    """What a player may choose from; anything else may be typed."""

    characters: tuple[str, ...] = ()
    adverbs: tuple[str, ...] = ()
    motions: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def known_words(model: str, folder: Path) -> Words:
    """The words of the toy world for the toy; of other models what their `words.json` lists.

    Args:
        model: the bundle's name.
        folder: of the bundle.

    Raises:
        UserError: the file is not an object of lists of texts.
    """
    path = folder / WORDS_FILE
    if path.is_file():
        return _read(path)
    if model != "toy":
        return Words()
    from animegamer_jax.toy.scene import (
        CHARACTERS,
        PLACES,
        TIMES,
    )
    from animegamer_jax.toy.vocabulary import ADVERBS, VERBS

    motions = [
        verb.gerund.format(partner=partner)
        for verb in VERBS.values()
        for partner in (CHARACTERS if "{" in verb.gerund else ("",))
    ]
    adverbs = tuple(word for level in sorted(ADVERBS) for word in ADVERBS[level])
    return Words(tuple(CHARACTERS), adverbs, tuple(motions), tuple(TIMES), tuple(PLACES))


def _read(path: Path) -> Words:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected JSON, found: {error}") from error
    if not isinstance(found, dict) or not found.keys() <= set(Words._fields):
        raise UserError(f"{path}: expected an object with the fields {', '.join(Words._fields)}")
    for name, words in found.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path}: {name}: expected a list of texts")
    return Words(**{name: tuple(words) for name, words in found.items()})


def compose(*, character: str, adverb: str, motion: str, time: str, place: str) -> str:
    """An instruction in the released form; what is empty is left out, to carry on as it was."""
    parts = {
        "Character": (character,),
        "Motion": (adverb, motion),
        "Background": (time, place),
    }
    said = {
        label: " ".join(word.strip() for word in words if word and word.strip())
        for label, words in parts.items()
    }
    told = "; ".join(f"{label}: {text}" for label, text in said.items() if text)
    return f"{told}." if told else ""
