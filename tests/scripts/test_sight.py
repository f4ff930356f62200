"""The exchange of past shots (`scripts/toy/sight.py`): whose shots a window has, what counts."""

import importlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import Window
from animegamer_jax.toy.evaluation import WORLD, other_details
from animegamer_jax.toy.scoring.attributes import DETAILS, labels
from animegamer_jax.toy.scoring.benchmark import toy_games

sight = importlib.import_module("sight")


@pytest.mark.parametrize(("turn", "kept"), [(0, 0), (2, 2), (3, 3), (5, 3)])
def test_the_newest_shots_are_replaced(turn, kept):
    window = Window(*(jnp.zeros(()),) * 2, jnp.full((2, 3, 1, 4), -1.0), *(jnp.zeros(()),) * 2)
    shots = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 1, 4)
    found = sight.with_past(window, sight.Past(shots, None), turn)
    assert found.first_latents is None
    representations = np.asarray(found.representations)
    np.testing.assert_array_equal(representations[:, 3 - kept :], shots[:, turn - kept : turn])
    assert (representations[:, : 3 - kept] == -1).all()
    # A decoder that remembers one first frame.
    window = window._replace(first_latents=jnp.full((2, 1, 2, 2, 3), -1.0))
    frames = np.arange(2 * 6 * 12, dtype=np.float32).reshape(2, 6, 2, 2, 3)
    found = np.asarray(sight.with_past(window, sight.Past(shots, frames), turn).first_latents)
    np.testing.assert_array_equal(found[:, 0], frames[:, turn - 1] if turn else -1)


def test_what_counts():
    """A model that sees keeps every detail, and follows the pictures when they are exchanged."""
    benchmark = WORLD.make_benchmark("test", num_games=6, num_turns=5, seed=0)
    scenes = [[turn.scene for turn in game] for game in toy_games(benchmark)]
    others = [[other_details(scene) for scene in game] for game in scenes]
    own, other = (
        {name: np.stack([labels(game, name) for game in games]) for name in DETAILS}
        for games in (scenes, others)
    )
    assert all((own[name] != other[name]).all() for name in DETAILS)
    blind = {name: np.full_like(values, -1) for name, values in own.items()}
    for exchanged, cells in ((other, (1, 0, 1, 0)), (own, (1, 0, 0, 1)), (blind, (1, 0, 0, 0))):
        table = sight.lines(sight.Readings(own, exchanged, blind), benchmark, own=own, other=other)
        head, _, *rows = table
        assert head.count("|") == 7
        assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in DETAILS]
        for row in rows:
            kept, absent, chance, *rest = (
                float(cell.split()[0]) for cell in row.strip("| ").split(" | ")[1:]
            )
            assert (kept, absent, *rest) == cells
            assert 0 <= chance < 0.8


def test_a_detail_counts_from_its_second_showing():
    """What a turn shows first may be anything, so reading it right is no memory."""
    benchmark = WORLD.make_benchmark("test", num_games=6, num_turns=5, seed=0)
    truth = WORLD.details(benchmark)
    own = {name: np.zeros((6, 5), int) for name in DETAILS}
    wrong_at_first = {}
    for name in DETAILS:
        first = (truth[name].first < 0) | (truth[name].first == np.arange(5))
        assert first[:, 0].all()
        wrong_at_first[name] = np.where(first, 1, 0)
    readings = sight.Readings(wrong_at_first, own, own)
    rows = list(sight.lines(readings, benchmark, own=own, other=own))[2:]
    assert all(row.split(" | ")[1].startswith("1.000") for row in rows)


def test_too_few():
    with pytest.raises(UserError, match="at least 2 games, 2 turns"):
        sight.main("toy", turns=1)


class Recorder:
    """A player whose clips show, in their first pixel, the first number of the newest past shot."""

    def __init__(self, past: int):
        self.past, self.asked = past, []

    def start(self, games: int) -> Window:
        shots = jnp.full((games, self.past, 1, 1), 100.0)
        return Window(*(jnp.zeros(()),) * 2, shots, jnp.zeros((games, 0, 4)), jnp.zeros(games))

    def play_turn(self, window, asked, *, seeds, turn):
        self.asked.append((tuple(asked), tuple(seeds), turn))
        newest = np.asarray(window.representations)[:, -1, 0, 0]
        frames = np.zeros((len(asked), 1, 1, 1, 3), np.uint8)
        frames[:, 0, 0, 0, 0] = newest
        return window._replace(num_turns=window.num_turns + 1), SimpleNamespace(frames=frames)


def test_every_turn_is_played_once_with_each_kind_of_past_shots(monkeypatch):
    benchmark = WORLD.make_benchmark("test", num_games=3, num_turns=3, seed=0)
    player = Recorder(past=2)
    shots = np.arange(9, dtype=np.float32).reshape(3, 3, 1, 1)
    kinds = [sight.Past(shots + more, None) for more in (0, 20, 40)]
    monkeypatch.setattr(sight, "load_classifier", lambda: None)
    monkeypatch.setattr(
        sight,
        "read_clips",
        lambda classifier, frames: dict.fromkeys(DETAILS, frames[:, 0, 0, 0, 0]),
    )
    readings = sight.play(player, benchmark, kinds, batch_size=2)
    for kind, found in zip(kinds, readings, strict=True):
        expected = np.concatenate([np.full((3, 1), 100), kind.shots[:, :-1, 0, 0]], axis=1)
        for name in DETAILS:
            np.testing.assert_array_equal(found[name], expected)
    games = [benchmark.games[:2], benchmark.games[2:]]
    expected = [
        (tuple(g.turns[turn].instruction for g in part), tuple(g.seed for g in part), turn + 1)
        for part in games
        for turn in range(3)
        for _ in kinds
    ]
    assert player.asked == expected
