"""Annotation by a model: its questions, valid and invalid answers, failures of the server."""

import json
import re
import socket
import time

import pytest
from annotated_shots import Take, annotate, label, lines_of, make_shots, says_of, write_characters
from PIL import Image
from stand_in_runs import FILM, KEPT, TAKES, annotator_for, clip_of, right, run, stopped
from stand_in_server import Reply, refuses, says, serving

from animegamer_jax.data.characters import read_characters
from animegamer_jax.data.films.annotation.annotator import Annotator, AskSettings, annotate_film
from animegamer_jax.data.films.annotation.labels import FIELDS, read_report
from animegamer_jax.data.films.annotation.usage_log import read_usage
from animegamer_jax.errors import UserError


@pytest.fixture
def characters(tmp_path):
    (tmp_path / "characters").mkdir()
    return read_characters(write_characters(tmp_path / "characters"))


@pytest.fixture
def shots(tmp_path):
    return make_shots(tmp_path / "shots", [TAKES])


# What is asked, and what comes of it


def test_every_kept_clip_is_annotated(shots, characters):
    done = []
    with serving(right) as server:
        annotator = annotator_for(characters, server, prompt_price=2.0, completion_price=5.0)
        annotator.on_progress = lambda *progress: done.append(progress)
        report = annotate_film(shots, FILM, annotator)
    rows = lines_of(shots.folder(FILM) / "annotations.jsonl")
    assert rows == [{"clip": clip, **says_of(clip), "source": "model"} for clip in KEPT]
    assert lines_of(shots.folder(FILM) / "unannotated.jsonl") == []
    assert read_report(shots, FILM) == report
    assert (report.num_model, report.num_manual, report.num_unannotated) == (4, 0, 0)
    assert (report.requests, report.prompt_tokens, report.completion_tokens) == (4, 400, 80)
    assert report.model == "stand-in"
    assert annotator.usage.cost == pytest.approx((400 * 2 + 80 * 5) / 1e6)
    assert read_usage(shots) == annotator.usage
    assert done == [(f"{FILM}: clips", number, 4) for number in range(5)]
    kept = json.loads((shots.path / "characters.json").read_text())
    assert [character["name"] for character in kept["characters"]] == ["Mika", "Ren"]


