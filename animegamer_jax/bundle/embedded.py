"""Finds a model's folder: the embedded one, one on a hub, or one by its path."""

from pathlib import Path

from animegamer_jax.bundle.hub import PREFIX, fetch
from animegamer_jax.errors import UserError

ASSETS = Path(__file__).parents[1] / "assets"


def model_folder(model: str) -> str:
    """Returns a model's folder, by its path or one of two kinds of names.

    `toy` is the embedded model. `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION`, is downloaded
    first, unless it already was.

    Raises:
        UserError: There is no embedded model, or the hub does not give the other one.
    """
    if model.startswith(PREFIX):
        return str(fetch(model))
    if model != "toy":
        return model
    folder = ASSETS / "toy"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model toy: expected the embedded model in {folder}, found none: give a bundle, "
            "--model DIR (`animegamer convert` makes one, scripts/toy/train.sh trains one)"
        )
    return str(folder)
