"""Plays and scores a benchmark's games: with a model here, or games that were played elsewhere.

Every game is a folder as `animegamer play` writes it, with a file `values.json`: the
value of each metric per turn, and the fingerprint of everything they depend on. A complete game
with the same fingerprint is not played again, so an interrupted evaluation continues.
"""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark, BenchmarkGame
from animegamer_jax.evaluate.metrics.details import with_details
from animegamer_jax.evaluate.metrics.scorers import NUM_FRAMES, Answers, Clips
from animegamer_jax.evaluate.metrics.suite import MetricSuite
from animegamer_jax.evaluate.worlds import FrameSize
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved.game_file import GAME_FILE
from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media.pictures import Picture
from animegamer_jax.media.video import measure_mp4, read_mp4, shrink
from animegamer_jax.progress import print_status
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import read_json, to_json

VALUES_FILE = "values.json"


@dataclasses.dataclass(frozen=True)
class _ValuesFile:
    """Content of `VALUES_FILE`."""

    fingerprint: dict[str, Any]
    values: dict[str, list[float | None]]
    features: dict[str, list[list[float]]]
    date: str


OnTurn = Callable[[int, int], None]
Values = Mapping[str, Float32[np.ndarray, "g t"]]
"""Values by metric, one per game and turn; NaN where there is none."""

_Scores = dict[str, dict[str, list[Any]]]
"""A game's "values" by metric, a number or None per turn, and its "features", a vector per turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayedGames:
    """A system's games.

    Attributes:
        folders: Folder of each game.
        values: Values by metric.
        set_scores: Scores of metrics that take all clips together.
        num_cached: Number of games that were complete before.
    """

    folders: tuple[Path, ...]
    values: Values
    set_scores: Mapping[str, float]
    num_cached: int


def game_digest(game: BenchmarkGame) -> str:
    """Returns a digest of everything that a game asks and expects."""
    return hashlib.sha256(json.dumps(to_json(game), sort_keys=True).encode()).hexdigest()[:16]


def benchmark_digest(benchmark: Benchmark) -> str:
    """Returns a digest of all games."""
    digests = "".join(map(game_digest, benchmark.games))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


# Playing here


def play_system(
    player: Player,
    benchmark: Benchmark,
    suite: MetricSuite,
    *,
    home: Path,
    name: str,
    settings: Mapping[str, Any],
    batch_size: int,
    on_turn: OnTurn = lambda done, total: None,
) -> PlayedGames:
    """Plays the games that are not cached, and scores each turn as it is played.

    Args:
        player: The model's player.
        benchmark: The games.
        suite: The scorers for the player's frame size.
        home: Folder of the games' folders; another game under the same name is replaced.
        name: Name of the model in the saved games.
        settings: Everything that the games depend on: model, window, steps, number format.
        batch_size: Number of games played side by side; the last batch is filled up with its own
            games, so that nothing is compiled twice.
        on_turn: Function called with the number of turns played and the total.

    Raises:
        UserError: An instruction is too long for the model (`check_instructions` finds that
            before), or a file cannot be written.
        NonFiniteError: A network's output is not finite.
    """
    folders = [home / _folder_name(game.id) for game in benchmark.games]
    fingerprints = [
        {"game": game_digest(game), "settings": to_json(settings), "scorers": suite.fingerprint}
        for game in benchmark.games
    ]
    turns = benchmark.num_turns
    scored = [_load_cached(*pair, suite, turns) for pair in zip(folders, fingerprints, strict=True)]
    missing = [index for index, found in enumerate(scored) if found is None]
    batch_size = min(batch_size, max(1, len(missing)))
    for start in range(0, len(missing), batch_size):
        rows = missing[start : start + batch_size]
        batch = _Batch(
            player, benchmark, rows, pictures=suite.pictures, size=batch_size, first=start == 0
        )
        batch.begin([folders[row] for row in rows], name=name)
        for turn in range(turns):
            batch.play(turn, suite)
            on_turn(start * turns + (turn + 1) * len(rows), len(missing) * turns)
        for row, found in zip(rows, batch.scored, strict=True):
            scored[row] = found
            _save_cached(folders[row], fingerprints[row], found)
    return PlayedGames(
        folders=tuple(folders),
        num_cached=len(folders) - len(missing),
        **_collect([found for found in scored if found is not None], suite, turns),
    )


class _Batch:
    """Games that are played side by side.

    Args:
        player: The model's player.
        benchmark: The benchmark.
        rows: Indices of the games to play.
        pictures: Picture before each game's first turn; empty: no game has one.
        size: Number of games in the batch; the rows are repeated to fill it.
        first: Whether this is the first batch, whose first turn compiles and is not timed.
    """

    def __init__(
        self,
        player: Player,
        benchmark: Benchmark,
        rows: Sequence[int],
        *,
        pictures: Sequence[np.ndarray | None],
        size: int,
        first: bool,
    ):
        self._player, self._rows, self._first = player, np.array(rows), first
        self._games = [benchmark.games[row] for row in np.resize(self._rows, size).tolist()]
        self._seeds = [game.seed for game in self._games]
        self._saved: list[Game] = []
        self._pictures = [
            None
            if game.picture is None
            else player.represent(_picture(pictures, row, game), game.picture.instruction)
            for game, row in zip(self._games, np.resize(self._rows, size).tolist(), strict=True)
        ]
        self._window = player.start(size)
        if any(self._pictures):
            self._window = player.restore([[one] if one else [] for one in self._pictures])
        self.scored = [_no_scores() for _ in rows]

    def begin(self, folders: Sequence[Path], *, name: str) -> None:
        """Creates the games' folders in place of earlier ones."""
        for folder, seed, picture in zip(folders, self._seeds, self._pictures, strict=False):
            if (folder / GAME_FILE).exists() or (folder / VALUES_FILE).exists():
                shutil.rmtree(folder)
            self._saved.append(
                self._player.new_game(folder, model=name, seed=seed, picture=picture)
            )

    def play(self, turn: int, suite: MetricSuite) -> None:
        """Plays, scores and saves the next turn, counted from 0."""
        asked = [game.turns[turn] for game in self._games]
        self._window, output = self._player.play_turn(
            self._window, [one.instruction for one in asked], seeds=self._seeds, turn=turn + 1
        )
        count, seconds = len(self._rows), output.seconds["total"] / len(asked)
        answers = Answers(
            turns=asked[:count],
            clips=output.frames[:count, :NUM_FRAMES],
            predicted_states=output.states[:count].astype(np.int64),
            seconds=np.full(count, np.nan if self._first and turn == 0 else seconds),
            true_clips=suite.true_clips_of(self._rows, turn),
        )
        _score(answers, suite, into=self.scored)
        output = output._replace(seconds={"total": seconds})
        for row, game in enumerate(self._saved):
            with user_errors(
                game.folder, "cannot be written", hint="free some space, then try again"
            ):
                game.add(output.row(row), asked[row].instruction)


