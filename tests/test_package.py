"""What is around the package: versions agree, and files that other programs read can be read."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import animegamer_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = animegamer_jax.__version__
    assert version == PROJECT["version"] == citation["version"]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["license"] == PROJECT["license"]
    assert citation["preferred-citation"]["identifiers"][0]["value"] == "arXiv:2504.01014"
    assert [author["family-names"] for author in citation["preferred-citation"]["authors"]] == [
        "Cheng",
        "Ge",
        "Ge",
        "Liao",
        "Shan",
    ]


def test_a_folder_can_be_taken_in_at_a_glance():
    """At most twelve modules in each, its `__init__` not counted; the tests' helpers as well."""
    package, tests = Path(animegamer_jax.__file__).parent, ROOT / "tests"
    roots = (package, tests / "support", tests / "faults")
    folders = {file.parent for root in roots for file in root.rglob("*.py")}
    assert len(folders) > 30
    for folder in folders:
        assert len([f for f in folder.glob("*.py") if f.name != "__init__.py"]) <= 12, folder


def test_each_package_has_a_map_of_its_modules():
    package = Path(animegamer_jax.__file__).parent
    for init in package.rglob("*/__init__.py"):
        folders = [place.parent.name for place in init.parent.glob("*/__init__.py")]
        names = [file.stem for file in init.parent.glob("*.py") if file != init] + folders
        text = init.read_text()
        missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
        assert not missing, init
        assert text.count("\n") <= 12, init


def test_the_import_order_of_the_docs_is_that_of_the_contract():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [line.replace("(", "").replace(")", "") for line in contract["contracts"][0]["layers"]]
    assert "```\n" + "\n".join(layers) + "\n```" in (ROOT / "docs/architecture.md").read_text()


def test_no_modules_import_each_other_in_a_circle():
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("animegamer_jax", exclude_type_checking_imports=True, cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while free := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in free}
    assert left.keys() == set(), "these import each other, or what does"


def test_it_is_marked_as_typed():
    assert (Path(animegamer_jax.__file__).parent / "py.typed").read_text() == ""
    assert "Typing :: Typed" in PROJECT["classifiers"]


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms(file):
    form = yaml.safe_load(file.read_text())
    if file.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() == {"name", "description", "body"}
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "markdown")
        assert part["attributes"]["label"]
    assert any(part.get("validations", {}).get("required") for part in form["body"])
