"""The page's texts: the same in every language, and one for each message of the server."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import animegamer_jax
from animegamer_jax.serve.page import page


def _languages() -> dict[str, dict]:
    folder = Path(page.__file__).with_name("files") / "lang"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_languages_have_the_same_texts():
    texts = _languages()
    assert texts.keys() == {"en", "ja", "zh"}
    for name, found in texts.items():
        assert found.keys() == texts["en"].keys(), name
        assert list(found["errors"]) == list(texts["en"]["errors"]), name
        for key, text in found.items():
            if isinstance(text, str):
                braces = {part.partition("}")[0] for part in text.split("{")[1:]}
                expected = {part.partition("}")[0] for part in texts["en"][key].split("{")[1:]}
                assert braces == expected, (name, key)
        for pattern, text in found["errors"].items():
            numbers = {int(number) for number in re.findall(r"{(\d)}", text)}
            assert numbers <= set(range(1, re.compile(pattern).groups + 1)), (name, pattern)


# What a player of the page does not meet: another address than the page's, no size of a body,
# what only programs ask for. The last one is that of two files, each of which has its pattern.
_OTHERS = (
    "this server is not known", "nothing is here", "expected the header",
    "7: expected a whole number, found", "after turn 7: ", "expected 7, found no file",
)  # fmt: skip


_REFUSALS = {"UserError": 0, "ConflictError": 0, "UnknownLineError": 0, "_RefusedError": 2}


def _messages(path: Path) -> Iterator[tuple[str, bool]]:
    """All texts in a module, 7 for each value in them, and whether a client is refused with it."""
    tree = ast.parse(path.read_text())
    raised = {
        node.args[_REFUSALS[node.func.id]]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _REFUSALS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(getattr(part, "value", "7") if isinstance(part, ast.Constant) else "7"
                           for part in node.values)  # fmt: skip
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        yield text, node in raised


def test_messages_of_the_server_are_known_in_every_language():
    """Each refusal has a pattern of its own, and each pattern is one of a message."""
    root = Path(animegamer_jax.__file__).parent
    play = [path for part in ("api", "engine", "games", "guard") for path in
            (root / "serve" / part).glob("*.py") if path.stem != "gradio_api"]  # fmt: skip
    others = ("game/instructions", "game/pictures", "game/player", "game/saved_game",
              "game/saved/film", "game/saved/tree", "media/pictures", "tokenizer")  # fmt: skip
    found = {
        text: refused and path in play
        for path in (*play, *(root / f"{name}.py" for name in others))
        for text, refused in _messages(path)
    }
    *patterns, rest = _languages()["en"]["errors"]
    assert rest == "(.+)"  # what no pattern matches is shown as it came
    for pattern in patterns:
        assert any(re.search(pattern, text) for text in found), pattern
    for text, refused in found.items():
        if refused and not text.startswith(_OTHERS):
            assert any(re.search(pattern, text) for pattern in patterns), text
