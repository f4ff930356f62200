"""A turn of the game and the sliding-window rollout.

One turn, from instruction to frames: the MLLM predicts the next game state from the window of past
turns, the diffusion transformer denoises latents conditioned on it, and the VAE decodes them chunk
by chunk. Where the protocol says so, a picture comes first (`draw_picture`). Later turns see the
prediction, or what was shown of it (`remember`). `play_turn` does all of this as one function of
fixed shapes: the length of the history is data. `rollout` scans it over a list of instructions, for
a batch of games. `player.Player` runs the same parts one after the other, so that it can report
progress and how long each part took.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from animegamer_jax import diffusion
from animegamer_jax.configs import DiTConfig, VAEConfig
from animegamer_jax.diffusion import KnownFrame, SamplerState, SamplerTable
from animegamer_jax.errors import UserError
from animegamer_jax.models.dit import DiT, Modulation, memory_rows
from animegamer_jax.models.encoder import ShotNetworks, encode_frames
from animegamer_jax.models.latents import frame_to_decoder, from_decoder, know_first
from animegamer_jax.models.mllm import MLLM
from animegamer_jax.models.vae import VAE, DecoderCache, chunk_bounds, decode_in_parts, to_uint8
from animegamer_jax.protocol import Layout, Protocol
from animegamer_jax.sharding import network_rules

_PICTURE = 1 << 20  # folded into a turn's key for the picture's noise; steps are fewer


class Networks(NamedTuple):
    """The networks needed to play a turn, and the unconditional context (None without guidance).

    `shot` is needed only where the protocol sees frames (`Protocol.sees_frames`). `picture` draws
    the picture that comes first; if it is None, `dit` draws it too.
    """

    mllm: MLLM
    dit: DiT
    vae: VAE
    unconditional: Float[Array, "n d"] | None
    shot: ShotNetworks | None = None
    picture: DiT | None = None

    @property
    def first_dit(self) -> DiT:
        """The decoder that runs first in a turn; only this one sees the memory."""
        return self.dit if self.picture is None else self.picture


class DrawnPicture(NamedTuple):
    """A picture of the prediction, with which the clip begins (`start_clip`).

    `state` has the representation of what E_a sees in it.
    """

    state: "GameState"
    frame: UInt8[Array, "g 1 y x 3"]
    finite: Bool[Array, " g"]
    known: KnownFrame


class Window(NamedTuple):
    """The past turns that the next one sees: buffers of `p` turns, the newest at the end.

    `first_latents` are those of the last `m` clips (`rollout.first_latents`), of which the
    decoder's memory is made (`with_memory`); None for a decoder without one.
    """

    captions: Int[Array, "g p l"]
    caption_lengths: Int[Array, "g p"]
    representations: Float[Array, "g p n r"]
    states: Int[Array, "g p 4"]
    num_turns: Int[Array, " g"]
    first_latents: Float[Array, "g m h w c"] | None = None


class Instruction(NamedTuple):
    """One instruction a game, as token ids."""

    captions: Int[Array, "g l"]
    lengths: Int[Array, " g"]


class GameState(NamedTuple):
    """The MLLM's prediction. States: motion level, social, entertainment, stamina.

    `memory` has the first latents of past clips, which the decoder also sees (`with_memory`).
    """

    representation: Float[Array, "g n r"]
    states: Int[Array, "g 4"]
    motion_value: Float[Array, " g"]
    memory: Float[Array, "g m h w c"] | None = None


class TurnResult(NamedTuple):
    """A played turn.

    Attributes:
        state: The MLLM's prediction, with the states that entered the window.
        frames: The clip.
        bad_step: Index of the first denoising step with a latent that is not finite, -1 if there is
            none. Of N steps, N: only the decoded frames are not finite; N + 1: the picture that
            comes first is not finite.
        remembered: The shot representation that entered the window (`remember`).
        first_latents: Latents of the first frame, which entered the window; None if the decoder has
            no memory.
    """

    state: GameState
    frames: UInt8[Array, "g f y x 3"]
    bad_step: Int[Array, " g"]
    remembered: Float[Array, "g n r"]
    first_latents: Float[Array, "g h w c"] | None = None


def empty_window(
    layout: Layout,
    num_games: int,
    representation_size: int,
    memory: tuple[int, int, int, int] | None = None,
) -> Window:
    """Returns the window before the first turn, for a decoder of this `DiTConfig.memory_shape`."""
    g, p, length = num_games, layout.window - 1, layout.protocol.caption_length
    first = None
    if memory is not None:
        first = jnp.zeros((g, min(memory[0], p), *memory[1:]), jnp.float32)
    return Window(
        captions=jnp.zeros((g, p, length), jnp.int32),
        caption_lengths=jnp.zeros((g, p), jnp.int32),
        representations=jnp.zeros((g, p, layout.num_queries, representation_size), jnp.float32),
        states=jnp.zeros((g, p, 4), jnp.int32),
        num_turns=jnp.zeros((g,), jnp.int32),
        first_latents=first,
    )


def advance(
    window: Window,
    instruction: Instruction,
    state: GameState,
    first_latents: Float[Array, "g h w c"] | None = None,
) -> Window:
    """Drops the oldest turn from the window and appends this one.

    A decoder with a memory needs the turn's first latents.
    """
    size = window.captions.shape[1]
    if size == 0:
        return window

    def push(buffer: jax.Array, new: jax.Array | None) -> jax.Array:
        assert new is not None, "a decoder with a memory needs the first latents"
        return jnp.concatenate([buffer[:, 1:], new[:, None].astype(buffer.dtype)], axis=1)

    first = window.first_latents
    return Window(
        captions=push(window.captions, instruction.captions),
        caption_lengths=push(window.caption_lengths, instruction.lengths),
        representations=push(window.representations, state.representation),
        states=push(window.states, state.states),
        num_turns=jnp.minimum(window.num_turns + 1, size),
        first_latents=None if first is None else push(first, first_latents),
    )


def predict_state(
    mllm: MLLM, window: Window, instruction: Instruction, layout: Layout
) -> GameState:
    """Predicts the next game state: the MLLM's part of a turn."""
    with network_rules("mllm"):
        return _predict_state(mllm, window, instruction, layout)


