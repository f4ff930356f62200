"""The results of an evaluation and their file: a value of each metric for every game and turn.

`results.json` holds everything that the report is made of besides the clips, so a report can be
rendered again, and other programs can use the values, without playing anything again.
"""

import collections.abc
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import AbstractArray, Bool, Float, Int

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.judge.scores import (
    CRITERIA,
    Agreement,
    JudgeScores,
)
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate_known
from animegamer_jax.evaluate.strictjson import fields, load, shown, some
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling
from animegamer_jax.storage.serialization import from_json, to_json

FORMAT_VERSION = 2
RESULTS_FILE = "results.json"

Values = Mapping[str, Float[np.ndarray, "g t"]]
"""Values by metric, one per game and turn; NaN where there is none."""


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
    set_scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
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

    benchmark: str
    benchmark_digest: str
    world: str
    made_by: str
    games: tuple[str, ...]
    instructions: tuple[tuple[str, ...], ...]
    is_open: Bool[np.ndarray, "g t"]
    motions: tuple[tuple[str, ...], ...]
    systems: tuple[SystemResult, ...]
    judge_scores: tuple[JudgeScores, ...] = ()
    agreements: Mapping[str, Agreement] = dataclasses.field(default_factory=dict)
    judge_note: str | None = None
    run_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Int[np.ndarray, "g t 4"] | None = None

    @property
    def num_turns(self) -> int:
        """Number of turns of each game."""
        return self.is_open.shape[1]


def write_results(folder: Path, evaluation: Evaluation) -> Path:
    """Writes `results.json`; numbers that are not finite become null.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / RESULTS_FILE
    content = {"format_version": FORMAT_VERSION, **_plain(evaluation)}
    with telling(path, "cannot be written", mend="choose another place"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, allow_nan=False) + "\n").encode())
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        is_real = value.dtype.kind == "f"
        return _plain((value.astype(np.float64).round(6) if is_real else value).tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return to_json(value)


def read_results(folder: Path) -> Evaluation:
    """Reads `results.json`; null in place of a number becomes NaN.

    Values have six decimals, as they were written.

    Raises:
        UserError: the file is missing or damaged; names the field, what was expected and found.
    """
    path = folder / RESULTS_FILE
    with telling(path, "cannot be read", mend="give the folder of an evaluation"):
        content = path.read_bytes()
    try:
        found = load(content.decode())
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}): evaluate again") from None
    version = found.get("format_version") if isinstance(found, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version: expected {FORMAT_VERSION}, found {shown(version)}: evaluate "
            "again, or read it with the version that wrote it"
        )
    del found["format_version"]
    return _fitted(_read_fields(Evaluation, found, str(path)), str(path))


# Not nested in `_read`: type checks in tests would compile them again at every call.


def _read(kind: Any, value: Any, where: str) -> Any:
    """Returns a value of the expected type, the inverse of `_plain`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [a for a in arguments if a is not type(None)]
        return _read(inner, value, where)
    if isinstance(kind, type) and issubclass(kind, AbstractArray):
        return _array(kind, value, where)
    if kind is float and value is None:
        return math.nan
    if origin is tuple:
        return tuple(
            _read(arguments[0], item, f"{where}[{number}]")
            for number, item in enumerate(some(value, where, empty=True))
        )
    if origin in (dict, collections.abc.Mapping):
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object, found {shown(value)}")
        return {name: _read(arguments[1], item, f"{where}: {name}") for name, item in value.items()}
    if dataclasses.is_dataclass(kind):
        make: Any = kind
        return make(**_read_fields(kind, value, where))
    return from_json(kind, value, where)


def _read_fields(kind: Any, value: Any, where: str) -> dict[str, Any]:
    """Reads the fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    given = fields(value, where, [field.name for field in dataclasses.fields(kind)])
    return {name: _read(hints[name], item, f"{where}: {name}") for name, item in given.items()}


def _array(kind: Any, value: Any, where: str) -> np.ndarray:
    """Reads an array with the type and number of dimensions of a jaxtyping annotation."""
    dimensions, dtype = len(kind.dims), np.dtype(kind.dtypes[-1].strip("_"))
    allowed = _JSON_TYPES[dtype.kind]
    found = np.array(value, dtype=object)
    if not found.size and isinstance(value, list):
        return np.zeros((0,) * dimensions, dtype)
    if found.ndim != dimensions or any(type(item) not in allowed for item in found.flat):
        raise UserError(
            f"{where}: expected lists of {dtype.name} in {dimensions} dimensions, found "
            f"{shown(value)}"
        )
    return found.astype(dtype)


_JSON_TYPES = {"b": (bool,), "i": (int,), "f": (float, int, types.NoneType)}  # by numpy's kinds


def _fitted(found: dict[str, Any], where: str) -> Evaluation:
    """Builds an evaluation from its fields; arrays of no games get their shapes back.

    Raises:
        UserError: a field does not fit the others.
    """
    games, turns = len(found["games"]), found["is_open"].shape[1]

    def fit(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
        if array.size == 0 == math.prod(shape):
            return array.reshape(shape)
        if array.shape != shape:
            raise UserError(f"{where}: {name}: expected the shape {shape}, found {array.shape}")
        return array

    def fit_all(values: Values, name: str) -> Values:
        return {n: fit(v, (games, turns), f"{name}: {n}") for n, v in values.items()}

    for name in ("instructions", "motions"):
        if [len(of_game) for of_game in found[name]] != [turns] * games:
            raise UserError(f"{where}: {name}: expected {turns} of each of {games} games")
    systems, judge_scores = [], []
    for s in found["systems"]:
        if len(s.folders) not in (0, games):
            raise UserError(
                f"{where}: {s.name}: expected {games} folders or none, found {len(s.folders)}"
            )
        reference = {n: fit_all(v, f"{s.name}: {n}") for n, v in s.reference.items()}
        values = fit_all(s.values, s.name)
        systems.append(dataclasses.replace(s, values=values, reference=reference))
    for v in found["judge_scores"]:
        shape = (len(v.games), len(v.systems), len(CRITERIA))
        scores = fit(v.scores, shape, f"{v.model}: scores")
        judge_scores.append(dataclasses.replace(v, scores=scores))
    found["is_open"] = fit(found["is_open"], (games, turns), "is_open")
    if found["expected"] is not None:
        found["expected"] = fit(found["expected"], (games, turns, 4), "expected")
    found["systems"], found["judge_scores"] = tuple(systems), tuple(judge_scores)
    return Evaluation(**found)
