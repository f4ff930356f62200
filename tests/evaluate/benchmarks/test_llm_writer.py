"""Benchmarks that a model writes: its questions, valid and invalid answers, failures."""

import json
import re

import pytest
from stand_in_server import refuses, says, serving

from animegamer_jax.cli import main
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import (
    format_benchmark,
    parse_benchmark,
    read_benchmark,
)
from animegamer_jax.evaluate.benchmarks.llm_writer import write_games
from animegamer_jax.evaluate.benchmarks.prompt import make_prompts
from animegamer_jax.evaluate.benchmarks.spec import Lists, read_lists
from animegamer_jax.vlm.client import AskSettings

LISTS = Lists(
    world="Old Films",
    characters=("Aki", "Botan", "Chika"),
    motions=("walking", "talking to", "sleeping"),
    places=("park", "harbour"),
)
TOML = (
    'world = "Old Films"\ncharacters = ["Aki", "Botan", "Chika"]\n'
    'motions = ["walking", "talking to", "sleeping"]\nplaces = ["park", "harbour"]\n'
)


def turns_for(question, **second) -> list[dict]:
    """Three right turns about the characters that a question names; changes of the second."""
    names = re.search(r"Characters: ([^.]*)\.", question.body["messages"][1]["content"])[1]
    lead, other = names.split("; ")
    first = {
        "character": lead,
        "adverb": "Slowly",
        "motion": "walking",
        "motion_level": 2,
        "time": "day",
        "place": "park",
        "omitted": [],
        "social": 0,
        "entertainment": 0,
        "stamina": -1,
    }
    omitted = ["place", "character"]
    then = first | {"motion": f"talking to {other}", "omitted": omitted, "social": 1} | second
    return [first, then, first | {"place": "HARBOUR", "motion": "Sleeping", "stamina": 1}]


def right(question):
    return says(json.dumps({"turns": turns_for(question)}))


def write(tmp_path, server, *, num_games=4, **changes):
    options = {"model": "stand-in", "parallel": 1, "retries": 1, "timeout": 5.0}
    settings = AskSettings(endpoint=server.endpoint, **(options | changes))
    return write_games(LISTS, settings, cache=tmp_path / "c", num_games=num_games, num_turns=3)


def test_a_model_writes_a_benchmark(tmp_path):
    with serving(right) as server:
        found = write(tmp_path, server, prompt_price=2.0, completion_price=5.0)
    benchmark = found.benchmark
    assert (benchmark.name, benchmark.world) == ("old-films", "Old Films")
    assert benchmark.characters == LISTS.characters
    assert benchmark.made_by == "the model stand-in, 4 of 4 games asked for"
    assert parse_benchmark(format_benchmark(benchmark), where="x") == benchmark
    assert [game.characters[0] for game in benchmark.games] == ["Aki", "Botan", "Chika", "Aki"]
    assert [game.seed for game in benchmark.games] == [0, 1, 2, 3]
    for game in benchmark.games:
        lead, other = game.characters
        assert [turn.instruction for turn in game.turns] == [
            f"Character: {lead}; Motion: slowly walking; Background: day park.",
            f"Motion: slowly talking to {other}; Background: day.",
            f"Character: {lead}; Motion: slowly sleeping; Background: day harbour.",
        ]
        assert game.turns[1].omitted == ("character", "place")
        assert game.turns[1].parts.place == "park"
        assert [turn.stamina for turn in game.turns] == [-1, -1, 1]
    assert found.skipped == {}
    assert (found.usage.requests, found.usage.answered, found.usage.cached) == (4, 4, 0)
    assert found.usage.cost == pytest.approx((400 * 2 + 80 * 5) / 1e6)


def test_the_question(tmp_path):
    with serving(right) as server:
        write(tmp_path, server, num_games=1)
    (question,) = server.questions
    wanted = question.body["response_format"]["json_schema"]
    turn = wanted["schema"]["$defs"]["TurnAnswer"]
    assert (wanted["name"], wanted["strict"]) == ("answer", True)
    assert turn["properties"]["character"]["enum"][0] == "Aki"
    assert sorted(turn["properties"]["place"]["enum"]) == ["harbour", "park"]
    assert set(turn["required"]) == set(turn["properties"])  # as strict schemas must
    assert turn["additionalProperties"] is False
    assert "exactly 3 turns" in question.text
    assert all(motion in question.text for motion in LISTS.motions)


