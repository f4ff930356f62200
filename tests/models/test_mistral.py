"""Mistral against transformers, its key-value cache, its low-rank updates, its number formats."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from helpers import array_source

from animegamer_jax.bundle.bundle import flat_params
from animegamer_jax.configs import LoRAConfig, MistralConfig
from animegamer_jax.convert.rules import load
from animegamer_jax.convert.tables.mllm import mistral_rules
from animegamer_jax.models.linear import Dropout
from animegamer_jax.models.mistral import (
    Mistral,
    Tokens,
    make_cache,
    rotary_frequencies,
    rotary_tables,
    rotate,
)

torch = pytest.importorskip("torch")
MistralRotaryEmbedding = pytest.importorskip(
    "transformers.models.mistral.modeling_mistral"
).MistralRotaryEmbedding

TINY = MistralConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=None,
    lora=None,
)
WINDOWED = dataclasses.replace(TINY, sliding_window=8)
LENGTH = 20
MODEL = 1e-5  # asked of a whole network: 1e-4


def error(found: Any, expected: Any) -> float:
    """Largest difference over the RMS of `expected`."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.sqrt(np.square(expected).mean()))


class Holder(nnx.Module):
    """Gives the parameters the paths that the table of a plain Mistral folder has."""

    def __init__(self, config: MistralConfig):
        self.mistral = Mistral(config, rngs=nnx.Rngs(0))


def make_theirs(config: MistralConfig) -> Any:
    """transformers' model of the same sizes, with random weights and norms."""
    theirs = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            sliding_window=config.sliding_window,
            attn_implementation="eager",
        )
    ).eval()
    random = np.random.default_rng(0)
    state = {}
    for name, tensor in theirs.state_dict().items():
        scale = tensor.shape[-1] ** -0.5 if tensor.ndim == 2 else 0.1
        value = random.normal(size=tuple(tensor.shape)) * scale + (tensor.ndim == 1)
        state[name] = torch.from_numpy(value.astype(np.float32))
    theirs.load_state_dict(state)
    return theirs


def make_ours(theirs: Any, config: MistralConfig) -> Mistral:
    holder = nnx.eval_shape(lambda: Holder(config))
    arrays = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    load(mistral_rules(), array_source(arrays), holder)
    return holder.mistral


@pytest.fixture(scope="module")
def models() -> dict[MistralConfig, tuple[Mistral, Any]]:
    out = {}
    for config in (TINY, WINDOWED):
        theirs = make_theirs(config)
        out[config] = make_ours(theirs, config), theirs
    return out


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(1).integers(0, TINY.vocab_size, (2, LENGTH)).astype(np.int32)


@jax.jit
def run(mistral: Mistral, ids: jax.Array, tokens: Tokens) -> jax.Array:
    hidden, _ = mistral(mistral.embed(ids), tokens)
    return mistral.logits(hidden)


def plain_tokens(batch: int = 2, length: int = LENGTH) -> Tokens:
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return Tokens(positions, jnp.ones((batch, length), bool), jnp.zeros_like(positions))


def their_logits(theirs: Any, ids: np.ndarray, **options: Any) -> np.ndarray:
    with torch.no_grad():
        return theirs(input_ids=torch.from_numpy(ids).long(), **options).logits.numpy()


@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["whole", "window 8"])
def test_is_transformers_mistral(models, ids, config):
    ours, theirs = models[config]
    assert error(run(ours, ids, plain_tokens()), their_logits(theirs, ids)) < MODEL


def test_the_window_hides_what_is_before_it(models, ids):
    whole, windowed = (run(models[config][0], ids, plain_tokens()) for config in (TINY, WINDOWED))
    np.testing.assert_allclose(whole[:, :8], windowed[:, :8], atol=1e-5)
    assert np.abs(np.asarray(whole - windowed)[:, 8:]).max() > 1e-2


@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["whole", "window 8"])
def test_padding_before_and_after(models, ids, config):
    """Positions count real tokens; what padding says does not matter."""
    ours, theirs = models[config]
    valid = np.ones((2, LENGTH), bool)
    valid[0, :5] = False
    valid[1, -3:] = False
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    tokens = Tokens(
        jnp.asarray(positions, jnp.int32), jnp.asarray(valid), jnp.zeros((2, LENGTH), jnp.int32)
    )
    expected = their_logits(
        theirs,
        ids,
        attention_mask=torch.from_numpy(valid).long(),
        position_ids=torch.from_numpy(positions),
    )
    found = np.asarray(run(ours, ids, tokens))
    assert np.isfinite(found).all()
    assert error(found[valid], expected[valid]) < MODEL


