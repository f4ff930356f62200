"""Every metric of a report: what it is, what it is of, and what the paper has for it.

The functions are in `metrics`, `lpips` and `toyworld`; `scoring` says which of them can be had for
a benchmark. Names are those of the paper's tables where it has the metric.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Group = Literal["states", "motion", "clip", "dreamsim", "lpips", "truth", "speed", "fvd", "jedi"]
"""What is asked for together: the words of `--metrics`."""

GROUPS: Mapping[Group, str] = {
    "states": "changes of the states, and the motion level that the model told",
    "motion": "the motion level that the clip shows, by optical flow",
    "clip": "CLIP: frames beside references and beside text",
    "dreamsim": "DreamSim: frames beside references",
    "lpips": "LPIPS: frames beside true frames",
    "truth": "toy world only: who, where and when as read off the clip, and PSNR",
    "speed": "seconds a turn",
    "fvd": "Fréchet video distance: all clips beside all true or given ones",
    "jedi": "JEDi: the same with another distance and other features",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: in tables.
        group: that it belongs to.
        better: which way is better.
        unit: of its values.
        formula: of the value of one turn.
        source: where it is defined.
        paper: the paper's own figure, on its films and its benchmark (PAPER table 1).
        baseline: of the best of the paper's baselines there.
        backbone: whether its values depend on a network, so that those of two networks are of two
            scales.
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
_OURS = "our own"

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="CLIP-I",
            group="clip",
            better="higher",
            unit="cosine, -1 to 1",
            formula="mean over frames of cos(CLIP(frame), CLIP(reference))",
            source=_SECTION,
            paper=0.8132,
            baseline=0.7960,
            backbone=True,
        ),
        Metric(
            name="DreamSim",
            group="dreamsim",
            better="higher",
            unit="1 - distance, 0 to 1",
            formula="mean over frames of 1 - d(frame, reference)",
            source=f"{_SECTION}; Fu et al., NeurIPS 2023",
            paper=0.7403,
            baseline=0.6416,
            backbone=True,
        ),
        Metric(
            name="CLIP-T",
            group="clip",
            better="higher",
            unit="cosine, -1 to 1",
            formula="mean over frames of cos(CLIP(frame), CLIP(caption))",
            source=_SECTION,
            paper=0.4161,
            baseline=0.3339,
            backbone=True,
        ),
        Metric(
            name="ACC-F",
            group="motion",
            better="higher",
            unit="share of turns",
            formula="1 if level(flow of the clip) = expected level, else 0",
            source=_SECTION,
            paper=0.6744,
            baseline=0.4249,
        ),
        Metric(
            name="MAE-F",
            group="motion",
            better="lower",
            unit="motion levels",
            formula="|level(flow of the clip) - expected level|",
            source=_SECTION,
            paper=0.4238,
            baseline=0.7223,
        ),
        Metric(
            name="ACC-S",
            group="states",
            better="higher",
            unit="share of states",
            formula="mean over the three states of 1 if predicted = expected change, else 0",
            source=_SECTION,
            paper=0.6773,
            baseline=0.6779,
        ),
        Metric(
            name="MAE-S",
            group="states",
            better="lower",
            unit="steps of a state",
            formula="mean over the three states of |predicted - expected change|",
            source=_SECTION,
            paper=0.5872,
            baseline=0.5888,
        ),
        Metric(
            name="seconds",
            group="speed",
            better="lower",
            unit="s",
            formula="time of the batch's turn / games in the batch",
            source=_SECTION,
            paper=24.0,
            baseline=25.0,
        ),
        Metric(
            name="ACC-L",
            group="states",
            better="higher",
            unit="share of turns",
            formula="1 if the level that the model told = expected level, else 0",
            source=_OURS,
        ),
        Metric(
            name="MAE-L",
            group="states",
            better="lower",
            unit="motion levels",
            formula="|level that the model told - expected level|",
            source=_OURS,
        ),
        Metric(
            name="LPIPS",
            group="lpips",
            better="lower",
            unit="distance, 0 up",
            formula="mean over frames of d(frame, true frame), AlexNet",
            source="Zhang et al., CVPR 2018, equation 1",
            backbone=True,
        ),
        Metric(
            name="PSNR",
            group="truth",
            better="higher",
            unit="dB",
            formula="10 log10(255^2 / mean squared error of the clip)",
            source=_OURS,
        ),
        *(
            Metric(
                name=name,
                group="truth",
                better="higher",
                unit="share of turns",
                formula=f"1 if {read} = the expected one, else 0",
                source=_OURS,
            )
            for name, read in (
                ("character", "the character read off the clip"),
                ("place", "the place read off the clip"),
                ("time", "the time of day read off the clip"),
                ("all three", "each of character, place and time"),
            )
        ),
        Metric(
            name="FVD",
            group="fvd",
            better="lower",
            unit="squared features, 0 up",
            formula="Fréchet distance of the Gaussians through I3D's features of both sets",
            source="Unterthiner et al., arXiv 1812.01717",
            backbone=True,
        ),
        Metric(
            name="JEDi",
            group="jedi",
            better="lower",
            unit="squared discrepancy x 100",
            formula="maximum mean discrepancy of V-JEPA's features of both sets",
            source="Luo et al., arXiv 2410.05203",
            backbone=True,
        ),
    )
}
"""By name, in the order of tables. On open turns, "all three" is the context accuracy."""

CONTEXT = "all three"
"""The metric whose mean over open turns, which leave things out, is the context accuracy."""
