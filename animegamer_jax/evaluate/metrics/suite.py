"""Which metrics can be had for a benchmark, a size of frames and what lies on this disk.

What cannot be had is left out with the reason, and the rest is scored.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int
from PIL import Image

from animegamer_jax.bundle.config import to_json
from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.data.characters import Characters
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.dreamsim import DreamSim
from animegamer_jax.evaluate.metrics.lpips import load_lpips
from animegamer_jax.evaluate.metrics.openclip import load_clip_for_scores
from animegamer_jax.evaluate.metrics.registry import GROUPS, Group
from animegamer_jax.evaluate.metrics.scorers import (
    NUM_FRAMES,
    Clips,
    ClipScorer,
    DreamSimScorer,
    Features,
    LpipsScorer,
    MotionScorer,
    Pictures,
    Scorer,
    SetScorer,
    SpeedScorer,
    StateScorer,
    TruthScorer,
)
from animegamer_jax.evaluate.metrics.video_distance import (
    TorchScriptFeatures,
    VideoFeatures,
    frechet_distance,
    jedi,
    load_i3d,
)
from animegamer_jax.media.video import read_mp4
from animegamer_jax.models.vae import VAE
from animegamer_jax.toy.scoring.benchmark import WORLD, toy_games
from animegamer_jax.toy.scoring.classifiers import make_readers
from animegamer_jax.toy.scoring.truth import (
    Truth,
    make_truth,
    reconstruct,
)

READER_CLIPS = 960
"""True clips of the toy world that readers learn from; a third as many others check them."""


class FrameSize(NamedTuple):
    """Of a system's clips, in pixels, and the number of their frames."""

    num_frames: int
    height: int
    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Means:
    """What the metrics are computed with.

    Attributes:
        groups: of metrics that are asked for.
        clip: the CLIP that scores all systems, or why there is none; None: nothing has one.
        lpips: the files of AlexNet and of its channels' weights; None: the package's.
        dreamsim: the folder of DreamSim's weights.
        fvd: the TorchScript file of I3D.
        jedi: a TorchScript file of V-JEPA's features.
        real_clips: a folder of MP4 files that FVD and JEDi compare with; None: the true clips.
        characters: with pictures to compare with, in worlds without true clips.
        reader_clips: see `READER_CLIPS`.
    """

    groups: Sequence[Group] = tuple(GROUPS)
    clip: "ScoringClip | str | None" = None
    lpips: tuple[Path, Path] | None = None
    dreamsim: Path | None = None
    fvd: Path | None = None
    jedi: Path | None = None
    real_clips: Path | None = None
    characters: Characters | None = None
    reader_clips: int = READER_CLIPS

    @property
    def scoring_clip(self) -> "ScoringClip | None":
        """The CLIP, if there is one."""
        return self.clip if isinstance(self.clip, ScoringClip) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringClip:
    """CLIP for the scores.

    Attributes:
        embedder: of frames and texts.
        texts: whether it reads captions: its tokenizer is at hand.
        digest: of its weights.
        source: where they lie.
    """

    embedder: ClipEmbedder
    texts: bool
    digest: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """The scorers for one size of frames.

    Attributes:
        scorers: one a group, of metrics of a turn.
        set_scorers: of metrics of all clips together.
        left_out: by group, why it is missing.
        truth: of the toy world's games, with whole clips; else None.
    """

    scorers: tuple[Scorer, ...]
    set_scorers: tuple[SetScorer, ...]
    left_out: Mapping[str, str]
    truth: Truth | None

    @property
    def made(self) -> dict[str, Any]:
        """All that values depend on beside the answers, by group."""
        return {s.group: to_json(s.made) for s in (*self.scorers, *self.set_scorers)}

    def true_clips(self, games: Int[np.ndarray, " b"], turn: int) -> Clips | None:
        """The frames that count of some games' true clips at a turn, from 0; None: no truth."""
        return None if self.truth is None else self.truth.clips[games, turn, :NUM_FRAMES]


_NO_TRUE_CLIPS = "{} compares with true clips, which this world has none of"


class _AbsentError(Exception):
    """Why a group of metrics cannot be had."""


def load_clip(path: str, *, tokenizer: Path | None = None) -> ScoringClip:
    """CLIP of a bundle, "toy", or an OpenCLIP checkpoint (`openclip.load_clip_for_scores`).

    Raises:
        UserError: there is none.
    """
    embedder = load_clip_for_scores(model_folder(path), tokenizer=tokenizer)
    return ScoringClip(
        embedder=embedder,
        texts=embedder.tokenizer is not None and embedder.clip.config.text_layers > 0,
        digest=weights_digest(embedder.clip),
        source=path,
    )


