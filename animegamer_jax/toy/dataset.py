"""The toy world as a games set: games drawn, rendered and measured by several processes."""

import contextlib
import dataclasses
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import cv2
import numpy as np

from animegamer_jax.data.datasets import (
    Record,
    SetInfo,
    write_set,
)
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import motion_value
from animegamer_jax.media.video import FRAMES_PER_SECOND, encode_lossless_mp4
from animegamer_jax.progress import Progress, no_progress, track
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.world import (
    MOTION_EDGES,
    NUM_FRAMES,
    PROTOCOL,
    SPLITS,
    Scene,
    Split,
    make_game,
    partial_captions,
)

FILM = "toy"
_GAMES_A_SPLIT = 2**24
_SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySize:
    """How many games of what size.

    Attributes:
        games: of the training split.
        test_games: of each held-out split.
        turns: of a game.
        height, width: of a frame.
    """

    games: int = 2000
    test_games: int = 100
    turns: int = 5
    height: int = 48
    width: int = 72

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise UserError(f"{field.name} {value}: expected 1 or more")
        if max(self.games, self.test_games) > _GAMES_A_SPLIT:
            raise UserError(f"a split has at most {_GAMES_A_SPLIT} games: ask for fewer")

    def num_games(self, split: Split) -> int:
        return self.games if split == "train" else self.test_games


def game_number(number: int, *, split: Split, seed: int) -> int:
    """The seed of a game: no two games of any splits and any set seeds share one."""
    return (seed * len(SPLITS) + SPLITS.index(split)) * _GAMES_A_SPLIT + number


class _Shown(NamedTuple):
    """What every turn with the same scene shares."""

    clip: bytes
    motion_value: float


@functools.lru_cache(maxsize=8192)
def _shown(scene: Scene, *, height: int, width: int) -> _Shown:
    """A scene's clip and what moves in it; games show a scene more than once."""
    frames = render(scene, height=height, width=width)
    return _Shown(encode_lossless_mp4(frames), motion_value(frames))


def make_records(number: int, *, split: Split, size: ToySize, seed: int) -> list[Record]:
    """The turns of one game, a function of the arguments alone."""
    cv2.setNumThreads(1)
    game = game_number(number, split=split, seed=seed)
    rng = np.random.default_rng(game)
    turns = make_game(game, num_turns=size.turns, split=split)
    records = []
    for index, turn in enumerate(turns):
        scene = turn.scene
        shown = _shown(scene, height=size.height, width=size.width)
        records.append(
            {
                "film": FILM,
                "game": game,
                "turn": index,
                "num_turns": len(turns),
                "instruction": turn.instruction,
                "is_open": int(turn.is_open),
                "motion_text": turn.motion_text,
                "captions": [turn.caption, *partial_captions(turn, rng)],
                "character": scene.character,
                "motion": scene.motion,
                "place": scene.place,
                "time": scene.time,
                "motion_level": scene.level,
                "motion_value": shown.motion_value,
                "social": turn.social,
                "entertainment": turn.entertainment,
                "stamina": turn.stamina,
                "clip": shown.clip,
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
) -> SetInfo:
    """Writes a games set; the same records whatever the number of processes.

    Args:
        path: must be free.
        size: how many games of what size.
        seed: of all games, below 2**32.
        processes: that render.
        on_progress: Called with the split, the number of finished games and the total.

    Raises:
        UserError: the place is taken, the disk refuses, or a number is out of range.
    """
    if not 0 <= seed < _SEEDS:
        raise UserError(f"seed {seed}: expected a number from 0 to {_SEEDS - 1}")
    if processes < 1:
        raise UserError(f"processes {processes}: expected 1 or more")
    info = SetInfo(
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
    with _mapping(processes) as mapped:

        def records(split: Split) -> Iterator[Record]:
            make = functools.partial(make_records, split=split, size=size, seed=seed)
            total = size.num_games(split)
            for game in track(
                mapped(make, range(total)), on_progress, f"{split} games", total=total
            ):
                yield from game

        splits = {split: functools.partial(records, split) for split in SPLITS}
        return write_set(path, info, parts={"games": splits})


@contextlib.contextmanager
def _mapping(processes: int) -> Iterator[Callable[..., Iterator[list[Record]]]]:
    """A `map` that keeps the order, in this process or in several new ones."""
    if processes == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_leave_interrupts_to_parent) as pool:
        yield functools.partial(pool.imap, chunksize=2)


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
