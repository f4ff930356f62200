"""Classifiers that read character, place and time off generated clips of the toy world.

There are three: CLIP's image embedding against text (zero-shot), against embeddings of rendered
clips, and the same with colours and pixels in place of a network. Each is checked on true clips,
and the most accurate one is used for each attribute.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, Clips
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import CHARACTERS, LEVELS, MOTIONS, PLACES, TIMES, Scene

VALUES: Mapping[str, tuple[str, ...]] = {
    "character": CHARACTERS,
    "place": PLACES,
    "time": TIMES,
}
"""The possible values of each attribute."""
ATTRIBUTES = tuple(VALUES)
PROMPTS: Mapping[str, tuple[str, ...]] = {
    "character": CHARACTERS,
    "place": tuple(f"the {place}" for place in PLACES),
    "time": TIMES,
}

LEAST_ACCURACY = 0.99
"""Accuracy on true clips that a classifier needs before its answers count as scores."""
_NUM_FRAMES_USED = 5

Features = Callable[[Clips], Float32[np.ndarray, "n f e"]]
Predictions = Mapping[str, Int[np.ndarray, " n"]]


@runtime_checkable
class Classifier(Protocol):
    """Predicts the value of each attribute in each clip, as an index into `VALUES`."""

    name: str

    def __call__(self, clips: Clips) -> Predictions: ...


def _some_frames(clips: Clips) -> UInt8[np.ndarray, "n k h w 3"]:
    """Returns a few frames of each clip, evenly spread, with the first and the last."""
    count = min(_NUM_FRAMES_USED, clips.shape[1])
    return clips[:, np.linspace(0, clips.shape[1] - 1, count).round().astype(int)]


# Features without a network


def colour_features(clips: Clips) -> Float32[np.ndarray, "n f e"]:
    """Returns each frame averaged to 8 rows and 12 columns, and its histogram of colours.

    The histogram does not depend on where things stand: the square root of the share of each of
    6 x 6 x 6 colours, with each pixel spread linearly over the levels on both sides of it.
    """
    return np.stack([_colours(clip.astype(np.float32) / 255) for clip in clips])


def _colours(frames: np.ndarray) -> np.ndarray:
    coarse = _averaged(frames, 8, 12).reshape(len(frames), -1)
    shares = np.sqrt(_histogram(frames, levels=6))
    features = np.concatenate([coarse / np.sqrt(coarse.shape[1]), shares], axis=1)
    return features.astype(np.float32)


def _averaged(frames: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns the means over a grid of cells of nearly equal size."""
    for axis, count in ((1, rows), (2, columns)):
        starts = np.linspace(0, frames.shape[axis], count, endpoint=False).astype(int)
        sizes = np.diff([*starts, frames.shape[axis]])
        shape = [1] * frames.ndim
        shape[axis] = count
        frames = np.add.reduceat(frames, starts, axis=axis) / sizes.reshape(shape)
    return frames


def _histogram(frames: np.ndarray, *, levels: int) -> np.ndarray:
    distance = np.abs(frames.reshape(len(frames), -1, 3, 1) * (levels - 1) - np.arange(levels))
    red, green, blue = np.moveaxis(np.maximum(1 - distance, 0).astype(np.float32), 2, 0)
    pairs = (red[..., :, None] * green[..., None, :]).reshape(*red.shape[:2], -1)
    shares = pairs.swapaxes(1, 2) @ blue / red.shape[1]
    return shares.reshape(len(frames), -1)


# Classifiers


class ZeroShotClassifier:
    """Chooses the value whose text is nearest to the mean of the frames' CLIP embeddings.

    Args:
        embedder: CLIP, with its text tower.
    """

    name = "CLIP, zero-shot"

    def __init__(self, embedder: ClipEmbedder):
        self.embedder = embedder
        self.texts = {attribute: embedder.texts(texts) for attribute, texts in PROMPTS.items()}

    def __call__(self, clips: Clips) -> Predictions:
        image = self.embedder.frames(_some_frames(clips)).mean(1)
        return {attribute: (image @ texts.T).argmax(1) for attribute, texts in self.texts.items()}


