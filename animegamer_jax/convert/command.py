"""The commands `animegamer convert`, `initialise`, `export` and `parity`."""

from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.configs import NetworkName
from animegamer_jax.convert.options import ConvertOptions, InitialiseOptions
from animegamer_jax.errors import UserError
from animegamer_jax.storage.locks import only_writer


def convert(options: Annotated[ConvertOptions, tyro.conf.arg(name="")]) -> int:
    """Convert released PyTorch checkpoints to a bundle.

    The bundle has the networks whose files are given. Every tensor of every file must be known,
    present, and of the expected shape. Otherwise all problems are listed and nothing is written.

    Args:
        options: The files, and how to read them.
    """
    from animegamer_jax.convert.released import convert_released

    with only_writer(options.out):
        convert_released(options)
    return 0


def initialise(options: Annotated[InitialiseOptions, tyro.conf.arg(name="")]) -> int:
    """Make a bundle to train, from pre-trained networks.

    The bundle has the networks whose files are given. Every tensor of every file must be known,
    present, and of the expected shape. Otherwise all problems are listed and nothing is written.

    Args:
        options: The files, and what they do not determine.
    """
    from animegamer_jax.configs import SIZES
    from animegamer_jax.convert.initialise import initialise_bundle

    with only_writer(options.out):
        initialise_bundle(options, SIZES[options.size]())
    return 0


def export(
    *, bundle: str, out: Path, networks: tuple[NetworkName, ...] = (), lora: bool = False
) -> int:
    """Write a bundle's networks in the file formats of the released PyTorch code.

    Args:
        bundle: Bundle to read: a folder, a gs:// address, or `toy` for the embedded model.
        out: Folder to write.
        networks: Networks to export; all of the bundle's unless given.
        lora: Write the decoder's low-rank updates alone, as one safetensors file that diffusers
            loads into CogVideoX-2B; --out is then the file.
    """
    if lora:
        from animegamer_jax.bundle.bundle import Bundle
        from animegamer_jax.convert.lora import export_lora

        if networks:
            raise UserError("--lora writes the decoder's updates alone: leave --networks out")
        print(f"{out}: {export_lora(Bundle.open(bundle), out)} tensors")
        return 0
    from animegamer_jax.convert.export import export_bundle
    from animegamer_jax.convert.networks import show_summary
    from animegamer_jax.storage.paths import absolute

    with only_writer(out):
        weights = export_bundle(bundle, out, networks=networks)
    show_summary(str(absolute(out)), weights)
    return 0


def parity(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Compare the numbers that other code recorded in a folder with this code's, in float32.

    The exit status is 1 if a row fails.

    Args:
        folder: Folder of checkpoints and recorded arrays, laid out as `docs/parity.md` describes.
        json_file: JSON file to write the table to as well.
    """
    from animegamer_jax.convert.parity import compare_folder, print_rows, write_rows

    rows = compare_folder(folder)
    print_rows(rows)
    if json_file:
        write_rows(json_file, rows)
    return int(any(row.result == "FAIL" for row in rows))
