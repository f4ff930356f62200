"""What is planned: by default, as given, swept over, and near a program that does not fit."""

import dataclasses
import math

import pytest
from planning import axes, configure, estimate_of

from animegamer_jax.errors import UserError
from animegamer_jax.plan.configurations import (
    LAYOUTS,
    Configuration,
    StageName,
    larger_slices,
    make_configuration,
    nearest_configurations,
    sweep_configurations,
)
from animegamer_jax.plan.report import describe_estimate
from animegamer_jax.plan.topology import parse_topology
from animegamer_jax.sharding import PLANS, play_plan
from animegamer_jax.train.command import Options
from animegamer_jax.train.mesh import mesh_shape
from animegamer_jax.train.registry import find_stage


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


def test_the_command_that_trains_what_was_planned():
    """Its options are those of `animegamer train`."""
    case = configure("decoder", "v5p:4x4x4", mesh=("fsdp=8", "context=2"), batch_size=64)
    command = (
        "animegamer train decoder --size full --layout sharded --fsdp 8 --context 2 "
        "--steps 20000 --batch-size 64 --remat full --accumulate 1 --trained recipe "
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
    recipe = find_stage("warmup", size="full")[1]
    of_the_recipe = configure("warmup", "v5p:4x4x4", batch_size=recipe.batch_size * 4).command
    assert f"--steps {recipe.steps // 4} " in str(of_the_recipe)


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
