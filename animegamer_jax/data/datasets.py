"""Datasets on disk: game datasets hold turns with their clips, feature datasets their features.

A dataset is a folder, local or in a bucket, with its description in `set.json` and ordinary TFDS
datasets of ArrayRecord files, which other programs can read as well:

    game dataset      set.json  games/VERSION/...  (the toy world's also: tokenizer/  words.json)
    feature dataset   set.json  conditions/VERSION/...  latents/VERSION/...
                      shown/ (optional): a dataset of what a model shows of the same turns

A record is a turn. The turns of a game follow one another: record i with `turn` t belongs to the
game that starts at record i - t. A feature dataset has the records of the game dataset from which
it was made, in the same order.

`open_games` and `open_features` raise `UserError` if there is none, or one of another kind or
another version.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from animegamer_jax.configs import CLIPConfig, T5Config, VAEConfig
from animegamer_jax.data.record_files import ShardedRecords
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.protocol import Protocol
from animegamer_jax.storage.paths import absolute, user_errors
from animegamer_jax.storage.serialization import read_json
from animegamer_jax.storage.untrusted import check_file

VERSION = "1.0.0"  # of the records, for TFDS; the first number is `DatasetInfo.layout`
INFO_FILE = "set.json"
UNFINISHED_FILE = "unfinished.json"  # until the dataset is complete (`shards`)

Kind = Literal["games", "features", "shown"]
Part = Literal["games", "conditions", "latents", "shown"]
Record = dict[str, Any]

PARTS: Mapping[Kind, tuple[Part, ...]] = {
    "games": ("games",),
    "features": ("conditions", "latents"),
    "shown": ("shown",),
}
SHOWN = "shown"
"""Folder of the dataset of what a model shows, in that of the features."""
_AGAIN = "make the dataset again with this version"
_MADE_BY = {
    "games": "animegamer data toyworld` or `animegamer data games",
    "features": "animegamer data features",
    "shown": "animegamer data shown",
}

# The fields of a turn besides its clip. `motion_value` is in pixels per frame at 480 x 720; the
# first of the `captions` is complete, the others omit parts.
TEXTS = ("film", "instruction", "motion_text", "character", "motion", "place", "time")
NUMBERS = {
    "game": np.int64,
    "turn": np.int32,
    "num_turns": np.int32,
    "is_open": np.int32,
    "motion_level": np.int32,
    "motion_value": np.float32,
    "social": np.int32,
    "entertainment": np.int32,
    "stamina": np.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureInfo:
    """Origin of a feature dataset, and the shape of each array in a record.

    Attributes:
        bundle: Name of the bundle whose networks computed the features.
        games: Path of the game dataset.
        frame: Frame of the clip from which CLIP's features were computed.
        text: Tokens and width of T5's features of the motion text.
        image: Tokens and width of CLIP's features.
        moments: Frames, height, width and channels of the VAE's means and log-variances.
        t5, clip, vae: Configurations of the networks.
    """

    bundle: str
    games: str
    frame: Literal["first", "random"]
    text: tuple[int, int]
    image: tuple[int, int]
    moments: tuple[int, int, int, int]
    t5: T5Config
    clip: CLIPConfig
    vae: VAEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The content of `set.json`.

    Attributes:
        layout: Version of the format.
        kind: Kind of the records.
        made_by: Command that made the dataset.
        seed: Random seed of the dataset; None: nothing in it is random.
        num_frames, height, width, fps: Size of every clip.
        protocol: Game protocol, with the possible states and the motion value of each level.
        motion_edges: Motion values between two motion levels.
        splits: Number of records by split.
        features: Origin and shapes of the features; None for a game dataset.
        decoder: Digest of the transformer that showed the turns of `shown`; None for other kinds.
    """

    layout: Literal[1] = 1
    kind: Kind
    made_by: str
    seed: int | None
    num_frames: int
    height: int
    width: int
    fps: int
    protocol: Protocol
    motion_edges: tuple[float, ...]
    splits: dict[str, int]
    features: FeatureInfo | None = None
    decoder: str | None = dataclasses.field(default=None, metadata={"omit_default": True})


