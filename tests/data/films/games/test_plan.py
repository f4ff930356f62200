"""Films of which no games can be made: one line says why, and no set is left."""

import json

import pytest
from annotated_shots import (
    CHARACTERS,
    SETTINGS,
    Take,
    annotate,
    damage_clip,
    film_name,
    label,
    make_shots,
)
from film_games import FILM, annotated, takes, turns_of

from animegamer_jax.data.characters import Characters
from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.films.clips.store import open_shots
from animegamer_jax.data.films.games.grouping import GamesSettings
from animegamer_jax.data.films.games.plan import make_plan
from animegamer_jax.data.films.games.writer import write_film_games
from animegamer_jax.errors import UserError


def refusal(path, shots, settings=None) -> str:
    with pytest.raises(UserError) as caught:
        write_film_games(path / "games", shots, settings or GamesSettings())
    assert "\n" not in str(caught.value)
    assert not (path / "games" / "set.json").exists()
    return str(caught.value)


def test_films_that_are_not_annotated(tmp_path):
    shots = make_shots(tmp_path / "shots", [takes(8), takes(8)])
    reported = refusal(tmp_path, shots)
    assert (
        f"not annotated: 2 of 2 films, the first {FILM}: run `animegamer data annotate`" in reported
    )
    annotate(shots, 1, [label(n) for n in (0, 1, 2, 3, 5, 6, 7)])
    reported = refusal(tmp_path, shots)
    assert "not annotated: 1 of 2 films" in reported
    assert reported.endswith("to its end, or skip them with --unannotated skip")
    settings = GamesSettings(unannotated="skip")
    assert make_plan(shots, settings).skipped == (FILM,)
    write_film_games(tmp_path / "games", shots, settings)
    turns = turns_of(tmp_path / "games")
    assert {turn["film"] for split in turns.values() for turn in split} == {film_name(1)}
    card = json.loads((tmp_path / "games" / "card.json").read_text())
    assert card["made"]["films_without_annotation"] == [FILM]


def test_a_folder_without_films(tmp_path):
    shots = open_shots(tmp_path / "shots", SETTINGS)
    assert "no finished films: run `animegamer data films`" in refusal(tmp_path, shots)


def test_annotations_of_another_cast_or_of_other_clips(tmp_path):
    shots = make_shots(tmp_path / "shots", [takes(8), takes(8)])
    annotate(shots, 0, [label(0)])
    annotate(shots, 1, [label(0)], characters=Characters(CHARACTERS.entries[:1]))
    assert f"{FILM}: annotated with other characters: run" in refusal(tmp_path, shots)
    annotate(shots, 1, [label(0)])
    file = shots.folder(FILM) / "clips.jsonl"
    file.write_text(file.read_text().replace('"digest": "', '"digest": "0', 1))
    assert f"{FILM}: cut again since it was annotated" in refusal(tmp_path, shots)


def test_too_few_games(tmp_path):
    shots = make_shots(tmp_path / "shots", [[Take() for _ in range(4)]])
    annotate(shots, 0, [label(n, subject="none") for n in range(4)])
    assert "0 groups of scenes with games: expected 2 or more" in refusal(tmp_path, shots)
    annotate(shots, 0, [label(n, subject="Mika") for n in range(4)])
    assert "1 group of scenes with games: expected 2 or more" in refusal(tmp_path, shots)


def test_a_damaged_clip_leaves_no_set(tmp_path):
    shots = annotated(tmp_path / "shots", 12)
    damage_clip(shots, FILM)
    assert "clips.zip: 00000.mp4 is damaged" in refusal(tmp_path, shots)
    with pytest.raises(UserError, match="not finished"):
        open_games(tmp_path / "games")
    assert len(list((tmp_path / "games").rglob("*.array_record-*"))) <= 1  # the other split's
    assert not list((tmp_path / "games").rglob(".shard-*"))
