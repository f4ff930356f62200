"""`scripts/toy/train.sh`: the commands it gives, what it does when a stage stops, signals."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from animegamer_jax import cli

ROOT = Path(__file__).parents[2]
STUB = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time

words = sys.argv[1:]
notes = pathlib.Path(os.environ["NOTES"])
with open(notes / "calls", "a") as file:
    file.write(json.dumps([words, os.environ.get("XLA_FLAGS")]) + "\\n")
shown = words[:2] == ["data", "shown"]  # goes to its data
out = pathlib.Path(words[words.index("--data" if shown else "--out") + 1])
out = out / "shown" if shown else out
out.mkdir(parents=True, exist_ok=True)
how = os.environ.get("STOP", "") if out.name == os.environ.get("AT") else ""
if how == "leave":  # as after a SIGTERM of its own
    sys.exit(0)
if how == "fail":
    sys.exit(2)
if how == "signal":
    def save(number, frame):
        time.sleep(0.3)
        (notes / "saved").write_text(signal.Signals(number).name)
        sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, save)
    (notes / "ready").touch()
    while True:  # by naps: a signal just before a long one would be heard at its end
        time.sleep(0.1)
made = out / "set.json" if words[0] == "data" else out / "model" / "config.json"
made.parent.mkdir(exist_ok=True)
made.touch()
"""

# Whoever runs the tests by `nohup` or behind a shell's & has them begin with some signals ignored,
# and a shell cannot trap what it began with ignored.
FRESH = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path):
    """Starts the script with a command that only notes how it was called."""
    stub = tmp_path / "bin" / "animegamer"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)

    def start(**environment: str) -> subprocess.Popen[str]:
        notes = {
            "BIN": str(stub.parent),
            "NOTES": str(tmp_path),
            "CORES": "3",
            "XLA_FLAGS": "--own",
        }
        return subprocess.Popen(
            [sys.executable, "-c", FRESH, ROOT / "scripts" / "toy" / "train.sh", tmp_path / "toy"],
            env=os.environ | notes | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def calls(folder: Path) -> list[tuple[list[str], str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_every_command_is_one_that_the_command_line_takes(script, tmp_path):
    run = script()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 0, said
    made, before = {"features": 0, "games": 0, "shown": 0}, None
    for words, flags in calls(tmp_path):
        name, rest = cli._choose(words)
        module, _, attribute = cli.COMMANDS[name][0].partition(":")
        function = getattr(importlib.import_module(f"animegamer_jax.{module}"), attribute)
        if words[0] == "train":
            function = function.for_words(rest)
        _, options = cli.parse(function, f"animegamer {name}", rest)
        shown = words[:2] == ["data", "shown"]
        out = Path("shown") if shown else Path(words[words.index("--out") + 1])
        if words[0] == "train":
            assert flags == "--xla_force_host_platform_device_count=3 --own"
            given, recipe = options["options"], options["recipe"]
            assert given.model == before
            data = "features" if made["features"] else "games"
            assert given.data == (str(tmp_path / "toy" / data),)
            if hasattr(recipe, "history_shown") and out.name != "captions":
                assert recipe.history_shown > 0
                assert made["shown"]
            before = f"{out}/model"
        elif words[1] in ("features", "shown"):
            assert options["model"] == before
        made[out.name] = made.get(out.name, 0) + 1
    late = ("pictures", "decoder", "captions", "mllm", "adapt", "picture")
    stages = ("clip", "t5", "vae", "dit", "warmup", *late)
    assert made == dict.fromkeys(("games", "features", "shown", *stages), 1)
    again = script()
    said, _ = again.communicate(timeout=60)
    assert len(calls(tmp_path)) == 14, "what is there was made again"
    assert said.count(" exists: ") == 14


@pytest.mark.parametrize(("how", "status"), [("leave", 1), ("fail", 2)])
def test_nothing_starts_from_a_stage_that_did_not_end(script, tmp_path, how, status):
    run = script(AT="t5", STOP=how)
    _, said = run.communicate(timeout=60)
    assert run.returncode == status
    assert [Path(words[-1]).name for words, _ in calls(tmp_path)] == ["games", "clip", "t5"]
    assert ("t5/model/config.json: the same command continues" in said) == (how == "leave")
    run = script()
    run.communicate(timeout=60)
    assert run.returncode == 0
    assert len(calls(tmp_path)) == 3 + 12


@pytest.mark.parametrize(
    ("number", "status", "heard"),
    [
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGINT, 130, "SIGINT"),
        (signal.SIGHUP, 129, "SIGTERM"),
    ],
)
def test_a_signal_reaches_the_stage_which_saves(script, tmp_path, number, status, heard):
    run = script(AT="clip", STOP="signal")
    while not (tmp_path / "ready").exists():
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert (tmp_path / "saved").read_text() == heard
    assert run.returncode == status
    assert said.count("the same command continues") == 1
    assert len(calls(tmp_path)) == 2


def test_an_environment_without_the_command(script, tmp_path):
    run = script(BIN=str(tmp_path / "nowhere"))
    said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert said == ("", f"train.sh: no {tmp_path}/nowhere/animegamer: run make train-toy\n")


def test_make_installs_what_training_needs(tmp_path):
    """`make --dry-run` in a folder of its own, whose environment has the base alone."""
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", *(path.name for path in ROOT.glob("constraints*"))):
        (tmp_path / name).symlink_to(ROOT / name)
    for stamp in (".made", ".play"):
        (tmp_path / ".venv" / stamp).touch()
    said = subprocess.run(
        ["make", "--dry-run", "train-toy"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert said.index("--editable '.[train]'") < said.index("scripts/toy/train.sh")