def test_long_lists_are_drawn_from_again_for_each_game():
    words = tuple(f"doing {number}" for number in range(100))
    lists = Lists(world="w", characters=("A", "B"), motions=words, places=words)
    questions = make_prompts(lists, num_games=20, num_turns=10, seed=0)
    assert {len(question.motions) for question in questions} == {15}
    assert {len(question.places) for question in questions} == {6}
    assert len({question.motions for question in questions}) == 20
    assert questions[5:7] == make_prompts(lists, num_games=2, num_turns=10, seed=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"motion_level": 6}, "turns[1].motion_level"),
        ({"motion_level": True}, "turns[1].motion_level: expected a whole number"),
        ({"stamina": 0}, "turns[1].stamina"),
        ({"mood": 1}, "turns[1].mood"),
        ({"adverb": ""}, "turns[1].adverb: expected a word or more"),
        ({"character": "Mika"}, "turn 2: character: expected one of "),
        ({"motion": "flying"}, "turn 2: motion: expected one of "),
        ({"motion": "walkingly"}, "turn 2: motion: expected one of "),
        ({"place": "moon"}, "turn 2: place: expected one of "),
        ({"place": "harbour"}, "turn 2: place is omitted: expected 'park' as before, found 'har"),
        (
            {"motion": "walking", "omitted": ["character", "adverb", "motion", "time", "place"]},
            "turn 2: omitted: expected one field or more that the player says",
        ),
    ],
)
def test_a_wrong_answer_is_asked_again_with_what_is_wrong(tmp_path, change, message):
    def answer(question):
        wrong = change if len(question.body["messages"]) == 2 else {}
        return says(json.dumps({"turns": turns_for(question, **wrong)}))

    with serving(answer) as server:
        found = write(tmp_path, server, num_games=1)
    assert len(found.benchmark.games) == 1
    said = server.questions[1].body["messages"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
    assert message in said[3]["content"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda turns: "I would rather not.", "not valid JSON (Expecting value"),
        (lambda turns: json.dumps({"turns": turns[:2]}), "expected 3 turns, found 2"),
        (lambda turns: json.dumps(turns), "valid dictionary"),
        (
            lambda turns: json.dumps({"turns": [turns[0] | {"omitted": ["place"]}, *turns[1:]]}),
            "turn 1: omitted: expected none in the first turn",
        ),
        (lambda turns: None, "not valid JSON (Expecting value"),
    ],
)
def test_a_game_without_a_valid_answer_is_skipped_with_the_reason(tmp_path, answer, message):
    def reply(question):
        if "Characters: Botan" in question.text:
            return says(answer(turns_for(question)))
        return right(question)

    with serving(reply) as server:
        found = write(tmp_path, server, attempts=2)
        assert len(server.questions) == 5
        assert [game.seed for game in found.benchmark.games] == [0, 2, 3]
        ((number, reason),) = found.skipped.items()
        assert number == 1
        assert reason.startswith("asked 2 times, no valid answer: ")
        assert message in reason
        again = write(tmp_path, server, attempts=2)
        assert len(server.questions) == 7  # valid answers are on disk, the others asked for again
        assert (again.benchmark, again.skipped) == (found.benchmark, found.skipped)
        assert (again.usage.requests, again.usage.cached) == (2, 3)


def test_a_fence_is_taken_off(tmp_path):
    def answer(question):
        return says(f"```json\n{json.dumps({'turns': turns_for(question)})}\n```")

    with serving(answer) as server:
        assert write(tmp_path, server).skipped == {}
    assert len(server.questions) == 4


def test_answers_depend_on_the_model_and_the_question(tmp_path):
    with serving(right) as server:
        write(tmp_path, server, num_games=2)
        write(tmp_path, server, num_games=3)
        assert len(server.questions) == 3
        write(tmp_path, server, num_games=1, model="other")
        assert len(server.questions) == 4
        (damaged, *_) = sorted((tmp_path / "c").glob("*/*.json"))
        damaged.write_text("{")
        write(tmp_path, server, num_games=3)
        write(tmp_path, server, num_games=1, model="other")
        assert len(server.questions) == 5


def test_the_number_of_questions_at_a_time_changes_nothing(tmp_path):
    with serving(right) as server:
        one = write(tmp_path / "one", server, num_games=8)
        many = write(tmp_path / "many", server, num_games=8, parallel=8)
    assert one.benchmark == many.benchmark


def test_too_many_failures_in_a_row_end_the_run(tmp_path):
    with serving(lambda question: says("no")) as server:
        with pytest.raises(UserError, match="no usable answer for 3 games in a row, the last"):
            write(tmp_path, server, num_games=9, attempts=1, patience=3)
        assert len(server.questions) == 3
        with pytest.raises(UserError, match="no game with a valid answer, the last: asked 1 time"):
            write(tmp_path, server, num_games=2, attempts=1)


def test_a_server_that_refuses(tmp_path):
    def answer(question):
        return refuses(500) if "Characters: Botan" in question.text else right(question)

    with serving(answer) as server:
        found = write(tmp_path, server, num_games=3)
    (reason,) = found.skipped.values()
    assert "the server answers 500" in reason
    with serving(right) as server:  # a refusal is not kept
        assert write(tmp_path, server, num_games=3).skipped == {}
    assert len(server.questions) == 1
    with pytest.raises(UserError, match="cannot be reached"):
        write(tmp_path / "new", server)


def test_a_busy_server_is_asked_again_and_reported(tmp_path):
    message = []
    with serving(lambda q: right(q) if q.number else refuses(429)) as server:
        settings = AskSettings(endpoint=server.endpoint, model="m", parallel=1, retries=1)
        options = {"cache": tmp_path, "num_games": 2, "num_turns": 3}
        found = write_games(LISTS, settings, **options, on_wait=message.append)
    assert (len(found.benchmark.games), found.usage.requests, found.usage.answered) == (2, 3, 2)
    assert len(message) == 1
    assert message[0].startswith(f"{server.endpoint}: answers 429: sending the request again")


def test_the_command(tmp_path, capsys):
    lists, out = tmp_path / "lists.toml", tmp_path / "b.json"
    lists.write_text(TOML)
    assert read_lists(lists) == LISTS

    def answer(question):
        return says("no") if "Characters: Botan" in question.text else right(question)

    options = ("--games", "4", "--turns", "3", "--ask-model", "stand-in", "--attempts", "1")
    with serving(answer) as server:
        words = ("--make", str(lists), "--out", str(out), "--endpoint", server.endpoint)
        assert main(["evaluate", *words, *options]) == 0
    assert len(read_benchmark(out).games) == 3
    assert (tmp_path / "b.json.answers").is_dir()
    message = capsys.readouterr()
    first, usage, skipped, game = message.out.splitlines()
    assert first == f"{out}: 3 games, 9 turns"
    assert usage.startswith("4 requests (0 unanswered), 400 + 80 tokens, 0 answers from the cache")
    assert skipped == "1 games skipped, without a valid answer:"
    assert game.startswith("  game 1: asked 1 time, no valid answer: ")
    assert "games: 4 of 4" in message.err
