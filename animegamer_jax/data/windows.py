"""Samples of the stages that read games, made from a turn and its history.

Windows of turns are those of play (`rollout.Window`): the newest turn last, zeros for absent turns
at the front, and a history never crosses the start of its game (paper, section 3.4: trained on 1 to
5 turns). What `samples` says of samples holds here as well.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
from jaxtyping import Float32, Int32

from animegamer_jax.configs import ModelConfig
from animegamer_jax.data.datasets import FeatureDataset, Record, RecordSource
from animegamer_jax.data.samples import (
    CACHE_BYTES,
    array_spec,
    check_features,
    check_states,
    moments_spec,
    read_moments,
    record_of_turn,
)
from animegamer_jax.protocol import STATE_NAMES, Protocol
from animegamer_jax.tokenizer import Tokenizer

Starts = Literal["game", "anywhere"]

MOST_CLASSES = 1024
"""Greatest number of captions that `common_captions` numbers."""

_CLASSES_A_TURN = 16
_COMMON = 1e-3  # of the turns


class GameSample(NamedTuple):
    """A turn and the turns before it, for the language model's stages.

    Attributes:
        captions: Token ids of `w` instructions, padded.
        caption_lengths: Numbers of ids before the padding.
        states: Motion level, social, entertainment, stamina.
        num_history: Number of turns before this one.
        text, image: Features, as in `TurnSample`.
        shown: CLIP's features of what a model shows of the turns; without tokens if not read.
        complete: Token ids of the turns' complete captions (`Windows.complete`), then -1; without
            columns if not read.
        classes: Numbers of the turns' captions in `Windows.classes`, then -1; without columns if
            not read.
    """

    captions: Int32[np.ndarray, "*b w c"]
    caption_lengths: Int32[np.ndarray, "*b w"]
    states: Int32[np.ndarray, "*b w 4"]
    num_history: Int32[np.ndarray, "*b"]
    text: Float32[np.ndarray, "*b w n d"]
    image: Float32[np.ndarray, "*b w k e"]
    shown: Float32[np.ndarray, "*b w s e"]
    complete: Int32[np.ndarray, "*b w d"]
    classes: Int32[np.ndarray, "*b w l"]


class AdaptSample(NamedTuple):
    """A turn with its history, and the latents that the decoder should predict.

    `past_moments` are those of the first frames of the last `m` turns, as many as the decoder's
    memory holds, with zeros for absent turns at the front.
    """

    game: GameSample
    moments: Float32[np.ndarray, "*b t h w mv"]
    motion_value: Float32[np.ndarray, "*b"]
    past_moments: Float32[np.ndarray, "*b m h w mv"]


def game_spec(
    config: ModelConfig,
    protocol: Protocol,
    *,
    shown: bool = False,
    complete: bool = False,
    classes: bool = False,
) -> GameSample:
    """Returns the shapes of `game_samples`, with or without what a model shows, and captions."""
    e, w = config.encoder, protocol.window
    assert e is not None
    return GameSample(
        captions=array_spec("int32", w, protocol.caption_length),
        caption_lengths=array_spec("int32", w),
        states=array_spec("int32", w, len(STATE_NAMES)),
        num_history=array_spec("int32"),
        text=array_spec("float32", w, e.num_text_tokens, e.text_size),
        image=array_spec("float32", w, e.num_image_tokens, e.image_size),
        shown=array_spec("float32", w, e.num_image_tokens if shown else 0, e.image_size),
        complete=array_spec("int32", w, protocol.caption_length if complete else 0),
        classes=array_spec("int32", w, _CLASSES_A_TURN if classes else 0),
    )


def adapt_spec(
    config: ModelConfig, protocol: Protocol, *, memory: int = 0, shown: bool = False
) -> AdaptSample:
    """Returns the shapes of `adapt_samples`, with or without what a model shows."""
    game, moments = game_spec(config, protocol, shown=shown), moments_spec(config)
    past = array_spec("float32", memory, *moments.shape[1:])
    return AdaptSample(game, moments, array_spec("float32"), past)


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
        captions: Whether captions replace the instruction: the complete one, which describes
            everything that is visible, then as many of the others as fit, drawn again in each
            epoch.
        complete: Whether such captions are read in addition to the instructions.
        classes: Numbers of the captions that are read as classes (`common_captions`), of each turn
            at most the 16 most common; None: not read.
        seed: Seed of the draws.
    """

    tokenizer: Tokenizer
    protocol: Protocol
    starts: Starts = "game"
    captions: bool = False
    complete: bool = False
    classes: Mapping[str, int] | None = None
    seed: int = 0

    def read(
        self, turns: RecordSource, number: int, rng: np.random.Generator
    ) -> tuple[int, list[Record]]:
        """Returns a turn with its history: record `number`, or with "anywhere" one of its game.

        Record `number` is kept if it has enough turns before it, so that an epoch covers all of a
        dataset; given the number of turns, all turns of a game that have enough are equally
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
            classes=_pad_front([self._class_numbers(r) for r in records], window, np.int32),
        )

    def _complete_ids(self, record: Record) -> Int32[np.ndarray, " d"]:
        if not self.complete:
            return np.zeros(0, np.int32)
        length = self.protocol.caption_length
        ids, count = self.tokenizer.caption(record["complete"], length)
        return np.where(np.arange(length) < count, ids, -1).astype(np.int32)

    def _class_numbers(self, record: Record) -> Int32[np.ndarray, " l"]:
        if self.classes is None:
            return np.zeros(0, np.int32)
        found = {self.classes[text] for text in record["captions"] if text in self.classes}
        numbers = np.full(_CLASSES_A_TURN, -1, np.int32)
        numbers[: len(found)] = sorted(found)[:_CLASSES_A_TURN]
        return numbers


def common_captions(datasets: Sequence[FeatureDataset]) -> dict[str, int]:
    """Numbers the captions that describe a thousandth of the training turns or more.

    The most common one comes first; there are at most `MOST_CLASSES`. A caption of a single turn is
    left out.
    """
    count, counts = 0, collections.Counter[str]()
    for dataset in datasets:
        turns = dataset.turns("train")
        count += len(turns)
        for number in range(len(turns)):
            counts.update(set(turns[number]["captions"]))
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    common = [text for text, times in order if times >= max(2, _COMMON * count)]
    return {text: number for number, text in enumerate(common[:MOST_CLASSES])}


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
    pictures = features.shown(split).cached(CACHE_BYTES) if shown else None

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
    memory: int = 0,
    shown: bool = False,
) -> grain.MapDataset[AdaptSample]:
    """Returns `game_samples` with the latents and the motion value of each turn.

    `memory` is the number of past clips whose first frames are read, too.
    """
    turns = _checked_turns(features, split, windows, config)
    latents = features.latents(split).cached(CACHE_BYTES)
    pictures = features.shown(split).cached(CACHE_BYTES) if shown else None

    def read(number: int, rng: np.random.Generator) -> AdaptSample:
        last, records = windows.read(turns, number, rng)
        value = np.asarray(records[-1]["motion_value"], np.float32)
        game = windows.sample(records, _shown(pictures, last, records))
        moments = read_moments(latents, last, records[-1])
        past = np.zeros((memory, *moments.shape[1:]), np.float32)
        for back in range(1, min(memory, len(records) - 1) + 1):
            past[-back] = read_moments(latents, last - back, records[-1 - back])[0]
        return AdaptSample(game, moments, value, past)

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
        (record_of_turn(pictures, place, record) if place < len(pictures) else record)[
            "image_features"
        ]
        for place, record in zip(places, records, strict=True)
    ]


def _checked_turns(
    features: FeatureDataset, split: str, windows: Windows, config: ModelConfig
) -> RecordSource:
    check_features(features, config)
    check_states(features, windows.protocol)
    return features.turns(split).cached(CACHE_BYTES)
