"""Names of the programs that can be timed."""

import typing
from typing import Literal

PlayName = Literal["mllm", "step", "sampler", "vae", "turn"]
ProgramName = Literal[
    PlayName,
    "train-clip",
    "train-t5",
    "train-vae",
    "train-dit",
    "train-warmup",
    "train-decoder",
    "train-mllm",
    "train-adapt",
]
PLAY: tuple[PlayName, ...] = typing.get_args(PlayName)
"""The programs of a turn."""
