"""The `animegamer` command: a table of sub-commands, each imported only when it is called."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import itertools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from animegamer_jax.extras import extra_with, how_to_install, missing_extra

_LONGEST = 10_000  # characters of an error
_SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:")  # of a docstring
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Module and function below `animegamer_jax`, and help, in the order in which a reader needs them.
COMMANDS = {
    "play": ("play.command:play", "play a game in the terminal"),
    "serve": ("serve.command:serve", "serve a web page to play on, with an API"),
    "film": ("play.film_command:film", "join the clips of a saved game to a film"),
    "openings": ("play.openings_command:openings", "prepare the first shots that the page offers"),
    "calibrate": ("play.calibrate:calibrate", "choose denoising steps that a model can skip"),
    "convert": ("convert.command:convert", "convert released files to a bundle"),
    "export": ("convert.command:export", "export a bundle to the released formats"),
    "parity": ("convert.command:parity", "compare with numbers recorded from other code"),
    "evaluate": ("evaluate.command:evaluate", "play and score a benchmark, or write one (--make)"),
    "data toyworld": ("toy.command:toyworld", "draw games of the toy world"),
    "data films": ("data.films.command:films", "cut films into two-second clips"),
    "data annotate": ("data.films.command:annotate", "label who does what in each clip"),
    "data games": ("data.films.command:games", "group annotated clips into games"),
    "data show": ("data.films.command:show", "make a page of a folder's clips"),
    "data features": ("data.command:features", "compute the features that training reads"),
    "data shown": ("train.command:shown", "make a clip of every turn, for histories as in play"),
    "initialise": ("convert.command:initialise", "make a bundle of pre-trained networks"),
    "train foundations": ("train.command:foundations", "train the toy's CLIP, T5, VAE and DiT"),
    "train warmup": ("train.command:warmup", "train the shot encoder, the decoder frozen"),
    "train decoder": ("train.command:decoder", "train the shot encoder and the decoder"),
    "train mllm": ("train.command:mllm", "train the language model"),
    "train adapt": ("train.command:adapt", "train the decoder on the language model's predictions"),
    "train picture": (
        "train.command:picture",
        "train a decoder of its own for pictures that come first",
    ),
    "train distill": ("train.command:distill", "train a student that makes a clip in a few steps"),
    "plan": ("plan.command:plan", "estimate what a program needs on a TPU slice"),
    "bench": ("bench.command:bench", "time the parts of a turn and the training steps"),
    "publish": ("data.publish:publish", "write a model or dataset for a hub, and upload it"),
    "doctor": ("doctor:doctor", "show what is installed, what fits here, and what to do"),
}


def _usage(group: str = "") -> str:
    """Lists all commands, or those of a group: `group` is "", or a first word and a space."""
    rows, missing = [], {}
    for name, (_, text) in COMMANDS.items():
        if name.startswith(group):
            if extra := missing_extra(name):
                missing[extra] = how_to_install(extra)
                text += f" [{extra}]"
            rows.append(f"  {name.removeprefix(group):<18} {text}")
    notes = [f"[{extra}] is not installed: {hint}" for extra, hint in missing.items()]
    prog = f"animegamer {group}"
    ends = ["", f"{prog}COMMAND --help: options; --debug: the traceback of an error", *notes]
    return "\n".join([f"usage: {prog}COMMAND [options]", "", *rows, *ends])


def _nearest(name: str, group: str) -> str:
    """Returns a question for the known command that is most like an unknown one; may be empty."""
    known = {n.removeprefix(group): n for n in COMMANDS if n.startswith(group)}
    known |= {n.rpartition(" ")[2]: n for n in known.values()}  # "features" for "data features"
    known |= {n.split()[0]: n.split()[0] for n in COMMANDS if not group}
    found = difflib.get_close_matches(name, known, n=1)
    return f": did you mean `animegamer {known[found[0]]}`?" if found else ""


def _choose(argv: list[str]) -> tuple[str, list[str]]:
    """Splits a command line into its command, of one word or two, and the words after it.

    Raises:
        SystemExit: The usage was asked for or the command is unknown; it has been printed.
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
        message = f"animegamer {first}: unknown {what} {second!r}: expected one of {known}"
        if not in_group:
            known = ", ".join(COMMANDS)
            message = f"animegamer: unknown command {first!r}: expected one of {known}"
        nearest = _nearest(second, group) if in_group else _nearest(first, "")
        print(f"{message}{nearest}", file=sys.stderr)
        raise SystemExit(2)
    return name, argv[name.count(" ") + 1 :]