def _predict_state(
    mllm: MLLM, window: Window, instruction: Instruction, layout: Layout
) -> GameState:
    captions = jnp.concatenate([window.captions, instruction.captions[:, None]], axis=1)
    lengths = jnp.concatenate([window.caption_lengths, instruction.lengths[:, None]], axis=1)
    prompt = layout.assemble(captions, lengths, window.states, window.num_turns)
    g, p, n, r = window.representations.shape
    history = window.representations.reshape(g, p * n, r)
    representation, states = mllm.predict(prompt, history, layout)
    return _with_motion(representation, states, layout.protocol)


def _with_motion(
    representation: Float[Array, "g n r"], states: Int[Array, "g 4"], protocol: Protocol
) -> GameState:
    values = jnp.asarray(protocol.motion_values, jnp.float32)
    level = jnp.searchsorted(jnp.asarray(protocol.motion_levels), states[:, 0])
    return GameState(representation, states, values[level])


def set_levels(state: GameState, levels: Int[Array, " g"], protocol: Protocol) -> GameState:
    """Replaces motion levels by those that the players chose; 0 keeps the model's own."""
    chosen = jnp.where(levels > 0, levels, state.states[:, 0])
    return _with_motion(state.representation, state.states.at[:, 0].set(chosen), protocol)


def with_memory(state: GameState, window: Window, config: DiTConfig) -> GameState:
    """Adds the memory of a decoder of this config: the window's first latents.

    Turns that the window does not hold are zeros in front. Without a memory the state is returned.
    """
    first = window.first_latents
    if first is None:
        return state
    absent = config.memory - first.shape[1]
    memory = jnp.pad(first, ((0, 0), (absent, 0), (0, 0), (0, 0), (0, 0)))
    return state._replace(memory=memory)


def first_latents(latents: Float[Array, "g t h w c"], config: VAEConfig) -> Float[Array, "g h w c"]:
    """Returns the latents of a clip's first frame, scaled as a frame by itself (float32).

    Where a picture came first, they are the picture's, with which the clip begins.
    """
    first = from_decoder(latents, config)[:, 0]
    return frame_to_decoder(first, config).astype(jnp.float32)


