"""Converts the released PyTorch files to a bundle; `convert/export.py` is the way back."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from animegamer_jax.bundle.bundle import NETWORKS, NetworkName
from animegamer_jax.bundle.config import SIZES_FILE, Placement, Sizes
from animegamer_jax.configs import LoRAConfig, NetworkConfig
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.networks import (
    DECODER_FILE,
    DECODER_PREFIX,
    EMBEDDED,
    check_kind,
    infer,
    lora_of,
    read_config,
    table_of,
    with_lora,
)
from animegamer_jax.convert.options import ConvertOptions
from animegamer_jax.convert.parts import (
    Group,
    Leaves,
    Part,
    check_target,
    checked_parts,
    write_bundle,
)
from animegamer_jax.convert.sources import Source, open_checkpoint, path_inside
from animegamer_jax.errors import UserError
from animegamer_jax.progress import print_line
from animegamer_jax.protocol import PROTOCOLS
from animegamer_jax.storage.serialization import decode_text, from_json, read_json
from animegamer_jax.storage.untrusted import check_file, read_file

Configs = Mapping[NetworkName, NetworkConfig]
_LONGEST = 1 << 20  # bytes of a file `latest`
# The sizes that released files determine; numbers of tokens are not among them.
_KNOWN_SIZES = ("representation size", "latent channels")


def convert_released(options: ConvertOptions, *, must_fit: bool = True) -> None:
    """Converts released files to a bundle, or writes nothing.

    Args:
        options: The files, and how to read them.
        must_fit: Whether networks that exchange arrays must agree on their sizes.

    Raises:
        UserError: A file has problems, or the output exists.
    """
    sizes, known = None, {}
    if options.reference is not None:
        found, sizes = _read_reference(options.reference)
        if sizes is not None:
            known = _known_configs(sizes, options)
        fields = {name: value for name, value in found.items() if getattr(options, name) is None}
        options = dataclasses.replace(options, **fields)
    for name in ("latent_height", "latent_width", "clip_head_width"):
        if (size := getattr(options, name)) is not None and size < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: expected a whole number, 1 or more, found {size}")
    target = check_target(options.out, overwrite=options.overwrite)
    parts = checked_parts(
        list(_find_groups(options, known)),
        none="nothing to convert: pass --agent, --decoder, --vae, --clip or --t5",
        sizes=_KNOWN_SIZES if must_fit else (),
    )
    if options.merge:
        parts = [_merged(part) for part in parts]
    protocol = PROTOCOLS[options.protocol or "released"]
    if sizes and not options.protocol:
        protocol = sizes.protocol
    write_bundle(
        target,
        parts,
        protocol=protocol,
        tokenizer=options.tokenizer,
        t5_tokenizer=options.t5_tokenizer,
        overwrite=options.overwrite,
        note=f"protocol {protocol.name}",
    )


# A folder laid out like an export


def _read_reference(folder: Path) -> tuple[dict[str, Any], Sizes | None]:
    """Returns the options that a folder laid out like an export stands for, and its recorded sizes.

    Raises:
        UserError: There is no such folder, or one of its configuration files is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: expected mllm/, vdm/, vae/, clip/, tokenizer/")
    paths = {
        "agent": _only_file(folder / "mllm"),
        "mistral": next((p.parent for p in sorted(folder.glob("mllm/*/config.json"))), None),
        "decoder": folder / "vdm",
        "vae": _only_file(folder / "vae"),
        "clip": _only_file(folder / "clip"),
        "t5": folder / "t5",
        "tokenizer": folder / "tokenizer",
        "t5_tokenizer": folder / "t5_tokenizer",
    }
    found: dict[str, Any] = {
        key: path for key, path in paths.items() if path is not None and path.exists()
    }
    for network, keys in (
        ("vdm", {"lat_h": "latent_height", "lat_w": "latent_width"}),
        ("clip", {"head_width": "clip_head_width"}),
    ):
        if (file := folder / network / "config.json").is_file():
            content = read_config(file)
            for key, option in keys.items():
                if key in content:
                    found[option] = from_json(int, content[key], f"{file}: {key}")
    file = folder / SIZES_FILE
    hint = "export the bundle again"
    return found, read_json(file, Sizes, hint=hint) if file.is_file() else None


def _only_file(folder: Path) -> Path | None:
    files = sorted(p for p in folder.glob("*") if p.suffix in (".pt", ".bin", ".safetensors"))
    return files[0] if files else None


