"""A game as one file: to keep, to show, and to go on with another day.

A zip of `game.json`, the turns' clips and shot representations, the storyboard, and all clips
joined to `game.mp4`. What comes back from outside is trusted in nothing: names, sizes and number of
its members are checked before one byte is unpacked, the bytes while they are, and the game by
`Game.load`.
"""

import contextlib
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import (
    GAME_FILE,
    STORYBOARD_FILE,
    Game,
)
from animegamer_jax.media import video

MOVIE_FILE = "game.mp4"
_WANTED = re.compile(r"game\.json|[A-Za-z0-9_-]{1,60}\.(mp4|npz)")
_MADE = (MOVIE_FILE, STORYBOARD_FILE)  # made anew when they are asked for
_MOST_MEMBERS = 20_000
_MOST_BYTES = 1 << 30
_MOST_OF_ONE = 64 << 20
_BLOCK = 1 << 20


def pack_game(game: Game, path: Path) -> None:
    """Writes a game with its storyboard and its film as a zip.

    Raises:
        UserError: the game has no turns, or a clip cannot be read.
        OSError: the disk refuses.
    """
    if not game.turns:
        raise UserError("the game has no turns yet: play one first")
    game.save_storyboard()
    video.join_mp4([game.folder / turn.clip for turn in game.turns], game.folder / MOVIE_FILE)
    names = [GAME_FILE, STORYBOARD_FILE, MOVIE_FILE]
    names += [name for turn in game.turns for name in (turn.clip, turn.representation_file)]
    part = path.with_name(path.name + ".part")
    try:
        # Clips and arrays are compressed already.
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for name in names:
                archive.write(game.folder / name, name)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def unpack_game(archive: Path, folder: Path, *, check: Callable[[Game], None]) -> Game:
    """The game of an archive, in `folder`, which must be new; removed again if it is not right.

    Args:
        archive: a file from anywhere.
        folder: of the game.
        check: raises UserError for a game that cannot be played here.

    Raises:
        UserError: not a zip, no game in it, too large, damaged, a path in a name, or as `check`.
    """
    try:
        with zipfile.ZipFile(archive) as found:
            members = _check_members(found)
            folder.mkdir(parents=True)
            try:
                left = _MOST_BYTES
                for member in members:
                    left -= _unpack(found, member, folder / member.filename, left)
                game = Game.load(folder)
                check(game)
                return game
            except UserError as error:
                # Where the game lies on this machine is nobody's business.
                raise UserError(str(error).replace(f"{folder}/", "")) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        _forget(folder)
        raise UserError(f"expected a downloaded game, found a damaged zip ({error})") from error
    except OSError as error:
        _forget(folder)
        raise UserError(f"the game could not be saved: {error.strerror or error}") from error
    except BaseException:
        _forget(folder)
        raise


def _forget(folder: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


def _check_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members that make a game.

    Raises:
        UserError: one is a path, or too large, or there are too many, or two of one name.
    """
    members = archive.infolist()
    if len(members) > _MOST_MEMBERS:
        raise UserError(f"expected at most {_MOST_MEMBERS} files in a game, found {len(members)}")
    wanted = [member for member in members if member.filename not in _MADE]
    for member in wanted:
        if not _WANTED.fullmatch(member.filename):
            raise UserError(
                f"expected a game's files only, found {member.filename[:60]!r} in the archive"
            )
        if member.file_size > _MOST_OF_ONE:
            raise UserError(
                f"{member.filename}: expected at most {_MOST_OF_ONE >> 20} MB, found "
                f"{member.file_size >> 20}"
            )
    names = [member.filename for member in wanted]
    if GAME_FILE not in names:
        raise UserError(f"expected a downloaded game, found a zip without {GAME_FILE}")
    if len(set(names)) < len(names):
        raise UserError("expected a downloaded game, found a zip with two files of one name")
    if sum(member.file_size for member in wanted) > _MOST_BYTES:
        raise UserError(f"expected a game of at most {_MOST_BYTES >> 20} MB, found a larger one")
    return wanted


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, left: int) -> int:
    """Unpacks one member, and no more bytes than it said; their number."""
    size = 0
    with archive.open(member) as source, open(path, "wb") as target:
        while block := source.read(_BLOCK):
            size += len(block)
            if size > min(member.file_size, left):
                raise UserError(f"{member.filename}: found more bytes than the archive tells")
            target.write(block)
    return size
