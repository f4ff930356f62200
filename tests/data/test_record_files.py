"""Files of records: read by number, many more of them than may be open."""

import os
import random
import resource
import threading

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from animegamer_jax.data import record_files
from animegamer_jax.data.record_files import ReaderPool, ShardedRecords


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[tuple[str, int]]:
    folder = tmp_path_factory.mktemp("files")
    found, number = [], 0
    for shard in range(40):
        path, count = str(folder / f"{shard}"), shard % 3
        writer = ArrayRecordWriter(path, "group_size:1")
        for _ in range(count):
            writer.write(str(number).encode())
            number += 1
        writer.close()
        found.append((path, count))
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_records_have_the_order_of_the_files(files):
    records = ShardedRecords(files)
    assert len(records) == 39
    assert [int(records[number]) for number in range(39)] == list(range(39))
    for number in (-1, 39):
        with pytest.raises(IndexError, match="expected a number from 0 to 38"):
            records[number]


def test_idle_files_are_closed(files, monkeypatch):
    monkeypatch.setattr(record_files, "_FILES", pool := ReaderPool(3))
    records, before = ShardedRecords(files), open_files()
    order = random.Random(0).choices(range(39), k=200)
    assert [int(records[number]) for number in order] == order
    assert len(pool) == 3
    assert open_files() <= before + 3


def test_more_files_than_may_be_open(files, monkeypatch):
    """As on a machine whose limit cannot be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 12, hard))
    try:
        monkeypatch.setattr(record_files, "_FILES", ReaderPool(4))
        records = ShardedRecords(files)
        assert [int(records[number]) for number in range(39)] == list(range(39))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


def test_threads_read_the_same_files(files, monkeypatch):
    monkeypatch.setattr(record_files, "_FILES", pool := ReaderPool(2))
    records, wrong = ShardedRecords(files), []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for number in (rng.randrange(39) for _ in range(300)):
            if int(records[number]) != number:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(pool) <= 2


def test_a_file_that_cannot_be_read_is_not_kept_open(files, tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "_FILES", pool := ReaderPool(2))
    (tmp_path / "bad").write_bytes(b"no records")
    with pytest.raises((RuntimeError, ValueError)):
        ShardedRecords([(str(tmp_path / "bad"), 5)])[0]
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        ShardedRecords([(files[1][0], 9)])[5]  # fewer records than the description says
    assert len(pool) == 0
