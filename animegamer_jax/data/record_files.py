"""Reads records of ArrayRecord files by number, with a bounded number of open files.

ArrayRecord's own source opens every file that it reads from and closes none: a dataset of more
shards than a process may have open files (often 1,024) could not be read.
"""

import bisect
import collections
import contextlib
import itertools
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from animegamer_jax.storage.paths import is_bucket

_MOST_FILES = 1024  # idle files of this machine that stay open
_MOST_OBJECTS = 4096  # of a bucket: each holds memory, but no file descriptor
_SHARE = 4  # the process may open four times as many files
_OPTIONS = "readahead_buffer_size:0"
_BUFFER = 32_768  # bytes


class ReaderPool:
    """Open files that no thread uses now; the least recently used ones are closed first.

    Args:
        most: Number of idle files that stay open.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._count = 0
        self._idle: collections.OrderedDict[str, list[Any]] = collections.OrderedDict()

    def __len__(self) -> int:
        return self._count

    @contextlib.contextmanager
    def reading(self, file: str) -> Iterator[Any]:
        """Opens a file, or takes one that is open, for the block; one thread has it at a time."""
        with self._lock:
            idle = self._idle.get(file)
            reader = idle.pop() if idle else None
            self._count -= reader is not None
            if idle == []:
                del self._idle[file]
        if reader is None:
            reader = ArrayRecordReader(file, options=_OPTIONS, file_reader_buffer_size=_BUFFER)
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._idle.setdefault(file, []).append(reader)
            self._idle.move_to_end(file)
            self._count += 1
            old = []
            while self._count > self._most:
                first, readers = next(iter(self._idle.items()))
                old.append(readers.pop(0))
                self._count -= 1
                if not readers:
                    del self._idle[first]
        for reader in old:
            reader.close()


def _raise_limit() -> int:
    """Allows this process as many open files as the system lets it; returns the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _make_pools() -> tuple[ReaderPool, ReaderPool]:
    limit = _raise_limit()
    most = _MOST_FILES if limit == resource.RLIM_INFINITY else min(_MOST_FILES, limit // _SHARE)
    return ReaderPool(most), ReaderPool(_MOST_OBJECTS)


_FILES, _OBJECTS = _make_pools()  # of all datasets of the process


class ShardedRecords:
    """The encoded records of some files, by their number over all files.

    Args:
        files: The files, each with the number of its records.
    """

    def __init__(self, files: Sequence[tuple[str, int]]):
        self._files = [file for file, _ in files]
        self._ends = list(itertools.accumulate(count for _, count in files))
        bucket = bool(files) and is_bucket(self._files[0])
        self._pool = _OBJECTS if bucket else _FILES

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        """Returns a record.

        Raises:
            IndexError: There is no record of this number.
            RuntimeError: The file cannot be read (ArrayRecord's own errors).
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index}: expected a number from 0 to {len(self) - 1}")
        shard = bisect.bisect_right(self._ends, index)
        first = self._ends[shard - 1] if shard else 0
        with self._pool.reading(os.fspath(self._files[shard])) as reader:
            return reader.read([index - first])[0]
