"""`animegamer convert`: the released files to a bundle. `export` is the way back."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    BundleWriter,
    NetworkName,
    abstract_params,
)
from animegamer_jax.bundle.config import (
    SIZES_FILE,
    Placement,
    Sizes,
    from_json,
)
from animegamer_jax.configs import ModelConfig, NetworkConfig, disagreements
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.export import export as export  # the command line's other half
from animegamer_jax.convert.networks import (
    DECODER_FILE,
    DECODER_PREFIX,
    EMBEDDED,
    check_kind,
    infer,
    lora_of,
    show_progress,
    show_summary,
    table_of,
    with_lora,
)
from animegamer_jax.convert.rules import Abstract, Rule
from animegamer_jax.convert.sources import (
    Source,
    open_checkpoint,
)
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import PROTOCOLS
from animegamer_jax.storage.paths import (
    absolute,
    refuse_existing,
    telling,
)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One network of the conversion; `source` has the names that its table knows."""

    name: NetworkName
    config: NetworkConfig
    source: Source
    place: Placement

    @property
    def rules(self) -> tuple[Rule, ...]:
        return table_of(self.name).rules(self.config)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Names of one file that one or more tables must cover between them."""

    source: Source
    parts: tuple[_Part, ...] = ()


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text())
    except OSError:
        raise UserError(
            f"{path}: no such file: the sizes that weights do not tell are in it"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: no JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _file_name(path: Path) -> str:
    """What an export calls the file that this checkpoint, a file or a folder, was read from."""
    if not path.is_dir():
        return path.name
    return "model.safetensors" if any(path.glob("*.safetensors")) else "pytorch_model.bin"


Infer = Callable[..., Any]


def _mllm_group(agent: Path, mistral: Path | None, *, infer: Infer) -> _Group:
    if mistral is None:
        raise UserError(
            f"{agent}: its sizes need the base model's config.json: pass --mistral DIR, the folder "
            "of Mistral-7B-Instruct-v0.1"
        )
    base_config = read_json(mistral / "config.json")
    if absent := [
        key
        for key in ("num_attention_heads", "intermediate_size", "num_hidden_layers")
        if key not in base_config
    ]:
        raise UserError(f"{mistral / 'config.json'}: {', '.join(absent)} missing: not Mistral's")
    source = open_checkpoint(agent)
    check_kind(source, "agent")
    config = infer("mllm", source, base=base_config)
    if config.mistral.lora and not any(".base_layer." in name for name in source.tensors):
        linear = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight")

        def in_agent(name: str) -> str | None:
            found = linear.fullmatch(name)
            return found and f"llm.base_model.model.{found[1]}.base_layer.weight"

        source = source.joined(open_checkpoint(mistral).renamed(in_agent))
    place = Placement(file=f"mllm/{_file_name(agent)}", key=source.key)
    return _Group(source, (_Part("mllm", config, source, place),))


def decoder_file(path: Path) -> Path:
    """The file itself, or what the SwissArmyTransformer folder's `latest` points to."""
    if not path.is_dir():
        return path
    latest = path / "latest"
    if not latest.is_file():
        raise UserError(f"{path}: expected a file `latest` that names the checkpoint's sub-folder")
    return path / latest.read_text().strip() / "mp_rank_00_model_states.pt"


def _decoder_groups(
    path: Path,
    *,
    height: int,
    width: int,
    head_width: int,
    given: set[str],
    infer: Infer,
    say: Callable[[str], None],
) -> Iterator[_Group]:
    source = open_checkpoint(decoder_file(path))
    check_kind(source, "decoder")
    inner = source.under(DECODER_PREFIX)
    if not inner.tensors:
        raise UserError(
            f"{source.label}: no tensor starts with {DECODER_PREFIX!r}: expected the released "
            "decoder (mp_rank_00_model_states.pt)"
        )
    place = Placement(file=DECODER_FILE, key=source.key, prefix=DECODER_PREFIX)
    patch = inner.shapes.get("mixins.patch_embed.proj.weight", (1,))[-1]
    for option, size in (("--latent-height", height), ("--latent-width", width)):
        if size % patch:
            raise UserError(f"{option}: expected a multiple of the patch, {patch}, found {size}")
    try:
        dit = infer("dit", inner, latent_height=height, latent_width=width)
    except UserError as error:
        if "position table" not in str(error):
            raise
        raise UserError(f"{error}: give --latent-height and --latent-width") from None
    encoder = infer("encoder", inner)
    parts = (_Part("dit", dit, inner, place), _Part("encoder", encoder, inner, place))
    yield _Group(inner, parts)
    for name, prefix in EMBEDDED.items():
        held = source.under(prefix)
        if not held.tensors:
            continue
        if name in given:
            say(f"{source.label}: holds {name} as well, not used, because --{name} is given")
            continue
        say(f"{source.label}: holds {name} as well")
        config = infer(name, held, **({"head_width": head_width} if name == "clip" else {}))
        part = _Part(name, config, held, dataclasses.replace(place, prefix=prefix))
        yield _Group(held, (part,))
    known = (DECODER_PREFIX, *EMBEDDED.values())
    yield _Group(source.select(lambda name: not name.startswith(known)))


