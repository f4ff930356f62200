"""Which turns make a game, its split and number, and what a turn says."""

import numpy as np
import pytest
from annotated_shots import SECONDS, film_name, label
from film_games import FILM

from animegamer_jax.data.films.clips.store import ClipRow
from animegamer_jax.data.films.games.grouping import (
    FilmGame,
    GamesSettings,
    Shot,
    captions,
    draw,
    film_games,
    instruction,
)
from animegamer_jax.errors import UserError


def shot(clip: int, *, scene: int = 0, start: float | None = None, who: str = "Mika") -> Shot:
    start = clip * SECONDS if start is None else start
    row = ClipRow(
        clip=clip,
        scene=scene,
        start=start,
        end=start + SECONDS,
        dropped=None,
        motion_value=2.0,
        flow=(),
        digest="",
    )
    return Shot(row, label(clip, subject=who))


def clips_of(games: list[FilmGame]) -> list[list[int]]:
    return [[shot.row.clip for shot in game.shots] for game in games]


# Which turns make a game


def test_a_run_of_one_character_is_a_game():
    shots = [shot(0), shot(1), shot(2, who="Ren"), shot(3, who="Ren"), shot(4)]
    settings = GamesSettings(max_gap=0.0)
    assert clips_of(film_games(FILM, shots, settings)) == [[0, 1], [2, 3], [4]]


def test_a_gap_ends_a_game_and_somebody_else_does_not():
    shots = [shot(0), shot(1, who="Ren"), shot(2), shot(3, start=9.0)]
    gap = 9.0 - 3 * SECONDS
    for max_gap, expected in (
        (0.9 * SECONDS, [[0], [1], [2], [3]]),
        (SECONDS, [[0, 2], [1], [3]]),
        (gap - 0.01, [[0, 2], [1], [3]]),
        (gap, [[0, 2, 3], [1]]),
    ):
        assert clips_of(film_games(FILM, shots, GamesSettings(max_gap=max_gap))) == expected


@pytest.mark.parametrize(
    ("turns", "lengths"), [(1, [1]), (5, [5]), (6, [3, 3]), (11, [3, 4, 4]), (0, [])]
)
def test_long_runs_are_divided_evenly(turns, lengths):
    games = film_games(FILM, [shot(n) for n in range(turns)], GamesSettings(max_turns=5))
    assert [len(game.shots) for game in games] == lengths
    assert [clip for clips in clips_of(games) for clip in clips] == list(range(turns))


def test_short_games_are_dropped():
    shots = [shot(0), shot(1), shot(2, who="Ren")]
    games = film_games(FILM, shots, GamesSettings(min_turns=2))
    assert clips_of(games) == [[0, 1]]


def test_scenes_that_share_a_game_are_one_group():
    shots = [
        shot(0, scene=0),
        shot(1, scene=1),  # with 0
        shot(2, scene=2, start=50.0),
        shot(3, scene=3, start=100.0),
        shot(4, scene=4, start=100.0 + SECONDS),  # with 3
        shot(5, scene=4, start=150.0),  # and so this
        shot(6, scene=5, start=150.0 + SECONDS),
    ]
    games = film_games(FILM, shots, GamesSettings())
    assert clips_of(games) == [[0, 1], [2], [3, 4], [5, 6]]
    assert [game.group for game in games] == [(FILM, 0), (FILM, 2), (FILM, 3), (FILM, 3)]
    assert len({draw(game.group) for game in games}) == 3


def test_a_games_number_is_of_its_film_and_first_clip():
    games = [FilmGame(FILM, 0, (shot(n),)) for n in range(500)]
    games += [FilmGame(film_name(1), 0, (shot(n),)) for n in range(500)]
    assert len({game.number for game in games}) == 1000
    assert all(0 <= game.number < 2**63 for game in games)
    assert FilmGame(FILM, 9, (shot(3), shot(4))).number == games[3].number
    draws = [draw((FILM, n)) for n in range(2000)]
    assert np.mean(np.array(draws) < 0.1) == pytest.approx(0.1, abs=0.02)


# What a turn says


def test_the_words_of_a_turn():
    said = label(
        0, subject="Qiqi", motion="flying on broomstick", adverb="quickly", environment="sky"
    ).annotation
    reported = "Character: Qiqi; Motion: quickly flying on broomstick; Background: day sky."
    assert instruction(said) == reported
    complete, *partial = captions(said)
    for word in ("Qiqi", "quickly", "flying on broomstick", "day", "sky"):
        assert word in complete
    assert {"Qiqi", "sky", "day"} <= set(partial)
    assert len(set(partial)) == len(partial) >= 5


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_gap": -1.0}, r"max_gap -1\.0: expected seconds, 0 or more"),
        ({"max_gap": float("nan")}, "max_gap nan: expected seconds"),
        ({"min_turns": 0}, "min_turns 0, max_turns 5: expected 1 or more"),
        ({"min_turns": 6}, "min_turns 6, max_turns 5: expected 1 or more, and the first not above"),
        ({"test_share": 0.0}, r"test_share 0\.0: expected more than 0 and less"),
        ({"test_share": 1.0}, r"test_share 1\.0: expected more than 0 and less"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        GamesSettings(**changes)