def weights_digest(network: nnx.Module) -> str:
    """Of a network's weights as they are computed with."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(network, nnx.Param)):
        found.update(np.asarray(leaf, np.float32).tobytes())
    return found.hexdigest()[:16]


def make_scoring(
    benchmark: Benchmark, means: Means, size: FrameSize, *, vae: VAE | None = None
) -> Scoring:
    """The scorers of all groups that can be had.

    Args:
        benchmark: its world decides.
        means: what there is to score with.
        size: of the clips to score.
        vae: of the system; readers of the toy world's clips learn what it makes of true ones.
    """
    truth = _true_clips(benchmark, size) if benchmark.world == WORLD else None
    makers: Mapping[Group, Callable[[], Scorer | SetScorer]] = {
        "states": StateScorer,
        "motion": functools.partial(MotionScorer, toy=truth is not None),
        "clip": functools.partial(_clip, benchmark, means, truth),
        "dreamsim": functools.partial(_dreamsim, means, truth),
        "lpips": functools.partial(_lpips, means, truth),
        "truth": functools.partial(_readers, means, truth, size, vae),
        "speed": SpeedScorer,
        "fvd": functools.partial(_fvd, means, truth),
        "jedi": functools.partial(_jedi, means, truth),
    }
    made, left_out = [], {}
    for group, make in makers.items():
        if group not in means.groups:
            continue
        try:
            made.append(make())
        except (_AbsentError, UserError) as reason:
            left_out[group] = str(reason)
    return Scoring(
        scorers=tuple(one for one in made if not isinstance(one, SetScorer)),
        set_scorers=tuple(one for one in made if isinstance(one, SetScorer)),
        left_out=left_out,
        truth=truth,
    )


@functools.lru_cache(maxsize=1)  # systems of one size have the same
def _true_clips(benchmark: Benchmark, size: FrameSize) -> Truth:
    return make_truth(
        toy_games(benchmark), height=size.height, width=size.width, num_frames=size.num_frames
    )


def _clip(benchmark: Benchmark, means: Means, truth: Truth | None) -> Scorer:
    c = means.clip
    if c is None:
        raise _AbsentError("no model has a CLIP, and --clip names none")
    if isinstance(c, str):
        raise _AbsentError(c)
    pictures = None
    if truth is None and means.characters is not None:
        pictures = _pictures(means.characters, benchmark.characters)
    if truth is None and pictures is None and not c.texts:
        raise _AbsentError(
            "nothing to compare with: this world has no true clips, --characters gives no "
            "pictures, and CLIP's tokenizer is not in the model"
        )
    return ClipScorer(c.embedder, digest=c.digest, texts=c.texts, pictures=pictures)


def _pictures(characters: Characters, names: Sequence[str]) -> Pictures:
    """Of the benchmark's characters; who has none has no CLIP-I."""
    wanted = {name.casefold() for name in names}
    found = {
        character.name: [_decode(characters.pictures[digest]) for digest in character.images]
        for character in characters.entries
        if character.name.casefold() in wanted and character.images
    }
    return Pictures(by_name=found, digest=characters.digest)


def first_pictures(characters: Characters) -> dict[str, np.ndarray]:
    """The first picture of each character that has one, RGB."""
    return {
        c.name: _decode(characters.pictures[c.images[0]]) for c in characters.entries if c.images
    }


def _decode(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def _dreamsim(means: Means, truth: Truth | None) -> Scorer:
    if truth is None:
        raise _AbsentError(_NO_TRUE_CLIPS.format("DreamSim"))
    if means.dreamsim is None:
        raise _AbsentError("DreamSim: --dreamsim names no folder of its weights")
    return DreamSimScorer(DreamSim(means.dreamsim), folder=str(means.dreamsim))


def _lpips(means: Means, truth: Truth | None) -> Scorer:
    if truth is None:
        raise _AbsentError(_NO_TRUE_CLIPS.format("LPIPS"))
    model = load_lpips(*(means.lpips or ()))
    return LpipsScorer(model, digest=weights_digest(model))


def _fvd(means: Means, truth: Truth | None) -> SetScorer:
    if means.fvd is None:
        raise _AbsentError("FVD: --fvd names no file of I3D")
    features = load_i3d(means.fvd)
    return _set_scorer("fvd", "FVD", features, frechet_distance, means, truth, path=means.fvd)


def _jedi(means: Means, truth: Truth | None) -> SetScorer:
    if means.jedi is None:
        raise _AbsentError("JEDi: --jedi names no file of V-JEPA's features")
    features = TorchScriptFeatures(means.jedi)
    return _set_scorer("jedi", "JEDi", features, jedi, means, truth, path=means.jedi)


def _set_scorer(
    group: Group,
    metric: str,
    features: VideoFeatures,
    distance: Callable[[Features, Features], float],
    means: Means,
    truth: Truth | None,
    *,
    path: Path,
) -> SetScorer:
    """A metric of two sets; the other one is real clips, or the toy world's true ones."""
    if means.real_clips is not None:
        files = sorted(means.real_clips.glob("*.mp4"))
        if not files:
            raise _AbsentError(f"{metric}: --real-clips {means.real_clips}: no .mp4 in it")
        reference = np.concatenate([features(read_mp4(file)[None, :NUM_FRAMES]) for file in files])
    elif truth is not None:
        clips = truth.clips.reshape(-1, *truth.clips.shape[2:])
        reference = features(clips[:, :NUM_FRAMES])
    else:
        raise _AbsentError(f"{metric}: --real-clips names no clips to compare with")
    made = {"features": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    return SetScorer(
        group=group,
        metric=metric,
        features=features,
        distance=distance,
        reference=reference,
        made=made,
    )


def _readers(means: Means, truth: Truth | None, size: FrameSize, vae: VAE | None) -> Scorer:
    if truth is None:
        raise _AbsentError("who, where and when are read off the toy world's clips only")
    clip = means.scoring_clip
    whole = None if vae is None else functools.partial(reconstruct, vae)
    reader = make_readers(
        None if clip is None or not clip.texts else clip.embedder,
        height=size.height,
        width=size.width,
        num_frames=size.num_frames,
        reconstruct=whole,
        num_truth=means.reader_clips,
        num_checked=max(1, means.reader_clips // 3),
    )
    doubted = [name for name, check in reader.chosen.items() if not check.may_judge]
    if doubted:
        raise _AbsentError(
            f"the readers of {', '.join(doubted)} are right too seldom on true clips of "
            f"{size.height} x {size.width} pixels"
        )
    return TruthScorer(
        reader,
        made={
            "readers": {name: check.reader for name, check in reader.chosen.items()},
            "clips": means.reader_clips,
            "clip": None if clip is None else clip.digest,
        },
    )
