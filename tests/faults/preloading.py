"""Imports everything that a command may need, so that children start in milliseconds."""

import gc
import importlib
import os
import warnings


def import_everything() -> None:
    """Imports the package and its libraries, and puts the campaign's stand-ins in place.

    No JAX backend may start here, and no thread: children are forked from this process.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    for name in (
        *("av", "cv2", "grain", "PIL.Image", "pydantic", "safetensors", "sentencepiece"),
        *("tensorboardX", "tensorflow_datasets", "torch", "transformers", "tyro"),
        *("PIL.ImageOps", "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "PIL.GifImagePlugin"),
    ):
        importlib.import_module(name)
    import readers
    import stand_in_player
    from PIL import Image

    from animegamer_jax import cli

    Image.init()
    for module, _ in cli.COMMANDS.values():
        importlib.import_module(f"animegamer_jax.{module.split(':')[0]}")
    for name in (
        *("convert.released", "convert.export", "convert.parity", "data.films.gallery"),
        *("data.films.games.writer", "data.films.cutting.process_film", "game.player"),
        *(
            "data.films.annotation.manual",
            "serve.games.archive",
            "evaluate.evaluation",
            "train.loop",
        ),
        *("toy.dataset", "toy.films", "data.features", "data.samples", "evaluate.results"),
        *("evaluate.report.ablations", "evaluate.benchmarks.format", "bundle.bundle"),
    ):
        importlib.import_module(f"animegamer_jax.{name}")
    readers.install()
    stand_in_player.install()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of this process
