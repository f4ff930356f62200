"""What is around the package: versions agree, and files that other programs read can be read."""

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
