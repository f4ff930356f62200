"""The decoder's low-rank updates as a file that diffusers and peft load.

diffusers' CogVideoX-2B transformer has the released decoder's attention under other names. Its
updates are the only part that fits into such a file: the motion input, the positions and the
modulation layers were trained fully and are in the bundle alone.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.convert.sources import write_safetensors
from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import user_errors

# Parts of a bundle's updates: the leading axes count layers, and of "qkv" its three maps.
_LEAVES = {"layers.blocks.qkv": ("to_q", "to_k", "to_v"), "layers.blocks.out": ("to_out.0",)}


def export_lora(bundle: Bundle, file: Path) -> int:
    """Writes the decoder's updates, named as `CogVideoXPipeline.load_lora_weights` reads them.

    The scale is multiplied into B, as the file has no place for it.

    Args:
        bundle: Bundle to read.
        file: File to write, which must not exist.

    Returns:
        The number of tensors.

    Raises:
        UserError: The bundle has no decoder, or one without low-rank updates, or the file exists.
    """
    dit = bundle.config.dit
    if dit is None or dit.lora is None or "layers.blocks.qkv.lora_a" not in bundle.leaves("dit"):
        raise UserError(
            f"{bundle.path}: its decoder has no low-rank updates: they were merged, or it was "
            "trained without: use `animegamer export`"
        )
    if file.exists():
        raise UserError(f"{file}: already there: delete it or choose another name")
    scale = dit.lora.scale
    tensors = dict(_tensors(bundle, scale))
    shapes = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    with user_errors(file, "cannot be written", hint="choose another folder"):
        write_safetensors(file, shapes, tensors.items())
    return len(tensors)


def _tensors(bundle: Bundle, scale: float) -> Iterator[tuple[str, np.ndarray]]:
    for leaf, parts in _LEAVES.items():
        found = bundle.read_together("dit", [f"{leaf}.lora_a", f"{leaf}.lora_b"])
        a, b = (found[f"{leaf}.lora_{side}"] for side in "ab")
        shape = (len(a), len(parts))
        a, b = (x.reshape(*shape, *x.shape[-2:]) for x in (a, b))
        scaled = (b.astype(np.float32) * scale).astype(b.dtype)
        for layer, number in np.ndindex(shape):
            name = f"transformer.transformer_blocks.{layer}.attn1.{parts[number]}"
            yield f"{name}.lora_A.weight", np.ascontiguousarray(a[layer, number].T)
            yield f"{name}.lora_B.weight", np.ascontiguousarray(scaled[layer, number].T)
