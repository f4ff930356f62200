"""The toy world for `animegamer evaluate`: its benchmark, true clips and classifier."""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast, get_args

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder, Clips
from animegamer_jax.evaluate.worlds import FrameSize, GameClips
from animegamer_jax.media.motion import FLICKER
from animegamer_jax.toy.scene import MOTION_EDGES, Scene
from animegamer_jax.toy.scoring.benchmark import make_toy_benchmark, toy_games
from animegamer_jax.toy.scoring.classifiers import CheckedClassifier, make_classifier, render_all
from animegamer_jax.toy.world import Split


class ToyWorld:
    """An `evaluate.worlds.World`."""

    motion_edges = MOTION_EDGES
    motion_noise = FLICKER

    def make_benchmark(
        self, split: str, *, num_games: int | None, num_turns: int | None, seed: int
    ) -> Benchmark:
        """Makes a benchmark of a held-out split.

        Raises:
            UserError: there is no such split, or a number is too small.
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
        """Draws the same scenes from other views."""
        scenes = enumerate(_scenes(benchmark))
        others = [dataclasses.replace(scene, seed=number) for number, scene in scenes]
        return _draw(benchmark, size, others)

    def make_classifier(
        self,
        embedder: ClipEmbedder | None,
        *,
        size: FrameSize,
        reconstruct: Callable[[Clips], Clips] | None,
        num_clips: int,
    ) -> CheckedClassifier:
        """Trains the classifier of character, place and time.

        Raises:
            UserError: an attribute is too often wrong on true clips.
        """
        classifier = make_classifier(
            embedder,
            **size._asdict(),
            reconstruct=reconstruct,
            num_clips=num_clips,
            num_checked=max(1, num_clips // 3),
        )
        unreliable = [name for name, c in classifier.chosen.items() if not c.is_reliable]
        if unreliable:
            raise UserError(
                f"{', '.join(unreliable)}: too often wrong on true clips of {size.height} x "
                f"{size.width} pixels: give more of them (--classifier-clips)"
            )
        return classifier


def _scenes(benchmark: Benchmark) -> list[Scene]:
    return [turn.scene for game in toy_games(benchmark) for turn in game]


def _draw(benchmark: Benchmark, size: FrameSize, scenes: list[Scene]) -> GameClips:
    clips = render_all(scenes, **size._asdict())
    return clips.reshape(len(benchmark.games), benchmark.num_turns, *clips.shape[1:])


@functools.lru_cache(maxsize=1)  # systems with clips of one size share them
def _true_clips(benchmark: Benchmark, size: FrameSize) -> GameClips:
    return _draw(benchmark, size, _scenes(benchmark))


WORLD = ToyWorld()
