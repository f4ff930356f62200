"""Benchmarks: the format and its strict reader."""

import copy
import dataclasses
import json
import re

import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import (
    PARTS,
    SCHEMA_FILE,
    SHIPPED,
    Benchmark,
    BenchmarkGame,
    BenchmarkTurn,
    Detail,
    Parts,
    SceneTruth,
    StateValues,
    benchmark_path,
    check_characters,
    compose,
    format_benchmark,
    parse_benchmark,
    read_benchmark,
    write_benchmark,
)

SMALL = {
    "format_version": 1,
    "name": "small",
    "world": "a film",
    "made_by": "hand",
    "num_turns": 2,
    "states": {"social": [0, 1], "entertainment": [0, 1], "stamina": [-1, 1]},
    "characters": ["Aki", "Botan"],
    "games": [
        {
            "id": name,
            "seed": seed,
            "characters": ["Aki"],
            "turns": [
                {
                    "turn": 1,
                    "instruction": "Character: Aki; Motion: slowly walking; Background: day park.",
                    "parts": {
                        "character": "Aki",
                        "adverb": "slowly",
                        "motion": "walking",
                        "time": "day",
                        "place": "park",
                    },
                    "motion_level": 2,
                    "social": 0,
                    "entertainment": 0,
                    "stamina": 1,
                },
                {
                    "turn": 2,
                    "instruction": "Now run.",
                    "parts": {"character": "Aki", "motion": "running", "place": "park"},
                    "omitted": ["character", "place"],
                    "motion_level": 4,
                    "social": 1,
                    "entertainment": 1,
                    "stamina": -1,
                    "caption": "Aki runs in the park",
                },
            ],
        }
        for name, seed in (("first", 3), ("second", 4))
    ],
}


def changed(*path, to=..., without=None, **more) -> dict:
    """`SMALL` with a value set at a path, a field of the object there removed, or fields added."""
    content = copy.deepcopy(SMALL)
    *way, last = path or (None,)
    at = content
    for step in way:
        at = at[step]
    if to is not ...:
        at[last] = to
        return content
    here = at if last is None else at[last]
    if without is not None:
        del here[without]
    here |= more
    return content


