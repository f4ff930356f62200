"""Instructions put together from fields, and files of instructions."""

import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.game import instructions
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


def texts(data: bytes) -> list[tuple[int, str]]:
    return [tuple(line) for line in instructions.parse_instructions(data, "game.txt")]


def test_files_of_instructions_in_all_their_forms():
    assert texts(b"one\ntwo\n") == [(1, "one"), (2, "two")]
    assert texts(b"\xef\xbb\xbfone\r\n\r\n# no\r\n  two  ") == [(1, "one"), (4, "two")]
    assert texts("魔女\r空\n".encode()) == [(1, "魔女"), (2, "空")]
    assert texts("one\u2028still one\n".encode()) == [(1, "one\u2028still one")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"game\.txt: expected instructions, one a line, found none"),
        (b"\n# only a comment\n", r"game\.txt: expected instructions, one a line, found none"),
        (b"one\n\xe9toile\n", r"game\.txt: expected UTF-8 text, found byte 0xe9 at offset 4"),
        (b"\xef\xbb\xbfone\n\xe9t", r"found byte 0xe9 at offset 7"),
        ("one".encode("utf-16"), r"found byte 0xff at offset 0: save it as UTF-8"),
        (b"one\ntwo\0\n", r"game\.txt, line 2: expected text, found a control character, U\+0000"),
        (b"one\x1b[2J", r"line 1: .* U\+001B, at column 4"),
    ],
)
def test_files_that_cannot_be_played(data, message):
    with pytest.raises(UserError, match=message) as error:
        instructions.parse_instructions(data, "game.txt")
    assert "\n" not in str(error.value)


def test_every_bad_line_is_counted():
    def check(text: str) -> None:
        if len(text) > 5:
            raise UserError(f"{len(text)} letters")

    lines = instructions.parse_instructions(b"short\nmuch longer\n\nlonger again\n", "game.txt")
    with pytest.raises(UserError, match=r"^game\.txt, line 2: 11 letters \(and 1 more\)"):
        instructions.check_instructions(lines, "game.txt", check=check)
