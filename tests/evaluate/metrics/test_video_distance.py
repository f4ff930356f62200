"""Distances of sets of clips: known Gaussians, scipy's matrix root, and TorchScript files."""

import warnings

import numpy as np
import pytest
import scipy.linalg

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.video_distance import (
    TorchScriptFeatures,
    frechet_distance,
    jedi,
    load_i3d,
)

torch = pytest.importorskip("torch")


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def with_moments(mean: np.ndarray, covariance: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Features that have exactly this mean and this covariance."""
    x = np.random.default_rng(seed).normal(size=(count, len(mean)))
    x -= x.mean(0)
    x = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T
    return mean + x @ np.linalg.cholesky(covariance).T


def test_gaussians_of_known_distance():
    """Of diagonal covariances it is the sum of squared differences of means and deviations."""
    deviations = np.array([1.0, 2.0, 0.5]), np.array([3.0, 2.0, 0.25])
    means = np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 4.0])
    a, b = (
        with_moments(mean, np.diag(d**2), 50 + i, seed=i)
        for i, (mean, d) in enumerate(zip(means, deviations, strict=True))
    )
    expected = (1 + 0 + 4) + (4 + 0 + 0.0625)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)


def test_any_covariances_agree_with_scipys_matrix_root(random):
    a = random.normal(size=(60, 12)) @ random.normal(size=(12, 12))
    b = random.normal(size=(80, 12)) @ random.normal(size=(12, 12)) + 1
    covariances = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1])
    expected = np.square(a.mean(0) - b.mean(0)).sum()
    expected += np.trace(covariances[0] + covariances[1] - 2 * np.real(root))
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_equal_sets_are_at_no_distance_and_float32_is_no_loss(random):
    x = (random.normal(size=(40, 8)) + 100).astype(np.float32)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(x, x + 2) == pytest.approx(4 * 8, rel=1e-6)
    assert jedi(x, x) == pytest.approx(0, abs=1e-6)


def test_covariances_without_full_rank_need_to_be_asked_for(random):
    a, b = random.normal(size=(2, 6, 20))
    with pytest.raises(UserError, match="expected 21 clips or more on both sides, for features"):
        frechet_distance(a, b)
    assert frechet_distance(a, b, least=6) > 0
    with pytest.raises(UserError, match=r"expected 2 clips or more on both sides.*found 1 and 6"):
        frechet_distance(a[:1], b, least=1)
    with pytest.raises(UserError, match="maximum mean discrepancy: expected 2 clips"):
        jedi(a, b[:1])
    a[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        jedi(a, b)


def test_the_discrepancy_is_that_of_jedis_own_example():
    """Its `mmd_polynomial.py` gives 270.7 for these two sets (degree 2, no constant)."""
    a = np.arange(1.0, 10).reshape(3, 3)
    b = np.array([[7.0, 6, 5], [4, 3, 2], [1, 1, 8], [0, 2, 5]])
    assert jedi(a, b) == pytest.approx(27070, abs=5)
    pairs = [((x @ y) / 3) ** 2 for x in a for y in b]
    same = [[((x @ y) / 3) ** 2 for x in s for y in s] for s in (a, b)]
    by_hand = np.mean(same[0]) + np.mean(same[1]) - 2 * np.mean(pairs)
    assert jedi(a, b) == pytest.approx(100 * by_hand, rel=1e-12)


def test_distances_grow_as_sets_drift_apart(random):
    a = random.normal(size=(200, 6))
    for distance in (frechet_distance, jedi):
        found = [distance(a, a * (1 + s) + s) for s in (0, 0.25, 0.5, 1)]
        assert (np.diff(found) > 0).all()


class Tiny(torch.nn.Module):
    """Called as I3D's file is: means of the first frames' colours."""

    def forward(
        self,
        x: torch.Tensor,
        rescale: bool = False,
        resize: bool = False,
        return_features: bool = False,
    ) -> torch.Tensor:
        assert resize and return_features  # noqa: PT018
        if rescale:
            x = x * 2 / 255 - 1
        return x[:, :, 0].mean(dim=(2, 3))


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchscript")
    with warnings.catch_warnings():
        # It is deprecated, by a warning whose class depends on PyTorch's version.
        warnings.simplefilter("ignore")
        for module in (Tiny(), Plain()):
            torch.jit.script(module).save(str(folder / f"{type(module).__name__}.pt"))
    return folder


def test_a_torchscript_file_makes_features(files, random):
    clips = random.integers(0, 256, (5, 12, 8, 10, 3)).astype(np.uint8)
    found = load_i3d(files / "Tiny.pt", batch_size=2)(clips)
    np.testing.assert_allclose(found, clips[:, 0].mean((1, 2)) / 127.5 - 1, atol=1e-5)
    assert frechet_distance(found, found) == pytest.approx(0, abs=1e-9)
    with pytest.raises(UserError, match="clips of 10 frames or more, found 9"):
        load_i3d(files / "Tiny.pt")(clips[:, :9])


def test_files_that_do_not_fit_are_refused(files, tmp_path):
    clips = np.zeros((2, 12, 8, 10, 3), np.uint8)
    with pytest.raises(UserError, match=r"gone\.pt: no such file: expected a TorchScript file"):
        load_i3d(files / "gone.pt")
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"bad\.pt: not a complete TorchScript file"):
        load_i3d(tmp_path / "bad.pt")
    with pytest.raises(UserError, match=r"Plain\.pt: it does not take clips of shape"):
        load_i3d(files / "Plain.pt")(clips)
    with pytest.raises(UserError, match=r"expected one vector for each of 2 clips, found \(2, 3,"):
        TorchScriptFeatures(files / "Plain.pt")(clips)
