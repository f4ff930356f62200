"""The systems of an evaluation, as options name them."""

import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.options import Options
from animegamer_jax.evaluate.sources import Source, check_model, choose_sources
from animegamer_jax.toy.evaluation import WORLD


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


def test_a_benchmark_of_pictures_needs_a_window_with_a_place_for_them():
    benchmark = WORLD.make_benchmark("own", num_games=1, num_turns=1, seed=0)
    check_model(Source("toy", played=False, window=5), benchmark)
    with pytest.raises(UserError, match="window 1: it holds no past turn"):
        check_model(Source("toy", played=False, window=1), benchmark)
