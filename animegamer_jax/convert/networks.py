"""What the conversions in both directions share: each network's table, place and LoRA, and the
progress and summary that they show.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.bundle.config import Placement, Weights
from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.convert.sources import Source
from animegamer_jax.errors import UserError

DECODER_FILE = "vdm/1/mp_rank_00_model_states.pt"
DECODER_PREFIX = "model.diffusion_model."
# Networks that the decoder file may hold beside the decoder.
EMBEDDED: Mapping[NetworkName, str] = {
    "vae": "first_stage_model.",
    "clip": "clip_img_encoder.model.",
    "t5": "conditioner.embedders.0.transformer.",
}
# Where an export puts what did not come from released files, and the ranks it gives merged weights.
DEFAULT_PLACES: Mapping[NetworkName, Placement] = {
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


# What the names of a file's tensors start with, by the option that takes the file. The decoder
# first: its file may hold others.
_SIGNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "decoder": ("the decoder", (DECODER_PREFIX,)),
    "agent": ("the language model", ("llm.", "input_resampler.", "output_resampler.")),
    "vae": ("the 3D VAE", (EMBEDDED["vae"], "encoder.conv_in.", "decoder.conv_in.")),
    "clip": ("OpenCLIP", (EMBEDDED["clip"], "visual.")),
    "t5": ("T5", (EMBEDDED["t5"], "shared.", "encoder.block.", "encoder.embed_tokens.")),
    "mistral": ("the base language model", ("model.embed_tokens.", "model.layers.")),
}


def check_kind(source: Source, option: str) -> None:
    """Tells of a file that was given by the option of another one.

    Raises:
        UserError: its tensors are those of another network.
    """

    def holds(key: str) -> bool:
        return any(name.startswith(_SIGNS[key][1]) for name in source.tensors)

    for key, (what, _) in _SIGNS.items():
        if key != option and holds(key) and (key == "decoder" or not holds(option)):
            how = "its folder by" if key == "mistral" else "it by"
            raise UserError(
                f"{source.label}: --{option}: expected {_SIGNS[option][0]}, found tensors of "
                f"{what}: give {how} --{key}"
            )


def table_of(name: NetworkName) -> Any:
    """The module with a network's `rules` and `infer_config`."""
    return importlib.import_module(f"animegamer_jax.convert.tables.{name}")


def lora_of(name: NetworkName, config: Any) -> LoRAConfig | None:
    """The low-rank update of a network; None where it has none."""
    if name == "mllm":
        return config.mistral.lora
    return config.lora if name == "dit" else None


def with_lora(name: NetworkName, config: Any, lora: LoRAConfig | None) -> NetworkConfig:
    """The configuration with another low-rank update, where the network may have one."""
    if name == "mllm":
        mistral = dataclasses.replace(config.mistral, lora=lora)
        return dataclasses.replace(config, mistral=mistral)
    return dataclasses.replace(config, lora=lora) if name == "dit" else config


def exported_config(bundle: Bundle, name: NetworkName) -> Any:
    """The configuration of a network as an export writes it: with the update that was merged."""
    config: Any = getattr(bundle.config, name)
    place = bundle.info.released.get(name, DEFAULT_PLACES[name])
    return with_lora(name, config, lora_of(name, config) or place.merged_lora)


def infer(name: NetworkName, source: Source, **options: Any) -> Any:
    """The configuration that the shapes tell.

    Raises:
        UserError: a tensor that tells a size is missing, or sizes contradict one another.
    """
    try:
        return table_of(name).infer_config(source.shapes, **options)
    except KeyError as error:
        raise UserError(
            f"{source.label}: {error.args[0]} is missing, which the size of network {name} is read "
            "from: expected the released file, or one of the same names"
        ) from None
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"{source.label}: network {name}: {error}") from None


def show_summary(title: str, weights: Mapping[str, Weights]) -> None:
    """A table: parameters, number formats and size of each network."""
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
    console.print(title)
    console.print(table)
