"""The choice of attention, and the TPU kernels, interpreted, against plain attention."""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_modules import assert_leaves_close, initialized

from animegamer_jax.configs import LoRAConfig, make_toy
from animegamer_jax.models import dit, mistral, norms
from animegamer_jax.models.kernels import attend, flash, splash
from animegamer_jax.models.kernels.attend import kernel_attention
from animegamer_jax.models.kernels.blocked import plain_attention
from animegamer_jax.models.kernels.flash_training import trained_attention
from animegamer_jax.models.kernels.masks import StaticMask, TokenMask, padding_mask
from animegamer_jax.models.kernels.splash import choose_blocks
from animegamer_jax.sharding import make_mesh

DIT, MLLM = make_toy().dit, make_toy().mllm
assert DIT is not None
assert MLLM is not None


# Numbers are drawn and compared by numpy: an operation of JAX would be compiled for each shape.


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def inputs(b: int, t: int, h: int, g: int, d: int) -> list[jax.Array]:
    shapes = (b, h, t, d), (b, g, t, d), (b, g, t, d)
    return [jnp.asarray(draw(*shape, seed=n)) for n, shape in enumerate(shapes)]


def game_mask(b: int, t: int, block: tuple[int, int]) -> TokenMask:
    """Causal with one open block, and in the second game no valid token before slot 40."""
    order = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
    valid = order >= 40 * np.arange(b)[:, None]
    blocks = ((order >= block[0]) & (order < block[1])).astype(np.int32)
    order, valid, blocks = (jnp.asarray(x) for x in (order, valid, blocks))
    return TokenMask(order, order, valid, blocks, blocks, static=StaticMask(*block))


