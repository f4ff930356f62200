"""The player: the networks of a bundle, compiled once, playing games turn by turn."""

import contextlib
import functools
import time
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from animegamer_jax import diffusion
from animegamer_jax.configs import ModelConfig, disagreements
from animegamer_jax.diffusion import SamplerTable, Schedule
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.rollout import (
    Instruction,
    Networks,
    Window,
    advance,
    decode_clip,
    denoise_clip,
    empty_window,
    game_keys,
    latent_shape,
    play_turn,
    predict_state,
    set_levels,
    start_clip,
    turn_keys,
)
from animegamer_jax.models.linear import merge_low_rank
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.protocol import Layout, Protocol
from animegamer_jax.sharding import PLANS, Plan, make_mesh, use_plan
from animegamer_jax.tokenizer import Tokenizer

FRAMES_PER_SECOND = 8


@typing.runtime_checkable
class SavedTurn(typing.Protocol):
    """What a saved game holds of a turn."""

    @property
    def instruction(self) -> str: ...
    @property
    def representation(self) -> np.ndarray: ...  # [n, r]
    @property
    def states(self) -> Any: ...  # [4]


class TurnOutput(NamedTuple):
    """A played turn on the host; the leading axis counts games."""

    representation: np.ndarray
    states: np.ndarray
    motion_value: np.ndarray
    frames: np.ndarray
    seconds: dict[str, float]


def check_fit(config: ModelConfig) -> None:
    """Checks that the networks of a configuration play together.

    Raises:
        UserError: a network is missing, or a width of one is not what another expects; all are
            named.
    """
    missing = [n for n in ("mllm", "encoder", "dit", "vae") if getattr(config, n) is None]
    if missing:
        raise UserError(f"cannot play without {', '.join(missing)}: convert a whole set")
    problems = [f"{size}: {said}" for size, said in disagreements(config).items()]
    if config.dit and config.dit.latent_frames % 2 == 0:
        problems.append(f"latent frames: dit {config.dit.latent_frames}, vae an odd number")
    if problems:
        raise UserError("the networks do not fit one another: " + "; ".join(problems))


