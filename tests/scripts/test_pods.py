"""The scripts that launch on slices, with stand-ins for gcloud, and the tables of plans."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from animegamer_jax.cli import main
from animegamer_jax.errors import UserError
from animegamer_jax.plan import command as plan_command

ROOT = Path(__file__).parents[2]
PODS = ROOT / "scripts" / "pods"
TRAIN = ["animegamer", "train", "decoder", "--out"]


def run(*words: str | Path, env: dict[str, str] | None = None, **options):
    return subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("script", sorted(PODS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(script):
    assert run("bash", "-n", script).stderr == ""


def manifest(slice_: str, *words: str) -> str:
    done = run(PODS / "gke.sh", "run-1", "an/image", slice_, *words, env={"DRY": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("slice_", "accelerator", "hosts", "chips"),
    [
        ("v5p:4x4x4", "tpu-v5p-slice", 16, 4),
        ("v5e:4x4", "tpu-v5-lite-podslice", 4, 4),
        ("v6e:2x4", "tpu-v6e-slice", 1, 8),
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
        ("3xv5p:4x4x4", "tpu-v5p-slice", 16, 4),
        ("tpu7x:2x2x4", "tpu7x", 4, 4),
        ("2xtpu7x:2x2x1", "tpu7x", 1, 4),
    ],
)
def test_manifests(slice_, accelerator, hosts, chips):
    words = [*TRAIN, 'gs://bucket/it\'s "here"', "--remat", "dots"]
    text = manifest(slice_, *words)
    for line in (
        "name: run-1",
        "image: an/image",
        f"gke-tpu-accelerator: {accelerator}",
        f"gke-tpu-topology: {slice_.partition(':')[2]}",
        f"replicas: {slice_[0] if slice_[1] == 'x' else 1}",
        f"completions: {hosts}",
        f"parallelism: {hosts}",
        f"google.com/tpu: {chips}",
    ):
        assert re.search(rf"{re.escape(line)}$", text, re.M), line
    assert not re.search(r"\$[A-Z]", text.partition("command:")[0]), "every word is filled in"
    found = re.search(r"command: (\[.*\])", text)
    assert found is not None
    bash, option, script, _, *words_found = json.loads(found[1])
    assert (bash, option, words_found) == ("bash", "-c", words)
    assert script == (PODS / "until_done.sh").read_text()
    assert not re.search(r"\$\(|\$\$", script), "Kubernetes would replace it"


@pytest.mark.parametrize(
    ("name", "slice_", "message"),
    [
        ("run", "v5p", "v5p: expected v5e:AxB"),
        ("run", "v5p:4x4", "v5p:4x4: expected v5e:AxB"),
        ("run", "v5e:4x4x4", "v5e:4x4x4: expected"),
        ("run", "v9:2x2", "v9:2x2: expected"),
        ("run", "v5e:0x4", "v5e:0x4: expected"),
        ("run", "0xv5e:4x4", "0xv5e:4x4: expected"),
        ("run", "tpu7x:2x2", "tpu7x:2x2: expected"),
        ("run", "tpu8:2x2x1", "tpu8:2x2x1: expected"),
        ("run", "v5p:1x1x3", "3 chips: expected a multiple of 4"),
        ("Run_1", "v5e:4x4", "Run_1: expected a name"),
    ],
)
def test_slices_that_cannot_be(name, slice_, message):
    done = run(PODS / "gke.sh", name, "image", slice_, "animegamer", env={"DRY": "1"})
    assert done.returncode == 2
    assert message in done.stderr
    assert "unbound" not in done.stderr


def until_done(*words: str | Path, patience: float = 0.0):
    script = (PODS / "until_done.sh").read_text()
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env = {**python, "PATIENCE": str(patience)}
    return run("bash", "-c", script, "until_done.sh", *words, env=env)


def command(folder: Path, lines: str) -> Path:
    """A program that is called like `animegamer`."""
    path = folder / "animegamer"
    path.write_text(f"#!/usr/bin/env bash\n{lines}\n")
    path.chmod(0o755)
    return path


FINISH = 'mkdir -p "$4/model"; echo {} > "$4/model/config.json"'


def test_a_run_without_its_result_has_failed(tmp_path):
    """A drained pod's training ends with status 0, and must be started again."""
    out = tmp_path / "it is here"
    saved = command(tmp_path, "exit 0")
    done = until_done(saved, *TRAIN[1:], out)
    assert done.returncode == 1
    assert f"{out}/model/config.json does not exist" in done.stderr
    assert until_done(saved, "train", "decoder", f"--out={out}").returncode == 1
    assert until_done(saved, "data", "games", "--out", out).returncode == 0, "no training"
    assert until_done(command(tmp_path, FINISH), *TRAIN[1:], out).returncode == 0
    assert until_done(saved, *TRAIN[1:], out).returncode == 0, "of the other hosts"
    assert until_done(command(tmp_path, "exit 7"), *TRAIN[1:], out).returncode == 7


