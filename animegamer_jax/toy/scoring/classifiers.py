"""Who is seen, where and when: readers of generated clips of the toy world.

Three ways to read: CLIP's image embedding against text (zero-shot), against embeddings of rendered
truth, and the same in colours and pixels without any network. No reader may judge before it
is checked on true clips (`choose_readers`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, Clips
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.world import (
    CHARACTERS,
    LEVELS,
    MOTIONS,
    PLACES,
    TIMES,
    Scene,
)

Attribute = Literal["character", "place", "time"]
ATTRIBUTES: tuple[Attribute, ...] = get_args(Attribute)
CANDIDATES: Mapping[Attribute, tuple[str, ...]] = {
    "character": CHARACTERS,
    "place": PLACES,
    "time": TIMES,
}

LEAST_ACCURACY = 0.99  # on true clips, of a reader that may judge
NUM_FRAMES_READ = 5

Features = Callable[[Clips], Float32[np.ndarray, "n f e"]]
Readings = Mapping[Attribute, Int[np.ndarray, " n"]]


@runtime_checkable
class Reader(Protocol):
    """Names, for each attribute, the candidate that each clip shows, by its index."""

    name: str

    def __call__(self, clips: Clips) -> Readings: ...


def pick_frames(clips: Clips) -> UInt8[np.ndarray, "n k h w 3"]:
    """The few frames of each clip that are read, spread evenly, the first and last among them."""
    count = min(NUM_FRAMES_READ, clips.shape[1])
    return clips[:, np.linspace(0, clips.shape[1] - 1, count).round().astype(int)]


# Features


def colour_features(clips: Clips) -> Float32[np.ndarray, "n f e"]:
    """What a frame looks like without a network: its coarse picture, and how much of each colour.

    The picture is averaged to 8 rows and 12 columns. A colour's share does not depend on where
    things stand: the square root of a histogram of 6 levels a channel, each pixel spread over the
    levels on both sides of it.
    """
    return np.stack([_colours(clip.astype(np.float32) / 255) for clip in clips])


def _colours(frames: np.ndarray) -> np.ndarray:
    """`colour_features` of one clip, of which values are 0 to 1."""
    coarse = _averaged(frames, 8, 12).reshape(len(frames), -1)
    shares = np.sqrt(_histogram(frames, levels=6))
    features = np.concatenate([coarse / np.sqrt(coarse.shape[1]), shares], axis=1)
    return features.astype(np.float32)


def _averaged(frames: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Means over a grid of cells of nearly equal size."""
    for axis, count in ((1, rows), (2, columns)):
        starts = np.linspace(0, frames.shape[axis], count, endpoint=False).astype(int)
        sizes = np.diff([*starts, frames.shape[axis]])
        shape = [1] * frames.ndim
        shape[axis] = count
        frames = np.add.reduceat(frames, starts, axis=axis) / sizes.reshape(shape)
    return frames


def _histogram(frames: np.ndarray, *, levels: int) -> np.ndarray:
    """Share of each of `levels ** 3` colours in each frame, linear between neighbours."""
    distance = np.abs(frames.reshape(len(frames), -1, 3, 1) * (levels - 1) - np.arange(levels))
    red, green, blue = np.moveaxis(np.maximum(1 - distance, 0).astype(np.float32), 2, 0)
    pairs = (red[..., :, None] * green[..., None, :]).reshape(*red.shape[:2], -1)
    shares = pairs.swapaxes(1, 2) @ blue / red.shape[1]
    return shares.reshape(len(frames), -1)


# Readers


class ZeroShotReader:
    """The candidate whose text is nearest to the mean of the frames' CLIP embeddings.

    Args:
        embedder: of frames and texts.
        prompts: of each attribute, the text of each candidate, in their order.
    """

    name = "CLIP, text"

    def __init__(self, embedder: ClipEmbedder, prompts: Mapping[Attribute, Sequence[str]]):
        self.embedder = embedder
        self.texts: Mapping[Attribute, np.ndarray] = {
            attribute: embedder.texts(texts) for attribute, texts in prompts.items()
        }

    def __call__(self, clips: Clips) -> Readings:
        image = self.embedder.frames(pick_frames(clips)).mean(1)
        return {attribute: (image @ texts.T).argmax(1) for attribute, texts in self.texts.items()}


