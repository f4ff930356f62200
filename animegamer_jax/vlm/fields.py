"""Field types of models' answers and of manual annotations; values are validated and cleaned."""

import unicodedata
from typing import Any

import pydantic

from animegamer_jax.storage.serialization import field_path

_MOST_PROBLEMS = 10  # of an answer that are explained


def text_of(most: int) -> Any:
    """Returns the type of a plain text of at most `most` characters."""
    return pydantic.AfterValidator(lambda text: plain(text, most=most))


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):  # Python takes True for 1
        raise ValueError("expected a whole number")
    return value


LOWER = pydantic.AfterValidator(str.lower)
LOWER_FIRST = pydantic.AfterValidator(lambda text: text[:1].lower() + text[1:])
WHOLE = pydantic.BeforeValidator(_refuse_bool)

_MARKS = " '-,.&"


def plain(text: str, *, most: int) -> str:
    """Cleans a text to one line of letters, digits, spaces and a few marks, for an instruction.

    Raises:
        ValueError: It holds anything else, no letter or digit, or more than `most` characters.
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


def explain(error: pydantic.ValidationError) -> str:
    """Returns in one line what is wrong: the first fields, what was expected, what was found."""
    problems = []
    found_all = error.errors(include_url=False)
    for problem in found_all[:_MOST_PROBLEMS]:
        where = field_path(problem["loc"])
        cause = problem.get("ctx", {}).get("error")  # of our own checks
        text = str(cause) if cause is not None else problem["msg"]
        found = problem["input"]
        if cause is None and isinstance(found, (str, int, float)):
            text += f", found {found!a:.60}"
        problems.append(f"{where}: {text}" if where else text)
    if len(found_all) > _MOST_PROBLEMS:
        problems.append(f"and {len(found_all) - _MOST_PROBLEMS} more")
    return "; ".join(problems)
