"""The TPU kernel's form of attention, interpreted, against the plain form: both directions."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from animegamer_jax.configs import LoRAConfig, make_toy
from animegamer_jax.models import attention as attention_module
from animegamer_jax.models import dit, linear, mistral
from animegamer_jax.models.attention import TokenMask, attention
from animegamer_jax.models.kernels import flash, splash
from animegamer_jax.models.kernels.splash import StaticMask, choose_blocks
from animegamer_jax.models.linear import LayerNorm, LayerStack, QKVLinear
from animegamer_jax.sharding import make_mesh

DIT, MLLM = make_toy().dit, make_toy().mllm
assert DIT is not None
assert MLLM is not None


def inputs(b: int, t: int, h: int, g: int, d: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (b, t, h, d), (b, t, g, d), (b, t, g, d)
    return [jax.random.normal(k, x) for k, x in zip(keys, shapes, strict=True)]


def game_mask(b: int, t: int, block: tuple[int, int]) -> TokenMask:
    """Causal with one open block, and in the second game no valid token before slot 40."""
    order = jnp.broadcast_to(jnp.arange(t), (b, t))
    valid = order >= 40 * jnp.arange(b)[:, None]
    blocks = ((order >= block[0]) & (order < block[1])).astype(jnp.int32)
    return TokenMask(order, order, valid, blocks, blocks, static=StaticMask(*block))


def values_and_gradients(arrays, mask, implementation):
    def total(q, k, v):
        out = attention(q, k, v, mask=mask, implementation=implementation)
        if mask is not None:  # a query of padding may see anything
            out = jnp.where(mask.key_valid[:, :, None, None], out, 0)
        return (out @ jnp.arange(out.shape[-1], dtype=out.dtype)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return out, *grads


def assert_close(found, expected):
    for ours, plain in zip(found, expected, strict=True):
        assert jnp.abs(ours - plain).max() < 1e-5 * jnp.abs(plain).max()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("block", [None, (0, 0), (100, 150)])
def test_kernel_is_plain_forward_and_backward(width, block):
    arrays = inputs(2, 200, 4, 2 if block else 4, width)
    mask = None if block is None else game_mask(2, 200, block)
    assert_close(*(values_and_gradients(arrays, mask, form) for form in ("kernel", "plain")))


@pytest.mark.parametrize("shape", [{"data": 2, "context": 4}, {"context": 2, "tensor": 4}])
def test_kernel_on_a_mesh(shape):
    """Queries and heads on different devices; keys come together."""
    arrays = inputs(2, 264, 4, 4, 64)
    expected = values_and_gradients(arrays, None, "plain")
    with jax.set_mesh(make_mesh(shape)):
        found = values_and_gradients(arrays, None, "kernel")
    assert_close(found, expected)


def test_what_does_not_divide_lies_whole_on_each_device():
    """Two samples over four batch devices, three heads over two: a look at a few clips."""
    arrays = inputs(2, 264, 3, 3, 64)
    expected = values_and_gradients(arrays, None, "plain")
    with jax.set_mesh(make_mesh({"data": 4, "tensor": 2})):
        found = values_and_gradients(arrays, None, "kernel")
    assert_close(found, expected)


def test_one_mesh_after_another():
    arrays = inputs(8, 128, 1, 1, 64)
    expected = values_and_gradients(arrays, None, "plain")
    for shape in ({"data": 8}, {"data": 2, "fsdp": 4}):
        with jax.set_mesh(make_mesh(shape)):
            assert_close(values_and_gradients(arrays, None, "kernel"), expected)


def test_static_mask_is_the_token_masks():
    mask = game_mask(1, 50, (20, 30))
    assert mask.static is not None
    np.testing.assert_array_equal(mask.static.dense(50, 50), np.asarray(mask.dense())[0])


@pytest.mark.parametrize("length", [1, 127, 128, 1536, 1744, 6976, 17_776])
def test_blocks_fit(length):
    blocks = choose_blocks(length, length, most_queries=1024, most_keys=1792, most_at_once=896)
    assert blocks.query_length % blocks.queries == blocks.key_length % blocks.keys == 0
    assert blocks.keys % blocks.keys_at_once == blocks.keys_at_once % 128 == 0
    for padded in (blocks.query_length, blocks.key_length):
        assert length <= padded < max(length * 1.04, length + 128)
    assert blocks.queries <= 1024
    assert blocks.keys <= 1792
    assert blocks.keys_at_once <= 896


def test_the_released_clips_blocks():
    """As measured with the TPU compiler: large blocks, 7,168 rows in all."""
    found = choose_blocks(6976, 6976, most_queries=1024, most_keys=1792, most_at_once=896)
    assert found == splash.Blocks(1024, 1792, 896, 7168, 7168)


def test_masks_that_the_kernel_does_not_know():
    arrays = inputs(1, 16, 1, 1, 8)
    mask = game_mask(1, 16, (0, 0))
    for bad, window in ((mask._replace(static=None), None), (mask, 8)):
        with pytest.raises(ValueError, match="static mask, without branches, within the window"):
            attention(*arrays, mask=bad, window=window, implementation="kernel")


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """The layers' way on a TPU, its kernel interpreted."""
    attend = functools.partial(attention_module.columns_attention, interpret=True)
    for module in (attention_module, dit, mistral):
        monkeypatch.setattr(module, "takes_columns", lambda *_, **__: True)
    for module in (dit, mistral):
        monkeypatch.setattr(module, "columns_attention", attend)


