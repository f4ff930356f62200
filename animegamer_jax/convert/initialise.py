"""`animegamer initialise`: pre-trained networks to the bundle that training starts from.

CogVideoX-2B becomes the decoder: low-rank updates and the motion input are new, and the last layer
of the motion input is zero, so that it starts as a decoder without one. Mistral-7B becomes the
language model: its vocabulary grows by the game's tokens, the resamplers are new (PAPER section
4.1). T5, OpenCLIP and the VAE are taken as they are. E_a is made by its own stage.
"""

import dataclasses
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from animegamer_jax.bundle.bundle import (
    NETWORKS,
    BundleWriter,
    NetworkName,
    abstract_params,
)
from animegamer_jax.configs import (
    SIZES,
    DiTConfig,
    MLLMConfig,
    ModelConfig,
    NetworkConfig,
    disagreements,
)
from animegamer_jax.convert import released
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.networks import check_kind, infer, show_progress, show_summary
from animegamer_jax.convert.rules import Abstract, Rule
from animegamer_jax.convert.sources import Source, open_checkpoint
from animegamer_jax.convert.tables import cogvideox
from animegamer_jax.convert.tables import mistral as mistral_folder
from animegamer_jax.convert.tables.mllm import mistral_rules
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import position_table
from animegamer_jax.protocol import PAPER
from animegamer_jax.storage.paths import (
    absolute,
    refuse_existing,
    telling,
)
from animegamer_jax.tokenizer import Tokenizer, copy_tokenizer

_EMBEDDING, _HEAD = "mistral.embedding", "mistral.head.kernel"
_HEAD_GAIN = 3.0  # new output rows start at so many times the mean of the old ones


@dataclasses.dataclass(frozen=True)
class _Part:
    """One network: what is read for it, and how what is not read is made."""

    name: NetworkName
    config: NetworkConfig
    source: Source
    rules: tuple[Rule, ...]
    make: Callable[[str, tuple[int, ...]], np.ndarray] | None = None
    change: Callable[[str, np.ndarray], np.ndarray] | None = None
    # Shapes in the file where they differ from the network's.
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def read(self) -> Abstract:
        """The parameters that come from the file, with their shapes there."""
        targets = {rule.target for rule in self.rules}
        abstract = abstract_params(self.name, self.config)
        return {
            path: leaf.update(shape=self.shapes.get(path, leaf.shape))
            for path, leaf in abstract.items()
            if path in targets or self.make is None
        }

    def leaves(self, problems: list[str], step: Callable[[int], None]) -> Iterator[Any]:
        """Every parameter, one in memory at a time."""
        read = self.read()
        for path, leaf in tables.convert(self.rules, self.source, read, problems=problems):
            yield path, leaf if self.change is None else self.change(path, leaf)
            step(1)
            del leaf
        for path, leaf in abstract_params(self.name, self.config).items():
            if path not in read and self.make is not None:
                yield path, self.make(path, leaf.shape)
                step(1)


def new_leaf(path: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """A new parameter as the layers make theirs (`models/linear.py`), one at a time, float32.

    Matrices are normal with the variance of one over their inputs; biases and the second halves
    of low-rank updates are zero.
    """
    last = path.rpartition(".")[2]
    if last in ("bias", "lora_b"):
        return np.zeros(shape, np.float32)
    if last == "scale":
        return np.ones(shape, np.float32)
    # By name, so that a parameter does not depend on the others.
    random = np.random.default_rng([seed, zlib.crc32(path.encode())])
    return random.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5)


