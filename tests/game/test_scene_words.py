"""Words of an instruction: parts of a scene in any form, unknown words and what to offer."""

from types import SimpleNamespace

import pytest

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.game.scene_words import SceneWords, partner_of, read_line, read_scene

WORDS = Vocabulary(
    characters=("Mika", "Ren"),
    adverbs=("gently", "wildly"),
    motions=(
        "walking",
        "running",
        "flying on a broom",
        "waving",
        "talking to Mika",
        "talking to Ren",
    ),
    times=("day", "night"),
    places=("town", "beach", "dark forest"),
)


def tokenizer(*unknown: str) -> SimpleNamespace:
    return SimpleNamespace(unknown_words=lambda text: tuple(w for w in unknown if w in text))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "Character: Mika; Motion: gently waving; Background: day town.",
            SceneWords("Mika", "gently", "waving", "", "day", "town"),
        ),
        ("ren waves WILDLY", SceneWords("Ren", "wildly", "waving")),
        ("Then run.", SceneWords(motion="running")),
        (
            "She flies in the dark forest",
            SceneWords(motion="flying on a broom", place="dark forest"),
        ),
        (
            "Mika talks to Ren at night",
            SceneWords("Mika", "", "talking to Ren", "Ren", "night"),
        ),
        ("Motion: talking to Mika.", SceneWords("", "", "talking to Mika", "Mika")),
        ("Naruto eats", SceneWords()),
        ("", SceneWords()),
    ],
)
def test_parts_of_a_scene(text, parts):
    assert read_scene(text, WORDS) == parts
    assert read_scene(text, Vocabulary()) == SceneWords()


def test_partners():
    assert [partner_of(motion, WORDS) for motion in WORDS.motions] == [
        "",
        "",
        "",
        "",
        "Mika",
        "Ren",
    ]


def test_known_words_are_offered_for_unknown_ones():
    line = "Naruto jmps, wavs on the moon with Mika's bech"
    found = read_line(line, WORDS, tokenizer("Naruto", "jmps", "wavs", "moon", "bech"))
    assert found.understood
    assert [line[word.start : word.end] for word in found.unknown] == [
        w.word for w in found.unknown
    ]
    near = {word.word: word.near for word in found.unknown}
    assert near["Naruto"] == ("Mika", "Ren")
    assert near["jmps"] == ("walking", "running", "flying on a broom")
    assert near["wavs"][0] == "waving"
    assert near["moon"] == ("town", "beach", "dark forest")
    assert near["bech"][0] == "beach"


@pytest.mark.parametrize(
    ("line", "understood"),
    [
        ("Naruto eats ramen on the moon", False),
        ("Naruto runs on the moon", True),
        ("the", True),  # no word is unknown
        ("eats", False),
        ("ミカ eats", False),
    ],
)
def test_a_line_without_a_known_word_is_not_understood(line, understood):
    unknown = tokenizer("Naruto", "eats", "ramen", "moon", "ミカ")
    assert read_line(line, WORDS, unknown).understood is understood


@pytest.mark.parametrize(
    ("line", "word", "near"),
    [
        ("Ren is eating ramen", "ramen", ()),  # not Ren
        ("hello Mika", "hello", ()),
        ("the cat", "cat", ()),
        ("Mika runs happily", "happily", ("gently", "wildly")),
        ("Mika goes to the moon", "moon", ("town", "beach", "dark forest")),
        ("she eat", "eat", ("walking", "running", "flying on a broom")),
        ("Naruto dance", "dance", ("walking", "running", "flying on a broom")),
        ("wavving", "wavving", ("waving",)),
    ],
)
def test_only_words_that_may_be_meant_are_offered(line, word, near):
    (found,) = read_line(line, WORDS, tokenizer(word, "goes", "is")).unknown  # these name nothing
    assert (found.word, found.near) == (word, near)
