"""Each network's table, place in the released files and low-rank update, for both directions."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.bundle.config import Placement, Weights
from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.convert.sources import Source
from animegamer_jax.errors import UserError, printable
from animegamer_jax.storage.serialization import read_json

DECODER_FILE = "vdm/1/mp_rank_00_model_states.pt"
DECODER_PREFIX = "model.diffusion_model."
# Networks that the decoder file may also hold, and what their tensors' names start with there.
EMBEDDED: Mapping[NetworkName, str] = {
    "vae": "first_stage_model.",
    "clip": "clip_img_encoder.model.",
    "t5": "conditioner.embedders.0.transformer.",
}
# Where an export puts what did not come from released files, and the ranks it gives merged weights.
_DEFAULT_PLACEMENTS: Mapping[NetworkName, Placement] = {
    "mllm": Placement(file="mllm/pytorch_model.bin", merged_lora=LoRAConfig(rank=32, alpha=32.0)),
    "dit": Placement(
        file=DECODER_FILE,
        key="module",
        prefix=DECODER_PREFIX,
        merged_lora=LoRAConfig(rank=64, alpha=1.0),
    ),
    "encoder": Placement(file=DECODER_FILE, key="module", prefix=DECODER_PREFIX),
    "vae": Placement(file="vae/3d-vae.pt", key="state_dict"),
    "clip": Placement(file="clip/clip_module_states.pt", key="module", prefix=EMBEDDED["clip"]),
    "t5": Placement(file="t5/model.safetensors"),
}

# What the tensors' names start with, by the option that takes the file. The decoder comes first,
# because its file may hold others.
_KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "decoder": ("the decoder", (DECODER_PREFIX,)),
    "agent": ("the language model", ("llm.", "input_resampler.", "output_resampler.")),
    "vae": ("the 3D VAE", (EMBEDDED["vae"], "encoder.conv_in.", "decoder.conv_in.")),
    "clip": ("OpenCLIP", (EMBEDDED["clip"], "visual.")),
    "t5": ("T5", (EMBEDDED["t5"], "shared.", "encoder.block.", "encoder.embed_tokens.")),
    "mistral": ("the base language model", ("model.embed_tokens.", "model.layers.")),
}


def check_kind(source: Source, option: str) -> None:
    """Checks that a file was passed with the option of its network.

    Raises:
        UserError: Its tensors are those of another network.
    """

    def holds(key: str) -> bool:
        return any(name.startswith(_KINDS[key][1]) for name in source.tensors)

    for key, (network, _) in _KINDS.items():
        if key != option and holds(key) and (key == "decoder" or not holds(option)):
            what = "its folder" if key == "mistral" else "it"
            raise UserError(
                f"{source.label}: --{option}: expected {_KINDS[option][0]}, found tensors of "
                f"{network}: pass {what} with --{key}"
            )


def table_of(name: NetworkName) -> Any:
    """Returns the module with a network's `rules` and `infer_config`."""
    return importlib.import_module(f"animegamer_jax.convert.tables.{name}")


def lora_of(name: NetworkName, config: Any) -> LoRAConfig | None:
    """Returns the low-rank update of a network; None if it has none."""
    if name == "mllm":
        return config.mistral.lora
    return config.lora if name in ("dit", "picture") else None


def with_lora(name: NetworkName, config: Any, lora: LoRAConfig | None) -> NetworkConfig:
    """Returns the configuration with another low-rank update, if the network can have one."""
    if name == "mllm":
        mistral = dataclasses.replace(config.mistral, lora=lora)
        return dataclasses.replace(config, mistral=mistral)
    return dataclasses.replace(config, lora=lora) if name in ("dit", "picture") else config


def placement_of(bundle: Bundle, name: NetworkName) -> Placement:
    """Returns the place of a network in the released files, where an export puts it."""
    return bundle.info.released.get(name, _DEFAULT_PLACEMENTS[name])


def exported_config(bundle: Bundle, name: NetworkName) -> Any:
    """Returns the configuration that an export writes: with the update that was merged."""
    config: Any = getattr(bundle.config, name)
    merged = placement_of(bundle, name).merged_lora
    return with_lora(name, config, lora_of(name, config) or merged)


def infer(name: NetworkName, source: Source, **options: Any) -> Any:
    """Returns the configuration that the tensors' shapes imply, with errors as `size_errors`."""
    hint = "expected the released file, or one with the same names"
    with size_errors(f"{source.label}: network {name}", hint=hint):
        return table_of(name).infer_config(source.shapes, **options)


@contextlib.contextmanager
def size_errors(where: str, *, hint: str) -> Iterator[None]:
    """Turns the errors of a table's `infer_config` into `UserError`.

    Raises:
        UserError: A tensor that gives a size is missing, or sizes contradict one another.
    """
    try:
        yield
    except KeyError as error:
        raise UserError(
            f"{where}: tensor {error.args[0]}, from which a size is read, is missing: {hint}"
        ) from None
    except (TypeError, ValueError, ArithmeticError, UserError) as error:
        raise UserError(f"{where}: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """Reads a `config.json`, with the sizes that weights do not imply.

    Raises:
        UserError: The file does not exist, or is not a JSON object.
    """
    hint = "get the file: it gives sizes that the weights do not imply"
    return read_json(path, dict[str, Any], hint=hint)


def show_summary(title: str, weights: Mapping[str, Weights]) -> None:
    """Prints a table of the networks: parameters, number formats and size of each."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("network")
    table.add_column("parameters", justify="right")
    table.add_column("format")
    table.add_column("MB", justify="right")
    for name, entry in weights.items():
        size = f"{entry.num_bytes / 1e6:,.1f}"
        table.add_row(name, f"{entry.num_params:,}", ", ".join(entry.dtypes), size)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(printable(title))
    console.print(table)
