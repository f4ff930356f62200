"""Annotated films to a set of games: its turns, splits and shards, and its card."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from annotated_shots import (
    CHARACTERS,
    SECONDS,
    SETTINGS,
    Take,
    annotate,
    annotations_of,
    film_name,
    label,
    make_shots,
    write_film,
)
from film_games import FILM, annotated, takes, turns_of

from animegamer_jax.cli import main
from animegamer_jax.data.characters import Characters
from animegamer_jax.data.datasets import open_games
from animegamer_jax.data.films.annotation.labels import note_failure
from animegamer_jax.data.films.clips.store import SkippedFilm
from animegamer_jax.data.films.games import writer
from animegamer_jax.data.films.games.grouping import GamesSettings
from animegamer_jax.data.films.games.writer import write_film_games
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import PAPER_EDGES
from animegamer_jax.protocol import PAPER


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    return annotated(tmp_path_factory.mktemp("films") / "shots", 24, 18)


@pytest.fixture(scope="module")
def made(shots, tmp_path_factory):
    path = tmp_path_factory.mktemp("games") / "games"
    info = write_film_games(path, shots, GamesSettings(test_share=0.3))
    return path, info


def test_the_set_holds_the_films_clips(shots, made):
    path, info = made
    assert open_games(path).info == info
    assert (info.num_frames, info.height, info.width, info.fps) == (5, 16, 24, 8)
    assert (info.protocol, info.motion_edges, info.seed) == (PAPER, PAPER_EDGES, None)
    found = {}
    for turns in turns_of(path).values():
        for turn in turns:
            found[turn["film"], turn["clip"]] = turn
    expected = [
        (film, shots.read_clip(film, row["clip"]), row, clip)
        for film in shots.films()
        for row in annotations_of(shots, film)
        for clip in [shots.rows(film)[row["clip"]]]
        if row["subject"] == "Mika"
    ]
    assert len(found) == len(expected) == sum(info.splits.values())
    for film, clip, said, row in expected:
        turn = found[film, clip]
        assert turn["character"] == "Mika"
        assert turn["motion"] == said["motion"]
        assert (turn["place"], turn["time"]) == (said["environment"], said["time"])
        assert turn["motion_text"] == f"{said['adverb']} {said['motion']}"
        assert turn["motion_value"] == pytest.approx(row.motion_value, rel=1e-6)
        assert turn["motion_level"] == 1 + sum(row.motion_value >= edge for edge in PAPER_EDGES)
        states = [turn[name] for name in ("social", "entertainment", "stamina", "is_open")]
        assert states == [said["social"], 1, -1, 0]


def scenes_of(shots, turns) -> set[tuple[str, int]]:
    by_clip = {
        (film, shots.read_clip(film, row.clip)): row.scene
        for film in shots.films()
        for row in shots.rows(film)
        if row.dropped is None
    }
    return {(turn["film"], by_clip[turn["film"], turn["clip"]]) for turn in turns}


@pytest.mark.parametrize("per_scene", [1, 3])
def test_no_scene_is_in_both_splits(tmp_path, per_scene):
    films = [
        [Take(scene=n // per_scene, start=n * SECONDS + 9.0 * (n // 4)) for n in range(20)]
        for _ in range(2)
    ]
    shots = make_shots(tmp_path / "shots", films)
    for number in range(2):
        annotate(shots, number, [label(n) for n in range(20)])
    write_film_games(tmp_path / "games", shots, GamesSettings(test_share=0.4, max_turns=3))
    turns = turns_of(tmp_path / "games")
    train, test = (scenes_of(shots, turns[split]) for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_splits_do_not_depend_on_other_films(shots, made, tmp_path):
    alone = annotated(tmp_path / "shots", 24)
    write_film_games(tmp_path / "games", alone, GamesSettings(test_share=0.3))
    for split, turns in turns_of(tmp_path / "games").items():
        whole = [turn for turn in turns_of(made[0])[split] if turn["film"] == FILM]
        assert [(t["game"], t["turn"]) for t in turns] == [(t["game"], t["turn"]) for t in whole]


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_both_splits_have_a_game_whatever_the_share(shots, tmp_path, share):
    info = write_film_games(tmp_path / "games", shots, GamesSettings(test_share=share))
    assert min(info.splits.values()) >= 1


def files_of(path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def test_the_same_films_give_the_same_set(shots, made, tmp_path):
    write_film_games(tmp_path / "again", shots, GamesSettings(test_share=0.3))
    assert turns_of(tmp_path / "again") == turns_of(made[0])
    assert files_of(tmp_path / "again") == files_of(made[0])


def test_every_pass_over_the_films_shows_its_progress(shots, tmp_path, capsys):
    seen = []
    write_film_games(
        tmp_path / "games", shots, GamesSettings(), on_progress=lambda *now: seen.append(now)
    )
    passes = ("films checked", "films read", "films on the card")
    assert seen == [(what, number, 2) for what in passes for number in range(3)]
    assert main(["data", "games", str(shots.path), "--out", str(tmp_path / "again")]) == 0
    assert "films checked: 2 of 2\n" in capsys.readouterr().err


def test_whoever_writes_the_shards_and_whenever(shots, made, tmp_path):
    settings = GamesSettings(test_share=0.3)

    def stop(numbers, function, count_done):
        assert count_done() == 0
        function(numbers[1])
        assert count_done() == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_film_games(tmp_path / "games", shots, settings, films_a_shard=1, for_each=stop)
    with pytest.raises(UserError, match="not finished"):
        open_games(tmp_path / "games")
    asked = []

    def backwards(numbers, function, count_done):
        asked.extend(numbers)
        for number in reversed(numbers):
            function(number)

    write_film_games(tmp_path / "games", shots, settings, films_a_shard=1, for_each=backwards)
    assert asked == [0]  # shard 1 was whole
    assert turns_of(tmp_path / "games") == turns_of(made[0])
    with pytest.raises(UserError, match="films a shard 0: expected 1 or more"):
        write_film_games(tmp_path / "other", shots, settings, films_a_shard=0)


def begun(path, shots, **changes):
    """A set of which one shard is written."""

    def stop(numbers, function, count_done):
        function(numbers[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_film_games(path, shots, GamesSettings(**changes), films_a_shard=1, for_each=stop)


def again(shots, number: int, count: int, **changes) -> None:
    annotate(
        shots, number, [label(n, subject="Mika", **changes) for n in range(count) if n % 5 < 4]
    )


CHANGED = {
    "share": ({"test_share": 0.6}, None, "settings.test_share was 0.3, is 0.6"),
    "gap": ({"max_gap": 1.0}, None, "settings.max_gap was 4.0, is 1.0"),
    "words": (
        {},
        lambda shots: again(shots, 1, 18, motion="sleeping"),
        f"{film_name(1)}.games was",
    ),
    "flow": (
        {},
        lambda shots: write_film(shots, 1, takes(18, first_value=9.0)),
        f"{film_name(1)}.games was",
    ),
    "a film": ({}, lambda shots: added(shots), "num_films was 2, is 3"),
    "characters": ({}, lambda shots: change_characters(shots), "characters was"),
}


def added(shots) -> None:
    write_film(shots, 2, takes(8))
    again(shots, 2, 8)


def change_characters(shots) -> None:
    for number, count in enumerate((24, 18)):
        labels = [label(n, subject="Mika") for n in range(count) if n % 5 < 4]
        annotate(shots, number, labels, characters=Characters(CHARACTERS.entries[:1]))


@pytest.mark.parametrize("what", CHANGED)
def test_a_set_that_was_begun_with_something_else_is_not_gone_on_with(tmp_path, what):
    changes, change, reported = CHANGED[what]
    shots = annotated(tmp_path / "shots", 24, 18)
    begun(tmp_path / "games", shots, test_share=0.3)
    if change is not None:
        change(shots)
    settings = GamesSettings(**({"test_share": 0.3} | changes))
    with pytest.raises(UserError) as caught:
        write_film_games(tmp_path / "games", shots, settings, films_a_shard=1)
    assert reported in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "games" / "set.json").exists()


def test_as_many_shards_of_other_films(tmp_path):
    """Five films by three or by four are two shards."""
    shots = annotated(tmp_path / "shots", 8, 8, 8, 8, 8)
    settings = GamesSettings(test_share=0.3)

    def stop(numbers, function, count_done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_film_games(tmp_path / "games", shots, settings, films_a_shard=3, for_each=stop)
    with pytest.raises(
        UserError, match=r"dataset was begun here: fingerprint\.films_a_shard was 3, is 4"
    ):
        write_film_games(tmp_path / "games", shots, settings, films_a_shard=4)


def test_many_films_share_shards_by_default(tmp_path, monkeypatch):
    """Five films: each its own file where five files may be, else as few films in one as fit."""
    shots = annotated(tmp_path / "shots", 8, 8, 8, 8, 8)
    held = {}
    for most in (5, 4, 2):
        monkeypatch.setattr(writer, "_MOST_SHARDS", most)
        path = tmp_path / f"games {most}"
        write_film_games(path, shots, GamesSettings(test_share=0.3))
        names = sorted(file.name for file in path.rglob("*train*.array_record-*"))
        held[most] = [re.search(r"-(\d+)-of-(\d+)$", name).groups() for name in names]
    shards = {
        most: [(f"{n:05d}", f"{count:05d}") for n in range(count)]
        for most, count in {5: 5, 4: 3, 2: 2}.items()
    }
    assert held == shards
    turns = turns_of(tmp_path / "games 5")
    assert turns_of(tmp_path / "games 4") == turns_of(tmp_path / "games 2") == turns


def test_annotations_that_change_while_games_are_made(tmp_path):
    shots = annotated(tmp_path / "shots", 24, 18)

    def change(numbers, function, count_done):
        again(shots, 1, 18, motion="sleeping")
        for number in numbers:
            function(number)

    with pytest.raises(UserError, match=f"{film_name(1)}: annotated or cut again while games were"):
        write_film_games(tmp_path / "games", shots, GamesSettings(), for_each=change)


def test_equal_clips_of_two_films_are_in_one_split(tmp_path):
    """The same film under two names, with scenes of its own between: what it ties is tied."""
    one = [Take(scene=n, start=20.0 * n) for n in range(12)]
    shots = make_shots(tmp_path / "shots", [one, [], one])
    with shots.writing(film_name(1)) as writer:  # every second clip is one of the first film
        for row in shots.rows(film_name(2)):
            film = FILM if row.clip % 2 else film_name(2)
            writer.add(row, shots.read_clip(film, row.clip))
        writer.report = dataclasses.replace(shots.report(film_name(2)), film=film_name(1))
    for number in range(3):
        annotate(shots, number, [label(n, subject="Mika") for n in range(12)])
    for share in (0.2, 0.5):
        path = tmp_path / f"games {share}"
        info = write_film_games(path, shots, GamesSettings(test_share=share, max_turns=1))
        assert sum(info.splits.values()) == 36
        train, test = ({turn["clip"] for turn in turns_of(path)[s]} for s in ("train", "test"))
        assert len(train | test) == 24
        assert not train & test


KILLED = """
import os, signal, sys
from animegamer_jax.cli import main
from animegamer_jax.data.shards import ShardedDataset

