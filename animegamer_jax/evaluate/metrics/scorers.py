"""What a system answered in one turn of some games, and the values of the metrics for it.

A scorer holds what its metrics need beside the answers: a CLIP, pictures to compare with, readers.
`scoring` makes those that a benchmark allows; `metrics` and `catalogue` have the formulas.
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
from animegamer_jax.evaluate.metrics.registry import CONTEXT, Group
from animegamer_jax.evaluate.metrics.video_distance import VideoFeatures
from animegamer_jax.media.motion import (
    PAPER_EDGES,
    measure_levels,
    motion_level,
    motion_value,
)
from animegamer_jax.toy.scoring.classifiers import CANDIDATES, Reader

NUM_FRAMES = 16
"""Frames of a clip that count: the paper's clips have 16, the VAE's 17."""

Clips = UInt8[np.ndarray, "b f h w 3"]
Values = dict[str, Float32[np.ndarray, " b"]]
Features = Float[np.ndarray, "n e"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """One turn of `b` games.

    Attributes:
        turns: what was asked and is expected.
        clips: the answers, of at most `NUM_FRAMES` frames.
        told: motion level, social, entertainment and stamina; None: there are no such answers.
        seconds: that each took; None: not known.
        truth: the true clips, of as many frames and the same size; None: there are none.
    """

    turns: Sequence[BenchmarkTurn]
    clips: Clips
    told: Int[np.ndarray, "b 4"] | None = None
    seconds: Float[np.ndarray, " b"] | None = None
    truth: Clips | None = None


@typing.runtime_checkable
class Scorer(typing.Protocol):
    """One group of metrics.

    Attributes:
        group: whose metrics these are.
        made: all that the values depend on beside the answers; kept values are another's where
            it differs.
    """

    @property
    def group(self) -> Group: ...
    @property
    def made(self) -> Mapping[str, object]: ...
    def __call__(self, answers: Answers) -> Values:
        """A value of each metric for every game; of metrics that the answers allow."""
        ...


def expected_of(turns: Sequence[BenchmarkTurn]) -> Int[np.ndarray, "b 4"]:
    """Motion level, social, entertainment and stamina that turns expect."""
    return np.array([[t.motion_level, *(getattr(t, slot) for slot in STATE_SLOTS)] for t in turns])


class StateScorer:
    """ACC-S and MAE-S of the states' changes, ACC-L and MAE-L of the level that the model told."""

    group: Group = "states"
    made: Mapping[str, object] = {}

    def __call__(self, answers: Answers) -> Values:
        if answers.told is None:
            return {}
        told, expected = answers.told, expected_of(answers.turns)
        return {
            "ACC-S": formulas.state_accuracy(told[:, 1:], expected[:, 1:]).mean(-1),
            "MAE-S": formulas.state_error(told[:, 1:], expected[:, 1:]).mean(-1),
            "ACC-L": formulas.motion_accuracy(told[:, 0], expected[:, 0]),
            "MAE-L": formulas.motion_error(told[:, 0], expected[:, 0]),
        }


class SpeedScorer:
    """Seconds a turn."""

    group: Group = "speed"
    made: Mapping[str, object] = {}

    def __call__(self, answers: Answers) -> Values:
        if answers.seconds is None:
            return {}
        return {"seconds": answers.seconds.astype(np.float32)}


class MotionScorer:
    """ACC-F and MAE-F of the level that optical flow finds in the clip.

    Args:
        toy: by the toy world's levels, above the flicker that is allowed there (`measure_levels`);
            else by the paper's.
    """

    group: Group = "motion"

    def __init__(self, *, toy: bool):
        self.toy = toy
        self.made: Mapping[str, object] = {"levels": "toy" if toy else "paper"}

    def __call__(self, answers: Answers) -> Values:
        expected = expected_of(answers.turns)[:, 0]
        if self.toy:
            found = measure_levels(answers.clips)
        else:
            values = map(motion_value, answers.clips)
            found = np.array([motion_level(value, edges=PAPER_EDGES) for value in values])
        return {
            "ACC-F": formulas.motion_accuracy(found, expected),
            "MAE-F": formulas.motion_error(found, expected),
        }


