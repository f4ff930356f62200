"""Systems that play a benchmark: models that play here, and games that were played elsewhere.

Every game is a folder as `animegamer play` writes it, with `values.json` beside its turns: the
value of each metric a turn, and all that they depend on. A game that is there whole, made the same
way, is not played again, so an evaluation that was stopped goes on.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from animegamer_jax.bundle.config import to_json
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, BenchmarkGame
from animegamer_jax.evaluate.metrics.scorers import (
    NUM_FRAMES,
    Answers,
    Clips,
)
from animegamer_jax.evaluate.metrics.suite import FrameSize, Scoring
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved_game import (
    GAME_FILE,
    Game,
    Turn,
)
from animegamer_jax.media.video import measure_mp4, read_mp4
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling

VALUES_FILE = "values.json"

OnTurn = Callable[[int, int], None]
Values = dict[str, Float32[np.ndarray, "g t"]]
_Scored = dict[str, dict[str, list[Any]]]
"""A game's "values" by metric, a number or None a turn, and its "features", a vector a turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A system's games.

    Attributes:
        folders: of each game.
        values: by metric; NaN where there is none.
        set_scores: of metrics of all clips together.
        kept: games that were there already.
    """

    folders: tuple[Path, ...]
    values: Values
    set_scores: Mapping[str, float]
    kept: int


def game_digest(game: BenchmarkGame) -> str:
    """Of all that is asked and expected in a game."""
    return hashlib.sha256(json.dumps(to_json(game), sort_keys=True).encode()).hexdigest()[:16]


def benchmark_digest(benchmark: Benchmark) -> str:
    """Of all games."""
    digests = "".join(map(game_digest, benchmark.games))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


# Playing here


def play_system(
    player: Player,
    benchmark: Benchmark,
    scoring: Scoring,
    *,
    home: Path,
    name: str,
    settings: Mapping[str, Any],
    batch_size: int,
    on_turn: OnTurn = lambda done, total: None,
) -> Played:
    """Plays the games that are not there yet, and scores each turn as it is played.

    Args:
        player: of the model.
        benchmark: what to play.
        scoring: of the player's size of frames.
        home: folder of the games' folders; what lies there under a game's name and is another
            game is written anew.
        name: of the model, in the saved games.
        settings: all that the games depend on: model, window, steps, number format.
        batch_size: games side by side; the last batch is filled up with its own games, so that
            nothing is compiled twice.
        on_turn: called with the turns played and their number.

    Raises:
        UserError: an instruction is too long for the model (`check_instructions` tells before), or
            the disk refuses.
        NonFiniteError: a network's answer is not finite.
    """
    folders = [home / _safe(game.id) for game in benchmark.games]
    made = [_made(game, scoring, settings) for game in benchmark.games]
    kept = [_read_kept(*pair, benchmark.num_turns) for pair in zip(folders, made, strict=True)]
    todo = [index for index, found in enumerate(kept) if found is None]
    turns = benchmark.num_turns
    batch_size = min(batch_size, max(1, len(todo)))
    for start in range(0, len(todo), batch_size):
        rows = todo[start : start + batch_size]
        batch = _Batch(player, benchmark, rows, size=batch_size, first=start == 0)
        batch.begin([folders[row] for row in rows], name=name)
        for turn in range(turns):
            batch.play(turn, scoring)
            on_turn(start * turns + (turn + 1) * len(rows), len(todo) * turns)
        for row, found in zip(rows, batch.scored, strict=True):
            kept[row] = found
            _write_kept(folders[row], made[row], found)
    there = [found for found in kept if found is not None]
    return _played(folders, there, scoring, turns, kept=len(folders) - len(todo))


class _Batch:
    """Games that are played side by side.

    Args:
        player: of the model.
        benchmark: of the games.
        rows: which of its games.
        size: games that are played: the rows, repeated until there are so many.
        first: its first turn compiles, and tells nothing of the speed.
    """

    def __init__(
        self, player: Player, benchmark: Benchmark, rows: Sequence[int], *, size: int, first: bool
    ):
        self._player, self._rows, self._first = player, np.array(rows), first
        self._games = [benchmark.games[row] for row in np.resize(self._rows, size).tolist()]
        self._seeds = [game.seed for game in self._games]
        self._saved: list[Game] = []
        self._window = player.start(size)
        self.scored: list[_Scored] = [_nothing() for _ in rows]

    def begin(self, folders: Sequence[Path], *, name: str) -> None:
        """Makes the games' folders; what lies there goes."""
        player = self._player
        for folder, seed in zip(folders, self._seeds, strict=False):
            if (folder / GAME_FILE).exists() or (folder / VALUES_FILE).exists():
                shutil.rmtree(folder)
            self._saved.append(
                Game.create(
                    folder,
                    model=name,
                    seed=seed,
                    window=player.window,
                    steps=player.steps,
                    protocol=player.protocol.name,
                )
            )

    def play(self, turn: int, scoring: Scoring) -> None:
        """Plays, scores and saves the next turn, which has this number from 0."""
        asked = [game.turns[turn] for game in self._games]
        self._window, output = self._player.play_turn(
            self._window, [one.instruction for one in asked], seeds=self._seeds, turn=turn + 1
        )
        count, seconds = len(self._rows), output.seconds["total"] / len(asked)
        answers = Answers(
            turns=asked[:count],
            clips=output.frames[:count, :NUM_FRAMES],
            told=output.states[:count].astype(np.int64),
            seconds=np.full(count, np.nan if self._first and turn == 0 else seconds),
            truth=scoring.true_clips(self._rows, turn),
        )
        _add(self.scored, scoring, answers)
        output = output._replace(seconds={"total": seconds})
        for row, game in enumerate(self._saved):
            with telling(game.folder, "cannot be written", mend="make room there, then again"):
                game.add(output.row(row), asked[row].instruction)


