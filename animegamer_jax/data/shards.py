"""Writes datasets in shards: by several hosts or workers, and resumable.

An unfinished dataset is in its final folder: finished shards and `unfinished.json`, which describes
the dataset and its sources. A shard gets its name when it is complete, so a file with that name
needs no check. `set.json` is written last and makes the folder a dataset.

    features/unfinished.json  conditions/1.0.0/conditions-train.array_record-00003-of-00024 ...
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from animegamer_jax.bundle.vocabulary import TOKENIZER_FOLDER, copy_tokenizer_folder
from animegamer_jax.data.datasets import (
    INFO_FILE,
    PARTS,
    UNFINISHED_FILE,
    VERSION,
    DatasetInfo,
    Part,
    Record,
    record_spec,
)
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import (
    absolute,
    files_under,
    is_bucket,
    move_into_place,
    refuse_existing,
    user_errors,
)
from animegamer_jax.storage.serialization import first_difference, read_json, to_json

_TEMPORARY = ".shard-"
_HINT = "free space or choose another place, then run the same command again"
_ENDS = 1 << 16  # bytes; the index of an ArrayRecord file is at its end
_READERS = 16
_REFUSED = re.compile(r"(?:open|write|close|sync)\(\) failed: ([^;]*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedDataset:
    """An unfinished dataset.

    Attributes:
        path: Folder of the dataset.
        info: Description of the dataset; `finish` sets its `splits`.
        shards: Number of shards by split.
    """

    path: epath.Path
    info: DatasetInfo
    shards: Mapping[str, int]

    def missing(self, split: str) -> list[int]:
        """Returns the shards of a split that are still to be written, in order."""
        count = self.shards[split]
        there = {part: _names(self._folder(part)) for part in self._parts}
        return [
            shard
            for shard in range(count)
            if any(self._file(part, split, shard).name not in there[part] for part in self._parts)
        ]

    def write(
        self,
        split: str,
        shard: int,
        records: Iterable[Mapping[Part, Record]],
        *,
        expected: int | None = None,
    ) -> int:
        """Writes one shard completely or not at all.

        Args:
            split: Split of the shard.
            shard: Number of the shard.
            records: For each turn, in order, a record of each part.
            expected: Number of turns; None: any number.

        Returns:
            The number of turns.

        Raises:
            UserError: The shard cannot be written, or would have another number of turns.
        """
        encoders = {part: _encoder(part, self.info) for part in self._parts}
        count = 0
        with (
            user_errors(self.path, "cannot be written", hint=_HINT),
            contextlib.ExitStack() as stack,
        ):
            writers = {
                part: stack.enter_context(_writing(self._file(part, split, shard)))
                for part in self._parts
            }
            for record in records:
                count += 1
                for part in self._parts:
                    writers[part].write(encoders[part](record[part]))
            if expected not in (None, count):
                raise UserError(
                    f"{self.path}: shard {shard} of {split!r}: expected {expected} turns, found "
                    f"{count}: remove the folder and run the same command again"
                )
        return count

    def finish(
        self,
        *,
        expected: Mapping[str, Sequence[int]],
        extras: Mapping[str, bytes] = MappingProxyType({}),
    ) -> DatasetInfo:
        """Writes the description of a dataset whose shards are complete: now it can be opened.

        Shards in a bucket are not read for that: they were counted when they were written.

        Args:
            expected: Number of turns of each shard, by split.
            extras: Content of further files next to `set.json`, by name.

        Raises:
            UserError: A shard is missing or damaged, a split has no turns or another number than
                expected, or a file cannot be written.
        """
        for split in self.shards:
            if missing := self.missing(split):
                raise UserError(
                    f"{self.path}: shards {missing[:8]} of {split!r} are missing: run the same "
                    "command again"
                )
        for split in self.shards:
            if not sum(expected[split]):
                raise UserError(
                    f"{self.path}: the split {split!r} would hold no turns: take more games"
                )
        for part in self._parts:
            self._describe(part, expected)
        splits = {split: sum(expected[split]) for split in self.shards}
        info = dataclasses.replace(self.info, splits=splits)
        with user_errors(self.path, "cannot be written", hint=_HINT):
            for part in self._parts:
                for left in self._folder(part).glob(f"{_TEMPORARY}*"):  # of a killed run
                    left.unlink(missing_ok=True)
            for name, content in extras.items():
                (self.path / name).write_bytes(content)
            write_json(self.path / INFO_FILE, to_json(info))
            (self.path / UNFINISHED_FILE).unlink(missing_ok=True)
        return info

    @property
    def _parts(self) -> tuple[Part, ...]:
        return PARTS[self.info.kind]

    def _folder(self, part: Part) -> epath.Path:
        return self.path / part / VERSION

    def _template(self, part: Part, split: str) -> Any:
        return tfds.core.ShardedFileTemplate(
            data_dir=self._folder(part),
            dataset_name=part,
            split=split,
            filetype_suffix="array_record",
        )

    def _file(self, part: Part, split: str, shard: int) -> epath.Path:
        template = self._template(part, split)
        return template.sharded_filepath(shard_index=shard, num_shards=self.shards[split])

    def _sizes(self, part: Part, split: str, lengths: Sequence[int]) -> list[int]:
        """Returns the bytes of each shard; counts the records of those on this machine."""

        def size_of(shard: int) -> int:
            file = self._file(part, split, shard)
            if not is_bucket(file) and (found := _num_records(file)) != lengths[shard]:
                raise UserError(
                    f"{self.path}: the split {split!r}: expected {lengths[shard]} turns in shard "
                    f"{shard}, found {found}: remove the folder and run the same command again"
                )
            with user_errors(file, "cannot be read", hint="run the same command again"):
                return file.stat().length

        with ThreadPoolExecutor(_READERS) as readers:
            return list(readers.map(size_of, range(len(lengths))))

    def _describe(self, part: Part, lengths: Mapping[str, Sequence[int]]) -> None:
        """Writes TFDS's description next to the shards of a part."""
        folder = self._folder(part)
        infos = [
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=list(lengths[split]),
                num_bytes=sum(self._sizes(part, split, lengths[split])),
                filename_template=self._template(part, split),
            )
            for split in self.shards
        ]
        with user_errors(self.path, "cannot be written", hint=_HINT):
            write_metadata: Any = tfds.folder_dataset.write_metadata
            write_metadata(
                data_dir=folder,
                features=record_spec(part, self.info),
                split_infos=infos,
                check_data=False,  # it would need TensorFlow
                description=f"AnimeGamer turns ({part}): see {INFO_FILE} above",
                disable_shuffling=True,
            )
            tfds.core.MetadataDict(to_json(self.info)).save_metadata(folder)


