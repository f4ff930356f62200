"""The metrics that a benchmark, a size of frames and the files at hand allow.

A group of metrics that cannot be computed is skipped, with the reason; the others are scored.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt8
from PIL import Image

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.data.characters import Characters
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, in_batches
from animegamer_jax.evaluate.metrics.dreamsim import DreamSim
from animegamer_jax.evaluate.metrics.lpips import load_lpips
from animegamer_jax.evaluate.metrics.openclip import load_clip_for_scores
from animegamer_jax.evaluate.metrics.registry import GROUPS, Group
from animegamer_jax.evaluate.metrics.scorers import (
    NUM_FRAMES,
    Clips,
    ClipScorer,
    DreamSimScorer,
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
from animegamer_jax.evaluate.options import MetricFiles
from animegamer_jax.evaluate.worlds import (
    DetailTruth,
    FrameSize,
    GameClips,
    World,
    find_world,
)
from animegamer_jax.media.video import read_mp4
from animegamer_jax.models.latents import mode
from animegamer_jax.models.vae import VAE, to_uint8
from animegamer_jax.storage.serialization import to_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringClip:
    """The CLIP that scores all systems, the digest of its weights, and where it was loaded from."""

    embedder: ClipEmbedder
    digest: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricResources:
    """Everything that metrics are computed with.

    Attributes:
        groups: Groups of metrics to compute.
        clip: The CLIP that scores all systems, or why there is none; None: no model has one.
        characters: Pictures of characters for CLIP-I, in worlds without true clips.
        files: Files that metrics are computed with.
    """

    groups: Sequence[Group] = tuple(GROUPS)
    clip: ScoringClip | str | None = None
    characters: Characters | None = None
    files: MetricFiles = dataclasses.field(default_factory=MetricFiles)

    @property
    def scoring_clip(self) -> ScoringClip | None:
        """The CLIP, if there is one."""
        return self.clip if isinstance(self.clip, ScoringClip) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSuite:
    """The scorers for clips of one size.

    Attributes:
        scorers: Scorers of single turns, one per group.
        set_scorers: Scorers of all clips together.
        skipped: The reason by group that cannot be computed.
        true_clips: Whole true clips of the benchmark's games; None: its world has none.
        other_views: Function that draws the same scenes from other views; None likewise.
        pictures: Picture before each game's first turn; empty: no game has one.
        details: Which turns show the same thing, by attribute that no instruction says.
    """

    scorers: tuple[Scorer, ...] = ()
    set_scorers: tuple[SetScorer, ...] = ()
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    true_clips: GameClips | None = None
    other_views: Callable[[], GameClips] | None = None
    pictures: tuple[UInt8[np.ndarray, "h w 3"] | None, ...] = ()
    details: Mapping[str, DetailTruth] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything besides the answers that values depend on, by group."""
        return {s.group: to_json(s.fingerprint) for s in (*self.scorers, *self.set_scorers)}

    def true_clips_of(self, games: Int[np.ndarray, " b"], turn: int) -> Clips | None:
        """Returns the scored frames of some games' true clips at a turn, counted from 0."""
        return None if self.true_clips is None else self.true_clips[games, turn, :NUM_FRAMES]


def load_clip(path: str, *, tokenizer: Path | None = None) -> ScoringClip:
    """Loads CLIP from a bundle, "toy", or an OpenCLIP checkpoint (`openclip`).

    Raises:
        UserError: There is none.
    """
    embedder = load_clip_for_scores(model_folder(path), tokenizer=tokenizer)
    return ScoringClip(embedder=embedder, digest=weights_digest(embedder.clip), source=path)


