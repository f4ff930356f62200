"""How a stage is trained: steps, batch, optimizer, number formats, what is kept."""

import dataclasses
from typing import Annotated, Literal

import tyro

from animegamer_jax.configs import Dtype, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, a constant or cosine course, and clipping by the global norm.

    Attributes:
        learning_rate: the greatest one.
        warmup_steps: steps from zero to it.
        decay: what comes after: nothing, or half a cosine down to `final_fraction` at the last
            step.
        weight_decay: of matrices and convolutions; norms, biases and embeddings have none.
        clip_norm: greatest global norm of the gradients.
    """

    learning_rate: float
    warmup_steps: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-4
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What any stage needs to know; a stage adds its own fields by inheriting.

    Attributes:
        steps: optimizer steps in all.
        batch_size: samples a step, over all hosts and devices.
        accumulate: parts that a batch is split into, one after the other, to save memory.
        optimizer: see there.
        ema_decay: of the exponential moving average of the trained weights; None: none is kept.
        dtype: of activations and of frozen weights; trained weights are float32.
        remat: what the backward pass recomputes.
        seed: of new weights, of the order of the data and of all that is random in the loss.
        log_every: steps between lines in the records of the run.
        save_every, keep_last: checkpoints: steps between them, and how many stay beside the best.
        watch_every: steps between looks at the held-out data.
        watch_batches: held-out batches in such a look.
        trained: "recipe" trains what the paper trains in this stage, "all" every weight of the
            networks that the stage changes.
        result_dtype: in which the finished bundle stores the networks that the stage changes.
    """

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    accumulate: int = 1
    ema_decay: float | None = None
    dtype: Dtype = "float32"
    remat: Remat = "none"
    seed: int = 0
    log_every: int = 10
    save_every: int = 500
    keep_last: int = 2
    watch_every: int = 500
    watch_batches: int = 2
    trained: Literal["recipe", "all"] = "recipe"
    result_dtype: Dtype = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedRecipe(Recipe):
    """Of a stage that trains the same weights whatever is asked for: `trained` is no option."""

    trained: Annotated[Literal["recipe", "all"], tyro.conf.Suppress] = "recipe"


# The last names of the parameters that decay: matrices and convolutions, low-rank ones as well.
# Not norms, biases, embeddings, positions, temperatures and tables of relative positions.
DECAYED = ("kernel", "lora_a", "lora_b", "patch_kernel", "projection")