# Networks whose configuration an option changes.
_CHANGED_BY: Mapping[str, tuple[NetworkName, ...]] = {
    "agent": ("mllm",),
    "mistral": ("mllm",),
    "decoder": ("dit", "encoder"),
    "vae": ("vae",),
    "clip": ("clip",),
    "t5": ("t5",),
    "latent_height": ("dit",),
    "latent_width": ("dit",),
    "clip_head_width": ("clip",),
}


def _known_configs(sizes: Sizes, options: ConvertOptions) -> Configs:
    """Returns the recorded configurations of networks that no command-line option changes."""
    changed = {
        name
        for option, names in _CHANGED_BY.items()
        if getattr(options, option) is not None
        for name in names
    }
    return {
        name: config
        for name in NETWORKS
        if name not in changed and (config := getattr(sizes.networks, name)) is not None
    }


# Files to networks


def _find_groups(options: ConvertOptions, known: Configs) -> Iterator[Group]:
    """Yields the tensors of every file, with the networks that they belong to."""
    if options.agent is not None:
        yield _mllm_group(options.agent, options.mistral, known)
    if options.decoder is not None:
        yield from _decoder_groups(options.decoder, options, known)
    for name in EMBEDDED:
        if (path := getattr(options, name)) is not None:
            yield from single_groups(name, path, head_width=options.clip_head_width, known=known)


def _infer(
    name: NetworkName,
    source: Source,
    known: Configs,
    *,
    head_width: int | None = None,
    **options: Any,
) -> Any:
    if name == "clip" and head_width is not None:
        options["head_width"] = head_width
    return known[name] if name in known else infer(name, source, **options)


def _make_part(
    name: NetworkName, config: NetworkConfig, source: Source, placement: Placement
) -> Part:
    rules = table_of(name).rules(config)
    return Part(name=name, config=config, source=source, rules=rules, placement=placement)


def _mllm_group(agent: Path, mistral: Path | None, known: Configs) -> Group:
    if mistral is None:
        raise UserError(
            f"{agent}: its sizes need the base model's config.json: pass --mistral DIR, the folder "
            "of Mistral-7B-Instruct-v0.1"
        )
    base_config = read_config(mistral / "config.json")
    needed = ("num_attention_heads", "intermediate_size", "num_hidden_layers")
    if absent := [key for key in needed if key not in base_config]:
        raise UserError(
            f"{mistral / 'config.json'}: {', '.join(absent)} missing: expected that of Mistral"
        )
    source = open_checkpoint(agent)
    check_kind(source, "agent")
    config = _infer("mllm", source, known, base=base_config)
    if config.mistral.lora and not any(".base_layer." in name for name in source.tensors):
        linear = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight")

        def name_in_agent(name: str) -> str | None:
            found = linear.fullmatch(name)
            return found and f"llm.base_model.model.{found[1]}.base_layer.weight"

        source = source.joined(open_checkpoint(mistral).renamed(name_in_agent))
    placement = Placement(file=f"mllm/{_exported_name(agent)}", key=source.key)
    return Group(source, (_make_part("mllm", config, source, placement),))


def _exported_name(path: Path) -> str:
    """Returns the name that an export gives to a checkpoint read from this file or folder."""
    if not path.is_dir():
        return path.name
    return "model.safetensors" if any(path.glob("*.safetensors")) else "pytorch_model.bin"


def decoder_file(path: Path) -> Path:
    """Returns the file itself, or the one that a SwissArmyTransformer folder's `latest` names.

    Raises:
        UserError: The folder has no file `latest`.
    """
    if not path.is_dir():
        return path
    latest = path / "latest"
    check_file(latest)
    if not latest.is_file():
        raise UserError(f"{path}: expected a file `latest` that names the checkpoint's sub-folder")
    name = decode_text(read_file(latest, most=_LONGEST), str(latest)).strip()
    return path_inside(path, name, where=str(latest)) / "mp_rank_00_model_states.pt"


