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
from collections.abc import Mapping
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

_STEP = 5  # points of a meter for a change of one, as in the released demo

History = Literal["predicted", "shown"]
"""Shot representations of past turns, as `Protocol.history`."""

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

    @property
    def representation_file(self) -> str:
        """Name of the file with the shot representation."""
        return self.clip.removesuffix(".mp4") + ".npz"

    @property
    def changes(self) -> dict[str, int]:
        """Changes of the meters by name."""
        return {name: getattr(self, name) for name in _METERS}


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
    turns: tuple[Turn, ...]


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
        turns: finished turns, in order.
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
        )
        with user_errors(folder, "cannot hold a game", hint="choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            if picture is not None:
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
        clips, meters, shape = set(), Meters(), None
        if saved.picture is not None:
            if not saved.picture.instruction.strip():
                refuse("picture.instruction", "a text", saved.picture.instruction)
            read_picture(folder / PICTURE_FILE)
            file = folder / saved.picture.representation_file
            shape = read_representation(file, shape).shape
        for index, turn in enumerate(saved.turns):
            place, clip = f"turns[{index}]", turn.clip
            if turn.turn != index + 1:
                refuse(f"{place}.turn", f"{index + 1}, because turns are in order", turn.turn)
            if not turn.instruction.strip():
                refuse(f"{place}.instruction", "a text", turn.instruction)
            if clip != Path(clip).name or set("\\\0") & set(clip) or not clip.endswith(".mp4"):
                refuse(f"{place}.clip", "the bare name of an .mp4 file in the game's folder", clip)
            if clip in clips:
                refuse(f"{place}.clip", "a file that no other turn has", clip)
            if "total" not in turn.seconds:
                refuse(f"{place}.seconds", "the field total", turn.seconds)
            clips.add(clip)
            meters = meters.after(**turn.changes)
            for name in _METERS:
                expected, found = getattr(meters, name), getattr(turn.meters, name)
                if found != expected:
                    refuse(f"{place}.meters.{name}", f"{expected} from the turns' changes", found)
            video.check_mp4(folder / clip)
            shape = read_representation(folder / turn.representation_file, shape).shape
        return cls(
            folder=folder,
            history_kind=saved.history,
            picture=saved.picture,
            turns=list(saved.turns),
            **{name: getattr(saved, name) for name in _SETTINGS},
        )

    @property
    def picture_files(self) -> tuple[str, ...]:
        """Names of the files of the player's own picture; empty if there is none."""
        return (PICTURE_FILE, self.picture.representation_file) if self.picture else ()

    @property
    def representation_files(self) -> tuple[str, ...]:
        """Names of the files with shot representations, the picture's first."""
        pictures = self.picture_files[1:]
        return (*pictures, *(turn.representation_file for turn in self.turns))

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
        """Meters after the last turn."""
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
        video.write_mp4(self.folder / turn.clip, video.enlarge(played.frames))
        write_representation(self.folder / turn.representation_file, played.representation)
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
        if not 1 <= turns <= len(self.turns):
            raise UserError(f"undo: expected 1 to {len(self.turns)} turns, found {turns}")
        self._keep(self.turns[:-turns])

    def branch(self, folder: Path, turns: int) -> "Game":
        """Starts another game in `folder` with the picture and the first `turns` of this one.

        Raises:
            UserError: the game has fewer turns, or as `create`.
            OSError: full disk.
        """
        if not 0 <= turns <= len(self.turns):
            raise UserError(f"branch: expected 0 to {len(self.turns)} turns, found {turns}")
        game = Game.create(folder, history_kind=self.history_kind, **self._settings())
        kept = self.turns[:turns]
        names = [name for turn in kept for name in (turn.clip, turn.representation_file)]
        for name in (*self.picture_files, *names):
            write_whole(folder / name, (self.folder / name).read_bytes())
        game.picture = self.picture
        game._keep(kept)
        return game

    def _free_clip(self, number: int) -> str:
        """Returns an unused name for a clip: a turn that is played again gets another file."""
        taken = {turn.clip for turn in self.turns}
        marks = itertools.chain([""], (f"_{again}" for again in itertools.count(2)))
        names = (f"turn_{number:03d}{mark}.mp4" for mark in marks)
        return next(name for name in names if name not in taken)

    def _keep(self, turns: list[Turn]) -> None:
        """Makes these the turns of the game, on disk and in memory, and deletes other files."""
        self._save(turns)
        kept = {turn.clip for turn in turns}
        dropped = [turn for turn in self.turns if turn.clip not in kept]
        self.turns = turns
        for turn in dropped:
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
                states=np.array(
                    [turn.motion_level, turn.social, turn.entertainment, turn.stamina], np.int32
                ),
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
            changes=dict.fromkeys(_METERS, 0),
            meters=dataclasses.asdict(Meters()),
        )

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _save(self, turns: list[Turn]) -> None:
        saved = _SavedGame(
            turns=tuple(turns),
            history=self.history_kind,
            picture=self.picture,
            **self._settings(),
        )
        text = json.dumps(to_json(saved), indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(self.folder / GAME_FILE, (text + "\n").encode())


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
    for pattern in ("turn_*.mp4", "turn_*.npz", "picture.npz", PICTURE_FILE, STORYBOARD_FILE):
        for path in sorted(folder.glob(pattern)):
            raise UserError(
                f"{folder}: expected a folder without a game, found {path.name} but no "
                f"{GAME_FILE}: name another folder with --out"
            )


_SETTINGS = ("model", "protocol", "seed", "window", "steps")
_METERS = ("stamina", "social", "entertainment")
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