def game_keys(seeds: Sequence[int]) -> Key[Array, " g"]:
    """Returns one random key a game.

    Raises:
        UserError: A seed is negative or has more than 32 bits.
    """
    for seed in seeds:
        if not 0 <= seed < 1 << 32:
            raise UserError(f"seed {seed}: expected a number from 0 to {(1 << 32) - 1}")
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def turn_keys(games: Key[Array, " g"], turn: Int[Array, ""] | Int[Array, " g"]) -> Key[Array, " g"]:
    """Returns one key a game and turn, so that a turn does not depend on when it is played."""
    return jax.vmap(jax.random.fold_in)(games, jnp.broadcast_to(turn, games.shape))


def _noise(keys: jax.Array, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws the Gaussian noise of a denoising step; index -1 is the initial latents."""
    draw = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, index + 1), shape))
    return draw(keys)


def latent_shape(dit: DiT) -> tuple[int, int, int, int]:
    """Returns frames, height, width and channels of one clip's latents."""
    c = dit.config
    return c.latent_frames, c.latent_height, c.latent_width, c.latent_channels


def start_clip(
    dit: DiT,
    keys: Key[Array, " g"],
    *,
    rows: int = 0,
    known: KnownFrame | None = None,
    has_memory: bool = False,
) -> SamplerState:
    """Returns the sampler's state before its first step.

    `rows` is the number of rows of guidance if steps are skipped, `known` the first frame if a
    picture came first; `has_memory` says whether the state of which the clip is made has one.
    """
    state = diffusion.start_sampler(_noise(keys, jnp.asarray(-1), latent_shape(dit)))
    state = state._replace(known=known)
    if not rows:
        return state
    with network_rules("dit"):
        residual = dit.no_residual(rows * len(keys), has_memory=has_memory)
        return state._replace(residual=residual)


def clip_guidance(networks: Networks, protocol: Protocol) -> Float[Array, "n d"] | None:
    """Returns the unconditional context with which clips are denoised; None: no guidance."""
    return None if protocol.picture_first else networks.unconditional


def num_rows(table: SamplerTable, unconditional: object) -> int:
    """Returns the rows of a clip's guided steps: two with guidance, of context or of motion."""
    return 1 if unconditional is None and table.motion_guidance is None else 2


def num_residuals(table: SamplerTable, unconditional: object) -> int:
    """Returns the rows of guidance whose residuals a table needs (`start_clip`)."""
    return 0 if table.rows is None else num_rows(table, unconditional)


def denoise_clip(
    dit: DiT,
    unconditional: Float[Array, "n d"] | None,
    state: GameState,
    sampler: SamplerState,
    table: SamplerTable,
    keys: Key[Array, " g"],
) -> SamplerState:
    """Runs the steps of `table`; both rows of guidance get the motion value.

    With guidance of motion both have the context instead, and the first row the table's own motion
    value. The layers' modulation by timestep and motion is computed first, for all steps at once.
    """
    games, motion = len(state.motion_value), state.motion_value
    context, memory = state.representation, state.memory
    timesteps = jnp.asarray(table.timestep)
    motions = jnp.broadcast_to(motion, (len(timesteps), games))
    still = table.still_motion
    if still is not None:
        assert unconditional is None
        unconditional = context
        guidance = table.motion_guidance
        table = table._replace(guidance=guidance, motion_guidance=None, still_motion=None)
        without = jnp.broadcast_to(jnp.asarray(still)[:, None], motions.shape)
        motions = jnp.concatenate([without, motions], axis=1)
    count = motions.shape[1]

    def memory_of(rows: int) -> jax.Array | None:
        return memory_rows(memory, rows, num_given=1 if still is None else rows)

    def tiled(modulation: Modulation, rows: int) -> Modulation:
        layers, output = modulation.layers, modulation.output
        if count == games:
            return Modulation(jnp.tile(layers, (1, rows, 1)), jnp.tile(output, (rows, 1)))
        return Modulation(layers[:, -rows * games :], output[-rows * games :])

    def predict_v(
        x: jax.Array, timestep: jax.Array, context: jax.Array, modulation: Modulation
    ) -> jax.Array:
        rows = len(x) // games
        return dit(
            x,
            timestep=timestep,
            motion=jnp.tile(motion, rows),
            context=context,
            memory=memory_of(rows),
            modulation=tiled(modulation, rows),
        )

    def evaluate(
        x: jax.Array, timestep: jax.Array, context: jax.Array, modulation: Modulation
    ) -> tuple[jax.Array, jax.Array]:
        rows = len(x) // games
        options: Any = {"memory": memory_of(rows), "modulation": tiled(modulation, rows)}
        return dit.with_residual(x, timestep=timestep, context=context, **options)

    def reuse(
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array,
        residual: jax.Array,
        modulation: Modulation,
    ) -> jax.Array:
        rows = len(x) // games
        options: Any = {"memory": memory_of(rows), "modulation": tiled(modulation, rows)}
        options |= {"residual": residual}
        return dit.from_residual(x, timestep=timestep, context=context, **options)

    def split_by_step(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, count, x.shape[-1]), -3, 0)

    guided: Any
    shape = sampler.x.shape[1:]
    if table.rows is None:
        guided = diffusion.guide(predict_v, context, unconditional)
    else:
        guided = diffusion.guide_and_skip(evaluate, reuse, context, unconditional)
    with network_rules("dit"):
        modulation = dit.modulation(jnp.repeat(timesteps, count), motions.ravel())
        return diffusion.sample(
            guided,
            sampler,
            table,
            noise=lambda i: _noise(keys, i, shape),
            each=(jax.tree.map(split_by_step, modulation),),
        )


