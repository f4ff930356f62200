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
FILES = [
    path
    for pattern in ("animegamer_jax/**/*.py", "scripts/**/*", "docs/**/*.md", "tests/**/*.py")
    for path in ROOT.glob(pattern)
    if path.suffix in (".py", ".md", ".sh") and path != Path(__file__)
] + [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]


@pytest.mark.parametrize("word", BANNED)
def test_banned_words(word):
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
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
        assert re.search(rf"\b(?:{word})\b", f"A sentence with {first} in it.", re.IGNORECASE)
