"""The results of an evaluation and their file: a value of each metric for every game and turn.

`results.json` holds everything that the report is made of besides the clips, so a report can be
rendered again, and other programs can use the values, without playing anything again.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from jaxtyping import Bool, Float, Int

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.judge.scores import CRITERIA, Agreement, JudgeScores
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate_known
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.serialization import array_field, read_json, to_json

RESULTS_FILE = "results.json"

Values = Mapping[str, Annotated[Float[np.ndarray, "g t"], array_field(float, 2)]]
"""Values by metric, one per game and turn; NaN where there is none."""


def _make_score(value: Any) -> float:
    if type(value) not in (int, float, type(None)):
        raise ValueError("expected a number or null")
    return math.nan if value is None else float(value)


Score = Annotated[float, pydantic.PlainValidator(_make_score)]
"""A number, NaN if it is unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemResult:
    """The games of one system and their scores.

    Attributes:
        name: Name in tables, different from every other system's.
        model: Folder of the model, or "toy"; folder of the games if they were played elsewhere.
        digest: Digest of the model; None: the games were played elsewhere.
        settings: Settings of the model in play, and the networks that scored it.
        values: Values by metric.
        folders: Folder of each game, relative to the report's folder; empty: none is kept.
        set_scores: Scores of metrics that take all clips together, such as FVD.
        reference: Reference values by name: upper bounds and baselines (`reference_scores`).
        skipped: The reason by group of metrics that could not be computed.
        notes: Sentences that a reader of the scores must know.
    """

    name: str
    model: str
    digest: str | None
    settings: Mapping[str, Any]
    values: Values
    folders: tuple[str, ...]
    set_scores: Mapping[str, Score] = dataclasses.field(default_factory=dict)
    reference: Mapping[str, Values] = dataclasses.field(default_factory=dict)
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def estimate(
        self,
        metric: str,
        where: Bool[np.ndarray, "g t"] | None = None,
        *,
        reference: str | None = None,
    ) -> Estimate | None:
        """Returns the mean over turns and its interval over games; None: there is no value.

        Args:
            metric: Name of the metric.
            where: Turns that count; None: all.
            reference: Name of the reference whose values count; None: the system's own.
        """
        values = self.values if reference is None else self.reference[reference]
        return estimate_known(values[metric], where) if metric in values else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A benchmark as some systems played it.

    Attributes:
        format_version: Version of the file.
        benchmark: Name of the benchmark.
        benchmark_digest: Digest of the games that were played.
        world: World of the benchmark.
        made_by: How its games were made.
        games: Names of the games.
        instructions: Instructions of each game, by turn.
        is_open: Turns that leave something to the turns before.
        motions: Kind of motion of each turn; "": unknown.
        expected: Motion level, social, entertainment and stamina of each turn; None: unknown.
        systems: The systems, in the order that was asked for.
        judge_scores: Scores of each judge.
        agreements: Agreement of two judges, by "A and B".
        judge_note: Why a judge gave no scores; None: none failed.
        run_config: Date, command, versions, hardware, seeds.
    """

    format_version: Literal[2] = 2
    benchmark: str
    benchmark_digest: str
    world: str
    made_by: str
    games: tuple[str, ...]
    instructions: tuple[tuple[str, ...], ...]
    is_open: Annotated[Bool[np.ndarray, "g t"], array_field(bool, 2)]
    motions: tuple[tuple[str, ...], ...]
    systems: tuple[SystemResult, ...]
    judge_scores: tuple[JudgeScores, ...] = ()
    agreements: Mapping[str, Agreement] = dataclasses.field(default_factory=dict)
    judge_note: str | None = None
    run_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Annotated[Int[np.ndarray, "g t 4"], array_field(int, 3)] | None = None

    @property
    def num_turns(self) -> int:
        """Number of turns of each game."""
        return self.is_open.shape[1]


def write_results(folder: Path, evaluation: Evaluation) -> Path:
    """Writes `results.json`; numbers that are not finite become null.

    Raises:
        UserError: The file cannot be written.
    """
    path = folder / RESULTS_FILE
    write_json(path, to_json(evaluation, leaf=numpy_leaf), indent=None)
    return path


def numpy_leaf(value: Any) -> Any:
    """Converts arrays and numbers of NumPy, for `to_json`; what is not finite becomes null."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        unknown = ~np.isfinite(value)
        value = value.astype(np.float64).round(6).astype(object)
        value[unknown] = None
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(folder: Path) -> Evaluation:
    """Reads `results.json`; null in place of a number becomes NaN.

    Values have six decimals, as they were written.

    Raises:
        UserError: The file is missing or damaged; names the field, what was expected and found.
    """
    path = folder / RESULTS_FILE
    hint = "expected what this version's `animegamer evaluate --out` wrote; evaluate again"
    return _fitted(read_json(path, Evaluation, hint=hint), str(path))


def _fitted(found: Evaluation, where: str) -> Evaluation:
    """Checks that all shapes match; arrays of no games get their shapes back.

    Raises:
        UserError: A field does not match the others.
    """
    games, turns = len(found.games), found.is_open.shape[1]

    def fit(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
        if array.size == 0 == math.prod(shape):
            return array.reshape(shape)
        if array.shape != shape:
            raise UserError(f"{where}: {name}: expected the shape {shape}, found {array.shape}")
        return array

    def fit_all(values: Values, name: str) -> Values:
        return {n: fit(v, (games, turns), f"{name}: {n}") for n, v in values.items()}

    for name in ("instructions", "motions"):
        if [len(of_game) for of_game in getattr(found, name)] != [turns] * games:
            raise UserError(f"{where}: {name}: expected {turns} of each of {games} games")
    systems, judge_scores = [], []
    for s in found.systems:
        if len(s.folders) not in (0, games):
            raise UserError(
                f"{where}: {s.name}: expected {games} folders or none, found {len(s.folders)}"
            )
        reference = {n: fit_all(v, f"{s.name}: {n}") for n, v in s.reference.items()}
        values = fit_all(s.values, s.name)
        systems.append(dataclasses.replace(s, values=values, reference=reference))
    for v in found.judge_scores:
        shape = (len(v.games), len(v.systems), len(CRITERIA))
        scores = fit(v.scores, shape, f"{v.model}: scores")
        judge_scores.append(dataclasses.replace(v, scores=scores))
    expected = found.expected
    return dataclasses.replace(
        found,
        is_open=fit(found.is_open, (games, turns), "is_open"),
        expected=None if expected is None else fit(expected, (games, turns, 4), "expected"),
        systems=tuple(systems),
        judge_scores=tuple(judge_scores),
    )
