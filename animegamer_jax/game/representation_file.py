"""The file of a shot representation: an array in NumPy's compressed format, which nobody trusts."""

import io
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float32

from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_whole

_MEMBER = "representation.npy"
_MOST_NUMBERS = 1 << 22  # the released model has 226 x 3,072

# Errors of numpy for files that are damaged, truncated or of another kind.
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    AttributeError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


def write_representation(path: Path, representation: Float32[np.ndarray, "n d"]) -> None:
    """Writes a shot representation.

    Raises:
        OSError: full disk, read-only folder.
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
        UserError: it is missing, damaged, too large, of another type or shape, or not finite.
    """
    expected = "a float32 array 'representation' of " + (
        "two axes" if shape is None else f"shape {list(shape)}"
    )
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            with archive.open(_MEMBER) as file:
                kind, size = _read_header(file)
            if kind != np.float32 or len(size) != 2 or shape not in (None, size):
                found = f"{kind} of shape {list(size)}"
                raise UserError(f"{path}: expected {expected}, found {found}")
            if math.prod(size) > _MOST_NUMBERS:
                raise UserError(
                    f"{path}: expected at most {_MOST_NUMBERS:,} numbers, found shape {list(size)}"
                )
            with archive.open(_MEMBER) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected {expected}, found no such file") from error
    except _UNREADABLE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: expected {expected}, found: {reason}") from error
    if not np.isfinite(array).all():
        raise UserError(f"{path}: expected finite numbers in 'representation', found others")
    return array


def _read_header(file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...]]:
    """Returns type and shape of an array in NumPy's format, from its first bytes."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"version {version} of NumPy's format")
    shape, _, kind = readers[version](file)
    return kind, shape
