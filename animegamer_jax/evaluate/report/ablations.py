"""A file of what training or playing without a part of the model gives (PAPER tables 3 and 4).

Whoever makes the rows writes it, and the report of an evaluation shows it:

    {"made": "how, and when",
     "rows": [{"name": "no warm-up", "part": "decoder",
               "scores": {"CLIP-I": {"mean": 0.83, "low": 0.81, "high": 0.85}},
               "paper": {"CLIP-I": 0.8306}}],
     "signs": ["no warm-up: CLIP-I -0.020 (-0.037), as in the paper"]}
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from animegamer_jax.bundle.config import from_json, to_json
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.strictjson import load
from animegamer_jax.storage.files import write_whole
from animegamer_jax.storage.paths import telling

Part = Literal["decoder", "game"]

TOY_ABLATIONS = Path(__file__).parents[2] / "assets" / "benchmarks" / "toy-ablations.json"
"""Of the toy world, where `scripts/toy/ablations.py` has written them."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A mean and its 95 % interval over games."""

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One row.

    Attributes:
        name: what is left out; the first of a part is the whole.
        part: "decoder": clips of true shot representations; "game": whole games.
        scores: by metric, as in `catalogue.METRICS`; of open turns as "open turns: NAME".
        paper: the paper's figures for the same row, on its films and its benchmark.
    """

    name: str
    part: Part
    scores: dict[str, Score]
    paper: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablations:
    """The rows.

    Attributes:
        made: how and when, in a sentence or two.
        rows: in the order of tables.
        signs: a line a row: whether it is worse than the first where the paper's is.
    """

    made: str
    rows: tuple[AblationRow, ...]
    signs: tuple[str, ...] = ()


def write_ablations(path: Path, ablations: Ablations) -> None:
    """Writes a file that `read_ablations` reads back equal.

    Raises:
        UserError: the disk refuses.
        ValueError: a score is not finite.
    """
    text = json.dumps(to_json(ablations), indent=1, allow_nan=False)
    with telling(path, "cannot be written", mend="choose another place"):
        write_whole(path, (text + "\n").encode())


def read_ablations(path: Path) -> Ablations:
    """Reads such a file.

    Raises:
        UserError: in one line: file and field, what was expected and what was found.
    """
    with telling(path, "cannot be read", mend="give a file that `write_ablations` wrote"):
        content = path.read_bytes()
    try:
        found = load(content.decode())
    except ValueError as error:
        raise UserError(f"{path}: no JSON ({error}): make it anew") from None
    return from_json(Ablations, found, str(path))
