"""A small sample of the campaign of `make test-faults`, so that it keeps working."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")
ROOT = CAMPAIGN.parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_sample_finds_nothing(tmp_path):
    out = tmp_path / "out"
    kinds = "^(saved game|uploaded|benchmark|instructions|play$)"
    command = [sys.executable, CAMPAIGN, "--parts", "files", "kills", "--kind", kinds]
    command += ["--cases", "14", "--kills", "3", "--out", out]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files, kills = (
        [json.loads(line) for line in (out / f"{part}.jsonl").read_text().splitlines()]
        for part in ("files", "kills")
    )
    assert {one["result"] for one in (*files, *kills)} <= {"refused", "right"}
    assert sorted(one["number"] for one in files) == list(range(14))
    assert sum(one["result"] == "refused" for one in files) > 7
    assert not any(one["reason"] for one in kills)  # each was killed where it should
    struck = {one["operation"] for one in kills}
    (count,) = {one["operations"] for one in kills}
    assert len(struck) == 3
    assert struck <= set(range(1, count + 1))
    assert re.search(rf"kill: play +3 +0 +3 +0 .* 3 of {count}\n", done.stdout)


@pytest.fixture
def kills(monkeypatch):
    """The campaign's module, whose neighbours are found in their folders."""
    for name in ("kills", "sandbox", "table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for folder in ("mutations", "cases", ""):
        monkeypatch.syspath_prepend(CAMPAIGN.parent / folder)
    return importlib.import_module("kills")


OPERATIONS = {"play": 60, "data games": 47, "data features": 83, "export": 386, "training": 988}


def test_commands_of_few_operations_are_killed_at_each(kills):
    def plan(count: int) -> dict[int, Any]:
        subjects = [each for each in kills.SUBJECTS if each.name in OPERATIONS]
        cases = kills.KillCases(
            Path(), Path(), seed=0, kills=count, subjects=subjects, operations=OPERATIONS
        )
        cases.expected = {name: {} for name in OPERATIONS}
        return cases.plan()

    planned = plan(600)
    assert len(planned) == 600
    struck = {name: [] for name in OPERATIONS}
    for fault in planned.values():
        struck[fault.subject.name].append(fault.at)
    for name in ("play", "data games", "data features"):
        assert sorted(struck[name]) == list(range(1, OPERATIONS[name] + 1))
    assert struck["training"].count(0) == 60  # at random moments
    assert 0 < len(struck["training"]) - 60 < len(struck["export"]) < OPERATIONS["export"]
    fewer = plan(200)
    assert len(fewer) == 200
    for number, fault in fewer.items():  # a campaign with more kills continues one with fewer
        assert planned[number].change == fault.change or not fault.at


def test_the_table_counts_operations_once(kills):
    def verdict(number: int, operation: int) -> Any:
        fields = {"kind": "kill: play", "change": "", "result": "right", "reason": ""}
        return kills.Verdict(number=number, operation=operation, operations=60, **fields)

    text = sys.modules["table"].format_table([verdict(1, 7), verdict(2, 7), verdict(3, 0)])
    head, row, total = text.splitlines()
    assert head.split() == ["tried", "refused", "right", "wrong", "operations"]
    assert row == "kill: play      3        0      3      0     1 of 60"
    assert total.split()[1:] == row.split()[2:]