TURN = ("games", 1, "turns", 1)
GOOD = [
    SMALL,
    changed(*TURN, "omitted", to=[]),
    changed(*TURN, without="omitted"),
    changed(*TURN, "parts", to={}),
    changed(*TURN, motion_text="running", scene={"motion": "run"}),
    changed(*TURN, scene={"motion": "talk", "partner": "Kai", "seed": 5}),
    changed("states", "stamina", to=[-2, -1, 1]),
    changed("games", 0, "id", to="erste Übung"),
]
WRONG = [
    (changed("format_version", to=2), "format_version: expected 1, found 2"),
    (changed(without="format_version"), "format_version: missing"),
    (changed("format_version", to=True), "format_version: expected a whole number, found true"),
    (changed("format_version", to="1"), 'format_version: expected 1, found "1"'),
    (changed(without="world"), "world: missing"),
    (changed(extra=1), "extra: unknown field"),
    (
        changed("characters", to=[]),
        "characters: expected at least 1 item, fo",
    ),
    (
        changed("characters", to=["Aki", "Aki"]),
        'characters: expected each value once, found ["Aki", "Aki"]',
    ),
    (
        changed("states", "stamina", to=[-9, 1]),
        "states.stamina[0]: expected a number greater than or equal to -5",
    ),
    (changed("states", mood=[0]), "states.mood: unknown field"),
    (
        changed("num_turns", to=0),
        "num_turns: expected a number greater than or equal to 1, found 0",
    ),
    (changed("games", to=[]), "games: expected at least 1 item, found ["),
    (changed("games", to={}), "games: expected a valid array, found {}"),
    (changed("games", 1, to=None), "games[1]: expected an object, found null"),
    (
        changed("games", 1, "seed", to=-1),
        "games[1].seed: expected a number greater than or equal to 0, fou",
    ),
    (changed("games", 1, without="seed"), "games[1].seed: missing"),
    (changed("games", 1, "id", to=""), 'games[1].id: expected text, found ""'),
    (changed("games", 1, note="x"), "games[1].note: unknown field"),
    (changed(*TURN, to=[]), "games[1].turns[1]: expected an object, found []"),
    (
        changed(*TURN, "instruction", to=""),
        'games[1].turns[1].instruction: expected text, found ""',
    ),
    (
        changed(*TURN, "instruction", to="   "),
        'games[1].turns[1].instruction: expected text, found "   "',
    ),
    (
        changed(*TURN, "instruction", to=" Go."),
        "games[1].turns[1].instruction: expected one line without spaces",
    ),
    (
        changed(*TURN, "instruction", to="Go\non."),
        "games[1].turns[1].instruction: expected one line without spaces",
    ),
    (
        changed(*TURN, "instruction", to="x" * 401),
        "games[1].turns[1].instruction: expected at most 400 characters,",
    ),
    (
        changed(*TURN, "instruction", to=7),
        "games[1].turns[1].instruction: expected a valid string, found 7",
    ),
    (changed(*TURN, without="instruction"), "games[1].turns[1].instruction: missing"),
    (
        changed(*TURN, "motion_level", to=6),
        "games[1].turns[1].motion_level: expected a number less than or e",
    ),
    (
        changed(*TURN, "motion_level", to=0),
        "games[1].turns[1].motion_level: expected a number greater than o",
    ),
    (
        changed(*TURN, "motion_level", to=2.5),
        "games[1].turns[1].motion_level: expected a valid integer, found",
    ),
    (
        changed(*TURN, "motion_level", to=True),
        "games[1].turns[1].motion_level: expected a valid integer, found",
    ),
    (changed(*TURN, without="motion_level"), "games[1].turns[1].motion_level: missing"),
    (
        changed(*TURN, "stamina", to="-1"),
        'games[1].turns[1].stamina: expected a valid integer, found "-1"',
    ),
    (changed(*TURN, mood=1), "games[1].turns[1].mood: unknown field"),
    (changed(*TURN, "parts", to=[]), "games[1].turns[1].parts: expected an object, found []"),
    (changed(*TURN, "parts", weather="rain"), "games[1].turns[1].parts.weather: unknown field"),
    (
        changed(*TURN, "parts", time=None),
        "games[1].turns[1].parts.time: expected a value, or no such field",
    ),
    (
        changed(*TURN, "omitted", to=["mood"]),
        "games[1].turns[1].omitted[0]: expected 'character', 'adverb', 'm",
    ),
    (
        changed(*TURN, "omitted", to=["place", "place"]),
        'games[1].turns[1].omitted: expected each value once, found ["pla',
    ),
    (changed(*TURN, "caption", to=""), 'games[1].turns[1].caption: expected text, found ""'),
    (changed(*TURN, scene={}), "games[1].turns[1].scene.motion: missing"),
    (
        changed(*TURN, scene={"motion": "run", "seed": -1}),
        "games[1].turns[1].scene.seed: expected a number greater than or",
    ),
]
# What a schema cannot say.
ASTRAY = [
    (changed("games", 1, "id", to="first"), "games: expected a different id for each"),
    (changed(*TURN, "stamina", to=0), "games[1].turns[1].stamina: expected one of -1, 1, found 0"),
    (
        changed(*TURN, "stamina", to=-2),
        "games[1].turns[1].stamina: expected one of -1, 1, found -2",
    ),
    (changed(*TURN, "social", to=2), "games[1].turns[1].social: expected one of 0, 1, found 2"),
    (
        changed(*TURN, "entertainment", to=-1),
        "games[1].turns[1].entertainment: expected one of 0, 1, found -1",
    ),
    (
        changed("games", 1, "turns", to=SMALL["games"][1]["turns"][:1]),
        "games[1].turns: expected num_turns, 2, found 1",
    ),
    (
        changed("games", 1, "turns", to=SMALL["games"][1]["turns"][1:]),
        "games[1].turns[0].turn: expected 1, found 2",
    ),
    (changed("num_turns", to=1), "games[0].turns: expected num_turns, 1, found 2"),
    (changed(*TURN, "turn", to=3), "games[1].turns[1].turn: expected 2, found 3"),
    (changed(*TURN, "turn", to=1), "games[1].turns[1].turn: expected 2, found 1"),
    (
        changed("games", 1, "characters", to=["Mika"]),
        "games[1].characters: expected characters of the benchmark",
    ),
    (
        changed(*TURN, "parts", character="Botan"),
        "games[1].turns[1].parts.character: expected one of the game, fou",
    ),
    (
        changed(*TURN, "parts", place="sea"),
        "games[1].turns[1].parts.place: expected 'park' as in the turn be",
    ),
    (
        changed("games", 1, "turns", 0, omitted=["place"]),
        "games[1].turns[0].omitted: expected none in a first turn, which",
    ),
    (
        changed("states", "stamina", to=[1, -1]),
        "states.stamina: expected rising numbers, each once, found [1, -1",
    ),
    (
        changed(*TURN, "instruction", to="Go \x07 on."),
        "games[1].turns[1].instruction: expected one line without spaces",
    ),
]


# The format


@pytest.mark.parametrize("content", GOOD)
def test_reads_and_writes_the_same(tmp_path, content):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    found = read_benchmark(file)
    again = tmp_path / "again.json"
    write_benchmark(again, found)
    assert read_benchmark(again) == found
    assert format_benchmark(found) == again.read_text(encoding="utf-8")