def denoise_parts(
    dit: DiT,
    unconditional: Float[Array, "n d"] | None,
    state: GameState,
    sampler: SamplerState,
    parts: Sequence[SamplerTable],
    keys: Key[Array, " g"],
) -> SamplerState:
    """Runs the steps of all parts of a table (`SamplerTable.parts`)."""
    for part in parts:
        sampler = denoise_clip(dit, unconditional, state, sampler, part, keys)
    return sampler


def decode_clip(
    vae: VAE, latents: Float[Array, "g t h w c"]
) -> tuple[UInt8[Array, "g f y x 3"], Bool[Array, " g"]]:
    """Decodes the sampler's latents; also returns whether all frames of a clip are finite."""
    with network_rules("vae"):
        frames = decode_in_parts(vae, from_decoder(latents, vae.config).astype(vae.config.dtype))
    return to_uint8(frames), jnp.isfinite(frames).all(axis=(1, 2, 3, 4))


def decode_picture(vae: VAE, latents: Float[Array, "g t h w c"]) -> UInt8[Array, "g 1 y x 3"]:
    """Decodes the first frame of the sampler's latents alone: a preview of a clip in the making."""
    return to_uint8(_decode_first(vae, latents))


def _decode_first(vae: VAE, latents: Float[Array, "g t h w c"]) -> Float[Array, "g 1 y x 3"]:
    with network_rules("vae"):
        latents = from_decoder(latents, vae.config)[:, :1].astype(vae.config.dtype)
        return decode_in_parts(vae, latents)


def draw_picture(
    networks: Networks, state: GameState, table: SamplerTable, keys: Key[Array, " g"]
) -> DrawnPicture:
    """Denoises the first frame of the predicted shot, with guidance, decodes and encodes it.

    The clip then begins with it, and is made of E_a's image tokens of it and of the predicted text
    tokens. The language model predicts the mean of all shots that can follow; the picture is one of
    them. Its noise is its own, and no step is skipped.
    """
    assert networks.shot is not None
    dit, table = networks.first_dit, table.plain()
    start, keys = start_picture(dit, keys)
    sampler = denoise_clip(dit, networks.unconditional, state, start, table, keys)
    count = networks.dit.config.latent_frames
    drawn = see_picture(networks.vae, networks.shot, state, sampler.x, num_frames=count)
    return drawn._replace(finite=drawn.finite & (sampler.bad_step < 0))


def start_picture(dit: DiT, keys: Key[Array, " g"]) -> tuple[SamplerState, Key[Array, " g"]]:
    """Returns the state before the first step of a picture, and the keys of its own noise."""
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, _PICTURE)
    shape = (dit.config.patch_frames, *latent_shape(dit)[1:])
    return diffusion.start_sampler(_noise(keys, jnp.asarray(-1), shape)), keys