def single_groups(
    name: NetworkName,
    path: Path,
    *,
    head_width: int,
    infer: Infer,
    say: Callable[[str], None],
) -> Iterator[_Group]:
    """A file of its own for the VAE, CLIP or T5, with or without the decoder file's prefix."""
    source = open_checkpoint(path)
    check_kind(source, name)
    prefix = EMBEDDED[name]
    if not any(tensor.startswith(prefix) for tensor in source.tensors):
        prefix = ""
    inner = source.under(prefix)
    yield _Group(source.select(lambda tensor: not tensor.startswith(prefix)))
    if name == "t5":
        kept = inner.select(lambda tensor: not tensor.startswith(("decoder.", "lm_head.")))
        if dropped := len(inner.tensors) - len(kept.tensors):
            say(f"{source.label}: the {dropped} tensors of T5's text decoder are not needed")
        inner = kept
        tied = "encoder.embed_tokens.weight"
        if "shared.weight" not in inner.tensors and tied in inner.tensors:
            inner = inner.renamed(lambda tensor: "shared.weight" if tensor == tied else tensor)
    config = infer(name, inner, **({"head_width": head_width} if name == "clip" else {}))
    place = Placement(file=f"{name}/{_file_name(path)}", key=source.key, prefix=prefix)
    yield _Group(inner, (_Part(name, config, inner, place),))


def _check_fit(parts: Sequence[_Part]) -> None:
    """The networks that pass arrays to one another agree on their sizes.

    Raises:
        UserError: two of them do not.
    """
    networks: dict[str, Any] = {part.name: part.config for part in parts}
    found = disagreements(ModelConfig(**networks))
    # Numbers of tokens are not in released files: only what the tensors tell is compared.
    told = {
        "representation size": "width of a shot representation",
        "latent channels": "number of latent channels",
    }
    for size, what in told.items():
        if size in found:
            raise UserError(f"the files do not belong together: the {what} differs: {found[size]}")


