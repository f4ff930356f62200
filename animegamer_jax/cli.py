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
from pathlib import Path
from typing import Any

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

COMMANDS = {
    "play": ("animegamer_jax.play.command:play", "play a file of instructions, or from a prompt"),
    "serve": ("animegamer_jax.serve.command:serve", "a web page to play on"),
    "convert": ("animegamer_jax.convert.command:convert", "released checkpoints -> bundle"),
    "export": ("animegamer_jax.convert.command:export", "bundle -> released file formats"),
    "evaluate": (
        "animegamer_jax.evaluate.command:evaluate",
        "plays a benchmark, scores it, writes a report; --make writes one",
    ),
    "parity": ("animegamer_jax.convert.command:parity", "recorded numbers against this code"),
    "initialise": (
        "animegamer_jax.convert.command:initialise",
        "pre-trained parts -> a bundle to train",
    ),
    "data toyworld": ("animegamer_jax.toy.command:toyworld", "draw games of the toy world"),
    "data films": ("animegamer_jax.data.films.command:films", "films -> two-second clips"),
    "data annotate": ("animegamer_jax.data.films.command:annotate", "who does what in each clip"),
    "data games": ("animegamer_jax.data.films.command:games", "annotated clips -> games"),
    "data show": ("animegamer_jax.data.films.command:show", "a page of a folder's clips"),
    "data features": ("animegamer_jax.data.command:features", "games -> features to train on"),
    "train foundations": ("animegamer_jax.train.command:foundations", "a toy's VAE, CLIP, T5"),
    "train warmup": ("animegamer_jax.train.command:warmup", "the shot encoder, decoder frozen"),
    "train decoder": ("animegamer_jax.train.command:decoder", "shot encoder and decoder"),
    "train mllm": ("animegamer_jax.train.command:mllm", "the language model"),
    "plan": ("animegamer_jax.plan.command:plan", "what a stage needs of a TPU slice"),
    "bench": ("animegamer_jax.bench.command:bench", "times this code, beside PyTorch if asked"),
    "train adapt": ("animegamer_jax.train.command:adapt", "decoder, on the MLLM's predictions"),
}


# The extra that brings what the plain installation lacks.
_EXTRAS = {
    "apache_beam": "beam",
    "array_record": "train",
    "cv2": "train",
    "diffusers": "bench",
    "gradio": "serve",
    "grain": "train",
    "jinja2": "films",
    "matplotlib": "evaluate",
    "openai": "films",
    "scenedetect": "films",
    "tensorboardX": "train",
    "tensorflow_datasets": "train",
    "torch": "torch",
}


def _usage(group: str = "") -> str:
    """All commands, or those of a group: `group` is "", or a first word and a space."""
    rows = [
        f"  {name.removeprefix(group):<18} {text}"
        for name, (_, text) in COMMANDS.items()
        if name.startswith(group)
    ]
    prog = f"animegamer {group}"
    return "\n".join(
        [f"usage: {prog}COMMAND [options]", "", *rows, "", f"{prog}COMMAND --help: options"]
    )


def _choose(argv: list[str]) -> tuple[str, list[str]]:
    """The command of a command line, of one word or two, and the words that follow it.

    Raises:
        SystemExit: with the status, after a word on the usage.
    """
    first, second, *_ = [*argv, "", ""]
    group = f"{first} "
    in_group = any(name.startswith(group) for name in COMMANDS)
    if first in ("", "-h", "--help") or (in_group and second in ("", "-h", "--help")):
        print(_usage(group if in_group else ""))
        raise SystemExit(0 if first and (second or not in_group) else 2)
    name = group + second if in_group else first
    if name not in COMMANDS:
        known = ", ".join(n.removeprefix(group) for n in COMMANDS if n.startswith(group))
        what = "stage" if first == "train" else "command"
        told = f"animegamer {first}: unknown {what} {second!r}: expected one of {known}"
        if not in_group:
            told = f"animegamer: unknown command {first!r}: expected one of {', '.join(COMMANDS)}"
        print(told, file=sys.stderr)
        raise SystemExit(2)
    return name, argv[name.count(" ") + 1 :]


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


def _how_to_install(extra: str) -> str:
    """The command that brings an extra: a checkout is installed from its own folder."""
    root = Path(__file__).parents[1]
    if (root / "constraints.txt").is_file():
        return f"pip install -e '.[{extra}]' -c constraints.txt in {root}"
    return f"pip install 'animegamer-jax[{extra}]'"


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
    if argv[:1] == ["--version"]:
        from animegamer_jax import __version__

        print(__version__)
        return 0
    try:
        name, rest = _choose(argv)
    except SystemExit as stop:
        return int(str(stop.code))

    from animegamer_jax.errors import UserError

    prog = f"animegamer {name}"
    module, function = COMMANDS[name][0].split(":")
    for library in ("absl", "gcsfs", "transformers"):  # what matters comes as an exception, too
        logging.getLogger(library).setLevel(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, _again_if_lost
    try:
        command = getattr(importlib.import_module(module), function)
        if hasattr(command, "for_words"):  # its options depend on some of the words
            command = command.for_words(rest)
        args, kwargs = parse(command, prog, rest)
        status = command(*args, **kwargs)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        mend = _how_to_install(extra)
        print(f"{prog}: needs {error.name}, which is not installed: {mend}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130
    finally:
        sys.unraisablehook = hook
    return status or 0


if __name__ == "__main__":
    raise SystemExit(main())
