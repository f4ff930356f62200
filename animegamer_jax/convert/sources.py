"""Checkpoint files in PyTorch's formats, read one tensor at a time.

A `Source` knows every tensor's name, shape and format before any is read, so that tables can be
checked first. Reading copies a tensor in blocks and releases the file's memory pages, so that a
file may be much larger than the memory. torch is needed for its own format only.
"""

import contextlib
import ctypes
import dataclasses
import errno
import json
import math
import mmap
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from annotated_types import Interval

from animegamer_jax.errors import UserError, first_line
from animegamer_jax.extras import how_to_install
from animegamer_jax.storage.serialization import from_json, parse_json, read_json
from animegamer_jax.storage.untrusted import MAX_DOCUMENT, check_file

_Size = Annotated[int, Interval(ge=0, le=1 << 48)]
_MOST_SHOWN, _MOST_LISTED, _LONGEST_NAME = 80, 8, 255  # characters, names, characters
_BLOCK_BYTES = 1 << 25  # copied before the pages are released

_SAFETENSORS_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_TORCH_DTYPES = (
    *("float32", "bfloat16", "float16", "float64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Shape and format of one tensor of a file, and the function that reads a copy of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@dataclasses.dataclass(frozen=True)
class Source:
    """Named tensors that are not read yet.

    Attributes:
        label: Name for error messages.
        tensors: The tensors by name.
        key: Entry of the file's dictionary that holds the tensors; None: the top level.
        prefix: Start of the tensors' names in the file, which the names here leave out.
    """

    label: str
    tensors: Mapping[str, Tensor]
    key: str | None = None
    prefix: str = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a copy of one tensor, in PyTorch layout."""
        return self.tensors[name].read()

    def under(self, prefix: str) -> "Source":
        """Returns the tensors whose names start with `prefix`, under names without it."""
        inside = self.renamed(
            lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None
        )
        return dataclasses.replace(inside, prefix=self.prefix + prefix)

    def select(self, keep: Callable[[str], bool]) -> "Source":
        """Returns the tensors whose names satisfy `keep`."""
        return self.renamed(lambda name: name if keep(name) else None)

    def renamed(self, new_name: Callable[[str], str | None]) -> "Source":
        """Returns every tensor under its new name; None drops it."""
        pairs = ((new_name(name), tensor) for name, tensor in self.tensors.items())
        kept = {name: tensor for name, tensor in pairs if name is not None}
        return dataclasses.replace(self, tensors=kept)

    def joined(self, other: "Source") -> "Source":
        """Returns these tensors, and those of `other` whose names are not among them."""
        label = f"{self.label} with {other.label}"
        return dataclasses.replace(self, label=label, tensors={**other.tensors, **self.tensors})


def import_torch() -> ModuleType:
    """Returns torch.

    Raises:
        UserError: torch is not installed; the message says how to install it.
    """
    try:
        import torch
    except ImportError:
        raise UserError(
            "torch is not installed, and files in PyTorch's own format need it: "
            f"{how_to_install('torch')}"
        ) from None
    return torch


def release_pages(address: int, num_bytes: int) -> None:
    """Releases the memory pages of a file mapping; a later access reads them again.

    Use it only on mappings of files, and not on private ones that were written to: data are lost
    there. Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux") or num_bytes == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    dont_need = 4  # MADV_DONTNEED
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + num_bytes - start), dont_need)


def torch_numpy(tensor: Any) -> np.ndarray:
    """Returns a torch tensor as numpy, without a copy if it is contiguous."""
    torch = import_torch()
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _read_torch(tensor: Any, mapped: bool) -> np.ndarray:
    if not mapped or not tensor.is_contiguous():
        return np.array(torch_numpy(tensor))
    flat = torch_numpy(tensor.reshape(-1))
    out = np.empty(flat.shape, flat.dtype)
    step = _BLOCK_BYTES // flat.itemsize
    for i in range(0, flat.size, step):
        block = flat[i : i + step]
        out[i : i + step] = block
        release_pages(block.ctypes.data, block.nbytes)
    return out.reshape(tuple(tensor.shape))


def _load_torch(path: Path) -> tuple[Any, bool]:
    """Returns the file's content, and whether its tensors are a mapping of the file."""
    torch = import_torch()

    def load(*, mmap: bool) -> Any:
        with warnings.catch_warnings(action="ignore"):  # about pickles, which are then refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        try:
            return load(mmap=True), True
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return load(mmap=False), False
    except pickle.UnpicklingError as error:
        text = " ".join(str(error).split())
        wanted = re.search(r"GLOBAL ([\w.]+)", text)
        is_other = "WeightsUnpickler error" not in text or "Unsupported operand" in text
        if is_other and wanted is None:
            raise UserError(_damaged(path)) from None
        raise UserError(
            f"{path}: refused, because it asks to run {wanted[1] if wanted else 'code'} while it "
            "is read: expected tensors alone (save the state dict again with torch.save, or "
            "download the file again)"
        ) from None
    except Exception as error:  # torch reads whatever the file holds, in Python
        raise UserError(f"{_damaged(path)} ({first_line(error)})") from None


