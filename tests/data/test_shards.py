"""Sets written shard by shard: equal to those written at once, complete or absent, resumed."""

import dataclasses
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tiny_sets import INFO, turns_of

from animegamer_jax.data import shards
from animegamer_jax.data.datasets import INFO_FILE, open_games
from animegamer_jax.data.shards import (
    begin_dataset,
    folder_digest,
    shard_ranges,
    shard_size_for,
    write_dataset,
)
from animegamer_jax.errors import UserError

SHARDS = {"train": 3, "test": 1}
TURNS = {"train": 15, "test": 5}
LENGTHS = {"train": [5, 5, 5], "test": [5]}


def records(first: int, count: int):
    return [{**turn, "clip": b"clip"} for turn in turns_of(count, first=first)]


def begin(path, *, info=INFO, shards=SHARDS, fingerprint=None):
    return begin_dataset(
        path, info, shards=shards, fingerprint=fingerprint or {"films": {"a": 1, "b": 2}}
    )


def fill(written, *, but=None):
    for split, first, shard in (("train", 0, 0), ("train", 1, 1), ("train", 2, 2), ("test", 3, 0)):
        if (split, shard) != but:
            written.write(split, shard, [{"games": r} for r in records(first, 1)])


def test_shards_hold_what_a_set_written_at_once_holds(tmp_path):
    written = begin(tmp_path / "shards")
    assert written.missing("train") == [0, 1, 2]
    fill(written)
    assert written.finish(expected=LENGTHS).splits == TURNS
    whole = {"train": [{"games": r} for r in records(0, 3)]}
    whole["test"] = [{"games": r} for r in records(3, 1)]
    splits = {split: lambda split=split: whole[split] for split in whole}
    info = write_dataset(tmp_path / "whole", INFO, splits=splits)
    found, expected = open_games(tmp_path / "shards"), open_games(tmp_path / "whole")
    assert found.info == expected.info == info
    for split, count in info.splits.items():
        sources = found.turns(split), expected.turns(split)
        assert all(sources[0][k] == sources[1][k] for k in range(count))


def test_any_tfds_program_reads_it(tmp_path):
    written = begin(tmp_path / "set")
    fill(written)
    written.finish(expected=LENGTHS)
    builder = tfds.builder_from_directory(tmp_path / "set" / "games" / "1.0.0")
    assert builder.info.splits["train"].shard_lengths == [5, 5, 5]
    source = builder.as_data_source("train")
    assert [int(source[k]["turn"]) for k in (4, 5)] == [4, 0]


def test_a_shard_is_there_in_whole_or_not_at_all(tmp_path):
    written = begin(tmp_path / "set")

    def torn():
        yield {"games": records(0, 1)[0]}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written.write("train", 1, torn())
    folder = tmp_path / "set" / "games" / "1.0.0"
    assert list(folder.iterdir()) == []
    assert written.missing("train") == [0, 1, 2]


def test_going_on_writes_what_is_missing(tmp_path):
    fill(begin(tmp_path / "set"), but=("train", 1))
    (tmp_path / "set" / "games" / "1.0.0" / ".shard-left").write_bytes(b"of a run that was killed")
    again = begin(tmp_path / "set")
    assert (again.missing("train"), again.missing("test")) == ([1], [])
    with pytest.raises(UserError, match=r"set: shards \[1\] of 'train' are missing: run the same"):
        again.finish(expected=LENGTHS)
    with pytest.raises(UserError, match="not finished"):
        open_games(tmp_path / "set")
    again.write("train", 1, [{"games": r} for r in records(1, 1)])
    again.finish(expected=LENGTHS)
    assert len(open_games(tmp_path / "set").turns("train")) == 15
    assert not list((tmp_path / "set").rglob(".shard-*"))
    with pytest.raises(UserError, match="already there"):
        begin(tmp_path / "set")


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"info": dataclasses.replace(INFO, fps=9)}, "set.fps was 8, is 9"),
        ({"shards": {"train": 2, "test": 1}}, "shards.train was 3, is 2"),
        ({"fingerprint": {"films": {"a": 1, "b": 3}}}, "fingerprint.films.b was 2, is 3"),
        ({"fingerprint": {"films": {"a": 1, "b": 2}, "c": 4}}, "fingerprint.c was 'absent', is 4"),
    ],
)
def test_another_set_was_begun_there(tmp_path, changes, reported):
    begin(tmp_path / "set")
    with pytest.raises(UserError, match="another dataset was begun here") as caught:
        begin(tmp_path / "set", **changes)
    assert reported in str(caught.value)


