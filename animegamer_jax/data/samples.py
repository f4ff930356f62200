"""Samples of each training stage, made from the records of a turn, or of a turn and its history.

A sample is a named tuple of numpy arrays of fixed shapes, without a batch axis. Windows of turns
are those of play (`rollout.Window`): the newest turn last, zeros for absent turns at the front, and
a history never crosses the start of its game (paper, section 3.4: trained on 1 to 5 turns).

Each function `*_samples` reads a split of a data set. `config` is the configuration of the model
that will read the samples, `tokenizer` that of its bundle, `seed` seeds the draws. The functions
raise `UserError` if there is no such split, or if the model cannot read the clips, features or
states.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
Starts = Literal["game", "anywhere"]

_REMEMBERED = 1 << 29
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

    moments: Float32[np.ndarray, "*b t y x m"]
    text: Float32[np.ndarray, "*b n d"]
    image: Float32[np.ndarray, "*b k e"]
    motion_value: Float32[np.ndarray, "*b"]
    caption: Int32[np.ndarray, "*b c"]
    level: Int32[np.ndarray, "*b"]


class GameSample(NamedTuple):
    """A turn and the turns before it, for the language model's stages.

    Attributes:
        captions: Token ids of `w` instructions, padded.
        caption_lengths: Numbers of ids before the padding.
        states: Motion level, social, entertainment, stamina.
        num_history: Number of turns before this one.
        text, image: Features, as in `TurnSample`.
        shown: CLIP's features of what a model shows of the turns; empty where that is not read.
        complete: Token ids of captions that say everything, then -1; empty where they are not read.
    """

    captions: Int32[np.ndarray, "*b w c"]
    caption_lengths: Int32[np.ndarray, "*b w"]
    states: Int32[np.ndarray, "*b w 4"]
    num_history: Int32[np.ndarray, "*b"]
    text: Float32[np.ndarray, "*b w n d"]
    image: Float32[np.ndarray, "*b w k e"]
    shown: Float32[np.ndarray, "*b w s e"]
    complete: Int32[np.ndarray, "*b w d"]


class AdaptSample(NamedTuple):
    """A turn with its history, and the latents that the decoder should predict."""

    game: GameSample
    moments: Float32[np.ndarray, "*b t y x m"]
    motion_value: Float32[np.ndarray, "*b"]


# Shapes of samples that networks of a configuration read


def _spec(dtype: str, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def clip_spec(config: ModelConfig) -> ClipSample:
    """Returns the shapes of `clip_samples`."""
    vae, dit = config.vae, config.dit
    assert vae is not None
    assert dit is not None
    return ClipSample(_spec("uint8", *clip_size(dit, vae), 3))


def caption_spec(config: ModelConfig) -> CaptionSample:
    """Returns the shapes of `caption_samples`."""
    assert config.clip is not None
    frame = _spec("uint8", *clip_spec(config).frames.shape[1:])
    return CaptionSample(frame, _spec("int32", config.clip.context_length))


def text_spec(length: int) -> TextSample:
    """Returns the shapes of `text_samples`."""
    return TextSample(_spec("int32", length))


def turn_spec(config: ModelConfig, *, caption_length: int) -> TurnSample:
    """Returns the shapes of `turn_samples`."""
    e = config.encoder
    assert e is not None
    return TurnSample(
        moments=_moments_spec(config),
        text=_spec("float32", e.num_text_tokens, e.text_size),
        image=_spec("float32", e.num_image_tokens, e.image_size),
        motion_value=_spec("float32"),
        caption=_spec("int32", caption_length),
        level=_spec("int32"),
    )


def _moments_spec(config: ModelConfig) -> Any:
    d = config.dit
    assert d is not None
    size = (d.latent_frames, d.latent_height, d.latent_width)
    return _spec("float32", *size, 2 * d.latent_channels)


def game_spec(
    config: ModelConfig, protocol: Protocol, *, shown: bool = False, complete: bool = False
) -> GameSample:
    """Returns the shapes of `game_samples`, with or without what a model shows, and captions."""
    e, w = config.encoder, protocol.window
    assert e is not None
    return GameSample(
        captions=_spec("int32", w, protocol.caption_length),
        caption_lengths=_spec("int32", w),
        states=_spec("int32", w, len(STATE_NAMES)),
        num_history=_spec("int32"),
        text=_spec("float32", w, e.num_text_tokens, e.text_size),
        image=_spec("float32", w, e.num_image_tokens, e.image_size),
        shown=_spec("float32", w, e.num_image_tokens if shown else 0, e.image_size),
        complete=_spec("int32", w, protocol.caption_length if complete else 0),
    )


def adapt_spec(config: ModelConfig, protocol: Protocol, *, shown: bool = False) -> AdaptSample:
    """Returns the shapes of `adapt_samples`, with or without what a model shows."""
    game = game_spec(config, protocol, shown=shown)
    return AdaptSample(game, _moments_spec(config), _spec("float32"))


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
        UserError: The clip is damaged, or has another size than the data set declares.
    """
    name = f"{turn['film']}, game {turn['game']}, turn {turn['turn']}: clip"
    frames = decode_mp4(turn["clip"], name=name, num_frames=num_frames)
    # H.264 with halved chroma has even sides: an odd side was padded by a row or column.
    frames = frames[:, : info.height, : info.width]
    if frames.shape[:3] != (num_frames, info.height, info.width):
        raise UserError(
            f"{name}: expected {num_frames} frames or more of {info.height} x {info.width}, found "
            f"{frames.shape[0]} of {frames.shape[1]} x {frames.shape[2]}: make the data set again"
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
    turns = features.turns(split).remembering(_REMEMBERED)
    latents = features.latents(split).remembering(_REMEMBERED)

    def read(number: int) -> TurnSample:
        record = turns[number]
        return TurnSample(
            moments=_moments(latents, number, record),
            text=np.asarray(record["text_features"], np.float32),
            image=np.asarray(record["image_features"], np.float32),
            motion_value=np.asarray(record["motion_value"], np.float32),
            caption=tokenizer.padded(record["captions"][0], caption_length),
            level=np.asarray(record["motion_level"], np.int32),
        )

    return grain.MapDataset.range(len(turns)).map(read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """The turns of a sample, and the tokens of their instructions.

    Attributes:
        tokenizer: Tokenizer of the bundle.
        protocol: Protocol with the number of turns (window) and the length of instructions.
        starts: Start of the history. "game": at the start of the game, or as far back as the
            window reaches, as in play. "anywhere": the number of turns, including this one, is
            drawn uniformly from 1 to what window and game hold, again in each epoch; then a turn
            of the game with enough turns before it.
        captions: Whether captions take the place of the instruction: the complete one, then as many
            others as fit, drawn again in each epoch.
        complete: Whether such captions are read besides the instructions.
        seed: Seed of the draws.
    """

    tokenizer: Tokenizer
    protocol: Protocol
    starts: Starts = "game"
    captions: bool = False
    complete: bool = False
    seed: int = 0

    def read(
        self, turns: RecordSource, number: int, rng: np.random.Generator
    ) -> tuple[int, list[Record]]:
        """Returns a turn with its history: record `number`, or with "anywhere" one of its game.

        Record `number` is kept if it has enough turns before it, so that an epoch covers all of a
        data set; given the number of turns, all turns of a game that have enough are equally
        likely.

        Returns:
            The index of the turn's record, and the records in the order of play.
        """
        record = turns[number]
        turn, num_turns = int(record["turn"]), int(record["num_turns"])
        last, count = number, min(self.protocol.window, turn + 1)
        if self.starts == "anywhere":
            count = int(rng.integers(1, min(self.protocol.window, num_turns) + 1))
            if count > turn + 1:
                last += int(rng.integers(count - 1, num_turns)) - turn
        indices = range(last - count + 1, last + 1)
        records = [record if index == number else turns[index] for index in indices]
        if self.captions:
            records = [one | {"instruction": self._complete(one, rng)} for one in records]
        if self.complete:
            records = [one | {"complete": self._complete(one, rng)} for one in records]
        return last, records

    def _complete(self, record: Record, rng: np.random.Generator) -> str:
        """Returns a turn's complete caption, and as many of the others as fit."""
        text, *others = record["captions"]
        for caption in rng.permutation(others).tolist():
            longer = f"{text}, {caption}"
            if len(self.tokenizer.encode(longer)) <= self.protocol.caption_length:
                text = longer
        return text

    def sample(
        self, records: Sequence[Record], shown: Sequence[np.ndarray] | None = None
    ) -> GameSample:
        """Returns turns in the order of play, at most a window of them, as arrays.

        Args:
            records: The turns' records.
            shown: CLIP's features of what a model shows of them [k, e]; None: not read.
        """
        window, length = self.protocol.window, self.protocol.caption_length
        texts = (record["instruction"] for record in records)
        captions, lengths = zip(*(self.tokenizer.caption(t, length) for t in texts), strict=True)
        states = [np.array([record[name] for name in STATE_NAMES]) for record in records]
        images = [record["image_features"] for record in records]
        return GameSample(
            captions=_pad_front(captions, window, np.int32),
            caption_lengths=_pad_front(lengths, window, np.int32),
            states=_pad_front(states, window, np.int32),
            num_history=np.asarray(len(records) - 1, np.int32),
            text=_pad_front([r["text_features"] for r in records], window, np.float32),
            image=_pad_front(images, window, np.float32),
            shown=_pad_front(shown or [image[:0] for image in images], window, np.float32),
            complete=_pad_front([self._complete_ids(r) for r in records], window, np.int32),
        )

    def _complete_ids(self, record: Record) -> Int32[np.ndarray, " d"]:
        if not self.complete:
            return np.zeros(0, np.int32)
        length = self.protocol.caption_length
        ids, count = self.tokenizer.caption(record["complete"], length)
        return np.where(np.arange(length) < count, ids, -1).astype(np.int32)


def _pad_front(rows: Sequence[Any], window: int, dtype: type) -> np.ndarray:
    """Returns an array of `window` rows: zeros, then the given rows."""
    newest = np.stack(rows)
    padded = np.zeros((window, *newest.shape[1:]), dtype)
    padded[window - len(rows) :] = newest
    return padded


def game_samples(
    features: FeatureDataset,
    *,
    split: str,
    windows: Windows,
    config: ModelConfig,
    numbers: Sequence[int] | None = None,
    shown: bool = False,
) -> grain.MapDataset[GameSample]:
    """Returns turns with their history.

    Args:
        features: The features.
        split: Split to read.
        windows: The turns of a sample.
        config: Configuration of the model that will read the samples.
        numbers: Records whose turns end a sample; None: all.
        shown: Whether to read what a model shows of the turns (`animegamer data shown`).
    """
    turns = _checked_turns(features, split, windows, config)
    pictures = features.shown(split).remembering(_REMEMBERED) if shown else None

    def read(number: int, rng: np.random.Generator) -> GameSample:
        last, records = windows.read(turns, number, rng)
        return windows.sample(records, _shown(pictures, last, records))

    source = (
        grain.MapDataset.range(len(turns)) if numbers is None else grain.MapDataset.source(numbers)
    )
    return source.random_map(read, seed=windows.seed)


def adapt_samples(
    features: FeatureDataset,
    *,
    split: str,
    windows: Windows,
    config: ModelConfig,
    shown: bool = False,
) -> grain.MapDataset[AdaptSample]:
    """Returns `game_samples` with the latents and the motion value of each turn."""
    turns = _checked_turns(features, split, windows, config)
    latents = features.latents(split).remembering(_REMEMBERED)
    pictures = features.shown(split).remembering(_REMEMBERED) if shown else None

    def read(number: int, rng: np.random.Generator) -> AdaptSample:
        last, records = windows.read(turns, number, rng)
        value = np.asarray(records[-1]["motion_value"], np.float32)
        game = windows.sample(records, _shown(pictures, last, records))
        return AdaptSample(game, _moments(latents, last, records[-1]), value)

    return grain.MapDataset.range(len(turns)).random_map(read, seed=windows.seed)


def _shown(
    pictures: RecordSource | None, last: int, records: Sequence[Record]
) -> list[np.ndarray] | None:
    """Returns CLIP's features of what a model shows of consecutive turns, of which `last` ends.

    They are the true ones for turns of which nothing was made.
    """
    if pictures is None:
        return None
    places = range(last - len(records) + 1, last + 1)
    return [
        (_of_turn(pictures, place, record) if place < len(pictures) else record)["image_features"]
        for place, record in zip(places, records, strict=True)
    ]


def _checked_turns(
    features: FeatureDataset, split: str, windows: Windows, config: ModelConfig
) -> RecordSource:
    check_features(features, config)
    check_states(features, windows.protocol)
    return features.turns(split).remembering(_REMEMBERED)


def _moments(latents: RecordSource, number: int, turn: Record) -> Float32[np.ndarray, "t y x m"]:
    return np.asarray(_of_turn(latents, number, turn)["moments"], np.float32)


def _of_turn(source: RecordSource, number: int, turn: Record) -> Record:
    """Returns a record of another part or dataset, checked to be of the same turn."""
    found = source[number]
    if (found["game"], found["turn"]) != (turn["game"], turn["turn"]):
        raise UserError(
            f"{source}: record {number} is game {found['game']}, turn {found['turn']}, but its "
            f"conditions are of game {turn['game']}, turn {turn['turn']}: make the data set again"
        )
    return found


# Whether a data set fits a model; if not, UserError names the first field that differs


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
            "as the VAE reads them: make the data set at another size"
        )
    if dit is not None:
        found = {"num_frames": info.num_frames, "height": info.height, "width": info.width}
        expected = dict(zip(found, clip_spec(config).frames.shape, strict=False))
        _check_equal(games.path, found, expected, hint="make the game data set at its size")


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
        expected |= {"moments": _moments_spec(config).shape}
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
    """Checks that a model's protocol knows all states of a data set."""
    found, known = turns.info.protocol.state_values, protocol.state_values
    for name, values, allowed in zip(STATE_NAMES, found, known, strict=True):
        if not set(values) <= set(allowed):
            raise UserError(
                f"{turns.path}: {name}: expected some of {allowed}, as the model's protocol has "
                f"them, found {values}: train a model with the protocol of this data set"
            )


def _check_equal(
    path: object, found: Mapping[str, object], expected: Mapping[str, object], *, hint: str
) -> None:
    for name, value in expected.items():
        if found[name] != value:
            raise UserError(
                f"{path}: {name}: expected {value}, as in the model, found {found[name]}: {hint}"
            )
