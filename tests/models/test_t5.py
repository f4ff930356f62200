"""T5's encoder against transformers, and its table against the released file's names."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_modules import initialized

from animegamer_jax.bundle.bundle import abstract_params
from animegamer_jax.configs import T5Config
from animegamer_jax.convert.rules import find_problems, load
from animegamer_jax.convert.sources import Source, Tensor
from animegamer_jax.convert.tables.t5 import infer_config, rules
from animegamer_jax.errors import UserError
from animegamer_jax.models.t5 import T5Encoder, relative_position_buckets

MANIFEST = Path(__file__).parents[1] / "manifests" / "t5_v1_1_xxl_encoder.json"
TINY = T5Config(vocab_size=50, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=2)


def _shapes(manifest: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in json.loads(manifest.read_text()).items()}


def _error(actual, expected) -> float:
    expected = np.asarray(expected)
    return float(np.abs(np.asarray(actual) - expected).max() / np.sqrt(np.square(expected).mean()))


def test_table_is_the_released_file():
    shapes = _shapes(MANIFEST)
    config = infer_config(shapes)
    assert config == T5Config()
    assert find_problems([(rules(config), abstract_params("t5", config))], shapes) == []
    module = nnx.eval_shape(lambda: T5Encoder(config, rngs=nnx.Rngs(0)))
    for path, param in nnx.to_flat_state(nnx.state(module)):
        assert len(param.get_metadata()["out_sharding"]) == param.ndim, path


def test_infer_config_names_what_is_missing():
    shapes = _shapes(MANIFEST)
    del shapes["encoder.block.0.layer.0.SelfAttention.q.weight"]
    with pytest.raises(UserError, match=r"SelfAttention\.q\.weight.*no such tensor"):
        infer_config(shapes)


@pytest.fixture(scope="module")
def torch_t5():
    """A tiny random T5 v1.1 of transformers, and ours with its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        import transformers

        torch.manual_seed(0)
        theirs = transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=TINY.vocab_size,
                d_model=TINY.d_model,
                d_kv=TINY.d_kv,
                d_ff=TINY.d_ff,
                num_layers=TINY.num_layers,
                num_heads=TINY.num_heads,
                feed_forward_proj="gated-gelu",
            )
        ).eval()
        for param in theirs.parameters():  # norms of ones and tiny biases would test little
            torch.nn.init.normal_(param, std=0.3)
    tensors = {name: value.numpy() for name, value in theirs.state_dict().items()}
    assert infer_config({name: value.shape for name, value in tensors.items()}) == TINY
    ours = nnx.eval_shape(lambda: T5Encoder(TINY, rngs=nnx.Rngs(0)))
    source = {name: Tensor(value.shape, value.dtype, value.copy) for name, value in tensors.items()}
    load(rules(TINY), Source("tiny", source), ours)
    return theirs, ours


@pytest.mark.parametrize("masked", [False, True])
def test_transformers(torch_t5, masked):
    torch = pytest.importorskip("torch")

    theirs, ours = torch_t5
    tokens = np.random.default_rng(1).integers(1, TINY.vocab_size, (2, 30))
    tokens[0, 11:] = 0
    valid = (tokens != 0) if masked else np.ones_like(tokens, bool)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(valid).long()
        ).last_hidden_state.numpy()
    run = jax.jit(lambda module, *args: module(*args))
    actual = run(ours, jnp.asarray(tokens), jnp.asarray(valid) if masked else None)
    assert _error(np.asarray(actual)[valid], expected[valid]) < 1e-5


def test_buckets_up_to_and_beyond_the_largest_distance():
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    offset = torch.arange(300)[None, :] - torch.arange(300)[:, None]
    expected = T5Attention._relative_position_bucket(offset).numpy()
    actual = relative_position_buckets(300, num_buckets=32, max_distance=128)
    np.testing.assert_array_equal(actual, expected)
    assert actual.max() == 31


def test_bfloat16_stays_close():
    configs = TINY, T5Config(**{**vars(TINY), "dtype": "bfloat16"})
    full, half = (initialized(lambda c=c: T5Encoder(c, rngs=nnx.Rngs(0))) for c in configs)
    tokens = np.arange(12, dtype=np.int32)[None]
    expected, found = (jax.jit(lambda m, x: m(x))(module, tokens) for module in (full, half))
    assert found.dtype == jnp.bfloat16
    assert _error(np.asarray(found).astype(np.float32), expected) < 0.1