class ClipScorer:
    """CLIP-I with the true clip or a picture of the character, CLIP-T with the caption.

    Args:
        embedder: CLIP.
        digest: of its weights.
        texts: whether it reads captions.
        pictures: of the characters, by name, for turns without a true clip: the mean of the
            cosines with each of them counts.
    """

    group: Group = "clip"

    def __init__(
        self,
        embedder: ClipEmbedder,
        *,
        digest: str,
        texts: bool = True,
        pictures: "Pictures | None" = None,
    ):
        self._embedder, self._texts = embedder, texts
        self._pictures = {
            name.casefold(): np.concatenate([embedder.frames(one[None, None])[0] for one in some])
            for name, some in ({} if pictures is None else pictures.by_name).items()
        }
        self.made: Mapping[str, object] = {
            "clip": digest,
            "texts": texts,
            "pictures": None if pictures is None else pictures.digest,
        }

    def __call__(self, answers: Answers) -> Values:
        frames = self._embedder.frames(answers.clips)
        values: Values = {}
        if answers.truth is not None:
            true = self._embedder.frames(answers.truth)
            values["CLIP-I"] = np.asarray(formulas.clip_image_similarity(frames, true))
        elif self._pictures:
            values["CLIP-I"] = self._beside_pictures(frames, answers.turns)
        if self._texts:
            texts = self._embedder.texts([turn.full_caption for turn in answers.turns])
            values["CLIP-T"] = np.asarray(formulas.clip_text_similarity(frames, texts))
        return values

    def _beside_pictures(
        self, frames: Float32[np.ndarray, "b f e"], turns: Sequence[BenchmarkTurn]
    ) -> Float32[np.ndarray, " b"]:
        """NaN where the turn tells no character, or there is no picture of it."""
        found = np.full(len(turns), np.nan, np.float32)
        for row, turn in enumerate(turns):
            some = self._pictures.get((turn.parts.character or "").casefold())
            if some is not None:
                found[row] = (frames[row] @ some.T).mean()  # all of length one
        return found


class LpipsScorer:
    """LPIPS with the true clip.

    Args:
        model: with its weights.
        digest: of them.
    """

    group: Group = "lpips"

    def __init__(self, model: LPIPS, *, digest: str):
        self._model = model
        self.made: Mapping[str, object] = {"lpips": digest}

    def __call__(self, answers: Answers) -> Values:
        if answers.truth is None:
            return {}
        shape = answers.clips.shape
        a, b = (x.reshape(-1, *shape[2:]) for x in (answers.clips, answers.truth))
        return {"LPIPS": lpips_distance(self._model, a, b).reshape(shape[:2]).mean(-1)}


class DreamSimScorer:
    """DreamSim with the true clip.

    Args:
        model: the package's.
        folder: of its weights.
    """

    group: Group = "dreamsim"

    def __init__(self, model: DreamSim, *, folder: str):
        self._model = model
        self.made: Mapping[str, object] = {"dreamsim": folder}

    def __call__(self, answers: Answers) -> Values:
        if answers.truth is None:
            return {}
        return {"DreamSim": self._model.similarity(answers.clips, answers.truth)}


class TruthScorer:
    """Toy world: character, place and time as read off the clip, and PSNR beside the true clip.

    Args:
        reader: checked on true clips.
        made: what its readings depend on.
    """

    group: Group = "truth"

    def __init__(self, reader: Reader, *, made: Mapping[str, object]):
        self._reader, self.made = reader, made

    def __call__(self, answers: Answers) -> Values:
        readings = self._reader(answers.clips)
        values: Values = {}
        for name, candidates in CANDIDATES.items():
            expected = [candidates.index(getattr(turn.parts, name)) for turn in answers.turns]
            values[name] = (readings[name] == np.array(expected)).astype(np.float32)
        values[CONTEXT] = np.prod(list(values.values()), axis=0).astype(np.float32)
        if answers.truth is not None:
            values["PSNR"] = np.asarray(formulas.psnr(answers.clips, answers.truth))
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetScorer:
    """One number for all of a system's clips together.

    Attributes:
        group: of the metric.
        metric: its name.
        features: one vector a clip.
        distance: of two sets of them.
        reference: the features of the other set.
        made: what the features depend on.
    """

    group: Group
    metric: str
    features: VideoFeatures
    distance: Callable[[Features, Features], float]
    reference: Features
    made: Mapping[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures of characters to compare with.

    Attributes:
        by_name: one or more of each, RGB of any size.
        digest: of all of them.
    """

    by_name: Mapping[str, Sequence[UInt8[np.ndarray, "_ _ 3"]]]
    digest: str
