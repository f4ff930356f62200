"""The file of a shot representation: an array in NumPy's compressed format, which nobody trusts."""

import io
import math
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.untrusted import open_arrays

_NAME = "representation"
_MOST_NUMBERS = 1 << 22  # the released model has 226 x 3,072


def write_representation(path: Path, representation: Float32[np.ndarray, "n d"]) -> None:
    """Writes a shot representation.

    Raises:
        OSError: Full disk, read-only folder.
    """
    arrays = io.BytesIO()
    np.savez_compressed(arrays, representation=representation)
    write_whole(path, arrays.getvalue())


def read_representation(path: Path, shape: tuple[int, ...] | None) -> Float32[np.ndarray, "n d"]:
    """Reads a shot representation; its size is checked before anything is unpacked.

    Args:
        path: The file.
        shape: Shape of the game's other representations; None: there are none.

    Raises:
        UserError: It is missing, damaged, too large, of another type or shape, or not finite.
    """
    expected = f"a float32 array {_NAME!r} of " + (
        "two axes" if shape is None else f"shape {list(shape)}"
    )
    with open_arrays(path, expected=expected) as arrays:
        kind, size = arrays.header(_NAME)
        if kind != np.float32 or len(size) != 2 or shape not in (None, size):
            found = f"{kind} of shape {list(size)}"
            raise UserError(f"{path}: expected {expected}, found {found}")
        if math.prod(size) > _MOST_NUMBERS:
            raise UserError(
                f"{path}: expected at most {_MOST_NUMBERS:,} numbers, found shape {list(size)}"
            )
        array = arrays.read(_NAME)
    if not np.isfinite(array).all():
        raise UserError(f"{path}: expected finite numbers in {_NAME!r}, found others")
    return array
