"""Docs: every command fits the real options, every Python example names what it uses."""

import ast
import builtins
import importlib
import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest
from command_lines import check

from animegamer_jax.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
# Stand for other words in the docs.
PLACEHOLDERS = {"STAGE": "mllm", "...": None, "…": None, "N": "1", "I": "0"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[list[str]]:
    """The words of every `animegamer` command in a page: of its code blocks, and in its lines."""
    lines, text = [], re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for block in (*blocks(page, ""), *blocks(page, "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:scripts/pods/\S+ .*?)?(animegamer \w.*)", line):
                lines.append(match[1].partition(" #")[0])
    lines += re.findall(r"`(animegamer \w[^`]*)`", text)
    found = []
    for line in lines:
        optional = re.sub(r"\[(-[^]]*)\]", r"\1", line)  # [--json FILE]
        words = shlex.split(re.sub(r"\[=\w+\]", "", optional))[1:]
        words = [PLACEHOLDERS.get(word, word) for word in words]
        found.append([re.sub(r"^(\w+)\|.*", r"\1", word) for word in words if word is not None])
    return [words for words in found if words[0] != "COMMAND" and ":" not in words[0]]


def test_commands_are_found():
    found = {page.name: commands(page) for page in PAGES if page.parent == ROOT / "docs"}
    assert sum(map(len, found.values())) > 100
    assert ["train", "warmup", "--size", "full"] in [
        words[:4] for words in found["from-films-to-a-model.md"]
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_command_fits_the_real_options(page):
    wrong = []
    for words, _ in itertools.groupby(sorted(commands(page))):
        try:
            check(words)
        except (UserError, AssertionError) as error:
            wrong.append(f"animegamer {shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "play --nope",
        "trian mllm",
        "train mllm --data a --out b --steps x",
        "data features --modle a",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((UserError, AssertionError)):
        check(line.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_says_where_the_programs_it_names_find_their_helpers(page):
    text = page.read_text()
    said = re.findall(r"export PYTHONPATH=([\w/:]+)", text)
    folders = [ROOT / name for path in said for name in path.split(":")]
    for program in {*re.findall(r"python (tests/[\w/]+\.py)", text)}:
        tree = ast.parse((ROOT / program).read_text())
        imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
        for helper in (ROOT / "tests/support").rglob("*.py"):
            if helper.stem in imported:
                assert helper.parent in folders, f"{program} imports {helper.name}"


def test_links_from_the_root_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs')}\n" in navigation, page


EXAMPLES = [(page, text) for page in PAGES for text in blocks(page, "python")]


def callback_problems(call: ast.Call, target: object) -> list[str]:
    """Lambdas of a call that take another number of arguments than its function passes."""
    wrong, parameters = [], inspect.signature(target).parameters
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Lambda) and keyword.arg in parameters:
            default = parameters[keyword.arg].default
            if len(keyword.value.args.args) != len(inspect.signature(default).parameters):
                wrong.append(f"{keyword.arg}: expected {inspect.signature(default)}")
    return wrong


def example_problems(text: str) -> list[str]:
    """Imports that fail, names that nothing defines, arguments that its own functions lack."""
    found, wrong = {}, []
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("animegamer_jax"):
            module = importlib.import_module(node.module)
            found |= {alias.name: getattr(module, alias.name) for alias in node.names}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {*dir(builtins), *found}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    wrong += sorted({n.id for n in names} - defined)
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found:
            target = found[node.func.id]
            known = inspect.signature(target).parameters
            wrong += [k.arg for k in node.keywords if k.arg not in known]
            wrong += callback_problems(node, target)
    return wrong


@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[page.stem for page, _ in EXAMPLES])
def test_python_examples_define_what_they_use(page, text):
    assert not example_problems(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print(mesh)", "mesh"),
        (
            "from animegamer_jax.evaluate.judge.judge import judge\n"
            "judge([], None, cache='', on_progress=lambda a, b, c: None)",
            "on_progress: expected (done, total)",
        ),
        ("from animegamer_jax.evaluate.judge.judge import judge\njudge([], nope=1)", "nope"),
    ],
)
def test_a_wrong_python_example_is_found(text, problem):
    assert example_problems(text) == [problem]


def test_the_python_example_of_the_readme_runs_as_pasted(capsys):
    (example,) = blocks(ROOT / "README.md", "python")
    exec(compile(example, "README.md", "exec"), {})
    shape, comment = re.search(r"print\(.*\)  # (\(.*?\)): (.*)", example).groups()
    assert capsys.readouterr().out == f"{shape}\n"
    assert comment == "games, frames, height, width, RGB"
