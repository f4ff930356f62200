"""Reads lists of characters, motions and places, from which a benchmark is written."""

import dataclasses
from pathlib import Path
from typing import Annotated

import pydantic
from etils import epath

from animegamer_jax.data.characters import MAX_NAME, read_toml
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import decode_text, from_json
from animegamer_jax.storage.untrusted import read_file
from animegamer_jax.vlm.fields import plain, text_of

MAX_WORDS = 60
"""Largest number of characters of a motion's or place's text."""

_FORM = 'world = "...", characters = ["..."], motions = ["..."], places = ["..."]'


def _check_different(words: tuple[str, ...]) -> tuple[str, ...]:
    folded = [word.casefold() for word in words]
    for number, word in enumerate(words):
        if folded[number] in folded[:number]:
            raise ValueError(f"{word!r} again: expected each once")
    return words


_Text = Annotated[str, text_of(MAX_WORDS)]
_Name = Annotated[str, text_of(MAX_NAME)]
_Different = pydantic.AfterValidator(_check_different)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    """The lists from which a language model writes games.

    Attributes:
        world: World of the characters, such as a film's name.
        characters: Two or more names.
        motions: Motions in the -ing form; a game may add an object ("talking" to somebody).
        places: Places where things happen.
    """

    world: _Text
    characters: Annotated[tuple[_Name, ...], pydantic.Field(min_length=2), _Different]
    motions: Annotated[tuple[_Text, ...], pydantic.Field(min_length=1), _Different]
    places: Annotated[tuple[_Text, ...], pydantic.Field(min_length=1), _Different]


def read_lists(path: str | Path) -> Lists:
    """Reads a TOML file of `world`, `characters`, `motions` and `places`.

    Raises:
        UserError: The file is missing or a list is wrong; names file and list.
    """
    file = epath.Path(path).expanduser()
    return from_json(Lists, read_toml(file, form=_FORM), str(file), hint=f"expected {_FORM}")


def read_names(path: str | Path) -> tuple[str, ...]:
    """Reads characters' names, one per line, without empty lines and those that begin with #.

    Raises:
        UserError: The file is missing or a line is wrong; names file and line.
    """
    file = Path(path).expanduser()
    with user_errors(file, "cannot be read", hint="give a text file of names, one per line"):
        data = read_file(file)
    lines = decode_text(data, str(file)).splitlines()
    names: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                names.append(plain(line, most=MAX_NAME))
                _check_different(tuple(names))
            except ValueError as error:
                raise UserError(f"{file}: line {number}: {error}") from None
    if len(names) < 2:
        raise UserError(f"{file}: expected two or more names, one per line, found {len(names)}")
    return tuple(names)