def test_other_hosts_wait_for_the_result(tmp_path):
    out = tmp_path / "out"
    later = command(tmp_path, f"(sleep 1; {FINISH}) > /dev/null 2>&1 & exit 0")
    assert until_done(later, *TRAIN[1:], out, patience=30).returncode == 0


def test_a_signal_reaches_the_command(tmp_path):
    out = tmp_path / "out"
    saving = "trap 'echo saved; exit 0' TERM; echo begun; for n in {1..300}; do sleep 0.1; done"
    script = (PODS / "until_done.sh").read_text()
    process = subprocess.Popen(
        ["bash", "-c", script, "until_done.sh", command(tmp_path, saving), *TRAIN[1:], out],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    output, errors = process.communicate(timeout=30)
    assert output == "saved\n"
    assert process.returncode != 0, errors


GCLOUD = """#!/usr/bin/env bash
# One worker: its home is $WORKER.
echo "$@" >> "$WORKER/asked"
shift 3
case $1 in
  scp) cp "$2" "$WORKER/${3#*:}" ;;
  ssh) while [ "$1" != --command ]; do shift; done
       cd "$WORKER" && HOME=$WORKER exec bash -c "$2" ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "$@" >> "$WORKER/uv"
if [ "$1" = venv ]; then mkdir -p venv/bin; echo '#!/bin/sh' > venv/bin/python; chmod +x venv/bin/python; fi
"""  # noqa: E501


@pytest.fixture
def worker(tmp_path):
    """A stand-in for a TPU VM: what runs `tpu_vm.sh NAME ZONE ...`, and the home folder."""
    home, bins = tmp_path / "home", tmp_path / "bin"
    for folder in (home, bins):
        folder.mkdir()
    for name, text in (("gcloud", GCLOUD), ("uv", UV)):
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    env = {"PATH": f"{bins}:{os.environ['PATH']}", "WORKER": str(home)}

    def start(*words: str):
        return run(PODS / "tpu_vm.sh", "slice", "a-zone", *words, env=env)

    yield start, home
    start("--stop")


def test_a_command_outlives_the_connection(worker):
    start, home = worker
    (home / "animegamer_jax").mkdir()
    (home / "animegamer_jax" / "deleted_module.py").touch()
    lines = "trap 'echo saved; exit 0' TERM; echo begun $1; for n in {1..300}; do sleep 0.1; done"
    done = start("bash", "-c", lines, "run", "it's here")
    assert done.returncode == 0, done.stderr
    assert "--follow shows the log" in done.stdout
    assert (home / "animegamer_jax" / "pyproject.toml").exists()
    assert not (home / "animegamer_jax" / "deleted_module.py").exists()
    assert "venv --quiet --python 3.11 venv" in (home / "uv").read_text()
    assert "--worker=all" in (home / "asked").read_text()
    log, end = home / "animegamer.log", time.monotonic() + 20
    while "begun" not in log.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert log.read_text() == "begun it's here\n", "the program runs on after ssh has ended"
    assert start("--status").stdout == "runs\nbegun it's here\n"
    again = start("echo", "other")
    assert again.returncode == 1
    assert "a command runs there already" in again.stderr
    assert start("--stop").returncode == 0
    assert log.read_text() == "begun it's here\nsaved\n"
    assert start("--status").stdout == "ended\nsaved\n"


def test_what_tpu_vm_does_not_know(worker):
    start, _ = worker
    done = start("--begin")
    assert done.returncode == 2
    assert "--begin: expected a command, --follow, --status or --stop" in done.stderr


def test_the_image_takes_what_is_there():
    text = (PODS / "Dockerfile").read_text()
    copied = [w for line in re.findall(r"^COPY (.*)$", text, re.M) for w in line.split()[:-1]]
    assert "animegamer_jax" in copied
    assert all((ROOT / name).exists() for name in copied)


# The plan's tables


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_tables", ROOT / "scripts/plan_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(stage: str) -> dict:
    return {
        "seconds": {
            "total": 2.5, "matmuls": 1.0, "other": 1.0, "collectives": 0.25,
            "kernels": 0.25,
        },
        "memory": {"peak": 7.04, "chip": 16.91},
        "sample_tokens": 1536 if stage == "mllm" else None,
        "samples_per_second": 25.6,
        "unit": "clips",
        "peak_share": 0.4,
        "recipe": {"chip_hours": 1234.5, "samples": 1_000_000},
        "mesh": {"data": 4, "fsdp": 16},
    }  # fmt: skip


def test_rows(tables, monkeypatch):
    def ask(stage, topology, options):
        fits = topology != "v5e:4x4"
        plans = [record(stage)] if fits else []
        return f"plan {stage}", {"fits": fits, "needed_gb": 20.04, "plans": plans}

    monkeypatch.setattr(tables, "ask", ask)
    lines = tables.train_table(["mllm", "decoder"])
    columns = {line.replace("\\|", "").count("|") for line in lines}
    assert columns == {9}, "as many in every row"
    row = "2.50 | 1 + 1 + 0.25 + 0.25 | 7.0 of 16.9 | 25.6 clips | 40% | 1,234 |"
    assert f"| decoder | `plan decoder` | {row}" in lines
    assert any("39,322 tokens" in line for line in lines)
    assert "| mllm | `plan mllm` | does not fit: 20.0 GB | | | | | |" in lines
    assert {line.count("|") for line in tables.play_table([])} == {6}


def test_films(tables, monkeypatch):
    """As many clips as in the recipe, or each of them once; a stage must fit."""
    fits = True

    def ask(stage, topology, options):
        assert (topology, fits) != ("v5e:4x4", True)
        return "", {"fits": fits, "plans": [record(stage)] if fits else []}

    monkeypatch.setattr(tables, "ask", ask)
    _, _, ten, thousand, many = tables.films_table()
    assert ten.startswith("| 10 | 20,000 | 1,234 | 1,234 | 1,234 | 1,234 | 4,938 | 3.2 |")
    assert thousand.startswith("| 1,000 | 2,000,000 | 2,469 |")
    assert many.startswith("| 100,000 | 200,000,000 | 246,900 |")
    fits = False
    with pytest.raises(SystemExit, match="decoder does not fit on v5p:4x4x4"):
        tables.films_table()


def test_every_row_can_be_planned(tables, monkeypatch):
    """And every command of the page: all but the compilation is done."""

    compiled = []

    def compile_program(case, topology):
        compiled.append(case)
        raise UserError("enough")

    monkeypatch.setattr(plan_command, "compile_program", compile_program)
    page = (ROOT / "docs" / "pods.md").read_text()
    commands_found = re.findall(r"^animegamer (plan .*)$", page, re.M)
    assert len(commands_found) >= 3
    rows = [("rollout", *case) for cases in tables.PLAY.values() for case in cases]
    rows += [(stage, *case) for stage, cases in tables.TRAIN.items() for case in cases]
    commands = [["plan", "--stage", stage, "--topology", at, *more] for stage, at, more in rows]
    for words in [*commands, *map(str.split, commands_found)]:
        before = len(compiled)
        assert main(words) == 2
        assert len(compiled) > before, words


def test_only_a_verdict_counts(tables):
    def read(text: str, status: int):
        return tables.parse_plan(text, status=status, command="plan", errors="a traceback")

    assert read('{"fits": true, "plans": [1]}', 0)["plans"] == [1]
    assert read('{"fits": false, "needed_gb": 20.0}', 2)["needed_gb"] == 20
    for text, status in (
        ("", 2),
        ("{}", 1),
        ("[]", 0),
        ('{"fits": true}', 1),
        ('{"fits": false, "needed_gb": null}', 2),
    ):
        with pytest.raises(SystemExit, match="no plan and no refusal:\na traceback"):
            read(text, status)


def test_what_was_kept_is_of_this_code(tables, monkeypatch, tmp_path):
    """A change of the package compiles again; the same does not."""
    package = tmp_path / "package"
    (package / "models").mkdir(parents=True)
    (package / "models" / "dit.py").write_text("one")
    monkeypatch.setattr(tables, "PACKAGE", package)
    monkeypatch.setattr(tables, "CACHE", tmp_path / "cache")
    ran = []

    def stand_in(words, **_options):
        ran.append(words)
        return subprocess.CompletedProcess(words, 0, '{"fits": true, "plans": []}', "")

    monkeypatch.setattr(tables.subprocess, "run", stand_in)
    for text, runs in (("one", 1), ("one", 1), ("two", 2)):
        (package / "models" / "dit.py").write_text(text)
        tables.code_digest.cache_clear()
        tables.ask("decoder", "v5e:4x4", [])
        assert len(ran) == runs
    tables.code_digest.cache_clear()


def test_some_rows_do_not_replace_all(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- plan_tables.py -->\nrows\n<!-- /plan_tables.py -->\n")
    words = ["--only", "decoder", "--write", page]
    done = run(sys.executable, ROOT / "scripts" / "plan_tables.py", *words)
    assert done.returncode == 2
    assert "--write would remove all others" in done.stderr
    assert "rows" in page.read_text()
