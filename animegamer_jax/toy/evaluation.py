"""The toy world for `animegamer evaluate`: its benchmark, true clips and classifier."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast, get_args

import numpy as np
from jaxtyping import Int, UInt8

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.clip_embedder import Clips
from animegamer_jax.evaluate.metrics.registry import LOOKS
from animegamer_jax.evaluate.metrics.suite import weights_digest
from animegamer_jax.evaluate.worlds import DetailTruth, FrameSize, GameClips
from animegamer_jax.media.motion import FLICKER
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import (
    ACCESSORIES,
    CHARACTERS,
    DISTANCES,
    MOTION_EDGES,
    PLACES,
    SIDES,
    VARIANTS,
    Scene,
)
from animegamer_jax.toy.scoring.attributes import (
    DETAILS,
    VALUES,
    draw_scenes,
    labels,
    value_of,
)
from animegamer_jax.toy.scoring.benchmark import make_toy_benchmark, toy_games, toy_pictures
from animegamer_jax.toy.scoring.classifier import Classifier, load_classifier, read_clips
from animegamer_jax.toy.world import PROTOCOL, Split

LEAST_ACCURACY = 0.97
"""Share of true clips that must be read correctly before the answers count as scores."""


class CheckedClassifier:
    """The classifier of clips, checked on true ones; an `evaluate.worlds.AttributeClassifier`.

    Attributes:
        values: The values of each attribute.
        digest: Digest of the network's weights.
        accuracy: Share of true clips that are read correctly, by attribute.
        reconstructed: The same share after a VAE encoded and decoded the clips; None: no VAE.
    """

    values: Mapping[str, Sequence[str]] = VALUES

    def __init__(
        self,
        classifier: Classifier,
        scenes: Sequence[Scene],
        clips: Clips,
        reconstructed: Clips | None,
    ):
        self._classifier, self._count = classifier, len(scenes)
        self.digest = weights_digest(classifier)
        self.accuracy = self._check(scenes, clips)
        self.reconstructed = None if reconstructed is None else self._check(scenes, reconstructed)

    def _check(self, scenes: Sequence[Scene], clips: Clips) -> Mapping[str, float]:
        found, shares = self(clips), {}
        for name in VALUES:
            right = labels(scenes, name)
            known = right >= 0
            shares[name] = float((found[name] == right)[known].mean()) if known.any() else np.nan
        return shares

    @property
    def description(self) -> Mapping[str, str]:
        """How accurately each attribute is read, in words."""
        return {name: self._describe(name) for name in VALUES}

    def _describe(self, name: str) -> str:
        through = self.reconstructed
        blurred = "" if through is None else f", {through[name]:.3f} after the VAE"
        return f"right in {self.accuracy[name]:.3f} of {self._count} true clips{blurred}"

    def __call__(self, clips: Clips) -> Mapping[str, Int[np.ndarray, " n"]]:
        return read_clips(self._classifier, clips)


class ToyWorld:
    """An `evaluate.worlds.World`."""

    motion_edges = MOTION_EDGES
    motion_noise = FLICKER

    def make_benchmark(
        self, split: str, *, num_games: int | None, num_turns: int | None, seed: int
    ) -> Benchmark:
        """Makes a benchmark of a held-out split.

        Raises:
            UserError: There is no such split, or a number is too small.
        """
        held_out = [name for name in get_args(Split) if name != "train"]
        if split not in held_out:
            raise UserError(f"split {split}: expected one of {', '.join(held_out)}")
        return make_toy_benchmark(
            num_games=100 if num_games is None else num_games,
            num_turns=5 if num_turns is None else num_turns,
            split=cast(Split, split),
            seed=seed,
        )

    def true_clips(self, benchmark: Benchmark, size: FrameSize) -> GameClips:
        """Draws the true clip of every turn."""
        return _true_clips(benchmark, size)

    def other_views(self, benchmark: Benchmark, size: FrameSize) -> GameClips:
        """Draws the same scenes with other details: correct in all that an instruction can say."""
        return _draw(benchmark, size, [other_details(scene) for scene in _scenes(benchmark)])

    def pictures(
        self, benchmark: Benchmark, size: FrameSize
    ) -> Sequence[UInt8[np.ndarray, "h w 3"] | None]:
        """Draws the picture before each game's first turn; None: the game has none."""
        return [
            None
            if turn is None
            else render(turn.scene, height=size.height, width=size.width, num_frames=1)[0]
            for turn in toy_pictures(benchmark)
        ]

    def details(self, benchmark: Benchmark) -> Mapping[str, DetailTruth]:
        """Returns which turns show the same thing: a character, a place, or one stay at a place."""
        rows = [
            ([turn.scene for turn in game], None if before is None else before.scene)
            for game, before in zip(toy_games(benchmark), toy_pictures(benchmark), strict=True)
        ]
        return {
            name: DetailTruth(
                *map(np.array, zip(*(_shown(name, *row) for row in rows), strict=True)),
                thing=np.array([[_spoken(name, s) for s in scenes] for scenes, _ in rows]),
            )
            for name in (*DETAILS, *LOOKS)
        }

    def make_classifier(
        self,
        *,
        size: FrameSize,
        reconstruct: Callable[[Clips], Clips] | None,
        num_clips: int,
    ) -> CheckedClassifier:
        """Returns the classifier of all attributes, checked on true clips.

        Raises:
            UserError: An attribute is too often wrong on true clips, or in none of them.
        """
        scenes = draw_scenes(num_clips, seed=1)
        clips = render_all(scenes, **size._asdict())
        through = None if reconstruct is None else reconstruct(clips)
        checked = CheckedClassifier(load_classifier(), scenes, clips, through)
        shares = checked.accuracy.items()
        if unseen := [name for name, share in shares if np.isnan(share)]:
            raise UserError(
                f"{', '.join(unseen)}: in none of {num_clips} true clips: give a higher "
                "--classifier-clips"
            )
        if wrong := [name for name, share in shares if share < LEAST_ACCURACY]:
            raise UserError(
                f"{', '.join(wrong)}: too often wrong on true clips of {size.height} x "
                f"{size.width} pixels: the classifier was trained for 96 x 144"
            )
        return checked