write, written = ShardedDataset.write, []

def torn(records):
    for number, record in enumerate(records):
        if number == 1 and len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield record

def write_some(self, split, shard, records, **options):
    written.append((split, shard))
    return write(self, split, shard, torn(records), **options)

ShardedDataset.write = write_some
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_command_goes_on(shots, made, tmp_path):
    out = tmp_path / "games"
    words = ["data", "games", str(shots.path), "--out", str(out), "--test-share", "0.3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(out.rglob("games-*.array_record-*"))) == 2  # both splits of one film
    assert len(list(out.rglob(".shard-*"))) == 1
    assert main(words) == 0
    assert files_of(out) == files_of(made[0])


def test_two_workers_make_the_same_set(shots, made, tmp_path):
    out = tmp_path / "games"
    words = ["data", "games", str(shots.path), "--out", str(out), "--test-share", "0.3"]
    assert main([*words, "--workers", "2"]) == 0
    assert files_of(out) == files_of(made[0])


# Motion levels


def test_quantiles_make_levels_equally_frequent(shots, tmp_path):
    info = write_film_games(tmp_path / "games", shots, GamesSettings(edges="quantiles"))
    turns = [turn for split in turns_of(tmp_path / "games").values() for turn in split]
    levels, values = (np.array([t[k] for t in turns]) for k in ("motion_level", "motion_value"))
    counts = np.bincount(levels)[1:]
    assert counts.max() - counts.min() <= 1
    assert len(counts) == 5
    for level, value in enumerate(info.protocol.motion_values, start=1):
        assert value == pytest.approx(np.median(values[levels == level]), rel=1e-6)
        assert 1 + sum(value >= edge for edge in info.motion_edges) == level
    same = dataclasses.replace(info.protocol, motion_values=PAPER.motion_values)
    assert same == PAPER


def test_quantiles_of_equal_values(tmp_path):
    films = make_shots(tmp_path / "shots", [[Take(scene=n, start=9.0 * n) for n in range(6)]])
    annotate(films, 0, [label(n) for n in range(6)])
    with pytest.raises(
        UserError, match="motion of 6 clips: expected enough different values for 5 levels, found 1"
    ):
        write_film_games(tmp_path / "games", films, GamesSettings(edges="quantiles"))


# The card


def test_the_card_counts_what_is_there(shots, made):
    path, info = made
    card, turns = json.loads((path / "card.json").read_text()), turns_of(path)
    every = [turn for split in turns.values() for turn in split]
    total = card["totals"]
    assert (total["films"], total["turns"]) == (2, len(every))
    assert card["splits"] == {
        split: {"games": len({turn["game"] for turn in turns[split]}), "turns": count}
        for split, count in info.splits.items()
    }
    rows = [row for film in shots.films() for row in shots.rows(film)]
    assert total["clips_kept"] == sum(row.dropped is None for row in rows)
    assert total["clips_dropped"] == {"still": sum(row.dropped is not None for row in rows)}
    unused = total["clips_unused"]
    assert total["clips_kept"] == len(every) + sum(unused.values())
    assert unused.keys() == {"without a valid annotation", "about none of the characters"}
    lengths = [turn["num_turns"] for turn in every if turn["turn"] == 0]
    assert card["turns_of_a_game"] == {str(n): lengths.count(n) for n in sorted(set(lengths))}
    for name in ("character", "motion_level", "social", "motion"):
        found = card["values"][name]["counts"]
        values = [turn[name] for turn in every]
        assert found == {str(value): values.count(value) for value in set(values)}
    assert card["made"]["films"]["height"] == SETTINGS.height
    assert card["made"]["games"]["test_share"] == 0.3
    text = (path / "card.md").read_text()
    assert f"{total['games']} games of {len(every)} turns" in text
    assert "Credits: name here" in text
    assert "| Mika |" in text


def test_the_card_compares_the_models_levels_with_the_flows(shots, made):
    found = json.loads((made[0] / "card.json").read_text())["level_agreement"]
    pairs = []
    for film in shots.films():
        rows = shots.rows(film)
        for said in annotations_of(shots, film):
            if said["subject"] == "Mika":
                value = rows[said["clip"]].motion_value
                pairs.append((said["motion_level"], 1 + sum(value >= e for e in PAPER_EDGES)))
    gaps = np.abs(np.diff(pairs, axis=1))
    assert found["turns"] == len(pairs) == np.sum(found["by_model_then_flow"])
    assert found["equal"] == pytest.approx(np.mean(gaps == 0), abs=1e-4)
    assert found["within_one"] == pytest.approx(np.mean(gaps <= 1), abs=1e-4)
    assert found["mean_difference"] == pytest.approx(np.mean(gaps), abs=1e-4)
    for said, measured in set(pairs):
        count = found["by_model_then_flow"][said - 1][measured - 1]
        assert count == pairs.count((said, measured))


def test_names_that_would_break_the_card(tmp_path):
    films = annotated(tmp_path / "shots", 12)
    file = films.folder(FILM) / "film.json"
    name = "a|b\n# <script>\u2028é.mp4"
    file.write_text(file.read_text().replace('"Film 0.mp4"', json.dumps(name)))
    write_film_games(tmp_path / "games", films, GamesSettings())
    text = (tmp_path / "games" / "card.md").read_text()
    assert r"| a\|b \# \<script\>" in text
    card = json.loads((tmp_path / "games" / "card.json").read_text())
    assert card["films"][0]["name"] == name.replace("\udcff", "?")


def test_people_are_not_compared_with_the_flow(tmp_path):
    films = make_shots(tmp_path / "shots", [[Take(scene=n, start=9.0 * n) for n in range(4)]])
    annotate(films, 0, [label(n, source="manual") for n in range(3)])
    write_film_games(tmp_path / "games", films, GamesSettings())
    card = json.loads((tmp_path / "games" / "card.json").read_text())
    assert card["level_agreement"] is None
    assert card["totals"]["clips_unused"] == {"not annotated": 1}
    assert "No model was asked" in (tmp_path / "games" / "card.md").read_text()


def test_the_card_names_skipped_films(tmp_path):
    shots = annotated(tmp_path / "shots", 12, 8)
    shots.skip(SkippedFilm(film="song-0000000a", name="song.mp3", reason="no video"))
    note_failure(shots, film_name(1), "clips.zip: 00000.mp4 is damaged")
    write_film_games(tmp_path / "games", shots, GamesSettings())
    card = json.loads((tmp_path / "games" / "card.json").read_text())
    assert card["totals"]["films_skipped"] == 2
    assert card["films_skipped"] == [
        {"film": "song-0000000a", "name": "song.mp3", "reason": "no video"},
        {
            "film": film_name(1),
            "name": "Film 1.mp4",
            "reason": "clips.zip: 00000.mp4 is damaged",
        },
    ]
    assert "| song.mp3 | no video |" in (tmp_path / "games" / "card.md").read_text()


def test_a_taken_place(shots, made):
    before = (made[0] / "set.json").read_bytes()
    with pytest.raises(UserError, match="already there: a complete dataset: use it"):
        write_film_games(made[0], shots, GamesSettings())
    assert (made[0] / "set.json").read_bytes() == before
