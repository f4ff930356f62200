"""JSON of nested settings, flattened and compared."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path to nested dictionaries, as Orbax stores them."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The inverse of `nested`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def first_difference(
    stored: Mapping[str, Any], found: Mapping[str, Any], *, free: Collection[str] = ()
) -> str | None:
    """The first field in which two configurations differ, with what each says of it, or None.

    Fields are told by dotted names; those in `free` may differ.
    """
    old, new = dict(flattened(stored)), dict(flattened(found))
    for field in (*old, *(name for name in new if name not in old)):
        if field in free or (field in old and field in new and old[field] == new[field]):
            continue
        return f"{field} was {old.get(field, 'absent')!r}, is {new.get(field, 'absent')!r}"
    return None
