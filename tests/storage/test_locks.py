"""One process at a time writes to a folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from animegamer_jax import cli
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.errors import UserError
from animegamer_jax.storage.locks import only_writer

HOLD = """
import sys, time
from animegamer_jax.storage.locks import only_writer
with only_writer(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to `out`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lock_is_of_one_folder_and_ends(tmp_path):
    out = tmp_path / "a" / "b" / "out"
    with only_writer(out):
        assert [path.name for path in out.parent.iterdir()] == [".out.lock"]
        for name in (out, f"{out}/../out", os.path.relpath(out)):
            with pytest.raises(UserError, match="another process is writing there"):
                only_writer(name).__enter__()
        with only_writer(out.parent), only_writer(out.parent / "other"):
            pass
        with only_writer(out, what="annotations"):
            pass
    with only_writer(out):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_stays(tmp_path):
    out = tmp_path / "a" / "out"
    with only_writer(out):
        out.mkdir()
    with only_writer(out):
        assert out.is_dir()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


def test_a_link_to_a_folder_is_the_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with only_writer(tmp_path / "link"), pytest.raises(UserError, match="another process"):
        only_writer(tmp_path / "out").__enter__()


def test_a_killed_process_locks_nobody_out(tmp_path, holder):
    with pytest.raises(UserError, match="out: another process is writing there"):
        only_writer(tmp_path / "out").__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with only_writer(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_lock_is_no_reason_to_stop(tmp_path, monkeypatch):
    with only_writer("gs://bucket/out"), only_writer("gs://bucket/out"):
        pass
    (tmp_path / "file").write_text("")
    with only_writer(tmp_path / "file" / "out"):
        pass

    def refuse(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with only_writer(tmp_path / "out"):
        pass


def test_the_folder_itself_where_its_parent_is_read_only(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with only_writer(tmp_path / "out"), pytest.raises(UserError, match="another process"):
        only_writer(tmp_path / "out").__enter__()
    assert list((tmp_path / "out").iterdir()) == []


COMMANDS = {
    "play": "--instructions {lines} --resume",
    "convert": "--vae missing",
    "initialise": "--size toy",
    "export": "--bundle toy",
    "evaluate": "",
    "data toyworld": "",
    "data films": "{films}",
    "data games": "{films}",
    "data features": f"--model {ASSETS}/toy --data x",
    "train decoder": "--data x",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_second_process_ends_with_one_line(tmp_path, capsys, monkeypatch, holder, command):
    run = SimpleNamespace(run_config=dict, mesh=SimpleNamespace(shape={}), out=tmp_path / "out")
    made = run, SimpleNamespace(name="replicated")
    monkeypatch.setattr("animegamer_jax.train.command.make_run", lambda *args: made)
    monkeypatch.setattr("animegamer_jax.data.datasets.open_games", lambda path: None)
    (tmp_path / "lines").write_text("Mika waves.\n")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "film.mp4").write_text("")
    words = COMMANDS[command].format(lines=tmp_path / "lines", films=tmp_path / "films")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main([*command.split(), *words.split(), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"animegamer {command}: {tmp_path}/out: another process is writing")
    assert error.count("\n") == 1
    if command != "data films":  # it begins a folder, of its settings alone
        assert sorted(tmp_path.rglob("*")) == before
