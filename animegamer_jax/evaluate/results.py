"""What an evaluation found, and its file: a value of each metric for every game and turn.

`results.json` holds all that the report is made of, so that a page can be drawn again, and other
programs can go on from the values, without playing anything again.
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

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.judge.scores import (
    CRITERIA,
    Agreement,
    JudgeScores,
)
from animegamer_jax.evaluate.metrics.formulas import Estimate, estimate
from animegamer_jax.evaluate.strictjson import fields, load, shown, some
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling

FORMAT_VERSION = 2
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
        folders: of each game as `Game` wrote it, beneath the report's folder; empty: none is kept.
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
        expected: motion level, social, entertainment and stamina of each turn; None: not known.
        systems: in the order that they were asked for.
        judge_scores: scores of each judge.
        agreements: agreement of two judges, by "A and B".
        judge_note: why a judge gave no scores; None if none failed.
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
    judge_scores: tuple[JudgeScores, ...] = ()
    agreements: Mapping[str, Agreement] = dataclasses.field(default_factory=dict)
    judge_note: str | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Int[np.ndarray, "g t 4"] | None = None

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
    """The inverse of `write_results`: null where a number is expected becomes NaN.

    Values come back with six digits behind the point, as they were written.

    Raises:
        UserError: in one line: file and field, what was expected and what was found.
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
            f"{path}: format_version: expected {FORMAT_VERSION}, found {shown(version)}: read it "
            "with the version that wrote it, or evaluate again"
        )
    del found["format_version"]
    return _fitted(_read_fields(Evaluation, found, str(path)), str(path))


# Not inside `_read`: type checks in tests would compile them anew at every call.


def _read(kind: Any, value: Any, where: str) -> Any:
    """The inverse of `_plain`, by the type that is expected."""
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
    """The fields of a dataclass."""
    hints = typing.get_type_hints(kind)
    given = fields(value, where, [field.name for field in dataclasses.fields(kind)])
    return {name: _read(hints[name], item, f"{where}: {name}") for name, item in given.items()}


def _array(kind: Any, value: Any, where: str) -> np.ndarray:
    """An array of a jaxtyping annotation's kind and number of dimensions."""
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
    """An evaluation of these fields; arrays of no games get their shapes back.

    Raises:
        UserError: names what does not fit the rest.
    """
    games, turns = len(found["games"]), found["is_open"].shape[1]

    def fit(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
        if array.size == 0 == math.prod(shape):
            return array.reshape(shape)
        if array.shape != shape:
            raise UserError(f"{where}: {name}: expected the shape {shape}, found {array.shape}")
        return array

    told = [len(of_game) for of_game in found["instructions"]]
    if told != [turns] * games:
        raise UserError(f"{where}: instructions: expected {turns} of each of {games} games")
    systems, judge_scores = [], []
    for s in found["systems"]:
        values = {n: fit(v, (games, turns), f"{s.name}: {n}") for n, v in s.values.items()}
        if len(s.folders) not in (0, games):
            raise UserError(
                f"{where}: {s.name}: expected {games} folders or none, found {len(s.folders)}"
            )
        systems.append(dataclasses.replace(s, values=values))
    for v in found["judge_scores"]:
        shape = (len(v.games), len(v.systems), len(CRITERIA))
        scores = fit(v.scores, shape, f"{v.model}: scores")
        judge_scores.append(dataclasses.replace(v, scores=scores))
    found["is_open"] = fit(found["is_open"], (games, turns), "is_open")
    if found["expected"] is not None:
        found["expected"] = fit(found["expected"], (games, turns, 4), "expected")
    found["systems"], found["judge_scores"] = tuple(systems), tuple(judge_scores)
    return Evaluation(**found)
