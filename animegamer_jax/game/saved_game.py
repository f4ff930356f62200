"""What a player holds: a game, its turns and the meters, saved so that nothing finished is lost.

A turn is an instruction and the game state that answers it (paper, section 3): an animation
shot and the changes of the character's stamina, social and entertainment. On disk a game is a
folder with a clip and a shot representation a turn, `game.json`, and a storyboard.
"""

import dataclasses
import io
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.media import storyboard, video
from animegamer_jax.storage.files import write_whole

FORMAT_VERSION = 1
GAME_FILE = "game.json"
STORYBOARD_FILE = "storyboard.png"

_STEP = 5  # how far a meter moves for a change of one; the released demo's number
_LARGEST_CHANGE = 5  # the vocabulary's state tokens run from -5 to 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meters:
    """The character's running values, 0 to 100, as in the released demo: they start at 50."""

    stamina: int = 50
    social: int = 50
    entertainment: int = 50

    def after(self, *, stamina: int, social: int, entertainment: int) -> "Meters":
        """The meters after one turn's changes, each worth five points, kept within 0 and 100."""
        changes = {"stamina": stamina, "social": social, "entertainment": entertainment}
        return Meters(
            **{
                name: min(100, max(0, getattr(self, name) + _STEP * change))
                for name, change in changes.items()
            }
        )


class TurnRecord(NamedTuple):
    """What the networks need of a turn that is past.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn as `game.json` holds it; `clip` is the name of a file in the game's folder.

    `meters` are the values after this turn. `seconds` has the key total, and mllm, decoder
    and vae where a turn was not one program. `seed`, `window` and `steps` are what it was played
    with: the game's, unless the player asked for others; `chosen_level` says that the player set
    the motion level.
    """

    turn: int
    instruction: str
    motion_level: int
    motion_value: float
    social: int
    entertainment: int
    stamina: int
    meters: Meters
    clip: str
    seconds: Mapping[str, float]
    seed: int
    window: int
    steps: int
    chosen_level: bool = False

    @property
    def representation_file(self) -> str:
        """The file beside the clip that holds the shot representation."""
        return self.clip.removesuffix(".mp4") + ".npz"

    @property
    def changes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _METERS}


