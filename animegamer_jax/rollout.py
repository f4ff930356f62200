"""A turn of the game and the sliding-window rollout.

One turn, from instruction to frames: the MLLM predicts the next game state from the window of past
turns, the diffusion transformer denoises latents under it, the VAE decodes them chunk by chunk.
`play_turn` is that as one function of fixed shapes: the length of the history is data. `rollout`
scans it over a list of instructions, a batch of games at a time. `Player` runs the same parts one
after the other, so that it can tell how far it is and how long each took.
"""

import contextlib
import functools
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from animegamer_jax import diffusion
from animegamer_jax.configs import ModelConfig, disagreements
from animegamer_jax.diffusion import SamplerState, SamplerTable, Schedule
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.layers import merge_low_rank
from animegamer_jax.models.mllm import MLLM
from animegamer_jax.models.vae import VAE, decode_in_parts, from_decoder, to_uint8
from animegamer_jax.protocol import Layout, Protocol
from animegamer_jax.sharding import PLANS, Plan, make_mesh, network_rules, use_plan
from animegamer_jax.tokenizer import Tokenizer

FRAMES_PER_SECOND = 8

Progress = Callable[[str, int, int], None]


class Networks(NamedTuple):
    """What plays: three networks, and the context of the guidance's unconditional row, if any."""

    mllm: MLLM
    dit: DiT
    vae: VAE
    unconditional: Float[Array, "n d"] | None


class Window(NamedTuple):
    """The past turns that the next one sees: buffers of `h` places, the newest turn at the end."""

    captions: Int[Array, "g h c"]
    caption_lengths: Int[Array, "g h"]
    representations: Float[Array, "g h n r"]
    states: Int[Array, "g h 4"]
    num_turns: Int[Array, " g"]


class Instruction(NamedTuple):
    """One instruction a game, as token ids."""

    captions: Int[Array, "g c"]
    lengths: Int[Array, " g"]


class GameState(NamedTuple):
    """What the MLLM answers. States: motion level, social, entertainment, stamina."""

    representation: Float[Array, "g n r"]
    states: Int[Array, "g 4"]
    motion_value: Float[Array, " g"]


class TurnResult(NamedTuple):
    """A played turn.

    `bad_step`: the first denoising step with a non-finite latent (their number, where only the
    decoded frames are not finite), or -1.
    """

    state: GameState
    frames: UInt8[Array, "g f h w 3"]
    bad_step: Int[Array, " g"]


def empty_window(layout: Layout, num_games: int, representation_size: int) -> Window:
    """The window before the first turn."""
    g, h, c = num_games, layout.window - 1, layout.protocol.caption_length
    return Window(
        captions=jnp.zeros((g, h, c), jnp.int32),
        caption_lengths=jnp.zeros((g, h), jnp.int32),
        representations=jnp.zeros((g, h, layout.num_queries, representation_size), jnp.float32),
        states=jnp.zeros((g, h, 4), jnp.int32),
        num_turns=jnp.zeros((g,), jnp.int32),
    )


