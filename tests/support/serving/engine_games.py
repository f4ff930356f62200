"""Games that an engine plays, and turns that have ended."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from fake_player import FakePlayer

from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.games.game_store import GameStore


def new_game(store: GameStore, seed: int = 0, *, steps: int = 2, client: str = "") -> str:
    return store.new(seed=seed, window=3, steps=steps, client=client)


def play(engine: Engine, game: str, text: str = "wave", **asked: Any) -> Any:
    request = engine.submit(game, text, **asked)
    assert request.wait(20.0)
    assert request.status == "done", request.error
    return request.turn


@contextlib.contextmanager
def engine_of(player: FakePlayer, store: GameStore, **options: Any) -> Iterator[Engine]:
    engine = Engine(player, store, **options)
    try:
        yield engine
    finally:
        player.hold.set()
        engine.close()


def seconds_of_a_turn(engine: Engine, game: str, client: str) -> float:
    start = time.monotonic()
    request = engine.submit(game, "wave", client=client)
    assert request.wait(60.0)
    assert request.status == "done", request.error
    return time.monotonic() - start
