"""Dataclasses to JSON and back: the one reader of the JSON files of this package.

Reading is strict, because a configuration that is half understood makes another model without a
word: a value of another type, an unknown field or a missing field is an error. A field may be
missing only if its default is empty (None, 0, False, "" or a container without items), or if its
metadata has `omit_default`: files of earlier versions lack it. A field with `omit_default` is not
written at its default either, so those files, and digests of them, stay as they are. `pydantic`
checks the types; it is imported on the first use.

Functions that read take the type of the content, a dataclass or any other type that `pydantic` can
check. They raise `UserError` in one line: `where` or the path, the field, what was expected, what
was found, and `hint`, which says what to do about a missing or damaged file.
"""

import dataclasses
import functools
import json
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from etils import epath

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.untrusted import MAX_TEXT, read_file

T = TypeVar("T")

_Place = tuple[str | int, ...]
_TOO_DEEP = "it is nested too deeply"


def to_json(value: Any, *, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """Converts dataclasses to dictionaries and tuples to lists; `leaf` converts all other values.

    Numbers, strings and None stay as they are by default.
    """
    if dataclasses.is_dataclass(value):
        value = {
            field.name: item
            for field in dataclasses.fields(value)
            if not _omits(field, item := getattr(value, field.name))
        }
    if isinstance(value, Mapping):
        return {str(key): to_json(item, leaf=leaf) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item, leaf=leaf) for item in value]
    return leaf(value)


def read_json(path: epath.PathLike, kind: type[T] | Any, *, hint: str) -> T:
    """Reads a JSON file, local or in a bucket."""
    with user_errors(path, "cannot be read", hint=hint):
        data = read_file(path)
    where = os.fspath(path)
    return from_json(kind, parse_json(data, where, hint=hint), where, hint=hint)


@dataclasses.dataclass(frozen=True)
class Line(Generic[T]):
    """One line of a file with a JSON value on each line.

    Attributes:
        value: The value.
        where: The file's path and the line's number, for errors.
        data: The line as it is in the file, without its line break.
    """

    value: T
    where: str
    data: bytes

    @property
    def text(self) -> str:
        """The line as text, without a byte order mark."""
        return self.data.decode("utf-8-sig")


def read_lines(
    path: epath.PathLike,
    kind: type[T] | Any,
    *,
    hint: str,
    line_hint: str | None = None,
    may_grow: bool = False,
) -> Iterator[Line[T]]:
    """Reads a file with a JSON value on each line.

    Args:
        path: Local or in a bucket.
        kind: Type of the values.
        hint: What to do if the file cannot be read or is not complete.
        line_hint: What to do if a line is damaged; `hint` by default.
        may_grow: Whether the file is written line by line, so that its last line may be unfinished;
            it is left out.
    """
    with user_errors(path, "cannot be read", hint=hint):
        *lines, rest = read_file(path, most=MAX_TEXT).split(b"\n")
    if rest and not may_grow:
        raise UserError(f"{path}: expected a line break at the end, found none: {hint}")
    hint = hint if line_hint is None else line_hint
    for number, line in enumerate(lines, start=1):
        where = f"{os.fspath(path)}, line {number}"
        value = from_json(kind, parse_json(line, where, hint=hint), where, hint=hint)
        yield Line(value, where, line)


