"""Changes of text and JSON; the same seed makes the same change."""

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

_INSERTED = {
    "NUL": "\0",
    "escape sequences": "\x1b]0;title\x07\x1b[31mred\x1b[2J",
    "C1 controls": "\x9b31m\x90",
    "right to left": "\u202egnp.exe",
    "carriage returns": "\r\r",
    "a byte order mark": "\ufeff",
    "a long line": "x" * 3_000_000,
    "many lines": "\n" * 300_000,
    "quotes": "\"'`$(touch touched)<script>",
    "a percent": "%s%n%(x)s{0}{__class__}",
}


def change_text(data: bytes, rng: random.Random, _: Path) -> tuple[str, bytes] | None:
    text = data.decode(errors="replace")
    place = rng.randrange(len(text) + 1)
    match rng.randrange(7):
        case 0:
            code = rng.choice(["utf-16", "utf-32", "utf-7", "cp037"])
            return code, text.encode(code, "replace")
        case 1:
            return "Latin-1", text[:place].encode() + b"\xe9\xff" + text[place:].encode()
        case 2 | 3 | 4:
            name = rng.choice(list(_INSERTED))
            return f"{name} at {place}", (text[:place] + _INSERTED[name] + text[place:]).encode()
        case 5:
            numbers = list(re.finditer(r"\d+", text))
            if not numbers:
                return None
            span, new = rng.choice(numbers).span(), rng.choice(_NUMBERS)
            return f"number {new[:20]}", (text[: span[0]] + new + text[span[1] :]).encode()
        case _:
            lines = text.split("\n")
            a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[a], lines[b] = lines[b], lines[a]
            return "two lines swapped", "\n".join(lines).encode()


_NUMBERS = ("-1", "0", "1e999", "-0", "99999999999999999999", "9" * 5000, "1.5", "NaN", "0x10",
            "2147483648", "9223372036854775808", "1_000", "\u0661")  # fmt: skip


class _Raw(NamedTuple):
    """Text that is put into JSON as it is."""

    text: str


def _values(rng: random.Random, old: Any, canary: Path) -> tuple[str, Any]:
    suffix = Path(old).suffix if isinstance(old, str) else ""
    choices: dict[str, Any] = {
        "null": None,
        "true": True,
        "zero": 0,
        "minus one": -1,
        "one more": old + 1 if type(old) in (int, float) else 1,
        "a large number": 2**31,
        "a larger number": 2**63,
        "a number of 400 digits": 10**400,
        "a number of 5000 digits": _Raw("9" * 5000),
        "a fraction": 0.5,
        "a huge fraction": 1e308,
        "too large for a float": _Raw("1e999"),
        "NaN": _Raw("NaN"),
        "Infinity": _Raw("-Infinity"),
        "an empty text": "",
        "a text": "x",
        "a text with NUL": f"a\0b{suffix}",
        "a text with escapes": f"\x1b]0;title\x07\x1b[31m{suffix}",
        "half a character": f"\ud800{suffix}",
        "a long text": "x" * 100_000 + suffix,
        "a long name": "n" * 300 + suffix,
        "a path upwards": f"../canary/secret{suffix}",
        "a path far upwards": f"../../../canary/secret{suffix}",
        "an absolute path": f"{canary}/secret{suffix}",
        "a path to a device": "/dev/zero",
        "a number as text": "12",
        "an empty list": [],
        "an empty object": {},
        "nested lists": _Raw("[" * 500 + "]" * 500),
        "deeply nested lists": _Raw("[" * 200_000 + "]" * 200_000),
        "deeply nested objects": _Raw('{"a":' * 100_000 + "1" + "}" * 100_000),
        "a long list": [0] * 300_000,
        "a list around it": [old],
        "an object around it": {"value": old},
    }
    name = rng.choice(list(choices))
    return name, choices[name]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in list(items)[:200]:
        found += _paths(item, (*path, key))
    return found


def changed_json(value: Any, rng: random.Random, canary: Path) -> tuple[str, str]:
    """Returns what was changed at one place of a JSON value, and the new text."""
    paths = _paths(value)
    # Places near the top are few among the many in long lists.
    depth = rng.randrange(1, max(map(len, paths)) + 1) if len(paths) > 1 else 0
    path = rng.choice([p for p in paths if len(p) == depth] or paths)
    where = ".".join(map(str, path)) or "all"
    raws: list[str] = []

    def plain(item: Any) -> Any:
        if isinstance(item, _Raw):
            raws.append(item.text)
            return f"@@{len(raws) - 1}@@"
        return item

    parent, old = None, value
    for key in path:
        parent, old = old, old[key]
    action = rng.randrange(8) if parent is not None else 7
    name = ""
    if action == 0 and isinstance(parent, (dict, list)):
        del parent[path[-1]]
        name = "removed"
    elif action == 1 and isinstance(value, dict) and "tokenizer_class" in value:
        value["auto_map"] = {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}
        value["tokenizer_class"] = "Tokenizer"
        name = "code to run"
    elif action == 1 and isinstance(parent, dict):
        key = rng.choice(["unknown", "", "__class__", "\x1b[31m", "x" * 5000, path[-1] + "_"])
        parent[key] = old
        name = f"also as {key[:20]!a}"
    elif action == 2 and isinstance(parent, dict):
        parent[rng.choice(["renamed", path[-1].upper()])] = parent.pop(path[-1])
        name = "renamed"
    elif action == 3 and isinstance(parent, list):
        parent.insert(path[-1], old)
        name = "twice"
    elif action == 3 and isinstance(parent, dict):
        other = rng.choice(list(parent))
        parent[path[-1]], parent[other] = parent[other], old
        name = f"swapped with {other}"
    else:
        name, new = _values(rng, old, canary)
        if parent is None:
            value = plain(new)
        else:
            parent[path[-1]] = plain(new)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    for number, raw in enumerate(raws):
        text = text.replace(f'"@@{number}@@"', raw)
    if action == 4 and isinstance(value, dict) and value:
        key = next(iter(value))
        text = text.replace("{", f"{{{json.dumps(key)}: 1, ", 1)
        name += ", the first field twice"
    return f"{where[:60]}: {name}", text


def change_json(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    name, text = changed_json(json.loads(data), rng, canary)
    return name, text.encode("utf-8", "surrogatepass")


def change_lines(data: bytes, rng: random.Random, canary: Path) -> tuple[str, bytes] | None:
    lines = data.split(b"\n")
    filled = [i for i, line in enumerate(lines) if line.strip()]
    if not filled:
        return None
    chosen = rng.choice(filled)
    found = change_json(lines[chosen], rng, canary)
    assert found is not None
    lines[chosen] = found[1]
    return f"line {chosen + 1}: {found[0]}", b"\n".join(lines)
