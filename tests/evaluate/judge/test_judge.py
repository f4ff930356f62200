"""A judge of games: its questions, and its valid and invalid answers."""

import json
import re
import socket
import string
import threading
import time

import numpy as np
import pytest
from stand_in_server import Question, Reply, refuses, says, serving

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.judge.judge import judge
from animegamer_jax.evaluate.judge.prompt import JudgedGame, JudgeSettings, PlayedTurn
from animegamer_jax.evaluate.judge.scores import CRITERIA
from animegamer_jax.game.saved.turns import NewTurn
from animegamer_jax.game.saved_game import Game

# Every system's clips have a brightness of their own: so the stand-in knows whom it looks at.
SYSTEMS = {"theirs": 40, "ours": 120, "third": 200}
NUM_TURNS = 3


def clip(brightness: int, *, game: int, turn: int) -> np.ndarray:
    """Nine frames that get brighter to the right, and with each frame, a little."""
    frames = np.full((9, 16, 24, 3), brightness + game + 3 * turn, np.uint8)
    return frames + np.arange(9, dtype=np.uint8)[:, None, None, None]


def turns_of(system: str, game: int, count: int = NUM_TURNS) -> list[PlayedTurn]:
    return [
        PlayedTurn(
            instruction=f'Motion: "wave" {game}.{turn}; Background: 森.',
            frames=clip(SYSTEMS[system], game=game, turn=turn),
            changes={"stamina": -1, "social": turn, "entertainment": 0},
            meters={"stamina": 45, "social": 50 + 5 * turn, "entertainment": 50},
        )
        for turn in range(count)
    ]


def make_games(count: int = 4, systems: tuple[str, ...] = ("ours", "theirs")) -> list[JudgedGame]:
    return [
        JudgedGame(
            name=f"game {number}",
            answers={s: (lambda s=s, number=number: turns_of(s, number)) for s in systems},
        )
        for number in range(count)
    ]


def seen_order(question: Question) -> list[str]:
    """The systems in the order in which they are shown, by the brightness of their pictures."""
    found = []
    for picture in question.pictures:
        if picture.mean() > 240:  # of a character
            continue
        system = min(SYSTEMS, key=lambda s: abs(SYSTEMS[s] + 8 - float(picture.mean())))
        found += [system] * (system not in found)
    return found


def game_of(question: Question) -> int:
    return int(re.search(r"wave\W+(\d+)\.0;", question.text)[1])


def score(system: str, game: int, criterion: int) -> float:
    return {"ours": 4.5, "theirs": 1, "third": 2}[system] + criterion / 2 + game / 4


def scores_for(question: Question) -> dict[str, dict[str, float]]:
    game = game_of(question)
    return {
        label: {name: score(system, game, i) for i, name in enumerate(CRITERIA)}
        for label, system in zip(string.ascii_uppercase, seen_order(question), strict=False)
    }


def right(question: Question) -> Reply:
    return says(json.dumps(scores_for(question)))


def run(tmp_path, answer, games=None, *, seed=0, **changes):
    """One run with a server of its own: what was judged, and the questions."""
    with serving(answer) as server:
        settings = {"model": "stand-in", "parallel": 1, "retries": 0, "timeout": 5.0}
        settings = JudgeSettings(endpoint=server.endpoint, **(settings | changes))
        games = make_games() if games is None else games
        return judge(games, settings, cache=tmp_path / "cache", seed=seed), server.questions


def expected_scores(systems: tuple[str, ...], count: int = 4) -> np.ndarray:
    rows = [[[score(s, g, c) for c in range(6)] for s in systems] for g in range(count)]
    return np.array(rows)


# What is asked, and what comes of it


def test_scores_come_back_to_their_systems(tmp_path):
    judged, questions = run(tmp_path, right, make_games(8), prompt_price=2.0, completion_price=5.0)
    assert judged.systems == ("ours", "theirs")
    assert judged.games == tuple(f"game {number}" for number in range(8))
    np.testing.assert_array_equal(judged.scores, expected_scores(judged.systems, 8))
    assert {tuple(seen_order(question)) for question in questions} == {
        ("ours", "theirs"),
        ("theirs", "ours"),
    }
    assert judged.skipped == {}
    assert judged.usage.cost == pytest.approx(8 * (100 * 2 + 20 * 5) / 1e6)
    assert str(judged).startswith("stand-in: 8 of 8 games judged; 8 requests (0 unanswered)")


