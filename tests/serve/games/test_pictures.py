"""Small pictures of turns."""

from engine_games import new_game, play

from animegamer_jax.game.saved import tree
from animegamer_jax.serve.games.pictures import thumbnail


def test_small_pictures(engine, store, monkeypatch):
    """A name that is taken again, because its turn was dropped, has another picture."""
    monkeypatch.setattr(tree, "MAX_OTHERS", 0)
    game = new_game(store, seed=150)
    turn = play(engine, game)
    path = thumbnail(store.get(game), turn)
    assert path.stat().st_size < 5000
    before = path.read_bytes()
    store.get(game).set_aside()
    again = play(engine, game, seed=20)
    assert again.clip == turn.clip
    assert thumbnail(store.get(game), again).read_bytes() != before