def _decoder_groups(path: Path, options: ConvertOptions, known: Configs) -> Iterator[Group]:
    source = open_checkpoint(decoder_file(path))
    check_kind(source, "decoder")
    inner = source.under(DECODER_PREFIX)
    if not inner.tensors:
        raise UserError(
            f"{source.label}: no tensor starts with {DECODER_PREFIX!r}: expected the released "
            "decoder (mp_rank_00_model_states.pt)"
        )
    placement = Placement(file=DECODER_FILE, key=source.key, prefix=DECODER_PREFIX)
    patch = inner.shapes.get("mixins.patch_embed.proj.weight", (1,))[-1]
    height, width = options.latent_height or 60, options.latent_width or 90
    for option, size in (("--latent-height", height), ("--latent-width", width)):
        if size % patch:
            raise UserError(f"{option}: expected a multiple of the patch, {patch}, found {size}")
    try:
        dit = _infer("dit", inner, known, latent_height=height, latent_width=width)
    except UserError as error:
        if "position table" not in str(error):
            raise
        raise UserError(f"{error}: pass --latent-height and --latent-width") from None
    encoder = _infer("encoder", inner, known)
    parts = (
        _make_part("dit", dit, inner, placement),
        _make_part("encoder", encoder, inner, placement),
    )
    yield Group(inner, parts)
    for name, prefix in EMBEDDED.items():
        held = source.under(prefix)
        if not held.tensors:
            continue
        if getattr(options, name) is not None:
            print_line(f"{source.label}: also holds {name}, not used, because --{name} is given")
            continue
        print_line(f"{source.label}: also holds {name}")
        config = _infer(name, held, known, head_width=options.clip_head_width)
        part = _make_part(name, config, held, dataclasses.replace(placement, prefix=prefix))
        yield Group(held, (part,))
    prefixes = (DECODER_PREFIX, *EMBEDDED.values())
    yield Group(source.select(lambda name: not name.startswith(prefixes)))


def single_groups(
    name: NetworkName, path: Path, *, head_width: int | None = None, known: Configs | None = None
) -> Iterator[Group]:
    """Yields the tensors of a file that holds the VAE, CLIP or T5 alone.

    Args:
        name: The network.
        path: Its file or folder; names may start with the prefix of the decoder file.
        head_width: Features of one attention head of CLIP; None: 64.
        known: Configurations that need not be inferred from shapes.

    Raises:
        UserError: The file holds another network, or its shapes do not give a configuration.
    """
    source = open_checkpoint(path)
    check_kind(source, name)
    prefix = EMBEDDED[name]
    if not any(tensor.startswith(prefix) for tensor in source.tensors):
        prefix = ""
    inner = source.under(prefix)
    yield Group(source.select(lambda tensor: not tensor.startswith(prefix)))
    if name == "t5":
        kept = inner.select(lambda tensor: not tensor.startswith(("decoder.", "lm_head.")))
        if dropped := len(inner.tensors) - len(kept.tensors):
            print_line(f"{source.label}: the {dropped} tensors of T5's text decoder are not needed")
        inner = kept
        tied = "encoder.embed_tokens.weight"
        if "shared.weight" not in inner.tensors and tied in inner.tensors:
            inner = inner.renamed(lambda tensor: "shared.weight" if tensor == tied else tensor)
    config = _infer(name, inner, known or {}, head_width=head_width)
    file = f"{name}/{_exported_name(path)}"
    placement = Placement(file=file, key=source.key, prefix=prefix)
    yield Group(inner, (_make_part(name, config, inner, placement),))


# Low-rank updates folded into the weights


def _merged(part: Part) -> Part:
    lora = lora_of(part.name, part.config)
    if lora is None:
        return part
    placement = dataclasses.replace(cast(Placement, part.placement), merged_lora=lora)
    fields = {**vars(part), "placement": placement}
    return _MergedPart(**fields, lora=lora)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MergedPart(Part):
    """A network whose low-rank updates are folded in: W + A B scale, in float32, rounded once."""

    lora: LoRAConfig

    def bundle_config(self) -> NetworkConfig:
        return with_lora(self.name, self.config, None)

    def leaves(self, problems: list[str]) -> Leaves:
        abstract = self.params_in_file()
        by_target = {rule.target: rule for rule in self.rules if rule.target}

        def read(path: str) -> np.ndarray:
            rules = [by_target[path]]
            ((_, leaf),) = tables.convert(rules, self.source, abstract, problems=problems)
            return leaf

        for path in abstract:
            stem, _, last = path.rpartition(".")
            if last in ("lora_a", "lora_b"):
                continue
            leaf = read(path)
            if last == "kernel" and f"{stem}.lora_a" in abstract:
                a, b = read(f"{stem}.lora_a"), read(f"{stem}.lora_b")
                for index in np.ndindex(leaf.shape[:-2]):
                    update = a[index].astype(np.float32) @ b[index].astype(np.float32)
                    total = leaf[index].astype(np.float32) + update * self.lora.scale
                    leaf[index] = total.astype(leaf.dtype)
            yield path, leaf
            del leaf
