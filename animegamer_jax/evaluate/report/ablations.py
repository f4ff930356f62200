"""Ablations: a file of scores of training or playing without a part (paper, tables 3 and 4).

Any program can write the file; the report of an evaluation shows it:

    {"made": "how, and when",
     "rows": [{"name": "no warm-up", "part": "decoder",
               "scores": {"CLIP-I": {"mean": 0.83, "low": 0.81, "high": 0.85}},
               "paper": {"CLIP-I": 0.8306}}],
     "signs": ["no warm-up: CLIP-I -0.020 (-0.037), as in the paper"]}
"""

import dataclasses
from pathlib import Path
from typing import Literal

from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.serialization import read_json, to_json

Part = Literal["decoder", "game"]

_SHIPPED = Path(__file__).parents[2] / "assets" / "benchmarks"


@dataclasses.dataclass(frozen=True)
class Score:
    """A mean and its 95 % interval over games."""

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One row of the table.

    Attributes:
        name: What is missing; the first row of a part is complete.
        part: "decoder": clips of true shot representations; "game": whole games.
        scores: Scores by metric, named as in `registry.METRICS`; on open turns "open turns: NAME".
        paper: The paper's scores for the same row, on its own films and benchmark.
    """

    name: str
    part: Part
    scores: dict[str, Score]
    paper: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablations:
    """The rows and what they say.

    Attributes:
        made: How and when they were made, in a sentence or two.
        rows: The rows, in the order of the table.
        signs: A sentence per row: whether it is worse than the first row where the paper's is.
    """

    made: str
    rows: tuple[AblationRow, ...]
    signs: tuple[str, ...] = ()


def shipped_ablations(world: str) -> Path | None:
    """Returns the file of ablations that comes with the code for a world; None: there is none."""
    path = _SHIPPED / f"{world}-ablations.json"
    return path if path.exists() else None


def write_ablations(path: Path, ablations: Ablations) -> None:
    """Writes a file for `read_ablations`.

    Raises:
        UserError: The file cannot be written.
        ValueError: A score is not finite.
    """
    write_json(path, to_json(ablations))


def read_ablations(path: Path) -> Ablations:
    """Reads a file of ablations.

    Raises:
        UserError: The file is missing or damaged; names the field, what was expected and found.
    """
    return read_json(path, Ablations, hint="give a file that `write_ablations` wrote")
