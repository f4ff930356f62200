"""Tables to read a system's scores by: ceilings, and answers without looking."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.benchmarks.format import Benchmark
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate
from animegamer_jax.evaluate.metrics.scorers import (
    Answers,
    StateScorer,
    expected_of,
)
from animegamer_jax.evaluate.metrics.suite import Scoring, weights_digest
from animegamer_jax.evaluate.play_games import (
    Values,
    benchmark_digest,
    clip_values,
)
from animegamer_jax.evaluate.results import Table
from animegamer_jax.models.vae import VAE
from animegamer_jax.storage.files import write_whole
from animegamer_jax.toy.scoring.truth import other_take, reconstruct

THROUGH_VAE = "true clips through its VAE"
OTHER_TAKE = "another take of the same"
OTHER_GAME = "another game's clips"
MOST_FREQUENT = "always the most frequent"

_FILE = "beside.json"


def tables_beside(
    benchmark: Benchmark, scoring: Scoring, *, vae: VAE | None, keep: Path
) -> Mapping[str, Table]:
    """What the same scorers say of clips and answers that no system made.

    Args:
        benchmark: that was played.
        scoring: the system's.
        vae: the system's, for the ceiling that its own losses set; None: left out.
        keep: folder in which the tables are kept: scoring takes as long as a system's games.
    """
    scoring = dataclasses.replace(scoring, set_scorers=())  # tables have values of turns alone
    made = _made(benchmark, scoring, vae=vae)
    kept = _read(keep / _FILE, made)
    if kept is not None:
        return kept
    tables = {MOST_FREQUENT: _table(most_frequent_values(benchmark))}
    truth = scoring.truth
    if truth is not None:
        clips = {OTHER_TAKE: other_take(truth)}
        if len(benchmark.games) > 1:
            clips[OTHER_GAME] = np.roll(truth.clips, 1, axis=0)
        if vae is not None:
            flat = truth.clips.reshape(-1, *truth.clips.shape[2:])
            clips[THROUGH_VAE] = reconstruct(vae, flat).reshape(truth.clips.shape)
        for name, of in clips.items():
            tables[name] = _table(clip_values(lambda t, of=of: of[:, t], benchmark, scoring))
    keep.mkdir(parents=True, exist_ok=True)
    write_whole(
        keep / _FILE, (json.dumps({"made": made, "tables": to_json(tables)}) + "\n").encode()
    )
    return tables


def most_frequent_values(benchmark: Benchmark) -> Values:
    """What always answering the benchmark's most frequent level and changes would score."""
    expected = np.concatenate([expected_of(game.turns) for game in benchmark.games])
    kinds = [np.unique(column, return_counts=True) for column in expected.T]
    answer = np.array([values[counts.argmax()] for values, counts in kinds])
    score, parts = StateScorer(), []
    for game in benchmark.games:
        told = np.tile(answer, (len(game.turns), 1))
        blank = np.zeros((len(game.turns), 1, 1, 1, 3), np.uint8)
        parts.append(score(Answers(turns=game.turns, clips=blank, told=told)))
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def _table(values: Values) -> Table:
    found = {n: estimate(v, where=np.isfinite(v)) for n, v in sorted(values.items())}
    return {name: one for name, one in found.items() if one is not None}


def _made(benchmark: Benchmark, scoring: Scoring, *, vae: VAE | None) -> dict[str, Any]:
    return {
        "benchmark": benchmark_digest(benchmark),
        "scorers": scoring.made,
        "vae": None if vae is None else weights_digest(vae),
    }


def _read(path: Path, made: Mapping[str, Any]) -> Mapping[str, Table] | None:
    """Tables that were made the same way."""
    try:
        content = json.loads(path.read_text())
        if content["made"] != json.loads(json.dumps(made)):
            return None
        return {
            name: {metric: from_json(Estimate, one, str(path)) for metric, one in table.items()}
            for name, table in content["tables"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