def advance(window: Window, instruction: Instruction, state: GameState) -> Window:
    """The window after a turn: the oldest place is given up, the turn takes the last."""
    places = window.captions.shape[1]
    if places == 0:
        return window

    def push(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([buffer[:, 1:], new[:, None].astype(buffer.dtype)], axis=1)

    return Window(
        captions=push(window.captions, instruction.captions),
        caption_lengths=push(window.caption_lengths, instruction.lengths),
        representations=push(window.representations, state.representation),
        states=push(window.states, state.states),
        num_turns=jnp.minimum(window.num_turns + 1, places),
    )


def predict_state(
    mllm: MLLM, window: Window, instruction: Instruction, layout: Layout
) -> GameState:
    """The MLLM's part of a turn."""
    with network_rules("mllm"):
        return _predict_state(mllm, window, instruction, layout)


def _predict_state(
    mllm: MLLM, window: Window, instruction: Instruction, layout: Layout
) -> GameState:
    captions = jnp.concatenate([window.captions, instruction.captions[:, None]], axis=1)
    lengths = jnp.concatenate([window.caption_lengths, instruction.lengths[:, None]], axis=1)
    prompt = layout.assemble(captions, lengths, window.states, window.num_turns)
    g, h, n, r = window.representations.shape
    history = window.representations.reshape(g, h * n, r)
    representation, states = mllm.predict(prompt, history, layout)
    protocol = layout.protocol
    values = jnp.asarray(protocol.motion_values, jnp.float32)
    level = jnp.searchsorted(jnp.asarray(protocol.motion_levels), states[:, 0])
    return GameState(representation, states, values[level])


def game_keys(seeds: Sequence[int]) -> Key[Array, " g"]:
    """One key a game.

    Raises:
        UserError: a seed is negative or has more than 32 bits.
    """
    for seed in seeds:
        if not 0 <= seed < 1 << 32:
            raise UserError(f"seed {seed}: expected a number from 0 to {(1 << 32) - 1}")
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def turn_keys(games: Key[Array, " g"], turn: Int[Array, ""]) -> Key[Array, " g"]:
    """One key a game and turn: turns can be played again, or in another order, with one result."""
    return jax.vmap(lambda key: jax.random.fold_in(key, turn))(games)


def _noise(keys: jax.Array, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gaussian noise of a denoising step; index -1 is what the sampler starts from."""
    draw = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, index + 1), shape))
    return draw(keys)


def latent_shape(dit: DiT) -> tuple[int, int, int, int]:
    """Frames, height, width and channels of one clip's latents."""
    c = dit.config
    return c.latent_frames, c.latent_height, c.latent_width, c.latent_channels


def start_clip(dit: DiT, keys: Key[Array, " g"]) -> SamplerState:
    """The sampler's state before its first step."""
    return diffusion.start_sampler(_noise(keys, jnp.asarray(-1), latent_shape(dit)))


def denoise(
    networks: Networks,
    state: GameState,
    sampler: SamplerState,
    table: SamplerTable,
    keys: Key[Array, " g"],
) -> SamplerState:
    """The given steps of the sampler (`denoise_clip`)."""
    return denoise_clip(networks.dit, networks.unconditional, state, sampler, table, keys)


def denoise_clip(
    dit: DiT,
    unconditional: Float[Array, "n d"] | None,
    state: GameState,
    sampler: SamplerState,
    table: SamplerTable,
    keys: Key[Array, " g"],
) -> SamplerState:
    """The given steps of the sampler; both guidance rows get the motion value."""

    def predict_v(x: jax.Array, timestep: jax.Array, context: jax.Array) -> jax.Array:
        motion = jnp.tile(state.motion_value, len(x) // len(state.motion_value))
        return dit(x, timestep=timestep, motion=motion, context=context)

    guided = diffusion.guide(predict_v, state.representation, unconditional)
    shape = latent_shape(dit)
    with network_rules("dit"):
        return diffusion.sample(guided, sampler, table, noise=lambda i: _noise(keys, i, shape))


def decode_clip(
    vae: VAE, latents: Float[Array, "g t h w c"]
) -> tuple[UInt8[Array, "g f y x 3"], Bool[Array, " g"]]:
    """Latents as the sampler leaves them to frames, and whether all of a clip's are finite."""
    with network_rules("vae"):
        frames = decode_in_parts(vae, from_decoder(latents, vae.config).astype(vae.config.dtype))
    return to_uint8(frames), jnp.isfinite(frames).all(axis=(1, 2, 3, 4))


def play_turn(
    networks: Networks,
    window: Window,
    instruction: Instruction,
    games: Key[Array, " g"],
    turn: Int[Array, ""],
    *,
    layout: Layout,
    table: SamplerTable,
) -> tuple[Window, TurnResult]:
    """One turn of a batch of games, as one function to be jitted.

    `layout` and `table` are static: close over them. `turn` counts from 1.
    """
    state = predict_state(networks.mllm, window, instruction, layout)
    keys = turn_keys(games, turn)
    sampler = denoise(networks, state, start_clip(networks.dit, keys), table, keys)
    frames, finite = decode_clip(networks.vae, sampler.x)
    last = jnp.asarray(table.step)[-1] + 1
    bad_step = jnp.where((sampler.bad_step < 0) & ~finite, last, sampler.bad_step)
    return advance(window, instruction, state), TurnResult(state, frames, bad_step)


def rollout(
    networks: Networks,
    window: Window,
    instructions: Instruction,
    games: Key[Array, " g"],
    *,
    first_turn: int = 1,
    layout: Layout,
    table: SamplerTable,
) -> tuple[Window, TurnResult]:
    """Scans `play_turn` over instructions with a leading axis of turns; results have it too."""
    turns = first_turn + jnp.arange(instructions.lengths.shape[0])

    def body(window: Window, item: tuple[Instruction, jax.Array]) -> tuple[Window, TurnResult]:
        return play_turn(networks, window, item[0], games, item[1], layout=layout, table=table)

    return jax.lax.scan(body, window, (instructions, turns))


@typing.runtime_checkable
class SavedTurn(typing.Protocol):
    """What a saved game holds of a turn."""

    instruction: str
    representation: np.ndarray  # [n, r]
    states: Any  # [4]


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
        steps: denoising steps.
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
        steps: int = 50,
        schedule: Schedule | None = None,
        places: tuple[Mesh, Plan] | None = None,
    ):
        self._places = places
        self._home = jax.tree.leaves(nnx.state(networks.vae))[0].sharding
        self.tokenizer, self.protocol = tokenizer, protocol
        self.window = protocol.window if window is None else window
        self.steps = steps
        config = networks.mllm.config
        schedule = schedule or diffusion.schedule_of(protocol)
        # Over a slice both rows stay: a plan may give each of them its own devices.
        if not schedule.guidance_scale and places is None:
            networks = networks._replace(unconditional=None)
        self.networks = networks
        try:
            self.table = diffusion.make_sampler_table(schedule, steps)
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
        self._denoise = jax.jit(denoise, donate_argnums=2)
        self._decode = jax.jit(decode_clip)
        self._advance = jax.jit(advance)
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
        steps: int = 50,
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
        window = self.start()
        for turn in turns[-(self.window - 1) :] if self.window > 1 else []:
            state = GameState(
                jnp.asarray(turn.representation, jnp.float32)[None],
                jnp.asarray(turn.states, jnp.int32)[None],
                jnp.zeros((1,)),
            )
            with _in_slice(self._places):
                window = self._advance(window, self.read([turn.instruction]), state)
        return window

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
        turn: int,
        on_progress: Progress | None = None,
    ) -> tuple[Window, TurnOutput]:
        """Plays turn number `turn` (from 1) of each game.

        Args:
            window: of `start`, `restore` or the turn before.
            instructions: one a game.
            seeds: one a game, the same through the game.
            turn: with the seed it decides the noise.
            on_progress: called with stage ("mllm", "decoder" or "vae"), steps done and steps.

        Raises:
            UserError: an instruction is empty or too long.
            NonFiniteError: names the turn and the stage or denoising step.
        """
        tell = on_progress or (lambda stage, step, total: None)
        instruction = self.read(instructions)
        if self._places is not None:
            return self._play_whole(window, instruction, seeds=seeds, turn=turn, tell=tell)
        keys = self._place(turn_keys(game_keys(seeds), jnp.asarray(turn)))
        clock = [time.perf_counter()]

        tell("mllm", 0, 1)
        state = jax.block_until_ready(self._predict(self.networks.mllm, window, instruction))
        if not np.isfinite(np.asarray(state.representation)).all():
            raise NonFiniteError(f"turn {turn}: the MLLM's shot representation is not finite")
        tell("mllm", 1, 1)
        clock.append(time.perf_counter())

        tell("decoder", 0, self.steps)
        sampler = self._start(self.networks.dit, keys)
        for step in range(self.steps):
            row = SamplerTable(*(column[step : step + 1] for column in self.table))
            sampler = self._denoise(self.networks, state, sampler, row, keys)
            if (np.asarray(sampler.bad_step) >= 0).any():
                raise NonFiniteError(
                    f"turn {turn}: the latents are not finite after denoising step {step + 1} of "
                    f"{self.steps}"
                )
            tell("decoder", step + 1, self.steps)
        clock.append(time.perf_counter())

        tell("vae", 0, 1)
        frames, finite = (np.asarray(x) for x in self._decode(self.networks.vae, sampler.x))
        if not finite.all():
            raise NonFiniteError(f"turn {turn}: the frames that the VAE decodes are not finite")
        tell("vae", 1, 1)
        clock.append(time.perf_counter())

        parts = dict(zip(("mllm", "decoder", "vae"), np.diff(clock).tolist(), strict=True))
        seconds = parts | {"total": clock[-1] - clock[0]}
        representation, states, motion_value = map(np.asarray, state)
        output = TurnOutput(representation, states, motion_value, frames, seconds)
        return self._advance(window, instruction, state), output

    def _play_whole(
        self,
        window: Window,
        instruction: Instruction,
        *,
        seeds: Sequence[int],
        turn: int,
        tell: Progress,
    ) -> tuple[Window, TurnOutput]:
        """A turn as one program over the slice."""
        began = time.perf_counter()
        tell("decoder", 0, self.steps)
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
        tell("decoder", self.steps, self.steps)
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
