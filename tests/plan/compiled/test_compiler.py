"""Compilations by libtpu: real ones at toy size, what does not fit, a compiler that crashes."""

import importlib.util
import json
import math
import subprocess
import sys
from importlib import metadata
from typing import cast

import numpy as np
import pytest
from planning import configure

from animegamer_jax.bundle.bundle import abstract_network
from animegamer_jax.cli import main
from animegamer_jax.configs import SIZES
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import DiT
from animegamer_jax.plan import topology as topology_module
from animegamer_jax.plan.compiled import compiler
from animegamer_jax.plan.compiled.compiler import ScratchError, TooLargeError, read_no_room
from animegamer_jax.plan.topology import describe_devices, parse_topology
from animegamer_jax.sharding import make_mesh, overlapping_gathers
from animegamer_jax.train.stages.decoder import transformer_flops

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"the compiler crashed \(SIGSEGV\)"),
        ("raise RuntimeError('no such thing')", "the compiler failed: RuntimeError: no such thing"),
    ],
)
def test_a_compiler_that_crashes_is_one_line(monkeypatch, tmp_path, code, message):
    """In a process of its own, which the command outlives."""
    child = tmp_path / "child.py"
    child.write_text(f"import os, signal\n{code}\n")
    run = subprocess.run
    monkeypatch.setattr(topology_module, "describe_devices", lambda topology: [])
    monkeypatch.setattr(
        compiler.subprocess, "run", lambda command, **rest: run([sys.executable, child], **rest)
    )
    case = configure("decoder", "v5e:4x4")
    with pytest.raises(UserError, match=message) as caught:
        compiler.compile_program(case, parse_topology("v5e:4x4"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "Ran out of memory in memory space hbm. Used 26.30G of 15.75G hbm. Exceeded by 10.55G.",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (26.30G) exceeds "
        "available HBM (15.75G).",
    ],
)
def test_what_does_not_fit_says_how_much(message):
    error = read_no_room(f"RESOURCE_EXHAUSTED: {message}", limit=1.0)
    assert isinstance(error, TooLargeError)
    assert error.needed == pytest.approx(26.3 * 2**30 / 1e9)
    assert error.limit == pytest.approx(15.75 * 2**30 / 1e9)
    assert "does not fit: it needs 28.2 GB of a chip's 16.9 GB" in str(error)


def test_a_core_s_own_memory_is_not_the_chip_s():
    reported = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 18.5M of 16.0M vmem."
    )
    error = read_no_room(reported, limit=16.9)
    assert isinstance(error, ScratchError)
    assert "own memory (vmem) than it has, 18.5M of 16.0M" in str(error)
    assert read_no_room("RESOURCE_EXHAUSTED: too many threads", limit=16.9) is None
    assert read_no_room("INTERNAL: Ran out of memory in memory space hbm", limit=16.9) is None


@needs_libtpu
@pytest.mark.parametrize(
    ("stage", "topology", "usable_gib", "link", "tflops"),
    [
        pytest.param("decoder", "v5e:2x4", 15.75, 45, 197, marks=pytest.mark.slow),
        pytest.param("rollout", "v5e:2x4", 15.75, 45, 197, marks=pytest.mark.slow),
        ("rollout", "v6e:2x4", 31.25, 90, 918),
    ],
)
def test_a_real_compilation(stage, topology, usable_gib, link, tflops, capfd):
    """At toy size, against arithmetic; the same code that plans the full one."""
    words = ["plan", "--stage", stage, "--topology", topology, "--size", "toy", "--json"]
    steps = ["--denoising-steps", "2", "--part", "decoder"] if stage == "rollout" else []
    assert main([*words, *steps]) == 0
    found = json.loads(capfd.readouterr().out)
    (record,) = found["plans"]
    assert found["fits"]
    assert found["libtpu"] == metadata.version("libtpu")
    assert math.prod(record["mesh"].values()) == 8
    assert record["memory"]["fits"]
    seconds = record["seconds"]
    assert record["memory"]["chip"] == pytest.approx(usable_gib * 2**30 / 1e9)
    assert record["unknown_loops"] == 0
    assert record["unknown_kernels"] == {}
    one_link = sum(record["collectives"].values()) / link
    assert seconds["collectives_over_one_link"] == pytest.approx(one_link)
    assert 0 < seconds["collectives"] <= 4 * one_link
    assert all(size > 0 for size in record["collectives"].values())
    parts = ("matmuls", "other", "collectives", "kernels", "between_slices")
    assert min(seconds["matmuls"], seconds["other"]) > 0
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in parts))
    if stage == "decoder":
        matmuls = record["sample_flops"] * record["batch_size"] / 8
        # The forward pass once more, and a toy's tokens do not fill the kernel's tiles.
        most = 2.5
        assert any(name.startswith("reduce-scatter") for name in record["collectives"])
    else:
        config = SIZES["toy"]().dit
        assert config is not None
        dit = cast(DiT, abstract_network("dit", config))
        forward = transformer_flops(dit, trained="all") / 3
        # Two steps of two rows; a quarter of a toy's tokens does not fill the kernel's tiles.
        matmuls, most = 2 * 2 * forward / 8, 2.5
    assert matmuls <= record["flops"] <= most * matmuls
    peak = tflops * 1e12 * seconds["total"]
    useful = matmuls if stage == "decoder" else record["flops"]
    assert record["peak_share"] == pytest.approx(useful / peak)


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "offloaded"),
    [("v6e:2x4", True), ("v5p:2x2x2", True), ("v6e:1x1", False), ("v5e:2x4", False)],
)
def test_gathers_are_given_to_sparse_cores(topology, offloaded):
    """Where the compiler would wait for each of them, and where there is something to gather."""
    devices = describe_devices(parse_topology(topology))
    options = overlapping_gathers(make_mesh({"fsdp": len(devices)}, devices=devices))
    assert bool(options) == offloaded
    assert all("sparse_core" in name for name in options)


@needs_libtpu
def test_axes_of_two_chips_on_a_torus_of_four():
    """JAX's own choice is whole axes of the torus, of which none has 2 chips or 32."""
    topology = parse_topology("v5p:4x4x4")
    mesh = make_mesh({"data": 32, "fsdp": 2}, devices=describe_devices(topology))
    assert dict(mesh.shape) == {"data": 32, "fsdp": 2, "context": 1, "tensor": 1}
    pairs = mesh.devices.reshape(32, 2)
    apart = [np.abs(np.subtract(a.coords, b.coords)).sum() for a, b in pairs]
    assert set(apart) == {1}  # neighbours


@needs_libtpu
def test_a_slice_that_libtpu_does_not_know(capsys):
    words = ["plan", "--stage", "warmup", "--topology", "v5e:3x7", "--size", "toy"]
    assert main([*words, "--batch", "21"]) == 2
    reported = capsys.readouterr().err
    assert "--topology v5e:3x7: " in reported
    assert "rented are v5e:1x1, v5e:2x2, v5e:2x4, v5e:4x4" in reported
