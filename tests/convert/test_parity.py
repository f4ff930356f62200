"""`animegamer parity`: recorded numbers of the released code against this code."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from animegamer_jax import cli
from animegamer_jax.convert.export import export_bundle

TESTS = Path(__file__).parents[1]


def link(source: Path, target: Path) -> None:
    """Makes a folder of symbolic links to the contents of another."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).symlink_to(path)


def parity(folder: Path, tmp_path: Path) -> tuple[int, list[dict[str, Any]]]:
    file = tmp_path / "rows.json"
    status = cli.main(["parity", str(folder), "--json", str(file)])
    return status, json.loads(file.read_text()) if file.exists() else []


@pytest.mark.slow
def test_parity_of_everything_recorded(reference, tmp_path, capsys):
    status, rows = parity(reference, tmp_path)
    out = capsys.readouterr().out
    assert status == 0, out
    assert len(rows) == 100
    assert {row["result"] for row in rows} == {"pass"}
    assert "100 of 100 rows pass" in out


@pytest.mark.parametrize("change", [1e-2, np.nan])
def test_parity_names_the_row_that_fails(tmp_path, capsys, change):
    folder = tmp_path / "recorded"
    link(TESTS / "reference" / "clip", folder / "clip")
    with np.load(TESTS / "reference" / "clip" / "clip.npz") as file:
        arrays = dict(file)
    arrays["features"][0, 7, 5] += change
    (folder / "clip" / "clip.npz").unlink()
    np.savez(folder / "clip" / "clip.npz", **arrays)
    status, rows = parity(folder, tmp_path)
    assert status == 1
    results = {row["quantity"]: row["result"] for row in rows}
    assert results == {"clip: preprocessed": "pass", "clip: features": "FAIL"}
    error = rows[1]["max_error"]
    assert error is None if np.isnan(change) else error == pytest.approx(change, rel=1e-2)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "FAIL" in line and "clip: features" in line]
    assert "1 of 2 rows pass" in out


def test_parity_compares_what_is_there(tmp_path, capsys):
    link(TESTS / "reference" / "clip", tmp_path / "recorded" / "clip")
    status, rows = parity(tmp_path / "recorded", tmp_path)
    assert status == 0, capsys.readouterr().out
    assert [row["quantity"] for row in rows] == ["clip: preprocessed", "clip: features"]


def test_parity_of_networks_that_do_not_belong_together(tiny_bundle, tmp_path, capsys):
    """A language model of another width; each network is compared by itself."""
    folder = tmp_path / "recorded"
    export_bundle(str(tiny_bundle), folder, networks=("mllm",))
    link(TESTS / "reference" / "vdm", folder / "vdm")
    for file in ("diffusion_loss", "sample_50"):
        (folder / "vdm" / f"{file}.npz").unlink()
    assert cli.main(["convert", "--out", str(tmp_path / "b"), "--reference", str(folder)]) == 2
    assert "the files do not belong together" in capsys.readouterr().err
    status, rows = parity(folder, tmp_path)
    assert status == 0, capsys.readouterr().out
    names = ["encoder: context", *(f"dit: out_{x}" for x in ("encoder", "mllm", "mllm_train"))]
    assert [row["quantity"] for row in rows] == names


def test_parity_of_the_recorded_numbers_in_this_repository(tmp_path, capsys):
    for network in ("mllm", "vdm", "vae", "clip"):
        link(TESTS / "reference" / network, tmp_path / "recorded" / network)
    (tmp_path / "recorded" / "vdm" / "sample_50.npz").unlink()  # 50 steps have their own test
    status, rows = parity(tmp_path / "recorded", tmp_path)
    assert status == 0, capsys.readouterr().out
    names = {row["quantity"] for row in rows}
    assert {"dit: out_mllm", "loss: encoder", "loss: mllm", "clip: features"} < names
    assert {"vae: moments", "vae: decoded in chunks"} < names


@pytest.mark.parametrize("files", [(), ("vae/vae.npz",)])
def test_parity_of_nothing_is_one_line(tmp_path, capsys, files):
    folder = tmp_path / "recorded"
    folder.mkdir()
    for file in files:
        (folder / file).parent.mkdir()
        (folder / file).symlink_to(TESTS / "reference" / file)
    assert cli.main(["parity", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_parity_without_a_folder_or_an_array(tmp_path, capsys):
    assert cli.main(["parity", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    # The loss's arrays are cut to those that the forward pass does not have.
    link(TESTS / "reference" / "vdm", tmp_path / "recorded" / "vdm")
    for file in ("dit_forward", "sample_50"):
        (tmp_path / "recorded" / "vdm" / f"{file}.npz").unlink()
    assert cli.main(["parity", str(tmp_path / "recorded")]) == 2
    assert "diffusion_loss.npz: the array 'text' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["object", "giant", "text", "bomb", "ragged"])
def test_parity_of_hostile_arrays_is_one_line(tmp_path, capsys, kind):
    folder = tmp_path / "recorded"
    link(TESTS / "reference" / "clip", folder / "clip")
    file = folder / "clip" / "clip.npz"
    file.unlink()
    if kind == "giant":
        header = io.BytesIO()
        content = {"descr": "<f4", "fortran_order": False, "shape": (1 << 30, 1 << 10)}
        np.lib.format.write_array_header_1_0(header, content)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("image.npy", header.getvalue())
    elif kind == "text":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("readme.txt", b"hello")
    elif kind == "bomb":
        np.savez_compressed(file, preprocessed=np.zeros((1, 3, 1 << 12, 1 << 12), np.float16))
    else:
        arrays = {
            "object": {"image": np.array([1, "a"], object)},
            "ragged": {"preprocessed": np.zeros(3), "features": np.array("x")},
        }
        np.savez(file, **arrays[kind], features_of=np.zeros(1))
    assert cli.main(["parity", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"{file}: " in error
    assert error.count("\n") == 1
