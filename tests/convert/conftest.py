"""A small network's parameters, and a file of them.

Imported here, the package would not be checked for shapes, so each fixture imports what it needs.
"""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Shapes and formats of the network's parameters."""
    from flax import nnx
    from small_network import Small, abstract_of

    return abstract_of(nnx.eval_shape(lambda: Small(nnx.Rngs(0))))


@pytest.fixture
def small_file(tmp_path, small) -> Path:
    """A file of `torch.save` with random values under the names that the table asks for."""
    from small_network import RULES, write_random

    from animegamer_jax.convert.rules import export_shapes

    path = tmp_path / "small.pt"
    write_random(path, export_shapes(RULES, small), key="module")
    return path
