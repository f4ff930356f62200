"""Dataclasses to JSON and back: what is read, and errors that name the file and the field."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Interval

from animegamer_jax.configs import LoRAConfig
from animegamer_jax.errors import UserError
from animegamer_jax.storage.serialization import (
    array_field,
    first_difference,
    flattened,
    from_json,
    parse_json,
    read_json,
    read_lines,
    to_json,
)

HINT = "write the file again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    format_version: Literal[1] = 1
    name: str
    size: int = 8
    rate: Annotated[float, Ge(0)] = 0.5
    level: Annotated[int, Interval(ge=1, le=5)] = 3
    is_open: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    widths: tuple[int, ...] = ()
    grid: tuple[int, int] | None = None
    lora: LoRAConfig | None = None
    parts: Mapping[str, LoRAConfig] = dataclasses.field(default_factory=dict)
    about: Any = None
    later: Literal["old", "new"] = dataclasses.field(default="old", metadata={"omit_default": True})


SETTINGS = Settings(
    name="a name",
    widths=(1, 2),
    grid=(3, 4),
    lora=LoRAConfig(rank=2, alpha=1.0),
    parts={"dit": LoRAConfig(rank=1, alpha=0.5)},
    about={"list": [1, None, "x"]},
)


def test_a_dataclass_comes_back():
    content = json.loads(json.dumps(to_json(SETTINGS)))
    assert from_json(Settings, content, "file") == SETTINGS
    whole = from_json(Settings, content | {"rate": 2}, "file").rate
    assert (type(whole), whole) == (float, 2.0)


def test_only_empty_defaults_may_be_missing():
    content = to_json(Settings(name="a name"))
    for field in ("is_open", "widths", "grid", "lora", "parts", "about"):
        del content[field]
    assert from_json(Settings, content, "file") == Settings(name="a name")
    for field in content:
        lacking = {name: value for name, value in content.items() if name != field}
        with pytest.raises(UserError) as caught:
            from_json(Settings, lacking, "file", hint=HINT)
        assert str(caught.value) == f"file: {field}: missing: {HINT}"


def test_a_later_field_changes_no_file_of_before():
    """It is not written at its default, so files and their digests stay as they are."""
    content = to_json(SETTINGS)
    assert "later" not in content
    assert from_json(Settings, content, "file").later == "old"
    assert from_json(Settings, content | {"later": "old"}, "file") == SETTINGS
    changed = dataclasses.replace(SETTINGS, later="new")
    assert to_json(changed) == content | {"later": "new"}
    assert from_json(Settings, to_json(changed), "file") == changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"later": "newest"}, "later: expected 'old' or 'new', found \"newest\""),
        ({"depth": 3}, f"depth: unknown field: {HINT}"),
        ({"format_version": 2}, "format_version: expected 1, found 2"),
        ({"format_version": 2, "depth": 3, "name": 1}, "format_version: expected 1, found 2"),
        ({"size": "8"}, 'size: expected a valid integer, found "8"'),
        ({"size": True}, "size: expected a valid integer, found true"),
        ({"size": 8.0}, "size: expected a valid integer, found 8.0"),
        ({"name": None}, "name: expected a valid string, found null"),
        ({"is_open": 1}, "is_open: expected a valid boolean, found 1"),
        ({"rate": "x" * 99}, f'rate: expected a valid number, found "{"x" * 56}...'),
        ({"rate": -1}, "rate: expected a number greater than or equal to 0, found -1"),
        ({"rate": math.nan}, "rate: expected a finite number, found NaN"),
        ({"level": 6}, "level: expected a number less than or equal to 5, found 6"),
        ({"dtype": "int8"}, "dtype: expected 'float32' or 'bfloat16', found \"int8\""),
        ({"widths": 3}, "widths: expected a valid array, found 3"),
        ({"widths": [1, "2"]}, 'widths[1]: expected a valid integer, found "2"'),
        ({"grid": [1]}, "grid[1]: missing"),
        ({"grid": [1, 2, 3]}, "grid: expected at most 2 items"),
        ({"lora": 3}, "lora: expected an object, found 3"),
        ({"lora": {"rank": 1}}, "lora.alpha: missing"),
        ({"parts": []}, "parts: expected an object, found []"),
        ({"parts": {"dit": {"rank": 1, "alpha": "1"}}}, "parts.dit.alpha: expected a valid number"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(changes, message):
    with pytest.raises(UserError) as caught:
        from_json(Settings, to_json(SETTINGS) | changes, "file", hint=HINT)
    assert str(caught.value).startswith(f"file: {message}")
    assert str(caught.value).endswith(f": {HINT}")
    assert "\n" not in str(caught.value)


def test_something_else_than_an_object():
    with pytest.raises(UserError, match=r"^file: expected an object, found \[\]$"):
        from_json(Settings, [], "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value: line 1 column 1"),
        (b'{"name": ', "Expecting value: line 1 column 10"),
        (b'{"name": "\xff"}', "byte 0xff at offset 10 is not UTF-8"),
        (b'{"name": 1, "name": 2}', "the field 'name' occurs twice in one object"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
)
def test_text_that_is_not_json(tmp_path, text, message):
    file = tmp_path / "file.json"
    file.write_bytes(text)
    with pytest.raises(UserError) as caught:
        read_json(file, Settings, hint=HINT)
    assert str(caught.value).startswith(f"{file}: not valid JSON: {message}")
    assert str(caught.value).endswith(f": {HINT}")


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"none\.json: cannot be read: No such file.*: write the"):
        read_json(tmp_path / "none.json", Settings, hint=HINT)


def test_a_byte_order_mark_is_accepted():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "file", hint=HINT) == {"a": 1}


def test_other_values_have_a_converter():
    content = {"a": (1.5, math.nan), "b": {3: math.inf}}
    finite = to_json(content, leaf=lambda x: x if math.isfinite(x) else None)
    assert finite == {"a": [1.5, None], "b": {"3": None}}


def test_flat():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert dict(flattened(tree)) == {"a.b": 1, "a.c.d": 2, "e": 3}


def test_the_first_difference():
    old = {"a": {"b": 1, "c": 2}}
    assert first_difference(old, {"a": {"b": 1, "c": 2}}) is None
    assert first_difference(old, {"a": {"b": 1, "c": 3}}) == "a.c was 2, is 3"
    assert first_difference(old, {"a": {"b": 1, "c": 3}}, free={"a.c"}) is None
    assert first_difference(old, {**old, "d": 4}) == "d was 'absent', is 4"


def test_imports_are_lazy():
    code = "import animegamer_jax.cli, animegamer_jax.storage.serialization, sys; "
    code += "sys.exit('pydantic' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    real: Annotated[Any, array_field(float, 1)] = None
    whole: Annotated[Any, array_field(int, 1)] = None
    other: Any = None
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f'{{"real": [1{"0" * 400}]}}', r"real: expected numbers that fit into float"),
        (f'{{"whole": [1{"0" * 400}]}}', r"whole: expected numbers that fit into int"),
        (f'{{"scores": {{"a": 1{"0" * 400}}}}}', r"scores.a: expected a finite number"),
        (f'{{"other": 1{"0" * 5000}}}', r"not valid JSON: .*4300 digits\D*: value has 5001 digits"),
        (f'{{"other": {"[" * 300}{"]" * 300}}}', "(not valid JSON: )?it is nested too deeply"),
        (f'{{"other": {"[" * 950}{"]" * 950}}}', "(not valid JSON: )?it is nested too deeply"),
        ("[" * 100_000, "not valid JSON: it is nested too deeply"),
        ('{"scores": {"\\ud800": 1}}', r"expected text, found half a character, U\+D800"),
        ('{"other": "\\udfff"}', r"expected text, found half a character, U\+DFFF"),
    ],
)
def test_numbers_and_texts_that_nothing_can_hold(tmp_path, content, problem):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"^{path}: {problem}.*: {HINT}$"):
        read_json(path, Table, hint=HINT)


def test_lines_have_their_places_and_texts(tmp_path):
    file = tmp_path / "numbers.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a":  2}\n')
    found = list(read_lines(file, dict[str, int], hint="write it again"))
    assert [line.value["a"] for line in found] == [1, 2]
    assert [line.text for line in found] == ['{"a": 1}', '{"a":  2}']
    assert [line.where for line in found] == [f"{file}, line 1", f"{file}, line 2"]


def test_only_a_file_that_grows_may_end_within_a_line(tmp_path):
    file = tmp_path / "numbers.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": ')
    (line,) = read_lines(file, dict[str, int], hint="write it again", may_grow=True)
    assert line.value == {"a": 1}
    with pytest.raises(UserError, match=r"expected a line break at the end.*: write it again$"):
        list(read_lines(file, dict[str, int], hint="write it again"))


def test_a_damaged_line_has_a_hint_of_its_own(tmp_path):
    file = tmp_path / "numbers.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": "x"}\n')
    with pytest.raises(UserError, match=rf'^{file}, line 2: a: .*found "x": remove the line$'):
        list(read_lines(file, dict[str, int], hint="write it again", line_hint="remove the line"))
    with pytest.raises(UserError, match=r"cannot be read: .*: write it again$"):
        list(read_lines(tmp_path, dict[str, int], hint="write it again", line_hint="remove it"))
