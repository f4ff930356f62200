"""Prepared first shots of a model: each character in each place, as saved games of one turn.

They are in the folder `openings/` of a bundle, where `animegamer openings` writes them:

    openings.json   the model that made them, and who and where each of them shows
    001/ 002/ …     a saved game of one turn each
    portraits.webp  a picture of each character, side by side
    places-1.webp … the first character in each place, side by side

A player who chooses a character and a place sees the shot at once, and plays on from it.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Len
from etils import epath
from jaxtyping import Float, Float32

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import compose_instruction
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media import video
from animegamer_jax.media.sheets import encode_small, middle_frame
from animegamer_jax.progress import Progress
from animegamer_jax.storage.files import write_json, write_whole
from animegamer_jax.storage.paths import is_bucket, user_errors
from animegamer_jax.storage.serialization import read_json, to_json

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.player import Player

FOLDER = "openings"
_FILE = "openings.json"
_PORTRAITS = "portraits.webp"
_ROWS = 96  # rows of a picture on a card
_QUALITY = 27  # quality of a shot's clip
_BITS = 10  # of mantissa in a shot's arrays, as in float16
_MARK = "unfinished"  # marks an unfinished folder; removed at the end
_HINT = "make them again: animegamer openings"
_MOTIONS = ("waving", "standing", "walking", "sitting", "running")  # preferred, if known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """A prepared first shot.

    Attributes:
        character: Who it shows.
        place: Where.
        game: Name of its game's folder.
    """

    character: str
    place: str
    game: Annotated[str, Len(1, 20)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Index:
    """The content of `openings.json`."""

    format_version: Literal[1] = 1
    fingerprint: str
    shots: tuple[Opening, ...]


def fingerprint_of(bundle: epath.Path) -> str:
    """Returns what identifies a bundle's weights: a digest of its `config.json`."""
    return hashlib.sha256((bundle / "config.json").read_bytes()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Openings:
    """The prepared first shots of a model.

    Attributes:
        games: A saved game of one turn for each character and place.
        characters: Characters of whom there are pictures.
        places: Places of which there are pictures.
        portraits: File with a picture of each character; None if there are no shots.
        sheets: File with pictures of each place, by character.
    """

    games: Mapping[tuple[str, str], Game] = dataclasses.field(default_factory=dict)
    characters: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    portraits: Path | None = None
    sheets: Mapping[str, Path] = dataclasses.field(default_factory=dict)


def read_openings(bundle: epath.Path) -> Openings:
    """Reads the openings of a bundle.

    There are none if it has none, is in a bucket, or other weights made them.

    Raises:
        UserError: They are damaged.
    """
    folder = bundle / FOLDER
    if is_bucket(bundle) or not (folder / _FILE).is_file():
        return Openings()
    index = read_json(folder / _FILE, _Index, hint=_HINT)
    if index.fingerprint != fingerprint_of(bundle):
        return Openings()
    return _read_shots(Path(folder), index.shots)


def _read_shots(folder: Path, shots: Sequence[Opening]) -> Openings:
    games = {}
    for shot in shots:
        if Path(shot.game).name != shot.game:
            raise UserError(f"{folder / _FILE}: game: expected a folder's name: {_HINT}")
        game = Game.load(folder / shot.game)
        if len(game.turns) != 1:
            raise UserError(f"{game.folder}: expected a game of one turn: {_HINT}")
        games[shot.character, shot.place] = game
    characters = tuple(dict.fromkeys(shot.character for shot in shots))
    places = tuple(dict.fromkeys(shot.place for shot in shots))
    sheets = {name: folder / f"places-{n}.webp" for n, name in enumerate(characters, start=1)}
    for path in (folder / _PORTRAITS, *sheets.values()):
        if not path.is_file():
            raise UserError(f"{path}: expected pictures of the first shots, found none: {_HINT}")
    return Openings(
        games=games,
        characters=characters,
        places=places,
        portraits=folder / _PORTRAITS,
        sheets=sheets,
    )


def write_index(folder: Path, shots: Sequence[Opening], *, fingerprint: str) -> Openings:
    """Writes pictures and index of the shots that a folder holds, and returns them.

    Args:
        folder: Folder with the game of each shot.
        shots: A shot of each character in each place.
        fingerprint: What identifies the weights that made them.

    Raises:
        UserError: A shot cannot be read, or a file cannot be written.
    """
    frames = {}
    for shot in shots:
        game = Game.load(folder / shot.game)
        frames[shot.character, shot.place] = middle_frame(game.folder / game.turns[0].clip)
    characters = list(dict.fromkeys(shot.character for shot in shots))
    places = list(dict.fromkeys(shot.place for shot in shots))
    portraits = [frames[who, places[n % len(places)]] for n, who in enumerate(characters)]
    with user_errors(folder, "cannot be written", hint="make the folder writable"):
        write_whole(folder / _PORTRAITS, encode_small(portraits, rows=_ROWS))
        for number, who in enumerate(characters, start=1):
            sheet = encode_small([frames[who, place] for place in places], rows=_ROWS)
            write_whole(folder / f"places-{number}.webp", sheet)
        write_json(folder / _FILE, to_json(_Index(fingerprint=fingerprint, shots=tuple(shots))))
    return _read_shots(folder, shots)


def round_mantissa(values: Float[np.ndarray, "..."], bits: int) -> Float32[np.ndarray, "..."]:
    """Returns float32 values rounded to the nearest, or to even, with `bits` bits of mantissa."""
    dropped = 23 - bits
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = (1 << dropped - 1) - 1 + (whole >> dropped & 1)
    return ((whole + half) >> dropped << dropped).astype(np.uint32).view(np.float32)


def first_motion(words: Vocabulary) -> str:
    """Returns the motion of the openings: a quiet one that the model knows."""
    return next((motion for motion in _MOTIONS if motion in words.motions), words.motions[0])


class OpeningsWriter:
    """Plays the first turn of each character in each place.

    Args:
        folder: Folder to write to.
        bundle: The model.

    Raises:
        UserError: Its vocabulary has no characters, motions or places.
    """

    def __init__(self, folder: Path, bundle: "Bundle"):
        self.folder, self.model, self.words = folder, bundle.name, bundle.vocabulary
        self.fingerprint = fingerprint_of(bundle.path)
        words = self.words
        if not (words.characters and words.places and words.motions):
            raise UserError(
                f"{bundle.path}: expected characters, motions and places in words.json, found "
                "none: write the words that the model knows"
            )

    def play(self, player: "Player", *, seed: int, on_progress: Progress) -> int:
        """Plays the shots and returns their number.

        Shots that a stopped run left are kept; those of other weights, steps or seeds are not.

        Args:
            player: The player.
            seed: Seed of the shots.
            on_progress: Called with a text, the number of shots that are made, and their total.

        Raises:
            UserError: A file cannot be written.
        """
        words, inputs = self.words, f"{self.fingerprint} {player.steps} {seed}\n"
        mark = self.folder / _MARK
        with user_errors(self.folder, "cannot be written", hint="make the folder writable"):
            if not mark.exists() or mark.read_text() != inputs:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
                mark.write_text(inputs)
            pairs = [(name, place) for name in words.characters for place in words.places]
            shots = []
            for number, (character, place) in enumerate(pairs):
                on_progress("first shots", number, len(pairs))
                shot = Opening(character=character, place=place, game=f"{number + 1:03d}")
                self._play_one(player, shot, seed=seed)
                shots.append(shot)
            write_index(self.folder, shots, fingerprint=self.fingerprint)
            mark.unlink()
        on_progress("first shots", len(pairs), len(pairs))
        return len(pairs)

    def _play_one(self, player: "Player", shot: Opening, *, seed: int) -> None:
        folder, words = self.folder / shot.game, self.words
        if (folder / "game.json").exists() and Game.load(folder).turns:
            return
        shutil.rmtree(folder, ignore_errors=True)
        instruction = compose_instruction(
            character=shot.character,
            adverb="",
            motion=first_motion(words),
            time=next(iter(words.times), ""),
            place=shot.place,
        )
        _, output = player.play_turn(player.start(1), [instruction], seeds=[seed], turn=1)
        game = player.new_game(folder, model=self.model, seed=seed)
        # The embedded model's are in the package: half the bytes.
        played = output.row(0)
        played = played._replace(representation=round_mantissa(played.representation, _BITS))
        if played.first_latents is not None:
            played = played._replace(first_latents=round_mantissa(played.first_latents, _BITS))
        turn = game.add(played, instruction)
        small = video.encode_mp4(video.enlarge(played.frames), quality=_QUALITY)
        write_whole(folder / turn.clip, small)
