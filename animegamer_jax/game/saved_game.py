"""A saved game: its turns and meters on disk, where no finished turn is ever lost.

On disk a game is a folder with a clip and a shot representation per turn, `game.json`, and a
storyboard. A game that began with a player's own picture also holds the picture and its
representation. `saved/` has the parts: turns, their tree, the files.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.board import draw_board
from animegamer_jax.game.saved.game_file import (
    PICTURE_FILE,
    STARTED_FILE,
    STORYBOARD_FILE,
    GameDocument,
    check_no_game,
    read_document,
    write_document,
)
from animegamer_jax.game.saved.representation_file import read_representation, write_representation
from animegamer_jax.game.saved.tree import Tree
from animegamer_jax.game.saved.turns import (
    METER_STEP,
    METERS,
    Edit,
    History,
    Meters,
    NewPicture,
    NewTurn,
    PictureTurn,
    Rules,
    SetAside,
    Turn,
    TurnRecord,
    window_states,
)
from animegamer_jax.media import video
from animegamer_jax.media.pictures import encode_png, read_picture
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import user_errors

_SETTINGS = ("model", "protocol", "seed", "window", "steps")
_SECONDS = ("mllm", "decoder", "vae", "total")


@dataclasses.dataclass(kw_only=True)
class Game:
    """A game and its folder on disk, which holds every finished turn.

    Attributes:
        folder: Folder of the game.
        model: Name of the model.
        seed: Seed of the turns.
        window: Turns of context, this one included.
        steps: Denoising steps per turn.
        protocol: Name of the model's game protocol.
        history_kind: Shot representations of past turns; those on disk are what later turns see.
        picture: Turn of the player's own picture before the first; None if there is none.
        turns: Finished turns of the current line, in order.
        rules: Whether days end and have goals (`game.rules`).
        start: Meters that the player set before the first turn; None for those of every game.
        others: Turns that were undone, replaced or left for another line, the latest last.
    """

    folder: Path
    model: str
    seed: int
    window: int
    steps: int
    protocol: str
    history_kind: History = "predicted"
    picture: PictureTurn | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    rules: Rules = "off"
    start: Meters | None = None
    others: list[SetAside] = dataclasses.field(default_factory=list)

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        model: str,
        seed: int,
        window: int,
        steps: int,
        protocol: str,
        history_kind: History = "predicted",
        picture: NewPicture | None = None,
        rules: Rules = "off",
    ) -> "Game":
        """Starts a game without turns in `folder`, which is made if it is missing.

        A small picture is saved enlarged, as clips are.

        Raises:
            UserError: The folder already holds a game, is a file, or cannot be written.
        """
        check_no_game(folder)
        game = cls(
            folder=folder,
            model=model,
            seed=seed,
            window=window,
            steps=steps,
            protocol=protocol,
            history_kind=history_kind,
            rules=rules,
        )
        with user_errors(folder, "cannot hold a game", hint="choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            if picture is not None:
                (folder / STARTED_FILE).touch()
                game._add_picture(picture)
            game._save()
        return game

    @classmethod
    def load(cls, folder: Path) -> "Game":
        """Reads a saved game and checks all of it: fields, clips, shot representations.

        Raises:
            UserError: Names the file and the field, what was expected and what was found.
        """
        found = read_document(folder)
        return cls(
            folder=folder,
            history_kind=found.history,
            picture=found.picture,
            turns=list(found.turns),
            rules=found.rules,
            start=found.start,
            others=list(found.others),
            **{name: getattr(found, name) for name in _SETTINGS},
        )

    @property
    def picture_files(self) -> tuple[str, ...]:
        """Names of the files of the player's own picture; empty if there is none."""
        return (PICTURE_FILE, self.picture.representation_file) if self.picture else ()

    @property
    def representation_files(self) -> tuple[str, ...]:
        """Names of the files with the current line's representations, the picture's first."""
        pictures = self.picture_files[1:]
        return (*pictures, *(turn.representation_file for turn in self.turns))

    @property
    def _tree(self) -> Tree:
        return Tree(self.turns, self.others)

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """Turns of the current line, then those that are set aside."""
        return self._tree.all_turns

    def began_with(self, pixels: UInt8[np.ndarray, "h w 3"]) -> bool:
        """Returns whether the game began with this picture, which has the size of a clip.

        Raises:
            UserError: The stored picture cannot be read.
        """
        if self.picture is None:
            return False
        (enlarged,) = video.enlarge(pixels[None])
        return np.array_equal(read_picture(self.folder / PICTURE_FILE).pixels, enlarged)

    @property
    def meters(self) -> Meters:
        """Meters with which the next turn begins."""
        return self._meters_after(self.turns)

    def _meters_after(self, turns: Sequence[Turn]) -> Meters:
        return turns[-1].next_meters if turns else self.start or Meters()

    def add(
        self,
        played: NewTurn,
        instruction: str,
        *,
        after: int | None = None,
        seed: int | None = None,
        window: int | None = None,
        steps: int | None = None,
        chosen_level: bool = False,
    ) -> Turn:
        """Saves a finished turn: its clip, its shot representation, then `game.json`.

        A small clip is saved enlarged (`video.enlarge`), because players show it at its own size.

        Until `game.json` is renamed into place the game on disk and in memory is the one without
        this turn, so an interruption at any point leaves the earlier turns intact.

        Args:
            played: The turn of this game in the player's output.
            instruction: The player's instruction.
            after: Number of earlier turns; those after them are set aside. None: all turns.
            seed: Seed of this turn; the game's if None.
            window: Window of this turn; the game's if None.
            steps: Denoising steps of this turn; the game's if None.
            chosen_level: Whether the player set the motion level.

        Raises:
            OSError: Full disk, read-only folder.
        """
        level, social, entertainment, stamina = (int(value) for value in played.states)
        changes: dict[str, Any] = {
            "stamina": stamina,
            "social": social,
            "entertainment": entertainment,
        }
        kept = self.turns[:after]
        number = len(kept) + 1
        meters = self._meters_after(kept)
        turn = Turn(
            turn=number,
            instruction=instruction,
            motion_level=level,
            motion_value=float(played.motion_value),
            meters=meters.after(**changes),
            clip=self._tree.free_clip(number),
            seconds={
                name: round(float(played.seconds[name]), 3)
                for name in _SECONDS
                if name in played.seconds
            },
            seed=self.seed if seed is None else seed,
            window=self.window if window is None else window,
            steps=self.steps if steps is None else steps,
            chosen_level=chosen_level,
            **changes,
        )
        video.write_mp4(self.folder / turn.clip, video.enlarge(played.frames))
        file = self.folder / turn.representation_file
        write_representation(file, played.representation, played.first_latents)
        self._put(self._tree.leave(len(kept), turn))
        return turn

    def _add_picture(self, picture: NewPicture) -> None:
        level, social, entertainment, stamina = (int(value) for value in picture.states)
        turn = PictureTurn(
            instruction=picture.instruction,
            motion_level=level,
            social=social,
            entertainment=entertainment,
            stamina=stamina,
        )
        (pixels,) = video.enlarge(picture.pixels[None])
        write_whole(self.folder / PICTURE_FILE, encode_png(pixels))
        file = self.folder / turn.representation_file
        write_representation(file, picture.representation, picture.first_latents)
        self.picture = turn

    def set_aside(self, turns: int = 1) -> None:
        """Takes the last turns out of the current line; `redo` brings them back.

        Raises:
            UserError: The game has fewer turns.
            OSError: Read-only folder.
        """
        if not 1 <= turns <= len(self.turns):
            raise UserError(f"undo: expected 1 to {len(self.turns)} turns, found {turns}")
        self._put(self._tree.leave(len(self.turns) - turns))

    def next_turn(self) -> Turn | None:
        """Returns the turn that `redo` would bring back."""
        return self._tree.next_turn

    def redo(self) -> Turn:
        """Brings the turn back that was set aside last after the current one.

        Raises:
            UserError: There is none.
            OSError: Read-only folder.
        """
        self._put(self._tree.bring_back())
        return self.turns[-1]

    def go_to(self, clip: str) -> None:
        """Makes the turns up to a clip the current line; sets the others aside.

        Args:
            clip: A turn's clip; "" for the start of the game.

        Raises:
            UserError: No turn has this clip.
            OSError: Read-only folder.
        """
        self._put(self._tree.go_to(clip))

    def edit(self, meters: Meters, *, allowed: Mapping[str, Sequence[int]], new_day: bool) -> None:
        """Sets the meters with which the next turn begins.

        The window then holds the last turn's changes with those of the player in them, as the
        nearest values that the model knows. Turns that follow the edited one in other lines
        began with its former meters, so the edited turn is a copy of its own.

        Args:
            meters: The meters.
            allowed: Changes of each meter that the model knows.
            new_day: Whether a new day begins.

        Raises:
            UserError: There is no turn in the current line, and others began with other meters.
            OSError: Full disk, read-only folder.
        """
        if not self.turns:
            if self.others:
                raise UserError("meters: expected a turn before them: set them in a new game")
            start = None if meters == Meters() else meters
            self._save(start=start)
            self.start = start
            return
        last = self.turns[-1]
        changes = {
            name: min(
                allowed[name],
                key=lambda value, name=name: abs(
                    last.changes[name]
                    + (getattr(meters, name) - getattr(last.meters, name)) / METER_STEP
                    - value
                ),
            )
            for name in METERS
        }
        plain = meters == last.meters and not new_day
        edit = None if plain else Edit(meters=meters, new_day=new_day, **changes)
        turn, tree = dataclasses.replace(last, edit=edit), self._tree
        if not tree.is_left(last):
            self._put(Tree([*self.turns[:-1], turn], self.others))
            return
        turn = dataclasses.replace(turn, clip=tree.free_clip(last.turn))
        for old, new in (
            (last.clip, turn.clip),
            (last.representation_file, turn.representation_file),
        ):
            write_whole(self.folder / new, (self.folder / old).read_bytes())
        self._put(tree.leave(len(self.turns) - 1, turn))

    def _put(self, tree: Tree) -> None:
        """Makes these the turns of the game, on disk and in memory; deletes files of no turn."""
        tree, before = tree.bounded(), self.all_turns
        self._save(turns=tree.turns, others=tree.others)
        self.turns, self.others = list(tree.turns), list(tree.others)
        clips = {turn.clip for turn in tree.all_turns}
        for turn in before:
            if turn.clip not in clips:
                for name in (turn.clip, turn.representation_file):
                    (self.folder / name).unlink(missing_ok=True)

    def set_rules(self, rules: Rules) -> None:
        """Switches the rules on or off.

        Raises:
            OSError: Read-only folder.
        """
        self._save(rules=rules)
        self.rules = rules

    def branch(
        self, folder: Path, turns: int, *, seed: int | None = None, rules: Rules | None = None
    ) -> "Game":
        """Starts another game in `folder` with the picture and the first `turns` of this one.

        Args:
            folder: Folder of the new game.
            turns: Number of turns to copy.
            seed: Seed of its further turns; this game's if None.
            rules: Rules of the new game; this game's if None.

        Raises:
            UserError: The game has fewer turns, or as `create`.
            OSError: Full disk.
        """
        if not 0 <= turns <= len(self.turns):
            raise UserError(f"branch: expected 0 to {len(self.turns)} turns, found {turns}")
        settings: dict[str, Any] = self._settings()
        settings["seed"] = self.seed if seed is None else seed
        game = Game.create(
            folder, history_kind=self.history_kind, rules=rules or self.rules, **settings
        )
        kept = self.turns[:turns]
        names = [name for turn in kept for name in (turn.clip, turn.representation_file)]
        for name in (*self.picture_files, *names):
            write_whole(folder / name, (self.folder / name).read_bytes())
        game.picture, game.start = self.picture, self.start
        game._put(Tree(kept))
        return game

    def history(self, *, before: int | None = None, window: int | None = None) -> list[TurnRecord]:
        """Returns the last `window - 1` turns before a turn, oldest first.

        The player's own picture counts as the turn before the first.

        Args:
            before: Number of that turn, from 1; None: the next one.
            window: Window of that turn; the game's if None.

        Raises:
            UserError: A shot representation cannot be read.
        """
        past: list[PictureTurn | Turn] = [] if self.picture is None else [self.picture]
        past += self.turns[: None if before is None else before - 1]
        window = self.window if window is None else window
        records = []
        for turn in past[max(0, len(past) - window + 1) :]:
            file = self.folder / turn.representation_file
            representation, first = read_representation(file, None)
            records.append(TurnRecord(turn.instruction, representation, window_states(turn), first))
        return records

    def save_storyboard(self) -> Path:
        """Draws the storyboard from the picture and the clips on disk and returns its path.

        Raises:
            OSError: It cannot be written.
            UserError: A clip cannot be read.
        """
        settings = f"seed {self.seed}  ·  window {self.window}  ·  {self.steps} steps"
        path = self.folder / STORYBOARD_FILE
        board = draw_board(
            self.folder, self.turns, picture=self.picture, title=self.model, settings=settings
        )
        write_whole(path, board)
        return path

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _save(self, **changed: Any) -> None:
        """Writes `game.json`, with other `turns`, `others`, `start` or `rules`."""
        names = ("turns", "others", "start", "rules")
        found: dict[str, Any] = {name: getattr(self, name) for name in names} | changed
        found |= {name: tuple(found[name]) for name in ("turns", "others")}
        document = GameDocument(
            history=self.history_kind, picture=self.picture, **found, **self._settings()
        )
        write_document(self.folder, document)
