"""What an evaluation found, and its file: a value of each metric for every game and turn.

`results.json` holds all that the report is made of, so that a page can be drawn again, and other
programs can go on from the values, without playing anything again.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from animegamer_jax.bundle_config import to_json
from animegamer_jax.evaluate.metrics import Estimate, estimate
from animegamer_jax.evaluate.verdict import Agreement, Verdict
from animegamer_jax.media import write_whole
from animegamer_jax.storage import telling

FORMAT_VERSION = 1
RESULTS_FILE = "results.json"

Table = Mapping[str, Estimate]
"""Means and intervals by metric."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemResult:
    """One system's games and what they are worth.

    Attributes:
        name: in tables, unlike every other system's.
        model: the bundle's folder, or "toy"; the folder of games that were played elsewhere.
        digest: of the bundle's content; None: the games were played elsewhere.
        settings: that it played with: protocol, window, steps, number format and so on.
        values: by metric, of every game and turn; NaN where there is none.
        folders: of each game as `Game` wrote it, beneath the report's folder.
        set_scores: of metrics that take all clips together, such as FVD.
        beside: tables to read the system's own by: true clips, true clips through its VAE, another
            game's clips. They depend on the system, whose CLIP and VAE they are made with.
        left_out: by metric or group, why it has no value.
        notes: what a reader must know, a sentence each.
    """

    name: str
    model: str
    digest: str | None
    settings: Mapping[str, Any]
    values: Mapping[str, Float[np.ndarray, "g t"]]
    folders: tuple[str, ...]
    set_scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def estimate(
        self, metric: str, where: Bool[np.ndarray, "g t"] | None = None
    ) -> Estimate | None:
        """The mean over turns and its interval over games; None: the metric has no value there.

        Args:
            metric: its name.
            where: turns that count; all if None.
        """
        if metric not in self.values:
            return None
        values = self.values[metric]
        there = np.isfinite(values)
        return estimate(values, where=there if where is None else there & where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A benchmark as some systems played it.

    Attributes:
        benchmark: its name.
        benchmark_digest: of its games, as far as they were played.
        world: of the benchmark.
        made_by: how its games were made.
        games: their names.
        instructions: of each game, by turn.
        is_open: turns that leave something to the turns before.
        systems: in the order that they were asked for.
        verdicts: of judges.
        agreements: of two judges, by "A and B".
        judge_note: why there is no verdict, where one was asked for.
        about: date, command, versions, hardware, seeds.
    """

    benchmark: str
    benchmark_digest: str
    world: str
    made_by: str
    games: tuple[str, ...]
    instructions: tuple[tuple[str, ...], ...]
    is_open: Bool[np.ndarray, "g t"]
    systems: tuple[SystemResult, ...]
    verdicts: tuple[Verdict, ...] = ()
    agreements: Mapping[str, Agreement] = dataclasses.field(default_factory=dict)
    judge_note: str | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Of each game."""
        return self.is_open.shape[1]


def write_results(folder: Path, evaluation: Evaluation) -> Path:
    """Writes `results.json`; what is not finite becomes null.

    Raises:
        UserError: the disk refuses.
    """
    path = folder / RESULTS_FILE
    content = {"format_version": FORMAT_VERSION, **_plain(evaluation)}
    with telling(path, "cannot be written", mend="choose another place"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, allow_nan=False) + "\n").encode())
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(np.round(value, 6).tolist() if value.dtype.kind == "f" else value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return to_json(value)