def record_spec(part: Part, info: DatasetInfo) -> tfds.features.FeaturesDict:
    """Returns TFDS's description of the records of a part."""
    f = tfds.features
    place = {name: f.Scalar(NUMBERS[name]) for name in ("game", "turn", "num_turns")}
    if part == "latents":
        return f.FeaturesDict({**place, "moments": _array(_of(info).moments)})
    if part == "shown":
        return f.FeaturesDict({**place, "image_features": _array(_of(info).image)})
    turn = {
        **{name: f.Text() for name in TEXTS},
        **{name: f.Scalar(kind) for name, kind in NUMBERS.items()},
        "captions": f.Sequence(f.Text()),
    }
    if part == "games":
        return f.FeaturesDict({**turn, "clip": f.Scalar(np.object_)})
    features = _of(info)
    return f.FeaturesDict(
        {**turn, "text_features": _array(features.text), "image_features": _array(features.image)}
    )


def _of(info: DatasetInfo) -> FeatureInfo:
    if info.features is None:
        raise ValueError("a feature dataset needs its FeatureInfo")
    return info.features


def _array(shape: tuple[int, ...]) -> tfds.features.Tensor:
    """Declares a tensor in bytes: half of TFDS's lists of numbers, written ten times faster."""
    return tfds.features.Tensor(shape=shape, dtype=np.float16, encoding="bytes")


# Reading


