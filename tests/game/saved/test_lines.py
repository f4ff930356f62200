"""A game as a tree: turns that are undone or replaced are kept, brought back and walked through."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from saved_games import add_turn, make_game

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved import tree
from animegamer_jax.game.saved.turns import Meters
from animegamer_jax.game.saved_game import Game

ALLOWED = {"stamina": (-2, -1, 1), "social": (0, 1), "entertainment": (0, 1)}


@pytest.fixture
def game(tmp_path) -> Game:
    found = make_game(tmp_path / "game")
    for _ in range(3):
        add_turn(found)
    return found


def line(game: Game) -> list[str]:
    return [turn.clip for turn in game.turns]


def files(game: Game) -> set[str]:
    return {path.name for path in game.folder.glob("*.mp4")}


def check(game: Game) -> Game:
    """The game as it is read from disk: equal to the one in memory."""
    read = Game.load(game.folder)
    assert (read.turns, read.others, read.start) == (game.turns, game.others, game.start)
    assert files(game) == {turn.clip for turn in game.all_turns}
    return read


def test_undo_and_redo(game):
    before = line(game)
    game.set_aside(2)
    assert line(game) == before[:1]
    assert len(files(game)) == 3
    read = check(game)
    assert read.next_turn().clip == before[1]
    for _ in range(2):
        read.redo()
    assert line(check(read)) == before
    assert read.others == []
    with pytest.raises(UserError, match="no turn to bring back"):
        read.redo()
    with pytest.raises(UserError, match="expected 1 to 3 turns, found 4"):
        read.set_aside(4)


def test_takes_and_branches_are_walked_through(game):
    first = line(game)
    add_turn(game, after=1)  # another second turn
    second = line(game)
    assert (second[0], len(second), len(files(game))) == (first[0], 2, 4)
    game.go_to(first[1])
    assert line(check(game)) == first[:2]
    assert game.redo().clip == first[2]
    game.go_to(second[1])
    assert line(check(game)) == second
    game.go_to("")
    assert line(check(game)) == []
    assert game.redo().clip == first[0]
    assert game.redo().clip == second[1]  # the line that was left last
    with pytest.raises(UserError, match="no turn with the clip 'nowhere'"):
        game.go_to("nowhere")


def test_no_more_than_a_number_is_set_aside(game, monkeypatch):
    monkeypatch.setattr(tree, "MAX_OTHERS", 2)
    first = line(game)
    for _ in range(4):
        add_turn(game, after=1)
    assert len(game.others) == 2
    assert first[1] not in {other.turn.clip for other in game.others}
    check(game)


def test_a_player_sets_the_meters(game):
    last = game.turns[-1]
    assert dataclasses.asdict(last.meters) == {"stamina": 35, "social": 65, "entertainment": 50}
    game.edit(Meters(stamina=90, social=60, entertainment=50), allowed=ALLOWED, new_day=False)
    assert game.meters == Meters(stamina=90, social=60, entertainment=50)
    assert game.turns[-1].changes == last.changes  # what the model said stays
    states = game.history()[-1].states
    np.testing.assert_array_equal(states, [3, 0, 0, 1])  # what the window holds
    add_turn(game)
    assert game.meters.stamina == 85
    read = check(game)
    assert read.turns[2].edit == game.turns[2].edit
    np.testing.assert_array_equal(read.history(before=4)[-1].states, [3, 0, 0, 1])
    read.set_aside()
    read.edit(last.meters, allowed=ALLOWED, new_day=False)
    assert check(read).turns[-1].edit is None


def test_meters_are_set_where_another_line_goes_on(game):
    before = line(game)
    game.set_aside()
    game.edit(Meters(stamina=100), allowed=ALLOWED, new_day=True)
    assert check(game).meters.stamina == 100
    assert game.turns[-1].edit.new_day
    game.go_to(before[-1])
    assert line(check(game)) == before
    assert all(turn.edit is None for turn in game.turns)


def test_meters_of_the_start(tmp_path):
    game = make_game(tmp_path / "new", rules="day")
    game.edit(Meters(stamina=20), allowed=ALLOWED, new_day=False)
    add_turn(game)
    assert (game.meters.stamina, check(game).rules) == (15, "day")
    game.set_rules("off")
    assert check(game).rules == "off"
    branch = game.branch(tmp_path / "branch", 1)
    assert check(branch).meters.stamina == 15
    game.set_aside()
    with pytest.raises(UserError, match="meters: expected a turn before them"):
        game.edit(Meters(), allowed=ALLOWED, new_day=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda other: other.update(after="no.mp4"), r"others\[0\]\.after: expected the clip of"),
        (lambda other: other["turn"].update(turn=1), r"others\[0\]\.turn\.turn: expected 2"),
        (lambda other: other["turn"].update(clip="../x.mp4"), "expected the bare name"),
        (lambda other: other["turn"].update(clip="turn_001.mp4"), "that no other turn has"),
        (lambda other: other["turn"].update(stamina=1), r"others\[0\]\.turn\.meters\.stamina"),
    ],
)
def test_a_wrong_turn_that_is_set_aside_is_named(game, change, message):
    add_turn(game, after=1)
    path: Path = game.folder / "game.json"
    document = json.loads(path.read_text())
    change(document["others"][0])
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=message):
        Game.load(game.folder)


def test_a_game_without_them_has_the_fields_of_before(tmp_path):
    game = make_game(tmp_path / "plain")
    add_turn(game)
    document = json.loads((game.folder / "game.json").read_text())
    assert not {"rules", "start", "others"} & document.keys()
    assert "edit" not in document["turns"][0]