def _in_long_lines(docstring: str) -> str:
    """Joins the lines of each paragraph and each argument, at whose ends tyro may break help."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        before = lines[-1] if lines else ""
        indent, outer = (len(text) - len(text.lstrip()) for text in (line, before))
        ends = not line.strip() or not before.strip() or before.strip() in _SECTIONS
        if ends or (indent <= outer and indent > 0) or line.startswith("- "):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines)


def _help_of(text: str | Callable[[], str | None] | None) -> str | None:
    """Returns a field's help, which may be made only when it is asked for, with long lines."""
    found = text() if callable(text) else text
    return None if found is None else _in_long_lines(found)


def parse(command: Callable[..., int], prog: str, argv: list[str]) -> _Arguments:
    """Parses the arguments of a command without running it.

    Raises:
        UserError: An option is unknown, missing or has a wrong value.
        SystemExit: After `--help`.
    """
    import tyro

    from animegamer_jax.errors import UserError

    silent = tyro.conf.arg(help_behavior_hint="")

    def without_default(annotation: Any) -> Any:
        """Drops "(default: None)" from an option's help, whose text describes the default."""
        return tyro.conf.DisallowNone[Annotated[annotation, silent]]

    registry = tyro.constructors.ConstructorRegistry()
    asked: list[Any] = []

    @registry.struct_rule
    def document_fields(info: Any) -> Any:
        """Does for the fields of a dataclass what `document` does for a parameter."""
        if asked:  # by the call below, which wants tyro's own rule
            return None
        asked.append(info)
        spec: Any = registry.get_struct_spec(info)
        asked.clear()
        if not isinstance(spec, tyro.constructors.StructConstructorSpec):
            return None
        fields = []
        for field in spec.fields:
            plain = field.default is None or field.default == ()
            kind = without_default(field.type) if plain else field.type
            help = functools.partial(_help_of, field.helptext)
            fields.append(dataclasses.replace(field, type=kind, helptext=help))
        return dataclasses.replace(spec, fields=tuple(fields))

    def document(parameter: inspect.Parameter) -> inspect.Parameter:
        """Does so for a parameter, and for arguments without a name, any number of them."""
        inner = next(iter(get_args(parameter.annotation)), None)  # of Annotated
        any_number = parameter.default is parameter.empty and get_origin(inner) is tuple
        if parameter.default not in (None, ()) and not any_number:
            return parameter
        return parameter.replace(annotation=without_default(parameter.annotation))

    signature = inspect.signature(command)
    parameters = [document(parameter) for parameter in signature.parameters.values()]
    collect: Any = lambda *args, **kwargs: (args, kwargs)  # noqa: E731 - tests wrap functions
    functools.update_wrapper(collect, command)
    del collect.__wrapped__  # its signature has the other annotations
    collect.__signature__ = signature.replace(parameters=parameters)
    collect.__doc__ = _in_long_lines(command.__doc__ or "")
    collect.__annotations__ = {p.name: p.annotation for p in parameters}

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(collect, prog=prog, args=argv, registry=registry)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_one_line(output.getvalue())}: see {prog} --help") from None


