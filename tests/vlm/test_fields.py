"""Texts in models' answers: cleaned, or refused with what is wrong."""

from typing import Annotated

import pydantic
import pytest

from animegamer_jax.vlm.fields import WHOLE, explain, plain, text_of


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" walks\n slowly. ", "walks slowly"),
        ("Mika\u2019s home", "Mika's home"),  # a typographic apostrophe
        ("\uff21bc", "Abc"),  # a full-width letter
        ("\u6b69\u304f", "\u6b69\u304f"),
    ],
)
def test_a_text_is_cleaned(text, cleaned):
    assert plain(text, most=20) == cleaned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a; b", "expected letters, digits, spaces .*, found ';'"),
        ("<img>", "found '<'"),
        (" ., ", "expected a word or more, found none"),
        ("x" * 21, "expected at most 20 characters, found 21"),
    ],
)
def test_a_text_that_cannot_be_part_of_an_instruction(text, message):
    with pytest.raises(ValueError, match=message):
        plain(text, most=20)


class Answer(pydantic.BaseModel):
    level: Annotated[int, WHOLE]
    place: Annotated[str, text_of(10)]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"level": True, "place": "park"}, "level: expected a whole number"),
        (
            {"level": 1, "place": "a <b>"},
            "place: expected letters, digits, spaces and '-,.&, found '<'",
        ),
    ],
)
def test_what_is_wrong_is_explained_by_field(answer, problem):
    with pytest.raises(pydantic.ValidationError) as caught:
        Answer.model_validate(answer)
    assert explain(caught.value) == problem


def test_every_wrong_field_is_named_with_what_was_found():
    with pytest.raises(pydantic.ValidationError) as caught:
        Answer.model_validate({"level": "high"})
    level, place = explain(caught.value).split("; ")
    assert level.startswith("level: ")
    assert level.endswith("found 'high'")
    assert place.startswith("place: ")


def test_an_explanation_is_short_whatever_the_answer_holds():
    class Strict(Answer, extra="forbid"):
        pass

    fields = {"x" * 1_000_000: 1, **{f"y{number}": 1 for number in range(1000)}}
    with pytest.raises(pydantic.ValidationError) as caught:
        Strict.model_validate({"level": 1, "place": "park", **fields})
    text = explain(caught.value)
    assert len(text) < 1000
    assert text.endswith("; and 991 more")