class NearestTruthReader:
    """The candidate whose true clips' mean is nearest, in the metric of their own scatter.

    Distances are Mahalanobis', with one covariance for all candidates of an attribute: directions
    in which clips of one candidate differ anyway (where it stands, what it does) count little.

    Args:
        name: in reports.
        features: of a clip's frames; their mean over the clip is compared.
        truth: scenes, and
        clips: their true clips.
        ridge: share of the mean variance that is added to every direction's.
    """

    def __init__(
        self,
        name: str,
        features: Features,
        *,
        truth: Sequence[Scene],
        clips: Clips,
        ridge: float = 0.005,
    ):
        self.name, self.features = name, features
        x = self._clip_features(clips)
        self._fitted: Mapping[Attribute, tuple[np.ndarray, np.ndarray]] = {
            attribute: _discriminant(x, labels(truth, attribute), ridge) for attribute in ATTRIBUTES
        }

    def _clip_features(self, clips: Clips) -> Float[np.ndarray, "n e"]:
        return self.features(pick_frames(clips)).mean(1).astype(np.float64)

    def __call__(self, clips: Clips) -> Readings:
        x = self._clip_features(clips)
        return {
            attribute: (x @ weights + bias).argmax(1)
            for attribute, (weights, bias) in self._fitted.items()
        }


def _discriminant(
    x: Float[np.ndarray, "n e"], label: Int[np.ndarray, " n"], ridge: float
) -> tuple[Float[np.ndarray, "e c"], Float[np.ndarray, "1 c"]]:
    """Weights and biases of the linear function that is greatest for the nearest mean."""
    means = np.stack([x[label == k].mean(0) for k in range(label.max() + 1)])
    scatter = x - means[label]
    covariance = scatter.T @ scatter / len(x)
    covariance += ridge * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T)
    return weights, -0.5 * (means.T * weights).sum(0, keepdims=True)


def labels(scenes: Sequence[Scene], attribute: Attribute) -> Int[np.ndarray, " n"]:
    """The index of each scene's value among the attribute's candidates."""
    candidates = CANDIDATES[attribute]
    return np.array([candidates.index(getattr(scene, attribute)) for scene in scenes])


# Truth to read by, and the check


def draw_scenes(count: int, *, seed: int) -> tuple[Scene, ...]:
    """Scenes of all values in equal shares, as games show them."""
    random = np.random.default_rng([seed, 0x5EED])
    order = {
        name: random.permutation(np.resize(np.arange(len(values)), count))
        for name, values in (("character", CHARACTERS), ("motion", MOTIONS), ("place", PLACES))
    }
    scenes = []
    for index in range(count):
        character = CHARACTERS[order["character"][index]]
        motion = MOTIONS[order["motion"][index]]
        others = [name for name in CHARACTERS if name != character]
        scenes.append(
            Scene(
                character=character,
                motion=motion,
                place=PLACES[order["place"][index]],
                time=TIMES[random.integers(len(TIMES))],
                level=int(random.choice(LEVELS)),
                partner=str(random.choice(others)) if motion == "talk" else None,
            )
        )
    return tuple(scenes)


