"""Annotation that is interrupted and continued: nothing is lost, nothing is asked twice."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from annotated_shots import (
    Take,
    damage_clip,
    film_name,
    make_shots,
    says_of,
    write_characters,
)
from stand_in_runs import FILM, KEPT, TAKES, annotator_for, clip_of, right, run
from stand_in_server import Reply, says, serving

from animegamer_jax.data.characters import read_characters
from animegamer_jax.data.films.annotation.annotator import annotate_film
from animegamer_jax.data.films.annotation.labels import read_labels, read_report
from animegamer_jax.data.films.clips.store import open_shots
from animegamer_jax.data.films.cutting.video_reader import FilmError
from animegamer_jax.errors import UserError
from animegamer_jax.vlm import ask_many


@pytest.fixture
def characters(tmp_path):
    (tmp_path / "characters").mkdir()
    return read_characters(write_characters(tmp_path / "characters"))


@pytest.fixture
def shots(tmp_path):
    return make_shots(tmp_path / "shots", [TAKES])


# The cache


def files_of(shots) -> dict[str, bytes]:
    folder = shots.folder(FILM)
    names = ("annotations.jsonl", "unannotated.jsonl", "annotation.json")
    return {name: (folder / name).read_bytes() for name in names}


def test_a_second_run_asks_only_about_clips_without_a_valid_answer(shots, characters):
    def answer(question):
        return says("nonsense") if clip_of(question) == 2 else right(question)

    run(shots, characters, answer, attempts=2)
    before = files_of(shots)
    annotator, questions, *_ = run(shots, characters, answer, attempts=2)
    assert [clip_of(question) for question in questions] == [2, 2]
    assert files_of(shots) == before
    assert (annotator.usage.cached, annotator.usage.requests) == (3, 2)
    _, questions, *_, aside = run(shots, characters, right, attempts=2)  # the server is well again
    assert [clip_of(question) for question in questions] == [2]
    assert aside == []
    _, questions, *_ = run(shots, characters, right, attempts=2)
    assert questions == []


def times_of(shots) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in Path(shots.folder(FILM)).iterdir()}


def test_a_whole_film_is_not_written_again(shots, characters):
    run(shots, characters, right)
    before, written = times_of(shots), files_of(shots)
    annotator, questions, report, said, _ = run(shots, characters, right, attempts=5)
    assert (questions, len(said), times_of(shots)) == ([], 4, before)
    assert (annotator.usage.cached, report) == (4, read_report(shots, FILM))
    file = shots.folder(FILM) / "annotations.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert run(shots, characters, right)[1] == []  # not whole: made again from the cached answers
    assert files_of(shots) == written


def test_a_report_of_an_older_version(shots, characters):
    run(shots, characters, right)
    file, written = shots.folder(FILM) / "annotation.json", files_of(shots)
    old = json.loads(file.read_text())
    old["by_model"] = old.pop("num_model")
    file.write_text(json.dumps(old))
    with pytest.raises(
        UserError, match=r"by_model: unknown field: remove the file and annotate ag"
    ):
        read_report(shots, FILM)
    file.unlink()
    assert run(shots, characters, right)[1] == []
    assert files_of(shots) == written


def test_other_models_casts_and_questions_are_asked_again(tmp_path, shots, characters):
    run(shots, characters, right)
    file = tmp_path / "characters" / "characters.toml"
    file.write_text(file.read_text().replace("Mika the cat", "The cat"))
    for now, changes in (
        (characters, {"model": "other"}),
        (characters, {"frames": 2}),
        (characters, {"temperature": None}),
        (read_characters(file), {}),
    ):
        _, questions, *_ = run(shots, now, right, **changes)
        assert len(questions) == 4
    for changes in ({}, {"parallel": 3, "retries": 0, "timeout": 9.0}):
        assert run(shots, characters, right, **changes)[1] == []


def test_damaged_answers_on_disk_are_asked_again(shots, characters):
    run(shots, characters, right)
    before = files_of(shots)
    files = sorted((shots.path / "cache").glob("*/*.json"))
    assert len(files) == 4
    for file, content in zip(files, (b"", b"{", b'{"answer": 3}', b"\xff"), strict=True):
        file.write_bytes(content)
    (shots.folder(FILM) / "annotation.json").unlink()  # else nothing is left to ask
    _, questions, *_ = run(shots, characters, right)
    assert len(questions) == 4
    assert files_of(shots) == before


def test_equal_clips_are_asked_about_once(tmp_path, characters):
    shots = make_shots(tmp_path / "shots", [[Take(), Take()], [Take()]])
    same = shots.read_clip(FILM, 0)
    with shots.writing(film_name(2)) as writer:
        for row in shots.rows(FILM):
            writer.add(row, same)
        writer.report = dataclasses.replace(shots.report(FILM), film=film_name(2))
    with serving(right) as server:
        annotator = annotator_for(characters, server, parallel=2)
        for film in shots.films():
            annotate_film(shots, film, annotator)
    assert len(server.questions) == 3
    assert [*read_labels(shots, film_name(2))] == [0, 1]


def test_the_number_of_questions_at_a_time_changes_nothing(tmp_path, characters):
    takes = [Take(scene=number // 3) for number in range(9)]
    written = []
    for parallel in (1, 4):
        shots = make_shots(tmp_path / f"shots{parallel}", [takes])

        def answer(question):
            clip = clip_of(question)
            if clip == 4:
                return says("nonsense")
            wrong = {"social": 7} if clip == 5 and len(question.body["messages"]) == 2 else {}
            return says(json.dumps(says_of(clip, **wrong)), delay=0.01 * (9 - clip))

        run(shots, characters, answer, parallel=parallel, attempts=2)
        cache = {p.name: p.read_bytes() for p in (shots.path / "cache").glob("*/*.json")}
        written.append((files_of(shots), cache))
    assert written[0] == written[1]
    assert len(written[0][1]) == 9


def test_several_questions_at_the_same_time(shots, characters):
    together = threading.Barrier(4, timeout=10)

    def answer(question):
        together.wait()
        return right(question)

    *_, said, _ = run(shots, characters, answer, parallel=4)
    assert len(said) == 4


def test_a_slow_disk_holds_no_question_up(tmp_path, characters, monkeypatch):
    shots = make_shots(tmp_path / "shots", [[Take() for _ in range(8)]])
    write_json = ask_many.write_json

    def slow(path, value):
        time.sleep(0.4)
        write_json(path, value)

    monkeypatch.setattr(ask_many, "write_json", slow)
    start = time.monotonic()
    *_, said, _ = run(shots, characters, right, parallel=8)
    assert len(said) == 8
    assert time.monotonic() - start < 2.4


# Runs that end early

KILLED = """
import sys
from animegamer_jax.data.characters import read_characters
from animegamer_jax.data.films.annotation.annotator import Annotator, annotate_film
from animegamer_jax.data.films.clips.store import open_shots
from animegamer_jax.vlm.client import AskSettings
shots, characters, endpoint, film = sys.argv[1:]
settings = AskSettings(model="stand-in", endpoint=endpoint, parallel=1, side=64)
annotate_film(open_shots(shots), film, Annotator(read_characters(characters), settings))
"""


def test_a_killed_run_is_finished_without_asking_twice(tmp_path, shots, characters):
    process = None

    def answer(question):
        if question.number < 2:
            return right(question)
        process.send_signal(signal.SIGKILL)
        return Reply(body=None)

    with serving(answer) as server:
        words = [
            str(shots.path),
            str(tmp_path / "characters" / "characters.toml"),
            server.endpoint,
            FILM,
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, *words], stderr=subprocess.DEVNULL
        )
        assert process.wait(60) == -signal.SIGKILL
    assert [clip_of(question) for question in server.questions] == [0, 2, 3]
    assert read_report(shots, FILM) is None
    _, questions, _, said, _ = run(open_shots(shots.path), characters, right)
    assert [clip_of(question) for question in questions] == [3, 4]
    assert [row["clip"] for row in said] == list(KEPT)


COMMAND = "import sys; from animegamer_jax.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_killed_beam_workers_have_lost_no_answer(tmp_path, characters):
    """The command on two processes, killed when both wait for an answer, then given again."""
    films = make_shots(tmp_path / "shots", [[Take() for _ in range(5)] for _ in range(4)])
    words = [
        *("data", "annotate", str(films.path), "--model", "stand-in"),
        *("--characters", str(tmp_path / "characters" / "characters.toml")),
        *("--workers", "2", "--parallel", "1"),
    ]
    process = None
    both_wait = threading.Barrier(
        2, action=lambda: os.killpg(process.pid, signal.SIGKILL), timeout=60
    )
    rounds: list[list[str]] = [[], []]

    def first(question):
        if len(rounds[0]) < 6:
            rounds[0].append(json.dumps(question.body["messages"]))
            return right(question)
        both_wait.wait()
        return Reply(body=None)

    def second(question):
        rounds[1].append(json.dumps(question.body["messages"]))
        return right(question)

    def start(server):
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, "--endpoint", server.endpoint],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    with serving(first) as server:
        process = start(server)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    with serving(second) as server:
        again = start(server)
        _, output = again.communicate(timeout=120)
    assert again.returncode == 0, output.decode()
    asked = [*rounds[0], *rounds[1]]
    assert len(rounds[0]) == 6
    assert len(set(asked)) == len(asked)
    assert all(len(read_labels(films, film)) == 5 for film in films.films())


def test_ctrl_c_keeps_what_came(shots, characters):
    def answer(question):
        if question.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
            return Reply(body=b"", delay=1.0)
        return right(question)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(shots, characters, answer, timeout=30.0)
    assert time.monotonic() - start < 10
    _, questions, *_ = run(shots, characters, right)
    assert [clip_of(question) for question in questions] == [3, 4]


def test_a_damaged_clip_is_the_film_s_mistake(shots, characters):
    damage_clip(shots, FILM)
    with serving(right) as server, pytest.raises(FilmError) as caught:
        annotate_film(shots, FILM, annotator_for(characters, server))
    assert "clips.zip: 00000.mp4 is damaged" in str(caught.value)
    assert server.questions == []