class Player:
    """The networks of a bundle, compiled once, playing a batch of games.

    Args:
        networks: what plays.
        tokenizer: of the bundle.
        protocol: of the bundle.
        window: turns of context, this one included; the protocol's if None.
        steps: denoising steps; the protocol's if None.
        schedule: noise levels and guidance; the protocol's if None.
        places: a mesh and the plan by which the networks lie on it: a turn is then one program.
            None: one device, and a program for each part of a turn.
    """

    def __init__(
        self,
        networks: Networks,
        tokenizer: Tokenizer,
        protocol: Protocol,
        *,
        window: int | None = None,
        steps: int | None = None,
        schedule: Schedule | None = None,
        places: tuple[Mesh, Plan] | None = None,
    ):
        self._places = places
        self._home = jax.tree.leaves(nnx.state(networks.vae))[0].sharding
        self.tokenizer, self.protocol = tokenizer, protocol
        self.window = protocol.window if window is None else window
        self.steps = protocol.denoising_steps if steps is None else steps
        config = networks.mllm.config
        schedule = self._schedule = schedule or diffusion.schedule_of(protocol)
        # Over a slice both rows stay: a plan may give each of them its own devices.
        if not schedule.guidance_scale and places is None:
            networks = networks._replace(unconditional=None)
        self.networks = networks
        try:
            self.table = diffusion.make_sampler_table(schedule, self.steps)
            self.layout = Layout(
                protocol, tokenizer.ids, num_queries=config.num_queries, window=self.window
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        frames, height, width, _ = latent_shape(networks.dit)
        vae = networks.vae.config
        self.num_frames = 1 + (frames - 1) * vae.temporal_compression
        self.height = height * vae.spatial_compression
        self.width = width * vae.spatial_compression
        self.frames_per_second = FRAMES_PER_SECOND
        layout = self.layout
        self._predict = jax.jit(functools.partial(predict_state, layout=layout))
        self._start = jax.jit(start_clip)
        # A call takes a network's hundreds of weights apart in Python: only what a step needs.
        self._denoise = jax.jit(denoise_clip, donate_argnums=3)
        self._decode = jax.jit(decode_clip)
        self._advance = jax.jit(advance)
        self._set_levels = jax.jit(functools.partial(set_levels, protocol=protocol))
        # The window comes back as it went in: the second turn's program is the first one's.
        whole = None if places is None else NamedSharding(places[0], PartitionSpec())
        turn = functools.partial(play_turn, layout=layout, table=self.table)
        self._turn = jax.jit(turn, out_shardings=(whole, None))

    @classmethod
    def from_bundle(
        cls,
        bundle: Any,
        *,
        window: int | None = None,
        steps: int | None = None,
        dtype: str | None = None,
        layout: str | None = None,
        num_games: int | None = None,
    ) -> "Player":
        """Loads the networks that playing needs.

        Args:
            bundle: that has them.
            window: as of the class.
            steps: as of the class.
            dtype: of the networks, weights included; the bundle's own if None.
            layout: a plan (`sharding.PLANS`) over this host's devices, each weight read straight
                to where it belongs; None: all on the first device.
            num_games: that will be played at once over a layout, which then takes no more devices
                than they need; None: a multiple of what all devices can share.

        Raises:
            UserError: a network is missing, they do not fit one another, the devices do not
                fit the layout, or there are several hosts.
        """
        check_fit(bundle.config)
        places = None if layout is None else _lay_out(layout, num_games)
        tokenizer = Tokenizer.load(
            bundle.tokenizer_dir,
            vocab_size=bundle.config.mllm.mistral.vocab_size,
            num_queries=bundle.config.mllm.num_queries,
        )

        def load(name: str) -> Any:
            formats: Any = {"dtype": dtype, "param_dtype": dtype}
            if places is not None:
                formats |= {"mesh": places[0], "rules": places[1].of(name)}
            network = bundle.load(name, **formats)
            merge_low_rank(network)
            return network

        mllm, dit, vae, encoder = map(load, ("mllm", "dit", "vae", "encoder"))
        with _in_slice(places):
            unconditional = jax.jit(lambda encoder: encoder.unconditional())(encoder)
        networks = Networks(mllm, dit, vae, unconditional)
        protocol = bundle.protocol
        return cls(networks, tokenizer, protocol, window=window, steps=steps, places=places)

    def start(self, num_games: int = 1) -> Window:
        """The window of new games.

        Raises:
            UserError: the layout's groups of devices cannot share so many games equally.
        """
        if self._places is not None:
            groups = self._places[0].shape["data"]
            if num_games % groups:
                raise UserError(
                    f"{num_games} games: expected a multiple of {groups}, so many groups of "
                    "devices play"
                )
        size = self.networks.mllm.config.representation_size
        return self._place(empty_window(self.layout, num_games, size))

    def _place(self, tree: Any) -> Any:
        """Puts new arrays where the networks lie: or the second call would compile again."""
        if self._places is not None:
            return jax.device_put(tree, NamedSharding(self._places[0], PartitionSpec()))
        return jax.device_put(tree, self._home)

    def restore(self, turns: Sequence[SavedTurn]) -> Window:
        """The window of one saved game after its `turns` (all of them, or the last few)."""
        return self.window_of([turns])

    def window_of(self, games: Sequence[Sequence[SavedTurn]]) -> Window:
        """The window of a batch of saved games after their turns (all of them, or the last few).

        A game of few turns, or one cut to its last ones, plays as in a smaller window.

        Raises:
            UserError: an instruction is too long, or as `start`.
        """
        buffers: Any = jax.tree.map(np.array, self.start(len(games)))
        places = self.window - 1
        for row, turns in enumerate(games):
            for place, turn in enumerate(reversed(turns[-places:] if places else []), start=1):
                read = self.read([turn.instruction])
                buffers.captions[row, -place] = read.captions[0]
                buffers.caption_lengths[row, -place] = read.lengths[0]
                buffers.representations[row, -place] = turn.representation
                buffers.states[row, -place] = turn.states
            buffers.num_turns[row] = min(len(turns), places)
        return self._place(jax.tree.map(jnp.asarray, buffers))

    def check_instruction(self, text: str) -> None:
        """Raises UserError where an instruction is empty or longer than the caption."""
        self.tokenizer.caption(text, self.protocol.caption_length)

    def read(self, instructions: Sequence[str]) -> Instruction:
        """Token ids of one instruction a game."""
        length = self.protocol.caption_length
        captions, lengths = zip(
            *(self.tokenizer.caption(text, length) for text in instructions), strict=True
        )
        return Instruction(
            jnp.asarray(np.stack(captions), jnp.int32), jnp.asarray(lengths, jnp.int32)
        )

    def play_turn(
        self,
        window: Window,
        instructions: Sequence[str],
        *,
        seeds: Sequence[int],
        turn: int | Sequence[int],
        steps: int | None = None,
        levels: Sequence[int] | None = None,
        on_progress: Progress = no_progress,
    ) -> tuple[Window, TurnOutput]:
        """Plays turn number `turn` (from 1) of each game.

        Args:
            window: of `start`, `restore`, `window_of` or the turn before.
            instructions: one a game.
            seeds: one a game, the same through the game.
            turn: one for all games, or each one's; with the seed it decides the noise.
            steps: of denoising, if others than the player's.
            levels: motion levels that the players chose, one a game; 0 leaves the model's own.
            on_progress: called with stage ("mllm", "decoder" or "vae"), steps done and steps; what
                it raises ends the turn.

        Raises:
            UserError: an instruction is empty or too long, a level is none of the protocol's, or
                `steps` or `levels` are given to a player over a slice, whose turn is one program.
            NonFiniteError: names the turn and the stage or denoising step.
        """
        instruction = self.read(instructions)
        if self._places is not None:
            if levels is not None or steps not in (None, self.steps):
                raise UserError("a player over a slice takes no other steps and no motion levels")
            return self._play_whole(
                window, instruction, seeds=seeds, turn=turn, on_progress=on_progress
            )
        table = self._table(steps)
        allowed = self.protocol.motion_levels
        for level in levels or []:
            if level and level not in allowed:
                raise UserError(f"motion level {level}: expected one of {list(allowed)}")
        keys = self._place(turn_keys(game_keys(seeds), jnp.asarray(turn)))
        clock = [time.perf_counter()]

        on_progress("mllm", 0, 1)
        state = jax.block_until_ready(self._predict(self.networks.mllm, window, instruction))
        if levels is not None and any(levels):
            state = self._set_levels(state, self._place(jnp.asarray(levels, jnp.int32)))
        if not np.isfinite(np.asarray(state.representation)).all():
            raise NonFiniteError(f"turn {turn}: the MLLM's shot representation is not finite")
        on_progress("mllm", 1, 1)
        clock.append(time.perf_counter())

        steps = len(table.step)
        on_progress("decoder", 0, steps)
        dit, unconditional = self.networks.dit, self.networks.unconditional
        sampler = self._start(dit, keys)
        for step in range(steps):
            row = SamplerTable(*(column[step : step + 1] for column in table))
            sampler = self._denoise(dit, unconditional, state, sampler, row, keys)
            if (np.asarray(sampler.bad_step) >= 0).any():
                raise NonFiniteError(
                    f"turn {turn}: the latents are not finite after denoising step {step + 1} of "
                    f"{steps}"
                )
            on_progress("decoder", step + 1, steps)
        clock.append(time.perf_counter())

        on_progress("vae", 0, 1)
        frames, finite = (np.asarray(x) for x in self._decode(self.networks.vae, sampler.x))
        if not finite.all():
            raise NonFiniteError(f"turn {turn}: the frames that the VAE decodes are not finite")
        on_progress("vae", 1, 1)
        clock.append(time.perf_counter())

        parts = dict(zip(("mllm", "decoder", "vae"), np.diff(clock).tolist(), strict=True))
        seconds = parts | {"total": clock[-1] - clock[0]}
        representation, states, motion_value = map(np.asarray, state)
        output = TurnOutput(representation, states, motion_value, frames, seconds)
        return self._advance(window, instruction, state), output

    def _table(self, steps: int | None) -> SamplerTable:
        """Of so many denoising steps; the player's own if None."""
        if steps is None or steps == self.steps:
            return self.table
        try:
            return diffusion.make_sampler_table(self._schedule, steps)
        except ValueError as error:
            raise UserError(str(error)) from error

    def _play_whole(
        self,
        window: Window,
        instruction: Instruction,
        *,
        seeds: Sequence[int],
        turn: int | Sequence[int],
        on_progress: Progress,
    ) -> tuple[Window, TurnOutput]:
        """A turn as one program over the slice."""
        began = time.perf_counter()
        on_progress("decoder", 0, self.steps)
        games = self._place(game_keys(seeds))
        with _in_slice(self._places):
            window, result = self._turn(
                self.networks, window, instruction, games, jnp.asarray(turn)
            )
        representation, states, motion_value = map(np.asarray, result.state)
        frames, bad_step = np.asarray(result.frames), np.asarray(result.bad_step)
        if not np.isfinite(representation).all():
            raise NonFiniteError(f"turn {turn}: the MLLM's shot representation is not finite")
        for step in bad_step[bad_step >= 0]:
            what = "latents" if step < self.steps else "decoded frames"
            raise NonFiniteError(
                f"turn {turn}: the {what} are not finite after denoising step "
                f"{min(step + 1, self.steps)} of {self.steps}"
            )
        on_progress("decoder", self.steps, self.steps)
        seconds = {"total": time.perf_counter() - began}
        return window, TurnOutput(representation, states, motion_value, frames, seconds)


def _lay_out(layout: str, num_games: int | None) -> tuple[Mesh, Plan]:
    """The mesh for a plan: of all devices, or of as many as so many games need.

    Raises:
        UserError: there is no such plan, the devices do not fit it, or there are several hosts.
    """
    if layout not in PLANS:
        raise UserError(f"layout {layout}: expected one of {', '.join(PLANS)}")
    if jax.process_count() > 1:
        raise UserError(f"layout {layout}: expected one host, found {jax.process_count()}")
    plan, devices = PLANS[layout], jax.devices()
    try:
        if num_games is not None:
            groups = plan.mesh_shape(len(devices))["data"]
            used = max(n for n in range(1, groups + 1) if groups % n == 0 and num_games % n == 0)
            devices = devices[: len(devices) // groups * used]
        return make_mesh(plan.mesh_shape(len(devices)), devices=devices), plan
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _in_slice(places: tuple[Mesh, Plan] | None) -> Iterator[None]:
    """Within the block, programs are traced for the slice and by its plan."""
    if places is None:
        yield
        return
    with jax.set_mesh(places[0]), use_plan(places[1]):
        yield
