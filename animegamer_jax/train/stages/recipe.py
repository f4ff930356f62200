"""How a stage is trained: steps, batch, optimizer, number formats, checkpoints, evaluation."""

import dataclasses
from typing import Annotated, Literal

import tyro

from animegamer_jax.configs import Dtype, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, a constant or cosine schedule, and clipping by global norm.

    Attributes:
        learning_rate: Highest learning rate.
        warmup_steps: Steps in which the learning rate rises linearly to its highest value.
        decay: Learning rate after the warm-up: constant, or half a cosine that ends at
            final_fraction of the highest value.
        final_fraction: Learning rate of the last step as a fraction of the highest, with cosine
            decay.
        b1: Decay rate of AdamW's first moment.
        b2: Decay rate of AdamW's second moment.
        eps: Term added to AdamW's denominator.
        weight_decay: Weight decay of matrices and convolutions; norms, biases and embeddings have
            none.
        clip_norm: Global norm to which larger gradients are clipped.
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
    """How any stage is trained; a stage adds fields of its own in a subclass.

    Attributes:
        steps: Number of optimizer steps.
        batch_size: Samples a step, over all hosts and devices.
        optimizer: Optimizer and learning rate.
        accumulate: Number of parts into which a batch is split, computed one after another to save
            memory.
        ema_decay: Decay rate of the exponential moving average of the trained weights; None keeps
            no average.
        dtype: Number format of activations and frozen weights; trained weights are float32.
        remat: Activations that the backward pass computes again to save memory.
        seed: Seed of new weights, of the order of the data and of random numbers in the loss.
        log_every: Steps between two records of the training metrics.
        save_every: Steps between two checkpoints.
        keep_last: Number of checkpoints kept besides the best.
        eval_every: Steps between two evaluations on held-out data.
        eval_batches: Number of held-out batches in an evaluation.
        trained: Weights to train. "recipe" trains those that the paper trains in this stage, "all"
            every weight of the networks that the stage changes.
        result_dtype: Number format in which model/ stores the networks that the stage changes.
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
    eval_every: int = 500
    eval_batches: int = 2
    trained: Literal["recipe", "all"] = "recipe"
    result_dtype: Dtype = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedRecipe(Recipe):
    """The recipe of a stage that always trains the same weights: `trained` is not an option."""

    trained: Annotated[Literal["recipe", "all"], tyro.conf.Suppress] = "recipe"


# Last names of the parameters with weight decay: matrices and convolutions, low-rank ones too.
# Norms, biases, embeddings, positions, temperatures and tables of relative positions have none.
DECAYED = ("kernel", "lora_a", "lora_b", "patch_kernel", "projection")