def _refuse_existing(path: epath.Path) -> None:
    """Checks that the path is free; a command that is repeated finds its own complete dataset."""
    if (path / INFO_FILE).exists():
        raise UserError(
            f"{path}: already there: a complete dataset: use it, or choose another folder"
        )
    refuse_existing(path, overwrite=None)


def begin_dataset(
    path: epath.PathLike,
    info: DatasetInfo,
    *,
    shards: Mapping[str, int],
    fingerprint: Mapping[str, Any] = MappingProxyType({}),
) -> ShardedDataset:
    """Begins a dataset in shards, or continues one that was begun with the same arguments.

    Once one host has begun it, others may begin it as well.

    Args:
        path: Path of the dataset, which must be free or hold the same unfinished dataset.
        info: Description of the dataset; `finish` sets its `splits`.
        shards: Number of shards by split.
        fingerprint: Everything else that determines a shard, as JSON: settings, digests of sources.

    Raises:
        UserError: The path is taken or cannot be written, or another dataset was begun there.
    """
    path = absolute(path)
    plan = {"set": to_json(info), "fingerprint": dict(fingerprint), "shards": dict(shards)}
    file = path / UNFINISHED_FILE
    with user_errors(path, "cannot be written", hint=_HINT):
        if not file.exists():
            _refuse_existing(path)
            path.mkdir(parents=True, exist_ok=True)
            write_json(file, plan)
        for part in PARTS[info.kind]:
            (path / part / VERSION).mkdir(parents=True, exist_ok=True)
    begun = read_json(file, dict[str, Any], hint="delete the folder and start again")
    if differing := first_difference(begun, plan):
        raise UserError(
            f"{path}: another dataset was begun here: {differing}: use the earlier settings and "
            "sources, or choose another folder"
        )
    return ShardedDataset(path=path, info=info, shards=dict(shards))


