"""Records to samples: what each training stage reads of a turn, or of a turn and its history.

A sample is a named tuple of numpy arrays of fixed shapes, without a batch axis. The windows of
turns are those of play (`rollout.Window`): the newest turn last, absent turns zeros at the front,
and a history never crosses the start of its game (PAPER section 3.4: trained on 1 to 5 turns).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
from jaxtyping import Float32, Int32, UInt8

from animegamer_jax.configs import ModelConfig, NetworkConfig
from animegamer_jax.data.datasets import FeaturesSet, GamesSet, Record, RecordSource, SetInfo
from animegamer_jax.errors import UserError
from animegamer_jax.media.video import decode_mp4
from animegamer_jax.protocol import STATE_NAMES, Protocol
from animegamer_jax.tokenizer import Tokenizer

Frame = Literal["first", "random"]
Starts = Literal["game", "anywhere"]


class ClipSample(NamedTuple):
    """A clip, for the VAE."""

    frames: UInt8[np.ndarray, "*b f h w 3"]


class CaptionSample(NamedTuple):
    """A frame and the ids of what it shows, for CLIP."""

    frame: UInt8[np.ndarray, "*b h w 3"]
    tokens: Int32[np.ndarray, "*b n"]


class TextSample(NamedTuple):
    """Ids of a text, for T5."""

    tokens: Int32[np.ndarray, "*b n"]


class TurnSample(NamedTuple):
    """A turn as the decoder's stages read it.

    Attributes:
        moments: of the VAE: means, then log-variances, not scaled.
        text: T5's features of the motion text.
        image: CLIP's features of the clip's first frame.
        motion_value: mean optical flow, pixels a frame at 480 x 720.
        caption: ids of the complete caption, padded.
        level: motion level.
    """

    moments: Float32[np.ndarray, "*b t y x m"]
    text: Float32[np.ndarray, "*b n d"]
    image: Float32[np.ndarray, "*b k e"]
    motion_value: Float32[np.ndarray, "*b"]
    caption: Int32[np.ndarray, "*b c"]
    level: Int32[np.ndarray, "*b"]


class GameSample(NamedTuple):
    """A turn and the turns before it, as the language model's stages read them.

    Attributes:
        captions: ids of `w` instructions, padded.
        caption_lengths: how many of the ids count.
        states: motion level, social, entertainment, stamina.
        num_history: number of turns before this one that are there.
        text, image: features, as in `TurnSample`.
    """

    captions: Int32[np.ndarray, "*b w c"]
    caption_lengths: Int32[np.ndarray, "*b w"]
    states: Int32[np.ndarray, "*b w 4"]
    num_history: Int32[np.ndarray, "*b"]
    text: Float32[np.ndarray, "*b w n d"]
    image: Float32[np.ndarray, "*b w k e"]


class AdaptSample(NamedTuple):
    """A turn with its history, and the latents that the decoder is to make of it."""

    game: GameSample
    moments: Float32[np.ndarray, "*b t y x m"]
    motion_value: Float32[np.ndarray, "*b"]


# Games


def clip_samples(
    games: GamesSet, *, split: str, config: ModelConfig | None = None
) -> grain.MapDataset[ClipSample]:
    """Every clip, whole.

    Args:
        games: the set.
        split: of the set.
        config: if given, the clips must be those that its VAE and transformer read.

    Raises:
        UserError: no such split, or clips of another size.
    """
    if config is not None:
        check_clips(games, config)
    info = games.info
    return grain.MapDataset.source(games.turns(split)).map(
        lambda record: ClipSample(read_frames(record, info, num_frames=info.num_frames))
    )


def caption_samples(
    games: GamesSet,
    *,
    split: str,
    tokenizer: Tokenizer,
    length: int,
    frame: Frame = "random",
    seed: int = 0,
) -> grain.MapDataset[CaptionSample]:
    """A frame of each clip with one of its captions, drawn anew each epoch.

    Args:
        games: the set.
        split: of the set.
        tokenizer: of the bundle.
        length: of CLIP's context.
        frame: which one.
        seed: of the draws.

    Raises:
        UserError: no such split.
    """

    def draw(record: Record, rng: np.random.Generator) -> CaptionSample:
        number = int(rng.integers(games.info.num_frames)) if frame == "random" else 0
        shown = read_frames(record, games.info, num_frames=number + 1)[-1]
        caption = str(rng.choice(record["captions"]))
        return CaptionSample(shown, tokenizer.padded_with_end(caption, length))

    return grain.MapDataset.source(games.turns(split)).random_map(draw, seed=seed)


def text_samples(
    turns: GamesSet | FeaturesSet, *, split: str, tokenizer: Tokenizer, length: int, seed: int = 0
) -> grain.MapDataset[TextSample]:
    """One text of each turn, drawn anew each epoch: its motion, a caption or its instruction.

    Raises:
        UserError: no such split.
    """

    def draw(record: Record, rng: np.random.Generator) -> TextSample:
        caption = str(rng.choice(record["captions"]))
        texts = (record["motion_text"], caption, record["instruction"])
        return TextSample(tokenizer.padded(texts[rng.integers(len(texts))], length))

    return grain.MapDataset.source(turns.turns(split)).random_map(draw, seed=seed)


def read_frames(
    turn: Record, info: SetInfo, *, num_frames: int
) -> UInt8[np.ndarray, "{num_frames} h w 3"]:
    """The first frames of a turn's clip.

    Raises:
        UserError: the clip cannot be read, or is not as the set says.
    """
    name = f"{turn['film']}, game {turn['game']}, turn {turn['turn']}: clip"
    frames = decode_mp4(turn["clip"], name=name, num_frames=num_frames)
    # H.264 with halved colours has even sides: an odd one was padded by a row or column.
    frames = frames[:, : info.height, : info.width]
    if frames.shape[:3] != (num_frames, info.height, info.width):
        raise UserError(
            f"{name}: expected {num_frames} frames or more of {info.height} x {info.width}, found "
            f"{frames.shape[0]} of {frames.shape[1]} x {frames.shape[2]}: make the set again"
        )
    return frames


# Features


def turn_samples(
    features: FeaturesSet,
    *,
    split: str,
    tokenizer: Tokenizer,
    caption_length: int,
    config: ModelConfig,
) -> grain.MapDataset[TurnSample]:
    """Every turn by itself.

    Args:
        features: the set.
        split: of the set.
        tokenizer: of the bundle.
        caption_length: of the complete caption's ids.
        config: of the model that reads the features.

    Raises:
        UserError: no such split, or features of another size.
    """
    check_features(features, config)
    turns, latents = features.turns(split), features.latents(split)

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
    """Which turns a sample holds, and how their instructions are read.

    Attributes:
        tokenizer: of the bundle.
        protocol: its window is the number of turns, its caption length that of the instructions.
        starts: "game": all turns before this one in its game, as many as the window holds, as in
            play; "anywhere": a number of turns, this one included, drawn uniformly from 1 to what
            window and game hold, and a turn of the game that has so many, anew each epoch.
        seed: of the draws.
    """

    tokenizer: Tokenizer
    protocol: Protocol
    starts: Starts = "game"
    seed: int = 0

    def read(
        self, turns: RecordSource, number: int, rng: np.random.Generator
    ) -> tuple[int, list[Record]]:
        """A turn with its history: record `number`, or with "anywhere" one of the same game.

        Record `number` stays where it has turns enough before it, so that an epoch goes through
        all of a set; given their number, all turns of a game that have so many are equally likely.

        Returns:
            the number of the turn's record, and the records in the order of play.
        """
        record = turns[number]
        turn, num_turns = int(record["turn"]), int(record["num_turns"])
        last, count = number, min(self.protocol.window, turn + 1)
        if self.starts == "anywhere":
            count = int(rng.integers(1, min(self.protocol.window, num_turns) + 1))
            if count > turn + 1:
                last += int(rng.integers(count - 1, num_turns)) - turn
        places = range(last - count + 1, last + 1)
        return last, [record if place == number else turns[place] for place in places]

    def sample(self, records: Sequence[Record]) -> GameSample:
        """Turns in the order of play, at most a window of them, as arrays."""
        window, length = self.protocol.window, self.protocol.caption_length
        texts = (record["instruction"] for record in records)
        captions, lengths = zip(*(self.tokenizer.caption(t, length) for t in texts), strict=True)
        states = [np.array([record[name] for name in STATE_NAMES]) for record in records]
        return GameSample(
            captions=_at_the_end(captions, window, np.int32),
            caption_lengths=_at_the_end(lengths, window, np.int32),
            states=_at_the_end(states, window, np.int32),
            num_history=np.asarray(len(records) - 1, np.int32),
            text=_at_the_end([r["text_features"] for r in records], window, np.float32),
            image=_at_the_end([r["image_features"] for r in records], window, np.float32),
        )


def _at_the_end(rows: Sequence[Any], window: int, dtype: type) -> np.ndarray:
    """Rows at the end of `window` places, and zeros before them."""
    newest = np.stack(rows)
    placed = np.zeros((window, *newest.shape[1:]), dtype)
    placed[window - len(rows) :] = newest
    return placed


def game_samples(
    features: FeaturesSet, *, split: str, windows: Windows, config: ModelConfig
) -> grain.MapDataset[GameSample]:
    """As many samples as there are turns, each with turns before it.

    Args:
        features: the set.
        split: of the set.
        windows: which turns, and how they are read.
        config: of the model that reads the features.

    Raises:
        UserError: no such split, features of another size, or states that the protocol lacks.
    """
    check_features(features, config)
    check_states(features, windows.protocol)
    turns = features.turns(split)

    def read(number: int, rng: np.random.Generator) -> GameSample:
        _, records = windows.read(turns, number, rng)
        return windows.sample(records)

    return grain.MapDataset.range(len(turns)).random_map(read, seed=windows.seed)


def adapt_samples(
    features: FeaturesSet, *, split: str, windows: Windows, config: ModelConfig
) -> grain.MapDataset[AdaptSample]:
    """As `game_samples`, with the latents and the motion value of this turn."""
    check_features(features, config)
    check_states(features, windows.protocol)
    turns, latents = features.turns(split), features.latents(split)

    def read(number: int, rng: np.random.Generator) -> AdaptSample:
        last, records = windows.read(turns, number, rng)
        value = np.asarray(records[-1]["motion_value"], np.float32)
        return AdaptSample(windows.sample(records), _moments(latents, last, records[-1]), value)

    return grain.MapDataset.range(len(turns)).random_map(read, seed=windows.seed)


def _moments(latents: RecordSource, number: int, turn: Record) -> Float32[np.ndarray, "t y x m"]:
    found = latents[number]
    if (found["game"], found["turn"]) != (turn["game"], turn["turn"]):
        raise UserError(
            f"{latents}: record {number} is game {found['game']}, turn {found['turn']}, but its "
            f"conditions are of game {turn['game']}, turn {turn['turn']}: make the set again"
        )
    return np.asarray(found["moments"], np.float32)


# Does a set fit a model?


def check_clips(games: GamesSet, config: ModelConfig) -> None:
    """Whether a model's VAE can read the clips, and its transformer their latents.

    Raises:
        UserError: names the first field that differs.
    """
    info, vae, dit = games.info, config.vae, config.dit
    if vae is None:
        return
    time, space = vae.temporal_compression, vae.spatial_compression
    if info.num_frames % time != 1 % time or info.height % space or info.width % space:
        raise UserError(
            f"{games.path}: clips of {info.num_frames} frames of {info.height} x {info.width}: "
            f"expected 1 + a multiple of {time} frames and sides that are multiples of {space}, "
            "as the VAE reads them: make the set at another size"
        )
    if dit is not None:
        there = {"num_frames": info.num_frames, "height": info.height, "width": info.width}
        expected = {
            "num_frames": 1 + (dit.latent_frames - 1) * time,
            "height": dit.latent_height * space,
            "width": dit.latent_width * space,
        }
        _same(games.path, there, expected, mend="make the games set at the model's size")


def check_features(features: FeaturesSet, config: ModelConfig) -> None:
    """Whether features have the sizes that a model's networks read, of those that it has.

    Raises:
        UserError: names the first field that differs.
    """
    has, e, d = features.features, config.encoder, config.dit
    there, expected = {}, {}
    if e is not None:
        there |= {"text features": has.text, "image features": has.image}
        expected |= {
            "text features": (e.num_text_tokens, e.text_size),
            "image features": (e.num_image_tokens, e.image_size),
        }
    if d is not None:
        shape = (d.latent_frames, d.latent_height, d.latent_width, 2 * d.latent_channels)
        there |= {"moments": has.moments}
        expected |= {"moments": shape}
    for name in ("t5", "clip", "vae"):
        if (network := getattr(config, name)) is not None:
            there |= _sizes(name, getattr(has, name))
            expected |= _sizes(name, network)
    mend = "make the features with this model (`animegamer data features`)"
    _same(features.path, there, expected, mend=mend)


# What does not change the shapes of features.
_NO_SIZES = (
    "dtype", "param_dtype", "remat", "scaling_factor", "frequency_scales", "vocab_size"
)  # fmt: skip


def _sizes(name: str, network: NetworkConfig) -> dict[str, object]:
    fields = (field.name for field in dataclasses.fields(network) if field.name not in _NO_SIZES)
    return {f"{name}.{field}": getattr(network, field) for field in fields}


def check_states(turns: GamesSet | FeaturesSet, protocol: Protocol) -> None:
    """Whether a set's states are among those that a model's protocol knows.

    Raises:
        UserError: names the first state with others.
    """
    found, known = turns.info.protocol.state_values, protocol.state_values
    for name, values, allowed in zip(STATE_NAMES, found, known, strict=True):
        if not set(values) <= set(allowed):
            raise UserError(
                f"{turns.path}: {name}: expected some of {allowed}, as the model's protocol has "
                f"them, found {values}: train a model with the protocol of this set"
            )


def _same(
    path: object, there: Mapping[str, object], expected: Mapping[str, object], *, mend: str
) -> None:
    for name, value in expected.items():
        if there[name] != value:
            raise UserError(
                f"{path}: {name}: expected {value}, as in the model, found {there[name]}: {mend}"
            )
