"""The toy world as a game dataset: games drawn, rendered and measured by several processes."""

import contextlib
import dataclasses
import functools
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np

from animegamer_jax.data.datasets import DatasetInfo, Part, Record
from animegamer_jax.data.shards import write_dataset
from animegamer_jax.errors import UserError, check_at_least
from animegamer_jax.media.motion import motion_value
from animegamer_jax.media.video import FRAMES_PER_SECOND, encode_lossless_mp4
from animegamer_jax.progress import Progress, no_progress, track
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import MOTION_EDGES, NUM_FRAMES
from animegamer_jax.toy.vocabulary import write_detailed_captions, write_tokenizer
from animegamer_jax.toy.world import PROTOCOL, SPLITS, Split, make_game

FILM = "toy"
_MAX_GAMES = 2**24
_NUM_SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySize:
    """Numbers of games and their sizes.

    Attributes:
        games: Number of games in the training split.
        test_games: Number of games in each held-out split.
        turns: Number of turns in a game.
        height, width: Pixels of a frame.
    """

    games: int = 2000
    test_games: int = 100
    turns: int = 5
    height: int = 96
    width: int = 144

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_at_least(field.name, getattr(self, field.name), 1)
        if max(self.games, self.test_games) > _MAX_GAMES:
            raise UserError(f"a split has at most {_MAX_GAMES} games: ask for fewer")

    def num_games(self, split: Split) -> int:
        return self.games if split == "train" else self.test_games


def game_number(number: int, *, split: Split, seed: int) -> int:
    """Returns the seed of a game, unique over all splits and dataset seeds."""
    return (seed * len(SPLITS) + SPLITS.index(split)) * _MAX_GAMES + number


def make_records(number: int, *, split: Split, size: ToySize, seed: int) -> list[Record]:
    """Returns the turns of one game, which depend on the arguments alone."""
    cv2.setNumThreads(1)
    game = game_number(number, split=split, seed=seed)
    rng = np.random.default_rng(game)
    turns = make_game(game, num_turns=size.turns, split=split)
    records = []
    for index, turn in enumerate(turns):
        scene = turn.scene
        frames = render(scene, height=size.height, width=size.width)
        records.append(
            {
                "film": FILM,
                "game": game,
                "turn": index,
                "num_turns": len(turns),
                "instruction": turn.instruction,
                "is_open": int(turn.is_open),
                "motion_text": turn.motion_text,
                "captions": [turn.caption, *write_detailed_captions(scene, rng)],
                "character": scene.character,
                "motion": scene.motion,
                "place": scene.place,
                "time": scene.time,
                "motion_level": scene.level,
                "motion_value": motion_value(frames),
                "social": turn.social,
                "entertainment": turn.entertainment,
                "stamina": turn.stamina,
                "clip": encode_lossless_mp4(frames),
            }
        )
    return records


def write_toy_games(
    path: str,
    size: ToySize,
    *,
    seed: int = 0,
    processes: int = 1,
    on_progress: Progress = no_progress,
) -> DatasetInfo:
    """Writes a game dataset; the records do not depend on the number of processes.

    Args:
        path: Folder to write, which must not exist.
        size: Numbers of games and their sizes.
        seed: Seed of all games, below 2**32.
        processes: Number of rendering processes.
        on_progress: Called with the split, the number of finished games and the total.

    Raises:
        UserError: The folder exists, the disk is full or read-only, or a number is out of range.
    """
    if not 0 <= seed < _NUM_SEEDS:
        raise UserError(f"seed {seed}: expected a number from 0 to {_NUM_SEEDS - 1}")
    check_at_least("processes", processes, 1)
    info = DatasetInfo(
        kind="games",
        made_by="animegamer data toyworld",
        seed=seed,
        num_frames=NUM_FRAMES,
        height=size.height,
        width=size.width,
        fps=FRAMES_PER_SECOND,
        protocol=PROTOCOL,
        motion_edges=MOTION_EDGES,
        splits={},
    )
    with _open_map(processes) as mapped, tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))

        def records(split: Split) -> Iterator[dict[Part, Record]]:
            make = functools.partial(make_records, split=split, size=size, seed=seed)
            total = size.num_games(split)
            for game in track(
                mapped(make, range(total)), on_progress, f"{split} games", total=total
            ):
                for turn in game:
                    yield {"games": turn}

        splits = {split: functools.partial(records, split) for split in SPLITS}
        return write_dataset(path, info, splits=splits, tokenizer=tokenizer)


@contextlib.contextmanager
def _open_map(processes: int) -> Iterator[Callable[..., Iterator[list[Record]]]]:
    """Opens a `map` that keeps the order, in this process or in several new ones."""
    if processes == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_leave_interrupts_to_parent) as pool:
        yield functools.partial(pool.imap, chunksize=2)


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
