"""Renders the templates of a report; names and instructions are escaped, whatever they contain."""

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
    """Escapes text for GitHub's Markdown, on one line, so that it also fits a table's cell.

    Text from right to left, or that changes the line's direction, is isolated.
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


def _environment(**options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def render_html(view: Any) -> str:
    """Returns `report.html`."""
    return _environment().get_template("report.html.jinja").render(view=view)


def render_markdown(view: Any) -> str:
    """Returns `report.md`."""

    def finalize(value: Any) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape_markdown(str(value)))

    text = _environment(finalize=finalize).get_template("report.md.jinja").render(view=view)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