def _thing(name: str, scenes: Sequence[Scene], turn: int) -> Hashable:
    """Returns what a turn shows, of which an attribute is a detail."""
    scene = scenes[turn]
    if name == "accessory" or name in LOOKS:
        return scene.character
    if name == "variant":
        return scene.place
    stays = [t for t in range(1, turn + 1) if scenes[t].place != scenes[t - 1].place]
    return max(stays, default=0)


def _spoken(name: str, scene: Scene) -> int:
    """Returns the index of the name of what an attribute belongs to, one for own characters."""
    if name == "accessory" or name in LOOKS:
        own = scene.own_looks(scene.character)
        return len(CHARACTERS) if own else CHARACTERS.index(scene.character)
    return PLACES.index(scene.place)  # a view too: a stay is at one place


def _shown(
    name: str, scenes: Sequence[Scene], picture: Scene | None
) -> tuple[list[int], list[int]]:
    """Returns `first` and `value` of a game for `DetailTruth`.

    A thing that no turn of a whole window showed is forgotten, and shown for the first time again.
    """
    every = scenes if picture is None else [picture, *scenes]
    offset = len(every) - len(scenes)
    begun: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    first, value = [-1] * len(every), [-1] * len(every)
    for turn, scene in enumerate(every):
        if value_of(scene, name) is None:
            continue
        thing = _thing(name, every, turn)
        if turn - last.get(thing, turn) >= PROTOCOL.window:
            del begun[thing]
        first[turn], last[thing] = begun.setdefault(thing, turn), turn
        if picture is not None and first[turn] == 0:
            known = value_of(picture, name)
            assert known is not None
            value[turn] = VALUES[name].index(known)
    if picture is not None:  # what the picture shows is first seen in the clip of a later turn
        seen = [turn for turn in range(1, len(every)) if first[turn] == 0]
        first = [seen[0] if turn in seen else start for turn, start in enumerate(first)]
    return [max(start - offset, -1) for start in first[offset:]], value[offset:]


def other_details(scene: Scene) -> Scene:
    """Returns the scene with the next value of each detail."""
    details = scene.details

    def after(value: object, values: Sequence[object]) -> object:
        return values[(values.index(value) + 1) % len(values)]

    changed = dataclasses.replace(
        details,
        accessory=after(details.accessory, ACCESSORIES),
        variant=after(details.variant, VARIANTS),
        side=after(details.side, SIDES),
        distance=after(details.distance, DISTANCES),
    )
    return dataclasses.replace(scene, details=changed)


def render_all(scenes: Sequence[Scene], *, height: int, width: int, num_frames: int) -> Clips:
    """Renders the true clips of scenes."""
    return np.stack([render(scene, height=height, width=width)[:num_frames] for scene in scenes])


def _scenes(benchmark: Benchmark) -> list[Scene]:
    return [turn.scene for game in toy_games(benchmark) for turn in game]


def _draw(benchmark: Benchmark, size: FrameSize, scenes: list[Scene]) -> GameClips:
    clips = render_all(scenes, **size._asdict())
    return clips.reshape(len(benchmark.games), benchmark.num_turns, *clips.shape[1:])


@functools.lru_cache(maxsize=1)  # systems with clips of one size share them
def _true_clips(benchmark: Benchmark, size: FrameSize) -> GameClips:
    return _draw(benchmark, size, _scenes(benchmark))


WORLD = ToyWorld()
