"""Runs a script's `main` from the command line."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from animegamer_jax.errors import UserError


def run_script(main: Callable[..., Any], *, name: str) -> None:
    """Reads the options, runs `main`, and ends with one line and status 2 after a UserError."""
    try:
        tyro.cli(main)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
