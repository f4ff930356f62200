"""What a stage is: the networks it needs, the weights it trains, its loss, its data, its scores.

The loop (`train/loop.py`) and the step (`train/step.py`) know nothing else of a stage.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import grain
import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import ModelConfig, NetworkConfig
from animegamer_jax.protocol import Protocol
from animegamer_jax.train.stages.recipe import Recipe

R = TypeVar("R", bound=Recipe)

Networks = dict[str, nnx.Module]
Scalars = dict[str, Float[Array, ""]]


class DataSource(NamedTuple):
    """A data set to train on, and its share of the samples."""

    path: str
    weight: float = 1.0


class Watched(NamedTuple):
    """A look at the held-out data: scalars, and clips uint8 [n, f, h, w, 3] by name."""

    scalars: Mapping[str, float]
    clips: Mapping[str, Any]


class Stage(abc.ABC, Generic[R]):
    """One training stage.

    Attributes:
        name: of the stage, as on the command line.
        needs: networks that the bundle must have, each with the stage that makes it.
        changes: networks of which weights are trained, and that the result replaces or adds.
        best: scalar of `watch` by which the best checkpoint is told, and whether less is better.
        unit: what a sample is called where samples a second are shown.
        recipe, config, protocol: how it is trained, the networks' sizes, the game.
        tokenizer_dir: the folder of the model's tokenizer, and of the result's.
    """

    name: ClassVar[str]
    needs: ClassVar[Mapping[NetworkName, str]]
    changes: ClassVar[tuple[NetworkName, ...]]
    best: ClassVar[tuple[str, str]] = ("loss", "min")
    unit: ClassVar[str] = "samples"

    def __init__(
        self,
        recipe: R,
        config: ModelConfig,
        protocol: Protocol,
        *,
        tokenizer_dir: Path | None = None,
    ):
        self.recipe, self.config, self.protocol = recipe, config, protocol
        self.tokenizer_dir = tokenizer_dir

    @abc.abstractmethod
    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> Networks:
        """The networks of this stage, from the bundle or new, each placed on the mesh."""

    @abc.abstractmethod
    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        """Whether a parameter is trained; `path` is its path inside its network."""

    @abc.abstractmethod
    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        """Single samples, not shuffled or repeated: pytrees of numpy arrays of fixed shapes.

        Raises:
            UserError: a data set is missing, empty or of another layout.
        """

    @abc.abstractmethod
    def loss(
        self, networks: Networks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """The loss of a batch (a pytree of `samples`, a leading axis of samples), and its parts.

        A mean over samples, so that a batch in parts gives the mean of the parts' losses.

        Pure, traced once. `key` belongs to this step; what is random is drawn for the whole batch,
        so that the result does not depend on the number of devices.
        """

    def sample_flops(self, networks: Networks) -> float:
        """Floating-point operations of one sample's training step, by arithmetic, for the MFU."""
        raise NotImplementedError

    def watch(self, networks: Networks, batch: Any, key: Key[Array, ""]) -> Watched:
        """Scores and clips of a held-out batch with the averaged weights, beside the loss."""
        return Watched({}, {})

    def configs(self) -> dict[NetworkName, NetworkConfig]:
        """The configuration of each network in `changes` as the result's bundle has it."""
        return {name: getattr(self.config, name) for name in self.changes}

    def finish(
        self, networks: Networks, batches: Iterator[Any]
    ) -> dict[NetworkName, NetworkConfig]:
        """`configs()`, with what is measured on the finished networks and some training batches.

        Called once, before the result is written, with the averaged weights where there are any.
        """
        del networks, batches
        return self.configs()
