"""A games set and a bundle to a features set: what the decoder's and the MLLM's stages train on.

For every turn: T5's features of its motion text, CLIP's features of its first frame (PAPER section
3.1: f_md and f_v) and the VAE's moments of its clip, computed once, stored in float16. Latents are
drawn from the moments, and scaled, at training time.

The set is written shard by shard (`shards`): hosts share the shards out, each computes on all of
its devices, and the same command goes on after a stop.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Float16, Int, UInt8

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import (
    INFO_FILE,
    FeatureInfo,
    GamesSet,
    Part,
    Record,
    SetInfo,
)
from animegamer_jax.data.samples import (
    Frame,
    check_clips,
    read_frames,
)
from animegamer_jax.data.shards import ShardedSet, begin_set, folder_digest, shard_ranges
from animegamer_jax.distributed import together
from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.sharding import make_mesh, partition_spec
from animegamer_jax.storage.paths import telling
from animegamer_jax.tokenizer import Tokenizer

T = TypeVar("T")

_GROUP = 4  # batches that are read ahead, so that what is new in them fills whole ones
_REMEMBERED = 1 << 28  # bytes of features that are kept for clips which come again
_WHOLE = 1 << 24  # bytes of a tokenizer's file, which are all read
_CARD = "card.json"  # `card.CARD_JSON`, whose module needs more than this one


def signed(frames: UInt8[Array, "*b h w 3"]) -> Float[Array, "*b h w 3"]:
    """Pixels 0..255 as the networks read them, -1 to 1."""
    return frames.astype(jnp.float32) / 127.5 - 1.0


@jax.jit
def read_texts(t5: T5Encoder, tokens: Int[Array, "b n"]) -> Float[Array, "b n d"]:
    """T5's features of padded motion texts; the padding takes part, as in the release."""
    return t5(tokens)


@jax.jit
def see_frames(clip: CLIP, frames: UInt8[Array, "b h w 3"]) -> Float[Array, "b k e"]:
    """CLIP's patch features of single frames."""
    return clip.image_features(clip.preprocess(signed(frames)))


@jax.jit
def encode_clips(vae: VAE, clips: UInt8[Array, "b f h w 3"]) -> Float[Array, "b t y x m"]:
    """The VAE's moments of clips, not scaled."""
    return vae.encode(signed(clips))


