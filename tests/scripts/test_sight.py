"""The script that exchanges the past shots of two games."""

import jax.numpy as jnp
import numpy as np
import pytest
import sight

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import UserError
from animegamer_jax.game.player import Player
from animegamer_jax.toy.evaluation import WORLD
from animegamer_jax.toy.scoring.attributes import DETAILS, VALUES, labels
from animegamer_jax.toy.scoring.benchmark import toy_games

GAMES, TURNS, BATCH = 8, 5, 4


@pytest.fixture(scope="module")
def benchmark():
    return WORLD.make_benchmark("test", num_games=GAMES, num_turns=TURNS, seed=0)


def table(readings: sight.Readings, benchmark) -> dict[str, list[str]]:
    rows = list(sight.lines(readings, benchmark, batch_size=BATCH))[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: rest for name, *rest in cells}


def test_details_go_with_the_pictures_or_with_the_words(benchmark):
    scenes = [[turn.scene for turn in game] for game in toy_games(benchmark)]
    own = {name: np.stack([labels(game, name) for game in scenes]) for name in DETAILS}
    other = [start + (row - 1) % BATCH for start in range(0, GAMES, BATCH) for row in range(BATCH)]
    first = {name: np.maximum(one.first, 0) for name, one in WORLD.details(benchmark).items()}
    pictures = {name: np.take_along_axis(own[name][other], first[name], axis=1) for name in DETAILS}
    blind = {name: (own[name] + 1) % len(VALUES[name]) for name in DETAILS}
    looking = table(sight.Readings(own, pictures, blind), benchmark)
    reading = table(sight.Readings(own, own, own), benchmark)
    neither = {name: np.full_like(own[name], -1) for name in DETAILS}
    lost = table(sight.Readings(own, neither, own), benchmark)
    for name in DETAILS:
        kept, without, chance, exchanged = looking[name]
        assert (kept[:5], without[:5], exchanged[:5]) == ("1.000", "0.000", "1.000")
        assert float(chance[:5]) < 0.9
        decided, differ = exchanged.rpartition(", ")[2].split(" of ")
        assert 0 < int(decided) == int(differ)
        assert reading[name][1][:5] == "1.000"
        assert reading[name][3][:5] == "0.000"
        assert lost[name][3] == f"none, 0 of {differ}"


def test_a_turn_is_played_with_each_past(tiny_bundle, benchmark, monkeypatch):
    """Without a past turn all three are the same; later each is another clip."""
    shown = []

    def read(reader, clips):
        shown.append(clips)
        return {name: np.zeros(len(clips), int) for name in DETAILS}

    monkeypatch.setattr(sight, "read_clips", read)
    monkeypatch.setattr(sight, "load_reader", lambda: None)
    player = Player.from_bundle(Bundle.open(tiny_bundle), steps=2)
    few = WORLD.make_benchmark("test", num_games=2, num_turns=2, seed=0)
    found = sight.play(player, few, batch_size=2)
    assert {values.shape for part in found for values in part.values()} == {(2, 2)}
    own, exchanged, absent = shown[:3]
    np.testing.assert_array_equal(own, exchanged)
    np.testing.assert_array_equal(own, absent)
    own, exchanged, absent = shown[3:]
    assert (own != exchanged).any()
    assert (own != absent).any()
    window = player.start(2)
    window = window._replace(representations=window.representations.at[0].set(1))
    assert (sight.with_other_shots(window).representations[1] == 1).all()
    assert not jnp.any(sight.without_shots(window).representations)


def test_no_batch_may_have_one_game():
    with pytest.raises(UserError, match=r"--games 5, .*: expected at least 2 games"):
        sight.main(games=5, batch_size=4)
