"""Templates of a report, into which any text may be put: names and instructions are only shown."""

import re
import unicodedata
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_TEMPLATES = Path(__file__).parents[2] / "assets" / "pages"
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_STARTS = re.compile(r"^([#+=-]|\d+(?=[.)](\s|$)))")  # of headings, lists and rules
_TURNS_LINE = frozenset(("R", "AL", "RLE", "LRE", "RLO", "LRO", "RLI", "LRI", "FSI"))
_ISOLATE = "\u2068{}\u2069"


def escape_markdown(text: str) -> str:
    """Text that GitHub's Markdown shows as it is, on one line, in a table's cell as well.

    Text that is written from the right, or turns the line's direction, is isolated.
    """
    line = "".join(" " if unicodedata.category(c) == "Cc" else c for c in text)
    line = " ".join(line.split())
    turns = any(unicodedata.bidirectional(c) in _TURNS_LINE for c in line)
    line = _MARKDOWN.sub(r"\\\1", line)
    if start := _STARTS.match(line):
        end = start.end()
        line = f"{line[:end]}\\{line[end:]}" if line[0].isdigit() else f"\\{line}"
    for letter, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        line = line.replace(letter, entity)
    return _ISOLATE.format(line) if turns else line


def verbatim(text: str) -> Markup:
    """Text of our own that the templates put in as it is."""
    return Markup(text)


def render_html(view: Any) -> str:
    """`report.html` of a view."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(view=view)


def render_markdown(view: Any) -> str:
    """`report.md` of a view."""

    def finalize(value: Any) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape_markdown(str(value)))

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("report.md.jinja").render(view=view)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
