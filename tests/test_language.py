"""Words that stay out of code and docs: each has a plainer one."""

import re
from pathlib import Path

import pytest

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
    r"gone on with|goes on from|may go on": "resumed, resumes",
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
