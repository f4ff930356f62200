"""The decoder alone on the toy world: clips of true shot representations (PAPER, ablations)."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Key

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.evaluate.metrics.clip_embedder import in_batches
from animegamer_jax.game.rollout import (
    GameState,
    decode_clip,
    denoise_clip,
    game_keys,
    start_clip,
    turn_keys,
)
from animegamer_jax.models.dit import DiT
from animegamer_jax.models.encoder import ShotEncoder
from animegamer_jax.models.vae import VAE
from animegamer_jax.toy.scoring.truth import GameClips, Truth


def sample_shots(
    bundle: Bundle,
    truth: Truth,
    *,
    representations: Float32[np.ndarray, "g t n r"],
    seeds: range,
    steps: int,
    motion_values: Sequence[float] | None = None,
    batch_size: int = 20,
) -> GameClips:
    """A clip of every turn's shot representation and true motion level.

    Args:
        bundle: with the encoder, the decoder and the VAE.
        truth: of the games; its levels say the motion.
        representations: of every turn.
        seeds: of the games' noise, which is that of a played game.
        steps: denoising steps.
        motion_values: that the decoder is told for each level; the protocol's if None.
        batch_size: turns side by side.
    """
    dit, vae, encoder = (bundle.load(name) for name in ("dit", "vae", "encoder"))
    guided = bundle.protocol.guidance_scale
    unconditional = cast(ShotEncoder, encoder).unconditional() if guided else None
    table = diffusion.make_sampler_table(diffusion.schedule_of(bundle.protocol), steps)
    num_games, num_turns = truth.levels.shape
    told = bundle.protocol.motion_values if motion_values is None else motion_values
    values = np.asarray(told, np.float32)[truth.levels - 1].ravel()
    shots = representations.reshape(num_games * num_turns, *representations.shape[2:])
    numbers = jnp.arange(1, num_turns + 1)
    keys = jax.vmap(turn_keys, (None, 0), 1)(game_keys(list(seeds)), numbers).reshape(-1)

    @jax.jit
    def make(
        dit: DiT, vae: VAE, shots: jax.Array, values: jax.Array, keys: Key[jax.Array, " g"]
    ) -> jax.Array:
        state = GameState(shots, jnp.zeros((len(shots), 4), jnp.int32), values)
        start = start_clip(dit, keys)
        sampled = denoise_clip(dit, unconditional, state, start, table, keys)
        return decode_clip(vae, sampled.x)[0]

    def some(rows: np.ndarray) -> jax.Array:
        return make(dit, vae, jnp.asarray(shots[rows]), jnp.asarray(values[rows]), keys[rows])

    frames = in_batches(some, np.arange(len(shots)), batch_size)
    return frames.reshape(num_games, num_turns, *frames.shape[1:])
