"""Datasets on disk: order, random access, whole or not there, and what is refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tiny_sets import (
    FEATURES_INFO,
    INFO,
    features_of,
    frames_of,
    turns_of,
    write_features_set,
    write_games,
)

from animegamer_jax.data.datasets import (
    VERSION,
    Record,
    open_features,
    open_games,
    read_info,
)
from animegamer_jax.data.shards import write_dataset
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import motion_value
from animegamer_jax.media.video import (
    decode_mp4,
    encode_lossless_mp4,
    read_mp4,
)
from animegamer_jax.toy import command
from animegamer_jax.toy.dataset import (
    ToySize,
    game_number,
    write_toy_games,
)
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.world import PROTOCOL, SPLITS, make_game


@pytest.fixture(scope="module")
def games_path(tmp_path_factory):
    return write_games(tmp_path_factory.mktemp("sets") / "games", {"train": 4, "test": 2})


@pytest.fixture(scope="module")
def features_path(tmp_path_factory):
    return write_features_set(tmp_path_factory.mktemp("sets") / "features", 4)


def equal(record: Record, expected: Record) -> bool:
    return record.keys() == expected.keys() and all(
        np.array_equal(record[k], expected[k]) for k in expected
    )


def test_turns_come_back_in_order_and_at_random(games_path):
    games = open_games(games_path)
    assert games.info == dataclasses.replace(INFO, splits={"train": 20, "test": 10})
    turns, written = games.turns("train"), list(turns_of(4))
    assert len(turns) == 20
    for number in (*range(20), 3, 17, 4):
        record = turns[number]
        assert np.array_equal(decode_mp4(record.pop("clip")), frames_of(written[number]))
        assert equal(record, written[number])
    assert games.turns("test")[9]["game"] == 5


def test_features_come_back_as_they_were(features_path):
    features = open_features(features_path)
    assert features.info == dataclasses.replace(FEATURES_INFO, splits={"train": 20})
    turns, latents = features.turns("train"), features.latents("train")
    assert len(turns) == len(latents) == 20
    for number, written in enumerate(turns_of(4)):
        expected = features_of(written)
        moments = expected.pop("moments")
        assert equal(turns[number], {**written, **expected})
        place = {name: written[name] for name in ("game", "turn", "num_turns")}
        assert equal(latents[number], {**place, "moments": moments})
        assert turns[number]["text_features"].dtype == np.float16


def test_other_programs_read_the_records(games_path):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(games_path / "games" / VERSION)
    assert builder.info.splits["train"].num_examples == 20
    assert builder.info.metadata["protocol"]["name"] == "paper"


# Whole or not there


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_build_leaves_nothing(tmp_path, error):
    def records():
        yield from ({"games": {**turn, "clip": b""}} for turn in turns_of(2))
        raise error

    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_dataset(tmp_path / "set", INFO, splits={"train": records})
    assert not list(tmp_path.iterdir())
    if expected is UserError:
        assert str(caught.value).endswith(
            "set: cannot be written: No space left on device: free space or choose another place, "
            "then run the same command again"
        )


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tiny_sets import write_games
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # truncated without a word: other processes read it
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
write_games(Path(sys.argv[1]), {"train": 10})
"""


