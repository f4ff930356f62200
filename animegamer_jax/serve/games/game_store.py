"""The games of a server: each in a folder of its own, saved after every turn, found by its id."""

import collections
import contextlib
import dataclasses
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.game_file import GAME_FILE, PICTURE_FILE
from animegamer_jax.game.saved.turns import History, NewPicture, Rules
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.turn_output import check_turn
from animegamer_jax.media import video
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.serve.games.archive import unpack_game
from animegamer_jax.storage.paths import user_errors

_ID = re.compile(r"[0-9a-f]{24}")
_IDLE_SECONDS = 1800.0
_COPY = ".copy-"


class NoGameError(UserError):
    """There is no game of a name here."""

    def __init__(self, name: str):
        super().__init__(f"no game {name[:40]!r} here: start a new one, or load a saved one")


class GameModel(NamedTuple):
    """What a game's files must match: the model that this server plays.

    Attributes:
        name: Name of the bundle.
        protocol: Name of its game protocol.
        representation: Shape of a shot representation.
        clip: Rows, columns and frames of a saved clip.
        history: Shot representations of past turns.
        first_latents: Shape of the latents of a first frame; None: the decoder has no memory.
    """

    name: str
    protocol: str
    representation: tuple[int, int]
    clip: tuple[int, int, int]
    history: History = "predicted"
    first_latents: tuple[int, int, int] | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class _Slot:
    """One of the slots for open games.

    Attributes:
        client: Who holds it.
        last_used: Time of `time.monotonic`.
        game: The game; None while it is being made or read.
        pins: Number of turns that wait or are played, and of other uses: it is kept meanwhile.
        lock: Held while the game is made, read or changed.
    """

    client: str
    last_used: float
    game: Game | None = None
    pins: int = 1
    lock: threading.Condition = dataclasses.field(default_factory=threading.Condition)


