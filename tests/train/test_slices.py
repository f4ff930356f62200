"""Plans on eight simulated devices: play and training are those of one device."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from tiny_games import batch_of, make_stage, run, write_model
from tiny_sets import write_features_set

from animegamer_jax import sharding
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.errors import UserError
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved_game import Game
from animegamer_jax.sharding import PLANS, make_mesh, use_plan
from animegamer_jax.train.registry import find_stage

INSTRUCTIONS = [
    "Character: Qiqi; Motion: quickly flying on broomstick; Background: day sky.",
    "Motion: gently wave.",
    "Character: Tombo; Motion: gently turn head; Background: day town.",
]
STEPS = 3


def play(player: Player, games: int = 1) -> list:
    window, outputs = player.start(games), []
    for turn, text in enumerate(INSTRUCTIONS, 1):
        window, output = player.play_turn(
            window, [text] * games, seeds=list(range(games)), turn=turn
        )
        outputs.append(output)
    return outputs


@pytest.fixture(scope="module")
def alone(tiny_bundle, shown_bundle) -> Callable[[str], list]:
    """The turns of a model on one device, played once."""
    paths = {"tiny_bundle": tiny_bundle, "shown_bundle": shown_bundle}
    return functools.cache(
        lambda name: play(Player.from_bundle(Bundle.open(paths[name]), steps=STEPS))
    )


def assert_same(found, expected, *, game: int, shown: bool) -> None:
    """Where a pixel rounds to the next level, later turns see of it what was shown."""
    atol, share = (1e-2, 0.01) if shown else (1e-4, 0.002)
    np.testing.assert_array_equal(found.states[game], expected.states[0])
    np.testing.assert_allclose(
        found.representation[game], expected.representation[0], rtol=1e-3, atol=atol
    )
    gaps = np.abs(found.frames[game].astype(int) - expected.frames[0].astype(int))
    assert gaps.max() <= 1
    assert (gaps > 0).mean() < share


@pytest.mark.parametrize("bundle", ["tiny_bundle", "shown_bundle"])
@pytest.mark.parametrize(("layout", "games"), [("latency", 1), ("throughput", 8)])
def test_a_turn_over_eight_devices(request, alone, bundle, layout, games):
    """A history of predictions or of what was shown."""
    path, alone = request.getfixturevalue(bundle), alone(bundle)
    player = Player.from_bundle(Bundle.open(path), steps=STEPS, layout=layout)
    places = {leaf.sharding.mesh.size for leaf in jax.tree.leaves(player.networks)}
    assert places == {8}
    outputs = play(player, games)
    for found, expected in zip(outputs, alone, strict=True):
        assert_same(found, expected, game=0, shown=bundle == "shown_bundle")
    assert player._turn._cache_size() == 1
    if games > 1:
        assert (outputs[0].frames[0] != outputs[0].frames[1]).any(), "another seed"


def test_a_game_over_eight_devices_is_saved_and_goes_on(tiny_bundle, tmp_path):
    lines, out = tmp_path / "lines.txt", tmp_path / "game"
    command = ["play", "--model", str(tiny_bundle), "--instructions", str(lines)]
    command += ["--out", str(out), "--steps", str(STEPS), "--layout", "latency"]
    lines.write_text("\n".join(INSTRUCTIONS[:2]))
    assert main(command) == 0
    assert set(Game.load(out).turns[1].seconds) == {"total"}
    lines.write_text("\n".join(INSTRUCTIONS))
    assert main([*command, "--resume"]) == 0
    assert len(Game.load(out).turns) == 3


def test_no_more_devices_than_the_games_need(tiny_bundle):
    open_player = functools.partial(
        Player.from_bundle, Bundle.open(tiny_bundle), layout="throughput"
    )
    player = open_player(num_games=2)
    assert player.networks.unconditional.sharding.mesh.size == 2
    with pytest.raises(UserError, match="3 games: expected a multiple of 2"):
        player.start(3)


def test_layouts_that_cannot_be(tiny_bundle):
    with pytest.raises(UserError, match="layout wide: expected one of"):
        Player.from_bundle(Bundle.open(tiny_bundle), layout="wide")
    with pytest.raises(ValueError, match="fsdp 2 x context 4: 6 devices do not divide by 8"):
        PLANS["latency"].mesh_shape(6)


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """What JAX asks of a chip when it arranges slices."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


def test_only_data_is_between_slices():
    simulated = make_mesh({"data": 4, "fsdp": 2}, slices=2).devices[:, :, 0, 0]
    assert [[d.id for d in row] for row in simulated] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mixed = [SliceDevice(id=n, slice_index=n % 2) for n in range(8)]
    array = sharding._over_slices((4, 2, 1, 1), mixed, slices=2)
    places = [{device.slice_index for device in row.flat} for row in array]
    assert places == [{0}, {0}, {1}, {1}]
    with pytest.raises(ValueError, match="data 1: expected a multiple of the 2 slices"):
        make_mesh({"fsdp": 8}, slices=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    return write_model(folder), write_features_set(folder / "features", 2)


@pytest.fixture(scope="module")
def one_device(tiny):
    """Two steps of a stage on one device, made once."""
    bundle, features = tiny
    found = {}

    def steps(name: str):
        if name not in found:
            kind, recipe = find_stage(name)
            optimizer = dataclasses.replace(recipe.optimizer, warmup_steps=0)
            if name == "distill":  # a student begins as its teacher: its first gradient is rounding
                optimizer = dataclasses.replace(optimizer, eps=1e-3)
            recipe = dataclasses.replace(recipe, batch_size=8, dtype="float32", optimizer=optimizer)
            stage = make_stage(kind, recipe, bundle)
            batch = batch_of(stage, features, 8)
            found[name] = stage, batch, run(stage, bundle, batch, steps=2)
        return found[name]

    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "shape"),
    [
        ("decoder", "sharded", {"fsdp": 4, "context": 2}),
        ("decoder", "sharded", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("decoder", "replicated", {"data": 8}),
        ("mllm", "sharded", {"data": 2, "fsdp": 4}),
        ("mllm", "replicated", {"data": 8}),
        ("decoder", "sharded", {"slices": 2, "data": 2, "fsdp": 4}),
        ("mllm", "sharded", {"slices": 2, "data": 4, "fsdp": 2}),
        ("distill", "sharded", {"data": 2, "fsdp": 4}),
    ],
)
def test_a_step_of_every_plan_is_that_of_one_device(tiny, one_device, name, plan, shape):
    """Also over two simulated slices."""
    stage, batch, (before, expected, metrics) = one_device(name)
    mesh = make_mesh({k: v for k, v in shape.items() if k != "slices"}, slices=shape.get("slices"))
    with use_plan(PLANS[plan]):
        _, found, sharded = run(stage, tiny[0], batch, steps=2, mesh=mesh)
    for a, b in zip(sharded, metrics, strict=True):
        for what in ("loss", "grad_norm", "update_norm"):
            assert a[what] == pytest.approx(b[what], rel=2e-3), what
    leaves = [jax.tree.leaves(s.params) for s in (found, expected, before)]
    moved = gap = 0.0
    for x, y, start in zip(*leaves, strict=True):
        moved += float(np.square(y - start).sum())
        gap += float(np.square(x - y).sum())
    assert 0 < gap < 0.01**2 * moved, "of the whole update"