class RecordSource:
    """The records of one split of one part by number: a random-access source for Grain."""

    def __init__(
        self,
        source: ShardedRecords,
        decode: Callable[[bytes], Record],
        *,
        name: str,
        fields: Collection[str],
    ):
        self._source, self._decode, self._name = source, decode, name
        self._fields = frozenset(fields)
        self._cache: dict[int, Record] = {}
        self._cache_bytes = 0

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:  # for Grain's own messages
        return f"RecordSource({self._name})"

    def cached(self, num_bytes: int) -> "RecordSource":
        """Returns a source of the same records that caches those read first.

        Decoding a record takes longer than all else that the loader does with it. Records that are
        read again share their arrays, which must not be written.

        Args:
            num_bytes: Size of the cached arrays, without Python's own overhead.
        """
        source = copy.copy(self)
        source._cache, source._cache_bytes = {}, num_bytes
        return source

    def __getitem__(self, index: int) -> Record:
        """Returns a record with its texts decoded.

        Raises:
            IndexError: There is no record of this number, which is how `for` finds the end.
            UserError: The file is damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index}: expected a number from 0 to {len(self) - 1}")
        index = int(index)
        record = self._cache.get(index)
        if record is None:
            record = self._read(index)
            size = sum(value.nbytes for value in record.values() if isinstance(value, np.ndarray))
            if self._cache_bytes >= size > 0:
                self._cache_bytes -= size
                self._cache[index] = record
        return dict(record)

    def _read(self, index: int) -> Record:
        try:
            record = self._decode(self._source[index])
        except Exception as error:  # ArrayRecord and protobuf raise types of their own
            raise _damaged(self._name, error) from error
        if lacking := sorted(self._fields - record.keys()):
            raise _damaged(self._name, ValueError(f"no field {', '.join(lacking)}"))
        for name in TEXTS:
            if name in record:
                record[name] = record[name].decode()
        if "captions" in record:
            record["captions"] = [caption.decode() for caption in record["captions"]]
        return record


def _damaged(name: str, error: Exception) -> UserError:
    return UserError(
        f"{name}: cannot be read: {first_line(error)}: copy the dataset again, or make it again"
    )


@dataclasses.dataclass(frozen=True)
class OpenDataset:
    """A dataset whose description was read."""

    path: epath.Path
    info: DatasetInfo

    def records(self, split: str, *, part: Part) -> RecordSource:
        """Opens the records of a split.

        Raises:
            UserError: The split is missing or empty, or the files differ from the description.
        """
        folder = self.path / part / VERSION
        if not self.info.splits.get(split):
            splits = list(self.info.splits.items())[:8]
            there = ", ".join(f"{name[:40]} ({n})" for name, n in splits) or "none"
            raise UserError(
                f"{self.path}: no records in the split {split[:40]!r}: expected one of: {there}"
            )
        name = f"{folder} ({split[:40]})"
        try:
            for file in ("dataset_info.json", "features.json", "metadata.json"):  # TFDS reads them
                check_file(folder / file)
            open_builder: Any = tfds.builder_from_directory
            described = open_builder(folder).info
            shards = described.splits[split]
            for file in shards.filepaths:
                check_file(file, expected="records")
            lengths = zip(map(os.fspath, shards.filepaths), shards.shard_lengths, strict=True)
            source = ShardedRecords(list(lengths))
            found = len(source)
            decode = described.features.deserialize_example_np
        except UserError:
            raise
        except Exception as error:  # TFDS raises all kinds for an incomplete folder
            raise _damaged(name, error) from error
        if found != self.info.splits[split]:
            raise UserError(
                f"{name}: expected {self.info.splits[split]} records, found {found}: copy the "
                "dataset again, or make it again"
            )
        fields = record_spec(part, self.info).keys()
        return RecordSource(source, decode, name=name, fields=fields)


class GameDataset(OpenDataset):
    """Turns with their clips."""

    def turns(self, split: str) -> RecordSource:
        """Opens text, numbers and `clip` (MP4 bytes) of each turn."""
        return self.records(split, part="games")


class FeatureDataset(OpenDataset):
    """Turns with the features of their texts and clips."""

    @property
    def features(self) -> FeatureInfo:
        return _of(self.info)

    def turns(self, split: str) -> RecordSource:
        """Opens text, numbers, `text_features` and `image_features` (float16) of each turn."""
        return self.records(split, part="conditions")

    def latents(self, split: str) -> RecordSource:
        """Opens the VAE's `moments` (float16, not scaled) of each turn."""
        return self.records(split, part="latents")

    def shown(self, split: str) -> RecordSource:
        """Opens `image_features` of the first frame of a model's own clips, one a turn.

        They may end before the split does.

        Raises:
            UserError: There are none (`animegamer data shown` makes them), or of other turns or
                features.
        """
        path, info = _open(self.path / SHOWN, "shown")
        if info.features != self.info.features:
            raise UserError(
                f"{path}: made of other features than {self.path} holds: remove it and make it "
                "again"
            )
        found = OpenDataset(path, info).records(split, part="shown")
        if len(found) > self.info.splits[split]:
            raise UserError(
                f"{path}: the split {split!r}: expected at most {self.info.splits[split]} turns, "
                f"as the features have, found {len(found)}: remove it and make it again"
            )
        return found


def read_info(path: epath.PathLike) -> DatasetInfo:
    """Reads the description of a dataset.

    Raises:
        UserError: There is no dataset, it is not finished, or its description has another form.
    """
    path = absolute(path)
    file = path / INFO_FILE
    with user_errors(file, "cannot be read", hint=_AGAIN):
        if not file.exists() and (path / UNFINISHED_FILE).exists():
            raise UserError(f"{path}: not finished: run the command that began it again")
        if not file.exists():
            raise UserError(
                f"{path}: not a dataset: expected a folder with {INFO_FILE}, which `animegamer "
                "data` writes"
            )
    return read_json(file, DatasetInfo, hint=_AGAIN)


def _open(path: epath.PathLike, kind: Kind) -> tuple[epath.Path, DatasetInfo]:
    info = read_info(path)
    if info.kind != kind:
        raise UserError(
            f"{os.fspath(path)}: expected a dataset of {kind}, found one of {info.kind}: give one "
            f"that `{_MADE_BY[kind]}` made"
        )
    return absolute(path), info


def open_games(path: epath.PathLike) -> GameDataset:
    """Opens a game dataset."""
    return GameDataset(*_open(path, "games"))


def open_features(path: epath.PathLike) -> FeatureDataset:
    """Opens a feature dataset."""
    return FeatureDataset(*_open(path, "features"))
