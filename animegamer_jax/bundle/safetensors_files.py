"""Named arrays in a folder, as safetensors files: the form in which models go to a hub.

A folder holds `model.safetensors`, or several files and an index that says which array is where, as
Hugging Face's libraries write them. Files are read in place, an array or a part of one at a time.
The `safetensors` library checks that a file's header fits its size; names and shapes are compared
with the network's by `Bundle.load`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from etils import epath

from animegamer_jax.errors import first_line
from animegamer_jax.storage.paths import is_bucket
from animegamer_jax.storage.serialization import read_json
from animegamer_jax.storage.untrusted import check_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30  # of one file: as much is in memory when it is written

_DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
AGAIN = "download the model again"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Index:
    """Which file holds which array."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


class Tensors:
    """The arrays of open files, which are not read yet; as `arrays.StoredArrays`.

    Args:
        files: Open files.

    Raises:
        OSError: Two files hold the same array, or an array of an unknown type.
    """

    def __init__(self, files: Mapping[str, Any]):
        self._places: dict[str, Any] = {}
        self._shapes: dict[str, jax.ShapeDtypeStruct] = {}
        where: dict[str, str] = {}
        for file, opened in files.items():
            for name in list(opened.keys()):
                if name in where:
                    raise OSError(f"{name} is in {where[name]} and in {file}")
                view = opened.get_slice(name)
                kind = view.get_dtype()
                if kind not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise OSError(f"{name} is of type {kind}: expected one of {known}")
                where[name], self._places[name] = file, opened
                self._shapes[name] = jax.ShapeDtypeStruct(tuple(view.get_shape()), _DTYPES[kind])

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return dict(self._shapes)

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self._read(name, ...) for name in names}

    def readers(self, names: Iterable[str]) -> list[Callable[[Any], np.ndarray]]:
        return [functools.partial(self._read, name) for name in names]

    def _read(self, name: str, index: Any) -> np.ndarray:
        """Returns a copy of an array, or of a part of it."""
        return np.array(self._places[name].get_slice(name)[index])


def holds_safetensors(folder: epath.PathLike) -> bool:
    """Returns whether a local folder holds arrays in this form."""
    if is_bucket(folder):
        return False
    return any(os.path.lexists(os.path.join(folder, name)) for name in (SINGLE, INDEX))


@contextlib.contextmanager
def open_tensors(folder: epath.PathLike) -> Iterator[Tensors]:
    """Opens the files of a folder, each once, for as long as the block runs.

    Raises:
        OSError: A file is damaged or cannot be read, or the index does not fit the files.
        UserError: The index is damaged.
    """
    with contextlib.ExitStack() as stack:
        yield Tensors({f.name: stack.enter_context(_opened(f)) for f in _files(Path(folder))})


def _files(folder: Path) -> list[Path]:
    if not os.path.lexists(folder / INDEX):
        return [folder / SINGLE]
    index = read_json(folder / INDEX, _Index, hint=AGAIN)
    names = sorted(set(index.weight_map.values()))
    for name in names:  # it may not lead out of the folder
        if not _SHARD.fullmatch(name):
            raise OSError(f"{INDEX} names the file {name!r}: expected model-N-of-M.safetensors")
    return [folder / name for name in names]


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    check_file(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except SafetensorError as error:
        raise OSError(f"{file.name} is damaged ({first_line(error)})") from error


def write_tensors(
    folder: Path, arrays: Iterable[tuple[str, np.ndarray]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes arrays into files of about `shard_bytes`, one file in memory at a time.

    The folder is made, and must not exist.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        file = folder / f"part-{len(shards)}"
        save_file(shard, file, metadata={"format": "np"})
        file.chmod(0o644)  # the library makes files for their owner alone
        shards.append(list(shard))
        shard.clear()

    for name, array in arrays:
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > shard_bytes:
            write()
        shard[name] = np.ascontiguousarray(array).reshape(array.shape)
        total += array.nbytes
    write()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (folder / f"part-{number}").rename(folder / file)
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
