"""A small sample of the campaign of `make test-faults`, so that it keeps working."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
    for part, count in (("files", 14), ("kills", 3)):
        found = [json.loads(line) for line in (out / f"{part}.jsonl").read_text().splitlines()]
        assert sorted(one["number"] for one in found) == list(range(count))
        assert {one["result"] for one in found} <= {"refused", "right"}
        if part == "files":
            assert sum(one["result"] == "refused" for one in found) > count / 2
        else:
            assert not any(one["reason"] for one in found)  # each was killed where it should
