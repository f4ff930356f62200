"""Logical axes, meshes, and the same numbers on eight devices as on one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import random_leaves, tiny_config
from jax.sharding import NamedSharding, PartitionSpec
from random_modules import build

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    Bundle,
    abstract_network,
    flat_params,
)
from animegamer_jax.configs import SIZES, DiTConfig, MLLMConfig
from animegamer_jax.models.mllm import MLLM
from animegamer_jax.protocol import PAPER, SPECIAL_TOKENS, Layout, TokenIds
from animegamer_jax.sharding import (
    DEFAULT_RULES,
    MESH_AXES,
    axes,
    constrain,
    make_mesh,
    param_shardings,
    partition_spec,
    shares,
    use_rules,
)

TINY = tiny_config(400)


# --- names ----------------------------------------------------------------------------------


def test_axes_are_names_only():
    assert axes("embed", None)["out_sharding"] == ("embed", None)
    with pytest.raises(ValueError, match="unknown logical axis 'embd'"):
        axes("embd")


def test_partition_spec():
    assert partition_spec(("embed", "mlp")) == PartitionSpec("fsdp", "tensor")
    batch = PartitionSpec(("data", "fsdp"), "context", None)
    assert partition_spec(("act_batch", "act_length", None)) == batch
    assert partition_spec(()) == PartitionSpec()
    with pytest.raises(KeyError):
        partition_spec(("nowhere",))


def test_shares():
    assert shares("act_batch", "act_length") == 1  # outside a mesh
    with jax.set_mesh(make_mesh({"data": 2, "fsdp": 2, "context": 2})):
        assert shares("act_batch") == 4
        assert shares("act_batch", "act_length") == 8
        assert shares("layers", "mlp") == shares() == 1


@pytest.mark.parametrize("names", [("embed", "embed"), ("act_batch", "embed"), ("mlp", "heads")])
def test_two_dimensions_on_one_mesh_axis(names):
    with pytest.raises(ValueError, match=f"axes '{names[0]}' and '{names[1]}' .* mesh axis"):
        partition_spec(names)


def test_other_rules_within_a_block():
    rules = dict(DEFAULT_RULES) | {"embed": None}
    with use_rules(rules):
        assert partition_spec(("embed", "mlp")) == PartitionSpec(None, "tensor")
    assert partition_spec(("embed", "mlp")) == PartitionSpec("fsdp", "tensor")
    assert partition_spec(("embed",), rules) == PartitionSpec(None)


def test_every_rule_names_mesh_axes():
    for rule in DEFAULT_RULES.values():
        assert set((rule,) if isinstance(rule, str) else rule or ()) <= set(MESH_AXES)


def test_constrain():
    x = jnp.zeros((4, 6))
    assert constrain(x, "act_batch", "act_embed") is x  # outside a mesh
    for names in (("act_batch",), ("act_batch", "act_length", "act_embed")):
        with pytest.raises(ValueError, match=rf"{len(names)} axis names .* shape \(4, 6\)"):
            constrain(x, *names)
    mesh = make_mesh({"data": 2, "tensor": 4})
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, "act_batch", None))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("data")), 2)


# --- meshes ---------------------------------------------------------------------------------


def test_meshes():
    assert jax.device_count() == 8
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "context": 1, "tensor": 1}
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    assert mesh.axis_names == MESH_AXES


def test_meshes_that_cannot_be():
    with pytest.raises(ValueError, match="needs 6 devices, found 8"):
        make_mesh({"data": 3, "fsdp": 2})
    with pytest.raises(ValueError, match=r"unknown mesh axes \['model'\]"):
        make_mesh({"data": 4, "model": 2})


# --- parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["toy", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_has_an_axis_name_a_dimension(name, size):
    """By shapes alone, of every network: and no two dimensions on one mesh axis.

    With fsdp 4 and tensor 2 all of them split evenly, and no device of the full size holds a
    whole matrix of the transformers.
    """
    mesh = jax.sharding.AbstractMesh((1, 4, 1, 2), MESH_AXES)
    config = getattr(SIZES[size](), "dit" if name == "picture" else name)
    params = flat_params(nnx.state(abstract_network(name, config), nnx.Param))
    assert params
    for path, variable in params.items():
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == len(variable.shape), path
        assert set(names) - {None} <= set(DEFAULT_RULES), path
        sharding = NamedSharding(mesh, partition_spec(names, DEFAULT_RULES))
        shard = sharding.shard_shape(variable.shape)  # raises where it does not split
        if np.prod(variable.shape[-2:]) > 2**22:
            assert np.prod(shard) * 2 <= np.prod(variable.shape), path


# --- eight devices --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


def on_mesh(module: nnx.Module, mesh: jax.sharding.Mesh) -> nnx.Module:
    graphdef, params = nnx.split(module, nnx.Param)
    params = jax.device_put(params, param_shardings(params, mesh))
    assert any(not p[...].sharding.is_fully_replicated for p in flat_params(params).values())
    return nnx.merge(graphdef, params)


def batched(mesh: jax.sharding.Mesh, *arrays: jax.Array) -> list[jax.Array]:
    """Arrays whose first axis counts games, or what stands for them."""
    return [jax.device_put(x, NamedSharding(mesh, partition_spec(("act_batch",)))) for x in arrays]


def same(found: jax.Array, expected: jax.Array) -> None:
    """But for sums in another order, which differ by processor: up to 1.8e-5 was seen."""
    expected = np.asarray(expected)
    assert np.abs(np.asarray(found) - expected).max() < 4e-5 * np.sqrt(np.square(expected).mean())


def test_the_transformer_on_eight_devices(mesh):
    config: DiTConfig = TINY.dit
    dit = build("dit", config, random_leaves("dit", config, 0))
    random = np.random.default_rng(1)
    shape = (4, config.latent_frames, config.latent_height, config.latent_width, 4)
    args = (
        jnp.asarray(random.normal(size=shape), jnp.float32),
        jnp.asarray([999.0, 500.0, 19.0, 0.0]),
        jnp.asarray([0.5, 2.5, 10.0, 40.0]),
        jnp.asarray(random.normal(size=(4, config.num_context_tokens, 32)), jnp.float32),
    )

    def run(dit, x, timestep, motion, context):
        return dit(x, timestep=timestep, motion=motion, context=context)

    expected = jax.jit(run)(dit, *args)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(on_mesh(dit, mesh), *batched(mesh, *args))
    assert len(found.sharding.device_set) == 8
    same(found, expected)


def test_the_language_model_on_eight_devices(mesh):
    """The prompt of four games with 0, 1 and 2 turns of history, under the queries' mask."""
    config: MLLMConfig = TINY.mllm
    mllm = build("mllm", config, random_leaves("mllm", config, 0))
    ids = TokenIds(
        bos=1,
        special={token: 20 + i for i, token in enumerate(SPECIAL_TOKENS)},
        frames=tuple(range(100, 100 + config.num_queries)),
    )
    protocol = dataclasses.replace(PAPER, window=3, caption_length=6)
    layout = Layout(protocol, ids, num_queries=config.num_queries, window=3)
    random = np.random.default_rng(2)
    rows = 2 * config.num_queries
    args = (
        jnp.asarray(random.integers(200, 300, (4, 3, 6)), jnp.int32),
        jnp.asarray(random.integers(1, 7, (4, 3)), jnp.int32),
        jnp.asarray(random.integers(0, 2, (4, 2, 4)), jnp.int32),
        jnp.asarray([0, 1, 2, 2], jnp.int32),
        jnp.asarray(random.normal(size=(4, rows, config.representation_size)), jnp.float32),
    )

    def run(mllm: MLLM, captions, lengths, states, count, history):
        prompt = layout.assemble(captions, lengths, states, count)
        hidden, cache = mllm.prefill(prompt, history, layout, bidirectional=True, extra_slots=9)
        shot = mllm.output_resampler(hidden[:, layout.representation])
        return shot, mllm.mistral.logits(hidden[:, -1]), cache.keys[:, :, -20:]

    expected = jax.jit(run)(mllm, *args)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(on_mesh(mllm, mesh), *batched(mesh, *args))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize("name", ["dit", "vae"])
def test_a_bundle_loads_onto_a_mesh(tiny_bundle, mesh, name):
    bundle = Bundle.open(tiny_bundle)
    params = nnx.state(bundle.load(name, mesh=mesh), nnx.Param)
    alone = flat_params(nnx.state(bundle.load(name), nnx.Param))
    wanted = jax.tree.leaves(param_shardings(params, mesh))
    for (path, variable), sharding in zip(flat_params(params).items(), wanted, strict=True):
        assert variable[...].sharding == sharding, path
        np.testing.assert_array_equal(variable[...], alone[path][...])
    assert any(not sharding.is_fully_replicated for sharding in wanted)
