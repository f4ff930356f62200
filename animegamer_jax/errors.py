"""Errors for the user, in one line: what is wrong, what was expected, and what to do."""

import unicodedata


class UserError(Exception):
    """Printed by the command line without a traceback; the exit status is 2."""


class NonFiniteError(UserError):
    """A network returned a NaN or an infinity; the message names the turn and the step."""


def check_at_least(name: str, value: int | float | None, low: int) -> None:
    """Checks a number that a user gave; None passes.

    Raises:
        UserError: It is below `low`.
    """
    if value is not None and value < low:
        raise UserError(f"{name} {value}: expected {low} or more")


def check_between(name: str, value: int | None, low: int, high: int) -> None:
    """Checks a whole number that a user gave; None passes.

    Raises:
        UserError: It is not from `low` to `high`.
    """
    if value is not None and not low <= value <= high:
        raise UserError(f"{name}: expected a whole number, {low} to {high}, found {value}")


def printable(text: str) -> str:
    """Returns text that can be printed anywhere, in one line: control characters are escaped.

    Names and contents of files are any bytes, and a terminal obeys some of them.
    """
    return "".join(
        character
        if character.isprintable() or unicodedata.category(character) == "Zs"  # wide spaces
        else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """Returns text of one or several lines, each as `printable` makes it."""
    return "\n".join(map(printable, text.split("\n")))


def first_line(error: BaseException, *, most: int = 160) -> str:
    """Returns the first line of an error's text, or its type's name if it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return printable(next(filter(None, lines), type(error).__name__))[:most]
