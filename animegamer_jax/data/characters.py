"""The characters that annotation looks for, with reference images (paper, section 3.1).

They come from a TOML file; the images are in the file's folder:

    [[character]]
    name = "Mika"
    aliases = ["Mika the cat"]
    images = ["mika_front.png", "mika_side.jpg"]
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from PIL import Image

from animegamer_jax.errors import UserError
from animegamer_jax.media.pictures import decode_picture
from animegamer_jax.storage.paths import absolute, user_errors
from animegamer_jax.storage.serialization import decode_text, from_json, to_json
from animegamer_jax.storage.untrusted import MAX_TEXT, read_file
from animegamer_jax.vlm.fields import plain

MAX_NAME = 40
NOBODY = ("other", "none")
"""Subjects of clips without a character: somebody else, or nobody at all."""

_FORM = '[[character]] with name = "...", aliases = ["..."], images = ["..."]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Character:
    """One character.

    Attributes:
        name: As in instructions.
        aliases: Other names of the same character.
        images: SHA-256 of each reference image's file; in the TOML file, the images' paths.
    """

    name: str
    aliases: tuple[str, ...] = ()
    images: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Characters:
    """The characters of some films.

    Attributes:
        entries: The characters, in the order of the file.
        pictures: Image files by their digests; empty if only the names were saved.
    """

    entries: tuple[Character, ...]
    pictures: Mapping[str, bytes] = dataclasses.field(
        default_factory=dict,
        repr=False,
        compare=False,  # the characters hold their digests
    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(character.name for character in self.entries)

    @property
    def subjects(self) -> list[str]:
        """Everything that the subject of an annotation can be."""
        return [*self.names, *NOBODY]

    @property
    def digest(self) -> str:
        """SHA-256 of names, aliases and images."""
        return hashlib.sha256(json.dumps(to_json(self.entries)).encode()).hexdigest()

    def resolve(self, subject: str) -> str:
        """Returns the subject that a name, an alias, "other" or "none" stands for, in any case.

        Raises:
            ValueError: No character has this name.
        """
        known = {name: name for name in NOBODY}
        for character in self.entries:
            for name in (character.name, *character.aliases):
                known[name.casefold()] = character.name
        found = known.get(subject.casefold())
        if found is None:
            expected = ", ".join(self.subjects)
            raise ValueError(f"expected one of: {expected}; found {subject[:MAX_NAME]!r}")
        return found


# The TOML file


def read_characters(path: epath.PathLike) -> Characters:
    """Reads characters and their reference images from a TOML file.

    Raises:
        UserError: Names the file, the character and what is wrong with it.
    """
    file = absolute(path)
    content = read_toml(file, form=_FORM)
    tables = content.pop("character", [])
    if content:
        raise UserError(f"{file}: unknown key {next(iter(content))[:60]!r}: expected {_FORM}")
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{file}: no characters: expected one or more of {_FORM}")
    pictures: dict[str, bytes] = {}
    characters = [
        _read_character(table, file=file, where=f"{file}: character {number}", pictures=pictures)
        for number, table in enumerate(tables, start=1)
    ]
    _refuse_doubles(characters, file=file)
    return Characters(tuple(characters), pictures)


def read_toml(file: epath.Path, *, form: str) -> dict[str, Any]:
    """Returns the content of a TOML file; `form` is what messages say is expected in it.

    Raises:
        UserError: The file cannot be read, or is not valid TOML.
    """
    with user_errors(file, "cannot be read", hint=f"expected a TOML file of {form}"):
        content = read_file(file)
    try:
        return tomllib.loads(decode_text(content, str(file)))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{file}: not valid TOML ({error}): expected {form}") from None


def _read_character(
    table: Any, *, file: epath.Path, where: str, pictures: dict[str, bytes]
) -> Character:
    """Reads one table and adds its images to `pictures`."""
    written = from_json(Character, table, where, hint=f"expected {_FORM}")
    name = _name(written.name, f"{where}: name")
    aliases = tuple(_name(alias, f"{where}: aliases") for alias in written.aliases)
    if not written.images:
        raise UserError(f"{where}: images: expected one picture of {name} or more, found none")
    contents = [_read_image(file.parent, image, whose=name) for image in written.images]
    digests = tuple(hashlib.sha256(content).hexdigest() for content in contents)
    pictures.update(zip(digests, contents, strict=True))
    return Character(name=name, aliases=aliases, images=digests)


def _name(text: str, where: str) -> str:
    try:
        name = plain(text, most=MAX_NAME)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if name.casefold() in NOBODY:
        raise UserError(f"{where}: {name!r} is reserved for clips without a character: rename it")
    return name


def _refuse_doubles(characters: Sequence[Character], *, file: epath.Path) -> None:
    owners: dict[str, str] = {}
    for character in characters:
        for name in (character.name, *character.aliases):
            if (owner := owners.get(name.casefold())) is not None:
                raise UserError(
                    f"{file}: {name}: name or alias of {owner} and again of {character.name}: "
                    "expected each once"
                )
            owners[name.casefold()] = character.name


def _read_image(folder: epath.Path, name: str, *, whose: str) -> bytes:
    expected = f"expected a picture of {whose}"
    if "\0" in name:
        raise UserError(f"{folder}: {expected}, found the path {name!a}")
    with user_errors(folder / name, "cannot be read", hint=expected):
        content = read_file(folder / name, most=MAX_TEXT)
    open_picture(content, name=f"{folder / name}", hint=expected)
    return content


def open_picture(content: bytes, *, name: str, hint: str) -> Image.Image:
    """Decodes an image file to RGB, upright, on white.

    Raises:
        UserError: The bytes are no picture, or damaged, or of too many pixels.
    """
    try:
        return decode_picture(content, name=name)
    except UserError as error:
        raise UserError(f"{error}: {hint}") from None
