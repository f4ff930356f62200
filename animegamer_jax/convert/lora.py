"""Writes the low-rank updates of a bundle's decoder as a file that diffusers loads.

The names are those of diffusers' CogVideoX transformer (`load_lora_adapter`), whose base weights
are those of the decoder. Training changes the layers' modulation and the motion layer as well:
those are not low-rank, and `animegamer export` writes them with all others.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.convert.networks import lora_of
from animegamer_jax.convert.sources import write_safetensors
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors

_PREFIX = "transformer.transformer_blocks.{}.attn1.{}.lora_{}.weight"
_PARTS = ("to_q", "to_k", "to_v")
_OUT = "to_out.0"


def export_lora(bundle: str, out: Path) -> tuple[int, int]:
    """Writes the decoder's low-rank updates to a safetensors file, float32.

    The factor of an update is in its second matrix, so diffusers' own factor is one.

    Args:
        bundle: Bundle to read: a folder, or a gs:// address.
        out: File to write.

    Returns:
        The number of layers, and the rank.

    Raises:
        UserError: The bundle has no decoder with low-rank updates, or `out` exists.
    """
    opened = Bundle.open(bundle)
    if out.exists():
        raise UserError(f"--lora {out}: expected no such file, found one: choose another name")
    lora = lora_of("dit", opened.config.dit) if opened.has("dit") else None
    if lora is None:
        raise UserError(
            f"{bundle}: no decoder with low-rank updates: they are merged, or all weights were "
            "trained: write the decoder with --out"
        )
    read = opened.read_together(
        "dit", [f"layers.blocks.{map_}.lora_{x}" for map_ in ("qkv", "out") for x in "ab"]
    )
    updates = {
        "A": (read["layers.blocks.qkv.lora_a"], read["layers.blocks.out.lora_a"], 1.0),
        "B": (read["layers.blocks.qkv.lora_b"], read["layers.blocks.out.lora_b"], lora.scale),
    }
    layers = len(read["layers.blocks.out.lora_a"])

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for letter, (qkv, attention_out, factor) in updates.items():
            for layer in range(layers):
                parts = dict(zip(_PARTS, qkv[layer], strict=True)) | {_OUT: attention_out[layer]}
                for part, matrix in parts.items():
                    value = matrix.astype(np.float32).T * np.float32(factor)
                    yield _PREFIX.format(layer, part, letter), np.ascontiguousarray(value)

    shapes = {name: (value.shape, value.dtype) for name, value in tensors()}
    with user_errors(out, "cannot be written", hint="free space there, or choose another file"):
        write_safetensors(out, shapes, tensors())
    return layers, lora.rank
