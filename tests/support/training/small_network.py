"""A network of three layers, its table, and files of random tensors."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from random_modules import FLOAT

from animegamer_jax.bundle.bundle import flat_params
from animegamer_jax.configs import LoRAConfig
from animegamer_jax.convert.rules import QKV, QKV_BIAS, TRANSPOSE, Rule
from animegamer_jax.convert.sources import write_torch
from animegamer_jax.models.layer_stack import LayerStack
from animegamer_jax.models.linear import Linear, QKVLinear
from animegamer_jax.models.norms import LayerNorm


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        lora = LoRAConfig(rank=2, alpha=1.0)
        self.qkv = QKVLinear(8, config=FLOAT, lora=lora, rngs=rngs)
        self.out = Linear(8, 6, names=("heads", "embed"), config=FLOAT, rngs=rngs)


class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = LayerStack(Block, 3, config=FLOAT, rngs=rngs)
        self.norm = LayerNorm(8, eps=1e-5, config=FLOAT, rngs=rngs)


RULES = (
    Rule("h.{layer}.qkv.weight", "layers.blocks.qkv.kernel", QKV),
    Rule("h.{layer}.qkv.bias", "layers.blocks.qkv.bias", QKV_BIAS),
    Rule("h.{layer}.A.{part}", "layers.blocks.qkv.lora_a", TRANSPOSE),
    Rule("h.{layer}.B.{part}", "layers.blocks.qkv.lora_b", TRANSPOSE),
    Rule("h.{layer}.out.weight", "layers.blocks.out.kernel", TRANSPOSE),
    Rule("h.{layer}.out.bias", "layers.blocks.out.bias"),
    Rule("h.{layer}.out.twin", None, copy_of="h.{layer}.out.bias"),
    Rule("norm.weight", "norm.scale"),
    Rule("norm.bias", "norm.bias"),
    Rule("loss.*", None),
)


def abstract_of(module: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    state = nnx.state(module, nnx.Param)
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in flat_params(state).items()}


def random_values(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(values * 0.1).astype(dtype)


def write_random(path: Path, shapes: dict, *, key: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = ((n, random_values(*entry, seed=i)) for i, (n, entry) in enumerate(shapes.items()))
    write_torch(path, shapes, values, key=key)