def test_a_damaged_plan_and_a_damaged_shard(tmp_path):
    written = begin(tmp_path / "set")
    fill(written)
    shard = next((tmp_path / "set").rglob("*train*-00001-of-*"))
    shard.write_bytes(b"no records")
    with pytest.raises(UserError, match=r"00001-of-00003: cannot be read: .*: delete it"):
        written.finish(expected=LENGTHS)
    (tmp_path / "set" / "unfinished.json").write_text("{")
    with pytest.raises(UserError, match=r"unfinished.json: not valid JSON: .*: delete the folder"):
        begin(tmp_path / "set")


def test_a_split_without_turns(tmp_path):
    written = begin(tmp_path / "set", shards={"train": 1, "test": 1})
    written.write("train", 0, [{"games": r} for r in records(0, 1)])
    written.write("test", 0, [])
    with pytest.raises(UserError, match="the split 'test' would hold no turns"):
        written.finish(expected={"train": [5], "test": [0]})
    assert not (tmp_path / "set" / INFO_FILE).exists()


def test_turns_that_are_not_those_expected(tmp_path):
    written = begin(tmp_path / "set")
    fill(written)
    with pytest.raises(
        UserError, match=r"the split 'train': expected 6 turns in shard 2, found 5: remove the"
    ):
        written.finish(expected={"train": [5, 5, 6], "test": [5]})
    assert not (tmp_path / "set" / INFO_FILE).exists()


def test_a_shard_of_another_number_of_turns_is_not_written(tmp_path):
    written = begin(tmp_path / "set")
    with pytest.raises(UserError, match="shard 1 of 'train': expected 6 turns, found 5: remove"):
        written.write("train", 1, [{"games": r} for r in records(0, 1)], expected=6)
    assert list((tmp_path / "set").rglob("*array_record*")) == []


def test_shards_in_a_bucket_are_not_read_to_be_counted(tmp_path, monkeypatch):
    written = begin(tmp_path / "set")
    fill(written)
    monkeypatch.setattr(shards, "is_bucket", lambda path: True)
    monkeypatch.setattr(shards, "ArrayRecordReader", None)
    written.finish(expected=LENGTHS)
    monkeypatch.undo()
    assert len(open_games(tmp_path / "set").turns("train")) == 15


@pytest.mark.parametrize(
    ("turns", "size"),
    [(0, 256), (20_000, 256), (2**19, 256), (2_000_000, 1024), (200_000_000, 8192)],
)
def test_shards_follow_the_set_s_size(turns, size):
    assert shard_size_for(turns) == size


def test_a_disk_that_refuses(tmp_path):
    written = begin(tmp_path / "set")
    (tmp_path / "set" / "games" / "1.0.0").rmdir()
    with pytest.raises(UserError, match=r"set: cannot be written: No such file or directory: free"):
        fill(written)


def test_ranges():
    assert shard_ranges(7, size=3) == [range(3), range(3, 6), range(6, 7)]
    assert shard_ranges(0, size=3) == []
    assert np.concatenate(shard_ranges(6, size=3)).tolist() == list(range(6))


def test_the_digest_of_a_folder(tmp_path):
    """Names, sizes and both ends count; the folder's path does not."""
    folder = tmp_path / "one"
    (folder / "d").mkdir(parents=True)
    (folder / "small").write_bytes(b"1234")
    (folder / "d" / "large").write_bytes(bytes(100))
    shutil.copytree(folder, tmp_path / "two")
    before = folder_digest(folder, ends=8)
    assert folder_digest(tmp_path / "two", ends=8) == before
    for name, content in (
        ("small", b"1235"),
        ("d/large", bytes(101)),
        ("d/large", b"x" + bytes(99)),
        ("d/large", bytes(99) + b"x"),
        ("d/more", b""),
    ):
        shutil.copytree(folder, tmp_path / "three")
        (tmp_path / "three" / name).write_bytes(content)
        assert folder_digest(tmp_path / "three", ends=8) != before
        shutil.rmtree(tmp_path / "three")
