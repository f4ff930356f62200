"""Instructions: the lines of a file or a prompt, parsed and checked before a game begins."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import decode_text
from animegamer_jax.storage.untrusted import read_file


class Line(NamedTuple):
    """An instruction and the number of its line, from 1."""

    number: int
    text: str


def parse_instructions(data: bytes, source: str) -> list[Line]:
    """Parses a file's bytes: UTF-8, one instruction a line, without blank lines and # comments.

    Raises:
        UserError: Another encoding (names the byte offset), control characters, no instruction.
    """
    lines = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", decode_text(data, source)), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            check_characters(line)
        except UserError as error:
            raise UserError(f"{source}, line {number}: {error}") from error
        lines.append(Line(number, line))
    if not lines:
        raise UserError(
            f"{source}: expected instructions, one a line, found none: write for example "
            "'Character: Qiqi; Motion: gently turn head; Background: day town.'"
        )
    return lines


def read_instructions(path: Path) -> list[Line]:
    """Reads a file of instructions (`parse_instructions`).

    Raises:
        UserError: The file cannot be read, or its content cannot be played.
    """
    with user_errors(path, "cannot be read", hint="give a file of instructions, one a line"):
        data = read_file(path)
    return parse_instructions(data, str(path))


def check_characters(text: str) -> None:
    """Rejects characters that a saved game cannot hold: control characters and broken Unicode.

    Raises:
        UserError: Names the character and its column.
    """
    for index, character in enumerate(text):
        code = ord(character)
        if (code < 32 and character != "\t") or code == 127:
            kind = "a control character"
        elif 0xD800 <= code <= 0xDFFF:
            kind = "a broken character"
        else:
            continue
        raise UserError(f"expected text, found {kind}, U+{code:04X}, at column {index + 1}")


def check_instructions(lines: list[Line], source: str, *, check: Callable[[str], None]) -> None:
    """Checks all instructions before the first is played.

    Raises:
        UserError: Names the first line that cannot be played, and the number of other ones.
    """
    errors = []
    for line in lines:
        try:
            check(line.text)
        except UserError as error:
            errors.append(f"{source}, line {line.number}: {error}")
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UserError(errors[0] + more)


def compose_instruction(*, character: str, adverb: str, motion: str, time: str, place: str) -> str:
    """Joins the parts of an instruction in the released form, without those that are empty."""
    parts = {"Character": [character], "Motion": [adverb, motion], "Background": [time, place]}
    texts = {label: " ".join(" ".join(words).split()) for label, words in parts.items()}
    text = "; ".join(f"{label}: {text}" for label, text in texts.items() if text)
    return f"{text}." if text else ""


def check_picture_text(text: str, *, name: str) -> str:
    """Returns the text of a player's own picture without surplus spaces.

    Args:
        text: The text, in the form of an instruction.
        name: The picture's name in messages.

    Raises:
        UserError: It is empty, or has characters that a saved game cannot hold.
    """
    try:
        check_characters(text)
    except UserError as error:
        raise UserError(f"{name}: its text: {error}") from error
    text = " ".join(text.split())
    if not text:
        raise UserError(
            f"{name}: expected a text with the picture, found none: say who is in it, what they do "
            "and where, as in an instruction"
        )
    return text


def motion_of(text: str) -> str:
    """Returns the motion of an instruction in the released form, or all of another text."""
    found = re.search(r"(?:^|;)\s*Motion:\s*([^;]+)", text, re.IGNORECASE)
    return found[1].strip(" .") or text if found else text
