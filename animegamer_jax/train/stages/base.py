"""What a stage is: its networks, trained weights, loss, samples and evaluation.

The loop (`train/loop.py`) and the step (`train/step.py`) know nothing else of a stage.
"""

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypedDict, TypeVar

import grain
import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from animegamer_jax.bundle.bundle import Bundle, NetworkName
from animegamer_jax.configs import ModelConfig, NetworkConfig, VAEConfig
from animegamer_jax.data.loader import mixture
from animegamer_jax.errors import UserError
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.linear import Linear
from animegamer_jax.models.mllm import MLLM
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.models.vae import VAE
from animegamer_jax.protocol import Protocol
from animegamer_jax.tokenizer import Tokenizer
from animegamer_jax.train.stages.recipe import Recipe

R = TypeVar("R", bound=Recipe)


class StageNetworks(TypedDict, total=False):
    """The networks of a stage by name."""

    mllm: MLLM
    encoder: ShotEncoder
    dit: DiT
    vae: VAE
    clip: CLIP
    t5: T5Encoder
    context: Linear
    pixels: Linear
    picture: DiT
    teacher: DiT
    fake: DiT
    picture_teacher: DiT
    picture_fake: DiT
    history: Linear
    turn_end: Linear
    target: Linear


Scalars = dict[str, Float[Array, ""]]


class DataSource(NamedTuple):
    """A dataset to train on, and the weight of its samples among those of others."""

    path: str
    weight: float = 1.0


class Evaluation(NamedTuple):
    """Result on held-out data: scores, and clips uint8 [n, f, h, w, 3] by name."""

    scalars: Mapping[str, float]
    clips: Mapping[str, Any]


class Stage(abc.ABC, Generic[R]):
    """One training stage.

    Attributes:
        recipes: The stage's recipes by size.
        name: The stage's name on the command line.
        needs: Networks that the bundle must have, each with the stage that makes it.
        changes: Networks with trained weights, which the result replaces or adds.
        best: The score that decides which checkpoint is best, and whether "min" or "max" is better.
        unit: What a sample is called where samples a second are shown, in the plural.
        recipe, config, protocol: How the stage is trained, sizes of the networks, the game.
        tokenizer_dir: Folder of the model's tokenizer, which the result gets too.
    """

    recipes: ClassVar[Mapping[str, Recipe]]
    name: ClassVar[str]
    needs: ClassVar[Mapping[NetworkName, str]] = {}
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

    @property
    def vae_config(self) -> VAEConfig:
        """The VAE's configuration, which has the scales of the decoder's latents."""
        assert self.config.vae is not None, "the command has checked what the stage needs"
        return self.config.vae

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.load_tokenizer()

    def load_tokenizer(self, *, vocab_size: int | None = None, num_queries: int = 1) -> Tokenizer:
        """Returns the model's tokenizer, which must have at least `num_queries` frame tokens.

        Raises:
            UserError: There is none, or it does not belong to the model.
        """
        if self.tokenizer_dir is None:
            raise UserError(
                f"stage {self.name}: no tokenizer in the bundle: convert with --tokenizer"
            )
        return Tokenizer.load(self.tokenizer_dir, vocab_size=vocab_size, num_queries=num_queries)

    @abc.abstractmethod
    def load(self, bundle: Bundle | None, *, mesh: jax.sharding.Mesh) -> StageNetworks:
        """Returns the stage's networks, from the bundle or new, placed on the mesh."""

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        """Returns whether a parameter is trained; `path` is its path inside its network."""
        del path, variable
        return network in self.changes

    def check_sources(self, bundle: Bundle | None, sources: Sequence[DataSource]) -> None:
        """Checks that the datasets were made by the model, where a stage needs that.

        Raises:
            UserError: One was made by another.
        """
        del bundle, sources

    def rate_factors(self) -> Mapping[str, float]:
        """Returns the factor of the learning rate of each trained network; empty: all are one."""
        return {}

    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        """Returns the single samples of all datasets, mixed by weight, not shuffled or repeated.

        Raises:
            UserError: See `read_samples`.
        """
        datasets = [self.read_samples(source.path, split=split) for source in sources]
        return mixture(datasets, weights=[source.weight for source in sources])

    @abc.abstractmethod
    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        """Returns the samples of one dataset: pytrees of arrays of fixed shapes.

        Raises:
            UserError: The dataset is missing, empty, of another layout, or does not fit the recipe.
        """

    @abc.abstractmethod
    def sample_spec(self) -> Any:
        """Returns the shapes of a sample without any data: a pytree of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def loss(
        self, networks: StageNetworks, batch: Any, key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Scalars]:
        """Returns the loss of a batch (stacked `samples`), and its parts.

        The loss is a mean over samples, so that a batch in parts gives the mean of the parts'
        losses. It is pure and traced once. Random numbers are drawn from `key`, which belongs to
        the step, for the whole batch: the result does not depend on the number of devices.
        """

    def sample_flops(self, networks: StageNetworks) -> float | None:
        """Returns the FLOPs of one sample's training step, used for the MFU; None: not counted."""
        return None

    def evaluate(self, networks: StageNetworks, batch: Any, key: Key[Array, ""]) -> Evaluation:
        """Returns scores besides the loss, and clips, of a held-out batch with averaged weights."""
        return Evaluation({}, {})

    def configs(self) -> dict[NetworkName, NetworkConfig]:
        """Returns the configurations of the networks in `changes` for the result's bundle."""
        return {name: getattr(self.config, name) for name in self.changes}

    def finish(
        self, networks: StageNetworks, batches: Iterator[Any]
    ) -> dict[NetworkName, NetworkConfig]:
        """Returns `configs()` with what is measured on the finished networks and training batches.

        Called once before the result is written, with the averaged weights if there are any.
        """
        del networks, batches
        return self.configs()