def weights_digest(network: nnx.Module) -> str:
    """Returns a digest of a network's weights in float32."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(network, nnx.Param)):
        found.update(np.asarray(leaf, np.float32).tobytes())
    return found.hexdigest()[:16]


def reconstruct(
    vae: VAE, clips: UInt8[np.ndarray, "n f h w 3"], *, batch_size: int = 4
) -> UInt8[np.ndarray, "n f h w 3"]:
    """Sends clips through the VAE: the most likely latents, decoded."""
    return in_batches(lambda batch: _encode_and_decode(vae, batch), clips, batch_size)


@jax.jit
def _encode_and_decode(vae: VAE, frames: jax.Array) -> jax.Array:
    video = (frames.astype(jnp.float32) / 127.5 - 1).astype(vae.config.dtype)
    latents = mode(vae.encode(video)).astype(vae.config.dtype)
    return to_uint8(vae.decode(latents))


def make_suite(
    benchmark: Benchmark, resources: MetricResources, size: FrameSize, *, vae: VAE | None = None
) -> MetricSuite:
    """Builds the scorers of all chosen groups that can be computed.

    Args:
        benchmark: The benchmark; its world decides what is known.
        resources: Everything to compute with.
        size: Size of the clips to score.
        vae: The system's VAE, whose blur the world's classifier is checked with; None: not at hand.
    """
    world = find_world(benchmark.world)
    true_clips = None if world is None else world.true_clips(benchmark, size)
    motion = {} if world is None else {"edges": world.motion_edges, "noise": world.motion_noise}
    makers: Mapping[Group, Callable[[], Scorer | SetScorer]] = {
        "states": StateScorer,
        "motion": functools.partial(MotionScorer, **motion),
        "clip": functools.partial(_clip, benchmark, resources, true_clips),
        "dreamsim": functools.partial(_dreamsim, resources, true_clips),
        "lpips": functools.partial(_lpips, resources, true_clips),
        "truth": functools.partial(_truth, resources, world, size, vae),
        "speed": SpeedScorer,
        "fvd": functools.partial(_set_scorer, "fvd", resources, true_clips),
        "jedi": functools.partial(_set_scorer, "jedi", resources, true_clips),
    }
    made, skipped = [], {}
    for group, make in makers.items():
        if group not in resources.groups:
            continue
        try:
            made.append(make())
        except UserError as reason:
            skipped[group] = str(reason)
    return MetricSuite(
        scorers=tuple(one for one in made if not isinstance(one, SetScorer)),
        set_scorers=tuple(one for one in made if isinstance(one, SetScorer)),
        skipped=skipped,
        true_clips=true_clips,
        other_views=None
        if world is None
        else functools.partial(world.other_views, benchmark, size),
        pictures=() if world is None else tuple(world.pictures(benchmark, size)),
        details={} if world is None else world.details(benchmark),
    )


def _require_true_clips(metric: str, true_clips: GameClips | None) -> None:
    if true_clips is None:
        raise UserError(f"{metric} needs true clips, which this world does not have")


def _clip(benchmark: Benchmark, resources: MetricResources, true: GameClips | None) -> Scorer:
    clip = resources.clip
    if clip is None:
        raise UserError("no model has a CLIP: give one with --clip")
    if isinstance(clip, str):
        raise UserError(clip)
    pictures = None
    if true is None and resources.characters is not None:
        pictures = _pictures(resources.characters, benchmark.characters)
    if true is None and pictures is None and not clip.embedder.has_text:
        raise UserError(
            "nothing to compare with: this world has no true clips, --characters gives no "
            "pictures, and CLIP's tokenizer is not in the model"
        )
    return ClipScorer(clip.embedder, digest=clip.digest, pictures=pictures)


def _pictures(characters: Characters, names: Sequence[str]) -> Pictures:
    """Returns the pictures of the benchmark's characters; one without pictures has no CLIP-I."""
    wanted = {name.casefold() for name in names}
    found = {
        character.name: [_decode(characters.pictures[digest]) for digest in character.images]
        for character in characters.entries
        if character.name.casefold() in wanted and character.images
    }
    return Pictures(by_name=found, digest=characters.digest)


def first_pictures(characters: Characters) -> dict[str, np.ndarray]:
    """Returns the first picture of each character that has one, RGB."""
    return {
        c.name: _decode(characters.pictures[c.images[0]]) for c in characters.entries if c.images
    }


def _decode(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def _dreamsim(resources: MetricResources, true_clips: GameClips | None) -> Scorer:
    _require_true_clips("DreamSim", true_clips)
    if resources.files.dreamsim is None:
        raise UserError("DreamSim: give the folder of its weights with --dreamsim")
    return DreamSimScorer(DreamSim(resources.files.dreamsim), folder=str(resources.files.dreamsim))


def _lpips(resources: MetricResources, true_clips: GameClips | None) -> Scorer:
    _require_true_clips("LPIPS", true_clips)
    model = load_lpips(*(resources.files.lpips or ()))
    return LpipsScorer(model, digest=weights_digest(model))


_DISTANCES: Mapping[str, tuple[str, str, Callable[[Path], VideoFeatures], Callable]] = {
    "fvd": ("FVD", "give the file of I3D with --fvd", load_i3d, frechet_distance),
    "jedi": ("JEDi", "give a file of V-JEPA's features with --jedi", TorchScriptFeatures, jedi),
}
"""Name, advice where its file is missing, features and distance of each metric of all clips."""


def _set_scorer(
    group: Literal["fvd", "jedi"], resources: MetricResources, true_clips: GameClips | None
) -> SetScorer:
    """Compares with the real clips that were given, or else with the true ones."""
    metric, advice, load, distance = _DISTANCES[group]
    path: Path | None = getattr(resources.files, group)
    if path is None:
        raise UserError(f"{metric}: {advice}")
    features = load(path)
    if resources.files.real_clips is not None:
        files = sorted(resources.files.real_clips.glob("*.mp4"))
        if not files:
            raise UserError(f"{metric}: no .mp4 in --real-clips {resources.files.real_clips}")
        reference = np.concatenate([features(read_mp4(file)[None, :NUM_FRAMES]) for file in files])
    elif true_clips is not None:
        clips = true_clips.reshape(-1, *true_clips.shape[2:])
        reference = features(clips[:, :NUM_FRAMES])
    else:
        raise UserError(f"{metric}: give clips to compare with in --real-clips")
    return SetScorer(
        group=group,
        metric=metric,
        features=features,
        distance=distance,
        reference=reference,
        fingerprint={"features": hashlib.sha256(path.read_bytes()).hexdigest()[:16]},
    )


def _truth(
    resources: MetricResources, world: World | None, size: FrameSize, vae: VAE | None
) -> Scorer:
    if world is None:
        raise UserError("only clips of a world that can draw them can be classified")
    classifier = world.make_classifier(
        size=size,
        reconstruct=None if vae is None else functools.partial(reconstruct, vae),
        num_clips=resources.files.classifier_clips,
    )
    return TruthScorer(
        classifier,
        fingerprint={
            "classifiers": classifier.description,
            "digest": classifier.digest,
            "clips": resources.files.classifier_clips,
        },
    )
