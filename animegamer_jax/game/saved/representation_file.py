"""The file of a shot representation: arrays in NumPy's compressed format, which nobody trusts.

If the decoder has a memory (`DiTConfig.memory`), it also has the latents of the first frame.
"""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.untrusted import ArrayFile, open_arrays

_NAME, _LATENTS = "representation", "latents"
_MOST_NUMBERS = 1 << 22  # the released model has 226 x 3,072


def write_representation(
    path: Path,
    representation: Float32[np.ndarray, "n d"],
    first_latents: Float32[np.ndarray, "h w c"] | None = None,
) -> None:
    """Writes a shot representation, and the latents of the first frame if there are any.

    Raises:
        OSError: Full disk, read-only folder.
    """
    arrays = io.BytesIO()
    more: dict[str, Any] = {} if first_latents is None else {_LATENTS: first_latents}
    np.savez_compressed(arrays, representation=representation, **more)
    write_whole(path, arrays.getvalue())


def read_representation(
    path: Path, shape: tuple[int, ...] | None
) -> tuple[Float32[np.ndarray, "n d"], Float32[np.ndarray, "h w c"] | None]:
    """Reads a shot representation, and the latents of the first frame; None: the file has none.

    Sizes are checked before anything is unpacked.

    Args:
        path: The file.
        shape: Shape of the game's other representations; None: there are none.

    Raises:
        UserError: It is missing, damaged, too large, of another type or shape, or not finite.
    """
    axes = "two axes" if shape is None else f"shape {list(shape)}"
    with open_arrays(path, expected=f"a float32 array {_NAME!r} of {axes}") as arrays:
        representation = _read(arrays, path, _NAME, axes=axes, rank=2, shape=shape)
        if _LATENTS not in arrays.names:
            return representation, None
        return representation, _read(arrays, path, _LATENTS, axes="three axes", rank=3, shape=None)


def _read(
    arrays: ArrayFile, path: Path, name: str, *, axes: str, rank: int, shape: tuple[int, ...] | None
) -> np.ndarray:
    kind, size = arrays.header(name)
    if kind != np.float32 or len(size) != rank or shape not in (None, size):
        found = f"{kind} of shape {list(size)}"
        raise UserError(f"{path}: expected a float32 array {name!r} of {axes}, found {found}")
    if math.prod(size) > _MOST_NUMBERS:
        raise UserError(
            f"{path}: expected at most {_MOST_NUMBERS:,} numbers, found shape {list(size)}"
        )
    array = arrays.read(name)
    if not np.isfinite(array).all():
        raise UserError(f"{path}: expected finite numbers in {name!r}, found others")
    return array