def test_a_gap_is_as_if_it_were_not_there(models, ids):
    """Unlike transformers' window, ours counts positions: masked slots take none of it."""
    ours, theirs = models[WINDOWED]
    valid = np.ones((2, LENGTH), bool)
    valid[:, 4:9] = False
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    tokens = Tokens(
        jnp.asarray(positions, jnp.int32), jnp.asarray(valid), jnp.zeros((2, LENGTH), jnp.int32)
    )
    found = np.asarray(run(ours, ids, tokens))[valid].reshape(2, 15, -1)
    expected = their_logits(theirs, ids[valid].reshape(2, 15))
    assert error(found, expected) < MODEL


def test_a_block_that_attends_in_both_directions(models, ids):
    """Against transformers with the mask written out."""
    ours, theirs = models[TINY]
    blocks = np.zeros((2, LENGTH), np.int32)
    blocks[0, 6:12], blocks[1, 9:17] = 1, 1
    seen = np.tril(np.ones((LENGTH, LENGTH), bool))[None]
    seen = seen | ((blocks[:, :, None] == 1) & (blocks[:, None, :] == 1))
    bias = np.where(seen, 0.0, np.finfo(np.float32).min).astype(np.float32)[:, None]
    expected = their_logits(theirs, ids, attention_mask=torch.from_numpy(bias))
    found = run(ours, ids, plain_tokens()._replace(blocks=jnp.asarray(blocks)))
    assert error(found, expected) < MODEL
    assert error(found, run(ours, ids, plain_tokens())) > 1e-2


# --- the cache ------------------------------------------------------------------------------


@jax.jit
def extend(mistral: Mistral, ids: jax.Array, tokens: Tokens, cache: Any) -> Any:
    hidden, cache = mistral(mistral.embed(ids), tokens, cache)
    return mistral.logits(hidden), cache


def test_token_by_token_with_a_cache(models, ids):
    """Twelve tokens at once, then one at a time: the numbers of one pass over all."""
    ours, _ = models[WINDOWED]
    whole, first = plain_tokens(), 12
    cut = lambda start, stop: jax.tree.map(lambda x: x[:, start:stop], whole)  # noqa: E731
    cache = make_cache(ours.config, 2, LENGTH + 3)  # with room to spare
    logits, cache = extend(ours, ids[:, :first], cut(0, first), cache)
    pieces = [logits]
    for i in range(first, LENGTH):
        logits, cache = extend(ours, ids[:, i : i + 1], cut(i, i + 1), cache)
        pieces.append(logits)
    assert int(cache.length) == LENGTH
    assert not np.asarray(cache.valid)[:, LENGTH:].any()
    assert error(np.concatenate(pieces, axis=1), run(ours, ids, whole)) < MODEL


# --- low-rank updates -----------------------------------------------------------------------


def test_low_rank_updates_are_merged_weights(models, ids):
    plain, _ = models[TINY]
    config = dataclasses.replace(TINY, lora=LoRAConfig(rank=3, alpha=2.0))
    adapted = nnx.eval_shape(lambda: Mistral(config, rngs=nnx.Rngs(0)))
    state = nnx.state(adapted, nnx.Param)
    random = np.random.default_rng(2)
    values = {path: np.array(p[...]) for path, p in flat_params(nnx.state(plain)).items()}
    pairs = {}
    for path, variable in flat_params(state).items():
        if path in values:
            variable.set_value(jnp.asarray(values[path]))
        else:
            pairs[path] = random.normal(size=variable.shape).astype(np.float32) * 0.3
            variable.set_value(jnp.asarray(pairs[path]))
    nnx.update(adapted, state)
    assert len(pairs) == 14  # a pair for each of seven linear layers
    merged = jax.tree.map(lambda x: x, nnx.state(plain))
    for path, variable in flat_params(merged).items():
        stem, _, last = path.rpartition(".")
        if last == "kernel" and f"{stem}.lora_a" in pairs:
            update = pairs[f"{stem}.lora_a"] @ pairs[f"{stem}.lora_b"] * (2.0 / 3)
            variable.set_value(jnp.asarray(values[path] + update))
    expected = run(nnx.merge(nnx.graphdef(plain), merged), ids, plain_tokens())
    assert error(expected, run(plain, ids, plain_tokens())) > 0.1
    assert error(run(adapted, ids, plain_tokens()), expected) < MODEL


def test_dropout_reaches_the_update_of_every_linear_layer(models, ids):
    """And of every layer by itself; without updates nothing changes."""
    plain, _ = models[TINY]
    config = dataclasses.replace(TINY, lora=LoRAConfig(rank=3, alpha=3.0))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Mistral(config, rngs=nnx.Rngs(0))))
    values = {path: np.array(p[...]) for path, p in flat_params(nnx.state(plain)).items()}
    random = np.random.default_rng(2)

    @jax.jit
    def hidden(mistral: Mistral) -> tuple[jax.Array, jax.Array]:
        x = mistral.embed(jnp.asarray(ids))
        dropout = Dropout(jax.random.key(1), 0.5)
        dropped, _ = mistral(x, plain_tokens(), dropout=dropout)
        return mistral(x, plain_tokens())[0], dropped

    same, unchanged = hidden(plain)
    np.testing.assert_array_equal(same, unchanged)
    names = ("q", "k", "v", "o", "gate", "up", "down")
    for layer, name in ((0, "q"), *((1, name) for name in names)):
        for path, variable in flat_params(state).items():
            value = values.get(path, np.zeros(variable.shape, np.float32))
            if f".{name}.lora_" in path:
                value[layer] = random.normal(size=value.shape[1:]).astype(np.float32) * 0.3
            variable.set_value(jnp.asarray(value))
        adapted = nnx.merge(graphdef, state)
        kept, dropped = hidden(adapted)
        assert error(dropped, kept) > 1e-2, (layer, name)
        assert error(kept, same) > 1e-2


