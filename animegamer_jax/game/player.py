"""The player: the networks of a bundle, compiled once, playing games turn by turn."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from animegamer_jax import diffusion
from animegamer_jax.configs import clip_size
from animegamer_jax.diffusion import SamplerTable, Schedule
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.loading import (
    Placement,
    check_fit,
    load_networks,
    load_tokenizer,
    make_placement,
    use_placement,
)
from animegamer_jax.game.pictures import PictureEncoder, check_window
from animegamer_jax.game.rollout import (
    DrawnPicture,
    GameState,
    Instruction,
    Networks,
    Window,
    advance,
    clip_guidance,
    decode_chunk,
    decode_clip,
    decode_picture,
    denoise_clip,
    empty_window,
    first_latents,
    game_keys,
    num_residuals,
    num_rows,
    play_turn,
    predict_state,
    remember,
    see_picture,
    set_levels,
    start_clip,
    start_picture,
    turn_keys,
    with_memory,
)
from animegamer_jax.game.saved.turns import History, NewPicture
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.skipped_steps import SkippedSteps
from animegamer_jax.game.turn_output import OnFrames, Preview, SavedTurn, TurnOutput, check_turn
from animegamer_jax.media.pictures import Picture
from animegamer_jax.models.vae import chunk_bounds
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.protocol import Layout, Protocol
from animegamer_jax.sharding import overlapping_gathers, play_plan
from animegamer_jax.tokenizer import Tokenizer

# Players of one process share what was traced and compiled. `jax.jit` finds a function again, but
# not what is bound to it.


@functools.lru_cache(maxsize=8)
def _predict_in(layout: Layout) -> Any:
    return jax.jit(functools.partial(predict_state, layout=layout))


@functools.lru_cache(maxsize=8)
def _remember_by(protocol: Protocol) -> Any:
    return jax.jit(functools.partial(remember, protocol=protocol))


@functools.lru_cache(maxsize=8)
def _set_levels_by(protocol: Protocol) -> Any:
    return jax.jit(functools.partial(set_levels, protocol=protocol))


class Player:
    """The networks of a bundle, compiled once, playing a batch of games.

    Args:
        networks: The networks needed to play a turn.
        tokenizer: The bundle's tokenizer.
        protocol: The bundle's game protocol.
        window: Turns of context, the current one included; the protocol's if None.
        steps: Denoising steps a turn; the protocol's if None.
        schedule: Noise levels and guidance; the protocol's if None.
        skipped: Steps that reuse what an earlier one computed; None: every step is computed.
        placement: The mesh and the plan by which the networks are sharded; a turn is then one
            program. None: one device, and one program for each part of a turn.
        pictures: What represents players' own pictures; None: the player takes none.
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
        skipped: SkippedSteps | None = None,
        placement: Placement | None = None,
        pictures: PictureEncoder | None = None,
    ):
        self._placement = placement
        self._pictures = pictures
        self._sharding = (
            jax.tree.leaves(nnx.state(networks.vae))[0].sharding
            if placement is None
            else NamedSharding(placement[0], PartitionSpec())
        )
        self.tokenizer, self.protocol = tokenizer, protocol
        self.window = protocol.window if window is None else window
        if steps is None:
            steps = protocol.denoising_steps if skipped is None else skipped.steps
        self.steps, self.skipped = steps, skipped
        if protocol.sees_frames and networks.shot is None:
            what = "a picture first" if protocol.picture_first else "history shown"
            raise UserError(f"cannot play with {what} without clip and encoder: load them")
        config = networks.mllm.config
        one_row = play_plan("latency", guided=False)
        schedule = self._schedule = schedule or diffusion.schedule_of(protocol)
        # A plan for two rows of guidance keeps both: each of them may have its own devices.
        if not schedule.guidance_scale and (placement is None or placement[1] is one_row):
            networks = networks._replace(unconditional=None)
        self.networks = networks
        self.clip_guidance = clip_guidance(networks, protocol)
        self.table = self._make_table(self.steps)
        if skipped is not None:
            self.table = skipped.apply(self.table, guided=self.num_rows == 2)
        try:
            self.layout = Layout(
                protocol, tokenizer.ids, num_queries=config.num_queries, window=self.window
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        size = clip_size(networks.dit.config, networks.vae.config)
        self.num_frames, self.height, self.width = size
        self._predict = _predict_in(self.layout)
        self._start = jax.jit(start_clip, static_argnames=("rows", "has_memory"))
        # Each jitted call flattens its pytrees in Python, so pass only the network that it uses.
        self._denoise = jax.jit(denoise_clip, donate_argnums=3)
        self._decode = jax.jit(decode_clip)
        self._picture = jax.jit(decode_picture)
        self._start_picture = jax.jit(start_picture)
        self._see_picture = jax.jit(see_picture, static_argnames="num_frames")
        self._with_memory = jax.jit(
            functools.partial(with_memory, config=networks.first_dit.config)
        )
        self._first_latents = jax.jit(functools.partial(first_latents, config=networks.vae.config))
        self._chunk = jax.jit(decode_chunk, static_argnames="start")
        self._remember = _remember_by(protocol)
        self._advance = jax.jit(advance)
        self._set_levels = _set_levels_by(protocol)
        # Keep the window's output sharding equal to its input's, or turn 2 recompiles.
        turn = functools.partial(play_turn, layout=self.layout, table=self.table)
        self._turn = jax.jit(
            turn,
            out_shardings=(self._sharding if placement else None, None),
            compiler_options=overlapping_gathers(placement[0]) if placement else None,
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of a clip's guided steps."""
        return num_rows(self.table, self.clip_guidance)

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
        history: History | None = None,
        skip: Path | None = None,
        int8: bool = False,
    ) -> "Player":
        """Loads the networks needed to play.

        Args:
            bundle: The bundle that has them.
            window: Turns of context, the current one included; the protocol's if None.
            steps: Denoising steps a turn; the protocol's if None.
            dtype: Number format of activations and weights; the bundle's own if None.
            layout: Name of a plan (`sharding.PLANS`) over this host's devices, to which the
                weights are read directly. None: all weights on the first device.
            num_games: Number of games played at once with a layout, which then uses no more
                devices than they need. None: any multiple of the number of device groups.
            history: Shot representations of past turns (`Protocol.history`); the protocol's if
                None.
            skip: File of skipped steps, as `animegamer calibrate` writes it.
            int8: Whether the language model's weights are rounded to eight bits.

        Raises:
            UserError: A network is missing, the networks do not fit together, the devices do not
                fit the layout, there are several hosts, or the skipped steps are those of another
                model or number of steps.
        """
        skipped = None if skip is None else SkippedSteps.load(skip, bundle, steps=steps)
        protocol = dataclasses.replace(bundle.protocol, history=history or bundle.protocol.history)
        picture_first, guided = protocol.picture_first, protocol.guides_clips
        check_fit(bundle.config, history=protocol.history, picture_first=picture_first)
        placement = None if layout is None else make_placement(layout, num_games, guided=guided)
        tokenizer = load_tokenizer(bundle)
        networks = load_networks(bundle, protocol, dtype=dtype, placement=placement, int8=int8)
        return cls(
            networks,
            tokenizer,
            protocol,
            window=window,
            steps=steps,
            skipped=skipped,
            placement=placement,
            pictures=PictureEncoder(bundle),
        )

    def start(
        self,
        num_games: int = 1,
        *,
        pictures: Sequence[tuple[Picture, str] | None] | None = None,
    ) -> Window:
        """Returns the window of new games.

        Args:
            num_games: Number of games.
            pictures: A picture and its text for each game, which stand in the window as the turn
                before the first (`represent`); None for a game without. None: no pictures.

        Raises:
            UserError: The layout's groups of devices cannot share the games equally, or a picture
                cannot be used.
        """
        if pictures is not None:
            if len(pictures) != num_games:
                raise UserError(
                    f"pictures: expected {num_games}, one for each game or None, found "
                    f"{len(pictures)}"
                )
            return self.restore([[self.represent(*p)] if p else [] for p in pictures])
        if self._placement is not None:
            groups = self._placement[0].shape["data"]
            if num_games % groups:
                raise UserError(
                    f"{num_games} games: expected a multiple of {groups}, the number of groups of "
                    "devices that play"
                )
        size = self.networks.mllm.config.representation_size
        memory = self.networks.first_dit.config.memory_shape
        return self._put(empty_window(self.layout, num_games, size, memory))

    def check_pictures(self) -> None:
        """Raises UserError if the player takes no pictures: as `represent`, before there is one."""
        check_window(self.window)
        if self._pictures is None:
            raise UserError("this player takes no pictures: make it with Player.from_bundle")
        self._pictures.check()

    def represent(self, picture: Picture, text: str, *, name: str = "picture") -> NewPicture:
        """Returns a player's own picture as a turn, for `restore` and for a saved game.

        Raises:
            UserError: The window holds no past turn, the bundle lacks CLIP or T5, or the text
                cannot be used.
        """
        self.check_pictures()
        assert self._pictures is not None
        return self._pictures.represent(picture, text, name=name)

    def _put(self, tree: Any) -> Any:
        """Puts new arrays where a turn's results are, or the second turn recompiles."""
        return jax.device_put(tree, self._sharding)

    def restore(self, games: Sequence[Sequence[SavedTurn]]) -> Window:
        """Returns the window of a batch of saved games, after all their turns or the last few.

        A game with fewer turns than the window holds plays as in a smaller window.

        Raises:
            UserError: An instruction is too long, the games cannot be shared (`start`), or a turn
                is of another model (`check_turn`).
        """
        buffers: Any = jax.tree.map(np.array, self.start(len(games)))
        size = self.window - 1
        for row, turns in enumerate(games):
            for back, turn in enumerate(reversed(turns[-size:] if size else []), start=1):
                read = self.read([turn.instruction])
                buffers.captions[row, -back] = read.captions[0]
                buffers.caption_lengths[row, -back] = read.lengths[0]
                first = buffers.first_latents  # of fewer turns, if the decoder remembers fewer
                if first is not None and back > first.shape[1]:
                    first = None
                check_turn(
                    "a saved turn",
                    turn,
                    representation=buffers.representations.shape[2:],
                    first_latents=None if first is None else first.shape[2:],
                )
                buffers.representations[row, -back] = turn.representation
                buffers.states[row, -back] = turn.states
                if first is not None:
                    first[row, -back] = turn.first_latents
            buffers.num_turns[row] = min(len(turns), size)
        return self._put(jax.tree.map(jnp.asarray, buffers))

    def new_game(
        self, folder: Path, *, model: str, seed: int, picture: NewPicture | None = None
    ) -> Game:
        """Starts a saved game of this player's settings, as `Game.create` does.

        Args:
            folder: Folder of the game.
            model: Name of the model.
            seed: Seed of the turns.
            picture: The player's own picture before the first turn; None: there is none.

        Raises:
            UserError: The folder already holds a game, is a file, or cannot be written.
        """
        return Game.create(
            folder,
            model=model,
            seed=seed,
            window=self.window,
            steps=self.steps,
            protocol=self.protocol.name,
            history_kind=self.protocol.history,
            picture=picture,
        )

    def check_instruction(self, text: str) -> None:
        """Raises UserError if an instruction is empty or longer than the caption."""
        self.tokenizer.caption(text, self.protocol.caption_length)

    def read(self, instructions: Sequence[str]) -> Instruction:
        """Returns the token ids of one instruction a game."""
        length = self.protocol.caption_length
        captions, lengths = zip(
            *(self.tokenizer.caption(text, length) for text in instructions), strict=True
        )
        return Instruction(
            jnp.asarray(np.stack(captions), jnp.int32), jnp.asarray(lengths, jnp.int32)
        )

    def predict(self, window: Window, instructions: Sequence[str]) -> GameState:
        """Returns the language model's prediction for one instruction a game."""
        return self._predict(self.networks.mllm, window, self.read(instructions))

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
        on_frames: OnFrames | None = None,
        by_chunk: bool = True,
    ) -> tuple[Window, TurnOutput]:
        """Plays turn number `turn` (from 1) of each game.

        Args:
            window: The window from `start`, `restore` or the turn before.
            instructions: One instruction a game.
            seeds: One seed a game, the same throughout the game.
            turn: The number of the turn, or one number a game; with the seed it decides the noise.
            steps: Denoising steps; the player's if None.
            levels: Motion levels chosen by the players, one a game; 0 keeps the model's own.
            on_progress: Called with the part of the turn ("mllm", "decoder" or "vae"), the steps
                done and the number of steps. An exception that it raises ends the turn.
            on_frames: Called with the picture that comes first, or where there is none with a guess
                of the first frame after half of the steps, and with each chunk of the clip as soon
                as it is decoded; on a mesh once, with the clip.
            by_chunk: Whether `on_frames` gets the chunks. False: only the picture or guess, and the
                clip is decoded by the same program as without `on_frames`, to the bit.

        Raises:
            UserError: An instruction is empty or too long, a level is not in the protocol, or
                `steps` or `levels` are given to a player on a mesh, whose turn is one program.
            NonFiniteError: Names the turn and the part or denoising step.
        """
        instruction = self.read(instructions)
        if self._placement is not None:
            if levels is not None or steps not in (None, self.steps):
                raise UserError("a player on a mesh takes neither other steps nor motion levels")
            return self._play_on_mesh(
                window,
                instruction,
                seeds=seeds,
                turn=turn,
                on_progress=on_progress,
                on_frames=on_frames if by_chunk else None,
            )
        table = self.table
        if steps not in (None, self.steps):
            if self.skipped is not None:
                raise UserError(
                    f"{steps} denoising steps: this player skips some of {self.steps}: play with "
                    "those, or without skipped steps"
                )
            table = self._make_table(steps)
        allowed = self.protocol.motion_levels
        for level in levels or []:
            if level and level not in allowed:
                raise UserError(f"motion level {level}: expected one of {list(allowed)}")
        keys = self._put(turn_keys(game_keys(seeds), jnp.asarray(turn)))
        clock = [time.perf_counter()]

        on_progress("mllm", 0, 1)
        state = jax.block_until_ready(self._predict(self.networks.mllm, window, instruction))
        if levels is not None and any(levels):
            state = self._set_levels(state, self._put(jnp.asarray(levels, jnp.int32)))
        if not np.isfinite(np.asarray(state.representation)).all():
            raise NonFiniteError(f"turn {turn}: the MLLM's shot representation is not finite")
        on_progress("mllm", 1, 1)
        clock.append(time.perf_counter())

        steps = len(table.step)
        on_progress("decoder", 0, steps)
        dit, unconditional = self.networks.dit, self.clip_guidance
        shown, known = state, None
        if window.first_latents is not None:
            shown = self._with_memory(state, window)
        if self.protocol.picture_first:
            shown, picture, _, known = self._draw_picture(
                shown, table, keys, turn=turn, on_progress=lambda: on_progress("decoder", 0, steps)
            )
            if on_frames is not None:
                on_frames(Preview(np.asarray(picture), 0, 0, False))
        rows, has_memory = num_residuals(table, unconditional), shown.memory is not None
        sampler = self._start(dit, keys, rows=rows, known=known, has_memory=has_memory)
        for step, row in enumerate(table.steps()):
            sampler = self._denoise(dit, unconditional, shown, sampler, row, keys)
            if (np.asarray(sampler.bad_step) >= 0).any():
                raise NonFiniteError(
                    f"turn {turn}: the latents are not finite after denoising step {step + 1} of "
                    f"{steps}"
                )
            on_progress("decoder", step + 1, steps)
            if self.protocol.picture_first or on_frames is None:
                continue
            if 2 * (step + 1) in (steps, steps + 1) and step + 1 < steps:
                guess = self._picture(self.networks.vae, sampler.denoised)
                on_frames(Preview(np.asarray(guess), 0, step + 1, False))
        clock.append(time.perf_counter())

        on_progress("vae", 0, 1)
        if on_frames is None or not by_chunk:
            frames, finite = self._decode(self.networks.vae, sampler.x)
        else:
            frames, finite = self._decode_chunks(sampler.x, steps, on_frames)
        if not np.asarray(finite).all():
            raise NonFiniteError(f"turn {turn}: the frames that the VAE decodes are not finite")
        kept = state
        if self.protocol.history == "shown":
            remembered = self._remember(self.networks.shot, shown, frames)
            kept = state._replace(representation=remembered)
        representation, frames = _check_remembered(kept.representation, turn), np.asarray(frames)
        first = None if window.first_latents is None else self._first_latents(sampler.x)
        on_progress("vae", 1, 1)
        clock.append(time.perf_counter())

        parts = dict(zip(("mllm", "decoder", "vae"), np.diff(clock).tolist(), strict=True))
        seconds = parts | {"total": clock[-1] - clock[0]}
        _, states, motion_value, _ = jax.tree.map(np.asarray, state)
        output = TurnOutput(
            representation=representation,
            states=states,
            motion_value=motion_value,
            frames=frames,
            seconds=seconds,
            first_latents=jax.tree.map(np.asarray, first),
        )
        return self._advance(window, instruction, kept, first), output

    def _draw_picture(
        self,
        state: GameState,
        table: SamplerTable,
        keys: jax.Array,
        *,
        turn: int | Sequence[int],
        on_progress: Callable[[], None],
    ) -> DrawnPicture:
        """Draws the picture as `rollout.draw_picture`, with the programs of the clip's steps."""
        networks, dit, table = self.networks, self.networks.first_dit, table.plain()
        sampler, keys = self._start_picture(dit, keys)
        for row in table.steps():
            sampler = self._denoise(dit, networks.unconditional, state, sampler, row, keys)
            on_progress()
        frames = networks.dit.config.latent_frames
        drawn = self._see_picture(networks.vae, networks.shot, state, sampler.x, num_frames=frames)
        if (np.asarray(sampler.bad_step) >= 0).any() or not np.asarray(drawn.finite).all():
            raise NonFiniteError(f"turn {turn}: the picture that comes first is not finite")
        return drawn

    def _decode_chunks(
        self, latents: jax.Array, steps: int, on_frames: OnFrames
    ) -> tuple[jax.Array, jax.Array]:
        """Decodes a clip chunk by chunk, each as a program of its own."""
        chunks, finite, cache = [], [], None
        for start, _ in chunk_bounds(latents.shape[1]):
            frames, ok, cache = self._chunk(self.networks.vae, latents, cache, start=start)
            first = sum(chunk.shape[1] for chunk in chunks)
            on_frames(Preview(np.asarray(frames), first, steps, True))
            chunks.append(frames)
            finite.append(ok)
        return jnp.concatenate(chunks, axis=1), jnp.stack(finite).all(axis=0)

    def _make_table(self, steps: int) -> SamplerTable:
        try:
            return diffusion.make_sampler_table(self._schedule, steps)
        except ValueError as error:
            raise UserError(str(error)) from error

    def _play_on_mesh(
        self,
        window: Window,
        instruction: Instruction,
        *,
        seeds: Sequence[int],
        turn: int | Sequence[int],
        on_progress: Progress,
        on_frames: OnFrames | None,
    ) -> tuple[Window, TurnOutput]:
        """Plays a turn as one program on the mesh."""
        start = time.perf_counter()
        on_progress("decoder", 0, self.steps)
        games = self._put(game_keys(seeds))
        with use_placement(self._placement):
            window, result = self._turn(
                self.networks, window, instruction, games, jnp.asarray(turn)
            )
        representation, states, motion_value, _ = jax.tree.map(np.asarray, result.state)
        frames, bad_step = np.asarray(result.frames), np.asarray(result.bad_step)
        if not np.isfinite(representation).all():
            raise NonFiniteError(f"turn {turn}: the MLLM's shot representation is not finite")
        for step in bad_step[bad_step >= 0]:
            if step > self.steps:
                raise NonFiniteError(f"turn {turn}: the picture that comes first is not finite")
            what = "latents" if step < self.steps else "decoded frames"
            raise NonFiniteError(
                f"turn {turn}: the {what} are not finite after denoising step "
                f"{min(step + 1, self.steps)} of {self.steps}"
            )
        representation = _check_remembered(result.remembered, turn)
        on_progress("decoder", self.steps, self.steps)
        if on_frames is not None:
            on_frames(Preview(frames, 0, self.steps, True))
        seconds = {"total": time.perf_counter() - start}
        first = jax.tree.map(np.asarray, result.first_latents)
        return window, TurnOutput(representation, states, motion_value, frames, seconds, first)


def _check_remembered(representation: jax.Array, turn: int | Sequence[int]) -> np.ndarray:
    """Returns the representation that enters the window, on the host.

    Raises:
        NonFiniteError: Names the turn.
    """
    found = np.asarray(representation)
    if not np.isfinite(found).all():
        raise NonFiniteError(f"turn {turn}: E_a of the clip's first frame is not finite")
    return found
