"""`animegamer plan`: what is refused, the arithmetic, and real compilations at toy size."""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from importlib import metadata
from typing import Literal, cast

import jax
import numpy as np
import pytest
from flax import nnx

from animegamer_jax.bundle.bundle import abstract_network, abstract_params
from animegamer_jax.cli import main
from animegamer_jax.configs import SIZES
from animegamer_jax.devices import CHIPS, find_chip
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import DiT
from animegamer_jax.plan import command as plan_command
from animegamer_jax.plan import topology as topology_module
from animegamer_jax.plan.compiled import compiler
from animegamer_jax.plan.compiled.compiler import ScratchError, TooLargeError, read_no_room
from animegamer_jax.plan.compiled.costs import Cost, Kernel
from animegamer_jax.plan.compiled.estimate import (
    Estimate,
    Memory,
    Seconds,
    attention_flops,
    kernel_flops,
    unknown_kernels,
)
from animegamer_jax.plan.compiled.hlo import Array
from animegamer_jax.plan.compiled.schedule import Schedule, compiler_flags, read_schedules
from animegamer_jax.plan.configurations import (
    LAYOUTS,
    Configuration,
    StageName,
    larger_slices,
    make_configuration,
    nearest_configurations,
    sweep_configurations,
)
from animegamer_jax.plan.programs import Program, rollout_program
from animegamer_jax.plan.report import describe_estimate
from animegamer_jax.plan.topology import check_libtpu, describe_devices, parse_topology
from animegamer_jax.sharding import PLANS, make_mesh, play_plan
from animegamer_jax.train.command import Options
from animegamer_jax.train.mesh import mesh_shape
from animegamer_jax.train.registry import find_stage
from animegamer_jax.train.stages.decoder import transformer_flops

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def configure(stage: StageName, topology: str, **given) -> Configuration:
    return make_configuration(stage, parse_topology(topology), **given)