def values_and_gradients(arrays, mask, attention):
    def total(q, k, v):
        out = attention(q, k, v, mask=mask, scale=q.shape[-1] ** -0.5)
        if mask is not None:  # a query of padding may see anything
            out = jnp.where(mask.key_valid[:, None, :, None], out, 0)
        return (out @ jnp.arange(out.shape[-1], dtype=out.dtype)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return out, *grads


def assert_close(found, expected):
    for ours, plain in zip(found, expected, strict=True):
        ours, plain = np.asarray(ours), np.asarray(plain)
        assert np.abs(ours - plain).max() < 1e-5 * np.abs(plain).max()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("block", [None, (0, 0), (100, 150)])
def test_kernel_is_plain_forward_and_backward(width, block):
    arrays = inputs(2, 200, 4, 2 if block else 4, width)
    mask = None if block is None else game_mask(2, 200, block)
    kernel = functools.partial(kernel_attention, tokens_last=width < 128 and block is None)
    assert_close(*(values_and_gradients(arrays, mask, form) for form in (kernel, plain_attention)))


@pytest.mark.parametrize("shape", [{"data": 2, "context": 4}, {"context": 2, "tensor": 4}])
def test_kernel_on_a_mesh(shape):
    """Queries and heads on different devices; keys come together."""
    arrays = inputs(2, 264, 4, 4, 64)
    expected = values_and_gradients(arrays, None, plain_attention)
    with jax.set_mesh(make_mesh(shape)):
        found = values_and_gradients(arrays, None, kernel_attention)
    assert_close(found, expected)


def test_what_does_not_divide_is_replicated():
    """Two samples over four batch devices, three heads over two: an evaluation of a few clips."""
    arrays = inputs(2, 264, 3, 3, 64)
    expected = values_and_gradients(arrays, None, plain_attention)
    with jax.set_mesh(make_mesh({"data": 4, "tensor": 2})):
        found = values_and_gradients(arrays, None, kernel_attention)
    assert_close(found, expected)


def test_one_mesh_after_another():
    arrays = inputs(8, 128, 1, 1, 64)
    expected = values_and_gradients(arrays, None, plain_attention)
    for shape in ({"data": 8}, {"data": 2, "fsdp": 4}):
        with jax.set_mesh(make_mesh(shape)):
            assert_close(values_and_gradients(arrays, None, kernel_attention), expected)


def test_static_mask_is_the_token_masks():
    mask = game_mask(1, 50, (20, 30))
    assert mask.static is not None
    np.testing.assert_array_equal(mask.static.dense(50, 50), np.asarray(mask.dense())[0])


@pytest.mark.parametrize("static", [StaticMask(), StaticMask(3, 9), padding_mask(20, length=13)])
def test_static_mask_expands_to_the_same_mask(static):
    dense = np.asarray(static.expand(2, 20).dense())
    np.testing.assert_array_equal(dense, np.broadcast_to(static.dense(20, 20), (2, 20, 20)))


@pytest.mark.parametrize("length", [1, 127, 128, 1536, 1744, 6976, 17_776])
def test_blocks_fit(length):
    blocks = choose_blocks(length, length)
    assert blocks.query_length % blocks.queries == blocks.key_length % blocks.keys == 0
    assert blocks.keys % blocks.keys_at_once == blocks.keys_at_once % 128 == 0
    for padded in (blocks.query_length, blocks.key_length):
        assert length <= padded < max(length * 1.04, length + 128)
    assert blocks.queries <= 1024
    assert blocks.keys <= 1792
    assert blocks.keys_at_once <= 896


def test_the_released_clips_blocks():
    """As measured with the TPU compiler: large blocks, 7,168 rows in all."""
    found = choose_blocks(6976, 6976)
    assert found == splash.Blocks(1024, 1792, 896, 7168, 7168)


def test_masks_that_the_kernel_does_not_know():
    arrays = inputs(1, 16, 1, 1, 8)
    mask = game_mask(1, 16, (0, 0))
    segments = jnp.zeros((1, 16), jnp.int32)
    for bad in (mask._replace(static=None), mask._replace(query_segments=segments)):
        with pytest.raises(ValueError, match="needs a static mask without segments"):
            kernel_attention(*arrays, mask=bad)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """The way through a TPU's layers, its kernels interpreted."""
    monkeypatch.setattr(attend, "_takes_kernel", lambda *_: True)
    monkeypatch.setattr(norms, "platform", lambda: "tpu")


@pytest.mark.parametrize(
    ("shape", "lora"),
    [
        (None, None),
        ({"fsdp": 2, "context": 4}, None),
        ({"context": 4, "tensor": 2}, LoRAConfig(rank=4, alpha=4.0)),
    ],
)
def test_a_layer_of_the_transformer_with_tokens_last(monkeypatch, as_on_a_tpu, shape, lora):
    config = dataclasses.replace(
        DIT, num_layers=1, hidden_size=128, num_attention_heads=2, lora=lora,
        dtype="float32", remat="none",
    )  # fmt: skip
    block = initialized(lambda: dit.Block(config, rngs=nnx.Rngs(0)))
    if lora is not None:
        update = block.qkv.lora_b
        assert update is not None
        update.set_value(jnp.asarray(0.1 * draw(*update.shape, seed=1)))
    x = jnp.asarray(3 + draw(2, 300, 128, seed=2))  # far from zero, as streams are
    emb = jnp.asarray(draw(2, config.time_embed_size, seed=3))

    def total(block, x):
        padding = attend.padded_length(300) - 300
        made = block.modulation(jax.nn.silu(emb))
        padded = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
        y, _ = block(padded, config.num_context_tokens, 300, made)
        return jnp.square(y[:, :300]).mean(), y[:, :300]

    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    with contextlib.nullcontext() if shape is None else jax.set_mesh(make_mesh(shape)):
        found, kernels = run_with_kernels(run, block, x)
        assert kernels == {"flash_attention", "flash_backward"}
        played, kernels = run_with_kernels(total, block, x)
        assert kernels == {"flash_attention"}
    monkeypatch.undo()
    expected = jax.jit(lambda *a: run(*a))(block, x)
    assert_leaves_close(found, expected)
    assert_leaves_close(played, expected[0])


def run_with_kernels(function, *args) -> tuple[Any, set[str]]:
    """What a function returns, and the kernels that it calls, without the numbers at their end."""
    traced = jax.jit(lambda *a: function(*a)).trace(*args)
    found = re.findall(r"name=((?:flash|splash)\w*)", str(traced.jaxpr))
    return traced.lower().compile()(*args), {name.rstrip("_0123456789") for name in found}


@pytest.mark.parametrize(
    ("queries", "keys", "length", "wide"),
    [(300, 300, None, False), (256, 1200, 1100, False), (128, 1200, 500, True)],
)
def test_attention_for_play(queries, keys, length, wide):
    """Several blocks of keys, the last of them cut; large scores in one row and one column."""
    sizes = (queries, keys, keys)
    q, k, v = (draw(2, 3, 16, size, seed=n) for n, size in enumerate(sizes))
    q[..., 5] *= 40.0
    k[..., 7] *= 40.0
    options = {"length": length, "scale": 0.25, "wide": wide, "interpret": True}
    found = jax.jit(functools.partial(flash.flash_attention, **options))(q, k, v)
    rows, columns, values = (x.swapaxes(2, 3) for x in (q, k[..., :length], v[..., :length]))
    scores = 0.25 * rows @ columns.swapaxes(2, 3)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, (weights @ values).swapaxes(2, 3), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("most", [3.0, 70.0])
def test_attention_without_a_maximum(most):
    """Scores up to the bound, all of a row at its negative end: as with the maximum."""
    q, k, v = (draw(1, 2, 16, 200, seed=n) for n in range(3))
    q, k = (4 * x / np.linalg.norm(x, axis=2, keepdims=True) for x in (q, k))
    k[..., 7] = q[..., 5]
    k[:, 1] = -q[:, 1, :, 9:10]
    scale = most / 16
    assert flash.is_bounded(16.0, scale)
    form = functools.partial(flash.flash_attention, scale=scale, interpret=True)
    bounded, plain = (jax.jit(functools.partial(form, bounded=b))(q, k, v) for b in (True, False))
    assert_close((bounded,), (plain,))
    assert not flash.is_bounded(16.0, 74 / 16)  # its power of two is no float32


@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    ("queries", "keys", "length", "wide"),
    [(300, 300, None, False), (256, 1200, 1100, False), (2176, 640, 500, True)],
)
def test_attention_for_training(queries, keys, length, wide, dtype, most):
    """Blocks of queries and of keys, the last of them cut: output and all gradients."""
    sizes = (queries, keys, keys, queries)
    arrays = [draw(1, 2, 16, size, seed=n) for n, size in enumerate(sizes)]
    q, k, v, weights = (x.astype(jnp.dtype(dtype)) for x in arrays)
    options = {"length": length, "scale": 0.25, "wide": wide, "interpret": True}

    def kernel(q, k, v):
        return trained_attention(q, k, v, **options)

    def plain(q, k, v):
        q, k, v = (x.astype(jnp.float32).swapaxes(2, 3) for x in (q, k, v))
        scores = 0.25 * q @ k[:, :, :length].swapaxes(2, 3)
        return (jax.nn.softmax(scores, axis=-1) @ v[:, :, :length]).swapaxes(2, 3)

    def total(function, q, k, v):
        out = function(q, k, v)
        return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

    def run(function):
        both = jax.value_and_grad(functools.partial(total, function), (0, 1, 2), has_aux=True)
        (_, out), gradients = jax.jit(both)(q, k, v)
        return out, *gradients

    for found, expected in zip(run(kernel), run(plain), strict=True):
        assert found.dtype == dtype
        found, expected = (np.asarray(x).astype(np.float32) for x in (found, expected))
        assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [{"data": 2, "context": 4}, {"context": 2, "tensor": 4}])
