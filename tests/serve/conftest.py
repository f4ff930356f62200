"""A player without networks, and the games and the engine that it plays in.

Imported here, the package would not be checked for shapes, so each fixture imports what it needs.
"""

from typing import Any

import pytest


@pytest.fixture
def store(tmp_path) -> Any:
    from fake_player import MODEL

    from animegamer_jax.serve.games.game_store import GameStore

    return GameStore(tmp_path / "games", model=MODEL, max_games=64)


@pytest.fixture
def player() -> Any:
    from fake_player import FakePlayer

    return FakePlayer()


@pytest.fixture
def engine(player, store):
    from engine_games import engine_of

    with engine_of(player, store) as found:
        yield found
