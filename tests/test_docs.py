"""Docs: README's Python example runs as it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_python_example_of_the_readme_runs_as_pasted(capsys):
    (example,) = blocks(ROOT / "README.md", "python")
    exec(compile(example, "README.md", "exec"), {})
    shape, comment = re.search(r"print\(.*\)  # (\(.*?\)): (.*)", example).groups()
    assert capsys.readouterr().out == f"{shape}\n"
    assert comment == "games, frames, height, width, RGB"
