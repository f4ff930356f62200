"""`game.json` in a game's folder: which turns there are. Nobody trusts what it says."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.representation_file import read_representation
from animegamer_jax.game.saved.turns import (
    METERS,
    History,
    Meters,
    PictureTurn,
    Rules,
    Seed,
    SetAside,
    Setting,
    Turn,
)
from animegamer_jax.media import video
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.storage.serialization import from_json, parse_json, shown, to_json
from animegamer_jax.storage.untrusted import read_file

GAME_FILE = "game.json"
STORYBOARD_FILE = "storyboard.png"
PICTURE_FILE = "picture.png"
# `write_whole` turns it into the game file. Next to pictures it says that the process that wrote
# them was killed before there was a game.
STARTED_FILE = f"{GAME_FILE}.part"
_HINT = "restore the file, or start another game with --out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameDocument:
    """The content of `game.json`; fields as in `saved_game.Game`."""

    format_version: Literal[1] = 1
    model: str
    protocol: str
    seed: Seed
    window: Setting
    steps: Setting
    history: History = dataclasses.field(default="predicted", metadata={"omit_default": True})
    picture: PictureTurn | None = dataclasses.field(default=None, metadata={"omit_default": True})
    rules: Rules = dataclasses.field(default="off", metadata={"omit_default": True})
    start: Meters | None = dataclasses.field(default=None, metadata={"omit_default": True})
    turns: tuple[Turn, ...]
    others: tuple[SetAside, ...] = dataclasses.field(default=(), metadata={"omit_default": True})


def write_document(folder: Path, document: GameDocument) -> None:
    """Writes `game.json` as a whole: readers see this one or the one before.

    Raises:
        OSError: Full disk, read-only folder.
    """
    text = json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(folder / GAME_FILE, (text + "\n").encode())


def read_document(folder: Path) -> GameDocument:
    """Reads `game.json` and checks all of it, and the files that it names.

    Raises:
        UserError: Names the file and the field, what was expected and what was found.
    """
    document = from_json(
        GameDocument, _read_json(folder / GAME_FILE), str(folder / GAME_FILE), hint=_HINT
    )
    check = _Check(folder, document)
    check.settings()
    if document.picture is not None:
        check.picture(document.picture)
    before = None
    for index, turn in enumerate(document.turns):
        check.turn(f"turns[{index}]", turn, before=before)
        before = turn
    # By number, so that the turn before another one is checked first.
    for index, other in sorted(enumerate(document.others), key=lambda pair: pair[1].turn.turn):
        check.other(f"others[{index}]", other)
    return document


def _read_json(path: Path) -> Any:
    with user_errors(path, "no saved game", hint=_HINT):
        content = parse_json(read_file(path), str(path), hint=_HINT)
    # Turns of earlier versions lack these: they were played with the game's.
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        for turn in content["turns"]:
            for name in ("seed", "window", "steps"):
                turn.setdefault(name, content[name])
    return content


class _Check:
    """What is checked of a document beyond the types of its fields."""

    def __init__(self, folder: Path, document: GameDocument):
        self._folder, self._document = folder, document
        self._clips: dict[str, Turn] = {}  # of the turns that were checked
        self._shape: tuple[int, ...] | None = None  # that all representations have

    def _refuse(self, place: str, expected: str, found: Any) -> NoReturn:
        raise UserError(
            f"{self._folder / GAME_FILE}: {place}: expected {expected}, found {shown(found)}: "
            f"{_HINT}"
        )

    def _text(self, place: str, text: str) -> None:
        if not text.strip():
            self._refuse(place, "a text", text)

    def _representation(self, name: str) -> None:
        representation, _ = read_representation(self._folder / name, self._shape)
        self._shape = representation.shape

    def settings(self) -> None:
        self._text("model", self._document.model)
        self._text("protocol", self._document.protocol)

    def picture(self, picture: PictureTurn) -> None:
        self._text("picture.instruction", picture.instruction)
        read_picture(self._folder / PICTURE_FILE)
        self._representation(picture.representation_file)

    def turn(self, place: str, turn: Turn, *, before: Turn | None) -> None:
        clip, number = turn.clip, before.turn + 1 if before else 1
        if turn.turn != number:
            self._refuse(f"{place}.turn", f"{number}, because turns are in order", turn.turn)
        self._text(f"{place}.instruction", turn.instruction)
        if clip != Path(clip).name or set("\\\0") & set(clip) or not clip.endswith(".mp4"):
            expected = "the bare name of an .mp4 file in the game's folder"
            self._refuse(f"{place}.clip", expected, clip)
        if clip in self._clips:
            self._refuse(f"{place}.clip", "a file that no other turn has", clip)
        if "total" not in turn.seconds:
            self._refuse(f"{place}.seconds", "the field total", turn.seconds)
        self._clips[clip] = turn
        meters = before.next_meters if before else self._document.start or Meters()
        meters = meters.after(**turn.changes)
        for name in METERS:
            expected, found = getattr(meters, name), getattr(turn.meters, name)
            if found != expected:
                self._refuse(f"{place}.meters.{name}", f"{expected} from the turns' changes", found)
        video.check_mp4(self._folder / clip)
        self._representation(turn.representation_file)

    def other(self, place: str, other: SetAside) -> None:
        if other.after and other.after not in self._clips:
            self._refuse(f"{place}.after", "the clip of an earlier turn", other.after)
        self.turn(f"{place}.turn", other.turn, before=self._clips.get(other.after))


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
    if not (folder / STARTED_FILE).exists():
        patterns += ["picture.npz", PICTURE_FILE]
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            raise UserError(
                f"{folder}: expected a folder without a game, found {path.name} but no "
                f"{GAME_FILE}: name another folder with --out"
            )
