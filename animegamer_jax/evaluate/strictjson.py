"""Values of a JSON file of people's, each checked with its place in the message."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from animegamer_jax.errors import UserError

_LONGEST_TEXT = 400


def load(text: str) -> Any:
    """`json.loads` without what JSON does not have: doubled fields, NaN and infinities.

    Raises:
        ValueError: in one line, why it is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {double!a} twice in one object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def shown(value: Any) -> str:
    """A value as a message shows it: JSON, at most 60 letters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def fields(
    value: Any, where: str, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """A copy of an object that has the required fields and no unknown one.

    Raises:
        UserError: it is another value.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object, found {shown(value)}")
    if unknown := [name for name in value if name not in (*required, *optional)]:
        known = ", ".join((*required, *optional))
        raise UserError(f"{where}: unknown field {unknown[0][:60]!a}: expected {known}")
    if missing := [name for name in required if name not in value]:
        raise UserError(f"{where}: {missing[0]}: missing: expected the field {missing[0]}")
    return dict(value)


def text_line(value: Any, where: str) -> str:
    """One line of text, not empty, without spaces around it.

    Raises:
        UserError: it is another value.
    """
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a text, found {shown(value)}")
    if not value.strip():
        raise UserError(f"{where}: expected a text, found an empty one")
    if not value.isprintable() or value != value.strip():
        raise UserError(
            f"{where}: expected one line without spaces around it, found {shown(value)}"
        )
    if len(value) > _LONGEST_TEXT:
        raise UserError(f"{where}: expected at most {_LONGEST_TEXT} letters, found {len(value)}")
    return value


def texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of one such line or more, each once.

    Raises:
        UserError: it is another value.
    """
    found = tuple(text_line(item, where) for item in some(value, where))
    refuse_doubles(found, where, "name")
    return found


def whole(value: Any, where: str, *, low: int, below: int | None = None) -> int:
    """A whole number from `low`, below `below`.

    Raises:
        UserError: it is another value.
    """
    if type(value) is not int or value < low or (below is not None and value >= below):
        most = "" if below is None else f" to {below - 1}"
        raise UserError(
            f"{where}: expected a whole number from {low}{most or ' up'}, found {shown(value)}"
        )
    return value


def one_of(value: Any, allowed: Sequence[Any], where: str, what: str = "one") -> Any:
    """A value that is allowed, of the same type; `what` it is stands in the message.

    Raises:
        UserError: it is another value.
    """
    if type(value) is not type(allowed[0]) or value not in allowed:
        expected = ", ".join(map(str, allowed))
        raise UserError(f"{where}: expected {what} of {expected:.200}, found {shown(value)}")
    return value


def some(value: Any, where: str, *, empty: bool = False) -> list[Any]:
    """A list, which may be empty or not.

    Raises:
        UserError: it is another value.
    """
    if not isinstance(value, list):
        raise UserError(f"{where}: expected a list, found {shown(value)}")
    if not value and not empty:
        raise UserError(f"{where}: expected one or more, found an empty list")
    return value


def refuse_doubles(values: Iterable[str], where: str, what: str) -> None:
    """Makes sure that every value comes once.

    Raises:
        UserError: names one that comes again.
    """
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise UserError(f"{where}: {value[:60]}: expected every {what} once, found it again")
        seen.add(value)
