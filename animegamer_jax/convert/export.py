"""Writes a bundle's networks as the released PyTorch code reads them."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from animegamer_jax.bundle.bundle import NETWORKS, Bundle, NetworkName, abstract_params
from animegamer_jax.bundle.config import SIZES_FILE, Placement, Sizes, Weights
from animegamer_jax.bundle.vocabulary import (
    T5_TOKENIZER_FOLDER,
    TOKENIZER_FOLDER,
    copy_tokenizer_folder,
)
from animegamer_jax.configs import ModelConfig, VAEConfig
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.networks import exported_config, placement_of, table_of
from animegamer_jax.convert.sources import write_safetensors, write_torch
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.progress import Progress, show_progress, track
from animegamer_jax.storage.paths import absolute, move_into_place, refuse_existing, user_errors
from animegamer_jax.storage.serialization import to_json

# What a base model's config.json holds of a `MistralConfig`.
MISTRAL_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window"),
)


def export_bundle(
    bundle: str, out: Path, *, networks: Sequence[NetworkName] = ()
) -> dict[str, Weights]:
    """Writes networks of a bundle in the released formats, or nothing.

    Args:
        bundle: Bundle to read: a folder, or a gs:// address.
        out: Folder to write.
        networks: Networks to export; none: all that the bundle has.

    Returns:
        What was written of each network.

    Raises:
        UserError: The bundle or a network does not exist, or `out` does.
    """
    if "://" in str(out) or ":/" in str(out):
        raise UserError(f"--out {out}: expected a folder on this machine: copy it from there")
    out = Path(absolute(out))
    opened = Bundle.open(bundle)
    names = networks or tuple(name for name in NETWORKS if opened.has(name))
    if not names:
        raise UserError(f"{bundle}: no network in this bundle: nothing to export")
    for name in names:
        if not opened.has(name):
            raise UserError(f"{bundle}: no network {name} in this bundle: leave it out")
    if "picture" in names:
        raise UserError(
            f"{bundle}: picture: the released code has no decoder of pictures: name the other "
            "networks with --networks"
        )
    if "dit" in names and not fits_released_code(opened.config):
        raise UserError(
            f"{bundle}: dit: the released code has neither patches of several frames, nor an "
            "output of clean latents, nor positions of a picture's tokens (a context grid), nor a "
            "memory of past clips, nor frequency scales of latents: name the other networks with "
            "--networks"
        )
    vae = opened.config.vae if "vae" in names else None
    if vae and vae.kernel_frames != VAEConfig.kernel_frames:
        raise UserError(
            f"{bundle}: vae: the released code has kernels of {VAEConfig.kernel_frames} frames, "
            f"this one of {vae.kernel_frames}: name the other networks with --networks"
        )
    refuse_existing(epath.Path(out), overwrite=None)
    files: dict[str, list[NetworkName]] = {}
    for name in names:
        files.setdefault(_checked_placement(opened, name).file, []).append(name)
    temporary = out.parent / f"{out.name}.tmp-{os.getpid()}"
    hint = "free space there, or choose another folder"
    try:
        with (
            user_errors(out, "cannot be written", hint=hint),
            show_progress(transient=True) as progress,
        ):
            for file, inside in files.items():
                _write_file(opened, temporary / file, inside, progress)
            _write_sizes(opened, temporary, names)
            move_into_place(epath.Path(temporary), epath.Path(out))
    finally:
        if temporary.exists():
            epath.Path(temporary).rmtree()
    return {name: opened.info.weights[name] for name in names}


def fits_released_code(config: ModelConfig) -> bool:
    """Returns whether the released code can run the transformer; its sizes do not matter."""
    dit, vae = config.dit, config.vae
    plain = dit and dataclasses.replace(
        dit, patch_frames=1, output="v", clean_std=0.0, context_grid=None, memory=0
    )
    return dit == plain and not (vae and vae.frequency_scales)


def _checked_placement(bundle: Bundle, name: NetworkName) -> Placement:
    """Returns a network's place; refuses one outside of the folder (bundles may be foreign)."""
    placement = placement_of(bundle, name)
    file = Path(placement.file)
    if file.is_absolute() or ".." in file.parts or len(file.parts) < 2:
        raise UserError(
            f"{bundle.path / 'config.json'}: released.{name}.file: expected a path inside a "
            f"folder, found {placement.file!r}"
        )
    return placement


def _write_file(
    bundle: Bundle, path: Path, names: Sequence[NetworkName], progress: Progress
) -> None:
    """Writes one file in the released format, with the networks that it holds."""
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    jobs = []
    for name in names:
        prefix = placement_of(bundle, name).prefix
        config = exported_config(bundle, name)
        stored = bundle.leaves(name)
        try:
            abstract = {
                leaf: stored.get(leaf, jax.ShapeDtypeStruct(shape.shape, config.param_dtype))
                for leaf, shape in abstract_params(name, config).items()
            }
            rules = table_of(name).rules(config)
            entries = tables.export_shapes(rules, abstract)
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise UserError(
                f"{bundle.path / 'config.json'}: networks.{name}: does not fit the released "
                f"files ({first_line(error)}): convert again"
            ) from error
        jobs.append((name, prefix, rules, abstract, stored, len(entries)))
        shapes |= {prefix + tensor: entry for tensor, entry in entries.items()}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, prefix, rules, abstract, stored, total in jobs:
            order = [rule.target for rule in rules if rule.target in stored]
            reader = bundle.read_in_order(name, order)

            def read(leaf: str, reader=reader, stored=stored, abstract=abstract) -> np.ndarray:
                if leaf in stored:
                    return next(reader)[1]  # it goes in the same order
                return np.zeros(abstract[leaf].shape, abstract[leaf].dtype)  # a merged update

            found = tables.export(rules, read, abstract)
            for tensor, value in track(found, progress, f"{name}: tensors", total=total):
                yield prefix + tensor, value
                del value

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        write_safetensors(path, shapes, tensors())
    else:
        write_torch(path, shapes, tensors(), key=placement_of(bundle, names[0]).key)


def _write_sizes(bundle: Bundle, folder: Path, names: Sequence[NetworkName]) -> None:
    """Writes small files with what the weights do not imply, so that the folder converts again.

    `SIZES_FILE` holds all of it; the others are part of the released layout.
    """

    def write(name: str, content: Any) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

    networks = ModelConfig(**{name: exported_config(bundle, name) for name in names})
    write(SIZES_FILE, to_json(Sizes(protocol=bundle.protocol, networks=networks)))
    config: Any = bundle.config
    if "dit" in names:
        file = Path(placement_of(bundle, "dit").file)
        (folder / file.parts[0] / "latest").write_text(file.parts[1])
        latents = {"lat_h": config.dit.latent_height, "lat_w": config.dit.latent_width}
        write("vdm/config.json", latents)
    if "clip" in names:
        head_width = config.clip.vision_width // config.clip.vision_heads
        write("clip/config.json", {"head_width": head_width})
    if "mllm" in names:
        mistral = config.mllm.mistral
        base = {field: getattr(mistral, field) for field in MISTRAL_FIELDS}
        base = {"model_type": "mistral", **base, "torch_dtype": mistral.rotary_dtype}
        write("mllm/Mistral/config.json", base)
    for name in (TOKENIZER_FOLDER, T5_TOKENIZER_FOLDER):
        if (bundle.path / name).is_dir():
            copy_tokenizer_folder(bundle.path / name, epath.Path(folder / name), words=False)