def _damaged(path: Path) -> str:
    return (
        f"{path}: {path.stat().st_size:,} bytes, not a complete torch.save file: truncated, or of "
        "another kind; get it again"
    )


def open_torch(path: str | Path, *, keys: Iterable[str] = ("module", "state_dict")) -> Source:
    """Returns the tensors of a torch.save file; never runs code that the file holds.

    Args:
        path: The file.
        keys: Entries of the file's dictionary that may hold the tensors; if none of them exists,
            the tensors are expected at the top level.

    Raises:
        UserError: The file is missing, truncated or of another kind, asks to run code, or holds
            something other than tensors; or torch is not installed.
    """
    path = Path(path)
    import_torch()
    check_file(path, expected="a torch.save file")
    if not path.is_file():
        raise UserError(f"{path}: no such file: expected a torch.save file")
    content, mapped = _load_torch(path)
    key = None
    if isinstance(content, Mapping):
        key = next((k for k in keys if isinstance(content.get(k), Mapping)), None)
        content = content if key is None else content[key]
    if not isinstance(content, Mapping) or not content:
        raise UserError(
            f"{path}: expected a dictionary of tensors, found {type(content).__name__}"
            f"{' without entries' if isinstance(content, Mapping) else ''}"
        )
    return Source(str(path), dict(_torch_tensors(content, path, mapped)), key)


def _torch_tensors(
    content: Mapping[Any, Any], path: Path, mapped: bool
) -> Iterator[tuple[str, Tensor]]:
    torch = import_torch()
    known = {getattr(torch, name) for name in _TORCH_DTYPES}
    size = path.stat().st_size
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(
                f"{path}: entry {name!r:.{_MOST_SHOWN}} is of type {type(tensor).__name__}: "
                "expected tensors only"
            )
        if tensor.layout is not torch.strided or tensor.dtype not in known:
            raise UserError(
                f"{path}: tensor {name!s:.{_MOST_SHOWN}} is a {tensor.dtype} of layout "
                f"{tensor.layout}: expected a dense one in float32, bfloat16 or float16: "
                "save it again in one of these formats"
            )
        if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > size:
            raise UserError(
                f"{path}: tensor {name!s:.{_MOST_SHOWN}} of shape {list(tensor.shape)} is larger "
                f"than the file ({size:,} bytes): expected its values in the file: save it again"
            )
        read = lambda tensor=tensor: _read_torch(tensor, mapped)  # noqa: E731
        dtype = torch_numpy(torch.empty(0, dtype=tensor.dtype)).dtype
        yield str(name), Tensor(tuple(tensor.shape), dtype, read)