@dataclasses.dataclass(kw_only=True)
class Game:
    """A game and the folder it lives in; every finished turn is on the disk.

    `steps` are the denoising steps a turn, `protocol` the name of the model's game protocol.
    """

    folder: Path
    model: str
    seed: int
    window: int
    steps: int
    protocol: str
    turns: list[Turn] = dataclasses.field(default_factory=list)

    @classmethod
    def create(
        cls, folder: Path, *, model: str, seed: int, window: int, steps: int, protocol: str
    ) -> "Game":
        """Starts a game without turns in `folder`, which is made where it is missing.

        Raises:
            UserError: the folder holds a game already, is a file, or cannot be written.
        """
        check_no_game(folder)
        game = cls(
            folder=folder, model=model, seed=seed, window=window, steps=steps, protocol=protocol
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            game._save(game.turns)
        except OSError as error:
            raise UserError(
                f"{folder}: expected a folder to write the game to, found: {error.strerror}"
            ) from error
        return game

    @classmethod
    def load(cls, folder: Path) -> "Game":
        """Reads a saved game and checks all of it: fields, clips, shot representations.

        Raises:
            UserError: names the file and the field, what was expected and what was found.
        """
        path = folder / GAME_FILE
        fields = _Fields(path, _read_json(path), "")
        version = fields.whole("format_version", low=1)
        if version != FORMAT_VERSION:
            fields.refuse("format_version", f"{FORMAT_VERSION}, which this program writes", version)
        game = cls(
            folder=folder,
            model=fields.text("model"),
            seed=fields.whole("seed", low=0),
            window=fields.whole("window", low=1),
            steps=fields.whole("steps", low=1),
            protocol=fields.text("protocol"),
        )
        shape = None
        for index, value in enumerate(fields.items("turns")):
            turn = _parse_turn(_Fields(path, value, f"turns[{index}]"), index + 1, game)
            if turn.clip in [other.clip for other in game.turns]:
                raise UserError(
                    f"{path}: turns[{index}].clip: expected a file of its own, found {turn.clip}, "
                    "which another turn has"
                )
            video.check_mp4(folder / turn.clip)
            shape = _read_representation(folder / turn.representation_file, shape).shape
            game.turns.append(turn)
        return game

    @property
    def meters(self) -> Meters:
        """The meters now."""
        return self.turns[-1].meters if self.turns else Meters()

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
            after: Number of earlier turns to keep; this turn replaces the others. None: all.
            seed: Seed of this turn; the game's if None.
            window: Window of this turn; the game's if None.
            steps: Denoising steps of this turn; the game's if None.
            chosen_level: Whether the player set the motion level.

        Raises:
            OSError: full disk, read-only folder.
        """
        level, social, entertainment, stamina = (int(value) for value in played.states)
        changes = {"stamina": stamina, "social": social, "entertainment": entertainment}
        kept = self.turns[:after]
        number = len(kept) + 1
        meters = kept[-1].meters if kept else Meters()
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
        arrays = io.BytesIO()
        np.savez_compressed(arrays, representation=played.representation)
        video.write_mp4(self.folder / turn.clip, video.enlarge(played.frames))
        write_whole(self.folder / turn.representation_file, arrays.getvalue())
        self._keep([*kept, turn])
        return turn

    def undo(self, turns: int = 1) -> None:
        """Forgets the last turns, and then their clips.

        Raises:
            UserError: there are not so many.
            OSError: read-only folder.
        """
        if not 1 <= turns <= len(self.turns):
            raise UserError(f"undo: expected 1 to {len(self.turns)} turns, found {turns}")
        self._keep(self.turns[:-turns])

    def branch(self, folder: Path, turns: int) -> "Game":
        """Another game in `folder` that begins with the first `turns` of this one.

        Raises:
            UserError: there are not so many, or the folder as in `create`.
            OSError: full disk.
        """
        if not 0 <= turns <= len(self.turns):
            raise UserError(f"branch: expected 0 to {len(self.turns)} turns, found {turns}")
        game = Game.create(
            folder,
            model=self.model,
            seed=self.seed,
            window=self.window,
            steps=self.steps,
            protocol=self.protocol,
        )
        kept = self.turns[:turns]
        for turn in kept:
            for name in (turn.clip, turn.representation_file):
                write_whole(folder / name, (self.folder / name).read_bytes())
        game._keep(kept)
        return game

    def _free_clip(self, number: int) -> str:
        """A name for a clip that no turn has: a turn tried again has another file."""
        taken = {turn.clip for turn in self.turns}
        marks = itertools.chain([""], (f"_{again}" for again in itertools.count(2)))
        names = (f"turn_{number:03d}{mark}.mp4" for mark in marks)
        return next(name for name in names if name not in taken)

    def _keep(self, turns: list[Turn]) -> None:
        """These turns are the game, on the disk and here; files of others go."""
        self._save(turns)
        kept = {turn.clip for turn in turns}
        dropped = [turn for turn in self.turns if turn.clip not in kept]
        self.turns = turns
        for turn in dropped:
            for name in (turn.clip, turn.representation_file):
                (self.folder / name).unlink(missing_ok=True)

    def history(self, *, before: int | None = None, window: int | None = None) -> list[TurnRecord]:
        """The turns that the next one sees: the last `window - 1`, oldest first.

        Args:
            before: the turn that sees them, from 1; None: the next one.
            window: of that turn; the game's if None.

        Raises:
            UserError: a shot representation cannot be read.
        """
        end = len(self.turns) if before is None else before - 1
        window = self.window if window is None else window
        return [
            TurnRecord(
                instruction=turn.instruction,
                representation=_read_representation(self.folder / turn.representation_file, None),
                states=np.array(
                    [turn.motion_level, turn.social, turn.entertainment, turn.stamina], np.int32
                ),
            )
            for turn in self.turns[max(0, end - window + 1) : end]
        ]

    def save_storyboard(self) -> Path:
        """Draws the storyboard from the clips on the disk and returns its path.

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
        count = f"{len(self.turns)} turn" + "s" * (len(self.turns) != 1)
        if len(shown) < len(self.turns):
            count = f"turns {shown[0].turn} to {shown[-1].turn} of {count}"
        note = f"{count}  ·  seed {self.seed}  ·  window {self.window}  ·  {self.steps} steps"
        path = self.folder / STORYBOARD_FILE
        write_whole(path, storyboard.storyboard(panels, title=self.model, note=note))
        return path

    def _save(self, turns: list[Turn]) -> None:
        document = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "protocol": self.protocol,
            "seed": self.seed,
            "window": self.window,
            "steps": self.steps,
            "turns": [dataclasses.asdict(turn) for turn in turns],
        }
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(self.folder / GAME_FILE, (text + "\n").encode())