def test_what_is_read():
    found = parse_benchmark(json.dumps(SMALL), where="small")
    first, then = found.games[1].turns
    assert found.states == StateValues(social=(0, 1), entertainment=(0, 1), stamina=(-1, 1))
    assert (found.games[1].id, found.games[1].seed) == ("second", 4)
    assert first == BenchmarkTurn(
        instruction="Character: Aki; Motion: slowly walking; Background: day park.",
        parts=Parts(character="Aki", adverb="slowly", motion="walking", time="day", place="park"),
        motion_level=2,
        social=0,
        entertainment=0,
        stamina=1,
    )
    assert (then.omitted, then.is_open, first.is_open) == (("character", "place"), True, False)
    assert (first.full_motion, then.full_motion) == ("slowly walking", "running")
    assert first.full_caption == "Aki slowly walking, day park"
    assert then.full_caption == "Aki runs in the park"
    bare = dataclasses.replace(first, parts=Parts())
    assert (bare.full_motion, bare.full_caption) == (None, bare.instruction)


@pytest.mark.parametrize(("content", "message"), WRONG + ASTRAY)
def test_what_is_wrong_is_reported_in_one_line(content, message):
    with pytest.raises(UserError) as caught:
        parse_benchmark(json.dumps(content), where="bench.json")
    error = str(caught.value)
    assert error.startswith("bench.json: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "expected an object, found [1]"),
        (b'{"name": "\xff"}', "byte 0xff at offset 10 is not UTF-8"),
        (json.dumps(changed("num_turns", to=float("nan"))).encode(), "num_turns: expected"),
        (b'{"name": 1, "name": 2}', "the field 'name' occurs twice in one object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_benchmark(tmp_path, data, message):
    file = tmp_path / "bad.json"
    file.write_bytes(data)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_benchmark(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file or directory: give a file, or one of toy, p"):
        read_benchmark(tmp_path / "none.json")


def test_what_the_reader_refuses_is_not_written(tmp_path):
    found = parse_benchmark(json.dumps(SMALL), where="small")
    with pytest.raises(UserError, match=r"games\[0\].turns: expected num_turns, 3, found 2"):
        write_benchmark(tmp_path / "x.json", dataclasses.replace(found, num_turns=3))
    assert list(tmp_path.iterdir()) == []


def test_a_bom_is_no_error(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL), encoding="utf-8-sig")
    assert read_benchmark(file).name == "small"


def test_compose():
    parts = Parts(character="Aki", adverb="slowly", motion="walking", time="day", place="park")
    assert compose(parts) == "Character: Aki; Motion: slowly walking; Background: day park."
    assert compose(parts, omitted=("character", "time")) == (
        "Motion: slowly walking; Background: park."
    )
    assert compose(parts, omitted=PARTS) == compose(Parts()) == ""


def test_a_model_that_lacks_characters():
    found = parse_benchmark(json.dumps(SMALL), where="small")
    check_characters(found, ["aki", "BOTAN", "Chika"], model="toy")
    with pytest.raises(UserError, match="benchmark small: characters that toy does not know: Bot"):
        check_characters(found, ["Aki"], model="toy")


# The schema


def test_the_schema_has_the_fields_of_the_dataclasses():
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    kinds = schema["$defs"]
    extra = {BenchmarkTurn: {"turn"}}
    for kind, described in (
        (Benchmark, schema),
        (BenchmarkGame, kinds["game"]),
        (BenchmarkTurn, kinds["turn"]),
        (Parts, kinds["parts"]),
        (StateValues, kinds["states"]),
        (SceneTruth, kinds["scene"]),
        (Detail, kinds["detail"]),
    ):
        fields = {field.name for field in dataclasses.fields(kind)} | extra.get(kind, set())
        assert set(described["properties"]) == fields
        assert described["additionalProperties"] is False
        assert set(described["required"]) <= fields


def test_the_reader_requires_what_the_schema_requires():
    kinds = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["$defs"]
    content = changed(*TURN, scene={"motion": "run", "partner": "Kai", "seed": 5})
    turn = content["games"][1]["turns"][1]
    objects = {"turn": turn, "game": content["games"][1], "states": content["states"]}
    objects |= {"parts": turn["parts"], "scene": turn["scene"]}
    for kind, found in objects.items():
        for name in list(found):
            kept = found.pop(name)
            if name in kinds[kind]["required"]:
                with pytest.raises(
                    UserError, match=rf"{name}: missing|\.{name}: expected 2, found null"
                ):
                    parse_benchmark(json.dumps(content), where="x")
            else:
                parse_benchmark(json.dumps(content), where="x")
            found[name] = kept


def test_the_schema_and_the_reader_agree():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in SHIPPED:
        validator.validate(json.loads(benchmark_path(name).read_text(encoding="utf-8")))
    assert all(validator.is_valid(content) for content in GOOD)
    assert [message for content, message in WRONG if validator.is_valid(content)] == []


# The shipped files