def write_dataset(
    path: epath.PathLike,
    info: DatasetInfo,
    *,
    splits: Mapping[str, Callable[[], Iterable[Mapping[Part, Record]]]],
    tokenizer: epath.PathLike | None = None,
) -> DatasetInfo:
    """Writes a dataset under a temporary name, then renames it: it is complete or missing.

    Args:
        path: Path of the dataset, which must be free.
        info: Description of the dataset; its `splits` are replaced.
        splits: Functions that return the records of each part for each turn of a split, in order.
        tokenizer: Folder of a tokenizer to copy into the dataset, with the words.json next to it.

    Returns:
        `info` with the number of records of each split.

    Raises:
        UserError: The path is taken or cannot be written, or there are no records.
    """
    path = absolute(path)
    _refuse_existing(path)
    temporary = path.parent / f"{path.name}.tmp-{os.getpid()}"
    try:
        written = begin_dataset(temporary, info, shards=dict.fromkeys(splits, 1))
        counts = {s: written.write(s, 0, _checked(make(), split=s)) for s, make in splits.items()}
        info = written.finish(expected={split: [count] for split, count in counts.items()})
        with user_errors(path, "cannot be written", hint=_HINT):
            if tokenizer is not None:
                copy_tokenizer_folder(epath.Path(tokenizer), temporary / TOKENIZER_FOLDER)
            if path.exists():  # an empty folder
                path.rmdir()
            move_into_place(temporary, path)
    except UserError as error:
        raise UserError(str(error).replace(os.fspath(temporary), os.fspath(path))) from error
    finally:
        if temporary.exists():
            temporary.rmtree()
    return info


def _checked(
    records: Iterable[Mapping[Part, Record]], *, split: str
) -> Iterator[Mapping[Part, Record]]:
    """Checks that there are records, and that the turns of each game are complete and in order."""
    expected = None  # game, turn and number of turns of the next record; None: a new game
    record = None
    for record in records:
        turn_record = next(iter(record.values()))
        game, turn, num_turns = (int(turn_record[k]) for k in ("game", "turn", "num_turns"))
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


def shard_ranges(count: int, *, size: int) -> list[range]:
    """Splits the numbers of `count` turns into shards of `size`; the last one may be shorter."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def shard_size_for(count: int) -> int:
    """Returns how many turns to put into a file: more in larger datasets, so files stay few.

    256 up to half a million turns, then a power of two that gives 1,000 to 2,000 shards or, above
    16 million turns, 8,192.
    """
    return min(max(256, 1 << ((count - 1) // 2048).bit_length()), 8192)


def folder_digest(path: epath.PathLike, *, ends: int = _ENDS) -> str:
    """Computes a digest of names, sizes, and both ends of each file, as 16 hexadecimal digits.

    Args:
        path: The folder; its subfolders count as well.
        ends: Number of bytes to read at each end of a file.

    Raises:
        UserError: The folder cannot be read.
    """
    folder = absolute(path)

    def digest_of(file: epath.Path) -> bytes:
        size = file.stat().length
        digest = hashlib.sha256(f"{os.fspath(file.relative_to(folder))} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(ends))
            if size > ends:
                content.seek(max(ends, size - ends))
                digest.update(content.read(ends))
        return digest.digest()

    hint = "check the path"
    with user_errors(folder, "cannot be read", hint=hint), ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(digest_of, sorted(files_under(folder))))
    return hashlib.sha256(b"".join(found)).hexdigest()[:16]


def _names(folder: epath.Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _encoder(part: Part, info: DatasetInfo) -> Callable[[Record], bytes]:
    """Returns TFDS's `serialize_example`, but with the same bytes in every process."""
    spec = record_spec(part, info)
    specs: Any = spec.get_serialized_info()
    serializer = ExampleSerializer(specs)

    def encode(record: Record) -> bytes:
        example: Any = serializer.get_tf_example(spec.encode_example(record))
        return example.SerializeToString(deterministic=True)

    return encode


@contextlib.contextmanager
def _writing(file: epath.Path) -> Iterator[ArrayRecordWriter]:
    """Opens a writer whose file gets its name at the end of the block if nothing was raised.

    ArrayRecord writes only local files: a file for a bucket is written here, then copied.
    """
    local = not is_bucket(file)
    place = os.fspath(file.parent) if local else None
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=place)
    os.close(handle)
    temporary = epath.Path(name)
    try:
        with _disk_errors():
            writer = ArrayRecordWriter(name, "group_size:1")
            try:
                yield writer
            finally:
                writer.close()
        os.chmod(name, 0o644)
        if local:
            temporary.replace(file)
        else:
            temporary.copy(file, overwrite=True)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turns an error of ArrayRecord about the disk into OSError."""
    try:
        yield
    except RuntimeError as error:
        if (found := _REFUSED.search(str(error))) is None:
            raise
        raise OSError(errno.EIO, found[1]) from error


def _num_records(file: epath.Path) -> int:
    try:
        reader = ArrayRecordReader(os.fspath(file))
        count = reader.num_records()
        reader.close()
        return count
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{file}: cannot be read: {first_line(error)}: delete it and run the same command again"
        ) from error
