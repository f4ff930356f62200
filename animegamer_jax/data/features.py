"""A games set and a bundle to a features set: what the decoder's and the MLLM's stages train on.

For every turn: T5's features of its motion text, CLIP's features of its first frame (PAPER section
3.1: f_md and f_v) and the VAE's moments of its clip, computed once, stored in float16. Latents are
drawn from the moments, and scaled, at training time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, Float, Float16, Int, UInt8

from animegamer_jax.bundle import Bundle
from animegamer_jax.data.sets import (
    FeatureInfo,
    GamesSet,
    Part,
    Record,
    Records,
    SetInfo,
    write_set,
)
from animegamer_jax.data.turns import Frame, check_clips, read_frames
from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE
from animegamer_jax.storage import absolute, refuse_existing
from animegamer_jax.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]


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
    """

    t5: T5Encoder
    clip: CLIP
    vae: VAE
    tokenizer: Tokenizer
    num_text_tokens: int
    frame: Frame = "first"
    batch_size: int = 16

    def conditions(self, turns: Iterable[Record], info: SetInfo) -> Iterator[Record]:
        """The turns of a games set, with features of their texts and frames for their clips.

        Raises:
            UserError: a clip cannot be read, or a feature is too large to be stored.
        """
        for batch in _batches(turns, self.batch_size):
            tokens = [self.tokenizer.padded(t["motion_text"], self.num_text_tokens) for t in batch]
            frames = [self._shown(turn, info) for turn in batch]
            texts = read_texts(self.t5, self._whole(tokens))
            images = see_frames(self.clip, self._whole(frames))
            texts, images = (
                _stored(x, batch, network=n) for x, n in ((texts, "T5"), (images, "CLIP"))
            )
            for turn, text, image in zip(batch, texts, images, strict=False):
                told = {name: value for name, value in turn.items() if name != "clip"}
                yield {**told, "text_features": text, "image_features": image}

    def latents(self, turns: Iterable[Record], info: SetInfo) -> Iterator[Record]:
        """The moments of the turns' clips.

        Raises:
            UserError: a clip cannot be read, or a moment is too large to be stored.
        """
        for batch in _batches(turns, self.batch_size):
            clips = [read_frames(turn, info, num_frames=info.num_frames) for turn in batch]
            moments = _stored(encode_clips(self.vae, self._whole(clips)), batch, network="the VAE")
            for turn, one in zip(batch, moments, strict=False):
                yield {**{k: turn[k] for k in ("game", "turn", "num_turns")}, "moments": one}

    def _shown(self, turn: Record, info: SetInfo) -> UInt8[np.ndarray, "h w 3"]:
        number = shown_frame(turn, num_frames=info.num_frames, frame=self.frame)
        return read_frames(turn, info, num_frames=number + 1)[-1]

    def _whole(self, rows: list[np.ndarray]) -> jax.Array:
        """A batch of one shape: a short one is filled up with its last row."""
        return jnp.asarray(np.stack(rows + rows[-1:] * (self.batch_size - len(rows))))


def _batches(turns: Iterable[Record], size: int) -> Iterator[list[Record]]:
    rest = iter(turns)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _stored(
    features: Float[Array, "b ..."], turns: list[Record], *, network: str
) -> Float16[np.ndarray, "b ..."]:
    with np.errstate(over="ignore"):  # told below
        stored = np.asarray(features, np.float32).astype(np.float16)
    for turn, row in zip(turns, stored, strict=False):
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
    on_progress: Progress = lambda what, done, total: None,
) -> SetInfo:
    """Writes the features of every turn of a games set.

    Args:
        path: must be free.
        bundle: has T5, CLIP, the VAE and a tokenizer of their vocabulary.
        games: the set.
        num_text_tokens: that a motion text is padded to.
        frame: the frame of the clip that CLIP sees; the paper's is the first.
        batch_size: turns at a time.
        on_progress: called with what is being made, turns done, and turns.

    Raises:
        UserError: a network or the tokenizer is missing or of another size, a clip cannot be read,
            the place is taken, the disk refuses.
    """
    if batch_size < 1 or num_text_tokens < 1:
        raise UserError(f"batch {batch_size}, text tokens {num_text_tokens}: expected 1 or more")
    if frame not in ("first", "random"):
        raise UserError(f"frame {frame!r}: expected first or random")
    refuse_existing(absolute(path), overwrite=None)  # before hours of work
    check_clips(games, bundle.config)
    tokenizer = _tokenizer(bundle)
    maker = FeatureMaker(
        t5=cast(T5Encoder, bundle.load("t5")),
        clip=cast(CLIP, bundle.load("clip")),
        vae=cast(VAE, bundle.load("vae")),
        tokenizer=tokenizer,
        num_text_tokens=num_text_tokens,
        frame=frame,
        batch_size=batch_size,
    )
    info = dataclasses.replace(
        games.info,
        kind="features",
        made_by="animegamer data features",
        splits={},
        features=_describe(maker, bundle, games),
    )

    def records(part: str, make: Callable[..., Iterator[Record]], split: str) -> Iterator[Record]:
        turns = games.turns(split)
        for done, record in enumerate(make((turns[i] for i in range(len(turns))), games.info)):
            yield record
            on_progress(f"{split} {part}", done + 1, len(turns))

    makers: Mapping[Part, Callable[..., Iterator[Record]]] = {
        "conditions": maker.conditions,
        "latents": maker.latents,
    }
    parts: Mapping[Part, Mapping[str, Records]] = {
        part: {split: functools.partial(records, part, make, split) for split in games.info.splits}
        for part, make in makers.items()
    }
    return write_set(path, info, parts=parts)


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