def test_the_question_shows_everything_but_names(tmp_path):
    picture = np.full((20, 10, 3), 250, np.uint8)
    game = JudgedGame(
        name="secret",
        answers={"ours": lambda: turns_of("ours", 0), "theirs": lambda: turns_of("theirs", 0)},
        characters={"Mika": picture},
    )
    _, (question,) = run(tmp_path, right, [game], frames=3, temperature=0.5)
    message = "".join(
        part.get("text", "<picture>") for part in question.body["messages"][1]["content"]
    )
    said = message + question.body["messages"][0]["content"]
    assert not re.search(r"\b(ours|theirs|secret|stand-in)\b", said)
    assert message.startswith('"Mika" looks like this:<picture>System A:')
    for label in "AB":
        for turn in range(NUM_TURNS):
            line = (
                f'System {label}, turn {turn + 1}, instruction "Motion: \\"wave\\" 0.{turn}; '
                f'Background: 森.". State: stamina -1, social +{turn}, entertainment +0 (now '
                f"stamina 45, social {50 + 5 * turn}, entertainment 50 of 100). 3 pictures"
            )
            assert message.count(line) == 1, line
    assert all(f"- {name}: " in message for name in CRITERIA)
    strips = question.pictures[1:]
    assert [strip.shape for strip in strips] == [(16, 72, 3)] * 2 * NUM_TURNS
    means = strips[0].reshape(16, 3, 24, 3).mean((0, 2, 3))
    np.testing.assert_allclose(means - means[0], [0, 4, 8], atol=1.5)  # first, middle, last
    schema = question.body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["A", "B"]
    (scores,) = schema["$defs"].values()
    assert scores["required"] == list(CRITERIA)
    assert {(p["minimum"], p["maximum"]) for p in scores["properties"].values()} == {(0, 10)}
    assert question.body["temperature"] == 0.5


def test_large_pictures_are_made_smaller(tmp_path):
    _, (question, *_) = run(tmp_path, right, side=48)
    assert {picture.shape for picture in question.pictures} == {(8, 48, 3)}


def test_the_order_depends_on_seed_and_game_alone(tmp_path):
    systems = ("theirs", "third", "ours")

    def orders(games, seed, folder) -> dict[int, list[str]]:
        _, questions = run(tmp_path / folder, right, games, seed=seed)
        return {game_of(question): seen_order(question) for question in questions}

    one = orders(make_games(8, systems), 0, "one")
    assert orders(make_games(8, systems[::-1])[::-1], 0, "two") == one
    assert orders(make_games(8, systems), 1, "three") != one
    assert len({tuple(order) for order in one.values()}) > 2


def test_a_system_that_did_not_play_a_game_has_no_score(tmp_path):
    games = [*make_games(1, ("ours", "theirs")), make_games(2, ("ours",))[1]]
    judged, _ = run(tmp_path, right, games)
    np.testing.assert_array_equal(np.isnan(judged.of("theirs", "overall")), [False, True])
    assert judged.estimate("theirs", "overall").count == 1
    assert judged.estimate("ours", "overall").count == 2


def test_saved_games_are_read_from_their_folders(tmp_path):
    folders = {}
    for system, brightness in (("ours", 120), ("theirs", 40)):
        folders[system] = tmp_path / system
        game = Game.create(folders[system], model="m", seed=0, window=2, steps=1, protocol="paper")
        for turn in range(2):
            played = NewTurn(
                states=np.array([2, 1, 0, -1], np.int32),
                motion_value=2.5,
                representation=np.zeros((2, 2), np.float32),
                frames=clip(brightness, game=0, turn=turn),
                seconds={"total": 1.0},
            )
            game.add(played, f"wave 0.{turn};")
    saved = JudgedGame.saved("a", folders)
    (folders["theirs"] / "turn_002.mp4").rename(tmp_path / "kept.mp4")
    judged, questions = run(tmp_path, right, [saved, make_games(1)[0]])
    assert len(questions) == 1
    assert re.fullmatch(r".*turn_002\.mp4: .*found no such file", judged.skipped["a"])
    (tmp_path / "kept.mp4").rename(folders["theirs"] / "turn_002.mp4")
    judged, (question,) = run(tmp_path, right, [saved])
    np.testing.assert_array_equal(judged.scores, expected_scores(("ours", "theirs"), 1))
    assert "stamina -1, social +1, entertainment +0 (now stamina 40, social 60" in question.text


# Answers on disk


def test_nothing_is_asked_twice(tmp_path):
    first, _ = run(tmp_path, right)
    second, questions = run(tmp_path, right, make_games()[::-1], parallel=3)
    assert questions == []
    np.testing.assert_array_equal(second.scores, first.scores[::-1])
    assert (second.usage.cached, second.usage.requests) == (4, 0)