@pytest.mark.parametrize(
    ("shape", "lora"),
    [
        (None, None),
        ({"fsdp": 2, "context": 4}, None),
        ({"context": 4, "tensor": 2}, LoRAConfig(rank=4, alpha=4.0)),
    ],
)
def test_a_layer_with_tokens_last_is_the_layer(monkeypatch, as_on_a_tpu, shape, lora):
    config = dataclasses.replace(
        DIT, num_layers=1, hidden_size=128, num_attention_heads=2, lora=lora,
        dtype="float32", remat="none",
    )  # fmt: skip
    block = dit.Block(config, rngs=nnx.Rngs(0))
    if lora is not None:
        update = block.qkv.lora_b
        assert update is not None
        update.set_value(0.1 * jax.random.normal(jax.random.key(1), update[...].shape))
    x = 3 + jax.random.normal(jax.random.key(2), (2, 300, 128))  # far from zero, as streams are
    emb = jax.random.normal(jax.random.key(3), (2, config.time_embed_size))

    def total(block, x):
        padding = attention_module.padded_length(300) - 300
        made = block.modulation(jax.nn.silu(emb))
        y, _ = block(jnp.pad(x, ((0, 0), (0, padding), (0, 0))), 300, made)
        return jnp.square(y[:, :300]).mean(), y[:, :300]

    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    with contextlib.nullcontext() if shape is None else jax.set_mesh(make_mesh(shape)):
        found = jax.jit(lambda *a: run(*a))(block, x)
        played, kernels = jax.jit(lambda *a: total(*a))(block, x), kernels_of(total, block, x)
        assert kernels == {"flash_attention"}
        assert "flash_attention" not in kernels_of(run, block, x)
    monkeypatch.undo()
    expected = jax.jit(lambda *a: run(*a))(block, x)
    assert_leaves_close(found, expected)
    assert_leaves_close(played, expected[0])


def kernels_of(function, *args) -> set[str]:
    """Names of the kernels that a program calls, but for numbers at their end."""
    text = str(jax.make_jaxpr(lambda *a: function(*a))(*args))
    return {name.rstrip("_0123456789") for name in re.findall(r"name=(\w*attention\w*)", text)}


@pytest.mark.parametrize(
    ("queries", "keys", "length", "wide"),
    [(300, 300, None, False), (256, 1200, 1100, False), (128, 1200, 500, True)],
)
def test_attention_for_play(queries, keys, length, wide):
    """Several blocks of keys, the last of them cut; large scores in one row and one column."""
    parts = jax.random.split(jax.random.key(0), 3)
    sizes = (queries, keys, keys)
    q, k, v = (jax.random.normal(key, (2, 3, 16, n)) for key, n in zip(parts, sizes, strict=True))
    q, k = q.at[..., 5].multiply(40.0), k.at[..., 7].multiply(40.0)
    found = flash.flash_attention(q, k, v, length=length, scale=0.25, wide=wide, interpret=True)
    rows, columns, values = (x.swapaxes(2, 3) for x in (q, k[..., :length], v[..., :length]))
    weights = jax.nn.softmax(0.25 * rows @ columns.swapaxes(2, 3), axis=-1)
    np.testing.assert_allclose(found, (weights @ values).swapaxes(2, 3), rtol=2e-5, atol=2e-5)


def test_sizes_that_attention_for_play_takes():
    assert flash.takes((30, 30), 64, 6976, 2)
    assert not flash.takes((32, 8), 64, 6976, 2)  # keys shared by heads
    assert not flash.takes((30, 30), 24, 6976, 2)  # half a register of values
    assert not flash.takes((30, 30), 64, 40_000, 2)  # too many for a core's memory
    assert (flash.rows_at_once(7168), flash.rows_at_once(6976), flash.rows_at_once(1744)) == (
        1792, 1408, 1792,
    )  # fmt: skip
    assert (flash.keys_at_once(7168), flash.keys_at_once(7168, wide=True)) == (512, 256)


def assert_leaves_close(found, expected):
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = float(jnp.abs(plain).max())  # of a bias of keys: nothing but rounding
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=2e-4 * largest + 1e-8)