def extend_vocabulary(path: str, leaf: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """The embeddings with rows for new tokens; all other parameters as they are.

    New input rows are the mean of the old ones, new output rows three times the mean.
    """
    if path == _EMBEDDING:
        new = leaf.astype(np.float32).mean(axis=0, keepdims=True)
        rows = np.repeat(new, vocab_size - leaf.shape[0], axis=0)
        return np.concatenate([leaf, rows.astype(leaf.dtype)], axis=0)
    if path == _HEAD:
        new = _HEAD_GAIN * leaf.astype(np.float32).mean(axis=1, keepdims=True)
        columns = np.repeat(new, vocab_size - leaf.shape[1], axis=1)
        return np.concatenate([leaf, columns.astype(leaf.dtype)], axis=1)
    return leaf


def _dit_part(path: Path, *, like: DiTConfig, seed: int) -> tuple[_Part, Source]:
    """The decoder, and what its file holds beside."""
    source = open_checkpoint(released.decoder_file(path))
    inner = source.under(cogvideox.PREFIX)
    if not inner.tensors:
        raise UserError(
            f"{source.label}: --cogvideox: expected tensors whose names start with "
            f"{cogvideox.PREFIX!r}, found none: give the transformer of CogVideoX-2B's SAT release"
        )
    try:
        config = cogvideox.infer_config(inner.shapes, like=like)
    except KeyError as error:
        raise UserError(
            f"{source.label}: --cogvideox: {error.args[0]} is missing, which a size is read from: "
            "give the transformer of CogVideoX-2B's SAT release"
        ) from None
    except ValueError as error:
        raise UserError(f"{source.label}: --cogvideox: {error}") from None

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "positions":
            return position_table(config)
        if name == "motion_embed.output.kernel":
            return np.zeros(shape, np.float32)
        return new_leaf(name, shape, seed=seed)

    return _Part("dit", config, inner, cogvideox.rules(config), make), source


def _mllm_part(folder: Path, *, like: MLLMConfig, width: int, vocab_size: int, seed: int) -> _Part:
    base_config = released.read_json(folder / "config.json")
    source = open_checkpoint(folder)
    check_kind(source, "mistral")
    try:
        base = mistral_folder.infer_config(
            source.shapes, base=base_config, like=like, representation_size=width
        )
    except KeyError as error:
        raise UserError(
            f"{folder}: --mistral: {error.args[0]} is missing: expected a Mistral model's folder"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder}: --mistral: {error}") from None
    rows, hidden = base.mistral.vocab_size, base.mistral.hidden_size
    if vocab_size < rows:
        raise UserError(
            f"--tokenizer: it has {vocab_size} entries, the language model {rows} already: "
            "expected the same ones and the game's tokens after them"
        )
    mistral = dataclasses.replace(base.mistral, vocab_size=vocab_size)
    config = dataclasses.replace(base, mistral=mistral)
    return _Part(
        "mllm",
        config,
        source,
        mistral_rules(),
        make=lambda path, shape: new_leaf(path, shape, seed=seed),
        change=lambda path, leaf: extend_vocabulary(path, leaf, vocab_size=vocab_size),
        shapes={_EMBEDDING: (rows, hidden), _HEAD: (hidden, rows)},
    )


def _released_part(name: NetworkName, path: Path) -> tuple[_Part, Source]:
    """The VAE, CLIP or T5 as `animegamer convert` takes it, and what its file holds beside."""
    groups = released.single_groups(name, path, head_width=64, infer=infer, say=released.print_line)
    rest, group = groups
    (part,) = group.parts
    return _Part(name, part.config, part.source, part.rules), rest.source


def _check(parts: Sequence[_Part], beside: Sequence[Source]) -> None:
    """Every file against its table; the problems of all of them in one error.

    Raises:
        UserError: there are any.
    """
    problems: dict[str, list[str]] = {}
    for part in parts:
        pairs = [(part.rules, part.read())]
        found = tables.find_problems(pairs, part.source.shapes, prefix=part.source.prefix)
        problems.setdefault(part.source.label, []).extend(found)
    for source in beside:
        found = tables.find_problems([], source.shapes, prefix=source.prefix)
        problems.setdefault(source.label, []).extend(found)
    tables.raise_problems(problems)


def _check_fit(parts: Sequence[_Part]) -> None:
    """The networks that pass arrays to one another agree on their sizes.

    Raises:
        UserError: two of them do not.
    """
    networks: dict[str, Any] = {part.name: part.config for part in parts}
    for what, said in disagreements(ModelConfig(**networks)).items():
        raise UserError(f"the files do not belong together: {what}: {said}")


def _write_tokenizer(writer: BundleWriter, folder: Path, parts: Sequence[_Part]) -> None:
    """Copies the tokenizer; with a language model, checked against it and in a fast form."""
    mllm: Any = next((part.config for part in parts if part.name == "mllm"), None)
    if mllm is None:
        writer.write_tokenizer(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        size, queries = mllm.mistral.vocab_size, mllm.num_queries
        copy_tokenizer(folder, temporary, vocab_size=size, num_queries=queries)
        writer.write_tokenizer(temporary)


def find_parts(
    files: Mapping[str, Path], sizes: ModelConfig, *, vocab_size: int | None, seed: int
) -> list[_Part]:
    """The networks of the given files, checked.

    Args:
        files: paths by option: cogvideox, mistral, t5, clip, vae.
        sizes: what files do not tell: clips, numbers of tokens, low-rank updates.
        vocab_size: of the tokenizer.
        seed: of the new parameters.

    Raises:
        UserError: a file is not as it must be.
    """
    assert sizes.dit is not None
    assert sizes.mllm is not None
    parts: list[_Part] = []
    beside: list[Source] = []
    width = sizes.dit.hidden_size
    if "cogvideox" in files:
        part, source = _dit_part(files["cogvideox"], like=sizes.dit, seed=seed)
        width = cast(DiTConfig, part.config).hidden_size
        parts.append(part)
        # The release's trainer may have saved the frozen VAE and T5 in the same file.
        known = (cogvideox.PREFIX, *released.EMBEDDED.values())
        beside.append(source.select(lambda name: not name.startswith(known)))
    if "mistral" in files:
        if vocab_size is None:
            raise UserError(
                "--mistral: its vocabulary grows by the game's tokens: give --tokenizer as well"
            )
        parts.append(
            _mllm_part(
                files["mistral"], like=sizes.mllm, width=width, vocab_size=vocab_size, seed=seed
            )
        )
    for name in released.EMBEDDED:
        if name in files:
            part, rest = _released_part(name, files[name])
            parts.append(part)
            beside.append(rest)
    if not parts:
        raise UserError(
            "nothing to initialise from: pass --cogvideox, --mistral, --t5, --clip or --vae"
        )
    _check(parts, beside)
    _check_fit(parts)
    return sorted(parts, key=lambda part: list(NETWORKS).index(part.name))


def initialise(
    *,
    out: str,
    cogvideox: Path | None = None,
    mistral: Path | None = None,
    t5: Path | None = None,
    clip: Path | None = None,
    vae: Path | None = None,
    tokenizer: Path | None = None,
    size: Literal["toy", "full"] = "full",
    seed: int = 0,
    overwrite: bool = False,
) -> int:
    """Makes a bundle to train, from pre-trained networks.

    Every tensor of every file must be known, there, and of the expected shape: otherwise all
    problems are listed and nothing is written.

    Args:
        out: the bundle to write: a folder, or a gs:// address.
        cogvideox: CogVideoX-2B's SAT release: the transformer's folder (with `latest`) or its
            mp_rank_00_model_states.pt.
        mistral: folder of Mistral-7B-Instruct-v0.1.
        t5: T5 v1.1 XXL's folder or file.
        clip: OpenCLIP ViT-B/16.
        vae: the 3D VAE of CogVideoX (3d-vae.pt).
        tokenizer: the tokenizer's folder, with the game's tokens.
        size: what the files do not tell: the clip's size, numbers of tokens, low-rank updates.
        seed: of the new parameters.
        overwrite: replace a bundle that is already there.

    Raises:
        UserError: a file is not as it must be, or `out` is taken.
    """
    given = {"cogvideox": cogvideox, "mistral": mistral, "t5": t5, "clip": clip, "vae": vae}
    files = {name: path for name, path in given.items() if path is not None}
    write_bundle(out, files, SIZES[size](), tokenizer=tokenizer, seed=seed, overwrite=overwrite)
    return 0


def write_bundle(
    out: str,
    files: Mapping[str, Path],
    sizes: ModelConfig,
    *,
    tokenizer: Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """What `initialise` does, with any sizes; `files` are paths by option.

    Raises:
        UserError: a file is not as it must be, or `out` is taken.
    """
    assert sizes.mllm is not None
    target = absolute(out)
    with telling(target, "cannot be written", mend="choose another folder"):
        refuse_existing(target, overwrite=overwrite)
    vocab_size = None
    if tokenizer is not None:
        vocab_size = len(Tokenizer.load(tokenizer, num_queries=sizes.mllm.num_queries))
    parts = find_parts(files, sizes, vocab_size=vocab_size, seed=seed)
    total = sum(len(abstract_params(part.name, part.config)) for part in parts)
    problems: dict[str, list[str]] = {part.source.label: [] for part in parts}
    writer = BundleWriter(target, name=target.name, protocol=PAPER, overwrite=overwrite, stages=())
    with writer, show_progress(total) as (doing, step):
        if tokenizer is not None:
            _write_tokenizer(writer, tokenizer, parts)
        for part in parts:
            doing(part.name)
            leaves = part.leaves(problems[part.source.label], step)
            writer.write_network(part.name, part.config, leaves)
        tables.raise_problems(problems)
    show_summary(f"{target} (to be trained)", writer.weights)