def _read_range(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    out = np.empty(shape, dtype)
    with path.open("rb") as file:
        file.seek(offset)
        if out.nbytes and file.readinto(out.reshape(-1).view(np.uint8).data) != out.nbytes:
            raise UserError(f"{path}: ends before its last tensor: truncated; get it again")
    return out


def open_safetensors(path: str | Path) -> Source:
    """Returns the tensors of a safetensors file.

    Raises:
        UserError: The file is missing, truncated or of another kind.
    """
    path = Path(path)
    check_file(path, expected="a safetensors file")
    if not path.is_file():
        raise UserError(f"{path}: no such file: expected a safetensors file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: Any = None
        if 0 < length <= min(size - 8, MAX_DOCUMENT):
            with contextlib.suppress(UserError):
                header = parse_json(file.read(length), str(path), hint="")
    if not isinstance(header, dict):
        raise UserError(
            f"{path}: {size:,} bytes, not a safetensors file: truncated, or of another kind; get "
            "it again"
        )
    header.pop("__metadata__", None)
    tensors = {}
    for name, content in header.items():
        where = f"{path}: tensor {name:.{_MOST_SHOWN}}"
        entry = from_json(_Entry, content, where, hint="get the file again")
        if entry.dtype not in _SAFETENSORS_DTYPES:
            raise UserError(
                f"{where} has the format {entry.dtype:.{_MOST_SHOWN}}: expected one of "
                f"{', '.join(_SAFETENSORS_DTYPES)}"
            )
        shape, dtype = entry.shape, np.dtype(_SAFETENSORS_DTYPES[entry.dtype])
        begin, end = (8 + length + offset for offset in entry.data_offsets)
        if end > size or end - begin != math.prod(shape) * dtype.itemsize:
            raise UserError(
                f"{where} needs bytes {begin:,} to {end:,}, found a file of "
                f"{size:,}: truncated; get it again"
            )
        read = lambda b=begin, s=shape, d=dtype: _read_range(path, b, s, d)  # noqa: E731
        tensors[name] = Tensor(shape, dtype, read)
    return Source(str(path), tensors)


def path_inside(folder: Path, name: str, *, where: str) -> Path:
    """Returns the path of a file or folder that a file of `folder` names.

    Links in the folder are followed, as the Hugging Face hub's own folders need it.

    Args:
        folder: The folder.
        name: Path below the folder, from a file that somebody else made.
        where: Place of the name, for the error.

    Raises:
        UserError: The name leads out of the folder, or is none that a file can have.
    """
    parts = Path(name).parts
    plain = name.isprintable() and len(name) <= _LONGEST_NAME and "\\" not in name
    if not parts or not plain or Path(name).is_absolute() or ".." in parts:
        raise UserError(f"{where}: expected a name inside {folder}, found {name!a:.{_MOST_SHOWN}}")
    return folder / name


def _open_sharded(index: Path) -> Source:
    """Opens all shards that an index file (`weight_map`: tensor to file) names."""
    hint = "expected a JSON object whose `weight_map` names a file for each tensor"
    content = read_json(index, dict[str, Any], hint=hint)
    weight_map = from_json(
        dict[str, str], content.get("weight_map"), f"{index}: weight_map", hint=hint
    )
    files = sorted(set(weight_map.values()))
    for name in files:
        path_inside(index.parent, name, where=f"{index}: weight_map")
    if absent := [name for name in files if not (index.parent / name).is_file()]:
        raise UserError(
            f"{index.parent}: {len(absent)} of {len(files)} shards named by {index.name} missing: "
            f"{', '.join(absent[:_MOST_LISTED])}{', ...' * (len(absent) > _MOST_LISTED)}: get them "
            "and convert again"
        )
    sources = {name: open_checkpoint(index.parent / name, keys=()) for name in files}
    lacking = [name for name, file in weight_map.items() if name not in sources[file].tensors]
    if lacking:
        raise UserError(
            f"{index}: {len(lacking)} tensors are not in the shard that it names, the first "
            f"{lacking[0]:.{_MOST_SHOWN}} in {weight_map[lacking[0]]}: download index and shards "
            "again"
        )
    tensors = {name: sources[file].tensors[name] for name, file in weight_map.items()}
    return Source(str(index.parent), tensors)


_IN_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


def open_checkpoint(path: str | Path, *, keys: Iterable[str] = ("module", "state_dict")) -> Source:
    """Opens a file in either format, or a folder in Hugging Face's layout, sharded or not.

    Raises:
        UserError: As `open_torch` and `open_safetensors`; a shard is missing; or the folder holds
            none of the known files.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: expected one of {', '.join(_IN_FOLDER)} in this folder")
        return (
            _open_sharded(found) if found.suffix == ".json" else open_checkpoint(found, keys=keys)
        )
    check_file(path, expected="a checkpoint")
    if not path.exists():
        raise UserError(f"{path}: no such file or folder: expected a checkpoint")
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    return open_torch(path, keys=keys)


def _checked(
    tensors: Iterable[tuple[str, np.ndarray]], names: Iterable[str], path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Passes tensors on, and makes sure that there is one for each name."""
    missing = set(names)
    for name, tensor in tensors:
        if name not in missing:
            raise ValueError(f"{path}: unknown tensor {name}")
        missing.remove(name)
        yield name, tensor
        del tensor
    if missing:
        raise ValueError(f"{path}: no values for {sorted(missing)}")


def write_torch(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    key: str | None = None,
) -> None:
    """Writes a torch.save file, with one of its tensors in memory at a time.

    The file is first written with holes in place of values; then it is mapped and filled.

    Args:
        path: The file to write; the caller renames it when it is complete.
        shapes: Shape and format of every tensor, in the file's order.
        tensors: Values of the tensors, in any order.
        key: Entry of the file's dictionary that holds the tensors; None: the top level.

    Raises:
        ValueError: A value is missing or unknown.
        OSError: The disk is full.
    """
    torch = import_torch()
    holes = {  # never touched, so they take no memory
        name: torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name))
        for name, (shape, dtype) in shapes.items()
    }
    with _stream_errors(), torch.serialization.skip_data():
        torch.save(holes if key is None else {key: holes}, path)
    del holes
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:  # on a full disk, writing to a sparse mapping would crash
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with _stream_errors(), torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    content = content if key is None else content[key]
    for name, tensor in _checked(tensors, content, path):
        target = torch_numpy(content[name].reshape(-1))
        step = _BLOCK_BYTES // target.itemsize
        values = np.ascontiguousarray(tensor).reshape(-1)
        for i in range(0, target.size, step):
            block = target[i : i + step]
            block[:] = values[i : i + step]
            release_pages(block.ctypes.data, block.nbytes)
        del tensor, values  # before the next one is created


@contextlib.contextmanager
def _stream_errors() -> Iterator[None]:
    """Names the cause that PyTorch's C++ streams leave out."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(errno.EIO, "the disk is full, or a file is too large for it") from error


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a safetensors file, with one of its tensors in memory at a time.

    Raises:
        ValueError: A value is missing or unknown.
    """
    codes = {np.dtype(dtype): code for code, dtype in _SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        code, offsets = codes[dtype], [offset, end]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + offset)
        for name, tensor in _checked(tensors, shapes, path):
            file.seek(start + header[name]["data_offsets"][0])
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
            del tensor  # before the next one is created