def test_the_question(shots, characters, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-test")
    _, questions, *_ = run(
        shots, characters, right, key_variable="A_KEY", temperature=0.5, frames=3
    )
    for question in questions:
        body = question.body
        assert question.path == "/v1/chat/completions"
        assert question.headers["authorization"] == "Bearer sk-test"
        assert (body["model"], body["temperature"]) == ("stand-in", 0.5)
        form = body["response_format"]["json_schema"]["schema"]
        assert tuple(form["properties"]) == tuple(form["required"]) == FIELDS
        assert form["properties"]["subject"]["enum"] == ["Mika", "Ren", "other", "none"]
        assert form["properties"]["motion_level"]["enum"] == [1, 2, 3, 4, 5]
        assert form["additionalProperties"] is False
        pictures = question.pictures
        assert len(pictures) == 2 + 3
        assert pictures[0].shape == (60, 40, 3)
        assert pictures[-1].shape == (16, 24, 3)
        assert abs(pictures[0].reshape(-1, 3).mean(0) - (200, 30, 30)).max() < 5
        for message in (
            "Mika (also called Mika the cat)",
            "Ren looks",
            "3 pictures in order",
            *FIELDS,
        ):
            assert message in question.text
    assert [clip_of(question) for question in questions] == list(KEPT)


def test_large_pictures_are_made_smaller(tmp_path, shots, characters):
    Image.new("RGB", (640, 320)).save(tmp_path / "characters" / "mika.png")
    large = read_characters(tmp_path / "characters" / "characters.toml")
    _, questions, *_ = run(shots, large, right, side=100)
    assert questions[0].pictures[0].shape == (50, 100, 3)


def test_aliases_and_nobody(shots, characters):
    subjects = {0: "mika THE cat", 2: "None", 3: "OTHER", 4: "ren"}

    def answer(question):
        clip = clip_of(question)
        return says(json.dumps(says_of(clip, subject=subjects[clip])))

    *_, said, _ = run(shots, characters, answer)
    assert [row["subject"] for row in said] == ["Mika", "none", "other", "Ren"]


def test_an_answer_in_a_fence(shots, characters):
    def answer(question):
        return says(f"```json\n{json.dumps(says_of(clip_of(question)))}\n```\n")

    *_, said, aside = run(shots, characters, answer)
    assert (len(said), aside) == (4, [])


# Answers that are no answers


def test_a_wrong_answer_is_asked_again_with_what_is_wrong(shots, characters):
    def answer(question):
        clip = clip_of(question)
        wrong = {"motion_level": 9} if len(question.body["messages"]) == 2 else {}
        return says(json.dumps(says_of(clip, **wrong)))

    annotator, questions, report, said, aside = run(shots, characters, answer)
    assert [row["motion_level"] for row in said] == [1 + clip % 5 for clip in KEPT]
    assert (aside, len(questions), report.requests, annotator.usage.requests) == ([], 8, 8, 8)
    _, _, before, message = questions[1].body["messages"]
    assert json.loads(before["content"])["motion_level"] == 9
    assert "motion_level: Input should be 1, 2, 3, 4 or 5, found 9" in message["content"]


WRONG = [
    ({"subject": "Yuki"}, "subject: expected one of: Mika, Ren, other, none; found 'Yuki'"),
    ({"subject": "../../x"}, "subject: expected letters, digits, spaces and '-,.&, found '/'"),
    ({"motion": "../../../etc/passwd"}, "motion: expected letters, .* found '/'"),
    ({"motion": "run; Background: moon"}, "motion: expected letters, .* found ';'"),
    ({"motion": "x" * 61}, "motion: expected at most 60 characters, found 61"),
    ({"motion": "run\x1b[31m"}, r"motion: expected letters, .* found '\\x1b'"),
    ({"motion": "run 🏃"}, r"motion: expected letters, .* found '\\U0001f3c3'"),
    ({"motion": ""}, "motion: expected a word or more, found none"),
    ({"motion": 3}, "motion: Input should be a valid string, found 3"),
    ({"environment": "<img>"}, "environment: expected letters, .* found '<'"),
    ({"motion_level": 0}, "motion_level: Input should be 1, 2, 3, 4 or 5, found 0"),
    ({"motion_level": "3"}, "motion_level: Input should be .*, found '3'"),
    ({"motion_level": True}, "motion_level: expected a whole number"),
    ({"stamina": 0}, "stamina: Input should be -1 or 1, found 0"),
    ({"social": 2}, "social: Input should be 0 or 1, found 2"),
    ({"why": "because"}, "why: Extra inputs are not permitted, found 'because'"),
]


NO_RECORD = [
    ("I see a cat.", r"not valid JSON \(Expecting value: line 1 .*\), found 'I see a cat"),
    ("[1, 2]", r"expected a JSON object, found '\[1, 2\]'"),
    ("{}", "subject: Field required; motion: Field required"),
    ("[" * 100_000, r"not valid JSON \(maximum recursion"),
    (None, r"not valid JSON \(Expecting value"),
]


def test_clips_without_a_valid_answer_stay_unannotated(tmp_path, characters):
    cases = [(json.dumps(says_of(0, **changes)), reason) for changes, reason in WRONG] + NO_RECORD
    shots = make_shots(tmp_path / "shots", [[Take()] * (len(cases) + 1)])

    def answer(question):
        clip = clip_of(question)
        return says(cases[clip][0]) if clip < len(cases) else right(question)

    _, questions, report, said, aside = run(shots, characters, answer, attempts=2, patience=99)
    assert [row["clip"] for row in said] == [len(cases)]
    assert len(questions) == 2 * len(cases) + 1
    assert report.num_unannotated == len(aside) == len(cases)
    for clip, ((text, reason), row) in enumerate(zip(cases, aside, strict=True)):
        assert (row["clip"], row["answer"]) == (clip, (text or "")[:10_000])
        start, _, message = row["reason"].partition(": ")
        assert start == "asked 2 times, no valid answer"
        assert re.match(reason, message), message
        assert "\n" not in message
    assert {path.name for path in tmp_path.iterdir()} == {"shots", "characters"}
    there = {path.name for path in (tmp_path / "shots").iterdir()}
    assert there == {"shots.json", "characters.json", "cache", "usage", FILM}


def test_an_answer_that_was_cut(tmp_path, characters):
    shots = make_shots(tmp_path / "shots", [[Take()]])

    def answer(question):
        whole = question.body["max_completion_tokens"] >= 200
        text = json.dumps(says_of(0))
        return says(text) if whole else says(text[:30], finish="length")

    *_, (row,) = run(shots, characters, answer, attempts=1, max_tokens=50)
    assert row["reason"].startswith(
        "asked 1 time, no valid answer (cut at 50 tokens): not valid JSON"
    )
    _, questions, _, said, aside = run(shots, characters, answer, attempts=1, max_tokens=200)
    assert (len(questions), len(said), aside) == (1, 1, [])


ODD = {
    "HTML": (Reply(body=b"<html>hello</html>", content_type="text/html"), "<html>hello</html>"),
    "other JSON": (Reply(body=b'{"answer": 42}'), '{"answer": 42}'),
    "no choices": (Reply(body=b'{"choices": []}'), '{"choices": []}'),
    "a list": (Reply(body=b"[]"), "[]"),
    "half JSON": (Reply(body=b'{"choices": [{'), '{"choices": [{'),
    "not text": (Reply(body=b"\xff\xfe\x00"), None),
    "nothing": (Reply(body=b""), ""),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_response_that_is_none(shots, characters, odd):
    reply, found = ODD[odd]
    _, questions, report, said, aside = run(
        shots, characters, lambda question: reply if clip_of(question) == 2 else right(question)
    )
    assert [row["clip"] for row in said] == [0, 3, 4]
    (row,) = aside
    assert row["clip"] == 2
    assert row["reason"].startswith("expected a chat completion, found")
    assert found is None or row["answer"] == found
    assert (len(questions), report.num_unannotated) == (4, 1)


# Servers that refuse


def test_a_wrong_key_ends_the_run_at_once(shots, characters, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    message, questions = stopped(shots, characters, lambda _: refuses(401))
    assert message.startswith(
        "asks for a key (401): put a valid one into the environment variable OPENAI_API_KEY, then"
    )
    assert len(questions) == 1
    monkeypatch.setenv("A_KEY", "sk-secret")
    message, _ = stopped(shots, characters, lambda _: refuses(403), key_variable="A_KEY")
    assert "rejects the key (403)" in message
    assert "A_KEY" in message
    assert "sk-secret" not in message


def test_an_unknown_model_ends_the_run_at_once(shots, characters):
    message, questions = stopped(shots, characters, lambda _: refuses(404))
    assert message.startswith("no such address, or no model 'stand-in' there (")
    assert len(questions) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(shots, characters, status):
    def answer(question):
        return refuses(status) if question.number in (0, 3) else right(question)

    annotator, questions, report, said, aside = run(shots, characters, answer)
    assert (len(questions), len(said), aside, report.requests) == (6, 4, [], 4)
    assert (annotator.usage.requests, annotator.usage.answered) == (6, 4)


@pytest.mark.parametrize("status", [400, 429, 500])
def test_a_clip_that_the_server_refuses_stays_unannotated(shots, characters, status):
    def answer(question):
        return refuses(status) if clip_of(question) == 3 else right(question)

    *_, said, (row,) = run(shots, characters, answer)
    assert [row["clip"] for row in said] == [0, 2, 4]
    assert row["clip"] == 3
    assert row["reason"].startswith(f"the server answers {status}: ")
    assert f"refused with {status}" in row["answer"]
    _, questions, report, said, aside = run(
        shots, characters, right
    )  # only this one is asked again
    assert [clip_of(question) for question in questions] == [3]
    assert (len(said), aside, report.num_unannotated) == (4, [], 0)


@pytest.mark.parametrize("reply", [refuses(500), says("no"), ODD["HTML"][0]])
def test_a_server_that_never_answers_ends_the_run(shots, characters, reply):
    message, questions = stopped(
        shots, characters, lambda _: reply, patience=3, attempts=1, retries=0
    )
    assert message.startswith("no usable answer for 3 clips in a row, the last: ")
    assert message.endswith("then run the same command again (answers received so far are cached)")
    assert len(questions) == 3


def test_a_slow_server(shots, characters):
    def answer(question):
        reply = right(question)
        return Reply(body=reply.body, delay=0.8) if clip_of(question) == 2 else reply

    start = time.monotonic()
    *_, said, (row,) = run(shots, characters, answer, timeout=0.2, retries=0)
    assert time.monotonic() - start < 5
    assert len(said) == 3
    assert row == {"clip": 2, "reason": "no answer within 0.2 seconds", "answer": None}


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (None, "no answer within 0.2 s"),
        (refuses(429), "answers 429"),
        (refuses(500), "answers 500"),
    ],
)
def test_waiting_for_a_server_is_reported(shots, characters, first, reason):
    """After the first time that no answer came, not after the last."""
    message = []

    def answer(question):
        reply = right(question)
        if first and question.number < 2:
            return first
        return Reply(body=reply.body, delay=0.8 * (question.number < 2))

    with serving(answer) as server:
        annotator = annotator_for(characters, server, timeout=0.2, retries=2)
        annotator = Annotator(characters, annotator.settings, on_wait=message.append)
        report = annotate_film(shots, FILM, annotator)
    assert message == [f"{server.endpoint}: {reason}: sending the request again (1 of 2 times)"]
    assert (report.num_unannotated, annotator.usage.requests, annotator.usage.answered) == (0, 6, 4)


def test_no_server(shots, characters):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        settings = AskSettings(model="m", endpoint=endpoint, retries=0)
        with pytest.raises(UserError) as caught:
            annotate_film(shots, FILM, Annotator(characters, settings))
    assert str(caught.value).startswith(f"{endpoint}: cannot be reached (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_server_that_goes_away_costs_nothing_twice(shots, characters, parallel):
    def answer(question):
        return right(question) if question.number < 2 else Reply(body=None)

    message, questions = stopped(shots, characters, answer, retries=0, parallel=parallel)
    assert message.startswith("cannot be reached (")
    answered = {clip_of(question) for question in questions[:2]}
    _, questions, _, said, _ = run(shots, characters, right, parallel=parallel)
    assert {clip_of(question) for question in questions} >= set(KEPT) - answered
    assert len(questions) + len(answered) == len(KEPT) or parallel > 1
    assert len(said) == 4


# Manual annotations stay


def test_manual_annotations_stay_and_are_not_asked_for(shots, characters):
    annotate(shots, 0, [label(2, source="manual", motion="sleeping")], characters=characters)
    _, questions, report, said, _ = run(shots, characters, right)
    assert [clip_of(question) for question in questions] == [0, 3, 4]
    assert [(row["clip"], row["source"]) for row in said] == [
        (0, "model"), (2, "manual"), (3, "model"), (4, "model")
    ]  # fmt: skip
    assert said[1]["motion"] == "sleeping"
    assert (report.num_model, report.num_manual) == (3, 1)


def test_what_people_wrote_for_another_cast(shots, characters):
    annotate(shots, 0, [label(2, source="manual", subject="Yuki")], characters=characters)
    with (
        serving(right) as server,
        pytest.raises(UserError, match="clip 2: subject: 'Yuki' of a man"),
    ):
        annotate_film(shots, FILM, annotator_for(characters, server))
    assert server.questions == []


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": 0}, "parallel 0: expected 1 or more"),
        ({"attempts": 0}, "attempts 0: expected 1 or more"),
        ({"retries": -1}, "retries -1: expected 0 or more"),
        ({"side": 8}, "side 8: expected 32 or more"),
        ({"timeout": 0.0}, r"timeout 0\.0: expected seconds"),
        ({"temperature": float("nan")}, "temperature nan: expected 0 or more"),
        ({"prompt_price": -1.0}, r"prompt_price -1\.0: expected 0 or more"),
        ({"endpoint": "localhost:8000"}, "endpoint 'localhost:8000': expected an address such as"),
        ({"endpoint": "http://"}, "endpoint 'http://': expected an address such as"),
        ({"model": " "}, "model: expected the name of a model"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        AskSettings(**({"model": "m"} | changes))


def test_a_model_that_nobody_named(characters):
    with pytest.raises(UserError, match="model: expected the name of a model at the endpoint"):
        Annotator(characters, AskSettings())


def test_a_key_that_cannot_be(shots, characters, monkeypatch):
    monkeypatch.setenv("A_KEY", "a\u00e9")
    with pytest.raises(UserError, match="A_KEY: expected a key of ASCII letters and digits"):
        annotate_film(
            shots, FILM, Annotator(characters, AskSettings(model="m", key_variable="A_KEY"))
        )
