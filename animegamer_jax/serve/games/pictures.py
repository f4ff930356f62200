"""Small pictures of turns, for the page."""

from pathlib import Path

from etils import epath

from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media.sheets import encode_small, middle_frame
from animegamer_jax.storage.files import replacing

_ROWS = 144


def thumbnail(game: Game, turn: Turn) -> Path:
    """Returns a small picture of a clip's middle frame, which is written on the first call."""
    clip = game.folder / turn.clip
    path = clip.with_suffix(".webp")
    # After an undo, another turn may have the same name.
    if not path.exists() or path.stat().st_mtime_ns < clip.stat().st_mtime_ns:
        small = encode_small([middle_frame(clip)], rows=_ROWS)
        with replacing(epath.Path(path)) as file:  # two windows may ask at once
            file.write(small)
    return path
