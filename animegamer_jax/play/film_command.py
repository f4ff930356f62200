"""`animegamer film`: a saved game as one film with captions."""

from pathlib import Path

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.film import film_gif, film_mp4
from animegamer_jax.game.saved_game import Game
from animegamer_jax.progress import print_line
from animegamer_jax.storage.paths import user_errors

_KINDS = {".mp4": film_mp4, ".gif": film_gif}


def film(game: Path, /, *, out: Path | None = None, captions: bool = True) -> int:
    """Join the clips of a saved game to one film, with the instructions as captions.

    Args:
        game: Folder of the game, as `animegamer play` writes it.
        out: Path of the film, .mp4 or .gif. Default: film.mp4 in the game's folder.
        captions: Show each instruction below its clip.
    """
    path = game / "film.mp4" if out is None else out
    make = _KINDS.get(path.suffix.lower())
    if make is None:
        raise UserError(f"--out {path}: expected a name that ends with .mp4 or .gif")
    found = Game.load(game)
    with user_errors(path, "cannot be written", hint="free space or choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        make(found, path, captions=captions)
    turns = f"{len(found.turns)} turn" + "s" * (len(found.turns) != 1)
    print_line(f"{path}: {turns}, {path.stat().st_size / 1e6:.1f} MB")
    return 0
