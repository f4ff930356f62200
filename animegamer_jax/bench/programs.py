"""This code's programs, compiled to be timed: parts of a turn; `training.py` has the others."""

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
from animegamer_jax.game import rollout
from animegamer_jax.models.dit import DiT
from animegamer_jax.train.stages.flops import count_matmul_flops

Outputs = Mapping[str, np.ndarray]

PLAY = ("mllm", "step", "sampler", "vae", "turn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function and its arguments.

    Attributes:
        name: as on the command line.
        about: what a call does, for people.
        function: to be jitted, or already so.
        arguments: arrays; the networks' weights among them.
        outputs: what a result says, to be compared with another implementation's.
        hands_on: the first result is the next call's first argument (a training step's state).
        within: where it is traced and called: a mesh, or nothing.
    """

    name: str
    about: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outputs: Callable[[Any], Outputs] | None = None
    hands_on: bool = False
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Of a program by its compiler, in bytes: weights and inputs, results, what lives between."""

    arguments: int
    outputs: int
    temporaries: int


class Compiled:
    """A compiled program. A call does the work once, and returns when it is done.

    Attributes:
        program: what it is.
        compile_seconds: of tracing, lowering and compiling.
        flops: of its convolutions and products of matrices, by arithmetic: two a multiplication,
            a loop's body as often as it runs. A TPU's kernels are not among them.
        memory: by its compiler; None where it does not say.
    """

    def __init__(self, program: Program):
        self.program = program
        function: Any = program.function
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        with program.within():
            began = time.perf_counter()
            self._call = jitted.lower(*program.arguments).compile()
            self.compile_seconds = time.perf_counter() - began
            self.flops = count_matmul_flops(program.function, *program.arguments)
        self.memory = _memory(self._call)
        self._arguments = program.arguments

    def __call__(self) -> Any:
        with self.program.within():
            result = jax.block_until_ready(self._call(*self._arguments))
        if self.program.hands_on:
            self._arguments = (result[0], *self._arguments[1:])
        return result

    def outputs(self) -> Outputs:
        """Of one call, on the host."""
        result = self()
        return {} if self.program.outputs is None else self.program.outputs(result)


def _memory(compiled: Any) -> Memory | None:
    said = compiled.memory_analysis()
    if said is None:
        return None
    return Memory(
        arguments=said.argument_size_in_bytes,
        outputs=said.output_size_in_bytes,
        temporaries=said.temp_size_in_bytes,
    )


def _of_state(state: rollout.GameState) -> dict[str, np.ndarray]:
    return {
        "representation": np.asarray(state.representation),
        "states": np.asarray(state.states),
    }


def _of_turn(result: tuple[rollout.Window, rollout.TurnResult]) -> Outputs:
    return _of_state(result[1].state) | {"frames": np.asarray(result[1].frames)}


def play_programs(model: Model) -> dict[str, Program]:
    """The parts of a turn and all of it, of one game."""
    networks, inputs, layout, table = model.networks, model.inputs, model.layout, model.table
    player = model.player
    steps = f"{player.steps} steps" if player.steps > 1 else "1 step"
    rows = f"{model.num_rows} row{'s' * (model.num_rows > 1)}"
    clip = f"{player.num_frames} frames of {player.height} x {player.width}"

    def sample(
        dit: DiT, unconditional: Array | None, state: rollout.GameState, keys: Any
    ) -> Float[Array, "g f h w c"]:
        start = rollout.start_clip(dit, keys)
        return rollout.denoise_clip(dit, unconditional, state, start, table, keys).x

    def latents(result: Any) -> Outputs:
        return {"latents": np.asarray(result)}

    return {
        program.name: program
        for program in (
            Program(
                name="mllm",
                about=f"game state, {layout.length} slots, window {player.window}",
                function=functools.partial(rollout.predict_state, layout=layout),
                arguments=(networks.mllm, inputs.window, inputs.instruction),
                outputs=_of_state,
            ),
            Program(
                name="step",
                about=f"denoising step, {rows} of {model.num_tokens} tokens",
                function=rollout.denoise_clip,
                arguments=(networks.dit, networks.unconditional, *inputs.of_step),
                outputs=lambda result: {
                    "latents": np.asarray(result.x),
                    "clean latents": np.asarray(result.denoised),
                },
            ),
            Program(
                name="sampler",
                about=f"{steps}, {rows} of {model.num_tokens} tokens",
                function=sample,
                arguments=(networks.dit, networks.unconditional, inputs.state, inputs.keys),
                outputs=latents,
            ),
            Program(
                name="vae",
                about=clip,
                function=rollout.decode_clip,
                arguments=(networks.vae, inputs.latents),
                outputs=lambda result: {"frames": np.asarray(result[0])},
            ),
            Program(
                name="turn",
                about=f"from instruction to frames, {steps}",
                function=functools.partial(rollout.play_turn, layout=layout, table=table),
                arguments=(
                    networks,
                    inputs.window,
                    inputs.instruction,
                    inputs.games,
                    inputs.turn,
                ),
                outputs=_of_turn,
            ),
        )
    }