class GameStore:
    """Games by id.

    When `max_games` are open and another is wanted, the least recently used game is evicted from
    memory if it has been idle for half an hour, or if its client has more open games than the one
    who asks. A client with `client_games` open games gives up its own least recently used one. An
    evicted game stays on disk and is read again when needed.

    Args:
        folder: Folder of all games; created if it is missing.
        model: The model that plays.
        max_games: Largest number of open games.
        client_games: Largest number of open games of one client; None: no limit.
        idle_seconds: Seconds without use after which a game may be evicted.

    Raises:
        UserError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: GameModel,
        max_games: int = 64,
        client_games: int | None = None,
        idle_seconds: float = _IDLE_SECONDS,
    ):
        self.folder, self.model = folder, model
        self.max_games, self.client_games = max_games, client_games
        self.idle_seconds = idle_seconds
        self._open: dict[str, _Slot] = {}
        self._lock = threading.Lock()  # of the slots, never held while a game is read or written
        with user_errors(folder, "cannot hold the games", hint="give another folder by --games"):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{_COPY}*"):  # by a killed server
                shutil.rmtree(left, ignore_errors=True)

    def __len__(self) -> int:
        """Returns the number of open games."""
        return len(self._open)

    def new(
        self,
        *,
        seed: int,
        window: int,
        steps: int,
        picture: NewPicture | None = None,
        rules: Rules = "off",
        client: str = "",
    ) -> str:
        """Creates a game, from a player's own picture if there is one, and returns its id.

        Raises:
            UserError: There is no slot for another open game, or the game cannot be saved.
        """

        def create(folder: Path) -> Game:
            return Game.create(
                folder,
                model=self.model.name,
                seed=seed,
                window=window,
                steps=steps,
                protocol=self.model.protocol,
                history_kind=self.model.history,
                picture=picture,
                rules=rules,
            )

        return self._add(create, client)

    def add(self, make: Callable[[Path], Game], *, client: str = "") -> str:
        """Makes a game in a new folder by a function of that folder, and returns its id.

        Raises:
            UserError: As `new`.
        """
        return self._add(make, client)

    def get(self, name: str, *, client: str = "") -> Game:
        """Returns a game to look at, read from disk if it is not open.

        Raises:
            UserError: There is no such game, or no slot for another open game.
        """
        with self.use(name, client=client) as game:
            return game

    def peek(self, name: str) -> Game:
        """Returns a game as it is, without taking a slot if it has none.

        Raises:
            UserError: There is no such game.
        """
        slot = self._open.get(name)
        if slot is not None and slot.game is not None:
            return slot.game
        if not (_ID.fullmatch(name) and (self.folder / name / GAME_FILE).is_file()):
            raise NoGameError(name)
        return self._read(name)

    @contextlib.contextmanager
    def use(self, name: str, *, client: str = "") -> Iterator[Game]:
        """Yields a game that nobody else changes meanwhile.

        Raises:
            UserError: As `get`.
        """
        slot = self._take_slot(name, client)
        try:
            with slot.lock:
                if slot.game is None:
                    slot.game = self._read(name)
                yield slot.game
        finally:
            self._leave(name, slot)

    @contextlib.contextmanager
    def copy(self, name: str, *, client: str = "") -> Iterator[Game]:
        """Yields a copy of a game as it is now, which is deleted afterwards.

        Its files are links to the game's, which are replaced and deleted but never changed.

        Raises:
            UserError: As `get`, or the copy cannot be made.
        """
        failed = user_errors(f"game {name}", "could not be copied", hint="try again")
        with tempfile.TemporaryDirectory(prefix=_COPY, dir=self.folder) as temporary:
            with self.use(name, client=client) as game, failed:
                copy = dataclasses.replace(
                    game, folder=Path(temporary), turns=list(game.turns), others=list(game.others)
                )
                names = [GAME_FILE, *copy.picture_files]
                for turn in copy.all_turns:
                    names += [turn.clip, turn.representation_file]
                for file in names:
                    target = copy.folder / file
                    if not target.exists():
                        _link(game.folder / file, target)
            yield copy

    def branch(self, name: str, turns: int, *, client: str = "") -> str:
        """Copies the first turns of a game to a new game and returns its id.

        Raises:
            UserError: The game has fewer turns; or as `new`.
        """
        failed = user_errors(f"game {name}", "the branch could not be saved", hint="try again")
        with self.copy(name, client=client) as game, failed:
            return self._add(lambda folder: game.branch(folder, turns), client)

    def load(self, archive: Path, *, client: str = "") -> str:
        """Unpacks a downloaded game and returns its id.

        Raises:
            UserError: The archive holds no game of this model; or as `new`.
        """
        return self._add(lambda folder: unpack_game(archive, folder, check=self._check), client)

    def pin(self, name: str) -> None:
        """Keeps an open game in memory until `unpin`."""
        with self._lock:
            self._open[name].pins += 1

    def unpin(self, name: str) -> None:
        with self._lock:
            self._open[name].pins -= 1

    def _check(self, game: Game) -> None:
        check_game(game, self.model)

    def _read(self, name: str) -> Game:
        game = Game.load(self.folder / name)
        self._check(game)
        return game

    def _add(self, make: Callable[[Path], Game], client: str) -> str:
        """Makes a game in a new folder, in a slot that is taken first; returns its id."""
        name = secrets.token_hex(12)
        with self._lock:
            slot = self._new_slot(name, client)
        try:
            with slot.lock:
                slot.game = make(self.folder / name)
        finally:
            self._leave(name, slot)
        return name

    def _take_slot(self, name: str, client: str) -> _Slot:
        """Returns the slot of a game, pinned; a new one if it is not open."""
        known = _ID.fullmatch(name) and (self.folder / name / GAME_FILE).is_file()
        with self._lock:
            slot = self._open.get(name)
            if slot is not None:
                slot.pins += 1
                slot.last_used = time.monotonic()
                return slot
            if not known:
                raise NoGameError(
                    f"no game {name[:40]!r} here: start a new one, or load a saved one"
                )
            return self._new_slot(name, client)

    def _leave(self, name: str, slot: _Slot) -> None:
        """Unpins a slot; without a game, and nobody who waits for it, it is free again."""
        with self._lock:
            slot.pins -= 1
            if slot.game is None and not slot.pins:
                del self._open[name]

    def _new_slot(self, name: str, client: str) -> _Slot:
        """Returns a new slot, pinned, after making room for it; the lock is held."""
        held = collections.Counter(slot.client for slot in self._open.values())
        now = time.monotonic()
        free = [(slot.last_used, other) for other, slot in self._open.items() if not slot.pins]
        if self.client_games is not None and held[client] >= self.client_games:
            evicted = [oldest for oldest in free if self._open[oldest[1]].client == client]
            if not evicted:
                raise UserError(
                    f"{held[client]} of your games are in play, the most that this server allows "
                    "one player: wait until a turn of theirs has ended"
                )
            del self._open[min(evicted)[1]]
        elif len(self._open) >= self.max_games:
            evicted = [
                (used, other)
                for used, other in free
                if now - used >= self.idle_seconds
                or held[self._open[other].client] > held[client] + 1
            ]
            if not evicted:
                raise UserError(
                    f"{len(self._open)} games are in play, the most that this server allows: try "
                    "again later"
                )
            del self._open[min(evicted)[1]]
        slot = self._open[name] = _Slot(client=client, last_used=now)
        return slot


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def check_game(game: Game, model: GameModel) -> None:
    """Checks that a saved game was played with this model and that its clips have its size.

    Raises:
        UserError: Names the first thing that does not match.
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
    if not game.turns and game.others:  # all of a game have one shape
        check_game(dataclasses.replace(game, turns=[game.others[0].turn], others=[]), model)
    files = reversed(game.representation_files)
    for file, record in zip(files, reversed(game.history()), strict=False):
        check_turn(
            file,
            record,
            representation=model.representation,
            first_latents=model.first_latents,
        )
    height, width, frames = model.clip
    if game.picture is not None:
        found = read_picture(game.folder / PICTURE_FILE).pixels.shape
        if found[:2] != (height, width):
            raise UserError(
                f"{PICTURE_FILE}: expected {width} x {height} pixels, found {found[1]} x {found[0]}"
            )
    for turn in game.all_turns:
        found = video.measure_mp4(game.folder / turn.clip)
        if found[:2] != (height, width) or found[2] > frames:
            raise UserError(
                f"{turn.clip}: expected {frames} frames of {width} x {height}, found {found[2]} of "
                f"{found[1]} x {found[0]}"
            )