def check_instructions(benchmark: Benchmark, check: Callable[[str], object]) -> None:
    """Makes sure that a model can read every instruction, before anything is played.

    Raises:
        UserError: names game and turn.
    """
    for game in benchmark.games:
        for number, turn in enumerate(game.turns, start=1):
            try:
                check(turn.instruction)
            except UserError as error:
                raise UserError(
                    f"benchmark {benchmark.name}: game {game.id}: turn {number}: {error}"
                ) from None


def _safe(name: str) -> str:
    """A game's name as a folder's."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".")[:80]
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


# Games from elsewhere


def read_system(
    home: Path,
    benchmark: Benchmark,
    make_scoring: Callable[[FrameSize], Scoring],
    *,
    on_turn: OnTurn = lambda done, total: None,
) -> tuple[Played, Scoring]:
    """Scores games that `animegamer play` wrote, or another program in its form.

    Args:
        home: with a folder a game, by its id.
        benchmark: what was played.
        make_scoring: scorers for the clips' size, which is that of the first clip.
        on_turn: called with the turns scored and their number.

    Raises:
        UserError: a game is missing or damaged, is not the benchmark's, or has clips of another
            size than the first.
    """
    folders = [home / _safe(game.id) for game in benchmark.games]
    games = [_open(*pair) for pair in zip(folders, benchmark.games, strict=True)]
    first = folders[0] / games[0][0].clip
    height, width, frames = measure_mp4(first)
    scoring = make_scoring(FrameSize(frames, height, width))
    total = len(games) * benchmark.num_turns
    scored: list[_Scored] = [_nothing() for _ in games]
    for row, (folder, turns, game) in enumerate(zip(folders, games, benchmark.games, strict=True)):
        for number, (turn, asked) in enumerate(zip(turns, game.turns, strict=True)):
            clip = read_mp4(folder / turn.clip)
            if clip.shape[:3] != (frames, height, width):
                raise UserError(
                    f"{folder / turn.clip}: expected {frames} frames of {height} x {width}, as "
                    f"{first} has, found {clip.shape[0]} of {clip.shape[1]} x {clip.shape[2]}"
                )
            told = [turn.motion_level, turn.social, turn.entertainment, turn.stamina]
            answers = Answers(
                turns=[asked],
                clips=clip[None, :NUM_FRAMES],
                told=np.array([told]),
                seconds=np.array([turn.seconds["total"]]) if "total" in turn.seconds else None,
                truth=scoring.true_clips(np.array([row]), number),
            )
            _add(scored[row : row + 1], scoring, answers)
            on_turn(row * benchmark.num_turns + number + 1, total)
    return _played(folders, scored, scoring, benchmark.num_turns, kept=len(games)), scoring


def _open(folder: Path, game: BenchmarkGame) -> list[Turn]:
    turns = Game.load(folder).turns
    if len(turns) < len(game.turns):
        raise UserError(
            f"{folder}: expected {len(game.turns)} turns, as in the benchmark, found {len(turns)}"
        )
    turns = turns[: len(game.turns)]
    for turn, asked in zip(turns, game.turns, strict=True):
        if turn.instruction != asked.instruction:
            raise UserError(
                f"{folder}: turn {turn.turn}: expected the benchmark's instruction "
                f"{asked.instruction!a:.60}, found {turn.instruction!a:.60}"
            )
    return turns


# What to read scores by


def clip_values(clips: Callable[[int], Clips], benchmark: Benchmark, scoring: Scoring) -> Values:
    """The values that other clips would have in the place of the system's.

    Args:
        clips: of every game, at a turn, from 0.
        benchmark: whose expectations they are held to.
        scoring: the system's.
    """
    scored = [_nothing() for _ in benchmark.games]
    everyone = np.arange(len(benchmark.games))
    for turn in range(benchmark.num_turns):
        answers = Answers(
            turns=[game.turns[turn] for game in benchmark.games],
            clips=clips(turn)[:, :NUM_FRAMES],
            truth=scoring.true_clips(everyone, turn),
        )
        _add(scored, scoring, answers)
    return _stacked(scored, benchmark.num_turns)


# Values


def _nothing() -> _Scored:
    return {"values": {}, "features": {}}


def _add(scored: Sequence[_Scored], scoring: Scoring, answers: Answers) -> None:
    """Appends one turn's values to each game's."""
    for scorer in scoring.scorers:
        for metric, found in scorer(answers).items():
            for game, value in zip(scored, found.tolist(), strict=True):
                kept = value if np.isfinite(value) else None
                game["values"].setdefault(metric, []).append(kept)
    for scorer in scoring.set_scorers:
        for game, vector in zip(scored, scorer.features(answers.clips), strict=True):
            game["features"].setdefault(scorer.metric, []).append(vector.tolist())


def _played(
    folders: Sequence[Path],
    scored: Sequence[_Scored],
    scoring: Scoring,
    num_turns: int,
    *,
    kept: int,
) -> Played:
    return Played(
        folders=tuple(folders),
        values=_stacked(scored, num_turns),
        set_scores=_set_scores(scored, scoring),
        kept=kept,
    )


def _set_scores(scored: Sequence[_Scored], scoring: Scoring) -> dict[str, float]:
    """NaN where there are too few clips for a distance."""
    found = {}
    for scorer in scoring.set_scorers:
        features = np.concatenate([np.array(game["features"][scorer.metric]) for game in scored])
        try:
            found[scorer.metric] = scorer.distance(features, scorer.reference)
        except UserError as error:
            print(f"{scorer.metric}: {error}", file=sys.stderr)
            found[scorer.metric] = float("nan")
    return found


def _stacked(scored: Sequence[_Scored], num_turns: int) -> Values:
    names = {name for game in scored for name in game["values"]}
    found: Values = {}
    for name in names:
        rows = [game["values"].get(name, [None] * num_turns) for game in scored]
        numbers = [[np.nan if value is None else value for value in row] for row in rows]
        found[name] = np.array(numbers).astype(np.float32)
    return found


def _made(game: BenchmarkGame, scoring: Scoring, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"game": game_digest(game), "settings": to_json(settings), "scorers": scoring.made}


def _read_kept(folder: Path, made: Mapping[str, Any], num_turns: int) -> _Scored | None:
    """A game's values, if they and its clips are there and made the same way."""
    try:
        content = json.loads((folder / VALUES_FILE).read_text())
        if content["made"] != made:
            return None
        if len(Game.load(folder).turns) != num_turns:
            return None
        return {"values": content["values"], "features": content["features"]}
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


def _write_kept(folder: Path, made: Mapping[str, Any], scored: _Scored) -> None:
    content = {"made": made, **scored, "date": time.strftime("%Y-%m-%d")}
    path = folder / VALUES_FILE
    with telling(path, "cannot be written", mend="make room there, then again"):
        write_whole(path, (json.dumps(content, allow_nan=False) + "\n").encode())
