"""The `animegamer` command: a thin table of sub-commands, each imported only when it is called."""

import importlib
import sys

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

    import tyro

    from animegamer_jax.errors import UserError

    module, function = COMMANDS[argv[0]][0].split(":")
    command = getattr(importlib.import_module(module), function)
    try:
        status = tyro.cli(command, prog=f"animegamer {argv[0]}", args=argv[1:])
    except UserError as error:
        print(f"animegamer {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"animegamer {argv[0]}: stopped", file=sys.stderr)
        return 130
    return status or 0


if __name__ == "__main__":
    raise SystemExit(main())
