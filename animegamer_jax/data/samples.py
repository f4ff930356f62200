"""Samples of each training stage, made from the record of a turn.

A sample is a named tuple of numpy arrays of fixed shapes, without a batch axis. Samples of a turn
with its history are in `windows`.

Each function `*_samples` reads a split of a dataset. `config` is the configuration of the model
that will read the samples, `tokenizer` that of its bundle, `seed` seeds the draws. The functions
raise `UserError` if there is no such split, or if the model cannot read the clips, features or
states.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import grain
import jax
import numpy as np
from jaxtyping import Float32, Int32, UInt8

from animegamer_jax.configs import ModelConfig, NetworkConfig, clip_size
from animegamer_jax.data.datasets import (
    DatasetInfo,
    FeatureDataset,
    GameDataset,
    Record,
    RecordSource,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.protocol import STATE_NAMES, Protocol
from animegamer_jax.tokenizer import Tokenizer

Frame = Literal["first", "random"]

CACHE_BYTES = 1 << 29
"""Bytes of decoded features that stay in memory, for each part of a dataset."""


class ClipSample(NamedTuple):
    """A clip, for the VAE."""

    frames: UInt8[np.ndarray, "*b f h w 3"]


class CaptionSample(NamedTuple):
    """A frame and the token ids of its caption, for CLIP."""

    frame: UInt8[np.ndarray, "*b h w 3"]
    tokens: Int32[np.ndarray, "*b n"]


class TextSample(NamedTuple):
    """The token ids of a text, for T5."""

    tokens: Int32[np.ndarray, "*b n"]


class TurnSample(NamedTuple):
    """A turn, for the decoder's stages.

    Attributes:
        moments: Output of the VAE's encoder: means, then log-variances, not scaled.
        text: T5's features of the motion text.
        image: CLIP's features of the clip's first frame.
        motion_value: Mean optical flow in pixels per frame at 480 x 720.
        caption: Token ids of the complete caption, padded.
        level: Motion level.
    """

    moments: Float32[np.ndarray, "*b t h w mv"]
    text: Float32[np.ndarray, "*b n d"]
    image: Float32[np.ndarray, "*b k e"]
    motion_value: Float32[np.ndarray, "*b"]
    caption: Int32[np.ndarray, "*b c"]
    level: Int32[np.ndarray, "*b"]


# Shapes of samples that networks of a configuration read


def array_spec(dtype: str, *shape: int) -> Any:
    """Returns a shape, in place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def clip_spec(config: ModelConfig) -> ClipSample:
    """Returns the shapes of `clip_samples`."""
    vae, dit = config.vae, config.dit
    assert vae is not None
    assert dit is not None
    return ClipSample(array_spec("uint8", *clip_size(dit, vae), 3))


def caption_spec(config: ModelConfig) -> CaptionSample:
    """Returns the shapes of `caption_samples`."""
    assert config.clip is not None
    frame = array_spec("uint8", *clip_spec(config).frames.shape[1:])
    return CaptionSample(frame, array_spec("int32", config.clip.context_length))


def text_spec(length: int) -> TextSample:
    """Returns the shapes of `text_samples`."""
    return TextSample(array_spec("int32", length))


def turn_spec(config: ModelConfig, *, caption_length: int) -> TurnSample:
    """Returns the shapes of `turn_samples`."""
    e = config.encoder
    assert e is not None
    return TurnSample(
        moments=moments_spec(config),
        text=array_spec("float32", e.num_text_tokens, e.text_size),
        image=array_spec("float32", e.num_image_tokens, e.image_size),
        motion_value=array_spec("float32"),
        caption=array_spec("int32", caption_length),
        level=array_spec("int32"),
    )


def moments_spec(config: ModelConfig) -> Any:
    """Returns the shape of `TurnSample.moments`."""
    d = config.dit
    assert d is not None
    size = (d.latent_frames, d.latent_height, d.latent_width)
    return array_spec("float32", *size, 2 * d.latent_channels)


# Games


def clip_samples(
    games: GameDataset, *, split: str, config: ModelConfig | None = None
) -> grain.MapDataset[ClipSample]:
    """Returns every complete clip; without `config`, clips are not checked."""
    if config is not None:
        check_clips(games, config)
    info = games.info
    return grain.MapDataset.source(games.turns(split)).map(
        lambda record: ClipSample(read_frames(record, info, num_frames=info.num_frames))
    )


def caption_samples(
    games: GameDataset,
    *,
    split: str,
    tokenizer: Tokenizer,
    length: int,
    frame: Frame = "random",
    seed: int = 0,
) -> grain.MapDataset[CaptionSample]:
    """Returns the first or a random frame of each clip with one of its captions.

    Both are drawn again in each epoch; captions are padded to `length` tokens.
    """

    def draw(record: Record, rng: np.random.Generator) -> CaptionSample:
        number = int(rng.integers(games.info.num_frames)) if frame == "random" else 0
        shown = read_frames(record, games.info, num_frames=number + 1)[-1]
        caption = str(rng.choice(record["captions"]))
        return CaptionSample(shown, tokenizer.padded_with_end(caption, length))

    return grain.MapDataset.source(games.turns(split)).random_map(draw, seed=seed)


def text_samples(
    turns: GameDataset | FeatureDataset,
    *,
    split: str,
    tokenizer: Tokenizer,
    length: int,
    seed: int = 0,
) -> grain.MapDataset[TextSample]:
    """Returns the motion text, a caption or the instruction of each turn, drawn in each epoch."""

    def draw(record: Record, rng: np.random.Generator) -> TextSample:
        caption = str(rng.choice(record["captions"]))
        texts = (record["motion_text"], caption, record["instruction"])
        return TextSample(tokenizer.padded(texts[rng.integers(len(texts))], length))

    return grain.MapDataset.source(turns.turns(split)).random_map(draw, seed=seed)


