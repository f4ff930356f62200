"""What checks annotated types in the tests: beartype, once for each function inside a function.

jaxtyping has every function checked that a module defines, also those inside functions, which are
made at each call: beartype took longer than many of these calls. It is given stand-ins with the
same names and annotations and no content, so that those of an earlier call do as well.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_MOST = 4096
_known: dict[Any, Callable[..., Any]] = {}


def check(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that checks its arguments by their annotations."""
    if "<locals>" not in stand_in.__qualname__:
        return beartype(stand_in)
    code = stand_in.__code__
    names = code.co_varnames, code.co_flags, code.co_kwonlyargcount, code.co_posonlyargcount
    place = stand_in.__module__, stand_in.__qualname__
    try:
        key = (*place, *names, tuple(stand_in.__annotations__.items()))
        found = _known.get(key)
    except TypeError:  # an annotation cannot be looked up
        return beartype(stand_in)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[key] = beartype(stand_in)
    return found
