"""A day of a game as a card to share."""

import json
import string

import numpy as np
import pytest
from PIL import Image
from saved_games import make_game

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import UserError
from animegamer_jax.game.rules import day_of
from animegamer_jax.game.saved.card import LANGUAGES, font_path, read_texts, save_card
from animegamer_jax.media import fonts

WORDS = Vocabulary(characters=("Mika", "Ren"), motions=("waving",), places=("town",))


def test_a_card_of_the_day(game, tmp_path):
    day = day_of(game.turns, WORDS, seed=0, meters=game.meters)
    cards = []
    for number, one in enumerate((day, None)):
        path = tmp_path / f"{number}.png"
        save_card(game, path, day=one, words=WORDS)
        with Image.open(path) as found:
            cards.append(np.asarray(found))
            assert cards[-1].std() > 10
    assert cards[0].shape == cards[1].shape
    assert cards[0].shape[1] > 900
    assert not np.array_equal(*cards)


def test_a_card_is_in_the_players_language(game, tmp_path):
    """Only what is written differs."""
    day = day_of(game.turns, WORDS, seed=0, meters=game.meters)
    cards = {}
    for language in LANGUAGES:
        save_card(game, tmp_path / f"{language}.png", day=day, words=WORDS, language=language)
        with Image.open(tmp_path / f"{language}.png") as found:
            cards[language] = np.asarray(found).astype(int)
    for one, other in (("en", "ja"), ("ja", "zh")):
        apart = np.abs(cards[one] - cards[other]).max(axis=2)
        assert apart[:140].max() > 200  # the title
        assert apart[150:-190].max() == 0  # the pictures


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_cards_fonts_have_every_character_of_its_texts(language):
    texts = read_texts()
    path = font_path(language)
    name = "" if path is None else str(path)
    written = json.dumps(texts[language], ensure_ascii=False)
    missing = {c for c in written + string.printable if not fonts._has_character(name, c)}
    assert not missing, "run scripts/card_fonts.py"


def test_the_cards_texts_are_the_same_in_all_languages():
    def fields(texts):
        return {
            key: fields(value) if isinstance(value, dict) else sorted(
                name for _, name, *_ in string.Formatter().parse(value) if name
            )
            for key, value in texts.items()
        }  # fmt: skip

    texts = read_texts()
    assert texts.keys() == set(LANGUAGES)
    assert fields(texts["en"]) == fields(texts["ja"]) == fields(texts["zh"])


def test_a_game_without_turns_has_no_card(tmp_path):
    game = make_game(tmp_path / "empty")
    with pytest.raises(UserError, match="no turns yet: play one first"):
        save_card(game, tmp_path / "card.png", day=None, words=WORDS)
