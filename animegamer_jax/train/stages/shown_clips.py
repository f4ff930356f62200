"""Writes what a model shows of known turns, for the histories of the language model's training.

In play the window holds what was shown (protocol `history`), which is a model's own clips and not
those of the data. For every turn of a feature dataset the decoder makes a clip of E_a's
representation, and CLIP sees its first frame, as in play (`rollout.remember`). The result is a
dataset of CLIP's features in the folder `shown` of the features; `--history-shown` reads it. Where
a picture comes first, it is that frame, and no clip is made.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from animegamer_jax import diffusion
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.configs import Dtype
from animegamer_jax.data.datasets import SHOWN, DatasetInfo, FeatureDataset, Part, Record
from animegamer_jax.data.samples import check_features
from animegamer_jax.data.shards import folder_digest, shard_ranges, shard_size_for
from animegamer_jax.data.shared_shards import write_shards
from animegamer_jax.diffusion import SamplerTable
from animegamer_jax.errors import UserError
from animegamer_jax.game.rollout import (
    GameState,
    Networks,
    decode_chunk,
    denoise_clip,
    draw_picture,
    game_keys,
    start_clip,
    turn_keys,
)
from animegamer_jax.models.encoder import ShotNetworks
from animegamer_jax.progress import Progress, no_progress
from animegamer_jax.protocol import Protocol
from animegamer_jax.storage.serialization import to_json

_NEEDED = ("clip", "encoder", "dit", "vae")
SEED = 1 << 31
"""Seed of game 0: the noise is not that of a benchmark's games, whose seeds are low."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClipMaker:
    """Makes clips of turns and encodes their first frames by CLIP.

    Attributes:
        networks: The model's networks; the language model is not used.
        table: The sampler's steps.
        protocol: The model's protocol.
        batch_size: Number of turns whose clips are made in one batch.
    """

    networks: Networks
    table: SamplerTable
    protocol: Protocol
    batch_size: int

    def records(self, turns: Iterable[Record]) -> Iterator[Mapping[Part, Record]]:
        """Yields the record of each turn."""
        batch: list[Record] = []
        for turn in turns:
            batch.append(turn)
            if len(batch) == self.batch_size:
                yield from self._records(batch)
                batch = []
        if batch:
            yield from self._records(batch)

    def _records(self, batch: list[Record]) -> Iterator[Mapping[Part, Record]]:
        whole = batch + batch[-1:] * (self.batch_size - len(batch))  # of constant shape
        values = self.protocol.motion_values
        seen = _show(
            self.networks,
            jnp.asarray(np.stack([turn["text_features"] for turn in whole]), jnp.float32),
            jnp.asarray(np.stack([turn["image_features"] for turn in whole]), jnp.float32),
            jnp.asarray([values[turn["motion_level"] - 1] for turn in whole], jnp.float32),
            game_keys([(SEED + int(turn["game"])) % (1 << 32) for turn in whole]),
            jnp.asarray([turn["turn"] + 1 for turn in whole], jnp.int32),
            self.table,
            picture=self.protocol.picture_first,
        )
        for turn, features in zip(batch, np.asarray(seen, np.float32), strict=False):
            if not np.isfinite(features.astype(np.float16)).all():
                raise UserError(
                    f"game {turn['game']}, turn {turn['turn']}: the model shows a clip whose "
                    "features are not finite in float16: train it again"
                )
            place = {name: turn[name] for name in ("game", "turn", "num_turns")}
            yield {"shown": {**place, "image_features": features.astype(np.float16)}}


@functools.partial(jax.jit, static_argnames="picture")
def _show(
    networks: Networks,
    text: Float[Array, "b n d"],
    image: Float[Array, "b k e"],
    motion: Float[Array, " b"],
    games: Key[Array, " b"],
    turns: Int[Array, " b"],
    table: SamplerTable,
    *,
    picture: bool,
) -> Float[Array, "b k e"]:
    keys, shot = turn_keys(games, turns), networks.shot
    assert shot is not None
    shots = shot.encoder(text, image).astype(jnp.float32)
    state = GameState(shots, jnp.zeros((len(shots), 4), jnp.int32), motion)
    if picture:
        frames = draw_picture(networks, state, table, keys).frame
    else:
        start = start_clip(networks.dit, keys)
        sampled = denoise_clip(networks.dit, networks.unconditional, state, start, table, keys)
        frames, _, _ = decode_chunk(networks.vae, sampled.x, None, start=0)
    return shot.clip.see(frames[:, 0])


def write_shown(
    features: FeatureDataset,
    *,
    bundle: Bundle,
    split: str = "train",
    count: int | None = None,
    steps: int | None = None,
    dtype: Dtype | None = None,
    batch_size: int = 16,
    on_progress: Progress = no_progress,
) -> DatasetInfo:
    """Writes the dataset of what a model shows of a split, or continues an unfinished one.

    Args:
        features: The features of the turns; the result is in their folder.
        bundle: A model with the networks clip, encoder, dit and vae.
        split: Split of the turns.
        count: Number of turns, from the first; None, or more than there are: all.
        steps: Number of denoising steps; None: the protocol's.
        dtype: Number format of the computation; None: the bundle's.
        batch_size: Number of turns whose clips are made in one batch.
        on_progress: Called with what is made, turns done, and turns.

    Raises:
        UserError: A network is missing or of another size, or the folder is taken, cannot be
            written or holds an unfinished dataset of another model.
    """
    if missing := [name for name in _NEEDED if not bundle.has(name)]:
        raise UserError(
            f"{bundle.path}: it has no network {', '.join(missing)}, which a model needs to show "
            "turns: give the result of stage decoder"
        )
    check_features(features, bundle.config)
    protocol = bundle.protocol
    table = diffusion.make_sampler_table(
        diffusion.schedule_of(protocol), steps or protocol.denoising_steps
    ).plain()
    encoder = bundle.load("encoder", dtype=dtype)
    networks = Networks(
        mllm=cast(Any, None),
        dit=bundle.load("dit", dtype=dtype),
        vae=bundle.load("vae", dtype=dtype),
        unconditional=encoder.unconditional() if protocol.guidance_scale else None,
        shot=ShotNetworks(bundle.load("clip", dtype=dtype), encoder),
        picture=bundle.load("picture", dtype=dtype) if bundle.has("picture") else None,
    )
    maker = _ClipMaker(networks=networks, table=table, protocol=protocol, batch_size=batch_size)
    turns = features.turns(split)
    count = min(count or len(turns), len(turns))
    info = dataclasses.replace(
        features.info,
        kind="shown",
        made_by="animegamer data shown",
        splits={},
        decoder=bundle.digest("dit"),
    )
    return write_shards(
        features.path / SHOWN,
        info,
        places={split: shard_ranges(count, size=shard_size_for(count))},
        fingerprint={
            "networks": {name: folder_digest(bundle.path / name) for name in _NEEDED},
            "turns": count,
            "steps": steps or protocol.denoising_steps,
            "dtype": dtype,
            "protocol": to_json(protocol),
        },
        records=lambda _, place: maker.records(turns[number] for number in place),
        on_progress=on_progress,
    )
