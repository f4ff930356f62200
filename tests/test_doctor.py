"""`animegamer doctor`: what it finds, what it advises, and its form."""

import importlib.metadata
import json
import socket
import tomllib
from pathlib import Path

import pytest

from animegamer_jax import cli, doctor, extras

ROOT = Path(__file__).parents[1]


@pytest.fixture
def versions(monkeypatch):
    """Versions of packages that replace those installed; None: it is missing."""
    changed = {}
    installed = importlib.metadata.version

    def version(name):
        if name not in changed:
            return installed(name)
        if changed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return changed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return changed


def run(capsys, *words: str) -> tuple[int, str]:
    status = cli.main(["doctor", *words])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def test_the_json_report(capsys, monkeypatch, tmp_path):
    def refuse(*address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    (tmp_path / "program").write_bytes(b"x" * 2500)
    status, out = run(capsys, "--json")
    assert status == 0
    report = json.loads(out)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(report["packages"]) == len(project["dependencies"])
    assert report["extras"].keys() == project["optional-dependencies"].keys()
    assert len(report["devices"]) == 8
    assert {device["platform"] for device in report["devices"]} == {"cpu"}
    assert report["memory"] == report["devices"][0]["memory"] > 1e9
    assert report["caches"]["compiled programs"] == {"folder": str(tmp_path), "bytes": 2500}
    # The language model, the shot encoder, the transformer and the VAE of the released files.
    full = report["sizes"]["full"]
    assert full["weights"] == 7_364_148_992 + 16_730_880 + 1_730_048_960 + 215_583_907
    assert full["float32"] == 2 * full["bfloat16"] == 4 * full["weights"]


def test_every_extra_says_what_it_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras.PURPOSES.keys() == project["optional-dependencies"].keys()


def test_a_missing_extra_is_named_with_what_it_lacks(capsys, versions):
    versions.update({"gradio": None, "libtpu": None})
    status, out = run(capsys)
    assert status == 0
    assert "the page and the API: needs gradio\n" in out
    found = json.loads(run(capsys, "--json")[1])["extras"]
    assert found["serve"]["missing"] == ["gradio"]
    assert found["serve"]["install"] == extras.how_to_install("serve")
    assert "libtpu" in found["tpu"]["missing"]  # which jax[tpu] brings
    assert not found["plan"]["installed"]


def test_another_version_than_the_tested_one(capsys, versions):
    versions["optax"] = "99.0"
    status, out = run(capsys)
    assert status == 0
    tested = doctor.tested_versions()["optax"]
    assert f"  optax                99.0 (tested: {tested})" in out
    assert f"try the tested versions: optax 99.0 (tested: {tested}): pip install -c" in out


@pytest.mark.parametrize(("version", "text"), [("0.4.1", "0.4.1"), (None, "missing")])
def test_a_package_that_everything_needs(capsys, versions, version, text):
    versions["jax"] = version
    status, out = run(capsys)
    assert status == 1
    assert f"nothing runs before these packages are right: jax {text} (needs >=" in out


def test_what_does_not_fit(capsys, monkeypatch):
    device = {"platform": "tpu", "kind": "TPU v5 lite", "memory": 16_900_000_000}
    monkeypatch.setattr(doctor, "find_devices", lambda: [device])
    monkeypatch.setattr(doctor, "has_tpu", lambda: True)
    out = run(capsys)[1]
    assert "float32 37.3 GB (does not fit), bfloat16 18.7 GB (does not fit)" in out
    assert "the full size does not fit one device here" in out
    assert "this machine has TPU chips" not in out
    monkeypatch.setattr(doctor, "find_devices", lambda: [device | {"platform": "cpu"}])
    assert "this machine has TPU chips, but JAX does not use them: pip install" in run(capsys)[1]


def test_cards_that_are_not_here(capsys):
    """The released size fits 24 GB in bfloat16 with little room, and 80 GB in both formats."""
    status, out = run(capsys, "--memory", "24", "80", "--json")
    assert status == 0
    small, large = json.loads(out)["cards"]
    full = json.loads(out)["sizes"]["full"]
    assert small["room"]["full"]["bfloat16"] == 0.95 * 24e9 - full["bfloat16"]
    assert 3e9 < small["room"]["full"]["bfloat16"] < 5e9
    assert small["room"]["full"]["float32"] < 0 < large["room"]["full"]["float32"]
    _, text = run(capsys, "--memory", "24")
    assert "A card of 24 GB, 95 % of it usable" in text
    assert "float32 does not fit, bfloat16 leaves" in text
    assert cli.main(["doctor", "--memory", "0"]) == 2
    assert "--memory 0: expected GB, a number above 0" in capsys.readouterr().err
