"""Words that stay out of code and docs, each with a plainer one; and how a docstring begins."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from animegamer_jax import cli

ROOT = Path(__file__).parents[1]

# The banned word, and what to write instead.
BANNED = {
    r"told|tells|telling": "says, reports, shows, given",
    r"lies": "is in, is stored in",
    r"beside": "next to, besides, as well as",
    r"anew": "again, from scratch",
    r"mend|mends|mended|mending": "fix, correct; in an error: what to do",
    r"so many": "that many, this number of",
    r"no JSON": "not valid JSON",
    r"the disk refuses": "the file cannot be written",
    r"what plays": "the networks needed to play",
    r"goes on|gone on with|may go on": "continues, resumes",
    r"of before": "earlier, former",
    r"data sets?": "dataset, datasets",
    r"out of itself|of its own accord": "a plain verb",
}
WEIGHTS = ROOT / "animegamer_jax" / "assets" / "toy"
FOLDERS = ("animegamer_jax", "docs", "notebooks", "recipes", "scripts", "tests")
KINDS = (".css", ".html", ".ipynb", ".js", ".json", ".md", ".py", ".sh", ".toml", ".yaml")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in KINDS and path != Path(__file__) and WEIGHTS not in path.parents
] + [path for path in ROOT.iterdir() if path.suffix in KINDS or path.name == "Makefile"]


def banned(word: str) -> re.Pattern[str]:
    """Finds the words in sentences and in names, whose parts `_` joins."""
    return re.compile(rf"(?<![a-z])(?:{word})(?![a-z])", re.IGNORECASE)


@pytest.mark.parametrize("word", BANNED)
def test_banned_words(word):
    pattern = banned(word)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"write {BANNED[word]!r} instead of:\n" + "\n".join(found)


def test_the_list_finds_what_it_bans():
    assert len(FILES) > 300
    for word in BANNED:
        first = word.partition("|")[0]
        assert banned(word).search(f"A sentence with {first} in it.")
        assert banned(word).search(f"test_a_name_with_{first}_in_it")


# The functions whose docstrings are a command's help, as module and function: in the imperative.
COMMANDS = {name for name, _ in cli.COMMANDS.values()} | {
    "evaluate.benchmarks.command:make_command",  # of `animegamer evaluate --make`
    "evaluate.command:run",
}


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def is_attribute(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"(?:^|_|\.)property$", name) for name in decorators(node))


def is_command(path: Path, text: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if ROOT / "scripts" in path.parents:
        is_parsed = re.search(rf"(?:tyro\.cli|run_script)\({node.name}\b", text)
        return bool(is_parsed) or "app.command" in decorators(node)
    module = ".".join(path.relative_to(ROOT / "animegamer_jax").with_suffix("").parts)
    return f"{module}:{node.name}" in COMMANDS


def wrong_beginnings(path: Path, text: str) -> Iterator[str]:
    """Yields the functions of a file whose docstring does not begin with a verb.

    That is the third person ("Returns ..."), in a command's help the imperative ("Play ..."). A
    property's docstring is a noun phrase, as an attribute's is.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_attribute(node):
            continue
        if docstring := ast.get_docstring(node):
            ending = r"[a-rt-z]" if is_command(path, text, node) else "s"
            if not re.match(rf"[A-Z][a-z]*{ending}\b", docstring):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {docstring.splitlines()[0]}"


def test_docstrings_begin_with_a_verb():
    files = [path for path in FILES if path.suffix == ".py" and ROOT / "tests" not in path.parents]
    found = [line for path in files for line in wrong_beginnings(path, path.read_text())]
    assert not found, "begin with a verb, as in 'Returns ...':\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "code", "is_right"),
    [
        ("protocol", "def f():\n  'Returns a sum.'", True),
        ("protocol", "def f():\n  'Whether it is a sum.'", False),
        ("protocol", "class A:\n  def f(self):\n    'Return a sum.'", False),
        ("protocol", "class A:\n  @property\n  def f(self):\n    'Number of rows.'", True),
        ("serve/command", "def serve():\n  'Serve the game.'", True),
        ("serve/command", "def serve():\n  'Serves the game.'", False),
        ("serve/command", "def other():\n  'Serve the game.'", False),
    ],
)
def test_the_check_of_docstrings(module, code, is_right):
    file = ROOT / "animegamer_jax" / f"{module}.py"
    assert (not list(wrong_beginnings(file, code))) == is_right


def test_stages_are_introduced_in_the_imperative():
    """A stage's docstring is its command's help."""
    for path in (ROOT / "animegamer_jax" / "train" / "stages").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and "recipes = " in ast.unparse(node):
                assert (ast.get_docstring(node) or "").startswith("Train "), f"{path}: {node.name}"