def decode_text(data: bytes, where: str) -> str:
    """Decodes UTF-8 text, with or without a byte order mark.

    Raises:
        UserError: It is another encoding; names the byte and its offset in `data`.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = len(data) - len(error.object) + error.start  # the mark is not in the object
        raise UserError(
            f"{where}: expected UTF-8 text, found byte 0x{data[offset]:02x} at offset {offset}: "
            "save it as UTF-8"
        ) from error


def parse_json(data: bytes | str, where: str, *, hint: str) -> Any:
    """Parses JSON text, in UTF-8 if bytes; refuses a field that occurs twice in one object."""
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=_unique_fields)
    except UnicodeDecodeError as error:
        reason = f"byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8"
    except RecursionError:
        reason = _TOO_DEEP
    except ValueError as error:
        reason = str(error).partition("; use sys.set_int_max_str_digits")[0]
    raise UserError(f"{where}: not valid JSON: {reason}: {hint}")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice[:60]!a} occurs twice in one object")
    return found


def from_json(kind: type[T] | Any, value: Any, where: str, *, hint: str = "") -> T:
    """Makes a value of a type from parsed JSON; the inverse of `to_json`."""
    import pydantic

    def refuse(place: _Place, problem: str) -> NoReturn:
        raise UserError(": ".join(filter(None, (where, field_path(place), problem, hint))))

    try:
        # As text again, because pydantic's strict mode accepts a list for a tuple only there.
        text = json.dumps([value], ensure_ascii=False, default=_other).encode()
        (found,) = _adapter(kind).validate_json(text)
    except pydantic.ValidationError as error:
        place, problem = _first_problem(error)
        refuse(place[1:], problem)
    except RecursionError:
        refuse((), _TOO_DEEP)
    except UnicodeEncodeError as error:
        refuse((), f"expected text, found half a character, U+{ord(error.object[error.start]):04X}")
    for place in _unstated(found, value, ()):
        refuse(place, "missing")
    return found


def _other(value: Any) -> dict[str, str]:
    """Wraps a value that JSON lacks, such as a date in TOML; no text, so no field accepts it."""
    return {type(value).__name__: str(value)}


@functools.cache
def _adapter(kind: Any) -> Any:
    import pydantic

    config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    alone: Any = types.GenericAlias(tuple, (kind,))  # a dataclass itself takes no configuration
    return pydantic.TypeAdapter(alone, config=config)


def array_field(dtype: Any, num_axes: int) -> Any:
    """Returns a `pydantic` validator that makes an array field of nested lists.

    Among numbers that need not be whole, null becomes NaN. Without any item, all axes are empty.

    Args:
        dtype: Type of the items: bool, int or float.
        num_axes: Number of the array's axes.
    """
    import numpy as np
    import pydantic

    allowed = (int, float, type(None)) if dtype is float else (dtype,)

    def make(value: Any) -> Any:
        found = np.array(value, object)
        if not found.size and isinstance(value, list):
            return np.zeros((0,) * num_axes, dtype)
        if found.ndim != num_axes or any(type(item) not in allowed for item in found.flat):
            raise ValueError(f"expected lists of {dtype.__name__} in {num_axes} dimensions")
        try:
            return found.astype(dtype)
        except OverflowError:
            raise ValueError(f"expected numbers that fit into {dtype.__name__}") from None

    return pydantic.PlainValidator(make)


def _first_problem(error: Any) -> tuple[_Place, str]:
    """Returns the first wrong field of a `pydantic.ValidationError`, and what is wrong with it."""
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":  # of the text made above, so it is not the syntax
        return (0,), _TOO_DEEP
    if problem["type"] == "missing":
        return problem["loc"], "missing"
    if problem["type"] == "unexpected_keyword_argument":
        return problem["loc"], "unknown field"
    text = problem["msg"].removeprefix("Value error, ")
    text = re.sub(r"^\w+ should (be|have) ", "expected ", text)
    text = re.sub(r" after validation, not \d+$", "", text)
    text = re.sub(r"^expected (greater|less) than", r"expected a number \1 than", text)
    if isinstance(problem["input"], dict) and problem["type"] == "value_error":
        return problem["loc"], text  # of fields that do not go together
    return problem["loc"], f"{text}, found {shown(problem['input'])}"


def field_path(place: _Place) -> str:
    """Returns a field's path as in Python, `turns[0].seconds.total`, with long names cut."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step:.60}" for step in place)
    return "".join(steps).lstrip(".")


def _unstated(found: Any, value: Any, place: _Place) -> Iterator[_Place]:
    """Yields the fields that `value` leaves to a default that is not empty."""
    if dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            inner = getattr(found, field.name)
            if field.name in value:
                yield from _unstated(inner, value[field.name], (*place, field.name))
            elif inner and not _omits(field, inner):
                yield (*place, field.name)
    elif isinstance(found, Mapping):
        for key, inner in found.items():
            yield from _unstated(inner, value[key], (*place, key))
    elif isinstance(found, (tuple, list)):
        for index, inner in enumerate(found):
            yield from _unstated(inner, value[index], (*place, index))


def _omits(field: dataclasses.Field[Any], value: Any) -> bool:
    """Returns whether files leave out a field with this value."""
    return field.metadata.get("omit_default", False) and value == field.default


def shown(value: Any) -> str:
    """Returns a value as an error shows it: JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dictionaries by dotted path."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def first_difference(
    stored: Mapping[str, Any], found: Mapping[str, Any], *, free: Collection[str] = ()
) -> str | None:
    """Returns the first field in which two configurations differ, with both values, or None.

    Fields have dotted names; those in `free` may differ.
    """
    old, new = dict(flattened(stored)), dict(flattened(found))
    for field in (*old, *(name for name in new if name not in old)):
        if field in free or (field in old and field in new and old[field] == new[field]):
            continue
        return f"{field} was {old.get(field, 'absent')!r}, is {new.get(field, 'absent')!r}"
    return None
