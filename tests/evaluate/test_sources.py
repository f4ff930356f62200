"""The systems of an evaluation, as options name them."""

import pytest

from animegamer_jax.evaluate.options import Options
from animegamer_jax.evaluate.sources import choose_sources


def names(**options) -> list[str]:
    return [source.name for source in choose_sources(Options(**options))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["toy"]),
        ({"played": ("games/theirs",)}, ["theirs"]),
        ({"model": ("out/a", "mine=out/b"), "played": ("old=x",)}, ["a", "mine", "old"]),
        ({"model": ("one/a", "two/a", "three/a")}, ["a", "a-2", "a-3"]),
        ({"model": ("a",), "window": (3,)}, ["a"]),
        ({"model": ("a",), "window": (1, 3)}, ["a-window-1", "a-window-3"]),
        ({"model": ("a",), "history": ("shown", "predicted")}, ["a-shown", "a-predicted"]),
    ],
)
def test_each_system_has_a_name_of_its_own(options, expected):
    assert names(**options) == expected


def test_a_folder_with_an_equals_sign_in_its_path(tmp_path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    (source,) = choose_sources(Options(model=(f"{folder}",)))
    assert (source.name, source.path) == ("a=b", str(folder))
