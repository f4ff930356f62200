"""Types of fields in a model's answers, which people's tables share: validated on return."""

import unicodedata
from typing import Any

import pydantic


def text_of(most: int) -> Any:
    """A plain text of at most `most` letters."""
    return pydantic.AfterValidator(lambda text: plain(text, most=most))


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):  # Python takes True for 1
        raise ValueError("expected a whole number")
    return value


def _begin_small(text: str) -> str:
    return text[:1].lower() + text[1:]


LOWER = pydantic.AfterValidator(str.lower)
BEGIN_SMALL = pydantic.AfterValidator(_begin_small)
WHOLE = pydantic.BeforeValidator(_not_bool)


def explain(error: pydantic.ValidationError) -> str:
    """What is wrong with a record, in one line: field, what was expected, what was found."""
    told = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        cause = problem.get("ctx", {}).get("error")  # of our own checks
        text = str(cause) if cause is not None else problem["msg"]
        found = problem["input"]
        if cause is None and isinstance(found, (str, int, float)):
            text += f", found {found!a:.60}"
        told.append(f"{where}: {text}" if where else text)
    return "; ".join(told)


_MARKS = " '-,.&"


def plain(text: str, *, most: int) -> str:
    """A text in one line, of letters, digits, spaces and a few marks, as instructions can hold it.

    Raises:
        ValueError: other signs (they would break the form of an instruction), no letter, or more
            than `most` characters.
    """
    text = unicodedata.normalize("NFKC", text).replace("\u2019", "'")
    text = " ".join(text.split()).strip(" .,")
    for sign in text:
        if unicodedata.category(sign)[0] not in "LMN" and sign not in _MARKS:
            raise ValueError(f"expected letters, digits, spaces and {_MARKS[1:]}, found {sign!a}")
    if not any(sign.isalnum() for sign in text):
        raise ValueError("expected a word or more, found none")
    if len(text) > most:
        raise ValueError(f"expected at most {most} characters, found {len(text)}")
    return text