# --- rotary tables and number formats -------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_rotary_tables_round_as_numpy_casts(transform):
    """A compiler that undid the rounding would give float32's numbers back."""
    rounded = dataclasses.replace(TINY, head_dim=64, rotary_dtype="float16")
    exact = dataclasses.replace(rounded, rotary_dtype="float32")
    positions = jnp.arange(1000, dtype=jnp.int32)[None]
    both = transform(lambda p: (rotary_tables(p, rounded), rotary_tables(p, exact)))(positions)
    for found, full in zip(*both, strict=True):
        found, full = np.asarray(found), np.asarray(full)
        assert found.dtype == np.float32
        cast = full.astype(np.float16).astype(np.float32)
        normal = np.abs(full) >= 2.0**-14  # below, float16 has fewer digits and ours gives zero
        assert normal.mean() > 0.99
        np.testing.assert_array_equal(found[normal], cast[normal])
        np.testing.assert_allclose(found, cast, atol=2.0**-14)
        assert (found != full).mean() > 0.5


THETA = 10_000.0  # of every configuration and of the released base model


@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 48, 64, 80, 128])
def test_rotary_frequencies_are_pytorchs(head_dim):
    """Bit for bit, but one that PyTorch's vectorised power rounds the other way on some CPUs."""
    config = transformers.MistralConfig(head_dim=head_dim, rope_theta=THETA)
    theirs = MistralRotaryEmbedding(config).inv_freq.numpy()
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    np.testing.assert_array_equal(theirs, (1.0 / THETA**exponents).numpy())
    found = rotary_frequencies(head_dim, THETA)
    assert found.dtype == np.float32
    np.testing.assert_array_max_ulp(found, theirs, maxulp=1)
    assert (found != theirs).sum() <= 1
    exact = 1 / (THETA ** exponents.double()).float()  # PyTorch's scalar power, rounded once
    np.testing.assert_array_equal(found, exact.numpy())


@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotary_tables_are_pytorchs_at_late_positions(head_dim):
    """Equal up to rounding; with frequencies computed in another order far from it."""
    config = dataclasses.replace(TINY, head_dim=head_dim)
    positions = np.arange(1400, dtype=np.int32)[None]
    theirs = MistralRotaryEmbedding(
        transformers.MistralConfig(head_dim=head_dim, rope_theta=THETA)
    )(torch.zeros(1), torch.from_numpy(positions))
    half = head_dim // 2
    other = positions[0, :, None] * THETA ** -(np.arange(half, dtype=np.float32) / half)
    tables = rotary_tables(jnp.asarray(positions), config)
    for found, table, function in zip(tables, theirs, (np.cos, np.sin), strict=True):
        expected = table[0, :, :half].numpy()
        np.testing.assert_allclose(found[0, 0], expected, atol=1.2e-7)
        assert np.abs(function(other) - expected).max() > 1e-5


def test_rotation_in_bfloat16_is_that_in_float32_rounded():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 2, 9, 8)), jnp.bfloat16)
    tables = rotary_tables(jnp.arange(9, dtype=jnp.int32)[None], TINY)
    found = rotate(x, *tables)
    assert found.dtype == jnp.bfloat16
    expected = rotate(x.astype(jnp.float32), *tables).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_runs_in_bfloat16(models, ids):
    plain, _ = models[TINY]
    config = dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16")
    half = nnx.eval_shape(lambda: Mistral(config, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(plain))
    logits = run(nnx.merge(nnx.graphdef(half), state), ids, plain_tokens())
    assert logits.dtype == jnp.float32
    assert 1e-4 < error(logits, run(plain, ids, plain_tokens())) < 0.15


def test_every_parameter_has_an_axis_name_a_dimension():
    config = dataclasses.replace(TINY, lora=LoRAConfig(rank=2, alpha=2.0))
    state = nnx.state(nnx.eval_shape(lambda: Mistral(config, rngs=nnx.Rngs(0))), nnx.Param)
    params = flat_params(state)
    assert len(params) == 3 + 2 + 7 * 3
    for path, variable in params.items():
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == len(variable.shape), path
        assert (names[0] == "layers") == path.startswith("layers."), path
