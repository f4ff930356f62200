"""The programs to time: the parts of a turn; `training.py` has the training steps."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from animegamer_jax.bench.model import Model
from animegamer_jax.game import rollout, skipped_steps
from animegamer_jax.models.dit import DiT
from animegamer_jax.train.stages.networks import count_matmul_flops

Outputs = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function and its arguments.

    Attributes:
        name: Name on the command line.
        description: What a call does.
        function: The function, jitted or not.
        arguments: Its arguments, the networks included.
        outputs: Converts a result to named arrays, to compare with another backend's.
        carries_state: Whether the first result is the next call's first argument, as a training
            step's state is.
        context: Makes the context in which the function is traced and called, such as a mesh.
    """

    name: str
    description: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outputs: Callable[[Any], Outputs] | None = None
    carries_state: bool = False
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a program in bytes, by its compiler."""

    arguments: int
    outputs: int
    temporaries: int


class Compiled:
    """A compiled program. A call does the work once and returns when it is done.

    Attributes:
        program: The program.
        compile_seconds: Seconds to trace, lower and compile it.
        flops: FLOPs of its convolutions and matrix products, two for each multiplication, loop
            bodies counted as often as they run. TPU kernels are not counted.
        memory: Memory by its compiler; None if it does not report any.
    """

    def __init__(self, program: Program):
        self.program = program
        function: Any = program.function
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        with program.context():
            start = time.perf_counter()
            self._call = jitted.lower(*program.arguments).compile()
            self.compile_seconds = time.perf_counter() - start
            self.flops = count_matmul_flops(program.function, *program.arguments)
        self.memory = _memory(self._call)
        self._arguments = program.arguments

    def __call__(self) -> Any:
        with self.program.context():
            result = jax.block_until_ready(self._call(*self._arguments))
        if self.program.carries_state:
            self._arguments = (result[0], *self._arguments[1:])
        return result

    def outputs(self) -> Outputs:
        """Runs one call and returns its outputs on the host."""
        result = self()
        return {} if self.program.outputs is None else self.program.outputs(result)


def _memory(compiled: Any) -> Memory | None:
    found = compiled.memory_analysis()
    if found is None:
        return None
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
    )


def _state_outputs(state: rollout.GameState) -> dict[str, np.ndarray]:
    return {
        "representation": np.asarray(state.representation),
        "states": np.asarray(state.states),
    }


def _turn_outputs(result: tuple[rollout.Window, rollout.TurnResult]) -> Outputs:
    return _state_outputs(result[1].state) | {"frames": np.asarray(result[1].frames)}


def play_programs(model: Model) -> dict[str, Program]:
    """Returns the programs of a turn and its parts, for one game."""
    networks, inputs, layout, table = model.networks, model.inputs, model.layout, model.table
    player, guidance = model.player, model.player.clip_guidance
    evaluations = skipped_steps.count_evaluations(player)
    steps = f"{player.steps} steps" if player.steps > 1 else "1 step"
    rows = f"{model.num_rows} row{'s' * (model.num_rows > 1)}"
    clip = f"{player.num_frames} frames of {player.height} x {player.width}"

    def sample(
        dit: DiT, unconditional: Array | None, state: rollout.GameState, keys: Any
    ) -> Float[Array, "g f h w c"]:
        count = rollout.num_residuals(table, unconditional)
        has_memory = state.memory is not None
        start = rollout.start_clip(dit, keys, rows=count, has_memory=has_memory)
        return rollout.denoise_parts(dit, unconditional, state, start, table.parts(), keys).x

    return {
        program.name: program
        for program in (
            Program(
                name="mllm",
                description=f"game state, {layout.length} slots, window {player.window}",
                function=functools.partial(rollout.predict_state, layout=layout),
                arguments=(networks.mllm, inputs.window, inputs.instruction),
                outputs=_state_outputs,
            ),
            Program(
                name="step",
                description=f"denoising step, {rows} of {model.num_tokens} tokens",
                function=rollout.denoise_clip,
                arguments=(
                    *(networks.dit, guidance, inputs.state),
                    *(inputs.sampler, inputs.row, inputs.keys),
                ),
                outputs=lambda result: {
                    "latents": np.asarray(result.x),
                    "clean latents": np.asarray(result.denoised),
                },
            ),
            Program(
                name="sampler",
                description=f"{steps}, {evaluations} rows of {model.num_tokens} tokens in all",
                function=sample,
                arguments=(networks.dit, guidance, inputs.state, inputs.keys),
                outputs=lambda result: {"latents": np.asarray(result)},
            ),
            Program(
                name="vae",
                description=clip,
                function=rollout.decode_clip,
                arguments=(networks.vae, inputs.latents),
                outputs=lambda result: {"frames": np.asarray(result[0])},
            ),
            Program(
                name="turn",
                description=f"from instruction to frames, {steps}",
                function=functools.partial(rollout.play_turn, layout=layout, table=table),
                arguments=(
                    networks,
                    inputs.window,
                    inputs.instruction,
                    inputs.games,
                    inputs.turn,
                ),
                outputs=_turn_outputs,
            ),
        )
    }
