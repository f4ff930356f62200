"""Reads lists of characters, motions and places, from which a benchmark is written."""

import dataclasses
from pathlib import Path
from typing import Any

from etils import epath

from animegamer_jax.data.characters import MAX_NAME, read_toml
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.vlm.fields import plain

MAX_WORDS = 60
"""Largest number of characters of a motion's or place's text."""

_LISTS = ("world", "characters", "motions", "places")
_FORM = 'world = "...", characters = ["..."], motions = ["..."], places = ["..."]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    """The lists from which a language model writes games.

    Attributes:
        world: World of the characters, such as a film's name.
        characters: Two or more names.
        motions: Motions in the -ing form; a game may add an object ("talking" to somebody).
        places: Places where things happen.
    """

    world: str
    characters: tuple[str, ...]
    motions: tuple[str, ...]
    places: tuple[str, ...]


def read_lists(path: str | Path) -> Lists:
    """Reads a TOML file of `world`, `characters`, `motions` and `places`.

    Raises:
        UserError: the file is missing or a list is wrong; names file and list.
    """
    file = epath.Path(path).expanduser()
    content = read_toml(file, form=_FORM)
    if unknown := [name for name in content if name not in _LISTS]:
        raise UserError(f"{file}: unknown key {unknown[0]!a}: expected {_FORM}")
    if missing := [name for name in _LISTS if name not in content]:
        raise UserError(f"{file}: {missing[0]}: missing: expected {_FORM}")
    world = _plain(content["world"], f"{file}: world", most=MAX_WORDS)
    limits = {"characters": (2, MAX_NAME), "motions": (1, MAX_WORDS), "places": (1, MAX_WORDS)}
    words = {
        name: _words(content[name], f"{file}: {name}", least=least, most=most)
        for name, (least, most) in limits.items()
    }
    return Lists(world=world, **words)


def read_names(path: str | Path) -> tuple[str, ...]:
    """Reads characters' names, one per line, without empty lines and those that begin with #.

    Raises:
        UserError: the file is missing or a line is wrong; names file and line.
    """
    file = Path(path).expanduser()
    with user_errors(file, "cannot be read", hint="give a text file of names, one per line"):
        data = file.read_bytes()
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at offset "
            f"{error.start}: save it as UTF-8"
        ) from None
    names: list[str] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            names.append(_plain(line, f"{file}: line {number}", most=MAX_NAME))
            _refuse_double(names, f"{file}: line {number}")
    if len(names) < 2:
        raise UserError(f"{file}: expected two or more names, one per line, found {len(names)}")
    return tuple(names)


def _words(value: Any, where: str, *, least: int, most: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < least:
        found = f"{len(value)}" if isinstance(value, list) else f"{str(value)[:40]!a}"
        raise UserError(f"{where}: expected a list of {least} or more, found {found}")
    words: list[str] = []
    for item in value:
        words.append(_plain(item, where, most=most))
        _refuse_double(words, where)
    return tuple(words)


def _plain(value: Any, where: str, *, most: int) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a text, found {str(value)[:40]!a}")
    try:
        return plain(value, most=most)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _refuse_double(words: list[str], where: str) -> None:
    *before, last = (word.casefold() for word in words)
    if last in before:
        raise UserError(f"{where}: {words[-1]!r} again: expected each once")