@pytest.mark.parametrize("change", ["model", "temperature", "frames", "seed", "clip", "state"])
def test_another_question_is_asked(tmp_path, change):
    run(tmp_path, right, make_games(1))
    turns = turns_of("ours", 0)
    seed, changes, last = 0, {}, turns[-1]
    if change == "clip":
        last = PlayedTurn(**{**vars(last), "frames": last.frames + np.uint8(1)})
    elif change == "state":
        last = PlayedTurn(**{**vars(last), "changes": {"stamina": 1}})
    elif change == "seed":
        seed = 2  # which turns this game's order round
    else:
        changes = {change: {"model": "other", "temperature": 0.5, "frames": 2}[change]}
    answers = {"theirs": lambda: turns_of("theirs", 0), "ours": lambda: [*turns[:-1], last]}
    game = JudgedGame(name="game 0", answers=answers)
    _, questions = run(tmp_path, right, [game], seed=seed, **changes)
    assert len(questions) == 1


def test_a_damaged_file_is_asked_for_again(tmp_path):
    first, _ = run(tmp_path, right)
    files = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(files) == 4
    files[0].write_text("{")
    files[1].write_text(files[1].read_text().replace("overall", "overal"))
    again, questions = run(tmp_path, right)
    assert len(questions) == 2
    np.testing.assert_array_equal(again.scores, first.scores)
    assert run(tmp_path, right)[1] == []