def see_picture(
    vae: VAE,
    shot: ShotNetworks,
    state: GameState,
    latents: Float[Array, "g t h w c"],
    *,
    num_frames: int,
) -> DrawnPicture:
    """Decodes the sampler's latents of a picture, and encodes it by CLIP and E_a.

    `num_frames` is the number of a clip's latent frames, of which the picture is the first.
    """
    pixels = _decode_first(vae, latents)
    frame, finite = to_uint8(pixels), jnp.isfinite(pixels).all(axis=(1, 2, 3, 4))
    seen = with_image(state.representation, encode_frames(shot, frame[:, 0]))
    first = from_decoder(latents, vae.config)[:, :1]
    known = know_first(first, vae.config, num_frames=num_frames)
    return DrawnPicture(state._replace(representation=seen, memory=None), frame, finite, known)


def with_image(
    representation: Float[Array, "g n r"], image: Float[Array, "g k r"]
) -> Float[Array, "g n r"]:
    """Replaces the image tokens, which come last."""
    text = representation[:, : -image.shape[1]]
    return jnp.concatenate([text, image.astype(text.dtype)], axis=1)


def decode_chunk(
    vae: VAE, latents: Float[Array, "g t h w c"], cache: DecoderCache | None, *, start: int
) -> tuple[UInt8[Array, "g f y x 3"], Bool[Array, " g"], DecoderCache]:
    """Decodes the chunk of the sampler's latents that starts at a latent frame (`decode_clip`).

    Returns its frames, whether all of a clip's are finite, and the cache for the next chunk.
    """
    (stop,) = (stop for first, stop in chunk_bounds(latents.shape[1]) if first == start)
    with network_rules("vae"):
        latents = from_decoder(latents, vae.config)[:, start:stop].astype(vae.config.dtype)
        frames, cache = vae.decode_chunk(latents, cache)
    return to_uint8(frames), jnp.isfinite(frames).all(axis=(1, 2, 3, 4)), cache


def remember(
    shot: ShotNetworks | None,
    state: GameState,
    frames: UInt8[Array, "g f y x 3"],
    *,
    protocol: Protocol,
) -> Float[Array, "g n r"]:
    """Returns the shot representation of a turn as later turns see it.

    With `protocol.history` "shown" the image tokens are E_a's of the clip's first frame, or of the
    picture before it, as in the given `state`; the text tokens stay as predicted.
    """
    if protocol.history == "predicted" or protocol.picture_first:
        return state.representation
    assert shot is not None
    return with_image(state.representation, encode_frames(shot, frames[:, 0]))


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
    """Plays one turn of a batch of games; a function to jit.

    `layout` and `table` are static: close over them. `turn` counts from 1.
    """
    protocol = layout.protocol
    state = predict_state(networks.mllm, window, instruction, layout)
    shown = with_memory(state, window, networks.first_dit.config)
    keys = turn_keys(games, turn)
    dit, unconditional = networks.dit, clip_guidance(networks, protocol)
    drawn = None
    if protocol.picture_first:
        drawn = draw_picture(networks, shown, table, keys)
        shown = drawn.state
    known = None if drawn is None else drawn.known
    residuals = num_residuals(table, unconditional)
    has_memory = shown.memory is not None
    start = start_clip(dit, keys, rows=residuals, known=known, has_memory=has_memory)
    sampler = denoise_parts(dit, unconditional, shown, start, table.parts(), keys)
    frames, finite = decode_clip(networks.vae, sampler.x)
    last = jnp.asarray(table.step)[-1] + 1
    bad_step = jnp.where((sampler.bad_step < 0) & ~finite, last, sampler.bad_step)
    if drawn is not None:
        bad_step = jnp.where(drawn.finite, bad_step, last + 1)
    kept = state if protocol.history == "predicted" else shown
    remembered = remember(networks.shot, kept, frames, protocol=protocol)
    first = None
    if window.first_latents is not None:
        first = first_latents(sampler.x, networks.vae.config)
    window = advance(window, instruction, state._replace(representation=remembered), first)
    return window, TurnResult(state, frames, bad_step, remembered, first)


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
    """Scans `play_turn` over instructions; they and the results have a leading axis of turns."""
    turns = first_turn + jnp.arange(instructions.lengths.shape[0])

    def body(window: Window, item: tuple[Instruction, jax.Array]) -> tuple[Window, TurnResult]:
        return play_turn(networks, window, item[0], games, item[1], layout=layout, table=table)

    return jax.lax.scan(body, window, (instructions, turns))
