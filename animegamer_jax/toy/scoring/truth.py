"""What games of the toy world truly show: clips, attributes, states, and what instructions say."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, UInt8

from animegamer_jax.evaluate.metrics.clip_embedder import in_batches
from animegamer_jax.evaluate.metrics.formulas import STATE_SLOTS
from animegamer_jax.models.vae import VAE, mode, to_uint8
from animegamer_jax.toy.scoring.classifiers import ATTRIBUTES, Attribute, labels, render_all
from animegamer_jax.toy.world import ToyTurn, split_words

Games = Sequence[Sequence[ToyTurn]]
GameClips = UInt8[np.ndarray, "g t f h w 3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """What games show and say; arrays have the axes game and turn.

    Attributes:
        games: the turns themselves.
        clips: their true clips.
        labels: the index of each attribute's value among its candidates.
        named: whether the instruction says it.
        states: social, entertainment and stamina.
        levels: of motion, 1 to 5.
        is_open: whether the instruction leaves something to the turns before.
    """

    games: Games
    clips: GameClips
    labels: Mapping[Attribute, Int[np.ndarray, "g t"]]
    named: Mapping[Attribute, Bool[np.ndarray, "g t"]]
    states: Int[np.ndarray, "g t 3"]
    levels: Int[np.ndarray, "g t"]
    is_open: Bool[np.ndarray, "g t"]


def make_truth(games: Games, *, height: int, width: int, num_frames: int) -> Truth:
    """Renders the games' clips and lays their truth out."""
    turns = [turn for game in games for turn in game]
    scenes = [turn.scene for turn in turns]
    shape = len(games), len(games[0])
    said = [set(split_words(turn.instruction)) for turn in turns]

    def named(attribute: Attribute) -> np.ndarray:
        pairs = zip(scenes, said, strict=True)
        found = [getattr(scene, attribute).lower() in heard for scene, heard in pairs]
        return np.array(found).reshape(shape)

    clips = render_all(scenes, height=height, width=width)[:, :num_frames]
    return Truth(
        games=games,
        clips=clips.reshape(*shape, *clips.shape[1:]),
        labels={name: labels(scenes, name).reshape(shape) for name in ATTRIBUTES},
        named={name: named(name) for name in ATTRIBUTES},
        states=np.array([[getattr(turn, slot) for slot in STATE_SLOTS] for turn in turns]).reshape(
            *shape, len(STATE_SLOTS)
        ),
        levels=np.array([scene.level for scene in scenes]).reshape(shape),
        is_open=np.array([turn.is_open for turn in turns]).reshape(shape),
    )


def other_take(truth: Truth) -> GameClips:
    """Clips of the same scenes from other views: right in all that an instruction can say."""
    scenes = [turn.scene for game in truth.games for turn in game]
    others = [dataclasses.replace(scene, seed=number) for number, scene in enumerate(scenes)]
    _, _, f, h, w, _ = truth.clips.shape
    return render_all(others, height=h, width=w)[:, :f].reshape(truth.clips.shape)


def reconstruct(
    vae: VAE, clips: UInt8[np.ndarray, "n f h w 3"], *, batch_size: int = 4
) -> UInt8[np.ndarray, "n f h w 3"]:
    """Clips through the VAE: the most likely latents, decoded."""
    return in_batches(lambda batch: _there_and_back(vae, batch), clips, batch_size)


@jax.jit
def _there_and_back(vae: VAE, frames: jax.Array) -> jax.Array:
    video = (frames.astype(jnp.float32) / 127.5 - 1).astype(vae.config.dtype)
    latents = mode(vae.encode(video)).astype(vae.config.dtype)
    return to_uint8(vae.decode(latents))