def shown_frame(turn: Record, *, num_frames: int, frame: Frame) -> int:
    """The number of the frame that CLIP sees: a random one is drawn from the turn's own place."""
    if frame == "first":
        return 0
    return int(np.random.default_rng((turn["game"], turn["turn"])).integers(num_frames))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureMaker:
    """The networks that make features, and how they are used.

    Attributes:
        t5, clip, vae: of the bundle.
        tokenizer: of the bundle.
        num_text_tokens: that a motion text is padded to.
        frame: the frame of the clip that CLIP sees.
        batch_size: turns at a time.
        mesh: devices of this host, over which a batch is spread; None: the first device.
    """

    t5: T5Encoder
    clip: CLIP
    vae: VAE
    tokenizer: Tokenizer
    num_text_tokens: int
    frame: Frame = "first"
    batch_size: int = 16
    mesh: Mesh | None = None
    _seen: dict[tuple[bytes, int], tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def records(self, turns: Iterable[Record], info: SetInfo) -> Iterator[Mapping[Part, Record]]:
        """The turns of a games set with features for their clips, and the moments of the clips.

        Raises:
            UserError: a clip cannot be read, or a feature is too large to be stored.
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

    def _key(self, turn: Record, info: SetInfo) -> tuple[bytes, int]:
        """What CLIP's features and the moments of a turn depend on."""
        shown = shown_frame(turn, num_frames=info.num_frames, frame=self.frame)
        return hashlib.sha256(turn["clip"]).digest(), shown

    def _see(self, group: list[Record], info: SetInfo) -> list[tuple[bytes, int]]:
        """CLIP's features and moments of clips not seen lately: a toy's games show some again.

        Returns:
            The turns' keys in `_seen`.
        """
        keys = [self._key(turn, info) for turn in group]
        new = {k: turn for k, turn in zip(keys, group, strict=True) if k not in self._seen}
        for batch in _batches(new.items(), self.batch_size):
            turns = [turn for _, turn in batch]
            clips = [read_frames(turn, info, num_frames=info.num_frames) for turn in turns]
            shown = [clip[frame] for ((_, frame), _), clip in zip(batch, clips, strict=True)]
            made = (  # both are under way before the first is waited for
                ("CLIP", see_frames(self.clip, self._whole(shown))),
                ("the VAE", encode_clips(self.vae, self._whole(clips))),
            )
            stored = [_stored(values, turns, network=name) for name, values in made]
            for (key, _), image, moments in zip(batch, *stored, strict=True):
                self._seen[key] = image, moments
        for key in keys:  # the latest last
            self._seen[key] = self._seen.pop(key)
        size = sum(row.nbytes for row in self._seen[keys[0]])
        for key in list(self._seen)[: -max(len(set(keys)), _REMEMBERED // size)]:
            del self._seen[key]
        return keys

    def _whole(self, rows: list[np.ndarray]) -> jax.Array:
        """A batch of one shape: a short one is filled up with its last row."""
        whole = np.stack(rows + rows[-1:] * (self.batch_size - len(rows)))
        if self.mesh is None:
            return jnp.asarray(whole)
        return jax.device_put(whole, NamedSharding(self.mesh, partition_spec(("act_batch",))))


def _record(
    turn: Record, *, text: np.ndarray, image: np.ndarray, moments: np.ndarray
) -> Mapping[Part, Record]:
    told = {name: value for name, value in turn.items() if name != "clip"}
    place = {name: turn[name] for name in ("game", "turn", "num_turns")}
    parts: dict[Part, Record] = {
        "conditions": {**told, "text_features": text, "image_features": image},
        "latents": {**place, "moments": moments},
    }
    return parts


def _batches(turns: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(turns)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _stored(
    features: Float[Array, "b ..."], turns: list[Record], *, network: str
) -> Float16[np.ndarray, "n ..."]:
    with np.errstate(over="ignore"):  # told below
        stored = np.asarray(features, np.float32)[: len(turns)].astype(np.float16)
    for turn, row in zip(turns, stored, strict=True):
        if not np.isfinite(row).all():
            raise UserError(
                f"{turn['film']}, game {turn['game']}, turn {turn['turn']}: {network} gives a "
                "feature that is not finite in float16: the network is broken, train it again"
            )
    return stored


def write_features(
    path: epath.PathLike,
    *,
    bundle: Bundle,
    games: GamesSet,
    num_text_tokens: int,
    frame: Frame = "first",
    batch_size: int = 16,
    shard_size: int = 256,
    on_progress: Progress = no_progress,
) -> SetInfo:
    """Writes the features of every turn of a games set, or goes on with what was begun.

    Called on every host of a run, it writes each shard once; a mistake of one host stops them all.

    Args:
        path: must be free, or hold such a set on its way.
        bundle: has T5, CLIP, the VAE and a tokenizer of their vocabulary.
        games: the set.
        num_text_tokens: that a motion text is padded to.
        frame: the frame of the clip that CLIP sees; the paper's is the first.
        batch_size: turns at a time on a host.
        shard_size: turns of a file; what a stop may lose.
        on_progress: Called with the split, the number of finished turns and the total.

    Raises:
        UserError: a network or the tokenizer is missing or of another size, a clip cannot be read,
            the place is taken, what was begun there was made of another games set, bundle or shard
            size, the devices do not divide the batch, the disk refuses.
    """
    with together():
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
        ranges = {s: shard_ranges(n, size=shard_size) for s, n in games.info.splits.items()}
        shards = {split: len(found) for split, found in ranges.items()}
        made_of: dict[str, Any] = {
            "shard_size": shard_size,
            "games": _games_digest(games),
            "bundle": _bundle_digest(bundle),
        }
        if jax.process_index() == 0:
            begin_set(path, info, shards=shards, made_of=made_of)
    with together():
        written = begin_set(path, info, shards=shards, made_of=made_of)  # the others find it so
        for split, places in ranges.items():
            _write_split(written, split, places, maker=maker, games=games, on_progress=on_progress)
    with together():
        if jax.process_index() == 0:
            written.finish(expected=games.info.splits)
    return dataclasses.replace(info, splits=dict(games.info.splits))


def _make_maker(
    bundle: Bundle,
    games: GamesSet,
    *,
    num_text_tokens: int,
    frame: Frame,
    batch_size: int,
    shard_size: int,
) -> FeatureMaker:
    """The networks on this host's devices, when all numbers can be.

    Raises:
        UserError: as `write_features`.
    """
    numbers = {"batch": batch_size, "text tokens": num_text_tokens, "shard": shard_size}
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} {number}: expected 1 or more")
    if frame not in ("first", "random"):
        raise UserError(f"frame {frame!r}: expected first or random")
    devices = jax.local_device_count()
    if batch_size % devices:
        raise UserError(f"batch {batch_size}: expected a multiple of this host's {devices} devices")
    check_clips(games, bundle.config)
    tokenizer = _tokenizer(bundle)
    mesh = make_mesh({"data": devices}, devices=jax.local_devices())
    return FeatureMaker(
        t5=cast(T5Encoder, bundle.load("t5", mesh=mesh)),
        clip=cast(CLIP, bundle.load("clip", mesh=mesh)),
        vae=cast(VAE, bundle.load("vae", mesh=mesh)),
        tokenizer=tokenizer,
        num_text_tokens=num_text_tokens,
        frame=frame,
        batch_size=batch_size,
        mesh=mesh,
    )


def _games_digest(games: GamesSet) -> dict[str, str]:
    """Tells a games set from another one: its description, its card, its files."""
    about = hashlib.sha256()
    with telling(games.path, "cannot be read", mend="check the path"):
        for name in (INFO_FILE, _CARD):
            if (file := games.path / name).exists():
                about.update(file.read_bytes())
    return {"about": about.hexdigest()[:16], "records": folder_digest(games.path / "games")}


def _bundle_digest(bundle: Bundle) -> dict[str, str]:
    """Tells the networks that make features from others: all but the middle of large files."""
    networks = {name: folder_digest(bundle.path / name) for name in ("t5", "clip", "vae")}
    return {**networks, "tokenizer": folder_digest(bundle.path / "tokenizer", ends=_WHOLE)}


def _write_split(
    written: ShardedSet,
    split: str,
    places: list[range],
    *,
    maker: FeatureMaker,
    games: GamesSet,
    on_progress: Progress,
) -> None:
    """This host's part of the shards that are missing."""
    turns, missing = games.turns(split), written.missing(split)
    done = len(turns) - sum(len(places[shard]) for shard in missing)
    hosts, host = jax.process_count(), jax.process_index()
    # By number: hosts look at different times, and find different ones missing.
    mine = [shard for shard in missing if shard % hosts == host]
    on_progress(f"{split} turns", done, len(turns))
    for shard in mine:
        records = maker.records((turns[i] for i in places[shard]), games.info)
        done += written.write(split, shard, records)
        on_progress(f"{split} turns", done, len(turns))


def _tokenizer(bundle: Bundle) -> Tokenizer:
    t5 = bundle.config.t5
    return Tokenizer.load(  # no frame token is needed here
        bundle.tokenizer_dir, vocab_size=t5.vocab_size if t5 else None, num_queries=1
    )


def _describe(maker: FeatureMaker, bundle: Bundle, games: GamesSet) -> FeatureInfo:
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