def axes(**sizes: int) -> dict[str, int]:
    return {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes


def estimate_of(case: Configuration, topology: str, **changes) -> Estimate:
    """Of a program that takes 2 s and does its batch or its games in them."""
    made = Estimate(
        program="a program",
        topology=topology,
        plan=case.layout,
        mesh=case.mesh,
        num_chips=math.prod(case.mesh.values()),
        memory=Memory(arguments=1.0, temporaries=2.0, peak=3.0, chip=16.9),
        seconds=Seconds(
            products=1.0,
            other=0.5,
            kernels=0.25,
            collectives=0.25,
            collectives_over_one_link=0.5,
        ),
        flops=1e12,
        gigabytes=10.0,
        collectives={"all-gather of 4": 2.0},
        gigabytes_between_slices=0.0,
        samples=case.batch_size or case.games,
        unit="turns" if case.batch_size is None else "clips",
        sample_flops=None,
        sample_tokens=None,
        peak_share=0.25,
        unknown_loops=0,
        unknown_instructions=0.0,
        unknown_kernels={},
    )
    return dataclasses.replace(made, **changes)


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


def test_what_is_planned_by_default():
    layouts = {
        (stage, topology): configure(stage, topology).layout
        for stage in ("rollout", "mllm", "decoder")
        for topology in ("v5e:4x4", "v6e:4x4", "v6e:1x1")
    }
    assert {case for case, layout in layouts.items() if layout == "latency"} == {
        ("rollout", "v5e:4x4"),
        ("rollout", "v6e:4x4"),
    }
    assert layouts["rollout", "v6e:1x1"] == "throughput"
    assert {case for case, layout in layouts.items() if layout == "replicated"} == {
        ("mllm", "v6e:4x4"),
        ("mllm", "v6e:1x1"),
    }
    assert configure("mllm", "v6e:4x4", trained="all").layout == "sharded"
    decoder = configure("decoder", "v5p:4x4x4")
    assert decoder.mesh == axes(data=4, fsdp=16)
    assert decoder.batch_size == 64, "the recipe's 16 are too few for 64 chips"
    assert (decoder.remat, decoder.accumulate, decoder.trained) == ("full", 1, "recipe")
    assert configure("rollout", "v5e:4x4").games == 2, "two groups of eight chips"
    assert configure("mllm", "v5p:4x4x4").layout == "replicated"
    shared = configure("mllm", "v5p:4x4x4", mesh=("fsdp=16",))
    assert (shared.layout, shared.mesh) == ("sharded", axes(data=4, fsdp=16))


def test_every_plan_is_of_training_or_of_play():
    assert {name for names in LAYOUTS.values() for name in names} == set(PLANS)


def test_memory_is_what_a_program_may_use():
    """libtpu's compiler: "exceeds available HBM (15.75G)"."""
    limits = {name: round(chip.usable_gb, 2) for name, chip in CHIPS.items()}
    assert limits == {"v5e": 16.91, "v5p": 102.8, "v6e": 33.55, "tpu7x": 101.74}
    v4 = find_chip("TPU v4")
    assert v4 is not None
    assert v4.peak_tflops == 275


def test_the_command_that_trains_what_was_planned():
    """Its options are those of `animegamer train`."""
    case = configure("decoder", "v5p:4x4x4", mesh=("fsdp=8", "context=2"), batch_size=64)
    command = (
        "animegamer train decoder --size full --layout sharded --fsdp 8 --context 2 "
        "--batch-size 64 --remat full --accumulate 1 --trained recipe "
        "--data DATA --model MODEL --out OUT"
    )
    assert case.command == command
    recipe = find_stage("decoder", size="full")[1]
    known = {field.name for of in (Options, recipe) for field in dataclasses.fields(of)}
    asked = {w[2:].replace("-", "_") for w in command.split() if w.startswith("--")}
    assert asked <= known
    assert configure("rollout", "v6e:2x4").command is None
    warmup = configure("warmup", "v5p:4x4x4").command
    assert warmup is not None
    assert "--accumulate 1 --data DATA" in warmup  # which has no --trained


def test_training_makes_the_mesh_that_was_planned():
    """With the command's options, and with none where none were given to the plan."""
    given = configure("decoder", "v5p:4x4x4", mesh=("fsdp=8", "context=2"), batch_size=64)
    for case in (
        given,
        configure("decoder", "v5e:16x16"),
        configure("mllm", "v6e:4x4"),
    ):
        sizes = {name: case.mesh[name] for name in ("fsdp", "context", "tensor")}
        chips = math.prod(case.mesh.values())
        plan = PLANS[case.layout]
        assert mesh_shape(plan, num_devices=chips, **sizes) == case.mesh
        if case is not given:
            default = mesh_shape(plan, num_devices=chips, fsdp=None, context=1, tensor=1)
            assert default == case.mesh


@pytest.mark.parametrize(
    ("stage", "given", "message"),
    [
        ("decoder", {"mesh": ("rows=2",)}, "--mesh rows=2: expected AXIS=SIZE"),
        ("decoder", {"mesh": ("fsdp=x",)}, "--mesh fsdp=x: expected AXIS=SIZE"),
        ("decoder", {"mesh": ("fsdp=3",)}, "--mesh fsdp=3: 3 devices, found 16 in the slice"),
        (
            "decoder",
            {"mesh": ("tensor=4",)},
            "tensor=4: the transformer's heads are 30: expected one of 1, 2, 3, 5",
        ),
        ("mllm", {"mesh": ("tensor=16",)}, "key and value heads are 8: expected one of 1, 2, 4, 8"),
        ("decoder", {"batch_size": 24}, "--batch-size 24: expected a multiple of 16"),
        ("decoder", {"batch_size": 0}, "--batch-size 0: expected 1 or more"),
        ("decoder", {"accumulate": 0}, "--accumulate 0: expected 1 or more"),
        ("decoder", {"layout": "tall"}, "--layout tall: expected one of sharded, replicated"),
        ("decoder", {"layout": "latency"}, "--layout latency: expected one of sharded, replicated"),
        ("decoder", {"layout": "replicated", "mesh": ("fsdp=4",)}, "expected one of the two"),
        ("decoder", {"mesh": ("fsdp=4", "fsdp=2")}, "found fsdp twice"),
        (
            "decoder",
            {"part": "vae"},
            "--part is an option of play: --stage rollout, found --stage decoder",
        ),
        ("decoder", {"games": 2}, "--games is an option of play"),
        ("decoder", {"denoising_steps": 2}, "--denoising-steps is an option of play"),
        ("decoder", {"history": "shown"}, "--history is an option of play"),
        (
            "rollout",
            {"batch_size": 8},
            "--batch-size is an option of training, found --stage",
        ),
        ("rollout", {"trained": "all"}, "--trained is an option of training"),
        ("warmup", {"trained": "all"}, "--trained: stage warmup always trains the same weights"),
        (
            "rollout",
            {"layout": "replicated"},
            "--layout replicated: expected one of latency, throughput",
        ),
        ("rollout", {"games": 3}, "--games 3: expected a multiple of 2"),
        ("rollout", {"games": 1}, "--games 1: expected a multiple of 2"),
        ("rollout", {"games": 0}, "--games 0: expected 1 or more"),
        ("rollout", {"denoising_steps": 0}, "--denoising-steps 0: expected 1 or more"),
        ("rollout", {"denoising_steps": 1001}, "--denoising-steps 1001: expected 1 to 1000"),
        ("rollout", {"mesh": ("tensor=4",)}, "--mesh tensor=4: the rollout uses data, fsdp and"),
        ("rollout", {"mesh": ("context=8",)}, "rows of latents are 60: expected one of 1, 2, 3, 4"),
        ("rollout", {"mesh": ("fsdp=4",)}, "rows of guidance are 2: expected one of 1, 2"),
    ],
)
def test_plans_that_cannot_be(stage, given, message):
    with pytest.raises(UserError, match=message):
        configure(stage, "v5e:4x4", **given)


def test_options_of_the_other_kind(capsys):
    """Both names of the batch's option."""
    for option in ("--batch", "--batch-size"):
        words = ["plan", "--stage", "rollout", "--topology", "v5e:4x4", option, "8"]
        assert main(words) == 2
        assert "--batch-size is an option of training" in capsys.readouterr().err


def test_a_price_of_nothing(capsys):
    assert main(["plan", "--stage", "mllm", "--topology", "v5e:4x4", "--price", "0"]) == 2
    assert "--price 0.0: expected a number above 0" in capsys.readouterr().err


def swept(stage: StageName, topology: str, **given) -> list[Configuration]:
    case = configure(stage, topology, **given)
    return list(sweep_configurations(case, parse_topology(topology), given=set(given)))


def test_sweeps():
    cases = swept("decoder", "v5p:4x4x4")
    assert len({str(case) for case in cases}) == len(cases) == 4 * 3 * 3
    assert all(math.prod(case.mesh.values()) == 64 for case in cases)
    assert {case.batch_size for case in cases} == {64, 128, 256}
    played = swept("rollout", "v5p:4x4x4")
    assert {(case.layout, case.games) for case in played} == {
        ("latency", 8),
        ("latency", 32),
        ("throughput", 64),
        ("throughput", 256),
    }


def test_sweeps_keep_what_was_given():
    mesh = ("fsdp=8",)
    cases = swept("decoder", "v5p:4x4x4", mesh=mesh)
    assert {str(case.mesh) for case in cases} == {str(axes(data=8, fsdp=8))}
    assert len(cases) == 3 * 3
    cases = swept("decoder", "v5p:4x4x4", batch_size=128, remat="dots")
    assert {(case.batch_size, case.remat) for case in cases} == {(128, "dots")}
    assert len(cases) == 4
    cases = swept("decoder", "v5p:4x4x4", accumulate=2)
    assert {(case.batch_size, case.accumulate) for case in cases} == {(128, 2), (256, 2), (512, 2)}
    assert {case.layout for case in swept("mllm", "v5p:4x4x4", layout="sharded")} == {"sharded"}
    assert {case.games for case in swept("rollout", "v5p:4x4x4", games=64)} == {64}
    played = swept("rollout", "v5p:4x4x4", layout="latency", part="vae")
    assert {(case.layout, case.part) for case in played} == {("latency", "vae")}


def near(stage: StageName, topology: str, **given) -> list[tuple[Configuration, str]]:
    case = configure(stage, topology, **given)
    found = nearest_configurations(case, parse_topology(topology))
    assert case not in [other for other, slice_ in found if str(slice_) == topology]
    assert len({str(pair) for pair in found}) == len(found), "none is compiled twice"
    return [(other, str(slice_)) for other, slice_ in found]


def test_what_is_near_a_stage():
    """On the smallest batch with weights shared by all, only a larger slice is left."""
    found = near("decoder", "v5e:4x4")
    assert [slice_ for _, slice_ in found] == ["v5e:4x8", "v5e:8x8"]
    assert found[0][0].mesh == axes(fsdp=32)
    assert found[0][0].batch_size == 32
    found = near("decoder", "v5e:2x4", remat="none", mesh=("fsdp=2",), batch_size=16)
    here = [
        (c.mesh["fsdp"], c.remat, c.batch_size, c.accumulate) for c, at in found if at == "v5e:2x4"
    ]
    assert here == [
        (2, "full", 16, 1),
        (2, "full", 16, 2),
        (4, "full", 16, 2),
        (8, "full", 16, 2),
        (8, "full", 8, 1),
    ]


def test_what_is_near_a_game():
    found = near("rollout", "v5e:1x1")
    assert [(c.layout, c.games, at) for c, at in found] == [("latency", 1, "v5e:2x4")]
    found = near("rollout", "v5e:4x4", layout="throughput", games=256)
    assert [(c.layout, c.games, at) for c, at in found[:4]] == [
        ("throughput", 64, "v5e:4x4"),
        ("throughput", 16, "v5e:4x4"),
        ("latency", 256, "v5e:4x4"),
        ("latency", 2, "v5e:4x4"),
    ]


def test_larger_slices():
    for text, larger in (("v5e:2x2", ["v5e:2x4", "v5e:4x4"]), ("v5p:8x16x16", [])):
        assert [str(t) for t in larger_slices(parse_topology(text))] == larger


def plan_with(monkeypatch, *, fits) -> list[str]:
    """Compiles nothing: `fits(case)` says which programs would fit; returns what was asked for."""
    asked: list[str] = []

    def compile_program(case: Configuration, topology) -> Estimate:
        asked.append(f"{case} on {topology}")
        if not fits(case):
            raise TooLargeError(30.0, 16.9)
        return estimate_of(case, str(topology))

    monkeypatch.setattr(plan_command, "compile_program", compile_program)
    return asked


NEAR = ["plan", "--stage", "decoder", "--topology", "v5e:4x4", "--batch", "32"]


def test_the_nearest_that_fits_is_reported(monkeypatch, capsys):
    asked = plan_with(monkeypatch, fits=lambda case: case.accumulate == 2)
    assert main([*NEAR, "--json"]) == 2
    reported = capsys.readouterr()
    assert len(asked) == 2
    assert f"the nearest found to fit is {asked[1]}: peak 3.0 GB" in reported.err
    found = json.loads(reported.out)
    assert (found["fits"], found["needed_gb"], found["plans"]) == (False, 30.0, [])
    assert found["nearest"]["accumulate"] == 2
    assert found["nearest"]["mesh"] == axes(fsdp=16)


def test_nothing_near_fits(monkeypatch, capsys):
    asked = plan_with(monkeypatch, fits=lambda case: False)
    assert main([*NEAR, "--json"]) == 2
    reported = capsys.readouterr()
    others = len(asked) - 1
    assert len(set(asked)) == len(asked), "none is compiled twice"
    assert f"nor does any of {others} others: {'; '.join(asked[1:])}" in reported.err
    assert json.loads(reported.out)["nearest"] is None


def test_one_object_for_programs(monkeypatch, capsys):
    plan_with(monkeypatch, fits=lambda case: True)
    assert main([*NEAR, "--json", "--price", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    (record,) = found["plans"]
    assert (found["fits"], found["needed_gb"], found["nearest"]) == (True, None, None)
    assert (record["stage"], record["size"], record["layout"]) == ("decoder", "full", "sharded")
    assert (record["batch_size"], record["remat"], record["accumulate"]) == (32, "full", 1)
    assert record["mesh"] == axes(fsdp=16)
    assert record["command"].startswith("animegamer train decoder --size full --layout sharded")
    assert "games" not in record
    recipe = find_stage("decoder", size="full")[1]
    hours = recipe.steps * recipe.batch_size / 32 * 2.0 * 16 / 3600
    assert record["recipe"]["chip_hours"] == pytest.approx(hours)
    assert record["recipe"]["cost"] == pytest.approx(2 * hours)
    words = ["plan", "--stage", "rollout", "--topology", "v5e:2x4", "--json", "--price", "3"]
    assert main(words) == 0
    (record,) = json.loads(capsys.readouterr().out)["plans"]
    assert (record["games"], record["part"], record["denoising_steps"]) == (1, "turn", 50)
    assert "batch_size" not in record
    assert record["thousand_turns"]["cost"] == pytest.approx(3 * 1000 * 2.0 * 8 / 3600)


def test_a_sweep_says_the_best(monkeypatch, capsys):
    plan_with(monkeypatch, fits=lambda case: case.remat != "none")
    assert main([*NEAR[:-2], "--sweep", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    speeds = [record["samples_per_second"] for record in plans]
    assert len(plans) == 5
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == 4 * 16 / 2.0
    assert all(record["remat"] != "none" for record in plans)
    plan_with(monkeypatch, fits=lambda case: False)
    assert main([*NEAR[:-2], "--sweep"]) == 2
    assert "none of 27 programs fits" in capsys.readouterr().err


def test_what_was_not_counted_is_reported():
    case = configure("decoder", "v5e:4x4")
    e = estimate_of(
        case,
        "v5e:4x4",
        sample_tokens=100,
        unknown_loops=1,
        unknown_instructions=40.0,
        unknown_kernels={"gmm": 1200.0},
    )
    reported = "\n".join(describe_estimate(case, e, price=None))
    assert "0.5 clips a second and chip, 8 in all, 800 tokens; 25% of the peak" in reported
    assert "1 loops of unknown length were counted once" in reported
    assert "40 runs of instructions have no schedule, only an earlier estimate" in reported
    assert "kernels whose FLOPs are unknown: gmm x 1,200" in reported
    assert f"  {case.command}" in reported


def kernel(name: str, heads: int, width: int, length: int = 1024) -> Kernel:
    part = Array("bf16", (1, heads, width, length), True)
    schedule = Array("s8", (1, 7, 4), True)
    return Kernel(name, (schedule, part, part, part), (part,))


def test_ironwood_has_two_devices_on_a_chip():
    topology = parse_topology("tpu7x:2x2x1")
    assert (topology.num_chips, topology.num_devices) == (4, 8)
    assert configure("rollout", "tpu7x:2x2x1").mesh == axes(fsdp=2, context=4)
    assert configure("decoder", "tpu7x:2x2x1").mesh == axes(fsdp=8)


def test_slices_share_the_batch():
    two = parse_topology("v5p:4x4x4", slices=2)
    assert (str(two), two.name, two.num_chips) == ("2 x v5p:4x4x4", "v5p:4x4x4", 128)
    assert make_configuration("decoder", two).mesh == axes(data=8, fsdp=16)
    small = parse_topology("v5e:2x2", slices=2)
    assert make_configuration("decoder", small).mesh == axes(data=2, fsdp=4)
    with pytest.raises(UserError, match="--slices 2: they share the batch alone"):
        make_configuration("decoder", two, mesh=("fsdp=128",))
    with pytest.raises(UserError, match="--slices 0: expected 1 or more"):
        parse_topology("v5p:4x4x4", slices=0)
    case = make_configuration("decoder", two)
    e = estimate_of(case, str(two), gigabytes_between_slices=0.05)
    e = dataclasses.replace(e, seconds=dataclasses.replace(e.seconds, between_slices=0.008))
    assert e.seconds.total == pytest.approx(2.008)
    reported = "\n".join(describe_estimate(case, e, price=None))
    assert "+ between slices 0.008 (0.05 GB)" in reported


def test_a_student_s_turn():
    case = configure("rollout", "v6e:2x4", student=True)
    assert (case.denoising_steps, case.student) == (4, True)
    assert "student of 4 steps" in str(case)
    assert play_plan("latency", guided=False).of("dit")["act_length"] == ("fsdp", "context")
    assert play_plan("latency", guided=True) is PLANS["latency"]
    rows = (2, 0) * 5
    case = configure("rollout", "v6e:2x4", rows=rows)
    assert (case.denoising_steps, case.rows) == (10, rows)
    assert "10 evaluations of a row" in str(case)
    with pytest.raises(UserError, match="--skip: steps to skip of 10, found --denoising-steps 4"):
        configure("rollout", "v6e:2x4", rows=rows, denoising_steps=4)
    with pytest.raises(UserError, match="--skip: a student skips no steps"):
        configure("rollout", "v6e:2x4", rows=rows, student=True)
    with pytest.raises(UserError, match="--skip is an option of play"):
        configure("decoder", "v6e:2x4", rows=rows)


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


BUNDLES = """LB: loop body
     0   :  { %4 = smov 0 }
   0x1 LB: > { %5 = sadd.s32 1, %6 /* iteration index, stage = 1 */ }
   0x2   : > { %7 = sbr.rel (%p1) target = $region3 }
   0x3   :  {}
   0x4 LB: >> { %8 = vld [vmem:%9] }
   0x5   : >> { %10 = sbr.rel (!%p2) target = $region4 }
   0x6 PF: > { %p3 = scmp.ge.s32.totalorder %s1_s2, 12 /* loop exit test */ }
   0x7   :  { %11 = sbr.rel (!%p3) target = $region5 }
   0x8   :  {} /* exit bundle: %fusion.7 = fusion(%a) */
"""


def test_schedules_of_a_program(tmp_path):
    """A loop of ten blocks, two trips of which fill and empty it; one inside of unknown length."""
    (tmp_path / "123-fusion.7-01-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "123-fusion.7-00-schedule-analysis_final_bundles.txt").write_text("total: 9")
    assert read_schedules(tmp_path) == {"fusion.7": Schedule(63.0, 1)}
    assert str(tmp_path) in compiler_flags(tmp_path)


def test_attention_by_arithmetic():
    """Two products of 1024 x 1024 scores and heads of 64, which fill half of a unit of 128."""
    one = kernel("splash_mha_fwd_no_residuals", 3, 64)
    flops, width = attention_flops(one) or (0, 0)
    assert (flops, width) == (2 * 2 * 3 * 1024 * 1024 * 64, 64)
    backward = attention_flops(kernel("splash_mha_dkv_segmented", 3, 64))
    assert backward == (flops * 5 / 2, 64)
    assert attention_flops(kernel("another_kernel", 3, 64)) is None
    cost = Cost()
    cost.kernels[one] += 10
    cost.kernels[kernel("another_kernel", 3, 64)] += 5
    assert unknown_kernels(cost) == {"another_kernel": 5}
    assert kernel_flops(cost) == 10 * flops
    assert attention_flops(kernel("jvp_flash_attention_", 3, 64)) == (flops, 64)
    backward = attention_flops(kernel("transpose_jvp_flash_backward__", 3, 64))
    assert backward == (flops * 5 / 2, 64)


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


def turn_program(case: Configuration, history: Literal["predicted", "shown"]) -> Program:
    return rollout_program(
        mesh=make_mesh(case.mesh),
        plan=PLANS[case.layout],
        size="toy",
        games=case.games,
        steps=1,
        history=history,
    )


def test_a_turn_that_sees_what_was_shown_takes_more_weights():
    """Those of CLIP and E_a."""
    case = configure("rollout", "v5e:2x4", size="toy", history="shown")
    assert "history shown" in str(case)
    assert case.fields()["history"] == "shown"
    programs = [turn_program(case, history) for history in ("shown", "predicted")]
    count = [sum(x.size for x in jax.tree.leaves(p.arguments[0])) for p in programs]
    config = SIZES["toy"]()
    assert config.clip is not None
    assert config.encoder is not None
    sizes = [abstract_params("clip", config.clip), abstract_params("encoder", config.encoder)]
    assert count[0] - count[1] == sum(x.size for shapes in sizes for x in shapes.values())


@pytest.mark.parametrize(
    ("layout", "history"),
    [*((layout, "shown") for layout in LAYOUTS["play"]), ("latency", "predicted")],
)
def test_a_turn_can_be_lowered_for_a_mesh(layout, history):
    """Only where what was shown is seen, CLIP gets its pixels."""
    case = configure("rollout", "v5e:2x4", size="toy", layout=layout, history=history)
    mesh = make_mesh(case.mesh)
    text = turn_program(case, history).lower(mesh, PLANS[layout]).as_text()
    config = SIZES["toy"]().clip
    assert config is not None
    side = config.image_size
    pixels = f"tensor<{case.games}x{side}x{side}x3xf32>"
    assert (pixels in text) == (history == "shown")


def test_the_arguments_of_a_turn():
    """Weights of eight bits take half the memory; a student has no unconditional row."""
    case = configure("rollout", "v5e:2x4", size="toy", student=True, int8=True)
    assert "language model int8" in str(case)
    mesh = make_mesh(case.mesh)

    def networks(**changes):
        plan = play_plan("latency", guided=True)
        return rollout_program(mesh=mesh, plan=plan, size="toy", **changes).arguments[0]

    def num_bytes(network) -> int:
        leaves = jax.tree.leaves(nnx.state(network))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    small, whole = networks(student=True, int8=True), networks()
    assert small.unconditional is None
    assert whole.unconditional is not None
    assert num_bytes(small.mllm) < 0.6 * num_bytes(whole.mllm)
    assert num_bytes(small.dit) == num_bytes(whole.dit)
    block = small.mllm.mistral.layers.blocks
    steps, kernel = (x.get_value().sharding.spec for x in (block.gate.steps, block.gate.kernel))
    assert tuple(steps) == tuple(kernel)[::2]


@needs_libtpu
@pytest.mark.parametrize("stage", [pytest.param("decoder", marks=pytest.mark.slow), "rollout"])
def test_a_real_compilation(stage, capfd):
    """At toy size, against arithmetic; the same code that plans the full one."""
    words = ["plan", "--stage", stage, "--topology", "v5e:2x4", "--size", "toy", "--json"]
    steps = ["--denoising-steps", "2", "--part", "decoder"] if stage == "rollout" else []
    assert main([*words, *steps]) == 0
    found = json.loads(capfd.readouterr().out)
    (record,) = found["plans"]
    assert found["fits"]
    assert found["libtpu"] == metadata.version("libtpu")
    assert math.prod(record["mesh"].values()) == 8
    assert record["memory"]["fits"]
    seconds = record["seconds"]
    assert record["memory"]["chip"] == pytest.approx(15.75 * 2**30 / 1e9)
    assert record["unknown_loops"] == 0
    assert record["unknown_kernels"] == {}
    one_link = sum(record["collectives"].values()) / 45
    assert seconds["collectives_over_one_link"] == pytest.approx(one_link)
    assert 0 < seconds["collectives"] <= 4 * one_link
    assert all(size > 0 for size in record["collectives"].values())
    parts = ("products", "other", "collectives", "kernels", "between_slices")
    assert min(seconds["products"], seconds["other"]) > 0
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in parts))
    if stage == "decoder":
        products = record["sample_flops"] * record["batch_size"] / 8
        most = 1.5  # the forward pass once more, and what the arithmetic leaves out
        assert any(name.startswith("reduce-scatter") for name in record["collectives"])
    else:
        config = SIZES["toy"]().dit
        assert config is not None
        dit = cast(DiT, abstract_network("dit", config))
        forward = transformer_flops(dit, trained="all") / 3
        products, most = 2 * 2 * forward / 8, 1.3  # two steps of two rows
    assert products <= record["flops"] <= most * products
    peak = 197e12 * seconds["total"]
    useful = products if stage == "decoder" else record["flops"]
    assert record["peak_share"] == pytest.approx(useful / peak)


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
