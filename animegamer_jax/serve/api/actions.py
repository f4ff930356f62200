"""What a client can do, for all interfaces: new games, turns, undo and redo, files.

Each action takes the client who asks, and raises `UserError` in one line.
"""

import collections
import contextlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import UserError
from animegamer_jax.game.openings import Openings
from animegamer_jax.game.pictures import check_window
from animegamer_jax.game.rules import MORNING_STAMINA, Day, day_of
from animegamer_jax.game.saved.turns import METERS, Meters, NewPicture, Rules, Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.scene_words import Reading, read_line
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.serve.engine.engine import Engine
from animegamer_jax.serve.engine.turn_request import TurnRequest
from animegamer_jax.serve.games.archive import pack_game
from animegamer_jax.serve.games.game_store import GameStore
from animegamer_jax.serve.games.hub import Hub
from animegamer_jax.serve.guard.limits import FileWork
from animegamer_jax.storage.paths import user_errors

Number = int | float  # as a browser sends it
LARGEST_SEED = 2**31 - 1
_MOST_ENDED = 4096  # requests that are remembered, one a game


class ConflictError(UserError):
    """The game is in another state than the client thinks."""


class UnknownLineError(UserError):
    """The model knows no word of a line that names something.

    Attributes:
        reading: The line's unknown words.
    """

    def __init__(self, text: str, reading: Reading):
        super().__init__(text)
        self.reading = reading


