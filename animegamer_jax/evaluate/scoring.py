"""Which metrics can be had for a benchmark, a size of frames and what lies on this disk.

What cannot be had is left out with the reason, and the rest is scored.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Int
from PIL import Image

from animegamer_jax.bundle import Bundle
from animegamer_jax.data.cast import Cast
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmark import Benchmark
from animegamer_jax.evaluate.benchmark_toy import WORLD, toy_games
from animegamer_jax.evaluate.catalogue import GROUPS, Group
from animegamer_jax.evaluate.lpips import load_lpips
from animegamer_jax.evaluate.readers import ClipEmbedder, make_readers
from animegamer_jax.evaluate.scorers import (
    NUM_FRAMES,
    Clips,
    ClipScorer,
    LpipsScorer,
    MotionScorer,
    Pictures,
    Scorer,
    SpeedScorer,
    StateScorer,
    TruthScorer,
)
from animegamer_jax.evaluate.toytruth import Truth, make_truth, reconstruct
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.vae import VAE
from animegamer_jax.storage import absolute
from animegamer_jax.tokenizer import Tokenizer

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
        lpips: the files of AlexNet and of its channels' weights.
        characters: with pictures to compare with, in worlds without true clips.
        reader_clips: see `READER_CLIPS`.
    """

    groups: Sequence[Group] = tuple(GROUPS)
    clip: "ScoringClip | str | None" = None
    lpips: tuple[Path, Path] | None = None
    characters: Cast | None = None
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
        scorers: one a group.
        left_out: by group, why it is missing.
        truth: of the toy world's games, with whole clips; else None.
    """

    scorers: tuple[Scorer, ...]
    left_out: Mapping[str, str]
    truth: Truth | None

    def true_clips(self, games: Int[np.ndarray, " b"], turn: int) -> Clips | None:
        """The frames that count of some games' true clips at a turn, from 0; None: no truth."""
        return None if self.truth is None else self.truth.clips[games, turn, :NUM_FRAMES]


class _AbsentError(Exception):
    """Why a group of metrics cannot be had."""


def bundle_clip(bundle: Bundle) -> ScoringClip | None:
    """The CLIP of a bundle, None if it has none.

    Its text tower reads captions where the bundle's tokenizer is CLIP's own, as in the toy world;
    in converted models the tokenizer is Mistral's, and captions are not read.
    """
    config = bundle.config.clip
    if config is None:
        return None
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=_num_queries(bundle))
    return ScoringClip(
        embedder=ClipEmbedder(cast(CLIP, bundle.load("clip")), tokenizer),
        texts=config.text_layers > 0 and config.vocab_size == len(tokenizer),
        digest=bundle.digest("clip"),
        source=str(bundle.path),
    )


def _num_queries(bundle: Bundle) -> int:
    encoder, mllm = bundle.config.encoder, bundle.config.mllm
    if encoder is not None:
        return encoder.num_text_tokens + encoder.num_image_tokens
    if mllm is not None:
        return mllm.num_queries
    raise UserError(f"{bundle.path}: expected an encoder or an mllm beside CLIP, found neither")


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
    makers: Mapping[Group, Callable[[], Scorer]] = {
        "states": StateScorer,
        "motion": functools.partial(MotionScorer, toy=truth is not None),
        "clip": functools.partial(_clip, benchmark, means, truth),
        "dreamsim": _dreamsim,
        "lpips": functools.partial(_lpips, means, truth),
        "truth": functools.partial(_readers, means, truth, size, vae),
        "speed": SpeedScorer,
    }
    scorers, left_out = [], {}
    for group, make in makers.items():
        if group not in means.groups:
            continue
        try:
            scorers.append(make())
        except _AbsentError as reason:
            left_out[group] = str(reason)
    return Scoring(scorers=tuple(scorers), left_out=left_out, truth=truth)


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


def _pictures(characters: Cast, names: Sequence[str]) -> Pictures:
    """Of the benchmark's characters; who has none has no CLIP-I."""
    called = {name.casefold(): name for name in names}
    found = {
        called[character.name.casefold()]: [_decode(characters.pictures[d]) for d in digests]
        for character in characters.characters
        if character.name.casefold() in called and (digests := character.images)
    }
    return Pictures(by_name=found, digest=characters.digest)


def first_pictures(characters: Cast) -> dict[str, np.ndarray]:
    """The first picture of each character that has one, RGB."""
    return {
        c.name: _decode(characters.pictures[c.images[0]]) for c in characters.characters if c.images
    }


def _decode(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def _dreamsim() -> Scorer:
    raise _AbsentError("DreamSim: the package or its weights are not here")


def _lpips(means: Means, truth: Truth | None) -> Scorer:
    if truth is None:
        raise _AbsentError("LPIPS compares with true clips, which this world has none of")
    if means.lpips is None:
        raise _AbsentError("LPIPS: --lpips names no weights")
    if absent := [str(path) for path in means.lpips if not path.is_file()]:
        raise _AbsentError(f"--lpips: no weights there: {', '.join(absent)}")
    try:
        model = load_lpips(*means.lpips)
    except UserError as error:
        raise _AbsentError(str(error)) from None
    read = b"".join(path.read_bytes() for path in means.lpips)
    return LpipsScorer(model, digest=hashlib.sha256(read).hexdigest()[:16])


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


def read_bundle(path: str) -> Bundle:
    """Opens a bundle for its CLIP.

    Raises:
        UserError: it is none, or has none.
    """
    bundle = Bundle.open(absolute(path))
    if bundle.config.clip is None:
        raise UserError(f"--clip {path}: expected a bundle with the network clip, found none in it")
    return bundle
