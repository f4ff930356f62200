"""`animegamer evaluate`: games are played, scored and kept; what cannot be computed is skipped."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from helpers import NUM_TEXT
from PIL import Image
from stand_in_server import Question, Reply, refuses, says, serving

from animegamer_jax.cli import main
from animegamer_jax.evaluate.benchmarks.format import read_benchmark, write_benchmark
from animegamer_jax.evaluate.metrics.registry import GROUPS, METRICS
from animegamer_jax.evaluate.metrics.scorers import (
    Answers,
    MotionScorer,
    StateScorer,
)
from animegamer_jax.evaluate.results import read_results
from animegamer_jax.game.saved_game import Game

GAMES, TURNS = 3, 2


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """A benchmark of three short games about film characters."""
    path = tmp_path_factory.mktemp("benchmark") / "films.json"
    options = ("--games", str(GAMES), "--turns", str(TURNS), "--out", str(path))
    assert main(["evaluate", "--make", "paper", *options]) == 0
    return path


def play(out, model, benchmark, *options, judge=()):
    words = ("--model", str(model), "--benchmark", str(benchmark), "--out", str(out))
    return main(["evaluate", *words, "--steps", "2", "--batch-size", "2", *options, *judge])


@pytest.fixture(scope="module")
def played(tmp_path_factory, tiny_bundle, films):
    out = tmp_path_factory.mktemp("evaluated") / "films"
    assert play(out, f"tiny={tiny_bundle}", films) == 0
    return out


def test_a_benchmark_is_played_scored_and_reported(played, films):
    found = read_results(played)
    (system,) = found.systems
    assert system.name == "tiny"
    assert found.games == tuple(game.id for game in read_benchmark(films).games)
    assert {"ACC-S", "MAE-S", "ACC-F", "MAE-F", "ACC-L", "seconds"} <= system.values.keys()
    for name, values in system.values.items():
        assert values.shape == (GAMES, TURNS)
        assert np.isfinite(values).all() or name == "seconds"
    assert {"clip", "dreamsim", "lpips", "truth", "fvd", "jedi"} == system.skipped.keys()
    assert list(system.reference) == [
        "always the most frequent",
        "another game's answers",
        "without memory",
    ]
    assert system.estimate("ACC-S", reference="without memory").count == GAMES * TURNS
    assert found.motions == (("",) * TURNS,) * GAMES
    for name in ("report.html", "report.md"):
        assert "tiny" in (played / name).read_text()


def test_the_values_are_those_of_the_saved_games(played, films):
    benchmark, (system,) = read_benchmark(films), read_results(played).systems
    for row, (folder, game) in enumerate(zip(system.folders, benchmark.games, strict=True)):
        saved = Game.load(played / folder)
        for column, (turn, asked) in enumerate(zip(saved.turns, game.turns, strict=True)):
            right = [getattr(turn, s) == getattr(asked, s) for s in turn.changes]
            assert system.values["ACC-S"][row, column] == pytest.approx(np.mean(right))
            expected = float(turn.motion_level == asked.motion_level)
            assert system.values["ACC-L"][row, column] == expected
            assert turn.instruction == asked.instruction


def test_seconds_leave_out_the_turn_that_compiles(played):
    seconds = read_results(played).systems[0].values["seconds"]
    assert np.isnan(seconds[:2, 0]).all()  # the first batch of two
    assert np.isfinite(seconds[0, 1:]).all()
    assert np.isfinite(seconds[2]).all()


def test_games_that_are_there_are_not_played_again(played, tiny_bundle, films, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(played, out)
    folders = sorted((out / "games" / "tiny").glob("*/values.json"))
    assert len(folders) == GAMES
    folders[1].unlink()  # as if it had been stopped within this game
    kept = {f: f.stat().st_mtime_ns for f in folders if f.exists()}
    assert play(out, f"tiny={tiny_bundle}", films) == 0
    assert "2 games were already played" in capsys.readouterr().err
    assert {f: f.stat().st_mtime_ns for f in kept} == kept
    game = folders[1].parent.name
    for before, after in zip(
        representations(played, game), representations(out, game), strict=True
    ):
        np.testing.assert_allclose(after, before, atol=1e-4)  # alone as side by side
    for name, values in read_results(played).systems[0].values.items():
        if name != "seconds":
            np.testing.assert_allclose(
                read_results(out).systems[0].values[name], values, atol=1e-4, err_msg=name
            )
    for folder in folders:  # what was kept is damaged, or is no file
        folder.unlink()
    os.mkfifo(folders[0])
    folders[1].write_text("[" * 100_000)
    assert play(out, f"tiny={tiny_bundle}", films, "--window", "1") == 0
    assert "already played" not in capsys.readouterr().err, "played with another window"


def test_a_damaged_mark_of_the_folder_is_named(tiny_bundle, films, tmp_path, capsys):
    mark = tmp_path / "evaluation.json"

    def refusal():
        assert play(tmp_path, f"tiny={tiny_bundle}", films) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    mark.write_text("[" * 100_000)
    assert f"{mark}: not valid JSON: it is nested too deeply: choose another folder" in refusal()
    mark.write_text("[]")
    assert f"{mark}: " in refusal()
    mark.unlink()
    os.mkfifo(mark)
    assert f"{mark}: expected a file, found a pipe" in refusal()


def representations(out, game) -> list[np.ndarray]:
    files = sorted((out / "games" / "tiny" / game).glob("*.npz"))
    assert len(files) == TURNS
    return [np.load(file)["representation"] for file in files]


def test_several_windows_are_several_systems(tiny_bundle, films, tmp_path):
    out = tmp_path / "windows"
    options = ("--games", "1", "--window", "3", "1", "--metrics", "states")
    assert play(out, f"tiny={tiny_bundle}", films, *options) == 0
    systems = read_results(out).systems
    assert [(s.name, s.settings["window"]) for s in systems] == [
        ("tiny-window-3", 3),
        ("tiny-window-1", 1),
    ]
    assert systems[0].digest == systems[1].digest
    assert {Game.load(out / s.folders[0]).window for s in systems} == {3, 1}


def test_both_histories_of_one_model_are_two_systems(shown_bundle, tiny_bundle, films, tmp_path):
    out = tmp_path / "histories"
    options = ("--games", "1", "--history", "predicted", "shown", "--metrics", "states")
    assert play(out, f"tiny={shown_bundle}", films, *options) == 0
    systems = read_results(out).systems
    assert [(s.name, s.settings["history"]) for s in systems] == [
        ("tiny-predicted", "predicted"),
        ("tiny-shown", "shown"),
    ]
    games = [Game.load(out / s.folders[0]) for s in systems]
    assert [game.history_kind for game in games] == ["predicted", "shown"]
    first, second = (
        [np.load(game.folder / turn.representation_file)["representation"] for turn in game.turns]
        for game in games
    )
    np.testing.assert_array_equal(first[0][:NUM_TEXT], second[0][:NUM_TEXT])
    assert np.abs(first[0] - second[0]).max() > 1e-2
    assert np.abs(first[1][:NUM_TEXT] - second[1][:NUM_TEXT]).max() > 1e-4
    assert play(tmp_path / "none", tiny_bundle, films, "--history", "shown") == 2
    assert not (tmp_path / "none").exists()


def test_playing_does_not_look_at_what_is_expected(played, films, tiny_bundle, tmp_path):
    benchmark = read_benchmark(films)
    game = benchmark.games[0]
    turns = tuple(
        dataclasses.replace(turn, motion_level=1, social=0, caption="no", motion_text="no")
        for turn in game.turns
    )
    blind = dataclasses.replace(benchmark, games=(dataclasses.replace(game, turns=turns),))
    write_benchmark(tmp_path / "blind.json", blind)
    out = tmp_path / "blind"
    assert play(out, f"tiny={tiny_bundle}", tmp_path / "blind.json", "--metrics", "states") == 0
    for one, other in zip(
        representations(played, game.id), representations(out, game.id), strict=True
    ):
        np.testing.assert_allclose(other, one, atol=1e-4)


def test_games_played_elsewhere_are_scored_next_to_them(played, tiny_bundle, films, tmp_path):
    elsewhere = played / "games" / "tiny"
    out = tmp_path / "both"
    options = ("--played", f"other={elsewhere}")
    assert play(out, f"tiny={tiny_bundle}", films, *options) == 0
    found = read_results(out)
    assert [system.name for system in found.systems] == ["tiny", "other"]
    ours, theirs = found.systems
    np.testing.assert_array_equal(ours.values["ACC-S"], theirs.values["ACC-S"])
    assert theirs.digest is None
    assert theirs.notes
    for name in ("PSNR", "CLIP-I"):  # the clips were enlarged when they were saved
        if name in ours.values:
            np.testing.assert_allclose(theirs.values[name], ours.values[name], atol=0.3, rtol=0.02)
    assert Game.load(out / theirs.folders[0]).turns


def test_games_elsewhere_must_be_the_benchmarks(played, films, tmp_path, capsys):
    elsewhere = tmp_path / "games"
    shutil.copytree(played / "games" / "tiny", elsewhere)
    words = ["evaluate", "--played", str(elsewhere), "--benchmark", str(films)]
    first = read_benchmark(films).games[0].id
    content = json.loads((elsewhere / first / "game.json").read_text())
    content["turns"][1]["instruction"] = "Something else."
    (elsewhere / first / "game.json").write_text(json.dumps(content))
    assert main([*words, "--out", str(tmp_path / "a")]) == 2
    assert "turn 2: expected the benchmark's instruction" in capsys.readouterr().err
    shutil.rmtree(elsewhere / first)
    assert main([*words, "--out", str(tmp_path / "b")]) == 2
    assert first in capsys.readouterr().err


# A judge


def _scores(question: Question) -> Reply:
    names = [n for n in "ABCDEFGH" if f"System {n}:" in question.text]
    criteria = (
        "overall", "instruction_following", "contextual_consistency", "character_consistency",
        "style_consistency", "state_update",
    )  # fmt: skip
    return says(json.dumps({name: dict.fromkeys(criteria, 6) for name in names}))


def test_judges_are_asked_and_their_agreement_is_reported(played, tiny_bundle, films, tmp_path):
    out = tmp_path / "judged"
    shutil.copytree(played, out)
    with serving(_scores) as server:
        judge = ("--judge", "vlm", "--judge", "vlm", "--endpoint", server.endpoint)
        assert play(out, f"tiny={tiny_bundle}", films, judge=judge) == 0
    found = read_results(out)
    assert [(v.model, v.seed, v.num_judged) for v in found.judge_scores] == [
        ("vlm", 0, GAMES),
        ("vlm", 1, GAMES),
    ]
    assert found.judge_scores[0].estimate("tiny", "overall").mean == 6
    assert list(found.agreements) == ["vlm, seed 0 and vlm, seed 1"]
    assert "vlm" in (out / "report.md").read_text()


@pytest.mark.parametrize("answer", [lambda q: refuses(404), lambda q: says("I like B best.")])
def test_without_a_judge_the_rest_of_the_report_is_written(
    answer, played, tiny_bundle, films, tmp_path
):
    out = tmp_path / "judged"
    shutil.copytree(played, out)
    with serving(answer) as server:
        judge = ("--judge", "vlm", "--endpoint", server.endpoint)
        assert play(out, f"tiny={tiny_bundle}", films, judge=judge) == 0
    found = read_results(out)
    assert found.judge_note
    assert "vlm" in found.judge_note
    assert "ACC-S" in (out / "report.md").read_text()
    assert "vlm" in (out / "report.md").read_text()


# Wrong input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metrics", "SSIM"), "unknown metric"),
        (("--games", "400"), "--games 400: expected at most 3"),
        (("--window", "3", "0"), "--window: expected 1 or more, found 0"),
        (("--steps", "0"), "--steps: expected 1 or more, found 0"),
        (("--batch-size", "0"), "--batch-size: expected 1 or more"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    options, message, tiny_bundle, films, tmp_path, capsys
):
    words = ("--model", str(tiny_bundle), "--benchmark", str(films), "--out", str(tmp_path / "o"))
    assert main(["evaluate", *words, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_damaged_benchmark_is_refused_in_one_line(films, tiny_bundle, tmp_path, capsys):
    content = json.loads(films.read_text())
    for damage, message in (
        (content | {"format_version": 7}, "format_version: expected 1, found 7"),
        (
            content | {"games": [_without_a_turn(content["games"][0])]},
            "games[0].turns: expected num_turns, 2, found 1",
        ),
    ):
        path = tmp_path / "damaged.json"
        path.write_text(json.dumps(damage))
        assert play(tmp_path / "o", tiny_bundle, path) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def _without_a_turn(game):
    return game | {"turns": game["turns"][:1]}


def test_a_model_that_lacks_a_character_is_refused(films, tmp_path, capsys):
    assert play(tmp_path / "o", "toy", films) == 2
    error = capsys.readouterr().err
    assert "characters that model toy does not know" in error
    assert error.count("\n") == 1


def test_a_cast_that_lacks_a_character_is_refused(films, tiny_bundle, tmp_path, capsys):
    Image.new("RGB", (32, 32)).save(tmp_path / "nobody.png")
    characters = '[[character]]\nname = "Nobody"\nimages = ["nobody.png"]\n'
    (tmp_path / "characters.toml").write_text(characters)
    assert (
        play(tmp_path / "o", tiny_bundle, films, "--characters", str(tmp_path / "characters.toml"))
        == 2
    )
    assert "does not know" in capsys.readouterr().err


def test_a_long_instruction_is_refused_before_anything_is_played(
    films, tiny_bundle, tmp_path, capsys
):
    benchmark = read_benchmark(films)
    first = benchmark.games[0]
    turns = (first.turns[0], dataclasses.replace(first.turns[1], instruction="go on " * 60 + "."))
    games = (dataclasses.replace(first, turns=turns), *benchmark.games[1:])
    write_benchmark(tmp_path / "long.json", dataclasses.replace(benchmark, games=games))
    assert play(tmp_path / "o", tiny_bundle, tmp_path / "long.json") == 2
    assert f"game {first.id}: turn 2" in capsys.readouterr().err


def test_a_folder_of_other_things_is_refused(films, tiny_bundle, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert play(tmp_path, tiny_bundle, films) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_folder_of_another_benchmark_is_refused(played, films, tiny_bundle, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(played, out)
    assert play(out, tiny_bundle, films, "--games", "2") == 2
    assert "another number of games" in capsys.readouterr().err


def test_metrics_without_weights_are_skipped(played, films, tiny_bundle, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(played, out)
    options = ("--lpips", str(tmp_path / "a.pth"), str(tmp_path / "b.pth"))
    assert play(out, f"tiny={tiny_bundle}", films, *options, "--clip", str(tmp_path / "none")) == 0
    assert "no such file or folder" in read_results(out).systems[0].skipped["clip"]
    assert "skipped" in (out / "report.md").read_text().casefold()


# The scorers


def test_every_group_has_metrics_and_every_metric_a_formula():
    assert {metric.group for metric in METRICS.values()} == GROUPS.keys()
    for metric in METRICS.values():
        assert metric.formula
        assert metric.unit
        assert metric.source


def test_states_and_motion_of_true_answers_are_perfect(films):
    turns = read_benchmark(films).games[0].turns
    states = [[t.motion_level, t.social, t.entertainment, t.stamina] for t in turns]
    still = np.zeros((len(turns), 5, 48, 72, 3), np.uint8)
    answers = Answers(turns=turns, clips=still, predicted_states=np.array(states))
    values = StateScorer()(answers)
    assert (values["ACC-S"] == 1).all()
    assert (values["MAE-S"] == 0).all()
    assert (values["ACC-L"] == 1).all()
    assert (values["MAE-L"] == 0).all()
    levels = np.array([turn.motion_level for turn in turns])
    still_values = MotionScorer()(answers)
    np.testing.assert_array_equal(still_values["MAE-F"], levels - 1)  # nothing moves: level 1
    assert StateScorer()(dataclasses.replace(answers, predicted_states=None)) == {}


@pytest.mark.slow
def test_the_embedded_model_on_its_own_world(tmp_path, capsys):
    """With true clips and reference scores; classifiers have their own tests."""
    benchmark, out = tmp_path / "toy.json", tmp_path / "toy"
    # Two games that the embedded model plays well; its mean over all is in docs/toy-report.
    games = ("--games", "2", "--turns", "2", "--seed", "10")
    assert main(["evaluate", "--make", "toy", *games, "--out", str(benchmark)]) == 0
    assert play(out, "toy", benchmark, "--metrics", "states", "ACC-F", "CLIP-I", "fvd") == 0
    (system,) = read_results(out).systems
    assert system.skipped.keys() == {"fvd"}
    assert system.values.keys() == {
        *("ACC-S", "MAE-S", "ACC-L", "MAE-L", "ACC-F", "MAE-F", "CLIP-I", "CLIP-T")
    }
    assert system.estimate("ACC-S").mean > 0.5
    assert system.estimate("CLIP-I").mean > 0.8
    assert list(system.reference) == [
        "true clips",
        "true clips through its VAE",
        "true clips from another view",
        "another game's clips",
        "always the most frequent",
        "another game's answers",
        "without memory",
    ]
    others = system.estimate("CLIP-I", reference="another game's clips").mean
    assert others < system.estimate("CLIP-I").mean
    assert "paper" in capsys.readouterr().out
    assert "true clips through its VAE" in (out / "report.md").read_text()