def _one_line(panel: str) -> str:
    """Extracts the message from the panel that tyro draws: between its title and first rule."""
    lines = [line.strip(" │|") for line in panel.splitlines()]
    if lines and not lines[0].startswith("╭"):  # a terminal without box characters
        lines = lines[2:]
    body = itertools.takewhile(lambda line: not line.startswith(("───", "---", "╰")), lines)
    text = " ".join(line for line in body if line and not line.startswith("╭"))
    text = re.sub(r"no type matching .* Got errors: .*- <class '\w+'>: ", "", text)
    text = text.rstrip(".:") or "the options cannot be read"
    similar = [line.split()[0] for line in lines if line.startswith("--") and line.strip("-")]
    return f"{text} (did you mean {' or '.join(sorted({*similar}))}?)" if similar else text


def _unexpected(error: BaseException) -> str:
    """Describes an error that no code expected: its kind, its text, and where it was raised."""
    from animegamer_jax.errors import first_line

    root = Path(__file__).parent
    frames = [
        f"{Path(frame.filename).relative_to(root)}, line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(root)
    ]
    kind, text = type(error).__name__, first_line(error)
    text = f"{kind}: {text}" if text != kind else kind
    if isinstance(error, MemoryError):
        text = f"not enough memory ({text})"
    where = f" in {frames[-1]}" if frames else ""
    return f"unexpected {text}{where}: please report it, with the traceback that --debug adds"


def _on_unraisable(unraisable: Any) -> None:
    """Repeats a Ctrl-C that Python dropped because it struck in a garbage-collector callback.

    A call of tensorstore into an event loop of Orbax that has ended is not printed: it makes one
    for each array that was being written when another failed, for which Orbax has raised.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        import signal
        import threading

        main_thread = threading.main_thread().ident  # a signal to another one wakes no sleep
        threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    elif (unraisable.exc_type, str(unraisable.exc_value)) != (RuntimeError, "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command and returns the exit status.

    2 is for a user's mistake, 130 for Ctrl-C, and 1 for an error that nobody expected. All are
    printed in one line; the option `--debug`, which every command has, adds the traceback. 141 is
    for a reader of standard output that has left, such as `head`; nothing is printed then.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())  # Python flushes once more
        return 141


def _reader_left() -> bool:
    """Returns whether standard output is a pipe whose reader has closed it."""
    import select

    poll = select.poll()
    try:
        poll.register(sys.stdout, select.POLLOUT)
    except OSError:  # it is no file, as in a notebook
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    debug, argv = "--debug" in argv, [word for word in argv if word != "--debug"]
    if argv[:1] == ["--version"]:
        from animegamer_jax import __version__

        print(__version__)
        return 0
    try:
        name, rest = _choose(argv)
    except SystemExit as stop:
        return int(str(stop.code))

    from animegamer_jax.devices import quiet_libtpu
    from animegamer_jax.errors import UserError, printable_lines

    quiet_libtpu()
    prog = f"animegamer {name}"
    module, function = COMMANDS[name][0].split(":")
    for library in ("absl", "gcsfs", "transformers"):  # errors also raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    try:
        command = getattr(importlib.import_module(f"animegamer_jax.{module}"), function)
        if hasattr(command, "for_words"):  # its options depend on the command line
            command = command.for_words(rest)
        args, kwargs = parse(command, prog, rest)
        status = command(*args, **kwargs)
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # panics of libraries in Rust are no Exception
        if isinstance(error, BrokenPipeError) and _reader_left():
            raise
        if debug:
            traceback.print_exception(error)
        status, line = 2, str(error)
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if (extra := extra_with(missing, name)) is not None:
            line = f"needs {missing}, which is not installed: {how_to_install(extra)}"
        elif not isinstance(error, UserError):
            status, line = 1, _unexpected(error)
        if len(line) > _LONGEST:  # whatever a file holds that it quotes
            line = f"{line[:_LONGEST]} ... and {len(line) - _LONGEST:,} characters more"
        print(printable_lines(f"{prog}: {line}"), file=sys.stderr)
        return status
    finally:
        sys.unraisablehook = hook
    return status or 0


if __name__ == "__main__":
    raise SystemExit(main())
