"""The makers of benchmarks, and the two shipped files."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.command import make_command
from animegamer_jax.evaluate.benchmarks.format import (
    PARTS,
    SCHEMA_FILE,
    SHIPPED,
    Benchmark,
    Detail,
    Parts,
    SceneTruth,
    benchmark_path,
    compose,
    format_benchmark,
    parse_benchmark,
    read_benchmark,
)
from animegamer_jax.evaluate.benchmarks.paper import make_paper_benchmark
from animegamer_jax.evaluate.benchmarks.spec import read_lists, read_names
from animegamer_jax.evaluate.benchmarks.vocabulary import (
    ADVERBS,
    CHARACTERS,
    MOTIONS,
    PLACES,
    TIMES,
)
from animegamer_jax.toy.scoring.benchmark import make_toy_benchmark, toy_games
from animegamer_jax.toy.world import make_game


@pytest.mark.parametrize("name", SHIPPED)
def test_the_makers_give_the_shipped_files(tmp_path, name, capsys):
    out = tmp_path / "made" / "file.json"
    assert make_command(name, out=out) == 0
    shipped = benchmark_path(name).read_bytes()
    assert out.read_bytes() == shipped
    assert len(shipped) < 600_000
    turns = {"toy": "100 games, 500 turns", "paper": "200 games, 2000 turns"}[name]
    assert capsys.readouterr().out == f"{out}: {turns}\n"


def test_the_wheel_has_the_shipped_files():
    import tomllib

    root = Path(__file__).parents[3]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["animegamer_jax"]}  # all files in it
    for file in (*map(benchmark_path, SHIPPED), SCHEMA_FILE):
        assert file.is_relative_to(root / "animegamer_jax")
        assert file.is_file()
    ignored = (root / ".gitignore").read_text().splitlines()
    assert not any(line.strip() in ("*.json", "assets", "assets/") for line in ignored)


# The toy world


def test_the_toy_games_are_those_that_the_script_scores():
    found = read_benchmark("toy")
    assert toy_games(found) == tuple(make_game(n, split="test") for n in range(100))
    assert [game.seed for game in found.games] == list(range(100))
    assert found.states.stamina == (-2, -1, 1)


@pytest.mark.parametrize("split", ["train", "combinations", "phrasings"])
def test_other_splits_and_seeds(split):
    found = make_toy_benchmark(num_games=30, num_turns=8, split=split, seed=7)
    assert parse_benchmark(format_benchmark(found), where="x") == found
    games = tuple(make_game(n, num_turns=8, split=split) for n in range(7, 37))
    assert toy_games(found) == games


def test_other_splits_are_written_by_name(tmp_path):
    make_command("toy-phrasings", out=tmp_path / "p.json", games=2, turns=3, seed=4)
    found = read_benchmark(tmp_path / "p.json")
    assert found == make_toy_benchmark(num_games=2, num_turns=3, split="phrasings", seed=4)
    with pytest.raises(UserError, match="split nowhere: expected one of test, combinations, phra"):
        make_command("toy-nowhere", out=tmp_path / "n.json")
    (tmp_path / "toy-lists.toml").write_text("")
    with pytest.raises(UserError, match="world: missing"):  # a file of lists
        make_command(str(tmp_path / "toy-lists.toml"), out=tmp_path / "n.json")


def test_what_toy_turns_omit():
    found = make_toy_benchmark(num_games=40)
    omitted = {turn.instruction: turn.omitted for game in found.games for turn in game.turns}
    for instruction, expected in {
        "Go on.": PARTS,
        "Slower.": PARTS,
        "Motion: walking.": ("character", "adverb", "time", "place"),
        "Now Yuki flies on a broom.": ("adverb", "time", "place"),
        "Background: night.": ("character", "adverb", "motion", "place"),
        "Character: Toma; Motion: furiously sitting; Background: day meadow.": (),
        "Show Hana sitting in the bedroom by day.": (),  # the manner is hers, and no part of it
    }.items():
        assert omitted[instruction] == expected
    turn = found.games[0].turns[0]
    assert turn.parts == Parts(
        character="Toma", adverb="furiously", motion="sitting", time="day", place="meadow"
    )
    assert turn.scene is not None
    assert turn.scene.details[0] == Detail(name="accessory", value="green balloon")


def test_toy_games_of_something_else():
    with pytest.raises(UserError, match="benchmark paper: expected games of the world toy"):
        toy_games(read_benchmark("paper"))
    toy = make_toy_benchmark(num_games=1, num_turns=1)
    turn = toy.games[0].turns[0]
    details = turn.scene.details
    few, mood, hair = (
        details[:1],
        Detail(name="mood", value="x"),
        Detail(name="own hair", value="x"),
    )

    def with_details(found) -> SceneTruth:
        return dataclasses.replace(turn.scene, details=tuple(found))

    for change, message in (
        ({"scene": None}, "turn 1: expected caption, motion_text and scene"),
        ({"parts": Parts(character="Kai")}, "turn 1: parts: expected character, place and time"),
        ({"scene": SceneTruth(motion="swim")}, "game test-000: turn 1: scene: motion"),
        ({"scene": with_details(few)}, "turn 1: scene: details: expected accessory, distance"),
        ({"scene": with_details([*details, few[0]])}, "scene: details: expected each name once"),
        ({"scene": with_details([*details, mood])}, "details: expected accessory, distance"),
        ({"scene": with_details([*details, hair])}, "expected clothes, hair, hair_colour, name of"),
    ):
        turns = (dataclasses.replace(turn, **change),)
        games = (dataclasses.replace(toy.games[0], turns=turns),)
        with pytest.raises(UserError, match=message):
            toy_games(dataclasses.replace(toy, games=games))


def test_a_picture_is_checked_as_a_turn():
    own = make_toy_benchmark(num_games=1, num_turns=1, split="own")
    game = own.games[0]
    for change, message in (
        ({"stamina": 5}, r"games\[0\]\.picture\.stamina: expected one of -2, -1, 1, found 5"),
        ({"omitted": ("place",)}, r"games\[0\]\.picture\.omitted: expected none in a first turn"),
    ):
        picture = dataclasses.replace(game.picture, **change)
        games = (dataclasses.replace(game, picture=picture),)
        with pytest.raises(UserError, match=message):
            parse(dataclasses.replace(own, games=games))
    turn = dataclasses.replace(game.turns[0], omitted=("place",))
    place = turn.parts.place
    for before, fits in ((place, True), ("no" + place, False)):
        parts = dataclasses.replace(game.picture.parts, place=before)
        picture = dataclasses.replace(game.picture, parts=parts)
        games = (dataclasses.replace(game, picture=picture, turns=(turn,)),)
        found = dataclasses.replace(own, games=games)
        if fits:
            assert parse(found) == found
        else:
            with pytest.raises(UserError, match=r"turns\[0\]\.parts\.place: expected 'no"):
                parse(found)


def parse(benchmark: Benchmark) -> Benchmark:
    return parse_benchmark(format_benchmark(benchmark), where="mine.json")


# The grammar


def test_the_grammar_has_the_papers_size():
    found = read_benchmark("paper")
    assert found.characters == CHARACTERS
    assert (len(CHARACTERS), len(found.games), found.num_turns) == (20, 200, 10)
    assert Counter(game.characters[0] for game in found.games) == dict.fromkeys(CHARACTERS, 10)


def test_the_grammars_turns_follow_its_rules():
    motions = {motion.text.format(partner="X"): motion for motion in MOTIONS}
    kinds = {place: kind for kind, places in PLACES.items() for place in places}
    assert len(motions) == len(MOTIONS)
    for game in read_benchmark("paper").games:
        names = "|".join(game.characters)
        for turn in game.turns:
            p = turn.parts
            motion = motions[re.sub(rf"\b({names})\b", "X", p.motion)]
            assert turn.instruction == compose(p, omitted=turn.omitted)
            assert p.adverb in ADVERBS[turn.motion_level]
            assert motion.levels[0] <= turn.motion_level <= motion.levels[1]
            assert kinds[p.place] in motion.kinds
            assert p.time in TIMES
            assert turn.social == ("{partner}" in motion.text)
            assert p.character not in p.motion.split()
            assert turn.entertainment == (turn.motion_level >= motion.thrills_from)
            assert turn.stamina == (1 if turn.motion_level <= motion.rests_up_to else -1)


def test_the_grammars_games_vary():
    turns = [turn for game in read_benchmark("paper").games for turn in game.turns]
    opened = sum(turn.is_open for turn in turns)
    assert opened == pytest.approx(0.4 * 1800, rel=0.1)
    assert {turn.motion_level for turn in turns} == {1, 2, 3, 4, 5}
    for name in ("social", "entertainment", "stamina"):
        counts = Counter(getattr(turn, name) for turn in turns)
        assert len(counts) == 2
        assert min(counts.values()) > 0.2 * len(turns)
    assert all(any(part in turn.omitted for turn in turns) for part in PARTS)


def test_the_grammar_with_other_names(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("# mine\nZoë\n\n  Old Tom \n", encoding="utf-8")
    out = tmp_path / "b.json"
    make_command("paper", out=out, characters=names, games=3, turns=4, seed=5)
    found = read_benchmark(out)
    assert found.characters == ("Zoë", "Old Tom")
    assert [game.characters for game in found.games] == [
        ("Old Tom", "Zoë"), ("Zoë", "Old Tom"), ("Old Tom", "Zoë"),
    ]  # fmt: skip
    assert [(len(game.turns), game.seed) for game in found.games] == [(4, 5), (4, 6), (4, 7)]
    with pytest.raises(UserError, match=r"b\.json: already exists"):
        make_command("paper", out=out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"characters": ["Aki"]}, "characters 1: expected 2 or more"),
        ({"num_games": 0}, "games 0: expected 1 or more"),
        ({"num_turns": 0}, "turns 0: expected 1 or more"),
        ({"seed": -1}, "seed -1: expected 0 or more"),
    ],
)
def test_sizes_that_cannot_be(change, message):
    with pytest.raises(UserError, match=message):
        make_paper_benchmark(**change)
    if "characters" not in change:
        with pytest.raises(UserError, match=message):
            make_toy_benchmark(**change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Aki\n", "expected two or more names, one per line, found 1"),
        ("Aki\nBotan\naki\n", "line 3: 'aki' again: expected each once"),
        ("Aki\nBo;tan\n", "line 2: expected letters, digits, spaces"),
    ],
)
def test_names_that_cannot_be(tmp_path, text, message):
    file = tmp_path / "names.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_names(file)


LISTS = 'world = "w"\ncharacters = ["A", "B"]\nmotions = ["walking"]\nplaces = ["park"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LISTS.replace('"B"', '"a"'), "characters: 'a' again: expected each once"),
        (LISTS.replace(', "B"', ""), r'characters: expected at least 2 items, found \["A"\]'),
        (LISTS.replace('["park"]', '"park"'), 'places: expected a valid array, found "park"'),
        (LISTS.replace('"walking"', "3"), r"motions\[0\]: expected a valid string, found 3"),
        (
            LISTS.replace('"walking"', "2026-05-06"),
            r'motions\[0\]: expected a valid string, found {"date": "2026-05-06"}',
        ),
        (LISTS.replace('"w"', '"a;b"'), "world: expected letters, digits, spaces"),
        (LISTS + 'rooms = ["hall"]\n', "rooms: unknown field: expected world"),
        (LISTS.replace('motions = ["walking"]\n', ""), "motions: missing: expected world"),
        ("world", "not valid TOML"),
    ],
)
def test_lists_that_cannot_be(tmp_path, text, message):
    file = tmp_path / "lists.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_lists(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_options_that_do_not_go_together(tmp_path):
    out, lists = tmp_path / "b.json", tmp_path / "lists.toml"
    lists.write_text(LISTS)
    for what, options, message in (
        ("toy", {"characters": lists}, "--characters: expected with --make paper"),
        ("toy", {"ask_model": "m"}, "--ask-model: --make toy asks no model"),
        (str(lists), {}, "expected --ask-model NAME"),
        (str(tmp_path / "none"), {}, "cannot be read: No such file or directory"),
    ):
        with pytest.raises(UserError, match=message):
            make_command(what, out=out, **options)
        assert not out.exists()