def read_frames(
    turn: Record, info: DatasetInfo, *, num_frames: int
) -> UInt8[np.ndarray, "{num_frames} h w 3"]:
    """Returns the first frames of a turn's clip.

    Raises:
        UserError: The clip is damaged, or has another size than the dataset declares.
    """
    name = f"{turn['film']}, game {turn['game']}, turn {turn['turn']}: clip"
    frames = decode_mp4(turn["clip"], name=name, num_frames=num_frames)
    # H.264 with halved chroma has even sides: an odd side was padded by a row or column.
    frames = frames[:, : info.height, : info.width]
    if frames.shape[:3] != (num_frames, info.height, info.width):
        raise UserError(
            f"{name}: expected {num_frames} frames or more of {info.height} x {info.width}, found "
            f"{frames.shape[0]} of {frames.shape[1]} x {frames.shape[2]}: make the dataset again"
        )
    return frames


# Features


def turn_samples(
    features: FeatureDataset,
    *,
    split: str,
    tokenizer: Tokenizer,
    caption_length: int,
    config: ModelConfig,
) -> grain.MapDataset[TurnSample]:
    """Returns every turn, without history."""
    check_features(features, config)
    turns = features.turns(split).cached(CACHE_BYTES)
    latents = features.latents(split).cached(CACHE_BYTES)

    def read(number: int) -> TurnSample:
        record = turns[number]
        return TurnSample(
            moments=read_moments(latents, number, record),
            text=np.asarray(record["text_features"], np.float32),
            image=np.asarray(record["image_features"], np.float32),
            motion_value=np.asarray(record["motion_value"], np.float32),
            caption=tokenizer.padded(record["captions"][0], caption_length),
            level=np.asarray(record["motion_level"], np.int32),
        )

    return grain.MapDataset.range(len(turns)).map(read)


def read_moments(
    latents: RecordSource, number: int, turn: Record
) -> Float32[np.ndarray, "t h w mv"]:
    """Returns the moments of a turn, checked to be its own."""
    return np.asarray(record_of_turn(latents, number, turn)["moments"], np.float32)


def record_of_turn(source: RecordSource, number: int, turn: Record) -> Record:
    """Returns a record of another part or dataset, checked to be of the same turn."""
    found = source[number]
    if (found["game"], found["turn"]) != (turn["game"], turn["turn"]):
        raise UserError(
            f"{source}: record {number} is game {found['game']}, turn {found['turn']}, but its "
            f"conditions are of game {turn['game']}, turn {turn['turn']}: make the dataset again"
        )
    return found


# Whether a dataset fits a model; if not, UserError names the first field that differs


def check_clips(games: GameDataset, config: ModelConfig) -> None:
    """Checks that a model's VAE can read the clips, and its transformer their latents."""
    info, vae, dit = games.info, config.vae, config.dit
    if vae is None:
        return
    time, space = vae.temporal_compression, vae.spatial_compression
    if info.num_frames % time != 1 % time or info.height % space or info.width % space:
        raise UserError(
            f"{games.path}: clips of {info.num_frames} frames of {info.height} x {info.width}: "
            f"expected 1 + a multiple of {time} frames and sides that are multiples of {space}, "
            "as the VAE reads them: make the dataset at another size"
        )
    if dit is not None:
        found = {"num_frames": info.num_frames, "height": info.height, "width": info.width}
        expected = dict(zip(found, clip_spec(config).frames.shape, strict=False))
        _check_equal(games.path, found, expected, hint="make the game dataset at its size")


def check_features(features: FeatureDataset, config: ModelConfig) -> None:
    """Checks that features have the sizes that the networks of a model read."""
    info, e, d = features.features, config.encoder, config.dit
    found, expected = {}, {}
    if e is not None:
        found |= {"text features": info.text, "image features": info.image}
        expected |= {
            "text features": (e.num_text_tokens, e.text_size),
            "image features": (e.num_image_tokens, e.image_size),
        }
    if d is not None:
        found |= {"moments": info.moments}
        expected |= {"moments": moments_spec(config).shape}
    for name in ("t5", "clip", "vae"):
        if (network := getattr(config, name)) is not None:
            found |= _sizes(name, getattr(info, name))
            expected |= _sizes(name, network)
    hint = "make the features with this model (`animegamer data features`)"
    _check_equal(features.path, found, expected, hint=hint)


# Fields that do not change features.
_NO_SIZES = (
    "dtype", "param_dtype", "remat", "scaling_factor", "frequency_scales", "vocab_size"
)  # fmt: skip


def _sizes(name: str, network: NetworkConfig) -> dict[str, object]:
    fields = (field.name for field in dataclasses.fields(network) if field.name not in _NO_SIZES)
    return {f"{name}.{field}": getattr(network, field) for field in fields}


def check_states(turns: GameDataset | FeatureDataset, protocol: Protocol) -> None:
    """Checks that a model's protocol knows all states of a dataset."""
    found, known = turns.info.protocol.state_values, protocol.state_values
    for name, values, allowed in zip(STATE_NAMES, found, known, strict=True):
        if not set(values) <= set(allowed):
            raise UserError(
                f"{turns.path}: {name}: expected some of {allowed}, as the model's protocol has "
                f"them, found {values}: train a model with the protocol of this dataset"
            )


def _check_equal(
    path: object, found: Mapping[str, object], expected: Mapping[str, object], *, hint: str
) -> None:
    for name, value in expected.items():
        if found[name] != value:
            raise UserError(
                f"{path}: {name}: expected {value}, as in the model, found {found[name]}: {hint}"
            )
