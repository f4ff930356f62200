"""Distances between two sets of clips, FVD and JEDi, from the features of a network on disk.

FVD: Unterthiner et al., "Towards Accurate Generative Models of Video" (arXiv 1812.01717), the
distance of Heusel et al., "GANs Trained by a Two Time-Scale Update Rule" (NeurIPS 2017), of I3D's
features. JEDi: Luo et al., "Beyond FVD" (ICLR 2025, arXiv 2410.05203), of V-JEPA's. AnimeGamer's
paper uses neither. They compare the distributions of all clips, regardless of which clip answers
which instruction, and give one number for all games.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from animegamer_jax.convert.sources import import_torch
from animegamer_jax.errors import UserError, first_line

VideoFeatures = Callable[[UInt8[np.ndarray, "n f h w 3"]], Float[np.ndarray, "n e"]]
"""Function that returns one feature vector per clip."""


def frechet_distance(
    a: Float[np.ndarray, "n e"], b: Float[np.ndarray, "m e"], *, least: int | None = None
) -> float:
    """Returns the Fréchet distance of Gaussians fitted to two sets of features, in squared units.

        d = |mu_a - mu_b|^2 + Tr(S_a + S_b - 2 (S_a S_b)^(1/2))

    (Heusel et al. 2017, equation 6), with means mu and unbiased covariances S, in float64. The
    trace of the root is the sum of the singular values of A B^T, where S_a = A^T A and S_b = B^T B:
    which, unlike a matrix root, is exact for singular covariances. The estimate is biased upwards,
    more so for fewer clips, so only distances of equal numbers of clips are comparable.

    Args:
        a: Features, one row per clip.
        b: Features of the other set.
        least: Smallest number of clips of each set; None: the number of features plus one, below
            which the covariances do not have full rank.

    Raises:
        UserError: A set has fewer clips.
        ValueError: A feature is not finite.
    """
    a, b = _checked(a, b, "the Fréchet distance", a.shape[1] + 1 if least is None else least)
    (mean_a, root_a), (mean_b, root_b) = _moments(a), _moments(b)
    roots = np.linalg.svd(root_a @ root_b.T, compute_uv=False).sum()
    spread = np.square(root_a).sum() + np.square(root_b).sum() - 2 * roots
    return float(max(np.square(mean_a - mean_b).sum() + spread, 0.0))


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean, and rows R whose product R^T R is the covariance."""
    mean = x.mean(0)
    return mean, (x - mean) / np.sqrt(len(x) - 1)


def jedi(a: Float[np.ndarray, "n e"], b: Float[np.ndarray, "m e"]) -> float:
    """Returns JEDi, 100 times the squared maximum mean discrepancy with a polynomial kernel.

        mmd = mean k(a, a') + mean k(b, b') - 2 mean k(a, b),   k(x, y) = (x . y / e)^2

    for features of length e, over all pairs including each clip with itself, in float64. Kernel,
    pairs and factor are those of its published code, so it is biased, and 0 for two equal sets.

    Raises:
        UserError: A set has fewer than 2 clips.
        ValueError: A feature is not finite.
    """
    a, b = _checked(a, b, "the maximum mean discrepancy", 2)

    def mean(x: np.ndarray, y: np.ndarray) -> float:
        return np.square(x @ y.T / x.shape[1]).mean()

    return 100 * float(mean(a, a) + mean(b, b) - 2 * mean(a, b))


def _checked(a: np.ndarray, b: np.ndarray, what: str, least: int) -> tuple[np.ndarray, np.ndarray]:
    if min(len(a), len(b)) < max(2, least):
        raise UserError(
            f"{what}: expected {max(2, least)} clips or more on both sides, for features of length "
            f"{a.shape[1]}, found {len(a)} and {len(b)}: play more games or longer ones"
        )
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("a feature is not finite")
    return a, b


class TorchScriptFeatures:
    """Computes features with a TorchScript file, a program: load only files that you trust.

    It is called with float32 [b, 3, t, h, w] in 0 to 255 and returns [b, e].

    Args:
        path: The file.
        options: Keywords of the call.
        least_frames: Smallest number of frames of a clip.
        batch_size: Number of clips that go through the network together.

    Raises:
        UserError: The file is missing or not TorchScript, or torch is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        options: Mapping[str, bool] | None = None,
        least_frames: int = 1,
        batch_size: int = 8,
    ):
        self.path, self.options = Path(path), dict(options or {})
        self.least_frames, self.batch_size = least_frames, batch_size
        torch = import_torch()
        if not self.path.is_file():
            raise UserError(f"{self.path}: no such file: expected a TorchScript file")
        try:
            with warnings.catch_warnings():  # I3D is published as TorchScript only
                warnings.filterwarnings("ignore", r".*torch\.jit")
                self._model: Any = torch.jit.load(str(self.path), map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            reason = first_line(error, most=120)
            raise UserError(f"{self.path}: not a complete TorchScript file ({reason})") from None

    def __call__(self, clips: UInt8[np.ndarray, "n f h w 3"]) -> Float[np.ndarray, "n e"]:
        """Returns one feature vector per clip.

        Raises:
            UserError: Clips are too short, or the network refuses them or returns something else.
        """
        torch = import_torch()
        if clips.shape[1] < self.least_frames:
            raise UserError(
                f"{self.path}: expected clips of {self.least_frames} frames or more, found "
                f"{clips.shape[1]}"
            )
        found = []
        for start in range(0, len(clips), self.batch_size):
            video = clips[start : start + self.batch_size].transpose(0, 4, 1, 2, 3)
            try:
                with torch.inference_mode():
                    answer = self._model(torch.from_numpy(video.astype(np.float32)), **self.options)
            except RuntimeError as error:
                last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise UserError(
                    f"{self.path}: it does not take clips of shape {video.shape[1:]} ({last[:160]})"
                ) from None
            shape = tuple(getattr(answer, "shape", ()))
            if len(shape) != 2 or shape[0] != len(video):
                raise UserError(
                    f"{self.path}: expected one vector for each of {len(video)} clips, found "
                    f"{shape or type(answer).__name__}"
                )
            found.append(answer.float().numpy())
        return np.concatenate(found)


def load_i3d(path: str | Path, *, batch_size: int = 8) -> TorchScriptFeatures:
    """Loads the features of FVD: `i3d_torchscript.pt` by StyleGAN-V's authors, 400 per clip.

    It takes 0 to 255, resizes to 224 x 224 itself, and pools over time: fewer than 10 frames leave
    nothing.

    Raises:
        UserError: The file is missing or not TorchScript, or torch is not installed.
    """
    options = {"rescale": True, "resize": True, "return_features": True}
    return TorchScriptFeatures(path, options=options, least_frames=10, batch_size=batch_size)
