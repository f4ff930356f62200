"""Networks on their way from checkpoint files into a bundle: checked, then written."""

import dataclasses
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from animegamer_jax.bundle.bundle import NETWORKS, BundleWriter, NetworkName, abstract_params
from animegamer_jax.bundle.config import Placement
from animegamer_jax.bundle.vocabulary import T5_TOKENIZER_FOLDER
from animegamer_jax.configs import ModelConfig, NetworkConfig, disagreements
from animegamer_jax.convert import rules as tables
from animegamer_jax.convert.networks import show_summary
from animegamer_jax.convert.rules import Abstract, Rule
from animegamer_jax.convert.sources import Source
from animegamer_jax.errors import UserError
from animegamer_jax.progress import show_progress, track
from animegamer_jax.protocol import Protocol
from animegamer_jax.storage.paths import absolute, refuse_existing, user_errors
from animegamer_jax.tokenizer import T5Tokenizer, Tokenizer, copy_tokenizer

Leaves = Iterator[tuple[str, np.ndarray]]  # dotted paths of parameters and their values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One network and the tensors that it is made from.

    Attributes:
        name: Name of the network in the bundle.
        config: Configuration of the network as the file holds it.
        source: Tensors of the file, under the names that `rules` use.
        rules: Table from tensors to parameters.
        placement: Place of the network in the released files, for a later export.
    """

    name: NetworkName
    config: NetworkConfig
    source: Source
    rules: tuple[Rule, ...]
    placement: Placement | None = None

    def params_in_file(self) -> Abstract:
        """Returns the parameters that are read from the file, with their shapes there."""
        return abstract_params(self.name, self.config)

    def bundle_config(self) -> NetworkConfig:
        """Returns the configuration of the network as the bundle holds it."""
        return self.config

    def leaves(self, problems: list[str]) -> Leaves:
        """Yields every parameter of the bundle's network, with one of them in memory at a time.

        Tensors with infinities or NaNs are added to `problems`.
        """
        return tables.convert(self.rules, self.source, self.params_in_file(), problems=problems)


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors of one file, and the networks that must use all of them between them."""

    source: Source
    parts: tuple[Part, ...] = ()


def check_target(out: str, *, overwrite: bool) -> epath.Path:
    """Returns the absolute path of a bundle that may be written.

    Raises:
        UserError: Something else exists there, or a bundle that `overwrite` does not release.
    """
    target = absolute(out)
    with user_errors(target, "cannot be written", hint="choose another folder"):
        refuse_existing(target, overwrite=overwrite)
    return target


def checked_parts(
    groups: Sequence[Group], *, none: str, sizes: Collection[str] | None = None
) -> list[Part]:
    """Returns the networks in the files, after comparing each file with its tables.

    Args:
        groups: Tensors of all files.
        none: Error if there is no network.
        sizes: Names of the sizes on which networks that exchange arrays must agree, of those in
            `configs.disagreements`. None: all.

    Raises:
        UserError: A file differs from its tables (the message lists the differences of all
            files), or two networks differ in a size.
    """
    parts = [part for group in groups for part in group.parts]
    if not parts:
        raise UserError(none)
    problems: dict[str, list[str]] = {}
    for group in groups:
        pairs = [(part.rules, part.params_in_file()) for part in group.parts]
        found = tables.find_problems(pairs, group.source.shapes, prefix=group.source.prefix)
        problems.setdefault(group.source.label, []).extend(found)
    tables.raise_problems(problems)
    networks: dict[str, Any] = {part.name: part.config for part in parts}
    for size, found in disagreements(ModelConfig(**networks)).items():
        if sizes is None or size in sizes:
            raise UserError(f"the files do not belong together: {size}: {found}")
    return parts


def write_bundle(
    target: epath.Path,
    parts: Sequence[Part],
    *,
    protocol: Protocol,
    tokenizer: Path | None,
    t5_tokenizer: Path | None,
    overwrite: bool,
    stages: Sequence[str] | None = None,
    note: str,
) -> None:
    """Writes a bundle of networks that have been checked, and prints a table of them.

    Args:
        target: Folder of the bundle.
        parts: The networks.
        protocol: Game protocol of the bundle.
        tokenizer: Folder of the tokenizer; None: the bundle gets none.
        t5_tokenizer: Folder of T5's own tokenizer; None: the bundle gets none.
        overwrite: Whether an existing bundle is replaced.
        stages: Training stages of the model so far; None: unknown.
        note: Text after the bundle's path in the table's title.

    Raises:
        UserError: A tensor holds infinities or NaNs, the tokenizer does not fit, or the disk is
            full or read-only.
    """
    problems: dict[str, list[str]] = {part.source.label: [] for part in parts}
    writer = BundleWriter(
        target, name=target.name, protocol=protocol, overwrite=overwrite, stages=stages
    )
    with writer, show_progress(transient=True) as progress:
        if tokenizer is not None:
            _write_tokenizer(writer, tokenizer, parts)
        if t5_tokenizer is not None:
            _write_t5_tokenizer(writer, t5_tokenizer, parts)
        for part in sorted(parts, key=lambda part: list(NETWORKS).index(part.name)):
            config, found = part.bundle_config(), problems[part.source.label]
            total = len(abstract_params(part.name, config))
            leaves = track(part.leaves(found), progress, part.name, total=total)
            writer.write_network(part.name, config, leaves, released=part.placement)
        tables.raise_problems(problems)
    show_summary(f"{target} ({note})", writer.weights)


def _write_t5_tokenizer(writer: BundleWriter, folder: Path, parts: Sequence[Part]) -> None:
    t5: Any = next((part.config for part in parts if part.name == "t5"), None)
    if t5 is None:
        raise UserError("--t5-tokenizer: expected T5 with it, found none: pass --t5 as well")
    with tempfile.TemporaryDirectory() as temporary:
        T5Tokenizer.load(folder, vocab_size=t5.vocab_size).save(Path(temporary))
        writer.write_tokenizer(temporary, name=T5_TOKENIZER_FOLDER)


def _write_tokenizer(writer: BundleWriter, folder: Path, parts: Sequence[Part]) -> None:
    """Copies the tokenizer; with a language model, checked against it and in a fast form."""
    mllm: Any = next((part.config for part in parts if part.name == "mllm"), None)
    if mllm is None:
        Tokenizer.load(folder)  # raises if the tokenizer is not usable
        writer.write_tokenizer(folder)
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder with a tokenizer's files")
    with tempfile.TemporaryDirectory() as temporary:
        size, queries = mllm.mistral.vocab_size, mllm.num_queries
        copy_tokenizer(folder, temporary, vocab_size=size, num_queries=queries)
        writer.write_tokenizer(temporary)
