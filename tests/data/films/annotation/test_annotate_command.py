"""`animegamer data annotate`: many films, its output, its failures."""

import functools
import json
import pickle
import time

import pytest
from annotated_shots import (
    Take,
    damage_clip,
    film_name,
    lines_of,
    make_shots,
    says_of,
    write_characters,
)
from stand_in_server import Reply, refuses, says, serving

from animegamer_jax.cli import main
from animegamer_jax.data.characters import read_characters
from animegamer_jax.data.films.annotation.labels import (
    FIELDS,
    read_failure,
    read_labels,
    read_report,
)
from animegamer_jax.data.films.annotation.usage_log import read_usage
from animegamer_jax.data.films.command import _annotate
from animegamer_jax.vlm.client import AskSettings

HTML = Reply(body=b"<html>hello</html>", content_type="text/html")


@pytest.fixture
def characters(tmp_path):
    (tmp_path / "characters").mkdir()
    return write_characters(tmp_path / "characters")


def right(question):
    return says(json.dumps(says_of()))


def films(path, count: int, *, clips: int = 3):
    return make_shots(path / "shots", [[Take() for _ in range(clips)] for _ in range(count)])


def annotate(shots, characters, server, *more: object) -> int:
    """The command, one question at a time."""
    words = ["data", "annotate", str(shots.path), "--characters", str(characters)]
    words += ["--endpoint", server.endpoint, "--model", "stand-in", "--retries", "0", "--parallel"]
    return main([*words, "1", *map(str, more)])


def test_patience_is_for_all_films(tmp_path, characters, capfd):
    shots = films(tmp_path, 6)
    with serving(lambda question: HTML) as server:
        assert annotate(shots, characters, server) == 2
    assert len(server.questions) == 10
    assert "no usable answer for 10 clips in a row, the last: expected" in capfd.readouterr().err
    with serving(lambda question: HTML) as server:  # a run has a patience of its own
        assert annotate(shots, characters, server, "--patience", 20) == 2
    assert len(server.questions) == 18
    output = capfd.readouterr()
    assert (
        "0 clips annotated by a model, 0 by hand, 18 without a valid answer; 0 films" in output.out
    )
    assert "over all runs 28 requests (28 unanswered), 0 + 0 tokens" in output.out
    assert "shots: no clip has a usable answer, the first: expected a chat completion" in output.err


def test_what_was_asked_is_counted_over_all_runs(tmp_path, characters, capfd):
    shots = films(tmp_path, 2, clips=2)
    prices = ("--prompt-price", 1000, "--completion-price", 10000)

    def sometimes(question):
        return refuses(500) if question.number == 1 else right(question)

    for answer, model in ((sometimes, "stand-in"), (right, "stand-in"), (right, "other")):
        with serving(answer) as server:
            assert annotate(shots, characters, server, "--model", model, *prices) == 0
    assert "over all runs 9 requests (1 unanswered), 800 + 160 tokens, cost 2.40" in (
        capfd.readouterr().out
    )
    assert read_usage(shots).requests == 9
    damaged = next((shots.path / "usage").iterdir())
    damaged.write_text("{")
    with serving(right) as server:
        assert annotate(shots, characters, server) == 2
    error = capfd.readouterr().err
    assert f"{damaged}: not valid JSON: " in error
    assert ": remove it; its requests are not counted" in error


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_film_is_skipped_and_the_rest_goes_on(tmp_path, characters, capfd, workers):
    shots = films(tmp_path, 3)
    whole = (shots.folder(film_name(1)) / "clips.zip").read_bytes()
    damage_clip(shots, film_name(1))
    with serving(right) as server:
        assert annotate(shots, characters, server, "--workers", workers) == 2
    output = capfd.readouterr().out
    reason = read_failure(shots, film_name(1))
    assert reason.startswith(f"{film_name(1)}/clips.zip: 00000.mp4 is damaged")
    assert (
        "6 clips annotated by a model, 0 by hand, 0 without a valid answer; 1 films skipped"
        in output
    )
    assert f"  {film_name(1)}: {reason}\n" in output
    assert [read_report(shots, film) is None for film in shots.films()] == [False, True, False]
    (shots.folder(film_name(1)) / "clips.zip").write_bytes(whole)
    with serving(right) as server:
        assert annotate(shots, characters, server) == 0
    assert len(server.questions) == 3
    assert read_failure(shots, film_name(1)) is None


def test_a_server_that_goes_away_is_not_a_film_s_mistake(tmp_path, characters, capfd):
    shots = films(tmp_path, 3)
    with serving(lambda question: Reply(body=None)) as server:
        assert annotate(shots, characters, server) == 2
    assert len(server.questions) == 1
    assert "cannot be reached" in capfd.readouterr().err
    assert [read_failure(shots, film) for film in shots.films()] == [None] * 3