def _picture(pictures: Sequence[np.ndarray | None], row: int, game: BenchmarkGame) -> Picture:
    found = pictures[row] if pictures else None
    if found is None:
        raise UserError(
            f"game {game.id}: it begins with a picture, which only a world that can be drawn has"
        )
    return Picture(found)


def check_instructions(benchmark: Benchmark, check: Callable[[str], object]) -> None:
    """Checks that a model can read every instruction, before anything is played.

    Raises:
        UserError: It cannot; names game and turn.
    """
    for game in benchmark.games:
        texts = {f"turn {t}": turn.instruction for t, turn in enumerate(game.turns, start=1)}
        if game.picture is not None:
            texts["picture"] = game.picture.instruction
        for where, text in texts.items():
            try:
                check(text)
            except UserError as error:
                raise UserError(
                    f"benchmark {benchmark.name}: game {game.id}: {where}: {error}"
                ) from None


def _folder_name(game: str) -> str:
    """Returns a folder's name for a game's name."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in game).strip(".")[:80]
    if plain == game:
        return game
    return f"{plain}-{hashlib.sha256(game.encode()).hexdigest()[:8]}"


# Games played elsewhere


def read_system(
    home: Path,
    benchmark: Benchmark,
    make_suite: Callable[[FrameSize], MetricSuite],
    *,
    size: tuple[int, int] | None = None,
    on_turn: OnTurn = lambda done, total: None,
) -> tuple[PlayedGames, MetricSuite]:
    """Scores games that `animegamer play` wrote, or another program in the same form.

    Args:
        home: Folder with a folder per game, named by the game's id.
        benchmark: The benchmark that was played.
        make_suite: Function that builds the scorers for the size of the clips that are scored.
        size: Rows and columns of the clips before they were saved: a file that is larger by a whole
            factor is scored at this size (`video.shrink`). None: as they are.
        on_turn: Function called with the number of turns scored and the total.

    Raises:
        UserError: A game is missing or damaged, does not belong to the benchmark, or has clips of
            another size than the first.
    """
    folders = [home / _folder_name(game.id) for game in benchmark.games]
    games = [_open(*pair) for pair in zip(folders, benchmark.games, strict=True)]
    first = folders[0] / games[0][0].clip
    height, width, frames = measure_mp4(first)
    factor = _factor((height, width), size)
    suite = make_suite(FrameSize(frames, height // factor, width // factor))
    total = len(games) * benchmark.num_turns
    scored = [_no_scores() for _ in games]
    for row, (folder, turns, game) in enumerate(zip(folders, games, benchmark.games, strict=True)):
        for number, (turn, asked) in enumerate(zip(turns, game.turns, strict=True)):
            clip = read_mp4(folder / turn.clip)
            if clip.shape[:3] != (frames, height, width):
                raise UserError(
                    f"{folder / turn.clip}: expected {frames} frames of {height} x {width}, as "
                    f"{first} has, found {clip.shape[0]} of {clip.shape[1]} x {clip.shape[2]}"
                )
            states = [turn.motion_level, turn.social, turn.entertainment, turn.stamina]
            answers = Answers(
                turns=[asked],
                clips=shrink(clip[:NUM_FRAMES], factor)[None],
                predicted_states=np.array([states]),
                seconds=np.array([turn.seconds["total"]]) if "total" in turn.seconds else None,
                true_clips=suite.true_clips_of(np.array([row]), number),
            )
            _score(answers, suite, into=scored[row : row + 1])
            on_turn(row * benchmark.num_turns + number + 1, total)
    found = _collect(scored, suite, benchmark.num_turns)
    return PlayedGames(folders=tuple(folders), num_cached=len(games), **found), suite


def _factor(saved: tuple[int, int], size: tuple[int, int] | None) -> int:
    """Returns by how much a clip was enlarged; 1 if not, or by no whole factor."""
    if size is None or saved[0] * size[1] != saved[1] * size[0] or saved[0] % size[0]:
        return 1
    return saved[0] // size[0]


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


# Values


def score_clips(clips: Callable[[int], Clips], benchmark: Benchmark, suite: MetricSuite) -> Values:
    """Scores given clips in place of a system's.

    Args:
        clips: Function that returns the clips of all games at a turn, counted from 0.
        benchmark: The benchmark that the clips answer.
        suite: The scorers.
    """
    scored = [_no_scores() for _ in benchmark.games]
    everyone = np.arange(len(benchmark.games))
    for turn in range(benchmark.num_turns):
        answers = Answers(
            turns=[game.turns[turn] for game in benchmark.games],
            clips=clips(turn)[:, :NUM_FRAMES],
            true_clips=suite.true_clips_of(everyone, turn),
        )
        _score(answers, suite, into=scored)
    return with_details(_stack(scored, benchmark.num_turns), suite.details)


def _no_scores() -> _Scores:
    return {"values": {}, "features": {}}


def _score(answers: Answers, suite: MetricSuite, *, into: Sequence[_Scores]) -> None:
    """Appends one turn's values to each game's."""
    for scorer in suite.scorers:
        for metric, found in scorer(answers).items():
            for game, value in zip(into, found.tolist(), strict=True):
                known = value if np.isfinite(value) else None
                game["values"].setdefault(metric, []).append(known)
    for scorer in suite.set_scorers:
        for game, vector in zip(into, scorer.features(answers.clips), strict=True):
            game["features"].setdefault(scorer.metric, []).append(vector.tolist())


def _collect(scored: Sequence[_Scores], suite: MetricSuite, num_turns: int) -> dict[str, Any]:
    """Returns the fields "values" and "set_scores"; NaN if a distance needs more clips."""
    distances = {}
    for scorer in suite.set_scorers:
        features = np.concatenate([np.array(game["features"][scorer.metric]) for game in scored])
        try:
            distances[scorer.metric] = scorer.distance(features, scorer.reference)
        except UserError as error:
            print_status(f"{scorer.metric}: {error}")
            distances[scorer.metric] = float("nan")
    values = with_details(_stack(scored, num_turns), suite.details)
    return {"values": values, "set_scores": distances}


def _stack(scored: Sequence[_Scores], num_turns: int) -> Values:
    names = sorted({name for game in scored for name in game["values"]})
    absent = [None] * num_turns
    rows = {name: [game["values"].get(name, absent) for game in scored] for name in names}
    return {name: np.array(row, np.float64).astype(np.float32) for name, row in rows.items()}


def _load_cached(
    folder: Path, fingerprint: Mapping[str, Any], suite: MetricSuite, num_turns: int
) -> _Scores | None:
    """Returns a game's values if they and its clips are complete and have this fingerprint."""
    try:
        found = read_json(folder / VALUES_FILE, _ValuesFile, hint="")
        if found.fingerprint != fingerprint or len(Game.load(folder).turns) != num_turns:
            return None
    except UserError:
        return None
    kept = (*found.values.values(), *found.features.values())
    names = {scorer.metric for scorer in suite.set_scorers}
    if found.features.keys() != names or any(len(each) != num_turns for each in kept):
        return None
    return {"values": found.values, "features": found.features}


def _save_cached(folder: Path, fingerprint: Mapping[str, Any], scored: _Scores) -> None:
    content = _ValuesFile(dict(fingerprint), **scored, date=time.strftime("%Y-%m-%d"))
    write_json(folder / VALUES_FILE, to_json(content), indent=None)