def check_no_game(folder: Path) -> None:
    """Refuses a folder that holds a game or parts of one; other files do not matter.

    Raises:
        UserError: `folder` is a file, or holds a game or files that a game would overwrite.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: expected a folder for the game, found a file")
    if (folder / GAME_FILE).exists():
        raise UserError(
            f"{folder}: expected a folder without a game, found {GAME_FILE}: go on with it by "
            "--resume, or name another folder by --out"
        )
    for pattern in ("turn_*.mp4", "turn_*.npz", STORYBOARD_FILE):
        for path in sorted(folder.glob(pattern)):
            raise UserError(
                f"{folder}: expected a folder without a game, found {path.name} but no "
                f"{GAME_FILE}: name another folder by --out"
            )


_METERS = ("stamina", "social", "entertainment")
_SECONDS = ("mllm", "decoder", "vae", "total")


class _Fields:
    """Typed reading of one JSON object: what does not fit is refused by name."""

    def __init__(self, path: Path, value: Any, where: str):
        self.path, self.where = path, where
        if not isinstance(value, dict):
            found = f"{self.path}: {where or 'the document'}: expected an object"
            raise UserError(f"{found}, found {_brief(value)}")
        self.value = value

    def refuse(self, name: str, expected: str, found: Any) -> None:
        where = f"{self.where}.{name}" if self.where else name
        raise UserError(f"{self.path}: {where}: expected {expected}, found {_brief(found)}")

    def get(self, name: str, expected: str) -> Any:
        if name not in self.value:
            where = f"{self.where}.{name}" if self.where else name
            raise UserError(f"{self.path}: {where}: expected {expected}, found no such field")
        return self.value[name]

    def whole(self, name: str, *, low: int, high: int | None = None) -> int:
        top = f" to {high}" if high is not None else " or more"
        expected = f"a whole number, {low}{top}"
        value = self.get(name, expected)
        if type(value) is not int or value < low or (high is not None and value > high):
            self.refuse(name, expected, value)
        return value

    def real(self, name: str) -> float:
        expected = "a number, 0 or more"
        value = self.get(name, expected)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            self.refuse(name, expected, value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, "true or false")
        if not isinstance(value, bool):
            self.refuse(name, "true or false", value)
        return value

    def text(self, name: str) -> str:
        value = self.get(name, "a text")
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, "a text", value)
        return value

    def items(self, name: str) -> list[Any]:
        value = self.get(name, "a list")
        if not isinstance(value, list):
            self.refuse(name, "a list", value)
        return value

    def inner(self, name: str) -> "_Fields":
        where = f"{self.where}.{name}" if self.where else name
        return _Fields(self.path, self.get(name, "an object"), where)


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected a saved game, found no such file") from error
    except OSError as error:
        raise UserError(f"{path}: expected a saved game, found: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at "
            f"offset {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: expected JSON, found an error at line {error.lineno}, column {error.colno}: "
            f"{error.msg}; restore the file, or start another game with --out"
        ) from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: expected a saved game, found other JSON ({error})") from error


def _parse_turn(fields: _Fields, number: int, game: Game) -> Turn:
    """Turn `number`, which follows those of `game`."""
    found = fields.whole("turn", low=1)
    if found != number:
        fields.refuse("turn", f"{number}, as turns are in order", found)
    clip = fields.text("clip")
    if clip != Path(clip).name or "\\" in clip or "\0" in clip or not clip.endswith(".mp4"):
        fields.refuse("clip", "the bare name of an .mp4 file in the game's folder", clip)
    seconds, meters = fields.inner("seconds"), fields.inner("meters")
    turn = Turn(
        turn=number,
        instruction=fields.text("instruction"),
        motion_level=fields.whole("motion_level", low=1, high=5),
        motion_value=fields.real("motion_value"),
        meters=Meters(**{name: meters.whole(name, low=0, high=100) for name in _METERS}),
        clip=clip,
        seconds={
            name: seconds.real(name)
            for name in _SECONDS
            if name == "total" or name in seconds.value
        },
        # Games of before this was kept: their turns were played as the game says.
        seed=fields.whole("seed", low=0) if "seed" in fields.value else game.seed,
        window=fields.whole("window", low=1) if "window" in fields.value else game.window,
        steps=fields.whole("steps", low=1) if "steps" in fields.value else game.steps,
        chosen_level="chosen_level" in fields.value and fields.flag("chosen_level"),
        **{
            name: fields.whole(name, low=-_LARGEST_CHANGE, high=_LARGEST_CHANGE) for name in _METERS
        },
    )
    expected = game.meters.after(**turn.changes)
    for name in _METERS:
        value = getattr(expected, name)
        if getattr(turn.meters, name) != value:
            meters.refuse(name, f"{value}, by the change before it", getattr(turn.meters, name))
    return turn


# What numpy raises for a damaged, cut or foreign file.
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    AttributeError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


def _read_representation(path: Path, shape: tuple[int, ...] | None) -> Float32[np.ndarray, "n d"]:
    """A turn's shot representation, of the shape of the other turns' where one is given."""
    expected = "a float32 array 'representation' of " + (
        "two axes" if shape is None else f"shape {list(shape)}"
    )
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            array = arrays["representation"]
    except FileNotFoundError as error:
        raise UserError(f"{path}: expected {expected}, found no such file") from error
    except _UNREADABLE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: expected {expected}, found: {reason}") from error
    if array.dtype != np.float32 or array.ndim != 2 or shape not in (None, array.shape):
        found = f"{array.dtype} of shape {list(array.shape)}"
        raise UserError(f"{path}: expected {expected}, found {found}")
    if not np.isfinite(array).all():
        raise UserError(f"{path}: expected finite numbers in 'representation', found others")
    return array
