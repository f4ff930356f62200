"""`animegamer plan`: what is refused, and what is reported."""

import json

import pytest
from planning import axes, configure, estimate_of

from animegamer_jax.cli import main
from animegamer_jax.plan import command as plan_command
from animegamer_jax.plan.compiled.compiler import TooLargeError
from animegamer_jax.plan.compiled.estimate import Estimate
from animegamer_jax.plan.configurations import Configuration
from animegamer_jax.plan.report import describe_estimate
from animegamer_jax.train.registry import find_stage


def test_options_of_the_other_kind(capsys):
    """Both names of the batch's option."""
    for option in ("--batch", "--batch-size"):
        words = ["plan", "--stage", "rollout", "--topology", "v5e:4x4", option, "8"]
        assert main(words) == 2
        assert "--batch-size is an option of training" in capsys.readouterr().err


def test_a_price_of_nothing(capsys):
    assert main(["plan", "--stage", "mllm", "--topology", "v5e:4x4", "--price", "0"]) == 2
    assert "--price 0.0: expected a number above 0" in capsys.readouterr().err


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
    reported = capsys.readouterr()
    assert "on v5e:4x4: compiling, which takes minutes" in reported.err
    found = json.loads(reported.out)
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
