"""Commands that docs and scripts show, parsed by the real command line."""

import contextlib
import functools
import importlib
import io
import re

import pytest

from animegamer_jax import cli
from animegamer_jax.errors import UserError


@functools.cache
def help_of(name: str) -> str:
    """What `--help` of a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        cli.main([*name.split(), "--help"])
    return printed.getvalue()


def check(words: list[str]) -> None:
    """Parses a command that the docs show; one without options may lack required ones."""
    groups = {name.split()[0] for name in cli.COMMANDS if " " in name}
    two = words[0] in groups and len(words) > 1
    name = " ".join(words[: 2 if two else 1])
    if name in groups or words[-1] in ("--help", "--version"):
        assert words[0] in groups or name in cli.COMMANDS or words == ["--version"], words
        return
    assert name in cli.COMMANDS, f"no such command: {name}"
    rest = words[name.count(" ") + 1 :]
    module, function = cli.COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(f"animegamer_jax.{module}"), function)
    try:
        if hasattr(command, "for_words"):
            command = command.for_words(rest)
        cli.parse(command, f"animegamer {name}", rest)
    except UserError as error:
        # The text may name a command with a few of its options only.
        if not str(error).startswith(("Missing ", "stage foundations: expected --part")):
            raise
        known = help_of(name)
        for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
            assert re.search(rf"{option}\b", known), f"animegamer {name} has no option {option}"
