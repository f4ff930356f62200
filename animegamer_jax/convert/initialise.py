"""Makes the bundle that training starts from, out of pre-trained networks.

CogVideoX-2B becomes the decoder: low-rank updates and the motion input are new, and the last layer
of the motion input is zero, so that it starts as a decoder without one. Mistral-7B becomes the
language model: its vocabulary grows by the game's tokens, the resamplers are new (paper, section
4.1). T5, OpenCLIP and the VAE are taken as they are. E_a is made by its own stage.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from animegamer_jax.bundle.bundle import abstract_params
from animegamer_jax.configs import DiTConfig, MLLMConfig, ModelConfig
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.networks import EMBEDDED, check_kind, read_config, size_errors
from animegamer_jax.convert.options import InitialiseOptions
from animegamer_jax.convert.parts import (
    Group,
    Leaves,
    Part,
    check_target,
    checked_parts,
    write_bundle,
)
from animegamer_jax.convert.released import decoder_file, single_groups
from animegamer_jax.convert.rules import Abstract
from animegamer_jax.convert.sources import open_checkpoint
from animegamer_jax.convert.tables import cogvideox
from animegamer_jax.convert.tables import mistral as mistral_table
from animegamer_jax.convert.tables.mllm import mistral_rules
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import position_table
from animegamer_jax.protocol import PAPER
from animegamer_jax.tokenizer import Tokenizer

_EMBEDDING, _HEAD = "mistral.embedding", "mistral.head.kernel"
_HEAD_GAIN = 3.0  # new output rows start at this multiple of the mean of the old ones


def initialise_bundle(options: InitialiseOptions, sizes: ModelConfig) -> None:
    """Writes a bundle of pre-trained networks, or nothing.

    Args:
        options: The files; `options.size` is not read.
        sizes: What the files do not determine: clips, numbers of tokens, low-rank updates.

    Raises:
        UserError: A file has problems, or the output exists.
    """
    target = check_target(options.out, overwrite=options.overwrite)
    parts = checked_parts(
        list(_find_groups(options, sizes)),
        none="nothing to initialise from: pass --cogvideox, --mistral, --t5, --clip or --vae",
    )
    write_bundle(
        target,
        parts,
        protocol=PAPER,
        tokenizer=options.tokenizer,
        t5_tokenizer=options.t5_tokenizer,
        overwrite=options.overwrite,
        stages=(),
        note="to be trained",
    )


def _find_groups(options: InitialiseOptions, sizes: ModelConfig) -> Iterator[Group]:
    """Yields the tensors of every file, with the networks that they become."""
    assert sizes.dit is not None
    assert sizes.mllm is not None
    vocab_size, width = None, sizes.dit.hidden_size
    if options.tokenizer is not None:
        tokenizer = Tokenizer.load(options.tokenizer, num_queries=sizes.mllm.num_queries)
        vocab_size = len(tokenizer)
    if options.cogvideox is not None:
        for group in _dit_groups(options.cogvideox, like=sizes.dit, seed=options.seed):
            width = next((cast(DiTConfig, part.config).hidden_size for part in group.parts), width)
            yield group
    if options.mistral is not None:
        if vocab_size is None:
            raise UserError(
                "--mistral: its vocabulary grows by the game's tokens: pass --tokenizer as well"
            )
        yield _mllm_group(
            options.mistral, like=sizes.mllm, width=width, vocab_size=vocab_size, seed=options.seed
        )
    for name in EMBEDDED:
        if (path := getattr(options, name)) is not None:
            for group in single_groups(name, path):
                # Where the file came from is of no use after training.
                parts = (dataclasses.replace(part, placement=None) for part in group.parts)
                yield Group(group.source, tuple(parts))


def _dit_groups(path: Path, *, like: DiTConfig, seed: int) -> Iterator[Group]:
    source = open_checkpoint(decoder_file(path))
    inner = source.under(cogvideox.PREFIX)
    hint = "pass the transformer of CogVideoX-2B's SAT release"
    if not inner.tensors:
        raise UserError(
            f"{source.label}: --cogvideox: expected tensors whose names start with "
            f"{cogvideox.PREFIX!r}, found none: {hint}"
        )
    with size_errors(f"{source.label}: --cogvideox", hint=hint):
        config = cogvideox.infer_config(inner.shapes, like=like)

    def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "positions":
            return position_table(config)
        if name == "motion_embed.output.kernel":
            return np.zeros(shape, np.float32)
        return new_leaf(name, shape, seed=seed)

    rules = cogvideox.rules(config)
    part = _StartingPart(name="dit", config=config, source=inner, rules=rules, make=make)
    yield Group(inner, (part,))
    # The release's trainer may have saved the frozen VAE and T5 in the same file.
    known = (cogvideox.PREFIX, *EMBEDDED.values())
    yield Group(source.select(lambda name: not name.startswith(known)))


def _mllm_group(folder: Path, *, like: MLLMConfig, width: int, vocab_size: int, seed: int) -> Group:
    base_config = read_config(folder / "config.json")
    source = open_checkpoint(folder)
    check_kind(source, "mistral")
    with size_errors(f"{folder}: --mistral", hint="expected the folder of a Mistral model"):
        base = mistral_table.infer_config(
            source.shapes, base=base_config, like=like, representation_size=width
        )
    rows, hidden = base.mistral.vocab_size, base.mistral.hidden_size
    if vocab_size < rows:
        raise UserError(
            f"--tokenizer: it has {vocab_size} entries, the language model {rows} already: "
            "expected the same ones and the game's tokens after them"
        )
    mistral = dataclasses.replace(base.mistral, vocab_size=vocab_size)
    part = _StartingPart(
        name="mllm",
        config=dataclasses.replace(base, mistral=mistral),
        source=source,
        rules=mistral_rules(),
        make=lambda path, shape: new_leaf(path, shape, seed=seed),
        change=lambda path, leaf: extend_vocabulary(path, leaf, vocab_size=vocab_size),
        file_shapes={_EMBEDDING: (rows, hidden), _HEAD: (hidden, rows)},
    )
    return Group(source, (part,))


# New parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StartingPart(Part):
    """A network of which a file holds a part; the rest is made.

    Attributes:
        make: Returns a parameter that the file does not hold, by its path and shape.
        change: Returns a parameter of the file as the network has it.
        file_shapes: Shapes in the file that differ from the network's.
    """

    make: Callable[[str, tuple[int, ...]], np.ndarray]
    change: Callable[[str, np.ndarray], np.ndarray] = lambda _, leaf: leaf
    file_shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def params_in_file(self) -> Abstract:
        targets = {rule.target for rule in self.rules}
        return {
            path: leaf.update(shape=self.file_shapes.get(path, leaf.shape))
            for path, leaf in super().params_in_file().items()
            if path in targets
        }

    def leaves(self, problems: list[str]) -> Leaves:
        in_file = self.params_in_file()
        for path, leaf in tables.convert(self.rules, self.source, in_file, problems=problems):
            yield path, self.change(path, leaf)
            del leaf
        for path, abstract in abstract_params(self.name, self.config).items():
            if path not in in_file:
                yield path, self.make(path, abstract.shape)


def new_leaf(path: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """Returns a new float32 parameter, distributed as the layers of `models/` make theirs.

    Matrices are normal with the variance of one over their inputs; biases and the second halves
    of low-rank updates are zero.
    """
    last = path.rpartition(".")[2]
    if last in ("bias", "lora_b"):
        return np.zeros(shape, np.float32)
    if last == "scale":
        return np.ones(shape, np.float32)
    # Seeded by name, so that a parameter does not depend on the others.
    random = np.random.default_rng([seed, zlib.crc32(path.encode())])
    return random.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5)


def extend_vocabulary(path: str, leaf: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Returns the embeddings with rows for new tokens; all other parameters as they are.

    New input rows are the mean of the old ones, new output rows three times the mean.
    """
    axis = {_EMBEDDING: 0, _HEAD: 1}.get(path)
    if axis is None:
        return leaf
    gain = _HEAD_GAIN if path == _HEAD else 1.0
    new: Any = gain * leaf.astype(np.float32).mean(axis=axis, keepdims=True)
    rows = np.repeat(new, vocab_size - leaf.shape[axis], axis=axis)
    return np.concatenate([leaf, rows.astype(leaf.dtype)], axis=axis)