@pytest.mark.slow
def test_films_are_counted_where_two_processes_ask(tmp_path, characters, capfd, monkeypatch):
    """The last answer is late, so that the other three films are reported before."""
    monkeypatch.setattr("animegamer_jax.progress._LINE_EVERY", 0.0)
    shots = films(tmp_path, 4, clips=1)

    def answer(question):
        end = time.monotonic() + 20
        while question.number == 3 and time.monotonic() < end:
            if sum(read_report(shots, film) is not None for film in shots.films()) == 3:
                time.sleep(1.5)
                break
            time.sleep(0.05)
        return right(question)

    with serving(answer) as server:
        assert annotate(shots, characters, server, "--workers", 2) == 0
    output = capfd.readouterr().err.split("\n")
    counts = {line.split(",")[0].split(";")[0] for line in output}  # before rate and usage
    assert {"films: 0 of 4", "films: 3 of 4"} <= counts


def test_the_cost_is_reported_on_the_way(tmp_path, characters, capfd, monkeypatch):
    for name in (
        "data.films.command._COUNT_EVERY",
        "data.films.annotation.usage_log._EVERY",
        "progress._LINE_EVERY",
    ):
        monkeypatch.setattr(f"animegamer_jax.{name}", 0.0)
    shots = films(tmp_path, 1, clips=4)
    with serving(right) as server:
        assert annotate(shots, characters, server, "--prompt-price", 1000) == 0
    output = capfd.readouterr().err
    assert f"{film_name(0)}: clips: 3 of 4; 3 requests (0 unanswered), 300 + 60 tok" in output
    assert "tokens, cost 0.30" in output


def test_options_of_the_question(tmp_path, characters):
    shots = films(tmp_path, 1)
    options = ("--temperature", "None", "--max-tokens", 3000, "--frames", 2, "--side", 32)
    with serving(right) as server:
        assert annotate(shots, characters, server, *options) == 0
    for question in server.questions:
        assert "temperature" not in question.body
        assert question.body["max_completion_tokens"] == 3000
        assert [max(picture.shape) for picture in question.pictures] == [32, 32, 24, 24]


def test_manual_annotations(tmp_path, characters, capfd):
    shots = films(tmp_path, 2)
    said = {"film": "Film 1.mp4", "clip": 2, **says_of(2, motion="sleeping")}
    file = tmp_path / "manual.csv"
    file.write_text(",".join(said) + "\n" + ",".join(map(str, said.values())) + "\n")
    assert tuple(said)[2:] == FIELDS
    words = ["data", "annotate", str(shots.path), "--characters", str(characters)]
    assert main([*words, "--manual", str(file)]) == 0
    assert f"{file}: 1 annotations of 1 films" in capfd.readouterr().out
    assert [*read_labels(shots, film_name(1))] == [2]
    assert read_report(shots, film_name(0)) is None
    with serving(right) as server:
        assert annotate(shots, characters, server) == 0
    assert len(server.questions) == 5
    assert "5 clips annotated by a model, 1 by hand" in capfd.readouterr().out
    (manual,) = [
        row
        for row in lines_of(shots.folder(film_name(1)) / "annotations.jsonl")
        if row["source"] == "manual"
    ]
    assert (manual["clip"], manual["motion"]) == (2, "sleeping")
    assert main(words) == 2
    assert "expected --model NAME to ask, or --manual FILE, or both" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "place", "output"),
    [
        (
            "http://localhost:8000/v1",
            "gs://bucket/shots",
            "--endpoint http://localhost:8000/v1: exp",
        ),
        ("http://127.0.0.2/v1", "gs://bucket/shots", "found one of this machine only"),
        ("http://[::1]:80/v1", "gs://bucket/shots", "machines of FlinkRunner can reach"),
        ("http://10.0.0.2/v1", "here/shots", "here/shots: expected a folder that the machines of"),
    ],
)
def test_what_a_cluster_cannot_reach(characters, capfd, endpoint, place, output):
    words = ["data", "annotate", place, "--characters", str(characters), "--model", "m"]
    assert main([*words, "--endpoint", endpoint, "--runner", "FlinkRunner"]) == 2
    error = capfd.readouterr().err
    assert output in error
    assert error.count("\n") == 1


def test_workers_need_no_file_of_this_machine(tmp_path, characters):
    """They get the characters with their pictures."""
    shots, known = films(tmp_path, 1), read_characters(characters)
    with serving(right) as server:
        settings = AskSettings(model="stand-in", endpoint=server.endpoint)
        sent = pickle.dumps(
            functools.partial(_annotate, folder=shots, characters=known, settings=settings)
        )
        for file in characters.parent.iterdir():
            file.unlink()
        pickle.loads(sent)(film_name(0))
    assert len(server.questions[0].pictures) == 2 + 4
    assert read_report(shots, film_name(0)).num_model == 3
