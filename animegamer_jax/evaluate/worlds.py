"""Worlds whose truth is known: what an evaluation can ask of them.

A benchmark names its world. Most worlds, such as a film's, have nothing but the benchmark's text. A
world that is listed here can also draw the true clip of a turn and read clips, so more metrics can
be computed. The table names each one by a string, so nothing of it is imported before it is needed.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt8

from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.clip_embedder import Clips

WORLDS: Mapping[str, str] = {"toy": "animegamer_jax.toy.evaluation:WORLD"}
"""World by its name in benchmarks, as "module:object"."""

GameClips = UInt8[np.ndarray, "g t f h w 3"]


class DetailTruth(NamedTuple):
    """Which turns of a benchmark show the same thing, for one attribute that no instruction says.

    Attributes:
        first: Index of the first turn of the same game that shows the thing, as a place's variant
            or a character's accessory, counted from 0; -1: the turn does not show the attribute.
            What no turn of a whole window showed is new again.
        value: Index of the thing's value where the player's picture shows it; -1: whatever the
            first turn shows is right.
        thing: Index of what an instruction says of the thing, as the character's name or the place,
            the same in all games; all players' own characters share one.
    """

    first: Int[np.ndarray, "g t"]
    value: Int[np.ndarray, "g t"]
    thing: Int[np.ndarray, "g t"]


class FrameSize(NamedTuple):
    """The number of frames of a clip, and their size in pixels."""

    num_frames: int
    height: int
    width: int


@runtime_checkable
class AttributeClassifier(Protocol):
    """Reads the attributes of clips, such as the character.

    Attributes:
        values: The possible values of each attribute; those that instructions name are named as in
            `Parts`, the others as in `World.details`.
        description: How each attribute is read and how accurately, in words.
        digest: What its answers depend on, such as its weights, as a short text.
    """

    values: Mapping[str, Sequence[str]]
    digest: str

    @property
    def description(self) -> Mapping[str, str]: ...

    def __call__(self, clips: Clips) -> Mapping[str, Int[np.ndarray, " n"]]:
        """Returns the index of each clip's value, by attribute."""
        ...


@runtime_checkable
class World(Protocol):
    """A world that can draw and read the clips of its games.

    Attributes:
        motion_edges: Motion values between its five motion levels.
        motion_noise: Grey levels up to which a difference between frames is no motion.
    """

    motion_edges: Sequence[float]
    motion_noise: float

    def make_benchmark(
        self, split: str, *, num_games: int | None, num_turns: int | None, seed: int
    ) -> Benchmark:
        """Makes a benchmark of held-out games; None: the world's usual number.

        Raises:
            UserError: There is no such split, or a number is too small.
        """
        ...

    def true_clips(self, benchmark: Benchmark, size: FrameSize) -> GameClips:
        """Draws the true clip of every turn.

        Raises:
            UserError: A turn of the benchmark cannot be drawn.
        """
        ...

    def other_views(self, benchmark: Benchmark, size: FrameSize) -> GameClips:
        """Draws the same scenes from other views: correct in all that an instruction can say."""
        ...

    def pictures(
        self, benchmark: Benchmark, size: FrameSize
    ) -> Sequence[UInt8[np.ndarray, "h w 3"] | None]:
        """Draws the picture before each game's first turn; None: the game has none."""
        ...

    def details(self, benchmark: Benchmark) -> Mapping[str, DetailTruth]:
        """Returns which turns show the same thing, for each attribute that no instruction says."""
        ...

    def make_classifier(
        self,
        *,
        size: FrameSize,
        reconstruct: Callable[[Clips], Clips] | None,
        num_clips: int,
    ) -> AttributeClassifier:
        """Returns the world's classifier, checked on true clips of one size.

        Args:
            size: Size of the clips.
            reconstruct: Function that sends clips through the model's VAE; None: no VAE.
            num_clips: Number of true clips to check it on.

        Raises:
            UserError: It is too often wrong on true clips.
        """
        ...


def find_world(name: str) -> World | None:
    """Returns the world that benchmarks call `name`; None: only their text is known."""
    if name not in WORLDS:
        return None
    module, _, attribute = WORLDS[name].partition(":")
    return cast(World, getattr(importlib.import_module(module), attribute))