class Actions:
    """The actions on an engine's games.

    Args:
        engine: The engine that plays.
        vocabulary: The words of the model's world.
        steps: Denoising steps of a new game.
        folder: Folder for files that are sent to a client.
        openings: Prepared first shots; None for none.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        vocabulary: Vocabulary,
        steps: int,
        folder: Path,
        openings: Openings | None = None,
    ):
        self.engine, self.vocabulary, self.steps, self.folder = engine, vocabulary, steps, folder
        self.store: GameStore = engine.store
        self.openings = openings or Openings()
        self.file_work = FileWork()
        self.hub = Hub()
        self._ended: collections.OrderedDict[str, TurnRequest] = collections.OrderedDict()
        engine.on_change = self._on_change

    def last_ended(self, name: str) -> TurnRequest | None:
        """Returns the request of a game that ended last, if it is not long ago."""
        return self._ended.get(name)

    def _on_change(self, request: TurnRequest) -> None:
        if request.ended:
            self._ended[request.game] = request
            self._ended.move_to_end(request.game)
            if len(self._ended) > _MOST_ENDED:
                with contextlib.suppress(KeyError):  # another thread was faster
                    self._ended.popitem(last=False)
        if request.status == "done":
            self.hub.changed(request.game)
        else:
            self.hub.wake(request.game)

    def hide(self, error: UserError) -> str:
        """Returns an error without the folders of this server."""
        text = str(error)
        folders = [self.store.folder, self.store.folder.absolute(), self.folder]
        for folder in sorted(map(str, folders), key=len, reverse=True):
            text = re.sub(rf"{re.escape(folder)}/((\.copy-[^/]+|[0-9a-f]+)/)?", "", text)
        return text

    # --- games ---

    def find(self, name: str, *, client: str) -> Game:
        """Returns a game."""
        if not name:
            raise UserError("no game yet: start one first")
        return self.store.get(name, client=client)

    def new_game(
        self,
        *,
        client: str,
        seed: Number | None = None,
        window: Number | None = None,
        steps: Number | None = None,
        picture: NewPicture | None = None,
        rules: Rules = "off",
    ) -> str:
        """Creates a game and returns its id; None stands for a random seed, or the server's own."""
        self.engine.check_settings(seed=seed, window=window, steps=steps)
        return self.store.new(
            seed=secrets.randbelow(LARGEST_SEED) if seed is None else int(seed),
            window=int(window or self.engine.player.window),
            steps=int(steps or self.steps),
            picture=picture,
            rules=rules,
            client=client,
        )

    def new_game_from_opening(
        self, character: str, place: str, *, client: str, seed: int | None = None, rules: Rules
    ) -> str:
        """Creates a game that begins with a prepared first shot, and returns its id."""
        opening = self.openings.games.get((character, place))
        if opening is None:
            raise UserError(f"no first shot of {character[:40]!r} in {place[:40]!r} is prepared")
        self.engine.check_settings(seed=seed, window=None, steps=None)
        chosen = secrets.randbelow(LARGEST_SEED) if seed is None else seed
        return self.store.add(
            lambda folder: opening.branch(folder, 1, seed=chosen, rules=rules), client=client
        )

    def takes_pictures(self) -> bool:
        """Returns whether the model can represent a player's own picture."""
        try:
            self.engine.player.check_pictures()
        except UserError:
            return False
        return True

    def new_game_from_picture(
        self,
        path: Path | None,
        text: str,
        *,
        client: str,
        name: str = "",
        seed: Number | None = None,
        window: Number | None = None,
        steps: Number | None = None,
        rules: Rules = "off",
    ) -> tuple[str, str]:
        """Creates a game from a player's own picture.

        Returns:
            The game's id, and what was left out of the file.
        """
        player = self.engine.player
        player.check_pictures()
        self.engine.check_settings(seed=seed, window=window, steps=steps)
        check_window(int(window or player.window))
        if path is None:
            raise UserError("expected a picture, found no file: choose one")
        name = (name or path.name)[:60]
        self.engine.check_length(text)
        with self.file_work.slot(client):
            picture = read_picture(path, name=name)
            turn = player.represent(picture, text, name=name)
        new = self.new_game(
            client=client, seed=seed, window=window, steps=steps, picture=turn, rules=rules
        )
        return new, picture.note

    def copy_game(self, name: str, turns: int, *, client: str) -> str:
        """Copies the first turns of a game to a new game and returns its id."""
        with self.file_work.slot(client):
            return self.store.branch(name, turns, client=client)

    def load_game(self, path: Path | None, *, client: str) -> str:
        """Unpacks an uploaded game, which is deleted, and returns the game's id."""
        if path is None:
            raise UserError("expected a downloaded game, found no file")
        with self.file_work.slot(client):
            name = self.store.load(path, client=client)
        path.unlink(missing_ok=True)
        return name

    # --- turns ---

    def check_head(self, game: Game, head: str | None) -> None:
        """Checks that a game's last turn is the one that a client has seen.

        Args:
            game: The game.
            head: Id of the turn; "" before the first; None: whichever it is.

        Raises:
            ConflictError: It is another one.
        """
        if head is not None and head != head_of(game):
            raise ConflictError("the game has changed in another window: look at it again")

    def play(
        self,
        name: str,
        line: str,
        *,
        client: str,
        head: str | None = None,
        anyway: bool = True,
        **options: Any,
    ) -> TurnRequest:
        """Queues a turn.

        Args:
            name: Id of the game.
            line: The instruction.
            client: Who asks.
            head: Id of the turn after which it is to be played (`check_head`).
            anyway: Whether a line without a known word is played.
            **options: Further options of `Engine.submit`.
        """
        game = self.find(name, client=client)
        self.check_head(game, head)
        self._check_day(game)
        if not anyway and line.strip():
            self.engine.check_length(line)
            reading = self.read(line)
            if not reading.understood:
                raise UnknownLineError("the model knows no word of this line", reading)
        return self.engine.submit(name, line, client=client, **options)

    def read(self, line: str) -> Reading:
        """Returns what the model understands of a line."""
        return read_line(line, self.vocabulary, self.engine.player.tokenizer)

    def play_again(
        self, name: str, *, client: str, head: str | None = None, **options: Any
    ) -> TurnRequest:
        """Queues the last turn again; the options are those of `Engine.submit`."""
        game = self.find(name, client=client)
        self.check_head(game, head)
        if not game.turns:
            raise UserError("no turn to try again: play one first")
        turns = len(game.turns)
        return self.engine.submit(
            name, game.turns[-1].instruction, after=turns - 1, client=client, **options
        )

    @contextlib.contextmanager
    def _changing(self, name: str, client: str, head: str | None) -> Iterator[Game]:
        """Yields a game to change, of which no turn is being played."""
        self.find(name, client=client)
        failed = user_errors(f"game {name}", "could not be saved", hint="try again")
        with self.store.use(name, client=client) as game, failed:
            if self.engine.request_of(name) is not None:
                raise UserError("a turn is being played: stop it first")
            self.check_head(game, head)
            yield game
        self.hub.changed(name)

    def undo(self, name: str, *, client: str, head: str | None = None) -> Turn:
        """Sets the last turn aside and returns it."""
        with self._changing(name, client, head) as game:
            if not game.turns:
                raise UserError("no turn to undo")
            turn = game.turns[-1]
            game.set_aside()
        return turn

    def redo(self, name: str, *, client: str, head: str | None = None) -> Turn:
        """Brings the turn back that was set aside last."""
        with self._changing(name, client, head) as game:
            return game.redo()

    def go_to(self, name: str, turn: str, *, client: str, head: str | None = None) -> None:
        """Makes the turns up to one of them the current line; "" stands for the start."""
        with self._changing(name, client, head) as game:
            game.go_to(f"{turn}.mp4" if turn else "")

    def set_meters(
        self, name: str, meters: Meters, *, client: str, head: str | None = None
    ) -> None:
        """Sets the meters with which the next turn begins."""
        with self._changing(name, client, head) as game:
            day = self.day(game)
            if day is not None and not day.played and meters.stamina == 0:
                raise UserError("stamina 0 would end a day before its first turn: set 5 or more")
            last = game.turns[-1].edit if game.turns else None
            new_day = last is not None and last.new_day
            game.edit(meters, allowed=self._allowed, new_day=new_day)

    def set_rules(self, name: str, rules: Rules, *, client: str) -> None:
        """Switches the rules of a game on or off."""
        with self._changing(name, client, None) as game:
            game.set_rules(rules)

    def next_day(self, name: str, *, client: str, head: str | None = None) -> None:
        """Ends the day: stamina is that of the morning again."""
        with self._changing(name, client, head) as game:
            if game.rules == "off" or not game.turns:
                raise UserError("no day to end: switch the rules on and play a turn first")
            now = game.meters
            meters = Meters(
                stamina=max(now.stamina, MORNING_STAMINA),
                social=now.social,
                entertainment=now.entertainment,
            )
            game.edit(meters, allowed=self._allowed, new_day=True)

    @property
    def _allowed(self) -> dict[str, tuple[int, ...]]:
        protocol = self.engine.player.protocol
        return {name: tuple(getattr(protocol, name)) for name in METERS}

    def day(self, game: Game) -> Day | None:
        """Returns the current day of a game; None without rules."""
        if game.rules == "off":
            return None
        start = game.picture.instruction if game.picture else ""
        return day_of(game.turns, self.vocabulary, seed=game.seed, meters=game.meters, start=start)

    def _check_day(self, game: Game) -> None:
        day = self.day(game)
        if day is not None and day.ending is not None:
            raise UserError(
                "the day is over: begin the next one, undo a turn, or switch the rules off"
            )

    # --- files ---

    def pack(self, name: str, path: Path, *, client: str) -> None:
        """Writes a game as a zip."""
        self.find(name, client=client)
        with (
            self.file_work.slot(client),
            self.store.copy(name, client=client) as copy,
            user_errors(f"game {name}", "could not be packed", hint="try again"),
        ):
            pack_game(copy, path)


def id_of(turn: Turn) -> str:
    """Returns the id of a turn within its game, which stays the same: its clip's name."""
    return turn.clip.removesuffix(".mp4")


def head_of(game: Game) -> str:
    """Returns the id of a game's last turn; "" before the first."""
    return id_of(game.turns[-1]) if game.turns else ""
