"""Finds the embedded model in the package, or a model folder by its path."""

from pathlib import Path

from animegamer_jax.errors import UserError

ASSETS = Path(__file__).parents[1] / "assets"


def model_folder(model: str) -> str:
    """Returns a model's folder: the path as given, or the embedded one's by the name `toy`.

    Raises:
        UserError: there is no embedded model.
    """
    if model != "toy":
        return model
    folder = ASSETS / "toy"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model toy: expected the embedded model in {folder}, found none: give a bundle, "
            "--model DIR (`animegamer convert` makes one, scripts/toy/train.sh trains one)"
        )
    return str(folder)
