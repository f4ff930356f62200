"""A saved game: its turns and meters on disk, where no finished turn is ever lost.

A turn is an instruction and the game state that answers it (paper, section 3): an animation
shot and the changes of the character's stamina, social and entertainment. On disk a game is a
folder with a clip and a shot representation per turn, `game.json`, and a storyboard. A game that
began with a player's own picture also holds the picture and its representation.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import numpy as np
from annotated_types import Ge, Interval
from jaxtyping import Float32, Int32, UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.game.representation_file import read_representation, write_representation
from animegamer_jax.media import storyboard, video
from animegamer_jax.media.pictures import encode_png, read_picture
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import from_json, parse_json, shown, to_json
from animegamer_jax.storage.untrusted import read_file

GAME_FILE = "game.json"
STORYBOARD_FILE = "storyboard.png"
PICTURE_FILE = "picture.png"
# `write_whole` turns it into the game file. Next to pictures it says that the process that wrote
# them was killed before there was a game.
_STARTED_FILE = f"{GAME_FILE}.part"

METERS = ("stamina", "social", "entertainment")
MAX_OTHERS = 400  # turns that are set aside in a game
_STEP = 5  # points of a meter for a change of one, as in the released demo

History = Literal["predicted", "shown"]
"""Shot representations of past turns, as `Protocol.history`."""

Rules = Literal["off", "day"]
"""Whether a game is played by the rules of `game.rules`."""

_Percent = Annotated[int, Interval(ge=0, le=100)]
_Change = Annotated[int, Interval(ge=-5, le=5)]  # the range of the vocabulary's state tokens
_Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
_Count = Annotated[int, Ge(1)]
_Setting = Annotated[int, Interval(ge=1, le=1000)]  # memory and time grow with them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meters:
    """The character's meters, from 0 to 100; they start at 50, as in the released demo."""

    stamina: _Percent = 50
    social: _Percent = 50
    entertainment: _Percent = 50

    def after(self, *, stamina: int, social: int, entertainment: int) -> "Meters":
        """Returns the meters after a turn's changes of five points each, within 0 and 100."""
        changes = {"stamina": stamina, "social": social, "entertainment": entertainment}
        return Meters(
            **{
                name: min(100, max(0, getattr(self, name) + _STEP * change))
                for name, change in changes.items()
            }
        )


class TurnRecord(NamedTuple):
    """What the networks need of a past turn.

    `states` are the motion level and the changes of social, entertainment and stamina.
    """

    instruction: str
    representation: Float32[np.ndarray, "n d"]
    states: Int32[np.ndarray, "4"]


class NewTurn(NamedTuple):
    """A turn as it was played, not saved yet: states as in `TurnRecord`, and how long it took."""

    states: Int32[np.ndarray, "4"]
    motion_value: float
    representation: Float32[np.ndarray, "n d"]
    frames: UInt8[np.ndarray, "f h w 3"]
    seconds: Mapping[str, float]


