"""The recipes' scripts: their commands are understood, and stages start from the one before."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from command_lines import check

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/run.sh"))
SETTINGS = {"BUCKET": "bucket", "MODEL": "gs://bucket/decoder/model"}


def commands(script: Path, **settings: str) -> list[list[str]]:
    """The commands that a recipe would run on all hosts."""
    run = subprocess.run(
        [script], env={"PATH": os.environ["PATH"], "ON": "echo", **settings},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = (line for line in run.stdout.splitlines() if line.startswith("animegamer "))
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.parent.name)
def test_its_commands_are_understood(script):
    found = commands(script, **SETTINGS)
    assert found
    for words in found:
        check(words)
    outs = [words[words.index("--out") + 1] for words in found if "train" in words]
    starts = [words[words.index("--model") + 1] for words in found if "train" in words]
    assert starts[1:] == [f"{out}/model" for out in outs[:-1]]


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.parent.name)
def test_what_is_not_set_is_named(script):
    run = subprocess.run([script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert run.returncode != 0
    assert re.search(r"set (BUCKET|MODEL) to", run.stderr)


def recipe(folder: Path, code: str, *, tpu_vm: str, gcloud: str = "exit 0"):
    """Runs lines of a recipe with stand-ins for tpu_vm.sh and gcloud, and returns the calls too."""
    script, bins = folder / "scripts" / "pods" / "tpu_vm.sh", folder / "bin"
    for path, text in ((script, tpu_vm), (bins / "gcloud", gcloud)):
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\necho "$*" >> calls\n{text}\n')
        path.chmod(0o755)
    code = f"set -euo pipefail; source {ROOT}/recipes/on_all_hosts.sh; {code}"
    settings = {
        "PATH": f"{bins}:{os.environ['PATH']}", "NAME": "n", "ZONE": "z", "EVERY": "0",
    }  # fmt: skip
    run = subprocess.run(
        ["bash", "-c", code], cwd=folder, env=settings, capture_output=True, text=True, timeout=60
    )
    return run, (folder / "calls").read_text().splitlines()


def test_a_command_runs_until_all_hosts_have_ended(tmp_path):
    """A new slice has no log, and the last line of a log may have the word `runs`, too."""
    tpu_vm = """
[ "$3" = --status ] || { touch started; exit 0; }
[ -e started ] || { echo ended; exit 1; }
[ $(grep -c status calls) -gt 3 ] && echo ended || echo runs
echo "step 3 of 5 runs as planned"
"""
    run, calls = recipe(tmp_path, "on animegamer train mllm", tpu_vm=tpu_vm)
    assert run.returncode == 0, run.stderr
    status = "n z --status"
    assert calls == [status, "n z animegamer train mllm", *[status] * 3]
    assert run.stdout == "ended\nstep 3 of 5 runs as planned\n"


def test_a_recipe_that_was_interrupted_waits_for_the_command_that_it_had_started(tmp_path):
    tpu_vm = """
[ "$3" = --status ] || exit 0
[ $(grep -c status calls) -gt 2 ] && echo ended || echo runs
"""
    run, calls = recipe(tmp_path, "on animegamer train mllm", tpu_vm=tpu_vm)
    assert run.returncode == 0, run.stderr
    assert "a command runs on n already: waiting for its end" in run.stdout
    status = "n z --status"
    assert calls == [*[status] * 3, "n z animegamer train mllm", status]


def test_a_stage_without_its_result_ends_the_recipe(tmp_path):
    code = "on animegamer train mllm; expect gs://b/mllm/model/config.json; echo next"
    tpu_vm = '[ "$3" != --status ] || echo ended'
    (tmp_path / "good").mkdir()
    run, calls = recipe(tmp_path / "good", code, tpu_vm=tpu_vm)
    assert (run.returncode, run.stdout) == (0, "ended\nnext\n")
    assert calls[-1] == "storage ls gs://b/mllm/model/config.json"
    (tmp_path / "failed").mkdir()
    run, _ = recipe(tmp_path / "failed", code, tpu_vm=tpu_vm, gcloud="exit 1")
    assert (run.returncode, run.stdout) == (1, "ended\n")
    assert "gs://b/mllm/model/config.json does not exist: the command above failed" in run.stderr


@pytest.mark.parametrize("name", ["v5e-4x4", "v5p-4x4x4"])
def test_every_result_is_expected(name):
    text = (ROOT / "recipes" / name / "run.sh").read_text()
    assert len(re.findall(r"^ *on ", text, re.M)) == len(re.findall(r"^ *expect ", text, re.M))
