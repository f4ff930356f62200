"""`animegamer openings`: prepares the first shots that the page of `animegamer serve` offers."""

from pathlib import Path

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError, check_between
from animegamer_jax.progress import print_line, show_progress
from animegamer_jax.storage.locks import only_writer
from animegamer_jax.storage.paths import is_bucket


def openings(*, model: str = "toy", steps: int | None = None, seed: int = 0) -> int:
    """Play the first shot of each character in each place, for the page to offer them at once.

    They are written to the folder `openings` of the model. A stopped run is continued by the same
    command; the shots of other weights are replaced.

    Args:
        model: Model folder, as `animegamer convert` writes it, or `toy` for the embedded model.
        steps: Denoising steps a shot, 1 to 1000. Default: the model's own.
        seed: Seed of the shots.
    """
    for option, value, low, high in (("--steps", steps, 1, 1000), ("--seed", seed, 0, 2**31 - 1)):
        check_between(option, value, low, high)
    keep_compiled_programs()
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.openings import FOLDER, OpeningsWriter
    from animegamer_jax.game.player import Player

    bundle = Bundle.open(model_folder(model))
    if is_bucket(bundle.path):
        raise UserError(f"--model {model}: expected a folder, found a bucket: copy the model first")
    folder = Path(bundle.path) / FOLDER
    with only_writer(folder):
        writer = OpeningsWriter(folder, bundle)
        player = Player.from_bundle(bundle, steps=steps)
        with show_progress() as progress:
            count = writer.play(player, seed=seed, on_progress=progress)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print_line(f"{folder}: {count} first shots, {size / 1e6:.1f} MB")
    return 0
