"""A game as one file, to keep, to share and to continue later.

It is a zip of `game.json`, the turns' clips and shot representations, the player's own picture if
there is one, the storyboard, and all clips joined to `game.mp4`. An uploaded archive is not
trusted: names, sizes and number of its members are checked before anything is unpacked, their
content while it is, and the game by `Game.load`.
"""

import contextlib
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from animegamer_jax.errors import UserError, first_line
from animegamer_jax.game.saved.game_file import GAME_FILE, STORYBOARD_FILE
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media import video
from animegamer_jax.storage.untrusted import DAMAGED_ZIP, check_file

MOVIE_FILE = "game.mp4"
_WANTED = re.compile(r"game\.json|picture\.png|[A-Za-z0-9_-]{1,60}\.(mp4|npz)")
_GENERATED = (MOVIE_FILE, STORYBOARD_FILE)  # not unpacked: made again when needed
_MAX_MEMBERS = 20_000
_MAX_BYTES = 1 << 30
_MAX_MEMBER_BYTES = 64 << 20
_BLOCK = 1 << 20


def pack_game(game: Game, path: Path) -> None:
    """Writes a game with its storyboard and movie as a zip.

    Args:
        game: A game that nobody changes meanwhile (`GameStore.copy`).
        path: Path of the zip.

    Raises:
        UserError: The game has no turns, or a clip cannot be read.
        OSError: The file cannot be written.
    """
    if not game.turns:
        raise UserError("the game has no turns yet: play one first")
    game.save_storyboard()
    video.join_mp4([game.folder / turn.clip for turn in game.turns], game.folder / MOVIE_FILE)
    names = [GAME_FILE, STORYBOARD_FILE, MOVIE_FILE, *game.picture_files]
    names += [name for turn in game.all_turns for name in (turn.clip, turn.representation_file)]
    part = path.with_name(path.name + ".part")
    try:
        # Clips and arrays are already compressed.
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for name in names:
                archive.write(game.folder / name, name)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def unpack_game(archive: Path, folder: Path, *, check: Callable[[Game], None]) -> Game:
    """Unpacks a game into `folder`, which must be new; removes it again after an error.

    Args:
        archive: Zip file, not trusted.
        folder: Folder for the game.
        check: Raises UserError for a game that cannot be played here.

    Raises:
        UserError: The archive is not a zip, holds no game, is too large or damaged, or has a path
            in a name; or as `check`.
    """
    check_file(archive, expected="a downloaded game")
    try:
        with zipfile.ZipFile(archive) as found:
            members = _check_members(found)
            folder.mkdir(parents=True)
            try:
                left = _MAX_BYTES
                for member in members:
                    left -= _unpack(found, member, folder / member.filename, left)
                game = Game.load(folder)
                check(game)
                return game
            except UserError as error:
                # Do not reveal where the server keeps its games.
                raise UserError(str(error).replace(f"{folder}/", "")) from error
    except BaseException as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        if isinstance(error, OSError):
            problem = f"the game could not be saved: {error.strerror or error}"
        elif isinstance(error, DAMAGED_ZIP):
            problem = f"expected a downloaded game, found a damaged zip ({first_line(error)})"
        else:
            raise
        raise UserError(problem) from error


def _check_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Returns the members that make a game.

    Raises:
        UserError: A name is a path or not a game's, two names are equal, or the archive is too
            large.
    """
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise UserError(f"expected at most {_MAX_MEMBERS} files in a game, found {len(members)}")
    wanted = [member for member in members if member.filename not in _GENERATED]
    for member in wanted:
        if not _WANTED.fullmatch(member.filename):
            raise UserError(
                f"expected only the files of a game, found {member.filename[:60]!r} in the archive"
            )
        if member.file_size > _MAX_MEMBER_BYTES:
            raise UserError(
                f"{member.filename}: expected at most {_MAX_MEMBER_BYTES >> 20} MB, found "
                f"{member.file_size >> 20}"
            )
    names = [member.filename for member in wanted]
    if GAME_FILE not in names:
        raise UserError(f"expected a downloaded game, found a zip without {GAME_FILE}")
    if len(set(names)) < len(names):
        raise UserError("expected a downloaded game, found a zip with two files of one name")
    if sum(member.file_size for member in wanted) > _MAX_BYTES:
        raise UserError(f"expected a game of at most {_MAX_BYTES >> 20} MB, found a larger one")
    return wanted


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, left: int) -> int:
    """Unpacks one member, up to its stated size; returns the number of bytes."""
    size = 0
    with archive.open(member) as source, open(path, "wb") as target:
        while block := source.read(_BLOCK):
            size += len(block)
            if size > min(member.file_size, left):
                raise UserError(f"{member.filename}: found more bytes than the archive states")
            target.write(block)
    return size
