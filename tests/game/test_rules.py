"""Days, goals and suggestions: from the finished turns alone."""

import itertools
from pathlib import Path

import pytest
from saved_games import add_turn, make_game

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.game.rules import DAY_TURNS, Day, day_of, scenes_of
from animegamer_jax.game.saved.turns import Meters
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.suggestions import COUNT, suggest

ALLOWED = {"stamina": (-2, -1, 1), "social": (0, 1), "entertainment": (0, 1)}
WORDS = Vocabulary(
    characters=("Mika", "Ren", "Hana"),
    motions=("waving", "running", "jumping", "sleeping", "talking to Ren", "talking to Mika"),
    times=("day", "night"),
    places=("town", "beach", "forest"),
    examples=("Mika is waving.",),
    effects={"sleeping": {"stamina": 1}, "running": {"stamina": -1, "entertainment": 1}},
)


@pytest.fixture
def game(tmp_path: Path) -> Game:
    return make_game(tmp_path / "game", rules="day")


def say(game: Game, *texts: str, changes: tuple[int, int, int] = (0, 0, 1)) -> None:
    for text in texts:
        add_turn(game, changes=changes, instruction=text)


def day(game: Game, *, seed: int = 0) -> Day:
    return day_of(game.turns, WORDS, seed=seed, meters=game.meters)


def test_what_a_turn_does_not_say_stays(game):
    say(game, "Mika is waving in the town by day.", "Motion: running.", "Ren at the beach")
    assert [(s.character, s.motion, s.time, s.place) for s in scenes_of(game.turns, WORDS)] == [
        ("Mika", "waving", "day", "town"),
        ("Mika", "running", "day", "town"),
        ("Ren", "running", "day", "beach"),
    ]
    start = scenes_of(game.turns[1:2], WORDS, start="Hana in the forest")
    assert (start[0].character, start[0].place) == ("Hana", "forest")


def test_a_day_has_a_number_of_turns(game):
    assert (day(game).ending, day(game).played) == (None, 0)
    say(game, *["Mika is waving."] * (DAY_TURNS - 1))
    assert day(game).ending is None
    say(game, "Mika is waving.")
    assert (day(game).ending, day(game).stars) == ("evening", 2)
    game.edit(game.meters, allowed=ALLOWED, new_day=True)
    assert (day(game).number, day(game).first, day(game).played) == (2, DAY_TURNS + 1, 0)
    say(game, "Mika is running.")
    assert (day(game).played, day(game).ending) == (1, None)


def test_without_stamina_a_day_is_over(game):
    say(game, "Mika is waving.")
    game.edit(Meters(stamina=0, social=90, entertainment=90), allowed=ALLOWED, new_day=False)
    found = day(game)
    assert (found.ending, found.stars) == ("exhausted", int(found.goal.met))
    game.edit(Meters(stamina=50), allowed=ALLOWED, new_day=True)
    assert day(game).ending is None


def test_every_goal_can_be_reached(game):
    kinds = {}
    texts = ("Mika running in the town", "Hana jumping in the forest", "Ren waving at the beach")
    say(game, *texts, "Mika talking to Ren", "Mika sleeping", changes=(1, 1, 1))
    say(game, "Mika is waving.", changes=(1, 1, 1))
    for seed in range(6):
        goal = day(game, seed=seed).goal
        kinds[goal.kind] = goal.met
    assert kinds == dict.fromkeys(
        ("social", "entertainment", "balance", "places", "people", "motions"), True
    )
    blank = day_of((), Vocabulary(), seed=5, meters=Meters())
    assert (blank.goal.kind, blank.goal.met, blank.ending) == ("balance", False, None)


def test_days_have_different_goals(game):
    seen = []
    for _ in range(3):
        seen.append(day(game).goal.kind)
        say(game, "Mika is waving.")
        game.edit(game.meters, allowed=ALLOWED, new_day=True)
    assert len(set(seen)) == 3


def test_suggestions(game):
    found = suggest(game.turns, WORDS, meters=game.meters)
    assert len(found) == COUNT
    say(game, "Mika is running in the town by day.")
    found = suggest(game.turns, WORDS, meters=Meters(stamina=10))
    assert found[0].kind == "rest"
    assert found[0].instruction == "Motion: sleeping."
    places = [one.words for one in found if one.kind == "place"]
    assert places
    assert "town" not in places
    assert not any("Mika" in one.instruction for one in found)
    assert len({one.instruction for one in found}) == len(found) == COUNT
    kinds = [one.kind for one in found]
    assert len(set(kinds)) == COUNT, kinds


def test_suggestions_change_with_the_game(game):
    seen = set()
    for number in range(6):
        found = suggest(game.turns, WORDS, meters=game.meters)
        assert len(found) >= 3
        say(game, found[number % len(found)].instruction)
        seen |= {one.instruction for one in found}
    assert len(seen) > 8


def test_suggestions_without_a_vocabulary():
    assert suggest((), Vocabulary(), meters=Meters()) == ()
    words = Vocabulary(examples=("Qiqi flies.",))
    (found,) = suggest((), words, meters=Meters())
    assert (found.kind, found.instruction) == ("example", "Qiqi flies.")


def test_the_embedded_world_says_what_motions_do():
    from animegamer_jax.toy.scene import MOTIONS, Scene
    from animegamer_jax.toy.vocabulary import VERBS, vocabulary
    from animegamer_jax.toy.world import next_states

    words = vocabulary()
    for motion, level in itertools.product(MOTIONS, range(1, 6)):
        partner = "Ren" if motion == "talk" else ""
        name = VERBS[motion].gerund.format(partner=partner)
        changes = words.effects.get(name, {})
        scene = Scene("Mika", motion, "town", "day", level, partner or None)
        social, entertainment, stamina = next_states((), scene)
        found = {"social": social, "entertainment": entertainment, "stamina": stamina}
        if level >= 3:
            assert {meter: found[meter] for meter in changes} == changes, (motion, level)
