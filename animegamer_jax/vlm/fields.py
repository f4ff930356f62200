"""Types of fields in a model's answers, which people's tables share: validated on return."""

from typing import Any

import pydantic

from animegamer_jax.data.characters import plain


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
