"""Slices of TPUs: their names, chips and memory, and the libtpu that describes them."""

import importlib.util
from importlib import metadata

import pytest
from planning import axes, configure

from animegamer_jax.devices import CHIPS, find_chip
from animegamer_jax.errors import UserError
from animegamer_jax.plan.topology import check_libtpu, parse_topology


def test_topologies():
    topology = parse_topology("v5p:4x4x4")
    assert (str(topology), topology.num_chips) == ("v5p:4x4x4", 64)
    assert topology.chip is CHIPS["v5p"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p", "expected CHIP:AxB or CHIP:AxBxC"),
        ("v9:2x2", "unknown chip 'v9': expected one of v5e, v5p, v6e, tpu7x"),
        ("v4:2x2x2", "unknown chip 'v4'"),
        ("v5e:2x2x2", "expected v5e:AxB"),
        ("v5p:4x4", "expected v5p:AxBxC"),
        ("v6e:0x4", "expected v6e:AxB, one chip or more each"),
    ],
)
def test_topologies_that_cannot_be(text, message):
    with pytest.raises(UserError, match=message):
        parse_topology(text)


def test_memory_is_what_a_program_may_use():
    """libtpu's compiler: "exceeds available HBM (15.75G)"."""
    limits = {name: round(chip.usable_gb, 2) for name, chip in CHIPS.items()}
    assert limits == {"v5e": 16.91, "v5p": 102.8, "v6e": 33.55, "tpu7x": 101.74}
    v4 = find_chip("TPU v4")
    assert v4 is not None
    assert v4.peak_tflops == 275


def test_ironwood_has_two_devices_on_a_chip():
    topology = parse_topology("tpu7x:2x2x1")
    assert (topology.num_chips, topology.num_devices) == (4, 8)
    assert configure("rollout", "tpu7x:2x2x1").mesh == axes(fsdp=2, context=4)
    assert configure("decoder", "tpu7x:2x2x1").mesh == axes(fsdp=8)


def test_a_libtpu_that_is_missing_or_another(monkeypatch):
    asked = metadata.requires("jax") or []
    assert any(text.startswith("libtpu==") for text in asked), "what jax asks for is in its data"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install -e '\.\[plan\]'"):
        check_libtpu()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    installed = {"libtpu": "0.0.17"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    with pytest.raises(UserError, match=r"libtpu 0.0.17 with jax .*: expected libtpu==0.0.42.\*"):
        check_libtpu()
    installed["libtpu"] = "0.0.42.1"
    assert check_libtpu() == "0.0.42.1"
    del installed["libtpu"]
    installed["libtpu-nightly"] = "0.1.dev20260101"
    with pytest.raises(UserError, match=r"libtpu-nightly 0.1.dev20260101 with jax"):
        check_libtpu()
