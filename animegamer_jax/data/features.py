"""Makes feature datasets, on which the decoder and the MLLM are trained, from game datasets.

For every turn it stores T5's features of the motion text, CLIP's features of the first frame
(paper, section 3.1: f_md and f_v) and the VAE's moments of the clip, in float16. Training draws
latents from the moments and scales them.

The dataset is written shard by shard (`shards`): hosts divide the shards among them, each host
computes on all of its devices, and the same command continues after a stop.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Float16, Int, UInt8

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.bundle.vocabulary import T5_TOKENIZER_FOLDER, TOKENIZER_FOLDER
from animegamer_jax.data.datasets import (
    INFO_FILE,
    DatasetInfo,
    FeatureInfo,
    GameDataset,
    Part,
    Record,
)
from animegamer_jax.data.samples import Frame, check_clips, read_frames
from animegamer_jax.data.shards import (
    folder_digest,
    shard_ranges,
    shard_size_for,
)
from animegamer_jax.data.shared_shards import write_shards
from animegamer_jax.distributed import raise_on_all_hosts
from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE, signed
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.sharding import make_mesh, partition_spec
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.tokenizer import T5Tokenizer, Tokenizer

T = TypeVar("T")

_GROUP = 4  # batches that are read ahead, so that the new clips in them fill batches
_CACHE_BYTES = 1 << 28  # bytes of features to keep for clips that occur again
_WHOLE = 1 << 24  # bytes at each end of a tokenizer's file: all of it is read
_CARD = "card.json"  # `card.CARD_JSON`, whose module needs more than this one


@jax.jit
def read_texts(t5: T5Encoder, tokens: Int[Array, "b n"]) -> Float[Array, "b n d"]:
    """Computes T5's features of padded motion texts, padding included, as in the release."""
    return t5(tokens)


@jax.jit
def see_frames(clip: CLIP, frames: UInt8[Array, "b h w 3"]) -> Float[Array, "b k e"]:
    """Computes CLIP's patch features of single frames."""
    return clip.see(frames)


@jax.jit
def encode_clips(vae: VAE, clips: UInt8[Array, "b f h w 3"]) -> Float[Array, "b t y x mv"]:
    """Computes the VAE's moments of clips, not scaled."""
    return vae.encode(signed(clips))