class NewPicture(NamedTuple):
    """A player's own picture as a turn, not saved yet: fields as in `TurnRecord`, and its pixels.

    It stands in the window as the turn before the first.
    """

    instruction: str
    representation: Float32[np.ndarray, "n d"]
    states: Int32[np.ndarray, "4"]
    pixels: UInt8[np.ndarray, "h w 3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureTurn:
    """The turn of a player's own picture, as in `game.json`; it does not change the meters.

    Attributes:
        instruction: the picture's text.
        motion_level: motion level that the model sees, 1 to 5.
        social: change that the model sees.
        entertainment: change that the model sees.
        stamina: change that the model sees.
    """

    instruction: str
    motion_level: Annotated[int, Interval(ge=1, le=5)]
    social: _Change
    entertainment: _Change
    stamina: _Change

    @property
    def representation_file(self) -> str:
        """Name of the file with the shot representation."""
        return "picture.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """What a player set after a turn, before the next one.

    Attributes:
        meters: meters with which the next turn begins.
        social, entertainment, stamina: changes of this turn as the window then holds them.
        new_day: whether a new day begins.
    """

    meters: Meters
    social: _Change
    entertainment: _Change
    stamina: _Change
    new_day: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn, as in `game.json`.

    Attributes:
        turn: number of the turn, from 1.
        instruction: the player's instruction.
        motion_level: motion level, 1 to 5.
        motion_value: motion value that the decoder received.
        social, entertainment, stamina: changes of the meters.
        meters: meters after this turn.
        clip: name of a file in the game's folder.
        seconds: duration: "total", and "mllm", "decoder", "vae" if they were separate programs.
        seed: seed of this turn.
        window: window of this turn.
        steps: denoising steps of this turn.
        chosen_level: whether the player set the motion level.
        edit: what the player set after this turn; None for nothing.
    """

    turn: _Count
    instruction: str
    motion_level: Annotated[int, Interval(ge=1, le=5)]
    motion_value: Annotated[float, Ge(0)]
    social: _Change
    entertainment: _Change
    stamina: _Change
    meters: Meters
    clip: str
    seconds: Mapping[str, Annotated[float, Ge(0)]]
    seed: _Seed
    window: _Setting
    steps: _Setting
    chosen_level: bool = False
    edit: Edit | None = dataclasses.field(default=None, metadata={"omit_default": True})

    @property
    def representation_file(self) -> str:
        """Name of the file with the shot representation."""
        return self.clip.removesuffix(".mp4") + ".npz"

    @property
    def next_meters(self) -> Meters:
        """Meters with which the next turn begins: those that the player set, if any."""
        return self.edit.meters if self.edit else self.meters

    @property
    def changes(self) -> dict[str, int]:
        """Changes of the meters by name."""
        return {name: getattr(self, name) for name in METERS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetAside:
    """A turn that is not in the game's current line, kept with its files.

    Attributes:
        after: clip of the turn before it; "" for a first turn.
        turn: the turn.
    """

    after: str
    turn: Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedGame:
    """The content of `game.json`."""

    format_version: Literal[1] = 1
    model: str
    protocol: str
    seed: _Seed
    window: _Setting
    steps: _Setting
    history: History = dataclasses.field(default="predicted", metadata={"omit_default": True})
    picture: PictureTurn | None = dataclasses.field(default=None, metadata={"omit_default": True})
    rules: Rules = dataclasses.field(default="off", metadata={"omit_default": True})
    start: Meters | None = dataclasses.field(default=None, metadata={"omit_default": True})
    turns: tuple[Turn, ...]
    others: tuple[SetAside, ...] = dataclasses.field(default=(), metadata={"omit_default": True})


@dataclasses.dataclass(kw_only=True)
class Game:
    """A game and its folder on disk, which holds every finished turn.

    Attributes:
        folder: folder of the game.
        model: name of the model.
        seed: seed of the turns.
        window: turns of context, this one included.
        steps: denoising steps per turn.
        protocol: name of the model's game protocol.
        history_kind: shot representations of past turns; those on disk are what later turns see.
        picture: turn of the player's own picture before the first; None if there is none.
        turns: finished turns of the current line, in order.
        rules: whether days end and have goals (`game.rules`).
        start: meters that the player set before the first turn; None for those of every game.
        others: turns that were undone, replaced or left for another line, the latest last.
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
            UserError: the folder already holds a game, is a file, or cannot be written.
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
                (folder / _STARTED_FILE).touch()
                game._add_picture(picture)
            game._save(game.turns)
        return game

    @classmethod
    def load(cls, folder: Path) -> "Game":
        """Reads a saved game and checks all of it: fields, clips, shot representations.

        Raises:
            UserError: names the file and the field, what was expected and what was found.
        """
        path = folder / GAME_FILE
        saved = from_json(_SavedGame, _read_document(path), str(path), hint=_HINT)

        def refuse(place: str, expected: str, found: Any) -> NoReturn:
            raise UserError(f"{path}: {place}: expected {expected}, found {shown(found)}: {_HINT}")

        for name in ("model", "protocol"):
            if not getattr(saved, name).strip():
                refuse(name, "a text", getattr(saved, name))
        shape = None
        if saved.picture is not None:
            if not saved.picture.instruction.strip():
                refuse("picture.instruction", "a text", saved.picture.instruction)
            read_picture(folder / PICTURE_FILE)
            file = folder / saved.picture.representation_file
            shape = read_representation(file, shape).shape
        clips: dict[str, Turn] = {}

        def check(place: str, turn: Turn, *, before: Turn | None) -> None:
            nonlocal shape
            clip, number = turn.clip, before.turn + 1 if before else 1
            if turn.turn != number:
                refuse(f"{place}.turn", f"{number}, because turns are in order", turn.turn)
            if not turn.instruction.strip():
                refuse(f"{place}.instruction", "a text", turn.instruction)
            if clip != Path(clip).name or set("\\\0") & set(clip) or not clip.endswith(".mp4"):
                refuse(f"{place}.clip", "the bare name of an .mp4 file in the game's folder", clip)
            if clip in clips:
                refuse(f"{place}.clip", "a file that no other turn has", clip)
            if "total" not in turn.seconds:
                refuse(f"{place}.seconds", "the field total", turn.seconds)
            clips[clip] = turn
            meters = before.next_meters if before else saved.start or Meters()
            meters = meters.after(**turn.changes)
            for name in METERS:
                expected, found = getattr(meters, name), getattr(turn.meters, name)
                if found != expected:
                    refuse(f"{place}.meters.{name}", f"{expected} from the turns' changes", found)
            video.check_mp4(folder / clip)
            shape = read_representation(folder / turn.representation_file, shape).shape

        for index, turn in enumerate(saved.turns):
            check(f"turns[{index}]", turn, before=saved.turns[index - 1] if index else None)
        # By number, so that the turn before another one is checked first.
        for index, other in sorted(enumerate(saved.others), key=lambda pair: pair[1].turn.turn):
            if other.after and other.after not in clips:
                refuse(f"others[{index}].after", "the clip of an earlier turn", other.after)
            check(f"others[{index}].turn", other.turn, before=clips.get(other.after))
        return cls(
            folder=folder,
            history_kind=saved.history,
            picture=saved.picture,
            turns=list(saved.turns),
            rules=saved.rules,
            start=saved.start,
            others=list(saved.others),
            **{name: getattr(saved, name) for name in _SETTINGS},
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
    def all_turns(self) -> tuple[Turn, ...]:
        """Turns of the current line, then those that are set aside."""
        return (*self.turns, *(other.turn for other in self.others))

    def began_with(self, pixels: UInt8[np.ndarray, "h w 3"]) -> bool:
        """Returns whether the game began with this picture, which has the size of a clip.

        Raises:
            UserError: the stored picture cannot be read.
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
        set_aside: bool = False,
    ) -> Turn:
        """Saves a finished turn: its clip, its shot representation, then `game.json`.

        A small clip is saved enlarged (`video.enlarge`), because players show it at its own size.

        Until `game.json` is renamed into place the game on disk and in memory is the one without
        this turn, so an interruption at any point leaves the earlier turns intact.

        Args:
            played: The turn of this game in the player's output.
            instruction: The player's instruction.
            after: Number of earlier turns to keep; this turn replaces the others. None: all.
            seed: Seed of this turn; the game's if None.
            window: Window of this turn; the game's if None.
            steps: Denoising steps of this turn; the game's if None.
            chosen_level: Whether the player set the motion level.
            set_aside: Whether replaced turns are kept (`others`) and not deleted.

        Raises:
            OSError: full disk, read-only folder.
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
            clip=self._free_clip(number),
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
        write_representation(self.folder / turn.representation_file, played.representation)
        if set_aside:
            self._put([*kept, turn], [*self.others, *self._aside(len(kept))])
        else:
            self._keep([*kept, turn])
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
        write_representation(self.folder / turn.representation_file, picture.representation)
        self.picture = turn

    def undo(self, turns: int = 1) -> None:
        """Removes the last turns, then their clips.

        Raises:
            UserError: the game has fewer turns.
            OSError: read-only folder.
        """
        self._check_undo(turns)
        self._keep(self.turns[:-turns])

    def _check_undo(self, turns: int) -> None:
        if not 1 <= turns <= len(self.turns):
            raise UserError(f"undo: expected 1 to {len(self.turns)} turns, found {turns}")

    def _aside(self, kept: int) -> list[SetAside]:
        """Returns the turns after the first `kept`, as they are set aside."""
        clips = ["", *(turn.clip for turn in self.turns)]
        return [
            SetAside(after=clips[index], turn=self.turns[index])
            for index in range(kept, len(self.turns))
        ]

    def set_aside(self, turns: int = 1) -> None:
        """Takes the last turns out of the current line; `redo` brings them back.

        Raises:
            UserError: the game has fewer turns.
            OSError: read-only folder.
        """
        self._check_undo(turns)
        kept = len(self.turns) - turns
        self._put(self.turns[:kept], [*self.others, *self._aside(kept)])

    def next_turn(self) -> Turn | None:
        """Returns the turn that `redo` would bring back."""
        last = self.turns[-1].clip if self.turns else ""
        found = [other.turn for other in self.others if other.after == last]
        return found[-1] if found else None

    def redo(self) -> Turn:
        """Brings the turn back that was set aside last after the current one.

        Raises:
            UserError: there is none.
            OSError: read-only folder.
        """
        turn = self.next_turn()
        if turn is None:
            raise UserError("no turn to bring back")
        self._put(
            [*self.turns, turn], [other for other in self.others if other.turn.clip != turn.clip]
        )
        return turn

    def go_to(self, clip: str) -> None:
        """Makes the turns up to a clip the current line; sets the others aside.

        Args:
            clip: A turn's clip; "" for the start of the game.

        Raises:
            UserError: no turn has this clip.
            OSError: read-only folder.
        """
        found = {other.turn.clip: other for other in (*self._aside(0), *self.others)}
        line: list[Turn] = []
        while clip:
            if clip not in found:
                raise UserError(f"no turn with the clip {clip[:40]!r} in this game")
            line.insert(0, found[clip].turn)
            clip = found[clip].after
        taken = {turn.clip for turn in line}
        # The current line is set aside last, so `redo` continues along it.
        self._put(
            line,
            [other for other in (*self.others, *self._aside(0)) if other.turn.clip not in taken],
        )

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
            UserError: there is no turn in the current line, and others began with other meters.
            OSError: full disk, read-only folder.
        """
        if not self.turns:
            if self.others:
                raise UserError("meters: expected a turn before them: set them in a new game")
            start = None if meters == Meters() else meters
            self._save(self.turns, start=start)
            self.start = start
            return
        last = self.turns[-1]
        changes = {
            name: min(
                allowed[name],
                key=lambda value, name=name: abs(
                    last.changes[name]
                    + (getattr(meters, name) - getattr(last.meters, name)) / _STEP
                    - value
                ),
            )
            for name in METERS
        }
        plain = meters == last.meters and not new_day
        edit = None if plain else Edit(meters=meters, new_day=new_day, **changes)
        followed = any(other.after == last.clip for other in self.others)
        turn, others = dataclasses.replace(last, edit=edit), list(self.others)
        if followed:
            turn = dataclasses.replace(turn, clip=self._free_clip(last.turn))
            for old, new in (
                (last.clip, turn.clip),
                (last.representation_file, turn.representation_file),
            ):
                write_whole(self.folder / new, (self.folder / old).read_bytes())
            others += self._aside(len(self.turns) - 1)
        self._put([*self.turns[:-1], turn], others)

    def _put(self, turns: list[Turn], others: list[SetAside]) -> None:
        """Makes these the turns of the game, on disk and in memory."""
        dropped, others = _bounded(others)
        self._save(turns, others=others)
        self.turns, self.others = turns, others
        for turn in dropped:
            self._remove(turn)

    def set_rules(self, rules: Rules) -> None:
        """Switches the rules on or off.

        Raises:
            OSError: read-only folder.
        """
        self._save(self.turns, rules=rules)
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
            UserError: the game has fewer turns, or as `create`.
            OSError: full disk.
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
        game._keep(kept)
        return game

    def _free_clip(self, number: int) -> str:
        """Returns an unused name for a clip: a turn that is played again gets another file."""
        taken = {turn.clip for turn in self.all_turns}
        marks = itertools.chain([""], (f"_{again}" for again in itertools.count(2)))
        names = (f"turn_{number:03d}{mark}.mp4" for mark in marks)
        return next(name for name in names if name not in taken)

    def _keep(self, turns: list[Turn]) -> None:
        """Makes these the turns of the game, on disk and in memory, and deletes other files.

        Turns that are set aside and came after a deleted one are deleted, too.
        """
        kept = {turn.clip for turn in turns}
        dropped = [turn for turn in self.turns if turn.clip not in kept]
        gone, others = {turn.clip for turn in dropped}, []
        for other in sorted(self.others, key=lambda other: other.turn.turn):
            if other.after in gone:
                gone.add(other.turn.clip)
                dropped.append(other.turn)
        others = [other for other in self.others if other.turn.clip not in gone]
        self._save(turns, others=others)
        self.turns, self.others = turns, others
        for turn in dropped:
            self._remove(turn)

    def _remove(self, turn: Turn) -> None:
        """Deletes a turn's files; those made of its clip, too."""
        for name in (turn.clip, turn.representation_file):
            (self.folder / name).unlink(missing_ok=True)

    def history(self, *, before: int | None = None, window: int | None = None) -> list[TurnRecord]:
        """Returns the last `window - 1` turns before a turn, oldest first.

        The player's own picture counts as the turn before the first.

        Args:
            before: number of that turn, from 1; None: the next one.
            window: window of that turn; the game's if None.

        Raises:
            UserError: a shot representation cannot be read.
        """
        past: list[PictureTurn | Turn] = [] if self.picture is None else [self.picture]
        past += self.turns[: None if before is None else before - 1]
        window = self.window if window is None else window
        return [
            TurnRecord(
                instruction=turn.instruction,
                representation=read_representation(self.folder / turn.representation_file, None),
                states=_states(turn),
            )
            for turn in past[max(0, len(past) - window + 1) :]
        ]

    def save_storyboard(self) -> Path:
        """Draws the storyboard from the picture and the clips on disk and returns its path.

        Raises:
            OSError: it cannot be written.
            UserError: a clip cannot be read.
        """
        shown = self.turns[-storyboard.MAX_PANELS :]
        panels = [
            storyboard.Panel(
                turn=turn.turn,
                instruction=turn.instruction,
                frames=video.pick_frames(video.read_mp4(self.folder / turn.clip)),
                motion_level=turn.motion_level,
                changes=turn.changes,
                meters=dataclasses.asdict(turn.meters),
            )
            for turn in shown
        ]
        if self.picture is not None and len(panels) < storyboard.MAX_PANELS:
            panels.insert(0, self._picture_panel(self.picture))
        count = f"{len(self.turns)} turn" + "s" * (len(self.turns) != 1)
        if len(shown) < len(self.turns):
            count = f"turns {shown[0].turn} to {shown[-1].turn} of {count}"
        note = f"{count}  ·  seed {self.seed}  ·  window {self.window}  ·  {self.steps} steps"
        path = self.folder / STORYBOARD_FILE
        write_whole(path, storyboard.storyboard(panels, title=self.model, note=note))
        return path

    def _picture_panel(self, picture: PictureTurn) -> storyboard.Panel:
        """Returns the panel of the player's own picture, with the meters of the start."""
        pixels = read_picture(self.folder / PICTURE_FILE).pixels
        blank = np.full_like(pixels, 255)  # so that its text is under those of the clips
        return storyboard.Panel(
            turn=0,
            instruction=picture.instruction,
            frames=np.stack([pixels, blank, blank, blank]),
            motion_level=picture.motion_level,
            changes=dict.fromkeys(METERS, 0),
            meters=dataclasses.asdict(Meters()),
        )

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _save(self, turns: list[Turn], **changed: Any) -> None:
        """Writes `game.json` with these turns, and with other `others`, `start` or `rules`."""
        found = {name: getattr(self, name) for name in ("others", "start", "rules")} | changed
        saved = _SavedGame(
            turns=tuple(turns),
            others=tuple(found["others"]),
            start=found["start"],
            rules=found["rules"],
            history=self.history_kind,
            picture=self.picture,
            **self._settings(),
        )
        text = json.dumps(to_json(saved), indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(self.folder / GAME_FILE, (text + "\n").encode())


def _states(turn: "PictureTurn | Turn") -> Int32[np.ndarray, "4"]:
    """Returns the states of a past turn as the window holds them."""
    seen = turn.edit if isinstance(turn, Turn) and turn.edit else turn
    return np.array([turn.motion_level, seen.social, seen.entertainment, seen.stamina], np.int32)


def _bounded(others: list[SetAside]) -> tuple[list[Turn], list[SetAside]]:
    """Returns the turns to drop so that no more than `MAX_OTHERS` are set aside, and the others.

    The oldest goes first that no other turn follows.
    """
    others, dropped = list(others), []
    while len(others) > MAX_OTHERS:
        followed = {other.after for other in others}
        leaf = next(other for other in others if other.turn.clip not in followed)
        others.remove(leaf)
        dropped.append(leaf.turn)
    return dropped, others


def check_no_game(folder: Path) -> None:
    """Checks that a folder holds no game and no part of one; other files do not matter.

    Raises:
        UserError: `folder` is a file, or holds a game or files that a game would overwrite.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: expected a folder for the game, found a file")
    if (folder / GAME_FILE).exists():
        raise UserError(
            f"{folder}: expected a folder without a game, found {GAME_FILE}: continue it with "
            "--resume, or name another folder with --out"
        )
    patterns = ["turn_*.mp4", "turn_*.npz", STORYBOARD_FILE]
    if not (folder / _STARTED_FILE).exists():
        patterns += ["picture.npz", PICTURE_FILE]
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            raise UserError(
                f"{folder}: expected a folder without a game, found {path.name} but no "
                f"{GAME_FILE}: name another folder with --out"
            )


_SETTINGS = ("model", "protocol", "seed", "window", "steps")
_SECONDS = ("mllm", "decoder", "vae", "total")


_HINT = "restore the file, or start another game with --out"


def _read_document(path: Path) -> Any:
    with user_errors(path, "no saved game", hint=_HINT):
        content = parse_json(read_file(path), str(path), hint=_HINT)
    # Turns of earlier versions lack these: they were played with the game's.
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        for turn in content["turns"]:
            for name in ("seed", "window", "steps"):
                turn.setdefault(name, content[name])
    return content