def test_a_disk_that_refuses_ends_the_run_in_one_line(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cache/.*: cannot be (read|written)") as caught:
        run(tmp_path, right)
    assert "\n" not in str(caught.value)


# Answers that are not valid


def altered(question: Question, change: str) -> str:
    said = scores_for(question)
    if change == "a label is missing":
        del said["B"]
    elif change == "a label is unknown":
        said["C"] = said["A"]
    elif change == "a criterion is missing":
        del said["B"]["state_update"]
    elif change == "a criterion is unknown":
        said["A"]["beauty"] = 3
    elif change == "no object":
        return json.dumps([said])
    elif change == "prose":
        return "I cannot judge that."
    else:
        said["A"]["overall"] = {
            "too much": 10.5,
            "too little": -1,
            "text": "7",
            "truth": True,
            "nothing": None,
            "no number": float("nan"),
            "infinity": float("inf"),
            "huge": 10**400,
        }[change]
    return json.dumps(said)


FAULTS = {
    "a label is missing": "B: Field required",
    "a label is unknown": "C: Extra inputs are not permitted",
    "a criterion is missing": "B.state_update: Field required",
    "a criterion is unknown": "A.beauty: Extra inputs are not permitted, found 3",
    "no object": "expected a JSON object",
    "prose": "not valid JSON",
    "too much": "A.overall: Input should be less than or equal to 10, found 10.5",
    "too little": "A.overall: Input should be greater than or equal to 0, found -1",
    "text": "A.overall: Input should be a valid number, found '7'",
    "truth": "A.overall: Input should be a valid number, found True",
    "nothing": "A.overall: Input should be a valid number",
    "no number": "A.overall: Input should be a finite number, found nan",
    "infinity": "A.overall: Input should be a finite number, found inf",
    "huge": "A.overall: ",
}


@pytest.mark.parametrize("change", FAULTS)
def test_a_wrong_answer_is_shown_to_the_model_and_asked_again(tmp_path, change):
    def answer(question: Question) -> Reply:
        return right(question) if question.number else says(altered(question, change))

    judged, questions = run(tmp_path, answer, make_games(1))
    assert len(questions) == 2
    message = questions[1].body["messages"][-1]["content"]
    assert f"That cannot be used: {FAULTS[change]}" in message
    np.testing.assert_array_equal(judged.scores, expected_scores(judged.systems, 1))
    assert (judged.usage.requests, judged.usage.answered) == (2, 2)


def test_an_answer_in_a_fence_is_taken(tmp_path):
    judged, _ = run(
        tmp_path,
        lambda q: says(f"```json\n{json.dumps(scores_for(q))}\n```"),
        make_games(1),
    )
    np.testing.assert_array_equal(judged.scores, expected_scores(judged.systems, 1))


# A judge that cannot judge


def test_a_game_without_a_valid_answer_is_skipped_and_asked_again_later(tmp_path):
    def answer(question: Question) -> Reply:
        return says("nonsense") if game_of(question) == 2 else right(question)

    judged, questions = run(tmp_path, answer)
    assert len(questions) == 3 + 3
    assert list(judged.skipped) == ["game 2"]
    assert judged.skipped["game 2"].startswith("asked 3 times, no valid answer: not valid JSON")
    assert np.isnan(judged.scores[2]).all()
    kept = [0, 1, 3]
    np.testing.assert_array_equal(judged.scores[kept], expected_scores(judged.systems)[kept])
    found = judged.estimate("ours", "style_consistency")
    expected = [score("ours", game, 4) for game in kept]
    assert found.count == 3
    assert found.mean == pytest.approx(np.mean(expected))
    assert min(expected) <= found.low < found.mean < found.high <= max(expected)
    assert ": 3 of 4 games judged, 1 skipped (the first, game 2: asked 3 times" in str(judged)
    repaired, questions = run(tmp_path, right)
    assert len(questions) == 1
    np.testing.assert_array_equal(repaired.scores, expected_scores(repaired.systems))


def test_a_slow_judge_and_a_broken_one(tmp_path):
    replies = {0: says("", delay=1.0), 1: refuses(500), 2: Reply(body=b"<html>")}
    judged, _ = run(tmp_path, lambda q: replies.get(game_of(q)) or right(q), timeout=0.3)
    assert judged.skipped == {
        "game 0": "no answer within 0.3 seconds",
        "game 1": "the server answers 500: Error code: 500 - refused with 500",
        "game 2": "expected a chat completion, found '<html>'",
    }
    assert judged.num_judged == 1


def test_a_refused_request_is_sent_again(tmp_path):
    waits = []

    def answer(question: Question) -> Reply:
        return right(question) if question.number else refuses(429)

    with serving(answer) as server:
        settings = JudgeSettings(endpoint=server.endpoint, model="stand-in", retries=1)
        judged = judge(make_games(1), settings, cache=tmp_path, on_wait=waits.append)
    assert (judged.num_judged, judged.usage.requests, judged.usage.answered) == (1, 2, 1)
    assert len(waits) == 1


def test_a_judge_that_is_down_is_reported_in_one_line(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    settings = JudgeSettings(endpoint=endpoint, model="m", retries=0, patience=2, parallel=1)
    done = []
    judged = judge(
        make_games(),
        settings,
        cache=tmp_path,
        on_progress=lambda number, total: done.append((number, total)),
    )
    assert judged.usage.requests == 2  # then nobody is asked any more
    assert list(judged.skipped) == list(judged.games)
    assert "cannot be reached" in judged.skipped["game 0"]
    assert judged.skipped["game 3"].startswith(
        "not asked: no usable answer for 2 games in a row, the last: http://"
    )
    assert np.isnan(judged.scores).all()
    assert judged.estimates() == {s: dict.fromkeys(CRITERIA) for s in judged.systems}
    assert str(judged).startswith("m: 0 of 4 games judged, 4 skipped (the first, game 0: http")
    assert "\n" not in str(judged)
    assert done == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_answers_on_disk_count_though_the_judge_is_gone(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    run(tmp_path, right, make_games(4)[3:])
    judged, questions = run(tmp_path, lambda q: refuses(401), patience=1)
    assert len(questions) == 1
    assert "asks for a key (401)" in judged.skipped["game 0"]
    np.testing.assert_array_equal(judged.scores[3], expected_scores(judged.systems)[3])


def test_failures_that_are_not_in_a_row_do_not_end_it(tmp_path):
    judged, _ = run(
        tmp_path,
        lambda q: refuses(500) if game_of(q) % 2 else right(q),
        make_games(6),
        patience=2,
    )
    assert list(judged.skipped) == ["game 1", "game 3", "game 5"]
    assert not any("not asked" in reason for reason in judged.skipped.values())


def test_games_that_cannot_be_compared_are_skipped_without_a_question(tmp_path):
    first = make_games(1)[0].answers["ours"]
    games = [
        JudgedGame(
            name="short",
            answers={"ours": first, "theirs": lambda: turns_of("theirs", 0, count=2)},
        ),
        JudgedGame(name="other", answers={"ours": first, "theirs": lambda: turns_of("theirs", 1)}),
        JudgedGame(name="empty", answers={"ours": list}),
        *make_games(1),
    ]
    judged, questions = run(tmp_path, right, games, patience=1)
    assert len(questions) == 1
    assert list(judged.skipped) == ["short", "other", "empty"]
    assert re.search(r"expected [23] turns, as \w+ has, found [23]", judged.skipped["short"])
    assert "turn 1: expected the instruction " in judged.skipped["other"]
    assert judged.skipped["empty"] == "ours: expected turns, found none"


def test_no_more_questions_at_a_time_than_allowed(tmp_path):
    lock, now, most = threading.Lock(), 0, 0

    def answer(question: Question) -> Reply:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.2)
        with lock:
            now -= 1
        return right(question)

    judged, _ = run(tmp_path, answer, make_games(6), parallel=2)
    assert most == 2
    np.testing.assert_array_equal(judged.scores, expected_scores(judged.systems, 6))


def test_mistakes_of_the_caller(tmp_path):
    with pytest.raises(UserError, match="name of a model"):
        judge(make_games(1), JudgeSettings(), cache=tmp_path)
    settings = JudgeSettings(model="m")
    with pytest.raises(ValueError, match="a name of its own"):
        judge(make_games(1) * 2, settings, cache=tmp_path)
    with pytest.raises(ValueError, match="0 systems"):
        judge([JudgedGame(name="a", answers={})], settings, cache=tmp_path)
    assert str(judge([], settings, cache=tmp_path)) == "m: no games to judge"
