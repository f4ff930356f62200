"""Tables of rules: tensors to parameters and back, and every problem at once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from small_network import RULES, Small, write_random

from animegamer_jax.convert import rules as R
from animegamer_jax.convert.rules import TRANSPOSE, Rule
from animegamer_jax.convert.sources import open_torch
from animegamer_jax.errors import UserError

pytest.importorskip("torch")


def test_stacks_layers_and_parts(small, small_file):
    source = open_torch(small_file)
    leaves = dict(R.convert(RULES, source, small))
    assert {k: v.shape for k, v in leaves.items()} == {k: v.shape for k, v in small.items()}
    fused = source.read("h.2.qkv.weight").reshape(3, 8, 8)
    np.testing.assert_array_equal(leaves["layers.blocks.qkv.kernel"][2, 1], fused[1].T)
    np.testing.assert_array_equal(
        leaves["layers.blocks.qkv.lora_a"][1, 2], source.read("h.1.A.2").T
    )
    np.testing.assert_array_equal(leaves["layers.blocks.out.bias"][0], source.read("h.0.out.bias"))


def test_export_is_the_inverse(small, small_file):
    source = open_torch(small_file)
    leaves = dict(R.convert(RULES, source, small))
    out = dict(R.export(RULES, leaves.__getitem__, small))
    assert out.keys() == source.shapes.keys()
    for name, value in out.items():
        original = name.replace("twin", "bias")  # a copy takes the value of what it copies
        np.testing.assert_array_equal(value, source.read(original), strict=True)


def test_load_fills_a_module(small_file):
    module = Small(nnx.Rngs(1))
    source = open_torch(small_file)
    R.load(RULES, source, module)
    np.testing.assert_array_equal(module.norm.scale[...], source.read("norm.weight"))
    kernel = module.layers.blocks.out.kernel[...]
    np.testing.assert_array_equal(kernel[2], source.read("h.2.out.weight").T)


def test_every_problem_at_once(small):
    shapes = {name: shape for name, (shape, _) in R.export_shapes(RULES, small).items()}
    del shapes["h.1.A.2"], shapes["norm.bias"]
    shapes |= {"stranger": (2, 3), "h.0.out.weight": (8, 6), "loss.logvar": ()}
    rules = (*RULES, Rule("norm.gain", "norm.scale"), Rule("norm.weight", "nowhere"))
    rules = tuple(rule for rule in rules if rule.target != "layers.blocks.out.bias")
    with pytest.raises(UserError) as caught:
        R.raise_problems({"small.pt": R.find_problems([(rules, small)], shapes)})
    first, *lines = str(caught.value).splitlines()
    assert first == "small.pt: 10 problems, nothing is converted"
    assert {line.strip() for line in lines} == {
        "missing: h.1.A.2 [2, 8], for layers.blocks.qkv.lora_a",
        "missing: norm.bias [8], for norm.bias",
        "unused: stranger [2, 3]",
        "wrong shape: h.0.out.weight: expected [6, 8], found [8, 6]",
        "filled twice: norm.scale, from norm.weight and from norm.gain",
        "no such parameter: nowhere, from norm.weight",
        "never filled: layers.blocks.out.bias",
        *(f"unused: h.{i}.out.bias [6]" for i in range(3)),
    }


def test_a_tensor_read_by_two_tables(small):
    shapes = {name: shape for name, (shape, _) in R.export_shapes(RULES, small).items()}
    other = {"bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    tables = [(RULES, small), ((Rule("norm.bias", "bias"),), other)]
    problems = ["read twice: norm.bias for norm.bias and for bias"]
    assert R.find_problems(tables, shapes) == problems


def test_unknown_placeholder():
    rule = Rule("h.{expert}.weight", "kernel")
    abstract = {"kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    with pytest.raises(ValueError, match="expert"):
        R.find_problems([((rule,), abstract)], {})


def test_mixed_formats_take_the_wider_one(tmp_path):
    bf16, f16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
    shapes = {"w.0": ((2, 3), bf16), "w.1": ((2, 3), f16), "b": ((), bf16)}
    write_random(tmp_path / "mixed.pt", shapes)
    source = open_torch(tmp_path / "mixed.pt")
    abstract = {
        "w": jax.ShapeDtypeStruct((2, 3, 2), jnp.float32),
        "b": jax.ShapeDtypeStruct((), jnp.float32),
    }
    rules = (Rule("w.{layer}", "w", TRANSPOSE), Rule("b", "b"))
    leaves = dict(R.convert(rules, source, abstract))
    assert leaves["w"].dtype == np.float32
    np.testing.assert_array_equal(leaves["w"][0], source.read("w.0").T.astype(np.float32))
    assert leaves["b"].dtype == bf16
    assert leaves["b"].shape == ()
