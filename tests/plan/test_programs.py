"""A turn's program: its arguments, and that it can be lowered for a mesh."""

import dataclasses
from typing import Literal

import jax
import pytest
from flax import nnx
from planning import configure

from animegamer_jax.bundle.bundle import abstract_params
from animegamer_jax.configs import SIZES
from animegamer_jax.plan.configurations import LAYOUTS, Configuration
from animegamer_jax.plan.programs import Program, rollout_program, stage_program
from animegamer_jax.sharding import PLANS, make_mesh, play_plan


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


def test_the_adaptation_of_a_decoder_that_gets_a_memory():
    """Its positions are trained, and samples have past frames."""
    mesh, plan = make_mesh(configure("adapt", "v5e:2x4", size="toy").mesh), PLANS["sharded"]
    program = stage_program("adapt", mesh=mesh, plan=plan, size="toy", memory=2)
    state, batch, _ = program.arguments
    dit = SIZES["toy"]().dit
    assert dit is not None
    remembers = dataclasses.replace(dit, memory=batch.past_moments.shape[1])
    assert remembers.memory == 2
    paths = jax.tree_util.tree_flatten_with_path(state.params)[0]
    found = [leaf.shape for path, leaf in paths if "memory_positions" in str(path)]
    assert found == [(remembers.num_memory_tokens, dit.hidden_size)]


def test_the_arguments_of_a_turn():
    """Weights of eight bits take half the memory; a student has no unconditional row.

    Its modulation is a table, which is smaller than the weights that it was computed with.
    """
    case = configure("rollout", "v5e:2x4", size="toy", student=True, int8=True)
    assert "language model int8" in str(case)
    mesh = make_mesh(case.mesh)

    def networks(**changes):
        plan = play_plan("latency", guided=True)
        return rollout_program(mesh=mesh, plan=plan, size="toy", **changes).arguments[0]

    def num_bytes(network) -> int:
        leaves = jax.tree.leaves(nnx.state(network))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    small, whole = networks(student=True, int8=True, steps=4), networks()
    assert small.unconditional is None
    assert whole.unconditional is not None
    assert num_bytes(small.mllm) < 0.6 * num_bytes(whole.mllm)
    assert num_bytes(networks(int8=True).dit) == num_bytes(whole.dit)
    table, modulation = small.dit.table, whole.dit.layers.blocks.modulation
    assert table.layers.shape == (*modulation.bias.shape[:1], 4 * 5, *modulation.bias.shape[1:])
    assert 2 * num_bytes(table) < num_bytes(modulation)
    replaced = (modulation, *(getattr(whole.dit, name) for name in ("time_embed", "motion_embed")))
    saved = sum(map(num_bytes, (*replaced, whole.dit.output_modulation))) - num_bytes(table)
    assert num_bytes(small.dit) == num_bytes(whole.dit) - saved
    block = small.mllm.mistral.layers.blocks
    steps, kernel = (x.get_value().sharding.spec for x in (block.gate.steps, block.gate.kernel))
    assert tuple(steps) == tuple(kernel)[::2]
