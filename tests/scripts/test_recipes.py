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


def test_a_command_runs_until_all_hosts_have_ended(tmp_path):
    """`on` with a stand-in of tpu_vm.sh, whose hosts run for two questions."""
    script = tmp_path / "scripts" / "pods" / "tpu_vm.sh"
    script.parent.mkdir(parents=True)
    script.write_text(
        """#!/bin/sh
echo "$*" >> calls
[ "$3" = --status ] || exit 0
[ $(grep -c status calls) -gt 2 ] && echo ended || echo runs
"""
    )
    script.chmod(0o755)
    code = f"set -euo pipefail; source {ROOT}/recipes/on_all_hosts.sh; on animegamer train mllm"
    settings = {"PATH": os.environ["PATH"], "NAME": "n", "ZONE": "z", "EVERY": "0"}
    run = subprocess.run(["bash", "-c", code], cwd=tmp_path, env=settings, capture_output=True)
    assert run.returncode == 0, run.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["n z animegamer train mllm", *["n z --status"] * 3]
