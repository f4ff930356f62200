"""Reference scores: upper bounds from true clips, and baselines that ignore the clips.

A system's score means what it is between them. Baselines follow from the benchmark alone; bounds
are the same scorers' values for other clips, where the world has true ones.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Int

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.registry import CONTEXT, METRICS, NAMED
from animegamer_jax.evaluate.metrics.scorers import expected_of, score_states
from animegamer_jax.evaluate.metrics.suite import MetricSuite, reconstruct, weights_digest
from animegamer_jax.evaluate.play_games import Values, benchmark_digest, score_clips
from animegamer_jax.evaluate.results import numpy_leaf
from animegamer_jax.models.vae import VAE
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.serialization import array_field, read_json, to_json

TRUE_CLIPS = "true clips"
THROUGH_VAE = "true clips through its VAE"
OTHER_VIEW = "true clips from another view"
OTHER_CLIPS = "another game's clips"
OTHER_ANSWERS = "another game's answers"
MOST_FREQUENT = "always the most frequent"
NO_MEMORY = "without memory"
"""Everything that the instruction says is right, the rest is another game's: no model without
memory knows more than how often each value occurs."""


def reference_scores(
    benchmark: Benchmark, suite: MetricSuite, *, vae: VAE | None, cache: Path
) -> Mapping[str, Values]:
    """Returns reference values by name, for the metrics that the suite scores.

    Baselines have values where true clips have them: a character that only a picture shows has no
    name to be right.

    Args:
        benchmark: The benchmark that was played.
        suite: The system's scorers.
        vae: The system's VAE, for the upper bound that its own losses set; None: not at hand.
        cache: Folder that keeps the values of clips: they take as long as a system's games.
    """
    groups = {scorer.group for scorer in suite.scorers}
    bounds = _cached_bounds(benchmark, suite, vae=vae, cache=cache)
    known = bounds.get(TRUE_CLIPS, {})
    found = {
        name: {
            metric: np.where(np.isnan(known[metric]), np.nan, v) if metric in known else v
            for metric, v in values.items()
            if METRICS[metric].group in groups
        }
        for name, values in baselines(benchmark).items()
    }
    return {**bounds, **found}


# Upper bounds


_Numbers = Annotated[np.ndarray, array_field(float, 2)]


def _cached_bounds(
    benchmark: Benchmark, suite: MetricSuite, *, vae: VAE | None, cache: Path
) -> Mapping[str, Values]:
    if suite.true_clips is None:
        return {}
    fingerprint = {
        "benchmark": benchmark_digest(benchmark),
        "scorers": {scorer.group: suite.fingerprint[scorer.group] for scorer in suite.scorers},
        "vae": None if vae is None else weights_digest(vae),
    }
    name = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    path = cache / f"reference-{name}.json"
    if (kept := _kept(path, (len(benchmark.games), benchmark.num_turns))) is not None:
        return kept
    found = _bounds(benchmark, suite, vae=vae)
    write_json(path, to_json(found, leaf=numpy_leaf), indent=None)
    return found


def _kept(path: Path, shape: tuple[int, int]) -> Mapping[str, Values] | None:
    """Returns the values of a file of the cache; None if it is missing or damaged."""
    try:
        found = read_json(path, dict[str, dict[str, _Numbers]], hint="")
    except UserError:
        return None
    arrays = [array for values in found.values() for array in values.values()]
    if any(array.shape != shape for array in arrays):
        return None
    return {
        reference: {metric: array.astype(np.float32) for metric, array in values.items()}
        for reference, values in found.items()
    }


def _bounds(benchmark: Benchmark, suite: MetricSuite, *, vae: VAE | None) -> dict[str, Values]:
    true = suite.true_clips
    assert true is not None
    clips = {TRUE_CLIPS: true}
    if vae is not None:
        flat = true.reshape(-1, *true.shape[2:])
        clips[THROUGH_VAE] = reconstruct(vae, flat).reshape(true.shape)
    if suite.other_views is not None:
        clips[OTHER_VIEW] = suite.other_views()
    if len(benchmark.games) > 1:
        clips[OTHER_CLIPS] = np.roll(true, 1, axis=0)
    return {
        name: score_clips(lambda turn, shown=shown: shown[:, turn], benchmark, suite)
        for name, shown in clips.items()
    }


# Baselines


def baselines(benchmark: Benchmark) -> dict[str, Values]:
    """Returns the values of answers that ignore the clips.

    An answer is the motion level, the changes of the states, and character, place and time. Values
    of another game's answers are means over all other games at the same turn.
    """
    expected = np.stack([expected_of(game.turns) for game in benchmark.games])
    texts = [
        [[getattr(t.parts, name) or "" for name in NAMED] for t in game.turns]
        for game in benchmark.games
    ]
    shown = np.unique(np.array(texts), return_inverse=True)[1].reshape(*expected.shape[:2], -1)
    omitted = [
        [[name in t.omitted for name in NAMED] for t in game.turns] for game in benchmark.games
    ]
    found = {
        MOST_FREQUENT: _score(_most_frequent(expected), expected, _most_frequent(shown) == shown)
    }
    shifts = range(1, len(benchmark.games))
    for name, heard in (
        (OTHER_ANSWERS, np.zeros(shown.shape, bool)),
        (NO_MEMORY, ~np.array(omitted)),
    ):
        parts = [
            _score(
                np.roll(expected, shift, axis=0),
                expected,
                heard | (np.roll(shown, shift, axis=0) == shown),
            )
            for shift in shifts
        ]
        if parts:
            found[name] = {metric: np.mean([p[metric] for p in parts], 0) for metric in parts[0]}
    return found


def _most_frequent(x: Int[np.ndarray, "g t k"]) -> Int[np.ndarray, " k"]:
    kinds = [np.unique(column, return_counts=True) for column in x.reshape(-1, x.shape[-1]).T]
    return np.array([values[counts.argmax()] for values, counts in kinds])


def _score(
    predicted: Int[np.ndarray, "*n 4"],
    expected: Int[np.ndarray, "g t 4"],
    right: Bool[np.ndarray, "g t 3"],
) -> Values:
    """Returns the values of predicted states, and of attributes that are right or not."""
    values = score_states(np.broadcast_to(predicted, expected.shape), expected)
    values |= {name: right[..., i].astype(np.float32) for i, name in enumerate(NAMED)}
    values[CONTEXT] = np.asarray(right.all(axis=-1), np.float32)
    return values
