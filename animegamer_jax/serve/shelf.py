"""The games of a server: each in a folder of its own, saved after every turn, known by its id."""

import dataclasses
import re
import secrets
import threading
import time
from pathlib import Path
from typing import NamedTuple

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import GAME_FILE, Game
from animegamer_jax.media import video
from animegamer_jax.serve.archive import unpack_game

_ID = re.compile(r"[0-9a-f]{24}")
_IDLE = 1800.0  # seconds after which a game may be put away


class GameModel(NamedTuple):
    """What a game's files must fit: the model that this server plays.

    Attributes:
        name: of the bundle.
        protocol: its name.
        representation: shape of a shot representation.
        clip: rows and columns of a saved clip, and its frames.
    """

    name: str
    protocol: str
    representation: tuple[int, int]
    clip: tuple[int, int, int]


@dataclasses.dataclass
class _Open:
    game: Game
    used: float


class Shelf:
    """Games by id.

    A game that nobody has touched for half an hour is put away when another needs its place: it
    stays on the disk, and comes back when it is asked for.

    Args:
        folder: of all games; made where it is missing.
        model: that plays.
        max_games: in play at once.
        idle: seconds until a game may be put away.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, model: GameModel, max_games: int = 64, idle: float = _IDLE):
        self.folder, self.model, self.max_games, self.idle = folder, model, max_games, idle
        self._open: dict[str, _Open] = {}
        self._lock = threading.RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{folder}: expected a folder for the games, found: {error.strerror}"
            ) from error

    def new(self, *, seed: int, window: int, steps: int) -> str:
        """The id of a new game.

        Raises:
            UserError: as many games as may be are in play, or the disk refuses.
        """
        with self._lock:
            self._make_room()
            name = self._new_id()
            game = Game.create(
                self.folder / name,
                model=self.model.name,
                seed=seed,
                window=window,
                steps=steps,
                protocol=self.model.protocol,
            )
            self._open[name] = _Open(game, time.monotonic())
            return name

    def get(self, name: str) -> Game:
        """A game, read from the disk where it was put away.

        Raises:
            UserError: no such game, or as many as may be are in play.
        """
        with self._lock:
            found = self._open.get(name)
            if found is None:
                if not _ID.fullmatch(name) or not (self.folder / name / GAME_FILE).is_file():
                    raise UserError(f"no game {name[:40]!r} here: start anew, or load a saved one")
                self._make_room()
                game = Game.load(self.folder / name)
                check_game(game, self.model)
                found = self._open[name] = _Open(game, 0.0)
            found.used = time.monotonic()
            return found.game

    def branch(self, name: str, turns: int) -> str:
        """The id of another game that begins with the first turns of this one.

        Raises:
            UserError: there are not so many turns; as `new`.
        """
        with self._lock:
            game = self.get(name)
            self._make_room()
            new = self._new_id()
            try:
                branch = game.branch(self.folder / new, turns)
            except OSError as error:
                raise UserError(f"the branch could not be saved: {error.strerror}") from error
            self._open[new] = _Open(branch, time.monotonic())
            return new

    def load(self, archive: Path) -> str:
        """The id of a game that was downloaded before.

        Raises:
            UserError: the archive holds no game of this model; as `new`.
        """
        with self._lock:
            self._make_room()
            name = self._new_id()
        game = unpack_game(archive, self.folder / name, check=lambda g: check_game(g, self.model))
        with self._lock:
            self._open[name] = _Open(game, time.monotonic())
        return name

    def in_play(self) -> int:
        """How many games are in play."""
        return len(self._open)

    def _new_id(self) -> str:
        return secrets.token_hex(12)

    def _make_room(self) -> None:
        if len(self._open) < self.max_games:
            return
        longest = min(self._open, key=lambda name: self._open[name].used)
        if time.monotonic() - self._open[longest].used < self.idle:
            raise UserError(
                f"{len(self._open)} games are in play, as many as this server takes: try again "
                "later"
            )
        del self._open[longest]


def check_game(game: Game, model: GameModel) -> None:
    """Checks that a saved game is one of this model, and its clips are what the model makes.

    Raises:
        UserError: names the first thing that is not.
    """
    for name, expected in (("model", model.name), ("protocol", model.protocol)):
        found = getattr(game, name)
        if found != expected:
            raise UserError(
                f"{GAME_FILE}: {name}: expected {expected!r}, which plays here, found "
                f"{found[:60]!r}"
            )
    for turn, record in zip(reversed(game.turns), reversed(game.history()), strict=False):
        if record.representation.shape != model.representation:
            raise UserError(
                f"{turn.representation_file}: expected a shot representation of shape "
                f"{list(model.representation)}, found {list(record.representation.shape)}"
            )
    height, width, frames = model.clip
    for turn in game.turns:
        found = video.measure_mp4(game.folder / turn.clip)
        if found[:2] != (height, width) or found[2] > frames:
            raise UserError(
                f"{turn.clip}: expected {frames} frames of {width} x {height}, found {found[2]} of "
                f"{found[1]} x {found[0]}"
            )
