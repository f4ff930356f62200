"""A folder for the clips of films.

Imported here, the package would not be checked for shapes, so each fixture imports what it needs.
"""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    from cut_films import SETTINGS

    from animegamer_jax.data.films.clips.store import open_shots

    return open_shots(tmp_path / "shots", SETTINGS)