@pytest.mark.parametrize(
    ("shape", "rate", "head_dim"), [(None, 0.0, 128), ({"data": 2, "tensor": 2}, 0.5, 64)]
)
def test_a_language_models_layer_with_tokens_last_is_the_layer(
    monkeypatch, as_on_a_tpu, shape, rate, head_dim
):
    """With the updates' dropout, too: keys of a layer are split alike whatever the way."""
    config = dataclasses.replace(
        MLLM.mistral, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, lora=LoRAConfig(rank=4, alpha=4.0),
        dtype="float32", remat="none",
    )  # fmt: skip
    block = mistral.Block(config, rngs=nnx.Rngs(0))
    for number, module in enumerate((block.q, block.k, block.v, block.o)):
        assert module.lora_b is not None
        shape_b = module.lora_b[...].shape
        if module is block.o and rate:  # its input's places are others here
            continue
        module.lora_b.set_value(0.1 * jax.random.normal(jax.random.key(number), shape_b))
    mask = game_mask(2, 200, (100, 150))
    x = jax.random.normal(jax.random.key(9), (2, 200, 64))

    def total(block, x):
        own = mistral.LayerInput(key=jax.random.key(5) if rate else None)
        tables = mistral.rotary_tables(mask.query_positions, config)
        y, cached = block(x, mask, tables, None, rate, own)
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
            tree[1][0].o.lora_b.set_value(jnp.zeros_like(tree[1][0].o.lora_b[...]))
    assert_leaves_close(found, expected)


def test_who_takes_tokens_last(monkeypatch):
    mask = game_mask(1, 300, (0, 0))
    assert not attention_module.takes_columns(300, mask)  # not here
    monkeypatch.setattr(attention_module, "platform", lambda: "tpu")
    takes = attention_module.takes_columns
    assert takes(300)
    assert takes(300, mask)
    assert takes(300, mask, window=300)
    assert not takes(200)
    assert not takes(300, mask, window=299)
    assert not takes(300, mask._replace(static=None))


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_norm_of_columns_is_as_exact_as_the_norm(mean):
    """Far from zero too: short squares of what is not centred would lose the variance."""
    norm = LayerNorm(64, eps=1e-6, config=DIT, rngs=nnx.Rngs(0))
    x = (mean + jax.random.normal(jax.random.key(0), (2, 50, 2, 64))).astype(jnp.float16)
    columns = jax.jit(norm.of_columns)(x.transpose(0, 2, 3, 1))
    columns = columns.transpose(0, 3, 1, 2).astype(jnp.float32)
    exact = norm(x.astype(jnp.float32))
    assert jnp.abs(columns - exact).max() < 0.005


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_norm_on_a_tpu_is_as_exact_as_the_norm(monkeypatch, mean):
    """Both sums in one pass, of bfloat16: its own rounding is all that differs."""
    norm = LayerNorm(256, eps=1e-6, config=DIT, rngs=nnx.Rngs(0))
    x = (mean + jax.random.normal(jax.random.key(0), (2, 50, 256))).astype(jnp.bfloat16)

    def run(x):
        return jax.value_and_grad(lambda x: jnp.sin(norm(x).astype(jnp.float32)).sum())(x)

    _, exact = run(x.astype(jnp.float32))
    expected = norm(x.astype(jnp.float32))
    monkeypatch.setattr(linear, "platform", lambda: "tpu")
    assert jnp.abs(norm(x).astype(jnp.float32) - expected).max() < 0.02
    gradient = jax.jit(run)(x)[1].astype(jnp.float32)
    assert jnp.abs(gradient - exact).max() < 0.02 * jnp.abs(exact).max()


def test_layers_whose_parts_are_cut_from_the_stack_are_the_layers(monkeypatch):
    """Few tokens on a TPU; gradients too, though nothing trains this way at full size."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.qkv = QKVLinear(16, config=DIT, lora=LoRAConfig(rank=2, alpha=2.0), rngs=rngs)

        def __call__(self, x):
            q, k, v = self.qkv(x)
            return x + jnp.tanh(q) * k - v

    stack = LayerStack(Block, 3, config=dataclasses.replace(DIT, remat="full"), rngs=nnx.Rngs(0))
    assert stack.blocks.qkv.lora_b is not None
    stack.blocks.qkv.lora_b.set_value(
        jnp.ones((3, 3, 2, 16)) * jnp.arange(3.0)[:, None, None, None]
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))

    def run(stack, x):
        return jax.value_and_grad(lambda *a: jnp.square(a[0](a[1])[0]).sum(), (0, 1))(stack, x)

    expected = jax.jit(lambda *a: run(*a))(stack, x)
    monkeypatch.setattr(linear, "platform", lambda: "tpu")
    one = jax.tree.map(lambda leaf: leaf[0], stack.blocks)
    cut = linear._take_parts(one, stack.blocks, jnp.int32(2))
    np.testing.assert_array_equal(cut.qkv.kernel[...], stack.blocks.qkv.kernel[2])
    assert_leaves_close(jax.jit(lambda *a: run(*a))(stack, x), expected)
    monkeypatch.setattr(linear, "_MANY_TOKENS", 10)
    assert_leaves_close(jax.jit(lambda *a: run(*a))(stack, x), expected)
