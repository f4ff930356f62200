"""The whole way: films to clips, annotated by a server, to games, features, and a step of a stage.

Small films of the toy world and two real ones; every step is the command that people give.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from annotated_shots import annotations_of, says_of
from PIL import Image
from real_films import big_buck_bunny as big_buck_bunny
from real_films import bikes as bikes
from stand_in_server import Question, Reply, says, serving
from tiny_games import write_model

from animegamer_jax.cli import main
from animegamer_jax.data.datasets import open_features, open_games
from animegamer_jax.data.films.clips.store import open_shots
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.drawing.style import FilmStyle
from animegamer_jax.toy.films import Film, make_film, write_film

SIZE = ("--height", 16, "--width", 24, "--num-frames", 9)  # that of the tiny model
NETWORKS = ("mllm", "encoder", "dit", "vae", "clip", "t5")


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> dict[str, Film]:
    folder = tmp_path_factory.mktemp("way") / "films"
    folder.mkdir()
    found = {}
    for seed in range(2):
        style = FilmStyle(fps=24, hold=3)
        film = make_film(seed, num_shots=6, height=96, width=144, style=style)
        path = folder / f"film {seed}.mp4"
        write_film(path, film)
        found[str(path)] = film
    return found


@pytest.fixture(scope="module")
def shots(films):
    path = Path(next(iter(films))).parent.parent / "shots"
    run("data", "films", *films, "--out", path, *SIZE)
    return open_shots(path)


def truths_of(shots, films) -> list[tuple[np.ndarray, dict[str, object]]]:
    """For each kept clip its second frame, small, and what is to be said of it."""
    names = {Path(path).name: film for path, film in films.items()}
    found = []
    for film in shots.films():
        truth = names.get(shots.report(film).name)
        for row in shots.rows(film):
            if row.dropped is not None:
                continue
            said = says_of(subject="other")
            if truth is not None:
                middle = (row.start + row.end) / 2 * truth.style.fps
                scene = next(s.scene for s in truth.shots if s.start <= middle < s.end)
                said = says_of(
                    subject=scene.character,
                    motion=f"{scene.motion}ing",
                    motion_level=scene.level,
                    environment=scene.place,
                    time=scene.time,
                )
            found.append((decode_mp4(shots.read_clip(film, row.clip))[-1], said))
    return found


def a_server_that_knows(truths):
    def answer(question: Question) -> Reply:
        shown = question.pictures[-1]
        small = np.asarray(Image.fromarray(shown).resize((24, 16)), np.float32)
        gaps = [np.abs(small - frame).mean() for frame, _ in truths]
        return says(json.dumps(truths[int(np.argmin(gaps))][1]))

    return answer


@pytest.fixture(scope="module")
def games(shots, films):
    place = shots.path.parent
    characters = {scene.scene.character for film in films.values() for scene in film.shots}
    Image.new("RGB", (40, 60), (200, 30, 30)).save(place / "anybody.png")
    form = '[[character]]\nname = "{}"\nimages = ["anybody.png"]\n'
    (place / "characters.toml").write_text("".join(map(form.format, sorted(characters))))
    with serving(a_server_that_knows(truths_of(shots, films))) as server:
        reported = ("--endpoint", server.endpoint, "--model", "stand-in", "--parallel", 2)
        for _ in range(2):  # the second time nothing is asked
            run(
                "data", "annotate", shots.path, "--characters", place / "characters.toml", *reported
            )
        asked = len(server.questions)
    kept = sum(shots.report(film).kept for film in shots.films())
    assert asked == kept
    options = ("--test-share", 0.3, "--min-turns", 1)
    run("data", "games", shots.path, "--out", place / "games", *options)
    return open_games(place / "games")


def test_the_turns_are_the_films_scenes(games, films):
    known = {
        (s.scene.character, s.scene.place, s.scene.time) for f in films.values() for s in f.shots
    }
    turns = [games.turns(s)[k] for s, n in games.info.splits.items() for k in range(n)]
    found = {(turn["character"], turn["place"], turn["time"]) for turn in turns}
    assert found <= known
    assert len(found) >= len(known) / 2
    for turn in turns:
        assert turn["instruction"].startswith(f"Character: {turn['character']}; Motion: slowly ")
    assert set(games.info.splits) == {"train", "test"}
    run("data", "show", games.path, "--clips", 2)
    assert ".mp4" in (games.path.parent / "games.html").read_text()


def test_a_real_film_goes_through(big_buck_bunny, shots, games, films):
    before = len(shots.films())
    run("data", "films", big_buck_bunny, "--out", shots.path, *SIZE)
    assert len(shots.films()) == before + 1
    bunny = next(f for f in shots.films() if "bunny" in f)
    assert shots.report(bunny).kept >= 2  # five seconds, one shot
    characters = shots.path.parent / "characters.toml"
    with serving(a_server_that_knows(truths_of(shots, films))) as server:
        reported = ("--endpoint", server.endpoint, "--model", "stand-in")
        run("data", "annotate", shots.path, "--characters", characters, *reported)
        assert len(server.questions) == shots.report(bunny).kept  # of the others nothing
    assert {row["subject"] for row in annotations_of(shots, bunny)} == {"other"}
    run("data", "games", shots.path, "--out", shots.path.parent / "with", "--test-share", 0.3)
    card = json.loads((shots.path.parent / "with" / "card.json").read_text())
    assert card["totals"]["films"] == 3
    unused = card["totals"]["clips_unused"]
    assert unused["about none of the characters"] == shots.report(bunny).kept


@pytest.mark.slow
def test_every_stage_trains_on_it(games):
    place = games.path.parent
    model = write_model(Path(place) / "tiny", networks=NETWORKS, protocol=PAPER).path
    data = ("--data", games.path, "--out", place / "features", "--batch", 8)
    run("data", "features", "--model", model, *data)
    assert open_features(place / "features").info.splits == games.info.splits
    few = ("--steps", 1, "--batch-size", 8, "--eval-every", 1, "--eval-batches", 1)
    for part, source in (("clip", games.path), ("t5", games.path), ("dit", place / "features")):
        reported = ("--part", part, "--data", source, "--model", model, "--out", place / part)
        run("train", "foundations", *reported, *few)
        assert first_loss(place / part) > 0
    for stage in ("warmup", "decoder", "mllm", "adapt"):
        out = place / stage
        reported = ["--data", place / "features", "--model", model, "--out", out]
        if stage in ("decoder", "adapt"):  # they draw clips as the part "dit" does
            reported += ["--eval-clips", 0]
        run("train", stage, *reported, *few)
        assert first_loss(out) > 0
        model = out / "model"


def first_loss(out) -> float:
    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert record["step"] == 1
    assert np.isfinite(record["loss"])
    return record["loss"]


@pytest.mark.slow
def test_a_real_film_of_a_player_s_own_character(bikes, tmp_path):
    shots = tmp_path / "shots"
    run("data", "films", bikes, "--out", shots, *SIZE)
    folder = open_shots(shots)
    (film,) = folder.films()
    kept = [row for row in folder.rows(film) if row.dropped is None]
    assert len(kept) >= 4
    assert len({row.scene for row in kept}) >= 4
    Image.new("RGB", (40, 60), (200, 30, 30)).save(tmp_path / "rider.png")
    (tmp_path / "characters.toml").write_text(
        '[[character]]\nname = "Rider"\nimages = ["rider.png"]\n'
    )
    said = says_of(subject="Rider", motion="cycling", environment="street")
    with serving(lambda question: says(json.dumps(said))) as server:
        reported = ("--endpoint", server.endpoint, "--model", "stand-in")
        run("data", "annotate", shots, "--characters", tmp_path / "characters.toml", *reported)
        assert len(server.questions) == len(kept)
    games = tmp_path / "games"
    options = ("--test-share", 0.3, "--min-turns", 1, "--max-turns", 2)
    run("data", "games", shots, "--out", games, *options)
    info = open_games(games).info
    assert info.splits["test"]
    turns = [open_games(games).turns(s)[k] for s, n in info.splits.items() for k in range(n)]
    assert len(turns) == len(kept)
    assert {turn["character"] for turn in turns} == {"Rider"}
    model = write_model(tmp_path / "tiny", networks=NETWORKS, protocol=PAPER).path
    features = tmp_path / "features"
    run("data", "features", "--model", model, "--data", games, "--out", features, "--batch", 8)
    few = ("--steps", 1, "--batch-size", 8, "--eval-every", 1, "--eval-batches", 1)
    run("train", "decoder", "--data", features, "--model", model, "--out", tmp_path / "run", *few)
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert np.isfinite(json.loads(first)["loss"])
