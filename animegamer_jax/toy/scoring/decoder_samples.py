"""The decoder alone on the toy world: clips of true or predicted representations."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, Key, UInt8

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.diffusion import SamplerTable
from animegamer_jax.evaluate.metrics.clip_embedder import in_batches
from animegamer_jax.evaluate.worlds import GameClips
from animegamer_jax.game.rollout import (
    GameState,
    Networks,
    decode_clip,
    denoise_parts,
    draw_picture,
    game_keys,
    num_residuals,
    num_rows,
    start_clip,
    turn_keys,
)
from animegamer_jax.game.skipped_steps import SkippedSteps
from animegamer_jax.models.clip import CLIP
from animegamer_jax.models.encoder import ShotEncoder, ShotNetworks, encode_shots
from animegamer_jax.models.t5 import T5Encoder
from animegamer_jax.tokenizer import Tokenizer


def true_representations(
    bundle: Bundle, motion_texts: Sequence[str], frames: UInt8[np.ndarray, "n h w 3"]
) -> Float32[np.ndarray, "n k r"]:
    """Computes E_a, the encoder's representation of a shot.

    Args:
        bundle: A model with the networks encoder, t5 and clip.
        motion_texts: The motion of each shot in words, for T5.
        frames: One frame of each shot, for CLIP.
    """
    encoder, t5, clip = bundle.load("encoder"), bundle.load("t5"), bundle.load("clip")
    config = encoder.config
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=config.num_tokens)
    tokens = np.stack([tokenizer.padded(text, config.num_text_tokens) for text in motion_texts])
    return in_batches(
        lambda rows: _encode_shots(encoder, t5, clip, tokens[rows], frames[rows]),
        np.arange(len(motion_texts)),
        16,
    )


@jax.jit
def _encode_shots(
    encoder: ShotEncoder, t5: T5Encoder, clip: CLIP, tokens: jax.Array, frames: jax.Array
) -> jax.Array:
    return encode_shots(ShotNetworks(clip, encoder), frames, t5(tokens))


def sample_shots(
    bundle: Bundle,
    *,
    representations: Float32[np.ndarray, "g t k r"],
    levels: Int[np.ndarray, "g t"],
    seeds: Sequence[int],
    steps: int,
    skipped: SkippedSteps | None = None,
    motion_values: Sequence[float] | None = None,
    unconditional: Float32[np.ndarray, "k r"] | None = None,
    predicted: bool = False,
    batch_size: int = 20,
) -> GameClips:
    """Samples a clip for every turn's shot representation and motion level.

    Args:
        bundle: A model with the networks dit and vae; with encoder if it plays with guidance and
            `unconditional` is not given; with clip and encoder to draw a picture first.
        representations: The shot representation of every turn.
        levels: The motion level of every turn, 1 to 5.
        seeds: A seed for each game; the noise is that of a played game with this seed.
        steps: Number of denoising steps.
        skipped: Steps that are skipped; None: every step is computed.
        motion_values: The decoder's input for each motion level; None: the protocol's.
        unconditional: The representation of guidance without a shot; None: E_a of zeros. If given,
            clips are guided whatever the protocol says.
        predicted: Whether the representations are predictions, of which a model whose protocol says
            so draws a picture first.
        batch_size: Number of turns that are sampled side by side.
    """
    protocol, dit, vae = bundle.protocol, bundle.load("dit"), bundle.load("vae")
    pictured = predicted and protocol.picture_first
    empty, shot, picture = None, None, None
    if pictured:
        picture = bundle.load("picture") if bundle.has("picture") else None
        shot = ShotNetworks(bundle.load("clip"), bundle.load("encoder"))
    if unconditional is not None:
        empty = jnp.asarray(unconditional)
    elif protocol.guides_clips or (pictured and protocol.guidance_scale):
        empty = bundle.load("encoder").unconditional()
    table = diffusion.make_sampler_table(diffusion.schedule_of(bundle.protocol), steps)
    if not pictured:
        table = table.plain()
    if skipped is not None:
        rows = num_rows(table, None if pictured else empty)
        table = skipped.apply(table, guided=rows == 2)
    num_games, num_turns = levels.shape
    inputs = bundle.protocol.motion_values if motion_values is None else motion_values
    values = np.asarray(inputs, np.float32)[levels - 1].ravel()
    shots = representations.reshape(num_games * num_turns, *representations.shape[2:])
    numbers = jnp.arange(1, num_turns + 1)
    keys = jax.vmap(turn_keys, (None, 0), 1)(game_keys(list(seeds)), numbers).reshape(-1)

    def sample(rows: np.ndarray) -> jax.Array:
        state = GameState(
            jnp.asarray(shots[rows]),
            jnp.zeros((len(rows), 4), jnp.int32),
            jnp.asarray(values[rows]),
        )
        networks = Networks(cast(Any, None), dit, vae, empty, shot, picture)
        return _sample(networks, state, table.plain(), table.parts(), keys[rows])

    frames = in_batches(sample, np.arange(len(shots)), batch_size)
    return frames.reshape(num_games, num_turns, *frames.shape[1:])


@jax.jit
def _sample(
    networks: Networks,
    state: GameState,
    plain: SamplerTable,
    parts: tuple[SamplerTable, ...],
    keys: Key[jax.Array, " g"],
) -> UInt8[jax.Array, "g f h w 3"]:
    """Makes clips; given E_a and CLIP, of a picture that comes first."""
    dit, unconditional, known = networks.dit, networks.unconditional, None
    if networks.shot is not None:
        drawn = draw_picture(networks, state, plain, keys)
        state, known, unconditional = drawn.state, drawn.known, None
    start = start_clip(dit, keys, rows=num_residuals(parts[0], unconditional), known=known)
    sampled = denoise_parts(dit, unconditional, state, start, parts, keys)
    return decode_clip(networks.vae, sampled.x)[0]
