"""Data sets written in pieces: by several hosts or workers, and on again after a stop.

A set on its way lies where it will stay, as finished shards and `unfinished.json`, which says what
it will be and what it is made of; `set.json` comes last and makes it a set. A shard gets its name
when it is whole, so what is there needs no second look, and nothing is moved at the end.

    features/unfinished.json  conditions/1.0.0/conditions-train.array_record-00003-of-00024 ...
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from animegamer_jax.bundle.config import to_json
from animegamer_jax.data.datasets import (
    INFO_FILE,
    PARTS,
    UNFINISHED_FILE,
    VERSION,
    Part,
    Record,
    SetInfo,
    disk_refusal,
    record_spec,
)
from animegamer_jax.errors import UserError
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import (
    absolute,
    refuse_existing,
    telling,
)
from animegamer_jax.storage.serialization import first_difference

_TEMPORARY = ".shard-"
_MEND = "free space or choose another place, then run the same command again"
_ENDS = 1 << 16  # bytes: ArrayRecord lists a file's records at its end
_READERS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedSet:
    """A set on its way.

    Attributes:
        path: the folder.
        info: of the set; its `splits` are filled in at the end.
        shards: number of shards of each split.
    """

    path: epath.Path
    info: SetInfo
    shards: Mapping[str, int]

    def missing(self, split: str) -> list[int]:
        """The shards of a split that are still to be written, in order."""
        count = self.shards[split]
        there = {part: _names(self._folder(part)) for part in self._parts}
        return [
            shard
            for shard in range(count)
            if any(self._file(part, split, shard).name not in there[part] for part in self._parts)
        ]

    def write(self, split: str, shard: int, records: Iterable[Mapping[Part, Record]]) -> int:
        """Writes one shard: in whole, or not at all.

        Args:
            split: of the set.
            shard: its number.
            records: for each turn, in order, a record of each part.

        Returns:
            The number of turns.

        Raises:
            UserError: the disk refuses.
        """
        encoders = {part: _encoder(part, self.info) for part in self._parts}
        count = 0
        with telling(self.path, "cannot be written", mend=_MEND), contextlib.ExitStack() as stack:
            writers = {
                part: stack.enter_context(_writing(self._file(part, split, shard)))
                for part in self._parts
            }
            for record in records:
                count += 1
                for part in self._parts:
                    writers[part].write(encoders[part](record[part]))
        return count

    def finish(
        self, *, expected: Mapping[str, int], extras: Mapping[str, bytes] = MappingProxyType({})
    ) -> SetInfo:
        """Describes the set, when all shards are there: from now on it can be opened.

        Args:
            expected: number of turns of each split.
            extras: further files beside `set.json`, by their names.

        Raises:
            UserError: a shard is missing or damaged, a split has no turns or not those that were
                expected, or the disk refuses.
        """
        splits = {}
        for split in self.shards:
            if missing := self.missing(split):
                raise UserError(
                    f"{self.path}: shards {missing[:8]} of {split!r} are missing: run the same "
                    "command again"
                )
        for part in self._parts:
            lengths = {split: self._lengths(part, split) for split in self.shards}
            counts = {split: sum(found) for split, found in lengths.items()}
            for split, count in counts.items():
                if not count:
                    raise UserError(f"{self.path}: the split {split!r} would hold no turns")
                if count != expected[split]:
                    raise UserError(
                        f"{self.path}: the split {split!r}: expected {expected[split]} turns, "
                        f"found {count}: remove the folder and run the same command again"
                    )
            if splits and counts != splits:
                raise ValueError(f"the parts differ in length: {splits}, {counts}")
            splits = counts
            self._describe(part, lengths)
        info = dataclasses.replace(self.info, splits=splits)
        with telling(self.path, "cannot be written", mend=_MEND):
            for part in self._parts:
                for left in self._folder(part).glob(f"{_TEMPORARY}*"):  # by a run that was killed
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

    def _lengths(self, part: Part, split: str) -> list[int]:
        return [_num_records(self._file(part, split, k)) for k in range(self.shards[split])]

    def _describe(self, part: Part, lengths: Mapping[str, list[int]]) -> None:
        """What TFDS keeps beside the shards of a part."""
        folder = self._folder(part)
        infos = [
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=found,
                num_bytes=sum(
                    self._file(part, split, shard).stat().length for shard in range(len(found))
                ),
                filename_template=self._template(part, split),
            )
            for split, found in lengths.items()
        ]
        with telling(self.path, "cannot be written", mend=_MEND):
            write_metadata: Any = tfds.folder_dataset.write_metadata
            write_metadata(
                data_dir=folder,
                features=record_spec(part, self.info),
                split_infos=infos,
                check_data=False,  # it would need TensorFlow
                description=f"AnimeGamer turns ({part}): see {INFO_FILE} above",
                disable_shuffling=True,
            )


def begin_set(
    path: epath.PathLike,
    info: SetInfo,
    *,
    shards: Mapping[str, int],
    made_of: Mapping[str, Any] = MappingProxyType({}),
) -> ShardedSet:
    """A set to be written in shards: a new one, or one that was begun with the same arguments.

    When one host has begun it, others may begin it as well.

    Args:
        path: must be free, or hold such a set on its way.
        info: of the set; its `splits` are filled in at the end.
        shards: number of shards of each split.
        made_of: what else decides what a shard holds, as JSON: settings, digests of the sources.

    Raises:
        UserError: the place is taken, what was begun there is another set, or the disk refuses.
    """
    path = absolute(path)
    plan = {"set": to_json(info), "made_of": dict(made_of), "shards": dict(shards)}
    file = path / UNFINISHED_FILE
    with telling(path, "cannot be written", mend=_MEND):
        if not file.exists():
            refuse_existing(path, overwrite=None)
            path.mkdir(parents=True, exist_ok=True)
            write_json(file, plan)
        for part in PARTS[info.kind]:
            (path / part / VERSION).mkdir(parents=True, exist_ok=True)
    begun = _read_plan(file)
    if differing := first_difference(begun, plan):
        raise UserError(
            f"{path}: what was begun here is another set: {differing}: go on with what it was "
            "begun with, or start anew in another folder"
        )
    return ShardedSet(path=path, info=info, shards=dict(shards))


def shard_ranges(count: int, *, size: int) -> list[range]:
    """The numbers of `count` turns, cut into shards of `size`; the last one may be shorter."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def folder_digest(path: epath.PathLike, *, ends: int = _ENDS) -> str:
    """Tells folders of large files apart: 16 digits of names, sizes, and both ends of each file.

    Args:
        path: the folder, with all that is below it.
        ends: bytes of a file's beginning and of its end that are read.

    Raises:
        UserError: it cannot be read.
    """
    folder = absolute(path)

    def about(file: epath.Path) -> bytes:
        size = file.stat().length
        digest = hashlib.sha256(f"{os.fspath(file.relative_to(folder))} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(ends))
            if size > ends:
                content.seek(max(ends, size - ends))
                digest.update(content.read(ends))
        return digest.digest()

    mend = "check the path"
    with telling(folder, "cannot be read", mend=mend), ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(about, sorted(_files(folder))))
    return hashlib.sha256(b"".join(found)).hexdigest()[:16]


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _read_plan(file: epath.Path) -> Mapping[str, Any]:
    with telling(file, "cannot be read", mend="delete the folder and start again"):
        text = file.read_text()
    try:
        plan = json.loads(text)
    except ValueError:
        plan = None
    if not isinstance(plan, dict):
        raise UserError(f"{file}: no JSON object: delete the folder and start again")
    return plan


