"""The registry of metrics: definition, unit, source and the paper's score of each.

`formulas`, `lpips` and `video_distance` compute them; `suite` chooses those that a benchmark and
the files at hand allow. Metrics that the paper has are named as in its tables.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Group = Literal["states", "motion", "clip", "dreamsim", "lpips", "truth", "speed", "fvd", "jedi"]
"""Metrics that are chosen together, by the words of `--metrics`."""

GROUPS: Mapping[Group, str] = {
    "states": "predicted changes of the states, and the predicted motion level",
    "motion": "the clip's motion level by optical flow",
    "clip": "CLIP: frames against references and against text",
    "dreamsim": "DreamSim: frames against references",
    "lpips": "LPIPS: frames against true frames",
    "truth": "toy world only: what a classifier reads off the clips, and PSNR",
    "speed": "seconds per turn",
    "fvd": "Fréchet video distance between all clips and all true or given ones",
    "jedi": "JEDi: the same with another distance and other features",
}


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Name in tables.
        group: Group in `GROUPS`.
        better: Direction of better values.
        unit: Unit of the values.
        formula: Formula for the value of one turn.
        source: Publication that defines it.
        paper: The paper's score, on its own films and benchmark (paper, table 1).
        baseline: The best score among the paper's baselines there.
        backbone: Whether a network computes it: values from two networks are on two scales.
    """

    name: str
    group: Group
    better: Literal["higher", "lower"]
    unit: str
    formula: str
    source: str
    paper: float | None = None
    baseline: float | None = None
    backbone: bool = False


_SECTION = "AnimeGamer, section 4.2"
_OURS = "this project"
_READS = "1 if the classifier reads the expected {}, else 0"
_KEPT = "1 if the {} is read as in the game's first clip that shows it, else 0"
_AS_GIVEN = "1 if it is read as in the player's own picture, else 0"

_ALL = (  # name, group, better, unit, formula, source; the paper's score and its best baseline
    Metric("CLIP-I", "clip", "higher", "cosine, -1 to 1",
           "mean over frames of cos(CLIP(frame), CLIP(reference))",
           _SECTION, 0.8132, 0.7960, backbone=True),
    Metric("DreamSim", "dreamsim", "higher", "1 - distance, 0 to 1",
           "mean over frames of 1 - d(frame, reference)",
           f"{_SECTION}; Fu et al., NeurIPS 2023", 0.7403, 0.6416, backbone=True),
    Metric("CLIP-T", "clip", "higher", "cosine, -1 to 1",
           "mean over frames of cos(CLIP(frame), CLIP(caption))",
           _SECTION, 0.4161, 0.3339, backbone=True),
    Metric("ACC-F", "motion", "higher", "share of turns",
           "1 if level(flow of the clip) = expected level, else 0", _SECTION, 0.6744, 0.4249),
    Metric("MAE-F", "motion", "lower", "motion levels",
           "|level(flow of the clip) - expected level|", _SECTION, 0.4238, 0.7223),
    Metric("ACC-S", "states", "higher", "share of states",
           "mean over the three states of 1 if predicted = expected change, else 0",
           _SECTION, 0.6773, 0.6779),
    Metric("MAE-S", "states", "lower", "steps of a state",
           "mean over the three states of |predicted - expected change|",
           _SECTION, 0.5872, 0.5888),
    Metric("seconds", "speed", "lower", "s",
           "time of a batch's turn / games in the batch", _SECTION, 24.0, 25.0),
    Metric("ACC-L", "states", "higher", "share of turns",
           "1 if predicted level = expected level, else 0", _OURS),
    Metric("MAE-L", "states", "lower", "motion levels",
           "|predicted level - expected level|", _OURS),
    Metric("LPIPS", "lpips", "lower", "distance, 0 up",
           "mean over frames of d(frame, true frame), AlexNet",
           "Zhang et al., CVPR 2018, equation 1", backbone=True),
    Metric("PSNR", "truth", "higher", "dB",
           "10 log10(255^2 / mean squared error of the clip)", _OURS),
    Metric("character", "truth", "higher", "share of turns", _READS.format("character"), _OURS),
    Metric("place", "truth", "higher", "share of turns", _READS.format("place"), _OURS),
    Metric("time", "truth", "higher", "share of turns", _READS.format("time of day"), _OURS),
    Metric("all three", "truth", "higher", "share of turns",
           _READS.format("character, place and time"), _OURS),
    Metric("accessory kept", "truth", "higher", "share of turns",
           _KEPT.format("accessory of the character"), _OURS),
    Metric("variant kept", "truth", "higher", "share of turns",
           _KEPT.format("variant of the place"), _OURS),
    Metric("view kept", "truth", "higher", "share of turns",
           _KEPT.format("side and distance of the view"), _OURS),
    Metric("details kept", "truth", "higher", "share of details",
           "mean of the three over those that the turn shows again", _OURS),
    Metric("details by chance", "truth", "lower", "share of details",
           "the same, as another game first showed this character or place", _OURS),
    Metric("hair colour", "truth", "higher", "share of turns", _AS_GIVEN, _OURS),
    Metric("hair", "truth", "higher", "share of turns", _AS_GIVEN, _OURS),
    Metric("clothes", "truth", "higher", "share of turns", _AS_GIVEN, _OURS),
    Metric("looks", "truth", "higher", "share of turns",
           "1 if all of these that are seen are read as in the player's picture, else 0", _OURS),
    Metric("looks by chance", "truth", "lower", "share of turns",
           "the same, against the first clip of another game's own character", _OURS),
    Metric("FVD", "fvd", "lower", "squared features, 0 up",
           "Fréchet distance of Gaussians fitted to I3D's features of both sets",
           "Unterthiner et al., arXiv 1812.01717", backbone=True),
    Metric("JEDi", "jedi", "lower", "squared discrepancy x 100",
           "maximum mean discrepancy of V-JEPA's features of both sets",
           "Luo et al., arXiv 2410.05203", backbone=True),
)  # fmt: skip
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
"""Metric by name, in the order of tables."""

NAMED = ("character", "place", "time")
"""Attributes that instructions name, as `Parts` names them."""
DETAILS = ("accessory", "variant", "view")
"""Attributes of a turn that no instruction says, and that last."""
LOOKS = ("hair colour", "hair", "clothes")
"""Attributes of a player's own character, known by a picture only."""

CONTEXT = "all three"
"""The metric whose mean over open turns, which omit something, is the context accuracy."""
