"""The API in this process, with a player without networks.

Imported here, the package would not be checked for shapes, so each fixture imports what it needs.
"""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def openings(tmp_path_factory) -> Any:
    """A first shot of each character in each place; games branch from them and leave them alone."""
    from fake_player import make_openings

    return make_openings(tmp_path_factory.mktemp("openings"))


@pytest.fixture
def actions(player, openings, tmp_path) -> Iterator[Any]:
    """What a player can do; `player.hold` is set at the end, so that no turn is left waiting."""
    from fake_player import MODEL, WORDS

    from animegamer_jax.serve.api.actions import Actions
    from animegamer_jax.serve.engine.engine import Engine
    from animegamer_jax.serve.games.game_store import GameStore

    engine = Engine(player, GameStore(tmp_path / "games", model=MODEL))
    sent = tmp_path / "sent"
    sent.mkdir()
    yield Actions(engine, vocabulary=WORDS, steps=4, folder=sent, openings=openings)
    player.hold.set()
    engine.close()


@pytest.fixture
def client(actions) -> Iterator[Any]:
    """A client of the API and the page; the header x-client says whose."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from animegamer_jax.serve.api.info import Info
    from animegamer_jax.serve.api.routes import add_api
    from animegamer_jax.serve.page.page import add_page

    app = FastAPI(openapi_url="/api/v1/openapi.json")
    app.state.client_of = lambda request: request.headers.get("x-client", "me")
    add_page(app)
    add_api(app, actions, Info(actions, model="tiny", accounts=False))
    with TestClient(app, base_url="http://test/api/v1", raise_server_exceptions=False) as found:
        yield found
