"""The file of a shot representation: arrays in NumPy's compressed format, which nobody trusts.

If the decoder remembers first frames (`DiTConfig.memory`), it also has the latents of the turn's.
"""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.turns import TurnRecord
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.untrusted import ArrayFile, open_arrays

_NAME, _LATENTS = "representation", "latents"
_MOST_NUMBERS = 1 << 22  # the released model has 226 x 3,072


def write_representation(
    path: Path,
    representation: Float32[np.ndarray, "n d"],
    latents: Float32[np.ndarray, "y x c"] | None = None,
) -> None:
    """Writes a shot representation, and the latents of the first frame if there are any.

    Raises:
        OSError: Full disk, read-only folder.
    """
    arrays = io.BytesIO()
    more: dict[str, Any] = {} if latents is None else {_LATENTS: latents}
    np.savez_compressed(arrays, representation=representation, **more)
    write_whole(path, arrays.getvalue())


def read_representation(path: Path, shape: tuple[int, ...] | None) -> Float32[np.ndarray, "n d"]:
    """Reads a shot representation; its size is checked before anything is unpacked.

    Args:
        path: The file.
        shape: Shape of the game's other representations; None: there are none.

    Raises:
        UserError: It is missing, damaged, too large, of another type or shape, or not finite.
    """
    axes = "two axes" if shape is None else f"shape {list(shape)}"
    with open_arrays(path, expected=f"a float32 array {_NAME!r} of {axes}") as arrays:
        return _read(arrays, path, _NAME, axes=axes, rank=2, shape=shape)


def read_latents(path: Path) -> Float32[np.ndarray, "y x c"] | None:
    """Reads the latents of a turn's first frame; None: the file has none.

    Raises:
        UserError: The file is missing or damaged, or they are too large, of another type or number
            of axes, or not finite.
    """
    with open_arrays(path, expected=f"a float32 array {_LATENTS!r} of three axes") as arrays:
        if _LATENTS not in arrays.names:
            return None
        return _read(arrays, path, _LATENTS, axes="three axes", rank=3, shape=None)


def check_turn(
    name: str,
    turn: TurnRecord,
    *,
    representation: tuple[int, int],
    latents: tuple[int, int, int] | None,
) -> None:
    """Checks that what a file has of a turn fits a model.

    Args:
        name: Name of the file.
        turn: What it has.
        representation: Shape of the model's shot representations.
        latents: Shape of the latents of a first frame; None: the decoder remembers none.

    Raises:
        UserError: A shape differs, or the latents are missing.
    """
    if turn.representation.shape != representation:
        raise UserError(
            f"{name}: expected a shot representation of shape {list(representation)}, found "
            f"{list(turn.representation.shape)}"
        )
    found = None if turn.latents is None else turn.latents.shape
    if latents is not None and found != latents:
        raise UserError(
            f"{name}: expected latents of the first frame of shape {list(latents)}, which the "
            f"model's decoder remembers, found {'none' if found is None else list(found)}"
        )


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
