"""A saved game of three turns, of which a film and a card are made."""

from pathlib import Path

import pytest
from saved_games import add_turn, make_game

from animegamer_jax.game.saved_game import Game


@pytest.fixture
def game(tmp_path: Path) -> Game:
    found = make_game(tmp_path / "game")
    for name in ("Mika", "Ren", "Mika"):
        add_turn(found, instruction=f"Character: {name}; Motion: gently waving.")
    return found