def test_a_disk_that_is_full_is_reported_and_nothing_is_left(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "set")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr.endswith(
        "set: cannot be written: File too large: free space or choose another place, then run the "
        "same command again\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_taken_place_is_refused_and_an_empty_folder_is_not(games_path, tmp_path):
    before = read_info(games_path)
    with pytest.raises(UserError, match="already there: a complete dataset: use it"):
        write_games(games_path, {"train": 1})
    assert read_info(games_path) == before
    (tmp_path / "new").mkdir()
    write_games(tmp_path / "new", {"train": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert len(open_games(tmp_path / "new").turns("train")) == 5


def test_no_records_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"the split 'train': no records to write"):
        write_games(tmp_path / "set", {"train": 0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost", [0, 2, 4, 5, 7, 9])
def test_torn_games_are_refused(tmp_path, lost):
    turns = [{"games": {**turn, "clip": b""}} for turn in turns_of(2)]
    del turns[lost]
    with pytest.raises(ValueError, match=r"game, turn, number of turns"):
        write_dataset(tmp_path / "set", INFO, splits={"train": lambda: turns})


# Opening


def refusal(path, read=open_games) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_set(tmp_path, games_path, features_path):
    assert f"{tmp_path}: not a dataset: expected a folder with set.json" in refusal(tmp_path)
    assert "not a dataset" in refusal(tmp_path / "absent")
    found = refusal(features_path)
    assert "expected a dataset of games, found one of features" in found
    assert "animegamer data toyworld` or `animegamer data games` made" in found
    assert "expected a dataset of features, found one of games" in refusal(
        games_path, open_features
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"layout": 99}', "layout: expected 1, found 99"),
        ("[]", "set.json: expected an object, found []"),
        ("{", "not valid JSON"),
        ('{"layout": 1}', "set.json: kind: missing"),
    ],
)
def test_another_description(tmp_path, content, message):
    (tmp_path / "set.json").write_text(content)
    assert message in refusal(tmp_path)


def test_a_split_that_is_not_there_or_empty(games_path):
    games = open_games(games_path)
    with pytest.raises(UserError, match=r"split 'dev': expected one of: train \(20\), test \(10\)"):
        games.turns("dev")
    empty = dataclasses.replace(
        games, info=dataclasses.replace(games.info, splits={"train": 20, "test": 0})
    )
    with pytest.raises(UserError, match="no records in the split 'test'"):
        empty.turns("test")


def test_remembered_records_are_read_once(features_path):
    records = open_features(features_path).turns("train")
    size = sum(value.nbytes for value in records[0].values() if isinstance(value, np.ndarray))
    kept = records.cached(2 * size)
    read, calls = kept._read, []
    kept._read = lambda index: [calls.append(index), read(index)][1]
    for index in (3, 1, 3, 2, 1, 2):
        found, expected = kept[index], records[index]
        assert found.keys() == expected.keys()
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name])
        found["motion_text"] = "another"  # a reader's own
    assert calls == [3, 1, 2, 2]  # there is room for two
    with pytest.raises(IndexError):
        kept[len(records)]


def test_records_are_a_sequence(games_path):
    turns = open_games(games_path).turns("test")
    assert [(r["game"], r["turn"]) for r in turns] == [
        (turns[i]["game"], turns[i]["turn"]) for i in range(10)
    ]
    with pytest.raises(IndexError, match="record 10: expected a number from 0 to 9"):
        turns[10]


@pytest.fixture
def copy(games_path, tmp_path):
    return shutil.copytree(games_path, tmp_path / "copy")


def shard(path):
    return next(path.glob("games/*/games-train.*"))