class NearestMeanClassifier:
    """Chooses the value whose true clips have the nearest mean, by Mahalanobis distance.

    All values of an attribute share one covariance (linear discriminant analysis), so directions
    in which clips of one value differ anyway, such as where people stand, count little.

    Args:
        name: Name in reports.
        features: Function that gives the features of a clip's frames, which are averaged.
        scenes: Scenes to learn from.
        clips: Their true clips.
        ridge: Share of the mean variance that is added to the variance of every direction.
    """

    def __init__(
        self,
        name: str,
        features: Features,
        *,
        scenes: Sequence[Scene],
        clips: Clips,
        ridge: float = 0.005,
    ):
        self.name, self.features = name, features
        x = self._clip_features(clips)
        self._fitted: Mapping[str, tuple[np.ndarray, np.ndarray]] = {
            name: _discriminant(x, labels(scenes, name), ridge) for name in ATTRIBUTES
        }

    def _clip_features(self, clips: Clips) -> Float[np.ndarray, "n e"]:
        return self.features(_some_frames(clips)).mean(1).astype(np.float64)

    def __call__(self, clips: Clips) -> Predictions:
        x = self._clip_features(clips)
        return {
            name: (x @ weights + bias).argmax(1) for name, (weights, bias) in self._fitted.items()
        }


def _discriminant(
    x: Float[np.ndarray, "n e"], label: Int[np.ndarray, " n"], ridge: float
) -> tuple[Float[np.ndarray, "e c"], Float[np.ndarray, "1 c"]]:
    """Returns weights and biases of the linear function that is greatest for the nearest mean."""
    means = np.stack([x[label == k].mean(0) for k in range(label.max() + 1)])
    scatter = x - means[label]
    covariance = scatter.T @ scatter / len(x)
    covariance += ridge * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T)
    return weights, -0.5 * (means.T * weights).sum(0, keepdims=True)


def labels(scenes: Sequence[Scene], attribute: str) -> Int[np.ndarray, " n"]:
    """Returns the index of each scene's value of an attribute."""
    return np.array([VALUES[attribute].index(getattr(scene, attribute)) for scene in scenes])


# True clips to learn from, and the check


def draw_scenes(count: int, *, seed: int) -> tuple[Scene, ...]:
    """Draws scenes with equal shares of all characters, motions and places, as games show them."""
    random = np.random.default_rng([seed, 0x5EED])
    drawn = [
        random.permutation(np.resize(values, count)).tolist()
        for values in (CHARACTERS, MOTIONS, PLACES)
    ]
    scenes = []
    for character, motion, place in zip(*drawn, strict=True):
        others = [name for name in CHARACTERS if name != character]
        scenes.append(
            Scene(
                character=character,
                motion=motion,
                place=place,
                time=TIMES[random.integers(len(TIMES))],
                level=int(random.choice(LEVELS)),
                partner=str(random.choice(others)) if motion == "talk" else None,
            )
        )
    return tuple(scenes)