def shown_frame(turn: Record, *, num_frames: int, frame: Frame) -> int:
    """Returns the index of CLIP's frame; a random one depends only on the turn's place."""
    if frame == "first":
        return 0
    return int(np.random.default_rng((turn["game"], turn["turn"])).integers(num_frames))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureMaker:
    """The networks that compute features, and their settings.

    Attributes:
        t5, clip, vae: Networks of the bundle.
        tokenizer: Tokenizer of T5's texts.
        num_text_tokens: Number of tokens to which a motion text is padded.
        frame: Frame of the clip that CLIP sees.
        batch_size: Number of turns in a batch.
        mesh: Devices of this host over which a batch is sharded; None: the first device.
    """

    t5: T5Encoder
    clip: CLIP
    vae: VAE
    tokenizer: Tokenizer | T5Tokenizer
    num_text_tokens: int
    frame: Frame = "first"
    batch_size: int = 16
    mesh: Mesh | None = None
    _seen: dict[tuple[bytes, int], tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def records(
        self, turns: Iterable[Record], info: DatasetInfo
    ) -> Iterator[Mapping[Part, Record]]:
        """Yields the records of a feature dataset for the turns of a game dataset.

        Raises:
            UserError: A clip cannot be read, or a feature is too large to be stored.
        """
        for group in _batches(turns, _GROUP * self.batch_size):
            keys = iter(self._see(group, info))
            for batch in _batches(group, self.batch_size):
                tokens = [
                    self.tokenizer.padded(t["motion_text"], self.num_text_tokens) for t in batch
                ]
                texts = _stored(read_texts(self.t5, self._whole(tokens)), batch, network="T5")
                for turn, text in zip(batch, texts, strict=True):
                    image, moments = self._seen[next(keys)]
                    yield _record(turn, text=text, image=image, moments=moments)

    def _see(self, group: list[Record], info: DatasetInfo) -> list[tuple[bytes, int]]:
        """Computes CLIP's features and moments of clips that are not in `_seen`.

        Returns:
            The keys of the turns in `_seen`: all on which features and moments depend.
        """
        hashes = (hashlib.sha256(turn["clip"]).digest() for turn in group)
        frames = (shown_frame(t, num_frames=info.num_frames, frame=self.frame) for t in group)
        keys = list(zip(hashes, frames, strict=True))
        new = {k: turn for k, turn in zip(keys, group, strict=True) if k not in self._seen}
        read = functools.partial(read_frames, info=info, num_frames=info.num_frames)
        for batch in _batches(new.items(), self.batch_size):
            turns = [turn for _, turn in batch]
            with ThreadPoolExecutor() as readers:  # decoding lets other threads run
                clips = list(readers.map(read, turns))
            shown = [clip[frame] for ((_, frame), _), clip in zip(batch, clips, strict=True)]
            computed = (  # both are dispatched before the first is awaited
                ("CLIP", see_frames(self.clip, self._whole(shown))),
                ("the VAE", encode_clips(self.vae, self._whole(clips))),
            )
            stored = [_stored(values, turns, network=name) for name, values in computed]
            for (key, _), image, moments in zip(batch, *stored, strict=True):
                self._seen[key] = image, moments
        for key in keys:  # the most recent last
            self._seen[key] = self._seen.pop(key)
        size = sum(row.nbytes for row in self._seen[keys[0]])
        for key in list(self._seen)[: -max(len(set(keys)), _CACHE_BYTES // size)]:
            del self._seen[key]
        return keys

    def _whole(self, rows: list[np.ndarray]) -> jax.Array:
        """Stacks a batch of constant shape: a short one is padded with its last row."""
        whole = np.stack(rows + rows[-1:] * (self.batch_size - len(rows)))
        if self.mesh is None:
            return jnp.asarray(whole)
        return jax.device_put(whole, NamedSharding(self.mesh, partition_spec(("act_batch",))))


def _record(
    turn: Record, *, text: np.ndarray, image: np.ndarray, moments: np.ndarray
) -> Mapping[Part, Record]:
    reported = {name: value for name, value in turn.items() if name != "clip"}
    place = {name: turn[name] for name in ("game", "turn", "num_turns")}
    return {
        "conditions": {**reported, "text_features": text, "image_features": image},
        "latents": {**place, "moments": moments},
    }


def _batches(turns: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(turns)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _stored(
    features: Float[Array, "b ..."], turns: list[Record], *, network: str
) -> Float16[np.ndarray, "n ..."]:
    with np.errstate(over="ignore"):  # rejected below
        stored = np.asarray(features, np.float32)[: len(turns)].astype(np.float16)
    for turn, row in zip(turns, stored, strict=True):
        if not np.isfinite(row).all():
            raise UserError(
                f"{turn['film']}, game {turn['game']}, turn {turn['turn']}: {network} computed a "
                "feature that is not finite in float16: the network is broken: train it again"
            )
    return stored


def write_features(
    path: epath.PathLike,
    *,
    bundle: Bundle,
    games: GameDataset,
    num_text_tokens: int,
    frame: Frame = "first",
    batch_size: int = 16,
    shard_size: int | None = None,
    on_progress: Progress = no_progress,
) -> DatasetInfo:
    """Writes the features of every turn of a game dataset, or continues an unfinished dataset.

    All hosts of a run call it, and each shard is written once; an error on one host stops them all.

    Args:
        path: Path of the dataset, which must be free or hold the same unfinished dataset.
        bundle: Bundle with T5, CLIP, the VAE and a tokenizer of their vocabulary.
        games: The game dataset.
        num_text_tokens: Number of tokens to which a motion text is padded.
        frame: Frame of the clip that CLIP sees; the first in the paper.
        batch_size: Number of turns in a batch on each host.
        shard_size: Number of turns in a file; a stop may lose as many. None: by the number of
            turns (`shard_size_for`).
        on_progress: Called with what is being made, turns done, and turns.

    Raises:
        UserError: A network or the tokenizer is missing or of another size, a clip cannot be read,
            the path is taken, cannot be written or holds an unfinished dataset of other games,
            another bundle or shard size, or the devices do not divide the batch.
    """
    if shard_size is None:
        shard_size = shard_size_for(sum(games.info.splits.values()))
    with raise_on_all_hosts():
        maker = _make_maker(
            bundle,
            games,
            num_text_tokens=num_text_tokens,
            frame=frame,
            batch_size=batch_size,
            shard_size=shard_size,
        )
        info = dataclasses.replace(
            games.info,
            kind="features",
            made_by="animegamer data features",
            splits={},
            features=_describe(maker, bundle, games),
        )
        places = {s: shard_ranges(n, size=shard_size) for s, n in games.info.splits.items()}
        fingerprint: dict[str, Any] = {
            "shard_size": shard_size,
            "games": _games_digest(games),
            "bundle": _bundle_digest(bundle),
        }

    def records(split: str, place: range) -> Iterator[Mapping[Part, Record]]:
        turns = games.turns(split)
        return maker.records((turns[number] for number in place), games.info)

    return write_shards(
        path,
        info,
        places=places,
        fingerprint=fingerprint,
        records=records,
        on_progress=on_progress,
    )


def _make_maker(
    bundle: Bundle,
    games: GameDataset,
    *,
    num_text_tokens: int,
    frame: Frame,
    batch_size: int,
    shard_size: int,
) -> FeatureMaker:
    """Loads the networks to this host's devices, after a check of all numbers."""
    numbers = {"batch": batch_size, "text tokens": num_text_tokens, "shard": shard_size}
    for name, number in numbers.items():
        check_at_least(name, number, 1)
    if frame not in ("first", "random"):
        raise UserError(f"frame {frame!r}: expected first or random")
    devices = jax.local_device_count()
    if batch_size % devices:
        raise UserError(f"batch {batch_size}: expected a multiple of this host's {devices} devices")
    check_clips(games, bundle.config)
    tokenizer = bundle.load_t5_tokenizer()
    mesh = make_mesh({"data": devices}, devices=jax.local_devices())
    return FeatureMaker(
        t5=bundle.load("t5", mesh=mesh),
        clip=bundle.load("clip", mesh=mesh),
        vae=bundle.load("vae", mesh=mesh),
        tokenizer=tokenizer,
        num_text_tokens=num_text_tokens,
        frame=frame,
        batch_size=batch_size,
        mesh=mesh,
    )


def _games_digest(games: GameDataset) -> dict[str, str]:
    """Computes digests of a game dataset: of its description with its card, and of its files."""
    description = hashlib.sha256()
    with user_errors(games.path, "cannot be read", hint="check the path"):
        for name in (INFO_FILE, _CARD):
            if (file := games.path / name).exists():
                description.update(file.read_bytes())
    records = folder_digest(games.path / "games")
    return {"description": description.hexdigest()[:16], "records": records}


def _bundle_digest(bundle: Bundle) -> dict[str, str]:
    """Computes digests of the networks that compute features, without the middle of large files."""
    networks = {name: folder_digest(bundle.path / name) for name in ("t5", "clip", "vae")}
    own = (bundle.path / T5_TOKENIZER_FOLDER).is_dir()
    tokenizer = bundle.path / (T5_TOKENIZER_FOLDER if own else TOKENIZER_FOLDER)
    return {**networks, "tokenizer": folder_digest(tokenizer, ends=_WHOLE)}


def _describe(maker: FeatureMaker, bundle: Bundle, games: GameDataset) -> FeatureInfo:
    info, t5, clip, vae = games.info, maker.t5.config, maker.clip.config, maker.vae.config
    size = (info.num_frames, info.height, info.width, 3)
    moments = jax.eval_shape(
        encode_clips, maker.vae, jax.ShapeDtypeStruct((1, *size), jnp.uint8)
    ).shape[1:]
    return FeatureInfo(
        bundle=bundle.name,
        games=str(games.path),
        frame=maker.frame,
        text=(maker.num_text_tokens, t5.d_model),
        image=(clip.num_patches, clip.vision_width),
        moments=moments,
        t5=t5,
        clip=clip,
        vae=vae,
    )