@pytest.mark.parametrize("damage", ["missing", "cut", "scratched", "no TFDS", "no field"])
def test_damaged_files_are_reported(copy, damage):
    file = shard(copy)
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 3])
    elif damage == "scratched":
        file.write_bytes(bytes(b ^ 0x5A for b in content))
    elif damage == "no field":
        features = file.parent / "features.json"
        described = json.loads(features.read_text())
        del described["featuresDict"]["features"]["game"]
        features.write_text(json.dumps(described))
    else:
        (file.parent / "dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"\(train\): cannot be read: .*copy the dataset again"):
        open_games(copy).turns("train")[0]


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_a_description_that_is_a_device_is_not_read(copy, name):
    """`/dev/zero` would never end."""
    file = shard(copy).parent / name
    file.unlink()
    file.symlink_to("/dev/null")
    with pytest.raises(UserError, match=f"{name}: expected a file, found a device"):
        open_games(copy).turns("train")


def test_a_set_of_another_length_than_it_says(copy):
    content = json.loads((copy / "set.json").read_text())
    content["splits"]["train"] = 25
    (copy / "set.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="expected 25 records, found 20"):
        open_games(copy).turns("train")


# Lossless clips


@pytest.mark.parametrize("size", [(16, 24), (17, 23), (1, 1)])
def test_lossless_clips_come_back_exactly(size, tmp_path):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (5, *size, 3), dtype=np.uint8)
    clip = encode_lossless_mp4(frames)
    assert encode_lossless_mp4(frames.copy()) == clip
    assert np.array_equal(decode_mp4(clip), frames)
    assert np.array_equal(decode_mp4(clip, num_frames=2), frames[:2])
    (tmp_path / "clip.mp4").write_bytes(clip)
    assert np.array_equal(read_mp4(tmp_path / "clip.mp4"), frames)


def test_bytes_that_are_no_clip():
    with pytest.raises(UserError, match="game 3: expected a video, found"):
        decode_mp4(b"not a clip" * 100, name="game 3")


# The toy world's games

SIZE = ToySize(games=2, test_games=1, turns=2, height=24, width=36)


@pytest.fixture(scope="module")
def toy_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy"
    write_toy_games(str(path), SIZE, seed=3)
    return path


def test_toy_games_are_those_of_the_toy_world(toy_path):
    games = open_games(toy_path)
    held_out = dict.fromkeys(("test", "combinations", "phrasings", "own"), 2)
    assert games.info.splits == {"train": 4, **held_out}
    assert games.info.protocol == PROTOCOL
    assert (games.info.height, games.info.width, games.info.num_frames) == (24, 36, 17)
    turns = games.turns("train")
    number = game_number(1, split="train", seed=3)
    for turn, truth in enumerate(make_game(number, num_turns=2, split="train")):
        record = turns[2 + turn]
        frames = render(truth.scene, height=24, width=36)
        assert (record["game"], record["turn"], record["num_turns"]) == (number, turn, 2)
        assert record["instruction"] == truth.instruction
        assert record["captions"][0] == truth.caption
        assert len(record["captions"]) > 1
        assert record["motion_level"] == truth.scene.level
        assert (record["social"], record["stamina"]) == (truth.social, truth.stamina)
        assert np.array_equal(decode_mp4(record["clip"]), frames)
        assert record["motion_value"] == pytest.approx(motion_value(frames), rel=1e-5)


def test_the_command_writes_the_same_bytes_twice(tmp_path):
    """Also in other processes, where sets of texts have another order."""
    size = {"games": 2, "test_games": 1, "turns": 2, "height": 16, "width": 24, "films": 1}
    here, there = tmp_path / "here", tmp_path / "there"
    assert command.toyworld(out=here, seed=3, processes=1, **size) == 0
    words = [f"--{name.replace('_', '-')}={value}" for name, value in size.items()]
    words += ["--seed=3", "--processes=2", f"--out={there}"]
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-m", "animegamer_jax.cli", "data", "toyworld", *words],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"},
        check=True,
    )
    found, again = (
        {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
        for out in (here, there)
    )
    assert {"set.json", "films/film_001.mp4", "films/film_001.json"} <= found.keys()
    assert sum("array_record" in name for name in found) == len(SPLITS)
    assert found == again


def test_no_two_games_share_a_seed():
    numbers = {
        game_number(n, split=split, seed=seed)
        for n in (0, 1, 2**24 - 1)
        for split in SPLITS
        for seed in (0, 1, 2**32 - 1)
    }
    assert len(numbers) == 3 * len(SPLITS) * 3
    assert max(numbers) < 2**63


def test_the_command_says_what_it_made(tmp_path, capsys):
    out = tmp_path / "toy"
    status = command.toyworld(
        out=out, games=1, test_games=1, turns=1, height=16, width=24, processes=1, films=1
    )
    reported = capsys.readouterr()
    assert status == 0
    assert f"{out}: 5 turns (train 1, test 1, combinations 1, phrasings 1, own 1)" in reported.out
    assert "train games: 1 of 1" in reported.err
    assert read_mp4(out / "films" / "film_001.mp4").shape[1:] == (16, 24, 3)
    assert (out / "films" / "film_001.json").is_file()
    with pytest.raises(UserError, match="already there"):
        command.toyworld(out=out, games=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"games": 0}, "games 0: expected 1 or more"),
        ({"height": -1}, "height -1: expected 1 or more"),
        ({"games": 2**25}, "at most 16777216 games"),
        ({"seed": -1}, "seed -1: expected a number from 0"),
        ({"processes": 0}, "processes 0: expected 1 or more"),
        ({"films": -1}, "films -1: expected 0 or more"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        command.toyworld(out=tmp_path / "toy", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("games", "given", "test_games"), [(12, None, 4), (70, None, 7), (5000, None, 100), (12, 1, 1)]
)
def test_held_out_games_suit_the_training_games(monkeypatch, tmp_path, games, given, test_games):
    drawn = []

    def write(path, size, **options):
        drawn.append((size.games, size.test_games))
        raise UserError("enough")

    monkeypatch.setattr("animegamer_jax.toy.dataset.write_toy_games", write)
    with pytest.raises(UserError, match="enough"):
        command.toyworld(out=tmp_path / "toy", games=games, test_games=given)
    assert drawn == [(games, test_games)]
