"""Scorers: each computes the values of one group of metrics for a turn of some games.

A scorer holds what its metrics need besides the answers: a CLIP, pictures, a classifier. `suite`
builds the scorers that a benchmark allows; `formulas` and `registry` define the metrics.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from animegamer_jax.evaluate.benchmarks.format import BenchmarkTurn
from animegamer_jax.evaluate.metrics import formulas
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.dreamsim import DreamSim
from animegamer_jax.evaluate.metrics.formulas import STATE_SLOTS
from animegamer_jax.evaluate.metrics.lpips import LPIPS, lpips_distance
from animegamer_jax.evaluate.metrics.registry import CONTEXT, NAMED, Group
from animegamer_jax.evaluate.metrics.video_distance import VideoFeatures
from animegamer_jax.evaluate.worlds import AttributeClassifier
from animegamer_jax.media.motion import NOISE, PAPER_EDGES, dis_flow, film_flow, measure_levels

NUM_FRAMES = 16
"""Number of frames of a clip that are scored: the paper's clips have 16, the VAE's 17."""

Clips = UInt8[np.ndarray, "b f h w 3"]
Values = dict[str, Float32[np.ndarray, " b"]]
Features = Float[np.ndarray, "n e"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """A system's answers to one turn of `b` games.

    Attributes:
        turns: What each game asks and expects.
        clips: The generated clips, at most `NUM_FRAMES` frames each.
        predicted_states: Motion level, social, entertainment and stamina; None: not predicted.
        seconds: Time per answer; None: unknown.
        true_clips: The true clips, with as many frames of the same size; None: unknown.
    """

    turns: Sequence[BenchmarkTurn]
    clips: Clips
    predicted_states: Int[np.ndarray, "b 4"] | None = None
    seconds: Float[np.ndarray, " b"] | None = None
    true_clips: Clips | None = None


@typing.runtime_checkable
class Scorer(typing.Protocol):
    """One group of metrics.

    Attributes:
        group: Group of the metrics.
        fingerprint: Everything besides the answers that the values depend on; cached values with
            another fingerprint are computed again.
    """

    @property
    def group(self) -> Group: ...
    @property
    def fingerprint(self) -> Mapping[str, object]: ...
    def __call__(self, answers: Answers) -> Values:
        """Returns a value per game for each metric that the answers allow."""
        ...


def expected_of(turns: Sequence[BenchmarkTurn]) -> Int[np.ndarray, "b 4"]:
    """Returns the expected motion level, social, entertainment and stamina of each turn."""
    return np.array([[t.motion_level, *(getattr(t, slot) for slot in STATE_SLOTS)] for t in turns])


def score_states(
    predicted: Int[np.ndarray, "*n 4"], expected: Int[np.ndarray, "*n 4"]
) -> dict[str, Float32[np.ndarray, "*n"]]:
    """Returns ACC-S and MAE-S of the states and ACC-L and MAE-L of the motion level."""
    return {
        "ACC-S": formulas.accuracy(predicted[..., 1:], expected[..., 1:]).mean(-1),
        "MAE-S": formulas.error(predicted[..., 1:], expected[..., 1:]).mean(-1),
        "ACC-L": formulas.accuracy(predicted[..., 0], expected[..., 0]),
        "MAE-L": formulas.error(predicted[..., 0], expected[..., 0]),
    }


class StateScorer:
    """Scores the predicted states and the predicted motion level."""

    group: Group = "states"
    fingerprint: Mapping[str, object] = {}

    def __call__(self, answers: Answers) -> Values:
        if answers.predicted_states is None:
            return {}
        return score_states(answers.predicted_states, expected_of(answers.turns))


class SpeedScorer:
    """Reports the seconds per turn."""

    group: Group = "speed"
    fingerprint: Mapping[str, object] = {}

    def __call__(self, answers: Answers) -> Values:
        if answers.seconds is None:
            return {}
        return {"seconds": answers.seconds.astype(np.float32)}


class MotionScorer:
    """Scores the motion level that optical flow finds: ACC-F and MAE-F; options as in `World`.

    Without a world, the flow is the one that measures films, with which a model was trained.
    """

    group: Group = "motion"

    def __init__(self, *, edges: Sequence[float] = PAPER_EDGES, noise: float | None = None):
        self._edges, self._noise = edges, NOISE if noise is None else noise
        self._estimate = film_flow if noise is None else dis_flow
        self.fingerprint: Mapping[str, object] = {"edges": list(edges), "noise": self._noise}
        if noise is None:
            self.fingerprint = {**self.fingerprint, "flow": film_flow.__name__}

    def __call__(self, answers: Answers) -> Values:
        expected = expected_of(answers.turns)[:, 0]
        found = measure_levels(
            answers.clips, edges=self._edges, noise=self._noise, estimate=self._estimate
        )
        return {
            "ACC-F": formulas.accuracy(found, expected),
            "MAE-F": formulas.error(found, expected),
        }


class ClipScorer:
    """Scores CLIP-I against the true clip or a character's pictures, CLIP-T against the caption.

    Args:
        embedder: CLIP; without a text tower there is no CLIP-T.
        digest: Digest of its weights.
        pictures: Pictures of the characters, for turns without a true clip; CLIP-I is the mean of
            the cosines with each of them.
    """

    group: Group = "clip"

    def __init__(self, embedder: ClipEmbedder, *, digest: str, pictures: "Pictures | None" = None):
        self._embedder = embedder
        self._pictures = {
            name.casefold(): np.concatenate([embedder.frames(one[None, None])[0] for one in some])
            for name, some in ({} if pictures is None else pictures.by_name).items()
        }
        self.fingerprint: Mapping[str, object] = {
            "clip": digest,
            "texts": embedder.has_text,
            "pictures": None if pictures is None else pictures.digest,
        }

    def __call__(self, answers: Answers) -> Values:
        frames = self._embedder.frames(answers.clips)
        values: Values = {}
        if answers.true_clips is not None:
            true = self._embedder.frames(answers.true_clips)
            values["CLIP-I"] = np.asarray(formulas.clip_image_similarity(frames, true))
        elif self._pictures:
            values["CLIP-I"] = self._compare_with_pictures(frames, answers.turns)
        if self._embedder.has_text:
            texts = self._embedder.texts([turn.full_caption for turn in answers.turns])
            values["CLIP-T"] = np.asarray(formulas.clip_text_similarity(frames, texts))
        return values

    def _compare_with_pictures(
        self, frames: Float32[np.ndarray, "b f e"], turns: Sequence[BenchmarkTurn]
    ) -> Float32[np.ndarray, " b"]:
        """Returns CLIP-I; NaN where the turn has no character or the character no picture."""
        found = np.full(len(turns), np.nan, np.float32)
        for row, turn in enumerate(turns):
            pictures = self._pictures.get((turn.parts.character or "").casefold())
            if pictures is not None:
                found[row] = (frames[row] @ pictures.T).mean()  # all of length one
        return found


class LpipsScorer:
    """Scores LPIPS against the true clip; `digest` is that of the weights."""

    group: Group = "lpips"

    def __init__(self, model: LPIPS, *, digest: str):
        self._model = model
        self.fingerprint: Mapping[str, object] = {"lpips": digest}

    def __call__(self, answers: Answers) -> Values:
        if answers.true_clips is None:
            return {}
        shape = answers.clips.shape
        a, b = (x.reshape(-1, *shape[2:]) for x in (answers.clips, answers.true_clips))
        return {"LPIPS": lpips_distance(self._model, a, b).reshape(shape[:2]).mean(-1)}


class DreamSimScorer:
    """Scores DreamSim against the true clip; `folder` holds its weights."""

    group: Group = "dreamsim"

    def __init__(self, model: DreamSim, *, folder: str):
        self._model = model
        self.fingerprint: Mapping[str, object] = {"dreamsim": folder}

    def __call__(self, answers: Answers) -> Values:
        if answers.true_clips is None:
            return {}
        return {"DreamSim": self._model.similarity(answers.clips, answers.true_clips)}


READ = "read: "
"""Begins the names of values that are what the classifier read off a clip, as an index."""


class TruthScorer:
    """Scores what the world's classifier reads off the clip, and PSNR against the true clip.

    Attributes that no instruction names are kept as they were read, for `details`: whether they are
    right depends on other turns.
    """

    group: Group = "truth"

    def __init__(self, classifier: AttributeClassifier, *, fingerprint: Mapping[str, object]):
        self.classifier, self.fingerprint = classifier, fingerprint

    def __call__(self, answers: Answers) -> Values:
        found = self.classifier(answers.clips)
        values: Values = {}
        for name in NAMED:
            known = [*self.classifier.values[name], None]
            parts = [getattr(turn.parts, name) for turn in answers.turns]
            expected = np.array([known.index(p if p in known else None) for p in parts])
            right = (found[name] == expected).astype(np.float32)
            values[name] = np.where(expected < len(known) - 1, right, np.nan)
        values[CONTEXT] = np.prod(list(values.values()), axis=0).astype(np.float32)
        values |= {
            READ + name: found[name].astype(np.float32) for name in found if name not in NAMED
        }
        if answers.true_clips is not None:
            values["PSNR"] = np.asarray(formulas.psnr(answers.clips, answers.true_clips))
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetScorer:
    """A metric with one value for all of a system's clips.

    Attributes:
        group: Group of the metric.
        metric: Name of the metric.
        features: Function that gives one feature vector per clip.
        distance: Distance between two sets of feature vectors.
        reference: Feature vectors of the clips to compare with.
        fingerprint: Everything that the features depend on.
    """

    group: Group
    metric: str
    features: VideoFeatures
    distance: Callable[[Features, Features], float]
    reference: Features
    fingerprint: Mapping[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pictures:
    """One or more pictures of each character, RGB, of any size, and the digest of all of them."""

    by_name: Mapping[str, Sequence[UInt8[np.ndarray, "_ _ 3"]]]
    digest: str
