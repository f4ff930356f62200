"""The training step: what it trains, what it leaves alone, and that it is one function anywhere."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_stage import (
    CONFIG,
    RECIPE,
    TinyStage,
    arrays,
    make_networks,
    make_stage,
    one_device,
)

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    abstract_network,
    flat_params,
    make_network,
)
from animegamer_jax.configs import make_toy
from animegamer_jax.sharding import make_mesh
from animegamer_jax.train.optimizer import (
    average_decay,
    decays,
    make_optimizer,
    make_schedule,
    parameter_path,
)
from animegamer_jax.train.stages.recipe import OptimizerConfig
from animegamer_jax.train.step import (
    TrainState,
    averaged,
    first_bad_tensor,
    make_state,
    make_train_step,
    split_networks,
    state_shardings,
)

KEY = jax.random.key(3)


def batches(stage: TinyStage, count: int) -> list[dict[str, np.ndarray]]:
    samples = stage.samples((), split="train")
    size = stage.recipe.batch_size
    return [
        jax.tree.map(lambda *x: np.stack(x), *[samples[i * size + j] for j in range(size)])
        for i in range(count)
    ]


def run(stage: TinyStage, count: int, *, mesh: jax.sharding.Mesh | None = None) -> Any:
    """The state after some steps, the metrics of each, and the compiled function."""
    mesh = one_device() if mesh is None else mesh
    optimizer = make_optimizer(stage.recipe.optimizer, steps=stage.recipe.steps)
    state = make_state(make_networks(), stage, optimizer, mesh=mesh)
    step = make_train_step(stage, optimizer, shardings=state_shardings(state, mesh))
    found = []
    with jax.set_mesh(mesh):
        for batch in batches(stage, count):
            state, metrics = step(state, batch, KEY)
            found.append(jax.device_get(metrics))
    return state, found, step


@pytest.fixture(scope="module")
def three_steps() -> Any:
    return run(make_stage(noise=0.1), 3)


@pytest.fixture(scope="module")
def two_steps() -> Any:
    """Without an average, and without anything random."""
    return run(make_stage(ema_decay=None), 2)


# --- what is trained ------------------------------------------------------------------------


def test_trained_weights_move_and_frozen_ones_do_not(three_steps):
    state, _, _ = three_steps
    _, params, frozen = split_networks(make_networks(), make_stage())
    before, after = arrays(params), arrays(state.params)
    assert before.keys() == after.keys()
    assert {name.split(".")[1] for name in after} == {"text", "text_norm"}
    for name, value in after.items():
        assert not np.array_equal(before[name], value), name
    before, after = arrays(frozen), arrays(state.frozen)
    assert {name.split(".")[1] for name in after} == {"image", "image_norm", "output_norm"}
    for name, value in after.items():
        np.testing.assert_array_equal(before[name], value)
    assert int(state.step) == 3


def test_one_compilation(three_steps):
    assert three_steps[2]._cache_size() == 1


def test_frozen_weights_have_the_recipes_format_and_trained_ones_are_float32():
    stage = make_stage(dtype="bfloat16")
    optimizer = make_optimizer(RECIPE.optimizer, steps=6)
    networks = make_networks()
    networks["encoder"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), networks["encoder"])
    state = make_state(networks, stage, optimizer, mesh=one_device())
    assert {x.dtype for x in jax.tree.leaves(state.frozen)} == {jnp.dtype("bfloat16")}
    trained = (state.params, state.ema, state.opt_state)
    assert {x.dtype for x in jax.tree.leaves(trained)} <= {jnp.dtype("float32"), jnp.dtype("int32")}


def test_a_stage_that_trains_nothing():
    class Nothing(TinyStage):
        def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
            return False

    with pytest.raises(
        ValueError, match=r"stage tiny: none of the weights of \['encoder'\] is trained"
    ):
        split_networks(make_networks(), Nothing(RECIPE, CONFIG, make_stage().protocol))


# --- the optimizer --------------------------------------------------------------------------


def test_a_step_by_hand():
    """AdamW's first step, written out: the clipped gradient's sign, nearly, and the decay."""
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.01, clip_norm=1.0)
    params = {"a": {"kernel": jnp.full((2, 2), 2.0)}, "b": {"bias": jnp.full((2,), 2.0)}}
    grads = jax.tree.map(lambda x: jnp.full_like(x, 3.0), params)
    optimizer = make_optimizer(config, steps=1)
    updates = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(grads, params)
    np.testing.assert_allclose(updates["a"]["kernel"], -0.1 * (1 + 0.01 * 2.0), rtol=1e-5)
    np.testing.assert_allclose(updates["b"]["bias"], -0.1, rtol=1e-5)


def test_a_step_of_muon():
    """Stacked matrices become orthogonal ones of AdamW's size; all else has AdamW's step."""
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.0, b2=0.9, kind="muon")
    mllm = make_network("mllm", make_toy().mllm, rngs=nnx.Rngs(0))
    params = nnx.state({"mllm": mllm}, nnx.Param)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)

    def step(config: OptimizerConfig) -> Any:
        optimizer = make_optimizer(config, steps=1)
        state = jax.jit(optimizer.init)(params)
        updates, after = jax.jit(optimizer.update)(grads, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        return flat_params(updates)

    found, adamw = step(config), step(dataclasses.replace(config, kind="adamw"))
    matrices = [name for name in found if name.endswith("kernel") and "head" not in name]
    assert len(matrices) == 4 + 7  # of the resamplers and of a layer
    for name in matrices:
        update = np.asarray(found[name])
        sizes = np.linalg.svd(update, compute_uv=False) / (
            0.1 * 0.2 * max(update.shape[-2:]) ** 0.5
        )
        # Five steps of Newton and Schulz leave the smallest singular values below one.
        assert np.quantile(sizes, 0.1) > 0.5, name
        assert sizes.max() < 1.3, name
    for name in found.keys() - set(matrices):
        np.testing.assert_array_equal(found[name], adamw[name])


def test_muon_takes_stacks_of_matrices_and_no_convolution():
    config = OptimizerConfig(learning_rate=0.1, kind="muon")

    def matrices(name: Any) -> set[str]:
        params = nnx.state(abstract_network(name, getattr(make_toy(), name)), nnx.Param)
        adamw = jax.eval_shape(make_optimizer(config, steps=1).init, params)[1]["others"]
        return flat_params(params).keys() - flat_params(adamw.mu).keys()

    found = matrices("dit")
    assert {"layers.blocks.qkv.kernel", "patch_in.kernel"} <= found
    assert all(path.endswith("kernel") for path in found)
    assert not matrices("vae")


def test_muons_state_is_sharded_like_the_weights():
    config = OptimizerConfig(learning_rate=0.1, kind="muon")
    mllm = abstract_network("mllm", make_toy().mllm)
    params = nnx.state({"mllm": mllm}, nnx.Param)
    state = jax.eval_shape(make_optimizer(config, steps=1).init, params)
    mesh = make_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    split = [
        sharding
        for sharding in jax.tree.leaves(state_shardings(state, mesh))
        if not sharding.is_fully_replicated
    ]
    weights = jax.tree.leaves(state_shardings(params, mesh))
    whole = sum(not sharding.is_fully_replicated for sharding in weights)
    matrices = 4 + 7  # with one moment, AdamW's have two
    assert len(split) == matrices + 2 * (whole - matrices)


def test_what_decays():
    """By name, over every network: matrices and convolutions, and nothing of one dimension."""
    for name in NETWORKS:
        config = getattr(make_toy(), "dit" if name == "picture" else name)
        state = nnx.state(abstract_network(name, config), nnx.Param)
        flat, _ = jax.tree_util.tree_flatten_with_path(decays(state))
        found = {parameter_path(path): pulled for path, pulled in flat}
        assert found.keys() == flat_params(state).keys()
        pulled = {path for path in found if found[path]}
        assert pulled
        for path in found:
            last = path.rpartition(".")[2]
            free = ("bias", "scale", "embedding", "class_embedding", "position_embedding")
            free = (*free, "positions", "logit_scale", "relative_bias")
            assert (path in pulled) != (last in free), path


def test_courses_of_the_learning_rate():
    constant = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4), steps=10)
    rates = [float(constant(i)) for i in range(10)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.5, *[2.0] * 7])
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=2, decay="cosine", final_fraction=0.1)
    rates = [float(make_schedule(config, steps=10)(i)) for i in range(12)]
    np.testing.assert_allclose(rates[:2], [1.0, 2.0])
    assert all(a > b for a, b in itertools.pairwise(rates[1:10]))
    np.testing.assert_allclose(rates[5], 0.2 + 1.8 * 0.5)  # half-way
    np.testing.assert_allclose(rates[9:], 0.2, rtol=1e-6)


def test_the_average_starts_as_the_weights_and_follows():
    stage = make_stage(ema_decay=0.5)
    optimizer = make_optimizer(RECIPE.optimizer, steps=6)
    mesh = one_device()
    state = make_state(make_networks(), stage, optimizer, mesh=mesh)
    expected = arrays(state.ema)
    for name, value in arrays(state.params).items():
        np.testing.assert_array_equal(expected[name], value)
    step = make_train_step(stage, optimizer, shardings=state_shardings(state, mesh))
    with jax.set_mesh(mesh):
        for number, batch in enumerate(batches(stage, 3)):
            state, _ = step(state, batch, KEY)
            decay = min(0.5, (1 + number) / (10 + number))
            for name, value in arrays(state.params).items():
                expected[name] = decay * expected[name] + (1 - decay) * value
    for name, value in arrays(state.ema).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7)
    assert float(average_decay(0.999, jnp.int32(100_000))) == np.float32(0.999)


def test_without_an_average_the_trained_weights_are_the_result(two_steps):
    state, _, _ = two_steps
    assert state.ema is None
    result = arrays(nnx.state(averaged(state)["encoder"], nnx.Param))
    for name, value in arrays(state.params).items():
        np.testing.assert_array_equal(result[name.removeprefix("encoder.")], value)


# --- the numbers ----------------------------------------------------------------------------


def test_metrics(three_steps):
    state, found, _ = three_steps
    assert set(found[0]) == {
        *("loss", "text_error", "grad_norm", "update_norm", "param_norm"),
        *("learning_rate", "finite"),
    }
    assert [bool(m["finite"]) for m in found] == [True] * 3
    np.testing.assert_allclose([m["learning_rate"] for m in found], [0.005, 0.01, 0.01])
    norm = float(optax.tree.norm(state.params))
    np.testing.assert_allclose(found[-1]["param_norm"], norm, rtol=1e-5)


def test_the_gradient_is_that_of_the_mean_loss(two_steps):
    stage = make_stage()
    graphdef, params, frozen = split_networks(make_networks(), stage)
    (batch,) = batches(stage, 1)

    def loss(params: Any) -> jax.Array:
        networks = nnx.merge(graphdef, params, frozen)
        return stage.loss(networks, jax.tree.map(jnp.asarray, batch), KEY)[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    norm = float(optax.tree.norm(grads))
    _, found, _ = two_steps
    np.testing.assert_allclose(found[0]["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(found[0]["grad_norm"], norm, rtol=1e-5)


def test_a_batch_in_parts_gives_the_whole_batchs_step(two_steps):
    whole, expected, _ = two_steps
    parts, found, step = run(make_stage(accumulate=4, ema_decay=None), 2)
    assert step._cache_size() == 1
    for a, b in zip(expected, found, strict=True):
        for name in ("loss", "text_error", "grad_norm", "param_norm"):
            np.testing.assert_allclose(b[name], a[name], rtol=3e-6)  # float32 sums
    expected = arrays(whole.params)
    for name, value in arrays(parts.params).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_eight_devices_give_one_devices_losses(three_steps, shape):
    mesh = make_mesh(shape)
    state, found, step = run(make_stage(noise=0.1), 3, mesh=mesh)
    assert step._cache_size() == 1
    for a, b in zip(three_steps[1], found, strict=True):
        for name in a:
            np.testing.assert_allclose(b[name], a[name], rtol=1e-5)
    kernel = state.params["encoder"]["text"]["output"]["kernel"]
    assert kernel[...].sharding.shard_shape(kernel.shape)[0] * mesh.shape["fsdp"] == 32
    moment = state.opt_state[1].mu["encoder"]["text"]["output"]["kernel"]
    assert moment[...].sharding == kernel[...].sharding


def test_the_draws_of_a_step_belong_to_its_number(three_steps):
    """Another key, and the same key one step later, give other losses."""
    stage = make_stage(noise=0.1)
    optimizer = make_optimizer(RECIPE.optimizer, steps=6)
    mesh = one_device()
    (batch,) = batches(stage, 1)
    losses = []
    state = make_state(make_networks(), stage, optimizer, mesh=mesh)
    step = three_steps[2]
    for number in (0, 0, 1):
        copy = jax.tree.map(jnp.copy, state)._replace(step=jnp.int32(number))
        with jax.set_mesh(mesh):
            losses.append(float(step(copy, batch, KEY)[1]["loss"]))
    assert losses[0] == losses[1] == float(three_steps[1][0]["loss"])
    assert losses[0] != losses[2]


# --- what is not finite ---------------------------------------------------------------------


def broken(state: TrainState, where: str) -> TrainState:
    """A state with a NaN in one weight."""
    state = jax.tree.map(jnp.copy, state)
    part = getattr(state, where)["encoder"]["text" if where == "params" else "image"]
    part["input"]["bias"].set_value(part["input"]["bias"][...].at[0].set(jnp.nan))
    return state


class Overflowing(TinyStage):
    """Its loss is finite, its gradient is not: a square root at zero."""

    def loss(self, networks: Any, batch: Any, key: jax.Array) -> Any:
        loss, parts = super().loss(networks, batch, key)
        bias = networks["encoder"].text.output.bias[...]
        return loss + jnp.sqrt(jnp.abs(bias - jax.lax.stop_gradient(bias))).sum(), parts


class BadPart(TinyStage):
    def loss(self, networks: Any, batch: Any, key: jax.Array) -> Any:
        loss, parts = super().loss(networks, batch, key)
        part = jnp.log(-loss)
        return loss + part, {**parts, "entropy": part}


@pytest.fixture(scope="module")
def tiny_step() -> Any:
    """The compiled step of the tiny stage."""
    return run(make_stage(), 0)[2]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("batch", "the batch's text"),
        ("params", "the trained weight encoder.text.input.bias"),
        ("frozen", "the frozen weight encoder.image.input.bias"),
        (BadPart, "the loss's part entropy"),
        (Overflowing, "the gradient of encoder.text.output.bias"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_culprit(tiny_step, kind, named):
    stage_class = kind if isinstance(kind, type) else TinyStage
    stage = stage_class(dataclasses.replace(RECIPE), CONFIG, make_stage().protocol)
    optimizer = make_optimizer(RECIPE.optimizer, steps=6)
    mesh = one_device()
    state = make_state(make_networks(), stage, optimizer, mesh=mesh)
    if kind in ("params", "frozen"):
        state = broken(state, kind)
    (batch,) = batches(stage, 1)
    if kind == "batch":
        batch["text"][2, 1, 0] = np.inf
    before = arrays(state._replace(graphdef=None))
    with jax.set_mesh(mesh):
        step = tiny_step
        if isinstance(kind, type):
            step = make_train_step(stage, optimizer, shardings=state_shardings(state, mesh))
        state, metrics = step(state, batch, KEY)
        assert not metrics["finite"]
        for name, value in arrays(state._replace(graphdef=None)).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        assert first_bad_tensor(stage, state, batch, KEY) == named