def _names(folder: epath.Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def _encoder(part: Part, info: SetInfo) -> Callable[[Record], bytes]:
    """As TFDS's `serialize_example`, whose bytes are in another order in each process."""
    spec = record_spec(part, info)
    specs: Any = spec.get_serialized_info()
    serializer = ExampleSerializer(specs)

    def encode(record: Record) -> bytes:
        example: Any = serializer.get_tf_example(spec.encode_example(record))
        return example.SerializeToString(deterministic=True)

    return encode


@contextlib.contextmanager
def _writing(file: epath.Path) -> Iterator[ArrayRecordWriter]:
    """A writer whose file gets its name at the end of the block, if nothing was raised.

    ArrayRecord writes local files only: what belongs into a bucket is made here and sent there.
    """
    local = "://" not in os.fspath(file)
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
    try:
        yield
    except RuntimeError as error:
        if (reason := disk_refusal(error)) is None:
            raise
        raise OSError(errno.EIO, reason) from error


def _num_records(file: epath.Path) -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            name = os.fspath(file)
            if "://" in name:
                name = os.path.join(folder, "shard")
                file.copy(name)
            reader = ArrayRecordReader(name)
            count = reader.num_records()
            reader.close()
            return count
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")[:160]
        raise UserError(
            f"{file}: cannot be read: {reason}: delete it and run the same command again"
        ) from error