def render_all(scenes: Sequence[Scene], *, height: int, width: int) -> Clips:
    """True clips of scenes."""
    return np.stack([render(scene, height=height, width=width) for scene in scenes])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderCheck:
    """How often one reader is right about one attribute, on true clips and on reconstructed ones.

    `reconstructed` is the accuracy on the same clips through the VAE, None where there was none.
    """

    attribute: Attribute
    reader: str
    accuracy: float
    reconstructed: float | None
    num_clips: int

    @property
    def may_judge(self) -> bool:
        return self.accuracy >= LEAST_ACCURACY

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Who may judge goes before; then the worse accuracy counts, as a VAE makes the clips."""
        through = self.accuracy if self.reconstructed is None else self.reconstructed
        return self.may_judge, min(self.accuracy, through), self.accuracy


def check_readers(
    readers: Sequence[Reader],
    *,
    truth: Sequence[Scene],
    clips: Clips,
    reconstructed: Clips | None,
) -> list[ReaderCheck]:
    """Every reader's accuracy for every attribute."""
    checks = []
    for reader in readers:
        readings = reader(clips)
        blurred = None if reconstructed is None else reader(reconstructed)
        for attribute in ATTRIBUTES:
            right = labels(truth, attribute)
            checks.append(
                ReaderCheck(
                    attribute=attribute,
                    reader=reader.name,
                    accuracy=float((readings[attribute] == right).mean()),
                    reconstructed=None
                    if blurred is None
                    else float((blurred[attribute] == right).mean()),
                    num_clips=len(clips),
                )
            )
    return checks


class ChosenReaders:
    """Of several readers the best for each attribute, by their checks.

    Attributes:
        chosen: the check of the one that reads each attribute.
    """

    name = "best"

    def __init__(self, readers: Sequence[Reader], checks: Sequence[ReaderCheck]):
        self.chosen: Mapping[Attribute, ReaderCheck] = {
            attribute: max((c for c in checks if c.attribute == attribute), key=lambda c: c.rank)
            for attribute in ATTRIBUTES
        }
        self.checks = tuple(checks)
        self._readers = {reader.name: reader for reader in readers}

    def __call__(self, clips: Clips) -> Readings:
        readings = {
            name: self._readers[name](clips) for name in {c.reader for c in self.chosen.values()}
        }
        return {
            attribute: readings[check.reader][attribute] for attribute, check in self.chosen.items()
        }


PROMPTS: Mapping[Attribute, tuple[str, ...]] = {
    "character": CHARACTERS,
    "place": tuple(f"the {place}" for place in PLACES),
    "time": TIMES,
}


def make_readers(
    embedder: ClipEmbedder | None,
    *,
    height: int,
    width: int,
    num_frames: int,
    reconstruct: Callable[[Clips], Clips] | None = None,
    num_truth: int = 960,
    num_checked: int = 300,
) -> ChosenReaders:
    """Builds every reader there can be, checks them on other true clips, and takes the best.

    Readers by truth learn from true clips, and from half of them as they come out of the VAE,
    because generated clips have its blur.

    Args:
        embedder: of the model's CLIP; None: colours only.
        height: of the clips to read, as their width and number of frames.
        width: see there.
        num_frames: see there.
        reconstruct: clips through the VAE.
        num_truth: true clips to read by.
        num_checked: to check with, less those that are among the first.
    """
    learned = draw_scenes(num_truth, seed=0)
    known = set(learned)
    checked = [scene for scene in draw_scenes(num_checked, seed=1) if scene not in known]
    clips = render_all(learned, height=height, width=width)[:, :num_frames]
    check = render_all(checked, height=height, width=width)[:, :num_frames]
    if reconstruct is not None:
        clips = np.concatenate([clips, reconstruct(clips[::2])])
        learned = (*learned, *learned[::2])
    readers: list[Reader] = [
        NearestTruthReader("colours, nearest truth", colour_features, truth=learned, clips=clips)
    ]
    if embedder is not None:
        nearest = NearestTruthReader(
            "CLIP, nearest truth", embedder.frames, truth=learned, clips=clips
        )
        readers += [nearest, ZeroShotReader(embedder, PROMPTS)]
    through = None if reconstruct is None else reconstruct(check)
    checks = check_readers(readers, truth=checked, clips=check, reconstructed=through)
    return ChosenReaders(readers, checks)
