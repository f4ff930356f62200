"""Saved games of a few turns, without a model.

Imported here, the package would not be checked for shapes, so each fixture imports what it needs.
"""

from pathlib import Path

import pytest


@pytest.fixture
def saved(tmp_path) -> Path:
    """A game of four turns."""
    from saved_games import add_turn, make_game

    game = make_game(tmp_path / "saved")
    for _ in range(4):
        add_turn(game)
    return game.folder


@pytest.fixture
def pictured(tmp_path) -> Path:
    """A game of two turns that began with a picture."""
    from saved_games import add_turn, make_game, make_picture

    game = make_game(tmp_path / "pictured", picture=make_picture())
    for _ in range(2):
        add_turn(game)
    return game.folder
