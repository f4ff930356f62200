"""Runs of the annotation against the stand-in server, which several tests share."""

import json

import pytest
from annotated_shots import Take, brightness, film_name, lines_of, says_of
from stand_in_server import Question, Reply, says, serving

from animegamer_jax.data.films.annotation.annotator import (
    Annotator,
    AskSettings,
    annotate_film,
)
from animegamer_jax.data.films.annotation.labels import read_report
from animegamer_jax.errors import UserError

FILM = film_name(0)
TAKES = [Take(), Take(dropped="black"), Take(), Take(scene=1), Take(scene=1)]
KEPT = (0, 2, 3, 4)


def clip_of(question: Question) -> int:
    """Which clip is asked about, by what its last picture shows."""
    shown = float(question.pictures[-1].mean())
    return min(range(30), key=lambda clip: abs(brightness(0, clip) - shown))


def right(question: Question) -> Reply:
    return says(json.dumps(says_of(clip_of(question))))


def annotator_for(characters, server, **changes) -> Annotator:
    settings = {"model": "stand-in", "parallel": 1, "retries": 1, "timeout": 5.0, "side": 64}
    return Annotator(characters, AskSettings(endpoint=server.endpoint, **(settings | changes)))


def run(shots, characters, answer, **changes):
    """A run with a server of its own: the annotator, the questions, and what was written."""
    with serving(answer) as server:
        annotator = annotator_for(characters, server, **changes)
        report = annotate_film(shots, FILM, annotator)
    folder = shots.folder(FILM)
    said, aside = (lines_of(folder / f"{n}.jsonl") for n in ("annotations", "unannotated"))
    return annotator, server.questions, report, said, aside


def stopped(shots, characters, answer, **changes):
    """A run that ends with a message: the message, and the questions."""
    with serving(answer) as server, pytest.raises(UserError) as caught:
        annotate_film(shots, FILM, annotator_for(characters, server, **changes))
    assert "\n" not in str(caught.value)
    assert read_report(shots, FILM) is None
    assert not (shots.folder(FILM) / "annotations.jsonl").exists()
    return str(caught.value).removeprefix(f"{server.endpoint}: "), server.questions
