"""The `animegamer` command: a thin table of sub-commands, each imported only when it is called."""

import contextlib
import functools
import importlib
import io
import itertools
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

COMMANDS = {
    "play": ("animegamer_jax.play:play", "play a file of instructions, or from a prompt"),
    "convert": ("animegamer_jax.convert.released:convert", "released checkpoints -> bundle"),
    "export": ("animegamer_jax.convert.released:export", "bundle -> released file formats"),
    "parity": ("animegamer_jax.evaluate.parity:parity", "recorded numbers against this code"),
}


def _usage() -> str:
    rows = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: animegamer COMMAND [options]", "", *rows, "", "animegamer COMMAND --help: options"]
    )


def parse(command: Callable[..., int], prog: str, argv: list[str]) -> _Arguments:
    """The arguments of a command, without running it.

    Raises:
        UserError: an option is unknown, missing or has a wrong value.
        SystemExit: after `--help`.
    """
    import tyro

    from animegamer_jax.errors import UserError

    @functools.wraps(command)
    def collect(*args: Any, **kwargs: Any) -> _Arguments:
        return args, kwargs

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(collect, prog=prog, args=argv)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_one_line(told.getvalue())}: see {prog} --help") from None


def _one_line(panel: str) -> str:
    """The message in the panel that tyro draws: between its title and its first rule."""
    lines = [line.strip(" │|") for line in panel.splitlines()]
    if lines and not lines[0].startswith("╭"):  # a terminal without box characters
        lines = lines[2:]
    body = itertools.takewhile(lambda line: not line.startswith(("───", "---", "╰")), lines)
    text = " ".join(line for line in body if line and not line.startswith("╭"))
    text = re.sub(r"no type matching .* Got errors: .*- <class '\w+'>: ", "", text)
    return text.rstrip(".:") or "the options cannot be read"


def _again_if_lost(unraisable: Any) -> None:
    """A Ctrl-C that struck inside a callback of the garbage collector would be lost: once more."""
    if unraisable.exc_type is KeyboardInterrupt:
        import os
        import signal
        import threading

        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command and returns the exit status: 2 for a user's mistake, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from animegamer_jax import __version__

        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(f"animegamer: unknown command {argv[0]!r}: expected one of {names}", file=sys.stderr)
        return 2

    from animegamer_jax.errors import UserError

    prog = f"animegamer {argv[0]}"
    module, function = COMMANDS[argv[0]][0].split(":")
    for library in ("absl", "gcsfs", "transformers"):  # what matters comes as an exception, too
        logging.getLogger(library).setLevel(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, _again_if_lost
    try:
        command = getattr(importlib.import_module(module), function)
        args, kwargs = parse(command, prog, argv[1:])
        status = command(*args, **kwargs)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130
    finally:
        sys.unraisablehook = hook
    return status or 0


if __name__ == "__main__":
    raise SystemExit(main())
