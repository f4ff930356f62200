"""Instructions put together from fields."""

from animegamer_jax.game.instructions import compose_instruction


def test_instructions_from_fields():
    parts = {"character": "Mika", "adverb": "gently", "motion": "waving", "time": "day"}
    assert compose_instruction(**parts, place="town") == (
        "Character: Mika; Motion: gently waving; Background: day town."
    )
    none = dict.fromkeys(("character", "adverb", "motion", "time", "place"), "")
    assert compose_instruction(**(none | {"motion": " wave "})) == "Motion: wave."
    assert compose_instruction(**(none | {"place": "beach"})) == "Background: beach."
    assert compose_instruction(**none) == ""