def render_all(scenes: Sequence[Scene], *, height: int, width: int, num_frames: int) -> Clips:
    """Renders the true clips of scenes."""
    return np.stack([render(scene, height=height, width=width)[:num_frames] for scene in scenes])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierCheck:
    """Accuracy of one classifier for one attribute.

    Attributes:
        attribute: The attribute.
        classifier: The classifier's name.
        accuracy: Share of true clips that are classified correctly.
        reconstructed: The same share after a VAE encoded and decoded the clips; None: no VAE.
        num_clips: Number of clips.
    """

    attribute: str
    classifier: str
    accuracy: float
    reconstructed: float | None
    num_clips: int

    @property
    def is_reliable(self) -> bool:
        """Whether the answers may count as scores."""
        return self.accuracy >= LEAST_ACCURACY

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Order of preference: reliable first, then the lower accuracy, as a VAE makes clips."""
        through = self.accuracy if self.reconstructed is None else self.reconstructed
        return self.is_reliable, min(self.accuracy, through), self.accuracy

    def __str__(self) -> str:
        through = "" if self.reconstructed is None else f", {self.reconstructed:.3f} after the VAE"
        right = f"right in {self.accuracy:.3f} of {self.num_clips} true clips"
        return f"{self.classifier} ({right}{through})"


class CheckedClassifier:
    """Classifies each attribute with the best of several classifiers.

    Args:
        classifiers: All of them.
        scenes: Scenes to check them on.
        clips: Their true clips.
        reconstructed: The same clips after a VAE; None: no VAE.

    Attributes:
        values: The values of each attribute.
        checks: The check of every classifier and attribute.
        chosen: The check of the classifier in use, by attribute.
    """

    name = "best"
    values: Mapping[str, Sequence[str]] = VALUES

    def __init__(
        self,
        classifiers: Sequence[Classifier],
        *,
        scenes: Sequence[Scene],
        clips: Clips,
        reconstructed: Clips | None,
    ):
        self._classifiers = {one.name: one for one in classifiers}
        true = {name: labels(scenes, name) for name in ATTRIBUTES}
        checks = []
        for one in classifiers:
            found, blurred = one(clips), None if reconstructed is None else one(reconstructed)
            checks += [
                ClassifierCheck(
                    attribute=name,
                    classifier=one.name,
                    accuracy=float((found[name] == right).mean()),
                    reconstructed=None
                    if blurred is None
                    else float((blurred[name] == right).mean()),
                    num_clips=len(clips),
                )
                for name, right in true.items()
            ]
        self.checks = tuple(checks)
        self.chosen: Mapping[str, ClassifierCheck] = {
            name: max((c for c in checks if c.attribute == name), key=lambda c: c.rank)
            for name in ATTRIBUTES
        }

    @property
    def description(self) -> Mapping[str, str]:
        """The classifier of each attribute and its accuracy, in words."""
        return {name: str(check) for name, check in self.chosen.items()}

    def __call__(self, clips: Clips) -> Predictions:
        names = {check.classifier for check in self.chosen.values()}
        found = {name: self._classifiers[name](clips) for name in names}
        return {name: found[check.classifier][name] for name, check in self.chosen.items()}


def make_classifier(
    embedder: ClipEmbedder | None,
    *,
    height: int,
    width: int,
    num_frames: int,
    reconstruct: Callable[[Clips], Clips] | None = None,
    num_clips: int = 960,
    num_checked: int = 300,
) -> CheckedClassifier:
    """Builds every classifier that is possible and checks them on other true clips.

    They learn from true clips, and from half of them after the VAE, because generated clips have
    its blur.

    Args:
        embedder: CLIP with its text tower; None: only colours are used.
        height: Height of the clips to classify, in pixels.
        width: Width of the clips to classify, in pixels.
        num_frames: Number of frames of the clips to classify.
        reconstruct: Function that sends clips through the VAE; None: no VAE.
        num_clips: Number of true clips to learn from.
        num_checked: Number of true clips to check with, less those that are among the first.
    """
    size = {"height": height, "width": width, "num_frames": num_frames}
    learned = draw_scenes(num_clips, seed=0)
    known = set(learned)
    checked = [scene for scene in draw_scenes(num_checked, seed=1) if scene not in known]
    clips, check = render_all(learned, **size), render_all(checked, **size)
    if reconstruct is not None:
        clips = np.concatenate([clips, reconstruct(clips[::2])])
        learned = (*learned, *learned[::2])
    named = {"colours, nearest mean": colour_features}
    if embedder is not None:
        named["CLIP, nearest mean"] = embedder.frames
    classifiers: list[Classifier] = [
        NearestMeanClassifier(name, features, scenes=learned, clips=clips)
        for name, features in named.items()
    ]
    if embedder is not None:
        classifiers.append(ZeroShotClassifier(embedder))
    through = None if reconstruct is None else reconstruct(check)
    return CheckedClassifier(classifiers, scenes=checked, clips=check, reconstructed=through)