def _merged_leaves(
    part: _Part, abstract: Abstract, problems: list[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters with the low-rank updates folded in: W + A B scale, in float32, rounded once."""
    lora = lora_of(part.name, part.config)
    assert lora is not None
    by_target = {rule.target: rule for rule in part.rules if rule.target}

    def read(path: str) -> np.ndarray:
        rules = [by_target[path]]
        ((_, leaf),) = tables.convert(rules, part.source, abstract, problems=problems)
        return leaf

    for path in abstract:
        stem, _, last = path.rpartition(".")
        if last in ("lora_a", "lora_b"):
            continue
        leaf = read(path)
        if last == "kernel" and f"{stem}.lora_a" in abstract:
            a, b = read(f"{stem}.lora_a"), read(f"{stem}.lora_b")
            for index in np.ndindex(leaf.shape[:-2]):
                update = a[index].astype(np.float32) @ b[index].astype(np.float32) * lora.scale
                leaf[index] = (leaf[index].astype(np.float32) + update).astype(leaf.dtype)
        yield path, leaf
        del leaf


def _leaves(
    part: _Part, problems: list[str], *, merge: bool, step: Callable[[int], None]
) -> Iterator[tuple[str, np.ndarray]]:
    abstract = abstract_params(part.name, part.config)
    if merge:
        pairs = _merged_leaves(part, abstract, problems)
    else:
        pairs = tables.convert(part.rules, part.source, abstract, problems=problems)
    for path, leaf in pairs:
        yield path, leaf
        del leaf
        step(1)


def print_line(text: str) -> None:
    """Tells how far a conversion is."""
    print(text, flush=True)


def _only_file(folder: Path) -> Path | None:
    files = sorted(p for p in folder.glob("*") if p.suffix in (".pt", ".bin", ".safetensors"))
    return files[0] if files else None


def _from_reference(folder: Path) -> dict[str, Any]:
    """What a folder laid out like an export says: the same as all the options.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: expected mllm/, vdm/, vae/, clip/, tokenizer/")
    found: dict[str, Any] = {
        "agent": _only_file(folder / "mllm"),
        "mistral": next((p.parent for p in sorted(folder.glob("mllm/*/config.json"))), None),
        "decoder": folder / "vdm",
        "vae": _only_file(folder / "vae"),
        "clip": _only_file(folder / "clip"),
        "t5": folder / "t5",
        "tokenizer": folder / "tokenizer",
    }
    found = {key: path for key, path in found.items() if path is not None and path.exists()}
    for network, keys in (
        ("vdm", {"lat_h": "latent_height", "lat_w": "latent_width"}),
        ("clip", {"head_width": "clip_head_width"}),
    ):
        if (file := folder / network / "config.json").is_file():
            sizes = read_json(file)
            found |= {ours: sizes[theirs] for theirs, ours in keys.items() if theirs in sizes}
    if (file := folder / SIZES_FILE).is_file():
        found["sizes"] = from_json(Sizes, read_json(file), str(file))
    return found


# The networks whose sizes an option tells, or whose file it names.
_TOLD_BY: Mapping[str, tuple[NetworkName, ...]] = {
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


def _infer_with(sizes: Sizes | None, given: Iterable[str]) -> Infer:
    """`infer`, but for the networks that an export told of and no option tells otherwise."""
    otherwise = {name for option in given for name in _TOLD_BY.get(option, ())}

    def infer_or_told(name: NetworkName, source: Source, **options: Any) -> Any:
        told = None if name in otherwise or sizes is None else getattr(sizes.networks, name)
        return infer(name, source, **options) if told is None else told

    return infer_or_told


def convert(
    *,
    out: str,
    mistral: Path | None = None,
    agent: Path | None = None,
    decoder: Path | None = None,
    vae: Path | None = None,
    clip: Path | None = None,
    t5: Path | None = None,
    tokenizer: Path | None = None,
    reference: Path | None = None,
    protocol: Literal["released", "paper"] | None = None,
    merge: bool = False,
    latent_height: int | None = None,
    latent_width: int | None = None,
    clip_head_width: int | None = None,
    overwrite: bool = False,
) -> int:
    """Turns released PyTorch checkpoints into a bundle.

    Every tensor of every file must be known, there, and of the expected shape: otherwise all
    problems are listed and nothing is written.

    Args:
        out: the bundle to write: a folder, or a gs:// address.
        mistral: folder of the base language model; its config.json gives the sizes, its weights
            are read only where the agent file lacks them.
        agent: the language model's file (pytorch_model.bin).
        decoder: the decoder's folder (with `latest`) or its mp_rank_00_model_states.pt.
        vae: the 3D VAE (3d-vae.pt), where the decoder file does not hold it.
        clip: the OpenCLIP image tower, where the decoder file does not hold it.
        t5: T5's folder or file, where the decoder file does not hold it.
        tokenizer: the tokenizer's folder.
        reference: a folder with mllm/, vdm/, vae/, clip/, t5/ and tokenizer/, as `export` writes
            it: short for all of these.
        protocol: how the weights are to be played: what an export says, or else `released`.
        merge: fold the low-rank updates into the weights.
        latent_height: rows of the decoder's latents (60 if not told).
        latent_width: columns of the decoder's latents (90 if not told).
        clip_head_width: features of one attention head of OpenCLIP (64 if not told).
        overwrite: replace a bundle that is already there.

    Raises:
        UserError: a file is not as it must be, or `out` is taken.
    """
    given = {
        "mistral": mistral,
        "agent": agent,
        "decoder": decoder,
        "vae": vae,
        "clip": clip,
        "t5": t5,
        "tokenizer": tokenizer,
        "latent_height": latent_height,
        "latent_width": latent_width,
        "clip_head_width": clip_head_width,
    }
    options = {} if reference is None else _from_reference(reference)
    _convert(out, options, given, protocol=protocol, merge=merge, overwrite=overwrite)
    return 0


def convert_unrelated(reference: Path, *, out: str, **sizes: int | None) -> None:
    """Converts a folder as `convert` does, except that its networks need not fit one another.

    Args:
        reference: Folder with mllm/, vdm/, vae/, clip/, t5/ and tokenizer/.
        out: Folder of the bundle to write.
        sizes: Sizes that override the folder's, by their options' names; None: the folder's.

    Raises:
        UserError: a file is invalid, or `out` exists.
    """
    _convert(out, _from_reference(reference), sizes, must_fit=False)


def _convert(
    out: str,
    options: dict[str, Any],
    given: Mapping[str, Any],
    *,
    protocol: Literal["released", "paper"] | None = None,
    merge: bool = False,
    overwrite: bool = False,
    must_fit: bool = True,
) -> None:
    """Converts; `given` are the options of the command line, which override `options`."""
    given = {key: value for key, value in given.items() if value is not None}
    sizes: Sizes | None = options.pop("sizes", None)
    infer = _infer_with(sizes, given)
    options |= given
    for key in ("latent_height", "latent_width", "clip_head_width"):
        size = options.get(key, 1)
        if type(size) is not int or size < 1:
            option = "--" + key.replace("_", "-")
            raise UserError(f"{option}: expected a whole number, 1 or more, found {size!r}")
    target = absolute(out)
    with telling(target, "cannot be written", mend="choose another folder"):
        refuse_existing(target, overwrite=overwrite)
    head_width = options.get("clip_head_width", 64)
    groups: list[_Group] = []
    if "agent" in options:
        groups.append(_mllm_group(options["agent"], options.get("mistral"), infer=infer))
    if "decoder" in options:
        groups += _decoder_groups(
            options["decoder"],
            height=options.get("latent_height", 60),
            width=options.get("latent_width", 90),
            head_width=head_width,
            given=set(options),
            infer=infer,
            say=print_line,
        )
    for name in EMBEDDED:
        if name in options:
            groups += single_groups(
                name, options[name], head_width=head_width, infer=infer, say=print_line
            )
    parts = [part for group in groups for part in group.parts]
    if not parts:
        raise UserError("nothing to convert: pass --agent, --decoder, --vae, --clip or --t5")
    _check_groups(groups)
    if must_fit:
        _check_fit(parts)
    parts.sort(key=lambda part: list(NETWORKS).index(part.name))
    total = sum(len(abstract_params(part.name, part.config)) for part in parts)
    problems: dict[str, list[str]] = {part.source.label: [] for part in parts}
    chosen = sizes.protocol if sizes and not protocol else PROTOCOLS[protocol or "released"]
    writer = BundleWriter(target, name=target.name, protocol=chosen, overwrite=overwrite)
    with writer, show_progress(total) as (doing, step):
        if "tokenizer" in options:
            _write_tokenizer(writer, options["tokenizer"], parts)
        for part in parts:
            doing(part.name)
            lora = lora_of(part.name, part.config) if merge else None
            config = with_lora(part.name, part.config, None) if lora else part.config
            place = dataclasses.replace(part.place, merged_lora=lora)
            leaves = _leaves(part, problems[part.source.label], merge=bool(lora), step=step)
            writer.write_network(part.name, config, leaves, released=place)
        tables.raise_problems(problems)
    show_summary(f"{target} (protocol {chosen.name})", writer.weights)


def _check_groups(groups: Sequence[_Group]) -> None:
    """Every file against its tables; the problems of all files in one error.

    Raises:
        UserError: there are any.
    """
    problems: dict[str, list[str]] = {}
    for group in groups:
        pairs = [(part.rules, abstract_params(part.name, part.config)) for part in group.parts]
        found = tables.find_problems(pairs, group.source.shapes, prefix=group.source.prefix)
        problems.setdefault(group.source.label, []).extend(found)
    tables.raise_problems(problems)


def _write_tokenizer(writer: BundleWriter, folder: Path, parts: Sequence[_Part]) -> None:
    """Checks the tokenizer against the language model, if there is one, and copies it."""
    from animegamer_jax.tokenizer import Tokenizer, copy_tokenizer

    mllm: Any = next((part.config for part in parts if part.name == "mllm"), None)
    if mllm is None:
        Tokenizer.load(folder)  # for its checks
        writer.write_tokenizer(folder)
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder with a tokenizer's files")
    with tempfile.TemporaryDirectory() as temporary:
        copy_tokenizer(
            folder,
            temporary,
            vocab_size=mllm.mistral.vocab_size,
            num_queries=mllm.num_queries,
        )
        writer.write_tokenizer(temporary)
