"""The games of a server: each in a folder of its own, saved after every turn, found by its id."""

import dataclasses
import re
import secrets
import threading
import time
from pathlib import Path
from typing import NamedTuple

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import (
    GAME_FILE,
    PICTURE_FILE,
    Game,
    History,
    NewPicture,
)
from animegamer_jax.media import video
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.serve.archive import unpack_game
from animegamer_jax.storage.paths import user_errors

_ID = re.compile(r"[0-9a-f]{24}")
_IDLE_SECONDS = 1800.0


class GameModel(NamedTuple):
    """What a game's files must match: the model that this server plays.

    Attributes:
        name: Name of the bundle.
        protocol: Name of its game protocol.
        representation: Shape of a shot representation.
        clip: Rows, columns and frames of a saved clip.
        history: Shot representations of past turns.
    """

    name: str
    protocol: str
    representation: tuple[int, int]
    clip: tuple[int, int, int]
    history: History = "predicted"


@dataclasses.dataclass
class _OpenGame:
    game: Game
    last_used: float


class GameStore:
    """Games by id.

    When `max_games` are open and another is wanted, the least recently used game is evicted from
    memory if it has been idle for half an hour. It stays on disk and is read again when needed.

    Args:
        folder: Folder of all games; created if it is missing.
        model: The model that plays.
        max_games: Largest number of open games.
        idle_seconds: Seconds without use after which a game may be evicted.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: GameModel,
        max_games: int = 64,
        idle_seconds: float = _IDLE_SECONDS,
    ):
        self.folder, self.model = folder, model
        self.max_games, self.idle_seconds = max_games, idle_seconds
        self._open: dict[str, _OpenGame] = {}
        self._lock = threading.RLock()
        with user_errors(folder, "cannot hold the games", hint="give another folder by --games"):
            folder.mkdir(parents=True, exist_ok=True)

    def new(self, *, seed: int, window: int, steps: int, picture: NewPicture | None = None) -> str:
        """Creates a game, from a player's own picture if there is one, and returns its id.

        Raises:
            UserError: `max_games` are open and none may be evicted, or the game cannot be saved.
        """
        with self._lock:
            name = self._new_id()
            game = Game.create(
                self.folder / name,
                model=self.model.name,
                seed=seed,
                window=window,
                steps=steps,
                protocol=self.model.protocol,
                history_kind=self.model.history,
                picture=picture,
            )
            self._open[name] = _OpenGame(game, time.monotonic())
            return name

    def get(self, name: str) -> Game:
        """Returns a game, read from disk if it is not open.

        Raises:
            UserError: there is no such game, or `max_games` are open and none may be evicted.
        """
        with self._lock:
            found = self._open.get(name)
            if found is None:
                if not _ID.fullmatch(name) or not (self.folder / name / GAME_FILE).is_file():
                    raise UserError(
                        f"no game {name[:40]!r} here: start a new one, or load a saved one"
                    )
                self._make_room()
                game = Game.load(self.folder / name)
                check_game(game, self.model)
                found = self._open[name] = _OpenGame(game, 0.0)
            found.last_used = time.monotonic()
            return found.game

    def branch(self, name: str, turns: int) -> str:
        """Copies the first turns of a game to a new game and returns its id.

        Raises:
            UserError: the game has fewer turns; or as `new`.
        """
        with self._lock:
            game = self.get(name)
            new = self._new_id()
            with user_errors(f"game {name}", "the branch could not be saved", hint="try again"):
                branch = game.branch(self.folder / new, turns)
            self._open[new] = _OpenGame(branch, time.monotonic())
            return new

    def load(self, archive: Path) -> str:
        """Unpacks a downloaded game and returns its id.

        Raises:
            UserError: the archive holds no game of this model; or as `new`.
        """
        with self._lock:
            name = self._new_id()
        game = unpack_game(archive, self.folder / name, check=lambda g: check_game(g, self.model))
        with self._lock:
            self._open[name] = _OpenGame(game, time.monotonic())
        return name

    def _new_id(self) -> str:
        """Returns an unused id, after making room for its game."""
        self._make_room()
        return secrets.token_hex(12)

    def _make_room(self) -> None:
        if len(self._open) < self.max_games:
            return
        oldest = min(self._open, key=lambda name: self._open[name].last_used)
        if time.monotonic() - self._open[oldest].last_used < self.idle_seconds:
            raise UserError(
                f"{len(self._open)} games are in play, the most that this server allows: try "
                "again later"
            )
        del self._open[oldest]


def check_game(game: Game, model: GameModel) -> None:
    """Checks that a saved game was played with this model and that its clips have its size.

    Raises:
        UserError: names the first thing that does not match.
    """
    for name, expected, found in (
        ("model", model.name, game.model),
        ("protocol", model.protocol, game.protocol),
        ("history", model.history, game.history_kind),
    ):
        if found != expected:
            raise UserError(
                f"{GAME_FILE}: {name}: expected {expected!r}, as on this server, found "
                f"{found[:60]!r}"
            )
    files = reversed(game.representation_files)
    for file, record in zip(files, reversed(game.history()), strict=False):
        if record.representation.shape != model.representation:
            raise UserError(
                f"{file}: expected a shot representation of shape "
                f"{list(model.representation)}, found {list(record.representation.shape)}"
            )
    height, width, frames = model.clip
    if game.picture is not None:
        found = read_picture(game.folder / PICTURE_FILE).pixels.shape
        if found[:2] != (height, width):
            raise UserError(
                f"{PICTURE_FILE}: expected {width} x {height} pixels, found {found[1]} x {found[0]}"
            )
    for turn in game.turns:
        found = video.measure_mp4(game.folder / turn.clip)
        if found[:2] != (height, width) or found[2] > frames:
            raise UserError(
                f"{turn.clip}: expected {frames} frames of {width} x {height}, found {found[2]} of "
                f"{found[1]} x {found[0]}"
            )
