"""A real stage that trains in a moment: half of the shot encoder learns to match random targets."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import NUM_IMAGE, NUM_QUERIES, NUM_TEXT, WIDTH, random_leaves, tiny_config
from jax.sharding import Mesh

from animegamer_jax.bundle.bundle import Bundle, make_network
from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.protocol import PAPER
from animegamer_jax.train.optimizer import parameter_path
from animegamer_jax.train.stages.base import DataSource, Evaluation, Stage, StageNetworks
from animegamer_jax.train.stages.recipe import OptimizerConfig, Recipe

CONFIG = tiny_config(400)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyRecipe(Recipe):
    """`noise` moves the text features at random; `bad_sample` is all NaN."""

    noise: float = 0.0
    bad_sample: int = -1


RECIPE = TinyRecipe(
    steps=6,
    batch_size=8,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    ema_decay=0.9,
    log_every=1,
    save_every=2,
    eval_every=2,
    eval_batches=1,
)
NUM_SAMPLES = {"train": 64, "test": 16}


class TinyStage(Stage[TinyRecipe]):
    name = "tiny"
    needs: ClassVar = {"encoder": "foundations"}
    changes = ("encoder",)
    best = ("error", "min")
    unit = "shots"

    def load(self, bundle: Bundle | None, *, mesh: Mesh) -> StageNetworks:
        if bundle is not None:
            return {"encoder": bundle.load("encoder", mesh=mesh, dtype=self.recipe.dtype)}
        assert isinstance(self.config.encoder, ShotEncoderConfig)
        network = make_network("encoder", self.config.encoder, rngs=nnx.Rngs(0))
        return {"encoder": network}

    def is_trained(self, network: str, path: tuple[str, ...], variable: nnx.Variable) -> bool:
        return path[0] in ("text", "text_norm")

    def samples(self, sources: Sequence[DataSource], *, split: str) -> grain.MapDataset:
        return self.read_samples("", split=split)

    def read_samples(self, path: str, *, split: str) -> grain.MapDataset:
        def sample(index: int) -> dict[str, np.ndarray]:
            random = np.random.default_rng([index, split == "test"])
            text = random.normal(size=(NUM_TEXT, 12)).astype(np.float32)
            if index == self.recipe.bad_sample:
                text[:] = np.nan
            return {
                "text": text,
                "image": random.normal(size=(NUM_IMAGE, 20)).astype(np.float32),
                "target": random.normal(size=(NUM_QUERIES, WIDTH)).astype(np.float32),
            }

        return grain.MapDataset.range(NUM_SAMPLES[split]).map(sample)

    def sample_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {
            "text": (NUM_TEXT, 12),
            "image": (NUM_IMAGE, 20),
            "target": (NUM_QUERIES, WIDTH),
        }
        return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def loss(self, networks: StageNetworks, batch: Any, key: jax.Array):
        encoder = networks["encoder"]
        assert isinstance(encoder, ShotEncoder)
        noise = jax.random.normal(key, batch["text"].shape)
        text = batch["text"] + self.recipe.noise * noise
        error = jnp.square(encoder(text, batch["image"]) - batch["target"])
        return error.mean(), {"text_error": error[:, :NUM_TEXT].mean()}

    def sample_flops(self, networks: StageNetworks) -> float:
        return 6.0 * NUM_TEXT * (12 * WIDTH + WIDTH * WIDTH)

    def evaluate(self, networks: StageNetworks, batch: Any, key: jax.Array) -> Evaluation:
        loss, _ = self.loss(networks, batch, key)
        clips = np.zeros((2, 3, 4, 6, 3), np.uint8)
        return Evaluation({"error": float(loss)}, {"clips": clips})


def make_stage(**changes: Any) -> TinyStage:
    return TinyStage(dataclasses.replace(RECIPE, **changes), CONFIG, PAPER)


def make_networks(seed: int = 0) -> StageNetworks:
    """The encoder with weights that are neither zero nor one."""
    assert CONFIG.encoder is not None
    encoder = make_network("encoder", CONFIG.encoder, rngs=nnx.Rngs(0))
    values = dict(random_leaves("encoder", CONFIG.encoder, seed))
    for path, variable in nnx.to_flat_state(nnx.state(encoder)):
        variable.set_value(jnp.asarray(values[".".join(map(str, path))]))
    return {"encoder": encoder}


def one_device() -> Mesh:
    """A mesh of the first device, though there are eight."""
    axes = ("data", "fsdp", "context", "tensor")
    kinds = (jax.sharding.AxisType.Auto,) * 4
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), axes, axis_types=kinds)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by dotted names."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {parameter_path(path): np.asarray(leaf) for path, leaf in flat}
