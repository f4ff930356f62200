"""How a stage is trained: steps, batch, optimizer, number formats, checkpoints, evaluation."""

import dataclasses
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt, Interval, Lt

from animegamer_jax.configs import Dtype, Remat
from animegamer_jax.errors import UserError
from animegamer_jax.storage.serialization import from_json, to_json

Share = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
BelowOne = Annotated[float, Ge(0), Lt(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer: a linear warm-up, a constant or cosine schedule, clipping by global norm.

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
        kind: "adamw", or "muon", which orthogonalises the momentum of the hidden layers' matrices
            (arXiv 2502.16982) and leaves all other weights to AdamW.
    """

    learning_rate: NotNegative
    warmup_steps: CountOrZero = 0
    decay: Literal["constant", "cosine"] = "constant"
    final_fraction: Share = 0.05
    b1: BelowOne = 0.9
    b2: BelowOne = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 1e-4
    clip_norm: Positive = 1.0
    kind: Literal["adamw", "muon"] = dataclasses.field(
        default="adamw", metadata={"omit_default": True}
    )


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

    steps: Count
    batch_size: Count
    optimizer: OptimizerConfig
    accumulate: Count = 1
    ema_decay: BelowOne | None = None
    dtype: Dtype = "float32"
    remat: Remat = "none"
    seed: int = 0
    log_every: Count = 10
    save_every: Count = 500
    keep_last: Count = 2
    eval_every: Count = 500
    eval_batches: Count = 2
    trained: Literal["recipe", "all"] = "recipe"
    result_dtype: Dtype = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedRecipe(Recipe):
    """The recipe of a stage that always trains the same weights: `trained` is not an option."""

    trained: Annotated[Literal["recipe", "all"], tyro.conf.Suppress] = "recipe"


def check_numbers(recipe: Recipe) -> None:
    """Checks every number of a recipe against the range of its field.

    Raises:
        UserError: A number is out of range; names its option.
    """
    try:
        from_json(type(recipe), to_json(recipe), "")
    except UserError as error:
        field, _, problem = str(error).partition(": ")
        raise UserError(f"--{field.replace('_', '-')}: {problem}") from error


# Last names of the parameters with weight decay: matrices and convolutions, low-rank ones too.
# Norms, biases, embeddings, positions, temperatures and tables of relative positions have none.
DECAYED = ("kernel", "lora_a", "lora_b", "patch_kernel", "projection")
