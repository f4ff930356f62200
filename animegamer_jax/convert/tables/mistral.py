"""A plain Mistral folder as a start for the language model; its table is `mllm.mistral_rules`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from animegamer_jax.configs import MLLMConfig
from animegamer_jax.convert.tables import mllm


def infer_config(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    base: Mapping[str, Any],
    like: MLLMConfig,
    representation_size: int,
) -> MLLMConfig:
    """Returns the sizes of the folder's model, with the queries and low-rank updates of `like`.

    The vocabulary is the folder's own. Rotary tables are float32, whatever the weights are.

    Raises:
        ValueError: Networks cannot compute in the base model's number format.
    """
    as_agent = {f"{mllm.AGENT_PREFIX}{name}": shape for name, shape in shapes.items()}
    resampler = {"input_resampler.proj.0.weight": (0, representation_size)}
    found = mllm.infer_config(as_agent | resampler, base=base, num_queries=like.num_queries)
    mistral = dataclasses.replace(found.mistral, lora=like.mistral.lora, rotary_dtype="float32")
    return dataclasses.replace(found, mistral=mistral)
