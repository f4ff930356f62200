"""Datasets on disk: game datasets hold turns with their clips, feature datasets their features.

A dataset is a folder, local or in a bucket, with its description in `set.json` and ordinary TFDS
datasets of ArrayRecord files, which other programs can read as well:

    game dataset      set.json  games/VERSION/...  (the toy world's also: tokenizer/  words.json)
    feature dataset   set.json  conditions/VERSION/...  latents/VERSION/...

A record is a turn. The turns of a game follow one another: record i with `turn` t belongs to the
game that starts at record i - t. A feature dataset has the records of the game dataset from which
it was made, in the same order.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER, copy_tokenizer_folder
from animegamer_jax.configs import CLIPConfig, T5Config, VAEConfig
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import Protocol
from animegamer_jax.storage.paths import absolute, move_into_place, refuse_existing, user_errors
from animegamer_jax.storage.serialization import read_json, to_json

VERSION = "1.0.0"  # of the records, for TFDS; the first number is `DatasetInfo.layout`
INFO_FILE = "set.json"
UNFINISHED_FILE = "unfinished.json"  # until the dataset is complete (`shards`)

Kind = Literal["games", "features"]
Part = Literal["games", "conditions", "latents"]
Record = dict[str, Any]
Records = Callable[[], Iterable[Record]]

PARTS: Mapping[Kind, tuple[Part, ...]] = {
    "games": ("games",),
    "features": ("conditions", "latents"),
}
_AGAIN = "make the dataset again with this version"
_MADE_BY = {
    "games": "animegamer data toyworld` or `animegamer data games",
    "features": "animegamer data features",
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
        bundle: name of the bundle whose networks computed the features.
        games: path of the game dataset.
        frame: frame of the clip from which CLIP's features were computed.
        text: tokens and width of T5's features of the motion text.
        image: tokens and width of CLIP's features.
        moments: frames, height, width and channels of the VAE's means and log-variances.
        t5, clip, vae: configurations of the networks.
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
        layout: version of the format.
        kind: kind of the records.
        made_by: command that made the dataset.
        seed: random seed of the dataset; None: nothing in it is random.
        num_frames, height, width, fps: size of every clip.
        protocol: game protocol, with the possible states and the motion value of each level.
        motion_edges: motion values between two motion levels.
        splits: number of records by split.
        features: origin and shapes of the features; None for a game dataset.
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


# Writing


def record_spec(part: Part, info: DatasetInfo) -> tfds.features.FeaturesDict:
    """Returns TFDS's description of the records of a part."""
    f = tfds.features
    place = {name: f.Scalar(NUMBERS[name]) for name in ("game", "turn", "num_turns")}
    if part == "latents":
        return f.FeaturesDict({**place, "moments": _array(_of(info).moments)})
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
    """A tensor in bytes: half the size of TFDS's lists of numbers, and written ten times faster."""
    return tfds.features.Tensor(shape=shape, dtype=np.float16, encoding="bytes")


class DatasetBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes given records in order."""

    VERSION = tfds.core.Version(VERSION)
    part: Part

    def __init__(self, *, info: DatasetInfo, splits: Mapping[str, Records], data_dir: str):
        self._set_info, self._splits = info, splits
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"AnimeGamer turns ({self.part}): see {INFO_FILE} above",
            features=record_spec(self.part, self._set_info),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(to_json(self._set_info)),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {s: enumerate(_checked(make(), split=s)) for s, make in self._splits.items()}

    def _generate_examples(self) -> Any:
        raise NotImplementedError  # the generators of the splits are enough


class Games(DatasetBuilder, skip_registration=True):
    part = "games"


class Conditions(DatasetBuilder, skip_registration=True):
    part = "conditions"


class Latents(DatasetBuilder, skip_registration=True):
    part = "latents"


_BUILDERS: Mapping[Part, Any] = {
    "games": Games,
    "conditions": Conditions,
    "latents": Latents,
}


def _checked(records: Iterable[Record], *, split: str) -> Iterator[Record]:
    """Checks that there are records, and that the turns of each game are complete and in order."""
    expected = None  # game, turn and number of turns of the next record; None: a new game
    record = None
    for record in records:
        game, turn, num_turns = (int(record[k]) for k in ("game", "turn", "num_turns"))
        if (game, turn, num_turns) != (expected or (game, 0, num_turns)):
            raise ValueError(
                f"game, turn, number of turns {game, turn, num_turns}: expected "
                f"{expected or 'the turn 0 of a game'}"
            )
        expected = (game, turn + 1, num_turns) if turn + 1 < num_turns else None
        yield record
    if record is None:
        raise UserError(f"the split {split!r}: no records to write: expected one game or more")
    if expected:
        raise ValueError(f"game, turn, number of turns {expected}: missing at the end")


def write_dataset(
    path: epath.PathLike,
    info: DatasetInfo,
    *,
    parts: Mapping[Part, Mapping[str, Records]],
    tokenizer: epath.PathLike | None = None,
) -> DatasetInfo:
    """Writes a dataset under a temporary name, then renames it: it is complete or missing.

    Args:
        path: path of the dataset, which must be free.
        info: description of the dataset; its `splits` are replaced.
        parts: functions that return the records, by part and split.
        tokenizer: folder of a tokenizer to copy into the dataset, with the words.json next to it.

    Returns:
        `info` with the number of records of each split.

    Raises:
        UserError: the path is taken or cannot be written, or there are no records.
    """
    path = absolute(path)
    refuse_existing(path, overwrite=None)
    temporary = path.parent / f"{path.name}.tmp-{os.getpid()}"
    try:
        with user_errors(path, "cannot be written", hint="free space or choose another place"):
            temporary.mkdir(parents=True)
            counts = {part: _build(part, temporary, info, parts[part]) for part in PARTS[info.kind]}
            splits = counts[PARTS[info.kind][0]]
            if any(count != splits for count in counts.values()):
                raise ValueError(f"the parts differ in length: {counts}")
            info = dataclasses.replace(info, splits=splits)
            (temporary / INFO_FILE).write_text(json.dumps(to_json(info), indent=1) + "\n")
            if tokenizer is not None:
                copy_tokenizer_folder(epath.Path(tokenizer), temporary / TOKENIZER_FOLDER)
            if path.exists():  # an empty folder
                path.rmdir()
            move_into_place(temporary, path)
    finally:
        if temporary.exists():
            temporary.rmtree()
    return info


_REFUSED = re.compile(r"(?:open|write|close|sync)\(\) failed: ([^;]*)")


def disk_refusal(error: RuntimeError) -> str | None:
    """Returns why the disk failed, from an error of ArrayRecord; None for other errors."""
    found = _REFUSED.search(str(error))
    return found[1] if found else None


def _build(
    part: Part, folder: epath.Path, info: DatasetInfo, splits: Mapping[str, Records]
) -> dict[str, int]:
    tfds.display_progress_bar(False)
    builder = _BUILDERS[part](info=info, splits=splits, data_dir=os.fspath(folder))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints about a download
            builder.download_and_prepare(download_dir=os.fspath(folder / "downloads"))
    except RuntimeError as error:
        if (reason := disk_refusal(error)) is None:
            raise
        raise OSError(errno.EIO, reason) from error
    if (folder / "downloads").exists():
        (folder / "downloads").rmtree()
    return {name: split.num_examples for name, split in builder.info.splits.items()}


# Reading


class RecordSource:
    """The records of one split of one part by number: a random-access source for Grain."""

    def __init__(self, source: Any, *, name: str):
        self._source, self._name = source, name

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:  # for Grain's own messages
        return f"RecordSource({self._name})"

    def __getitem__(self, index: int) -> Record:
        """Returns a record with its texts decoded.

        Raises:
            UserError: the file is damaged.
        """
        try:
            record = self._source[int(index)]
        except Exception as error:  # ArrayRecord and protobuf raise types of their own
            raise _damaged(self._name, error) from error
        for name in TEXTS:
            if name in record:
                record[name] = record[name].decode()
        if "captions" in record:
            record["captions"] = [caption.decode() for caption in record["captions"]]
        return record


def _damaged(name: str, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), type(error).__name__)[:160]
    return UserError(f"{name}: cannot be read: {reason}: copy the dataset again, or make it again")


@dataclasses.dataclass(frozen=True)
class OpenDataset:
    """A dataset whose description was read."""

    path: epath.Path
    info: DatasetInfo

    def records(self, split: str, *, part: Part) -> RecordSource:
        """Opens the records of a split.

        Raises:
            UserError: the split is missing or empty, or the files differ from the description.
        """
        folder = self.path / part / VERSION
        if not self.info.splits.get(split):
            there = ", ".join(f"{name} ({n})" for name, n in self.info.splits.items()) or "none"
            raise UserError(
                f"{self.path}: no records in the split {split!r}: expected one of: {there}"
            )
        name = f"{folder} ({split})"
        try:
            open_builder: Any = tfds.builder_from_directory
            source = open_builder(folder).as_data_source(split)
            found = len(source)
        except Exception as error:  # TFDS raises all kinds for an incomplete folder
            raise _damaged(name, error) from error
        if found != self.info.splits[split]:
            raise UserError(
                f"{name}: expected {self.info.splits[split]} records, found {found}: copy the "
                "dataset again, or make it again"
            )
        return RecordSource(source, name=name)


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


def read_info(path: epath.PathLike) -> DatasetInfo:
    """Reads the description of a dataset.

    Raises:
        UserError: there is no dataset, it is not finished, or its description has another form.
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
    """Opens a game dataset.

    Raises:
        UserError: there is none, or it is of another kind or another version.
    """
    return GameDataset(*_open(path, "games"))


def open_features(path: epath.PathLike) -> FeatureDataset:
    """Opens a feature dataset.

    Raises:
        UserError: there is none, or it is of another kind or another version.
    """
    return FeatureDataset(*_open(path, "features"))
