"""The cast: the characters that annotation looks for, with reference images (PAPER section 3.1).

A TOML file with a table a character; images lie beside it. This is how a player's own character
comes in:

    [[character]]
    name = "Mika"
    aliases = ["Mika the cat"]
    images = ["mika_front.png", "mika_side.jpg"]
"""

import dataclasses
import hashlib
import io
import json
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from PIL import Image, ImageOps

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, telling
from animegamer_jax.vlm.fields import plain

MAX_NAME = 40
NOBODY = ("other", "none")
"""What a subject may be besides a character: somebody else, or nobody at all."""

_LAYOUT = 1
_KEYS = ("name", "aliases", "images")
_FORM = '[[character]] with name = "...", aliases = ["..."], images = ["..."]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Character:
    """One character.

    Attributes:
        name: as instructions say it.
        aliases: other names of the same character.
        images: SHA-256 of each reference image's file.
    """

    name: str
    aliases: tuple[str, ...]
    images: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Cast:
    """The characters of some films.

    Attributes:
        characters: in the order of the file.
        pictures: the image files by their digests; none where only the names were kept.
    """

    characters: tuple[Character, ...]
    pictures: Mapping[str, bytes] = dataclasses.field(
        default_factory=dict,
        repr=False,
        compare=False,  # the characters hold their digests
    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(character.name for character in self.characters)

    @property
    def digest(self) -> str:
        """SHA-256 of names, aliases and images: another cast has another one."""
        return hashlib.sha256(json.dumps(to_json(self.characters)).encode()).hexdigest()

    def resolve(self, subject: str) -> str:
        """The name of whom a name, an alias, "other" or "none" means, in any case.

        Raises:
            ValueError: nobody of the cast is called so.
        """
        known = {name: name for name in NOBODY}
        for character in self.characters:
            for called in (character.name, *character.aliases):
                known[called.casefold()] = character.name
        found = known.get(subject.casefold())
        if found is None:
            expected = ", ".join((*self.names, *NOBODY))
            raise ValueError(f"expected one of: {expected}; found {subject[:MAX_NAME]!r}")
        return found

    def to_text(self) -> str:
        """The cast without its pictures, for `parse_cast`."""
        content = {"layout": _LAYOUT, "characters": to_json(self.characters)}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def parse_cast(text: str, *, where: str) -> Cast:
    """The inverse of `Cast.to_text`: names and digests, no pictures.

    Raises:
        UserError: the text is something else.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error}): annotate again") from None
    if not isinstance(content, dict) or content.get("layout") != _LAYOUT:
        raise UserError(f"{where}: expected a cast of layout {_LAYOUT}: annotate again")
    return Cast(from_json(tuple[Character, ...], content.get("characters"), where))


# The file that people write


def read_cast(path: epath.PathLike) -> Cast:
    """Reads a cast and its reference images.

    Raises:
        UserError: names the file, the character and what is wrong with it.
    """
    file = absolute(path)
    content = read_toml(file, form=_FORM)
    tables = content.pop("character", [])
    if content:
        raise UserError(f"{file}: unknown key {next(iter(content))!r}: expected {_FORM}")
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{file}: no characters: expected one or more of {_FORM}")
    pictures: dict[str, bytes] = {}
    characters = [
        _read_character(table, file=file, number=number, pictures=pictures)
        for number, table in enumerate(tables, start=1)
    ]
    _refuse_doubles(characters, file=file)
    return Cast(tuple(characters), pictures)


def read_toml(file: epath.Path, *, form: str) -> dict[str, Any]:
    """A TOML file's content; `form`: what is expected in it, for messages.

    Raises:
        UserError: it cannot be read, or is no TOML.
    """
    with telling(file, "cannot be read", mend=f"expected a TOML file of {form}"):
        content = file.read_bytes()
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}: save it as UTF-8"
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{file}: no TOML ({error}): expected {form}") from None


def _read_character(
    table: Any, *, file: epath.Path, number: int, pictures: dict[str, bytes]
) -> Character:
    """One table; its images are added to `pictures`."""
    where = f"{file}: character {number}"
    if not isinstance(table, dict):
        raise UserError(f"{where}: expected a table, {_FORM}, found {str(table)[:40]!r}")
    if unknown := [key for key in table if key not in _KEYS]:
        raise UserError(f"{where}: unknown key {unknown[0]!r}: expected {', '.join(_KEYS)}")
    name = _name(table.get("name"), f"{where}: name")
    where = f"{file}: {name}"
    aliases = _texts(table.get("aliases", []), f"{where}: aliases")
    images = _texts(table.get("images", []), f"{where}: images")
    if not images:
        raise UserError(f"{where}: images: expected one picture of {name} or more, found none")
    digests = []
    for image in images:
        content = _read_image(file.parent / image, whose=name)
        digests.append(hashlib.sha256(content).hexdigest())
        pictures[digests[-1]] = content
    return Character(
        name=name,
        aliases=tuple(_name(alias, f"{where}: aliases") for alias in aliases),
        images=tuple(digests),
    )


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(
        isinstance(item, str) and "\0" not in item for item in value
    ):
        raise UserError(f'{where}: expected a list, ["..."], found {str(value)[:40]!r}')
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a text, found {str(value)[:40]!r}")
    try:
        name = plain(value, most=MAX_NAME)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if name.casefold() in NOBODY:
        raise UserError(f"{where}: expected a name, found {name!r}, which means that nobody fits")
    return name


def _refuse_doubles(characters: Sequence[Character], *, file: epath.Path) -> None:
    owners: dict[str, str] = {}
    for character in characters:
        for called in (character.name, *character.aliases):
            if (owner := owners.get(called.casefold())) is not None:
                raise UserError(
                    f"{file}: {called}: a name or alias of {owner} and again of {character.name}: "
                    "expected each once"
                )
            owners[called.casefold()] = character.name


def _read_image(path: epath.Path, *, whose: str) -> bytes:
    mend = f"expected a picture of {whose}"
    with telling(path, "cannot be read", mend=mend):
        content = path.read_bytes()
    open_picture(content, name=f"{path}", mend=mend)
    return content


def open_picture(content: bytes, *, name: str, mend: str) -> Image.Image:
    """An image file as red, green and blue, upright; what is transparent becomes white.

    Raises:
        UserError: the bytes are no image, damaged, or beyond Pillow's limit of pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as image:
                picture = upright(image)
    except Exception as error:  # Pillow's readers raise types of their own
        reason = (str(error).splitlines() or [""])[0].partition("<_io")[0].rstrip()
        reason = reason[:80] or type(error).__name__
        raise UserError(f"{name}: no image ({reason}): {mend}") from None
    return picture


def upright(image: Image.Image) -> Image.Image:
    """An opened image turned as its camera says, on white."""
    picture = ImageOps.exif_transpose(image).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")