def test_attention_for_training_on_a_mesh(shape):
    arrays = inputs(2, 512, 4, 4, 64)
    expected = values_and_gradients(arrays, None, plain_attention)
    kernel = functools.partial(kernel_attention, kernel="training", tokens_last=True)
    with jax.set_mesh(make_mesh(shape)):
        found = values_and_gradients(arrays, None, kernel)
    assert_close(found, expected)


@pytest.mark.parametrize("heads", [6, 5])
def test_keys_come_in_groups_of_heads(heads):
    """In play, where a context is split; five heads are one group."""
    arrays = inputs(1, 512, heads, heads, 16)
    kernel = functools.partial(kernel_attention, kernel="play", tokens_last=True, scale=0.25)
    expected = jax.jit(functools.partial(plain_attention, scale=0.25))(*arrays)
    mesh = make_mesh({"context": 4}, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        traced = jax.jit(kernel).trace(*arrays)
        found, program = traced.lower().compile()(*arrays), str(traced.jaxpr)
    assert_close((found,), (expected,))
    assert program.count("all_gather[") == 2 * (3 if heads == 6 else 1)


def test_each_layer_chooses_its_maximum(monkeypatch, as_on_a_tpu):
    """A layer of large norms keeps the running maximum; loaded weights without one drop it."""
    config = dataclasses.replace(DIT, num_layers=2, hidden_size=64, num_attention_heads=2)
    config = dataclasses.replace(config, dtype="float32")
    network = initialized(lambda: dit.DiT(config, rngs=nnx.Rngs(0)))
    block = network.layers.blocks
    dit.fix_most_score(network)
    assert block.most_score == pytest.approx(32.0)
    scale = block.query_norm.scale
    larger = np.array(scale[...])
    larger[1] *= 60.0
    scale.set_value(jnp.asarray(larger))
    dit.fix_most_score(network)
    assert block.most_score is None
    x = jnp.asarray(draw(1, 260, 64))
    modulation = jnp.asarray(np.full((2, 1, 12 * 64), 0.3, np.float32))

    def run(network, x):
        padded = jnp.pad(x, ((0, 0), (0, attend.padded_length(260) - 260), (0, 0)))
        return network.layers(padded, config.num_context_tokens, 260, per_layer=modulation)[0][
            :, :260
        ]

    found = jax.jit(lambda *a: run(*a))(network, x)
    monkeypatch.undo()
    assert_leaves_close(found, jax.jit(lambda *a: run(*a))(network, x))


def test_sizes_that_attention_for_play_supports():
    assert flash.supports((30, 30), 64, 6976, 2)
    assert not flash.supports((32, 8), 64, 6976, 2)  # keys shared by heads
    assert not flash.supports((30, 30), 24, 6976, 2)  # half a register of values
    assert not flash.supports((30, 30), 64, 40_000, 2)  # too many for a core's memory
    assert (flash.rows_at_once(7168), flash.rows_at_once(6976), flash.rows_at_once(1744)) == (
        1792, 1408, 1792,
    )  # fmt: skip
    assert (flash.keys_at_once(7168), flash.keys_at_once(7168, wide=True)) == (512, 256)


@pytest.mark.parametrize(
    ("shape", "rate", "head_dim"), [(None, 0.0, 128), ({"data": 2, "tensor": 2}, 0.5, 64)]
)
def test_a_layer_of_the_language_model_with_tokens_last(
    monkeypatch, as_on_a_tpu, shape, rate, head_dim
):
    """With the updates' dropout, too: keys of a layer are split alike whatever the way."""
    config = dataclasses.replace(
        MLLM.mistral, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, lora=LoRAConfig(rank=4, alpha=4.0),
        dtype="float32", remat="none",
    )  # fmt: skip
    block = initialized(lambda: mistral.Block(config, rngs=nnx.Rngs(0)))
    for number, module in enumerate((block.q, block.k, block.v, block.o)):
        assert module.lora_b is not None
        if module is block.o and rate:  # its input's places are others here
            continue
        module.lora_b.set_value(jnp.asarray(0.1 * draw(*module.lora_b.shape, seed=number)))
    mask = game_mask(2, 200, (100, 150))
    x = jnp.asarray(draw(2, 200, 64, seed=9))

    def total(block, x):
        own = mistral.LayerInput(key=jax.random.key(5) if rate else None)
        tables = mistral.rotary_tables(mask.query_positions, config)
        y, cached = block(x, mask, tables, None, rate, False, own)
        assert cached is None
        y = jnp.where(mask.key_valid[:, :, None], y, 0)  # a query of padding may see anything
        return jnp.square(y).mean(), y

    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    places = make_mesh(shape, devices=jax.devices()[:4]) if shape else None
    with contextlib.nullcontext() if places is None else jax.set_mesh(places):
        found = jax.jit(lambda *a: run(*a))(block, x)
    monkeypatch.undo()
    expected = jax.jit(lambda *a: run(*a))(block, x)
    if rate:  # the update of the output alone
        for tree in (found, expected):
            tree[1][0].o.lora_b.set_value(jnp.zeros(tree[1][0].o.lora_b.shape))
    assert_leaves_close(found, expected)


def test_a_prompt_with_a_cache_by_the_kernel(monkeypatch, as_on_a_tpu):
    """Keys and values come from the cache, which has free slots behind the prompt."""
    config = dataclasses.replace(
        MLLM.mistral, vocab_size=8, num_hidden_layers=2, lora=None, dtype="float32"
    )
    network = initialized(lambda: mistral.Mistral(config, rngs=nnx.Rngs(0)))
    mask = game_mask(2, 200, (100, 150))
    order, blocks = mask.query_positions, mask.query_blocks
    tokens = mistral.Tokens(order, mask.key_valid, blocks, static=mask.static)
    x = jnp.asarray(draw(2, 200, config.hidden_size))

    def run(network, x):
        hidden, cache = network(x, tokens, mistral.make_cache(config, 2, 209))
        keys = jnp.where(mask.key_valid[:, None, :, None], cache.keys[..., :200, :], 0)
        return jnp.where(mask.key_valid[:, :, None], hidden, 0), keys

    found, kernels = run_with_kernels(run, network, x)
    assert any("splash" in name for name in kernels)
    monkeypatch.undo()
    assert_leaves_close(found, jax.jit(lambda *a: run(*a))(network, x))


def test_choice_by_platform_and_size(monkeypatch):
    takes_blocks = attend._takes_blocks
    assert not takes_blocks(1, 8, 128, 128)
    assert not takes_blocks(1, 8, 1, 70_000)  # decoding from a cache
    assert takes_blocks(1, 8, 322, 322)
    monkeypatch.setattr(attend, "platform", lambda: "tpu")
    assert not takes_blocks(1, 8, 128, 128)
    assert not takes_blocks(1, 8, 2048, 2048)
    assert takes_blocks(2, 8, 6976, 6976)


def test_who_takes_the_kernel(monkeypatch):
    mask = game_mask(1, 300, (0, 0))
    takes, last = attend._takes_kernel, attend._reads_tokens_last
    assert not takes(300, mask, None)  # not here
    monkeypatch.setattr(attend, "platform", lambda: "tpu")
    assert takes(300, None, None)
    assert takes(300, mask, None)
    assert takes(300, mask, 300)
    assert not takes(200, None, None)
    assert not takes(300, mask, 299)
    assert not takes(300, mask._replace(static=None), None)
    assert not takes(300, mask._replace(query_segments=mask.query_blocks), None)
    assert last(300, mask, 300)
    cached = mask._replace(key_positions=jnp.zeros((1, 309), jnp.int32))
    assert takes(300, cached, None)
    assert not last(300, cached, None)
